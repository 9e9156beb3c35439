package cli

import "github.com/spf13/cobra"

func newEgressCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "egress",
		Short:   "Reach hosts outside of the cluster",
		Long:    "Reach hosts outside of the cluster.",
		Example: "  pilaster egress who 2001:db8:7:3:0:ff:100:2f",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(newEgressWho(env))
	return cmd
}
