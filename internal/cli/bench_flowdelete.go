package cli

import (
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/suites"
)

func newBenchFlowDeleteCommand(env Env) *cobra.Command {
	var installed []int
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "flow-delete",
		Short: "Measure how long Open vSwitch takes to delete entries",
		Long: `Measure how long Open vSwitch takes to delete 2,000 of NIMITZ's entries, by the number of installed
entries: with loose deletions, for which it searches all entries, a problem that the NIMITZ paper reports, and with
strict ones, which pilaster uses by default. The command starts a switch of its own in a network namespace.
docs/results/flow-delete.md explains the figures.

A folder given with -o gets report.json, and report.html with plots. Run it on an idle machine.`,
		Example: "  pilaster bench flow-delete --quick -o results\n  pilaster bench flow-delete --installed " +
			"2000,100000 -o json",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := suites.QuickFlowDelete()
			if form() == "full" {
				o = suites.FullFlowDelete()
			}
			if c.Flags().Changed("installed") {
				for _, n := range installed {
					if n < o.Batch || n > suites.MaxFlowDelete {
						return usage("--installed %d: choose %d to %d", n, o.Batch, suites.MaxFlowDelete)
					}
				}
				slices.Sort(installed)
				o.Installed = slices.Compact(installed)
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			if err := scenario.OVSMissing(); err != nil {
				return fmt.Errorf("%w; nothing was measured", err)
			}
			return runReport(env, to, func() (benchReport, bool, error) {
				o.Dir, o.Seed, o.Progress = benchDir, uint64(time.Now().UnixNano()), progressOf(env, "sample")
				r, err := suites.FlowDelete(c.Context(), o)
				return r, true, err
			})
		},
	}
	form = bindForms(c,
		formFlag{"quick", "about ten seconds (default)"},
		formFlag{"full", "three minutes: up to 50,000 entries"})
	c.Flags().IntSliceVar(&installed, "installed", nil, "numbers of installed entries")
	bindReport(c, &to)
	return c
}
