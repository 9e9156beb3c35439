package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"pilaster.io/pilaster/internal/version"
)

func newRoot(env Env) *cobra.Command {
	root := &cobra.Command{
		Use:   "pilaster",
		Short: "A container network in which a container's IPv6 address is its location",
		Long: `A container network in which a container's IPv6 address is its location.

Exit status of all commands: 0 for success; 1 if the command or a check failed; 2 for wrong arguments,
nothing was done; 3 if the agent or orchestrator does not answer. 'lab exec' returns the status of the
command that it runs.`,
		Example: "  pilaster demo     # a demonstration in namespaces of this machine\n  pilaster status   # " +
			"of this node",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		Version:       buildVersion().Version, // for --version
	}
	root.SetVersionTemplate("pilaster {{.Version}}\n")
	root.SetIn(env.Stdin)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	root.SetFlagErrorFunc(badFlag)
	wait := patience(10 * time.Second)
	root.PersistentFlags().
		Var(&wait, timeoutFlag, "timeout of a call to an agent or orchestrator; does not apply to streams")
	_ = root.RegisterFlagCompletionFunc(timeoutFlag, cobra.NoFileCompletions)
	root.AddCommand(newAddressCommand(env))
	root.AddCommand(newBenchCommand(env))
	root.AddCommand(newSimCommand(env))
	root.AddCommand(newExplainCommand(env))
	root.AddCommand(newWhyCommand(env))
	root.AddCommand(newTraceCommand(env))
	root.AddCommand(newOrchestratorCommand(env))
	root.AddCommand(newTenantCommand(env))
	root.AddCommand(newPolicyCommand(env))
	root.AddCommand(newRegionCommand(env))
	root.AddCommand(newOffloadCommand(env))
	root.AddCommand(newEVPNCommand(env))
	root.AddCommand(newBGPCommand(env))
	root.AddCommand(newServiceCommand(env))
	root.AddCommand(newEgressCommand(env))
	root.AddCommand(newUnderlayCommand(env))
	root.AddCommand(newNodeCommand(env))
	root.AddCommand(newPreflightCommand(env))
	root.AddCommand(newLabCommand(env))
	root.AddCommand(newDemoCommand(env))
	root.AddCommand(newVersionCommand(env))
	root.AddCommand(newAgentCommand(env))
	root.AddCommand(newAccelerateCommand(env))
	root.AddCommand(newEndpointCommand(env))
	root.AddCommand(newStatusCommand(env))
	root.AddCommand(newSteeringCommand(env))
	root.AddCommand(newMetricsCommand(env))
	root.AddCommand(newMonitorCommand(env))
	root.AddCommand(newSysdumpCommand(env))
	root.InitDefaultCompletionCmd() // add them here, so that strict changes them too
	root.InitDefaultHelpCmd()
	if c, _, err := root.Find([]string{"completion"}); err == nil {
		c.Example = "  pilaster completion bash > /etc/bash_completion.d/pilaster"
	}
	strict(root)
	return root
}

// badFlag replaces the error of a flag's parser by an error that names the valid values.
func badFlag(c *cobra.Command, err error) error {
	var bad *pflag.InvalidValueError
	if errors.As(err, &bad) { // pflag has no name for the type of a TextVar; ours are prefixes
		takes := map[string]string{"int": "a whole number", "intSlice": "whole numbers with commas between them",
			"uint64": "a whole number, 0 or more", "duration": "a duration such as 10s or 1m",
			"": "a prefix such as fd70:696c:6100::/40"}[bad.GetFlag().Value.Type()]
		if takes != "" {
			return usage("--%s %q: use %s", bad.GetFlag().Name, bad.GetValue(), takes)
		}
		return usage("%w", err)
	}
	return usage("%w; see %s --help", err, c.CommandPath())
}

// missing turns an error about a missing flag into a usage error.
func missing(c *cobra.Command, err error) error {
	if text := err.Error(); strings.HasPrefix(text, "required flag") ||
		strings.HasPrefix(text, "if any flags in the group") ||
		strings.HasPrefix(text, "at least one of the flags in the group") {
		return usage("%w; see %s --help", err, c.CommandPath())
	}
	return err
}

// strict turns all errors about arguments into usage errors, including those about unknown subcommands.
func strict(c *cobra.Command) {
	for _, sub := range c.Commands() {
		strict(sub)
	}
	if !c.Runnable() {
		c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		c.Args = cobra.NoArgs
	}
	if c.Name() == "help" {
		c.Args = func(c *cobra.Command, args []string) error {
			if _, rest, err := c.Root().Find(args); err != nil || len(rest) > 0 {
				return usage("there is no command %q; see pilaster --help", strings.Join(args, " "))
			}
			return nil
		}
		return
	}
	// Complete file names only for commands that take a file.
	if c.ValidArgsFunction == nil && !strings.Contains(c.Use, "FILE") && !strings.Contains(c.Use, "COMMAND") {
		c.ValidArgsFunction = cobra.NoFileCompletions
	}
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			err := check(c, args)
			switch {
			case err == nil:
				return nil
			case c.HasSubCommands():
				return usage("%w; see %s --help", err, c.CommandPath())
			}
			return usage("wrong number of arguments; usage: %s", strings.TrimSuffix(c.UseLine(), " [flags]"))
		}
	}
}

// namedFlag adds a flag for the name of a tenant or of a node, with completion.
func namedFlag(cmd *cobra.Command, to *string, flag, usage string, ask func(context.Context) ([]string, error)) {
	cmd.Flags().Var((*filled)(to), flag, usage)
	offered := names(ask)
	_ = cmd.RegisterFlagCompletionFunc(
		flag,
		func(c *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return offered(c, nil, typed)
		},
	)
}

// filled is a flag that rejects an empty value, because an unset variable of a script must not select all tenants.
type filled string

func (f *filled) String() string { return string(*f) }
func (f *filled) Type() string   { return "string" }
func (f *filled) Set(text string) error {
	if text == "" {
		return errors.New("it is empty; omit it, or set a value")
	}
	*f = filled(text)
	return nil
}

// addressFlag adds a required flag for an address.
func addressFlag(cmd *cobra.Command, to *string, flag, usage string) {
	cmd.Flags().StringVar(to, flag, "", usage)
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.NoFileCompletions)
	_ = cmd.MarkFlagRequired(flag)
}

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
