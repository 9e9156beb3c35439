package cli

import (
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func newRoot(env Env) *cobra.Command {
	root := &cobra.Command{
		Use:           "pilaster",
		Short:         "A container network in which a container's IPv6 address is its location",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &exitError{ExitUsage, err} })
	wait := patience(10 * time.Second)
	root.PersistentFlags().Var(&wait, timeoutFlag, "how long an agent or orchestrator may take to answer a call; streams take as long as they last")
	_ = root.RegisterFlagCompletionFunc(timeoutFlag, cobra.NoFileCompletions)
	root.AddCommand(newAddressCommand(env))
	root.AddCommand(newBenchCommand(env))
	root.AddCommand(newExplainCommand(env))
	root.AddCommand(newOrchestratorCommand(env))
	root.AddCommand(newTenantCommand(env))
	root.AddCommand(newNodeCommand(env))
	root.AddCommand(newPreflightCommand(env))
	root.AddCommand(newLabCommand(env))
	root.AddCommand(newDemoCommand(env))
	root.AddCommand(newVersionCommand(env))
	root.AddCommand(newAgentCommand(env))
	root.AddCommand(newEndpointCommand(env))
	root.AddCommand(newStatusCommand(env))
	root.AddCommand(newMonitorCommand(env))
	root.AddCommand(newSysdumpCommand(env))
	strict(root)
	return root
}

// strict makes every mistake in arguments a usage error, also an unknown command of a family.
func strict(c *cobra.Command) {
	for _, sub := range c.Commands() {
		strict(sub)
	}
	if !c.Runnable() {
		c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		c.Args = cobra.NoArgs
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
			return usage("the arguments do not fit; usage: %s", strings.TrimSuffix(c.UseLine(), " [flags]"))
		}
	}
}
