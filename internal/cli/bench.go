package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

func newBenchCommand(env Env) *cobra.Command {
	c := &cobra.Command{
		Use:     "bench",
		Short:   "Measure the datapath on this machine",
		Example: "  pilaster bench datapath --quick -o results\n  pilaster bench check",
		Args:    cobra.NoArgs,
	}
	c.AddCommand(
		newBenchDatapathCommand(env),
		newBenchCompareCommand(env),
		formerly("builds", newBenchCompareCommand(env)),
		newBenchPolicyCommand(env),
		newBenchScaleCommand(env),
		newBenchFlowDeleteCommand(env),
		formerly("clean-up", newBenchFlowDeleteCommand(env)),
		newBenchEntriesCommand(env),
		newBenchSteeringCommand(env),
		newBenchOncacheCommand(env),
		newBenchEgressCommand(env), newBenchServicesCommand(env),
		newBenchNetworksCommand(env),
		newBenchOffloadCommand(env),
		newBenchNICCommand(env),
		newBenchCheckCommand(env),
		&cobra.Command{
			Use:    "generator",
			Short:  "Generate or answer traffic, as standard input specifies",
			Hidden: true,
			Args:   cobra.NoArgs,
			RunE:   func(*cobra.Command, []string) error { return traffic.Generate(env.Stdin, env.Stdout) },
		},
	)
	return c
}

// formerly gives a command the name that it had in the previous release. The help does not list this command.
func formerly(name string, c *cobra.Command) *cobra.Command {
	_, arguments, _ := strings.Cut(c.Use, " ")
	c.Use, c.Hidden = strings.TrimSpace(name+" "+arguments), true
	return c
}

func newBenchDatapathCommand(env Env) *cobra.Command {
	var flags pathFlags
	var form func() string
	known := packetPaths()
	c := &cobra.Command{
		Use: "datapath",
		Short: "Compare NETPILA with node to node, kernel routing, kernel VXLAN, ONCache's design, NIMITZ, and the " +
			"bounds of " +
			"its devices",
		Long: `Compare the speed of containers on NETPILA with that of the bare nodes, of kernel routing, of kernel
VXLAN with and without a cache of ONCache's design, of NIMITZ on eBPF and on Open vSwitch, and of the same devices
without BPF, all in one run, in turn and in random order. Every scenario has two nodes of its own, network namespaces
on a veth link. Client and server share one CPU; with --free the scheduler chooses.

The command fails if NETPILA does not reach a gate, or if the run was too noisy to decide; no gate applies to a --free
run. Run it on an idle machine. docs/reference/benchmarks.md explains scenarios, metrics and method.

` + namesOf(known.Scenarios, known.Metrics),
		Example: `  pilaster bench datapath --quick -o results
  pilaster bench datapath --full --scenarios native,netpila --metrics TCP_RR,TCP_CRR
  pilaster bench datapath --peer flannel=./flannel.sh`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := map[string]func() bench.Options{"quick": bench.Quick, "full": bench.Full,
				"smoke": bench.Smoke}[form()]()
			if err := flags.apply(&o, known); err != nil {
				return err
			}
			return flags.measure(c.Context(), env, o)
		},
	}
	form = bindForms(c,
		formFlag{"quick", "two minutes: the main scenarios and metrics (default)"},
		formFlag{"full", "28 minutes: everything"},
		formFlag{"smoke", smokeForm})
	flags.bind(c, known)
	return c
}

// packetPaths returns all scenarios and metrics of packet paths.
func packetPaths() bench.Options {
	return bench.Options{Scenarios: scenario.Scenarios(), Metrics: traffic.Metrics()}
}

// pathFlags are flags of commands that measure packet paths.
type pathFlags struct {
	free                      bool
	scenarios, metrics, peers []string
	to                        reportPlace
}

