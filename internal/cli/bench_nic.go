package cli

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/nic"
)

func newBenchNICCommand(env Env) *cobra.Command {
	var figure, record, matrix, job, runDir string
	var within time.Duration
	var to reportPlace
	var seed uint64
	c := &cobra.Command{
		Use:   "nic",
		Short: "Run a model of NIMITZ's offloading to a NIC; it measures nothing",
		Long: `Run a model of how NIMITZ offloads its switch's entries to a NIC, and draw the paper's figures with it: how many
entries are offloaded (7), what the insertion channel bears and preheating (8), and throughput that fluctuates by
revalidation with late counters, and what removes that (12).

It is a model and no measurement: there is no NIC, no driver and no packet. What it says depends on its assumptions,
and the report lists them with where each comes from. The same seed gives the same figures. Figure 7 takes about half
a minute, the others some seconds. docs/results/nic.md explains it.

--record writes a traffic matrix to a new file: the model's rehearsal, or what an Open vSwitch counts while a job runs in a
lab or on a node. --matrix has figure 8's preheating read such a file, and --job has another be what the job speaks with.`,
		Example: "  pilaster bench nic -o results\n  pilaster bench nic --figure 12 --seed 7 -o json\n" +
			"  pilaster bench nic --record rehearsal.tsv --ovs-run-dir /run/openvswitch --for 1m\n  pilaster bench nic --matrix rehearsal.tsv --job event.tsv -o results",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			numbers := nic.Numbers
			if figure != "all" {
				n, err := strconv.Atoi(figure)
				if err != nil || !slices.Contains(nic.Numbers, n) {
					return usage("--figure %q: say one of %s", figure, strings.Join(figureNames(), ", "))
				}
				numbers = []int{n}
			}
			switch {
			case record == "" && (runDir != "" || c.Flags().Changed("for")), runDir == "" && c.Flags().Changed("for"):
				return usage("--ovs-run-dir says what --record counts, and --for how long")
			case within <= 0:
				return usage("--for %v: say how long, such as 30s", within)
			case record != "":
				return recordMatrix(c.Context(), env, record, runDir, within, seed)
			case job != "" && matrix == "":
				return usage("--job is what the job speaks with that --matrix preheats; say both")
			case matrix != "" && figure != "all" && figure != "8":
				return usage("--matrix is of figure 8; leave --figure out")
			}
			draw := func() (*nic.Report, error) { return nic.Draw(c.Context(), seed, numbers...) }
			if matrix != "" {
				var err error
				if draw, err = recorded(c.Context(), matrix, job, seed); err != nil {
					return err
				}
			}
			giveUp, err := makeReportFolder(to)
			if err != nil {
				return err
			}
			defer giveUp()
			report, err := draw()
			if err != nil {
				return err
			}
			return writeReport(env.Stdout, report, to)
		},
	}
	c.Flags().StringVar(&figure, "figure", "all", "the paper's figure: "+strings.Join(figureNames(), ", "))
	c.Flags().Uint64Var(&seed, "seed", 1, "what is random follows from it")
	c.Flags().Var((*filled)(&record), "record", "write a traffic matrix to this new file, and draw nothing")
	c.Flags().
		Var((*filled)(&runDir), "ovs-run-dir", "have --record count what the Open vSwitch sends whose sockets are there; without it the model's rehearsal is recorded")
	c.Flags().DurationVar(&within, "for", 30*time.Second, "how long to count")
	c.Flags().Var((*filled)(&matrix), "matrix", "preheat figure 8 with what this file has")
	c.Flags().Var((*filled)(&job), "job", "the job speaks with what this file has")
	_ = c.MarkFlagDirname("ovs-run-dir")
	_ = c.RegisterFlagCompletionFunc("for", cobra.NoFileCompletions)
	bindReport(c, &to)
	for _, other := range []string{"matrix", "job", "figure", "output"} {
		c.MarkFlagsMutuallyExclusive("record", other)
	}
	_ = c.RegisterFlagCompletionFunc(
		"figure",
		cobra.FixedCompletions(figureNames(), cobra.ShellCompDirectiveNoFileComp),
	)
	_ = c.RegisterFlagCompletionFunc("seed", cobra.NoFileCompletions)
	return c
}

// recorded is figure 8 with files in the place of its rehearsal, and of its job where there is one.
func recorded(ctx context.Context, matrix, job string, seed uint64) (draw func() (*nic.Report, error), err error) {
	preheated, err := readMatrix("matrix", matrix)
	if err != nil || job == "" {
		return func() (*nic.Report, error) { return nic.DrawRecorded(ctx, seed, preheated, nil) }, err
	}
	speaks, err := readMatrix("job", job)
	return func() (*nic.Report, error) { return nic.DrawRecorded(ctx, seed, preheated, &speaks) }, err
}

func figureNames() (all []string) {
	for _, n := range nic.Numbers {
		all = append(all, strconv.Itoa(n))
	}
	return append(all, "all")
}
