package cli

import (
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/sharing"
	"pilaster.io/pilaster/internal/bench/traffic"
)

func newBenchOffloadCommand(env Env) *cobra.Command {
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "offload",
		Short: "Measure what load sharing costs each node, and model its gain",
		Long: `Measure the time of each program on the way of a TCP transaction to a container of network nimitz, with and
without a frontend that looks up the rules, for rule sets of 1 rule to 262,144 CIDRs. Three nodes, the sender's, the
backend and the frontend, are namespaces of this machine. Transactions connect from random addresses and new ports, so
that each needs a lookup.

From these times the command computes the gain with 1, 2, 4 and 8 frontends. That is a model, not a measurement: nothing
but the programs limits the nodes. The report has the gain of each rule set, and a curve over the time of a lookup with
the point of the Nezha paper on it; the answers of a frontend per second by rules and size of packets, beside table A1
of the paper; and how many tenants' rules fit on a node and its frontends.

A folder given with -o gets report.json, and report.html with plots. Run it on an idle machine.
docs/results/offload.md explains the figures.`,
		Example: "  pilaster bench offload --quick -o results\n  pilaster bench offload --full -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			o := map[string]func() sharing.Options{
				"quick": sharing.Quick, "full": sharing.Full, "smoke": sharing.Smoke,
			}[form()]()
			if err := requireRoot("bench"); err != nil {
				return err
			}
			if o.CPU, err = traffic.LastCPU(); err != nil {
				return err
			}
			o.Dir, o.Seed, o.Progress = benchDir, uint64(time.Now().UnixNano()), progressOf(env, "step")
			return runReport(env, to, func() (benchReport, bool, error) {
				r, err := sharing.Run(c.Context(), o)
				return r, err == nil, err
			})
		},
	}
	form = bindForms(c,
		formFlag{"quick", "two minutes: fewer rounds (default)"},
		formFlag{"full", "ten minutes"},
		formFlag{"smoke", smokeForm})
	bindReport(c, &to)
	return c
}