// bind adds the flags, whose values are the known scenarios and metrics.
func (p *pathFlags) bind(c *cobra.Command, known bench.Options) {
	f := c.Flags()
	f.BoolVar(&p.free, "free", false, "client and server on any CPU; no gate applies")
	f.StringSliceVar(&p.scenarios, "scenarios", nil,
		"these only, by name; the others are compared with the first of the list below")
	f.StringSliceVar(&p.metrics, "metrics", nil, "these only, by name")
	f.StringArrayVar(&p.peers, "peer", nil, "NAME=COMMAND: a network that COMMAND builds between two of our nodes, "+
		"see docs/howto/benchmark-peer.md; may be repeated")
	bindReport(c, &p.to)
	_ = c.RegisterFlagCompletionFunc("scenarios", offered(known.Scenarios))
	_ = c.RegisterFlagCompletionFunc("metrics", listed(scenario.Names(known.Metrics)))
}

// apply replaces scenarios and metrics of o by those that the user has named, and adds the peers.
func (p *pathFlags) apply(o *bench.Options, known bench.Options) error {
	if err := selectRun(o, known, p.scenarios, p.metrics); err != nil {
		return err
	}
	return addPeers(o, p.peers)
}

// measure measures if this machine can, and writes the report.
func (p *pathFlags) measure(ctx context.Context, env Env, o bench.Options) error {
	if err := requireRoot("bench"); err != nil {
		return err
	}
	o.Scenarios, o.LeftOut = scenario.Offered(o.Scenarios)
	if len(p.scenarios) > 0 && len(o.LeftOut) > 0 {
		return usage("--scenarios: %s; nothing was measured", strings.Join(o.LeftOut, "; "))
	}
	for _, m := range o.Metrics {
		if m.Lacks == nil {
			continue
		}
		if err := m.Lacks(); err != nil {
			return fmt.Errorf("metric %s: %w; nothing was measured", m.Name, err)
		}
	}
	return reportBench(ctx, env, o, p.free, p.to)
}

// namesOf lists the values of --scenarios and --metrics.
func namesOf(scenarios []scenario.Scenario, metrics []traffic.Metric) string {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "Scenarios:")
	for _, s := range scenarios {
		fmt.Fprintf(t, "  %s\t%s\n", s.Name, s.About)
	}
	fmt.Fprintln(t, "\nMetrics:")
	for _, m := range metrics {
		fmt.Fprintf(t, "  %s\t%s (%s)\n", m.Name, m.About, m.Unit)
	}
	t.Flush()
	return strings.TrimRight(b.String(), "\n")
}

// offered completes scenarios that this machine supports.
func offered(known []scenario.Scenario) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		can, _ := scenario.Offered(known)
		return listed(scenario.Names(can))(c, args, typed)
	}
}

// listed completes the last of names separated by commas.
func listed(known []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		before := typed[:strings.LastIndex(typed, ",")+1]
		var offers []string
		for _, name := range known {
			if !slices.Contains(strings.Split(before, ","), name) {
				offers = append(offers, before+name)
			}
		}
		return offers, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}
}

// selectRun replaces the scenarios and metrics of o by those of the known ones that the user has named.
func selectRun(o *bench.Options, known bench.Options, scenarios, metrics []string) (err error) {
	for flag, names := range map[string][]string{"scenarios": scenarios, "metrics": metrics} {
		if names != nil && len(names) == 0 {
			return usage("--%s is empty; omit it, or name some", flag)
		}
	}
	if len(scenarios) > 0 {
		if o.Scenarios, err = scenario.Pick(slices.Clone(known.Scenarios), scenarios); err != nil {
			return usage("--scenarios: there is no scenario %w", err)
		}
	}
	if len(metrics) > 0 {
		if o.Metrics, err = scenario.Pick(slices.Clone(known.Metrics), metrics); err != nil {
			return usage("--metrics: there is no metric %w", err)
		}
	}
	return nil
}

func runBench(ctx context.Context, env Env, o bench.Options, free bool) (*bench.Report, error) {
	if err := prepare(&o, env); err != nil {
		return nil, err
	}
	if free {
		o.CPU, o.Gates = bench.Free, nil
	}
	return bench.Run(ctx, o)
}

// reportBench measures, and fails if a gate did not pass.
func reportBench(ctx context.Context, env Env, o bench.Options, free bool, to reportPlace) error {
	return runReport(env, to, func() (benchReport, bool, error) {
		r, err := runBench(ctx, env, o, free)
		return r, err == nil && r.Pass, err
	})
}

