package cli

import (
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/version"
)

// versionView describes this binary: its release, and the data about its source that the Go linker has recorded.
type versionView struct {
	Version  string `json:"version"`            // the release
	Revision string `json:"revision,omitempty"` // commit of the source
	Modified bool   `json:"modified"`           // the source had uncommitted changes
	Time     string `json:"time,omitempty"`     // of the commit
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func buildVersion() versionView {
	b := version.Current()
	return versionView{
		Version: b.Release, Revision: b.Commit, Modified: b.Modified, Time: b.Time,
		Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
}

// programVersion is the version that daemons report to each other: release and commit.
func programVersion() string { return version.Current().String() }

func newVersionCommand(env Env) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show the release and the commit of this binary",
		Example: "  pilaster version -o json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return out.print(env.Stdout, buildVersion(), func(w io.Writer) {
				b := version.Current()
				fmt.Fprintf(w, "pilaster %s\n", b.Describe())
				if b.Time != "" {
					fmt.Fprintf(w, "committed %s\n", b.Time)
				}
				fmt.Fprintf(w, "built with %s for %s/%s\n", runtime.Version(), runtime.GOOS, runtime.GOARCH)
			})
		},
	}
	out.bind(cmd)
	return cmd
}
