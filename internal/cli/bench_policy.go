package cli

import (
	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
)

func newBenchPolicyCommand(env Env) *cobra.Command {
	var quick, full, smoke bool
	var to reportPlace
	c := &cobra.Command{
		Use:   "policy",
		Short: "Compare containers under 0 to 10,000 rules, with netfilter's same rules beside them",
		Long: `Compare the speed of containers under a NetworkPolicy of 1 to 10,000 rules, the last of which admits the client, with
those of a tenant without policies; and, beside it, containers that are routed to, behind the same rules of netfilter. All are
measured in one run, in turn and in random order, as "pilaster bench datapath" does it. Then first packets, for which the rules
are asked: what the program takes for one, by rules and by size (Nezha's table A1).

It fails where a policy costs more than is asked, and where the run was too noisy to tell. Run it on a machine that does nothing
else. docs/reference/benchmarks.md explains scenarios, metrics and method.`,
		Example: "  pilaster bench policy --quick -o results\n  pilaster bench policy --full -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := bench.QuickPolicy()
			switch {
			case full:
				o = bench.FullPolicy()
			case smoke:
				o = bench.SmokePolicy()
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			return reportBench(c.Context(), env, o, false, to)
		},
	}
	f := c.Flags()
	f.BoolVar(&quick, "quick", false, "three minutes (default)")
	f.BoolVar(&full, "full", false, "fifteen minutes: more rounds, and more traffic")
	f.BoolVar(&smoke, "smoke", false, "seconds: does it all work? On a busy machine too; its figures mean little")
	c.MarkFlagsMutuallyExclusive("quick", "full", "smoke")
	bindReport(c, &to)
	return c
}
