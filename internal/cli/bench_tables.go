package cli

import (
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/suites"
	"pilaster.io/pilaster/internal/bench/traffic"
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

// Limits of a run: the endpoints of a node, and the packets in a map of the benchmark.
const (
	mostBenchEndpoints = 65_535
	mostBenchPeers     = 1 << 20
)

func newBenchScaleCommand(env Env) *cobra.Command {
	var endpoints, peers []int
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "scale",
		Short: "Measure the cost of a packet by the number of endpoints and peers",
		Long: `Measure the time that the packet path's programs take for a packet: by the number of endpoints and
tenants of the node and of their peers, which packets address in random order; for a packet that misses the flow cache;
and for flows beside a container that sprays packets over many addresses. The command fills the tables of a node of its
own as an agent does, and the kernel runs the programs by themselves on one CPU (BPF_PROG_TEST_RUN).
docs/results/scale.md explains the figures.

A folder given with -o gets report.json, and report.html with plots. Run it on an idle machine.`,
		Example: "  pilaster bench scale --quick -o results\n  pilaster bench scale --endpoints 1,1000 --peers " +
			"10,1000000 -o json",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := suites.QuickScale()
			if form() == "full" {
				o = suites.FullScale()
			}
			for _, given := range []struct {
				flag   string
				values []int
				most   int
				to     *[]int
			}{{"endpoints", endpoints, mostBenchEndpoints, &o.Endpoints}, {"peers", peers, mostBenchPeers, &o.Peers}} {
				if !c.Flags().Changed(given.flag) {
					continue
				}
				for _, n := range given.values {
					if n < 1 || n > given.most {
						return usage("--%s %d: choose 1 to %d", given.flag, n, given.most)
					}
				}
				*given.to = given.values
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			return runReport(env, to, func() (_ benchReport, _ bool, err error) {
				if o.CPU, err = traffic.LastCPU(); err != nil {
					return nil, false, err
				}
				o.Dir, o.Seed, o.Progress = benchDir, uint64(time.Now().UnixNano()), progressOf(env, "figure")
				r, err := suites.Scale(c.Context(), o)
				return r, true, err
			})
		},
	}
	form = bindForms(c, formFlag{"quick", "about half a minute (default)"}, formFlag{"full", "about ten minutes"})
	c.Flags().IntSliceVar(&endpoints, "endpoints", nil, "endpoints of the node, ten to a tenant")
	c.Flags().IntSliceVar(&peers, "peers", nil, "containers on other nodes that they exchange packets with")
	bindReport(c, &to)
	return c
}
