package cli

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/suites"
)

func newBenchEntriesCommand(env Env) *cobra.Command {
	var quick, full bool
	var nodes []int
	var switches []string
	var to reportPlace
	c := &cobra.Command{
		Use:   "entries",
		Short: "Count what a NIMITZ node's switch has as the cluster grows",
		Long: `Fill the switch of one node of network nimitz as its agent does, and read its entries from it: from the kernel's tables,
and from Open vSwitch. The cluster around it is simulated: its nodes and containers are told of, and do not exist. It
counts with node CIDRs and without, and fails where entries are more than a sum of what nodes, containers and services
have each. docs/results/entries.md says how to read it.

A folder given with -o gets report.json, and report.html with plots.`,
		Example: "  pilaster bench entries --quick -o results\n  pilaster bench entries --switches ebpf --nodes 1,100,2000 -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := suites.QuickEntries()
			if full {
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
						return usage("--switches: there is no switch %q; say some of %v", name, suites.EntrySwitches)
					}
				}
				slices.Sort(switches)
				if o.Switches = slices.Compact(switches); len(switches) == 0 {
					return usage("--switches is empty; leave it out for all, or name some")
				}
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			if err := scenario.OVSMissing(); err != nil && slices.Contains(o.Switches, "ovs") {
				return fmt.Errorf("%w, or leave it out with --switches ebpf; nothing was counted", err)
			}
			giveUp, err := makeReportFolder(to)
			if err != nil {
				return err
			}
			defer giveUp()
			o.Dir = benchDir
			o.Progress = func(done, of int) { fmt.Fprintf(env.Stderr, "cluster %d of %d\n", done, of) }
			report, err := suites.Entries(c.Context(), o)
			if err != nil {
				return err
			}
			if err := writeReport(env.Stdout, report, to); err != nil {
				return err
			}
			if !report.Pass {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	f := c.Flags()
	f.BoolVar(&quick, "quick", false, "about ten seconds: up to 100 nodes (default)")
	f.BoolVar(&full, "full", false, "a minute and a half: up to 1,000 nodes, 80,000 containers")
	c.MarkFlagsMutuallyExclusive("quick", "full")
	f.IntSliceVar(&nodes, "nodes", nil, "sizes of the cluster, two or more")
	f.StringSliceVar(&switches, "switches", nil, "these only: ebpf, ovs")
	bindReport(c, &to)
	_ = c.RegisterFlagCompletionFunc("nodes", cobra.NoFileCompletions)
	_ = c.RegisterFlagCompletionFunc("switches", listed(suites.EntrySwitches))
	return c
}
