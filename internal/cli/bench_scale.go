package cli

import (
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/suites"
	"pilaster.io/pilaster/internal/bench/traffic"
)

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
