package cli

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

func newBenchCompareCommand(env Env) *cobra.Command {
	o := bench.CompareOptions{Scenarios: []string{"netpila"}, Metrics: bench.CompareMetrics, Pairs: 32, AtLeast: 0.97}
	var to reportPlace
	c := &cobra.Command{
		Use:   "compare OTHER",
		Short: "Compare the datapath of this program with that of another build",
		Long: `Let this program and another build of it measure the datapath, in pairs of short runs and in random
order within a pair, and print this build's speed relative to the other one: the median over the pairs, with its 95 %
interval.

The command fails if a speed is below the gate (--at-least), or if the gate lies in an interval that is too wide to
decide. No gate applies to times, such as the run times of the programs (PROGRAM_OUT, PROGRAM_IN). It takes about five
minutes; run it on an idle machine. docs/results/compare.md explains the method, docs/reference/benchmarks.md
scenarios and metrics.`,
		Example: "  pilaster bench compare ./pilaster-before -o results\n" +
			"  pilaster bench compare ./pilaster-before --scenarios netpila,netpila-macvlan --metrics UDP_RR,UDP_PPS " +
			"--pairs 60",
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if o.Other, err = exec.LookPath(args[0]); err != nil {
				return usage("%s: %w; name a build of this program as a path", args[0], err)
			}
			if err := checkCompare(&o); err != nil {
				return err
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			return runReport(env, to, func() (benchReport, bool, error) {
				if o.This, err = os.Executable(); err != nil {
					return nil, false, fmt.Errorf("find this program: %w", err)
				}
				started := time.Now()
				o.Seed = uint64(started.UnixNano())
				o.Progress = func(done, of int) {
					left := time.Since(started).Seconds() / float64(done) * float64(of-done)
					fmt.Fprintf(env.Stderr, "run %d of %d, about %.0f s to go\n", done, of, left)
				}
				r, err := bench.CompareBuilds(c.Context(), o)
				return r, err == nil && r.Pass, err
			})
		},
	}
	f := c.Flags()
	f.StringSliceVar(
		&o.Scenarios,
		"scenarios",
		o.Scenarios,
		"scenarios to compare, by name; both builds must have them",
	)
	f.StringSliceVar(&o.Metrics, "metrics", o.Metrics, "metrics to compare, by name; both builds must have them")
	f.IntVar(&o.Pairs, "pairs", o.Pairs, "how often each build runs, at least 6")
	f.Float64Var(&o.AtLeast, "at-least", o.AtLeast, "the gate: the least speed relative to the other build")
	bindReport(c, &to)
	_ = c.RegisterFlagCompletionFunc("scenarios", offered(scenario.Scenarios()))
	_ = c.RegisterFlagCompletionFunc("metrics", listed(scenario.Names(traffic.Metrics())))
	for _, number := range []string{"pairs", "at-least"} {
		_ = c.RegisterFlagCompletionFunc(number, cobra.NoFileCompletions)
	}
	return c
}

// checkCompare rejects invalid options before the first run, and removes duplicate scenarios and metrics.
func checkCompare(o *bench.CompareOptions) error {
	var run bench.Options
	if err := selectRun(&run, packetPaths(), o.Scenarios, o.Metrics); err != nil {
		return err
	}
	o.Scenarios, o.Metrics = scenario.Names(run.Scenarios), scenario.Names(run.Metrics)
	_, lacks := scenario.Offered(run.Scenarios)
	switch {
	case len(lacks) > 0:
		return usage("--scenarios: %s; nothing was measured", strings.Join(lacks, "; "))
	case o.Pairs < bench.FewestRounds:
		return usage("--pairs %d: use %d or more; an interval needs that many pairs", o.Pairs, bench.FewestRounds)
	case !(o.AtLeast > 0 && o.AtLeast <= 1):
		return usage("--at-least %v: use a number above 0, at most 1", o.AtLeast)
	}
	return nil
}
