package cli

import (
	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
)

func newBenchPolicyCommand(env Env) *cobra.Command {
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "policy",
		Short: "Compare containers with 0 to 10,000 policy rules, and netfilter with the same rules",
		Long: `Compare the speed of containers under a NetworkPolicy of 1 to 10,000 rules, the last of which admits the
client, with that of a tenant without policies, and with routed containers behind the same rules of netfilter. All are
measured in one run, in turn and in random order, as "pilaster bench datapath" does. The command then measures first
packets, which need a lookup of the rules: the program's run time for one, by number of rules and by size (table A1 of
the Nezha paper).

The command fails if a policy costs more than the gate allows, or if the run was too noisy to decide. Run it on an idle
machine. docs/reference/benchmarks.md explains scenarios, metrics and method.`,
		Example: "  pilaster bench policy --quick -o results\n  pilaster bench policy --full -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := requireRoot("bench"); err != nil {
				return err
			}
			forms := map[string]func() bench.Options{
				"quick": bench.QuickPolicy, "full": bench.FullPolicy, "smoke": bench.SmokePolicy,
			}
			return reportBench(c.Context(), env, forms[form()](), false, to)
		},
	}
	form = bindForms(c,
		formFlag{"quick", "three minutes (default)"},
		formFlag{"full", "fifteen minutes: more rounds, and more traffic"},
		formFlag{"smoke", smokeForm})
	bindReport(c, &to)
	return c
}