// addPeers adds peers after our own scenarios.
func addPeers(o *bench.Options, peers []string) error {
	for _, peer := range peers {
		name, command, found := strings.Cut(peer, "=")
		if !found || command == "" || !peerName.MatchString(name) {
			return usage("--peer %q: use NAME=COMMAND, with a name of lower-case letters, digits and dashes", peer)
		}
		if slices.Contains(scenario.Names(append(scenario.Scenarios(), o.Scenarios...)), name) {
			return usage("--peer %q: there is a scenario %s already; choose another name", peer, name)
		}
		path, err := exec.LookPath(command)
		if err != nil {
			return usage("--peer %q: %w", peer, err)
		}
		o.Scenarios = append(o.Scenarios, scenario.Peer(name, path))
	}
	return nil
}

// peerName is also the name of a folder.
var peerName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,30}$`)

// benchDir holds the namespaces and pins of a benchmark. One run at a time uses it.
const benchDir = "/run/pilaster-bench"

// prepare sets the options that every run on this machine needs.
func prepare(o *bench.Options, env Env) (err error) {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program, which is also the generator: %w", err)
	}
	if o.CPU, err = traffic.LastCPU(); err != nil {
		return err
	}
	started := time.Now()
	o.Dir, o.Seed = benchDir, uint64(started.UnixNano())
	o.Generator = func(ctx context.Context) *exec.Cmd { return exec.CommandContext(ctx, self, "bench", "generator") }
	printed, rounds := started, o.Rounds
	o.Progress = func(s bench.Step) {
		if now := time.Now(); s.Part == 1 || now.Sub(printed) >= 5*time.Second {
			printed = now
			left := now.Sub(started).Seconds() * (1 - s.Part) / s.Part
			fmt.Fprintf(
				env.Stderr,
				"round %d of %d, %s: %.0f %%, about %.0f s to go\n",
				s.Round,
				rounds,
				s.Metric,
				s.Part*100,
				left,
			)
		}
	}
	return nil
}

func newBenchCheckCommand(env Env) *cobra.Command {
	var o output
	var rounds int
	c := &cobra.Command{
		Use:   "check",
		Short: "Compare the bench's own generator with iperf3 and sockperf",
		Long: `Measure node to node with the bench's own generator and with iperf3 and sockperf, in turn, for the
