package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
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
		Long: `Run a model of how NIMITZ offloads its switch's entries to a NIC, and plot the paper's figures with it:
how many entries are offloaded (7), the limit of the insertion channel and preheating (8), and throughput that
fluctuates because revalidation reads late counters, and the remedies (12).

It is a model and no measurement: there is no NIC, no driver and no packet. Its figures depend on its assumptions, and
the report lists them with the origin of each. The same seed gives the same figures. Figure 7 takes about half a
minute, the others some seconds. docs/results/nic.md explains it.

--record writes a traffic matrix to a new file: the model's rehearsal, or the packets that an Open vSwitch counts while
a job runs in a lab or on a node. --matrix lets the preheating of figure 8 read such a file, and --job takes the
destinations of the job from another one.`,
		Example: "  pilaster bench nic -o results\n  pilaster bench nic --figure 12 --seed 7 -o json\n" +
			"  pilaster bench nic --record rehearsal.tsv --ovs-run-dir /run/openvswitch --for 1m\n" +
			"  pilaster bench nic --matrix rehearsal.tsv --job event.tsv -o results",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			numbers := nic.Numbers
			if figure != "all" {
				n, err := strconv.Atoi(figure)
				if err != nil || !slices.Contains(nic.Numbers, n) {
					return usage("--figure %q: use one of %s", figure, strings.Join(figureNames(), ", "))
				}
				numbers = []int{n}
			}
			switch {
			case record == "" && (runDir != "" || c.Flags().Changed("for")), runDir == "" && c.Flags().Changed("for"):
				return usage("--ovs-run-dir needs --record, and --for needs both")
			case within <= 0:
				return usage("--for %v: use a duration above 0, such as 30s", within)
			case record != "":
				return recordMatrix(c.Context(), env, record, runDir, within, seed)
			case job != "" && matrix == "":
				return usage("--job needs --matrix: it names the destinations of the job that --matrix preheats")
			case matrix != "" && figure != "all" && figure != "8":
				return usage("--matrix applies only to figure 8; omit --figure")
			}
			draw := func() (*nic.Report, error) { return nic.Draw(c.Context(), seed, numbers...) }
			if matrix != "" {
				var err error
				if draw, err = recorded(c.Context(), matrix, job, seed); err != nil {
					return err
				}
			}
			return runReport(env, to, func() (benchReport, bool, error) {
				r, err := draw()
				return r, true, err
			})
		},
	}
	c.Flags().StringVar(&figure, "figure", "all", "the paper's figure: "+strings.Join(figureNames(), ", "))
	c.Flags().Uint64Var(&seed, "seed", 1, "seed of all random choices")
	c.Flags().Var((*filled)(&record), "record", "write a traffic matrix to this new file, and plot nothing")
	c.Flags().
		Var((*filled)(&runDir), "ovs-run-dir", "the folder with the sockets of an Open vSwitch, whose packets "+
			"--record counts; without it --record writes the model's rehearsal")
	c.Flags().DurationVar(&within, "for", 30*time.Second, "how long --record counts")
	c.Flags().Var((*filled)(&matrix), "matrix", "preheat figure 8 with the destinations in this file")
	c.Flags().Var((*filled)(&job), "job", "take the destinations of the job from this file")
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

// recorded returns a function that plots figure 8 with the file matrix instead of the model's rehearsal, and with the
// file job, if it is not empty, instead of the model's job.
func recorded(ctx context.Context, matrix, job string, seed uint64) (draw func() (*nic.Report, error), err error) {
	preheated, err := readMatrix("matrix", matrix)
	if err != nil || job == "" {
		return func() (*nic.Report, error) { return nic.DrawRecorded(ctx, seed, preheated, nil) }, err
	}
	jobMatrix, err := readMatrix("job", job)
	return func() (*nic.Report, error) { return nic.DrawRecorded(ctx, seed, preheated, &jobMatrix) }, err
}

func figureNames() (all []string) {
	for _, n := range nic.Numbers {
		all = append(all, strconv.Itoa(n))
	}
	return append(all, "all")
}

// recordMatrix writes the traffic matrix of the model's rehearsal, or of the packets that an Open vSwitch sends within
// a time. If it fails, it leaves no file.
func recordMatrix(ctx context.Context, env Env, file, runDir string, within time.Duration, seed uint64) error {
	to, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s exists already and was not changed: name a new file", file)
	}
	if err != nil {
		return usage("--record: %w", err)
	}
	m := nic.Rehearse(seed)
	if runDir != "" {
		m, err = watchMatrix(ctx, env, runDir, within)
	}
	if err == nil {
		err = m.Write(to)
	}
	if err = errors.Join(err, to.Close()); err != nil {
		return errors.Join(err, os.Remove(file))
	}
	_, err = fmt.Fprintf(
		env.Stdout,
		"%s in %s: %s\n",
		humanize.Of(len(m.Destinations), "destination", "destinations"),
		file,
		m.Source,
	)
	return err
}

// watchMatrix returns the matrix of packets to other nodes, from the switch's own counters.
func watchMatrix(ctx context.Context, env Env, runDir string, within time.Duration) (m nic.Matrix, err error) {
	before, err := ovs.Forwarded(ctx, runDir)
	if err != nil {
		return m, err
	}
	fmt.Fprintf(
		env.Stderr,
		"counting for %v the packets that %s to other nodes\n",
		within,
		humanize.Of(len(before), "entry sends", "entries send"),
	)
	began := time.Now()
	select {
	case <-ctx.Done():
		return m, fmt.Errorf("interrupted: %w; no file was written", context.Cause(ctx))
	case <-time.After(within):
	}
	after, err := ovs.Forwarded(ctx, runDir)
	if err != nil {
		return m, err
	}
	m.Source = fmt.Sprintf("the Open vSwitch of %s, %v from %s", runDir, within, began.UTC().Format(time.RFC3339))
	for e, n := range after {
		m.Destinations = append(
			m.Destinations,
			nic.Destination{Megaflow: nic.Megaflow{VNI: e.VNI, To: e.To}, Packets: sentSince(n, before[e])},
		)
	}
	m.Sort()
	if len(m.Destinations) == 0 {
		return m, fmt.Errorf(
			"no packet was sent to other nodes in %v; no file was written: record while the job runs, or longer with "+
				"--for",
			within,
		)
	}
	return m, nil
}

// sentSince returns the difference of two readings of a counter, or the later reading if the entry was installed again
// in between.
func sentSince(now, before uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}

// readMatrix reads the matrix that a flag names.
func readMatrix(flag, file string) (m nic.Matrix, err error) {
	f, err := os.Open(file)
	if err != nil {
		return m, usage("--%s: %w", flag, err)
	}
	defer f.Close()
	if m, err = nic.ReadMatrix(f); err != nil {
		return m, usage("--%s %s: %w", flag, file, err)
	}
	return m, nil
}
