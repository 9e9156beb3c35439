package cli

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/suites"
)

func newBenchEntriesCommand(env Env) *cobra.Command {
	var nodes []int
	var switches []string
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "entries",
		Short: "Count the entries of a NIMITZ node's switch as the cluster grows",
		Long: `Fill the switch of one node of network nimitz as its agent does, and read its entries from it: from the
kernel's tables, and from Open vSwitch. The cluster around it is simulated: its nodes and containers exist only as
mappings. The command counts with node CIDRs and without, and fails if the switch has more entries than nodes,
containers and services account for. docs/results/entries.md explains the figures.

A folder given with -o gets report.json, and report.html with plots.`,
		Example: "  pilaster bench entries --quick -o results\n" +
			"  pilaster bench entries --switches ebpf --nodes 1,100,2000 -o json",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := suites.QuickEntries()
			if form() == "full" {
				o = suites.FullEntries()
			}
			if c.Flags().Changed("nodes") {
				slices.Sort(nodes)
				o.Nodes = slices.Compact(nodes)
				if len(o.Nodes) < 2 || o.Nodes[0] < 1 || o.Nodes[len(o.Nodes)-1] > suites.MaxEntryNodes {
					return usage("--nodes %v: choose two sizes or more, of 1 to %d", nodes, suites.MaxEntryNodes)
				}
			}
			if c.Flags().Changed("switches") {
				for _, name := range switches {
					if !slices.Contains(suites.EntrySwitches, name) {
						return usage("--switches: there is no switch %q; use some of %v", name, suites.EntrySwitches)
					}
				}
				slices.Sort(switches)
				if o.Switches = slices.Compact(switches); len(switches) == 0 {
					return usage("--switches is empty; omit it for all, or name some")
				}
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			if err := scenario.OVSMissing(); err != nil && slices.Contains(o.Switches, "ovs") {
				return fmt.Errorf("%w, or leave it out with --switches ebpf; nothing was counted", err)
			}
			return runReport(env, to, func() (benchReport, bool, error) {
				o.Dir, o.Progress = benchDir, progressOf(env, "cluster")
				r, err := suites.Entries(c.Context(), o)
				return r, err == nil && r.Pass, err
			})
		},
	}
	form = bindForms(c,
		formFlag{"quick", "about ten seconds: up to 100 nodes (default)"},
		formFlag{"full", "a minute and a half: up to 1,000 nodes, 80,000 containers"})
	f := c.Flags()
	f.IntSliceVar(&nodes, "nodes", nil, "sizes of the cluster, two or more")
	f.StringSliceVar(&switches, "switches", nil, "only these switches: ebpf, ovs")
	bindReport(c, &to)
	_ = c.RegisterFlagCompletionFunc("nodes", cobra.NoFileCompletions)
	_ = c.RegisterFlagCompletionFunc("switches", listed(suites.EntrySwitches))
	return c
}