metrics that both support. The generator exists for metrics that these tools lack; elsewhere it must agree with them.
The command needs Debian's iperf3 and sockperf and takes about two minutes. The command fails if a ratio of the two is
not between 0.8 and 1.25, or if its interval is wider than 0.25 and contains one of these limits. Run it on an idle
machine.`,
		Example: "  pilaster bench check",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if rounds < bench.FewestRounds {
				return usage("--rounds %d: use %d or more; an interval needs as many", rounds, bench.FewestRounds)
			}
			if err := requireRoot("bench"); err != nil {
				return err
			}
			if err := bench.LacksTools(); err != nil {
				return fmt.Errorf("%w; nothing was measured", err)
			}
			run := bench.Full()
			run.Rounds, run.Window = rounds, time.Second // the shortest time that the tools support
			if err := prepare(&run, env); err != nil {
				return err
			}
			all, err := bench.CheckGenerator(c.Context(), run)
			if err != nil {
				return err
			}
			if err := o.print(env.Stdout, all, all.Table); err != nil {
				return err
			}
			if !all.Agree() {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	o.bind(c)
	c.Flags().IntVar(&rounds, "rounds", 10, "how often each pair is measured, at least 6")
	_ = c.RegisterFlagCompletionFunc("rounds", cobra.NoFileCompletions)
	return c
}

// benchReport is the result of a benchmark.
type benchReport interface {
	Table(io.Writer)
	Page(io.Writer) error
}

// formFlag is a flag that selects how long and how thorough a run is.
type formFlag struct{ name, about string }

// bindForms adds flags that exclude each other, and returns the name of the selected form: the first is the default.
func bindForms(c *cobra.Command, forms ...formFlag) (selected func() string) {
	values, names := make([]bool, len(forms)), make([]string, len(forms))
	for i, f := range forms {
		c.Flags().BoolVar(&values[i], f.name, false, f.about)
		names[i] = f.name
	}
	c.MarkFlagsMutuallyExclusive(names...)
	return func() string { return names[max(0, slices.Index(values, true))] }
}

const smokeForm = "seconds: checks that everything works, also on a busy machine; its figures mean little"

// runReport checks that the report can be written, measures and writes it. It fails if the report did not pass.
func runReport(env Env, to reportPlace, measure func() (r benchReport, pass bool, err error)) error {
	giveUp, err := makeReportFolder(to)
	if err != nil {
		return err
	}
	defer giveUp()
	report, pass, err := measure()
	if err != nil {
		return err
	}
	if err := writeReport(env.Stdout, report, to); err != nil {
		return err
	}
	if !pass {
		return &exitError{code: ExitFailed}
	}
	return nil
}

// progressOf prints how many of the steps are done.
func progressOf(env Env, what string) func(done, of int) {
	return func(done, of int) { fmt.Fprintf(env.Stderr, "%s %d of %d\n", what, done, of) }
}

// bindReport adds the flag for the place of a report.
func bindReport(c *cobra.Command, to *reportPlace) {
	*to = "text"
	c.Flags().VarP(to, "output", "o", "text, json, or a folder for report.json and report.html beside the text")
	_ = c.RegisterFlagCompletionFunc(
		"output",
		cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveFilterDirs),
	)
}

// formats are names of formats of other programs. -o rejects those that we do not support, instead of creating a folder
// with that name.
var formats = []string{
	"", "csv", "html", "json", "markdown", "md", "table", "text", "tsv", "txt", "wide", "xml", "yaml", "yml",
}

// reportPlace is a format or a folder. It rejects other values when flags are parsed, before the command creates
// anything.
type reportPlace string

func (p *reportPlace) String() string { return string(*p) }
func (p *reportPlace) Type() string   { return "string" }
func (p *reportPlace) Set(to string) error {
	if to != "text" && to != "json" && slices.Contains(formats, strings.ToLower(to)) {
		return fmt.Errorf("use text, json or a folder; for a folder of that name, use ./%s", cmp.Or(to, "results"))
	}
	*p = reportPlace(to)
	return nil
}

func (p reportPlace) isFolder() bool { return p != "text" && p != "json" }

// makeReportFolder checks before the measurement whether a report can be written. giveUp removes the folder if
// makeReportFolder has created it and it is still empty.
func makeReportFolder(to reportPlace) (giveUp func(), err error) {
	return makeFolder(to, []string{"report.json", "report.html"})
}

// makeFolder is makeReportFolder for reports that consist of the given files.
func makeFolder(to reportPlace, files []string) (giveUp func(), err error) {
	giveUp = func() {}
	if !to.isFolder() {
		return giveUp, nil
	}
	if _, err := os.Stat(string(to)); os.IsNotExist(err) {
		giveUp = func() { _ = os.Remove(string(to)) } // fails if it is not empty
	}
	err = os.MkdirAll(string(to), 0o755)
	for _, name := range files {
		if err == nil {
			err = writable(filepath.Join(string(to), name))
		}
	}
	if err != nil {
		giveUp()
		return nil, usage(
			"--output %s: %w; nothing was measured: choose text, json, or a folder that can be written",
			to,
			err,
		)
	}
	return giveUp, nil
}

// writable checks that a file can be written, and leaves it unchanged or absent.
func writable(path string) error {
	_, before := os.Stat(path)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	if os.IsNotExist(before) {
		err = os.Remove(path)
	}
	return errors.Join(err, f.Close())
}

// writeReport prints the report as JSON or text. If place is a folder, it prints text, and writes report.json and
// report.html to the folder.
func writeReport(stdout io.Writer, r benchReport, place reportPlace) error {
	to := string(place)
	if !place.isFolder() {
		return (&output{format: to}).print(stdout, r, r.Table)
	}
	if err := (&output{format: "text"}).print(stdout, r, r.Table); err != nil {
		return err
	}
	for name, write := range map[string]func(io.Writer) error{
		"report.json": func(w io.Writer) error { return (&output{format: "json"}).print(w, r, nil) },
		"report.html": r.Page,
	} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(to, name), b.Bytes(), 0o644); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
	}
	_, err := fmt.Fprintf(
		stdout,
		"\nplots are in %s, all figures in %s\n",
		filepath.Join(to, "report.html"),
		filepath.Join(to, "report.json"),
	)
	return err
}
