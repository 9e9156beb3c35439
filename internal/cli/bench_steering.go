package cli

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench/suites"
	"pilaster.io/pilaster/internal/bench/traffic"
)

func newBenchSteeringCommand(env Env) *cobra.Command {
	var pairs []int
	var rounds int
	var window time.Duration
	var to reportPlace
	var form func() string
	c := &cobra.Command{
		Use:   "steering",
		Short: "Compare a VXLAN network without steering with RPS and RFS at two and at three levels",
		Long: `Compare a kernel VXLAN network without steering with the same network with RPS and RFS, at the uplink and
the VXLAN device (rps, rfs), and also in the containers (rps+, rfs+). Pairs of client and server send TCP streams at the
same time. All clients run on one CPU, where the servers' node then receives all packets, as from a network card with
one queue. The report has the throughput, the packets that each CPU processed at each level, and each CPU's idle and
softirq time. Modes that this machine refuses are in the report with the reason: rfs needs the machine's first network
namespace. net.core.rps_sock_flow_entries is set while rfs is measured, and restored.

A folder given with -o gets report.json, and report.html with plots. Run it on an idle machine.`,
		Example: "  pilaster bench steering --quick -o results\n  pilaster bench steering --pairs 1,16 --rounds 9 " +
			"-o json",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := suites.QuickSteering()
			if form() == "full" {
				o = suites.FullSteering()
			}
			if c.Flags().Changed("pairs") {
				o.Pairs = pairs
			}
			for _, n := range o.Pairs {
				if n < 1 || n > suites.MaxSteeringPairs {
					return usage("--pairs %d: choose 1 to %d", n, suites.MaxSteeringPairs)
				}
			}
			if c.Flags().Changed("rounds") {
				o.Rounds = rounds
			}
			if c.Flags().Changed("window") {
				o.Window = window
			}
			if o.Rounds < 1 || o.Window < suites.LeastSteeringWindow {
				return usage("--rounds %d, --window %v: use 1 or more rounds of at least %v", o.Rounds, o.Window,
					suites.LeastSteeringWindow)
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program, which is also the generator: %w", err)
			}
			if o.ClientCPU, err = traffic.FirstCPU(); err != nil {
				return err
			}
			o.Dir, o.Seed, o.Progress = benchDir, uint64(time.Now().UnixNano()), progressOf(env, "sample")
			o.Generator = func(ctx context.Context) *exec.Cmd {
				return exec.CommandContext(ctx, self, "bench", "generator")
			}
			return runReport(env, to, func() (benchReport, bool, error) {
				r, err := suites.Steering(c.Context(), o)
				return r, err == nil, err
			})
		},
	}
	form = bindForms(c,
		formFlag{"quick", "three minutes: 1, 4 and 16 pairs (default)"},
		formFlag{"full", "16 minutes: 1, 2, 4, 8 and 16 pairs"})
	f := c.Flags()
	f.IntSliceVar(&pairs, "pairs", nil, "numbers of pairs of client and server")
	f.IntVar(&rounds, "rounds", 0, "how often each mode is measured (default: that of the form)")
	f.DurationVar(&window, "window", 0, "time of a measurement (default: that of the form)")
	for _, name := range []string{"pairs", "rounds", "window"} {
		_ = c.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	bindReport(c, &to)
	return c
}
