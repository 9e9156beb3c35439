package cli

import (
	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/suites"
)

func newBenchEgressCommand(env Env) *cobra.Command {
	var flags pathFlags
	var form func() string
	forms := map[string]func() bench.Options{
		"quick": suites.QuickEgress, "full": suites.FullEgress, "smoke": suites.SmokeEgress,
	}
	known := suites.FullEgress()
	c := &cobra.Command{
		Use:   "egress",
		Short: "Compare egress and egress gateways with traffic between containers, and with ip6tables",
		Long: `Compare containers of netpila that talk to a host outside of the cluster, directly and by an egress
gateway, with containers that talk to each other over the same link, and with what the kernel has for it on the same
topology: routed containers behind NPTv6 (ip6tables SNPT and DNPT) and behind MASQUERADE on a second node. All are
measured in one run, in turn and in random order, as "pilaster bench datapath" does.

With --quick and --full the command fails if egress does not reach 0.97 of the TCP_RR between containers, and the
TCP_CRR of a tenant with policies, or an egress gateway not the TCP_RR and TCP_CRR of MASQUERADE, or if the run was too
noisy to decide. --smoke has no limits. ip6tables must be installed. Run it on an idle machine.
docs/results/egress.md explains the figures.

` + namesOf(known.Scenarios, known.Metrics),
		Example: "  pilaster bench egress --quick -o results\n" +
			"  pilaster bench egress --scenarios egress-gateway,egress-masquerade --metrics TCP_CRR",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := forms[form()]()
			if err := flags.apply(&o, known); err != nil {
				return err
			}
			return flags.measure(c.Context(), env, o)
		},
	}
	form = bindForms(c,
		formFlag{"quick", "two minutes (default)"},
		formFlag{"full", "five minutes: more rounds"},
		formFlag{"smoke", smokeForm})
	flags.bind(c, known)
	return c
}
