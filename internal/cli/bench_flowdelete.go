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
	var quick, full bool
	var installed []int
	var to reportPlace
	c := &cobra.Command{
		Use:   "flow-delete",
		Short: "Measure what it takes Open vSwitch to delete entries",
		Long: `Measure how long Open vSwitch takes to delete 2,000 of NIMITZ's entries, by how many it has: loosely, which has it
search them all and is what NIMITZ met at scale, and strictly, as pilaster does unless told otherwise. The switch is one
of its own, in a network namespace. docs/results/flow-delete.md says how to read it.

A folder given with -o gets report.json, and report.html with plots. Run it on a machine that does nothing else.`,
		Example: "  pilaster bench flow-delete --quick -o results\n  pilaster bench flow-delete --installed 2000,100000 -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := suites.QuickFlowDelete()
			if full {
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
			giveUp, err := makeReportFolder(to)
			if err != nil {
				return err
			}
			defer giveUp()
			o.Dir, o.Seed = benchDir, uint64(time.Now().UnixNano())
			o.Progress = func(done, of int) { fmt.Fprintf(env.Stderr, "sample %d of %d\n", done, of) }
			report, err := suites.FlowDelete(c.Context(), o)
			if err != nil {
				return err
			}
			return writeReport(env.Stdout, report, to)
		},
	}
	c.Flags().BoolVar(&quick, "quick", false, "about ten seconds (default)")
	c.Flags().BoolVar(&full, "full", false, "three minutes: up to 50,000 entries")
	c.MarkFlagsMutuallyExclusive("quick", "full")
	c.Flags().IntSliceVar(&installed, "installed", nil, "entries that the switch has")
	bindReport(c, &to)
	return c
}
