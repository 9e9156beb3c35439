package cli

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// versionView is what is known of this binary, from what the Go linker wrote into it.
type versionView struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"` // of the source
	Modified bool   `json:"modified"`           // the source had changes beside it
	Time     string `json:"time,omitempty"`     // of the revision
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func buildVersion() versionView {
	v := versionView{Version: "unknown", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	v.Version = info.Main.Version
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		case "vcs.time":
			v.Time = s.Value
		}
	}
	return v
}

// programVersion is what daemons tell each other.
func programVersion() string { return buildVersion().Version }

func newVersionCommand(env Env) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show what this binary was built from",
		Example: "  pilaster version -o json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := buildVersion()
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(w, "pilaster %s (%s, %s)\n", v.Version, v.Go, v.Platform)
				if v.Revision != "" {
					fmt.Fprintf(w, "source %s of %s, changed: %t\n", v.Revision, v.Time, v.Modified)
				}
			})
		},
	}
	out.bind(cmd)
	return cmd
}
