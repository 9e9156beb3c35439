package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/suites"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// The most that a run takes: a node's endpoints, and packets that a map of the bench holds.
const (
	mostBenchEndpoints = 65_535
	mostBenchPeers     = 1 << 20
)

func newBenchScaleCommand(env Env) *cobra.Command {
	var quick, full bool
	var endpoints, peers []int
	var to reportPlace
	c := &cobra.Command{
		Use:   "scale",
		Short: "Measure a packet's cost by endpoints and peers, and beside a sprayer",
		Long: `Measure what the packet path's programs take for a packet, by how many endpoints and tenants the node has and
with how many peers they talk, in random order; what a packet takes that the flow cache does not know; and what
flows take beside a container that sprays addresses. The tables of a node of its own are filled as an agent does it,
and the kernel runs the programs by themselves on one CPU (BPF_PROG_TEST_RUN). docs/results/scale.md says how to read it.

A folder given with -o gets report.json, and report.html with plots. Run it on a machine that does nothing else.`,
		Example: "  pilaster bench scale --quick -o results\n  pilaster bench scale --endpoints 1,1000 --peers 10,1000000 -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := suites.QuickScale()
			if full {
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
			giveUp, err := makeReportFolder(to)
			if err != nil {
				return err
			}
			defer giveUp()
			cpu, err := traffic.LastCPU()
			if err != nil {
				return err
			}
			started := time.Now()
			o.Dir, o.CPU, o.Seed = benchDir, cpu, uint64(started.UnixNano())
			o.Progress = func(done, of int) { fmt.Fprintf(env.Stderr, "figure %d of %d\n", done, of) }
			report, err := suites.Scale(c.Context(), o)
			if err != nil {
				return err
			}
			return writeReport(env.Stdout, report, to)
		},
	}
	c.Flags().BoolVar(&quick, "quick", false, "about half a minute (default)")
	c.Flags().BoolVar(&full, "full", false, "about ten minutes")
	c.MarkFlagsMutuallyExclusive("quick", "full")
	c.Flags().IntSliceVar(&endpoints, "endpoints", nil, "endpoints of the node, ten to a tenant")
	c.Flags().IntSliceVar(&peers, "peers", nil, "containers elsewhere that they talk with")
	bindReport(c, &to)
	return c
}
