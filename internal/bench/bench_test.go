package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const generatorEnv = "PILASTER_BENCH_TEST_GENERATOR"

// The test binary is its own generator.
func TestMain(m *testing.M) {
	if os.Getenv(generatorEnv) == "" {
		os.Exit(m.Run())
	}
	if err := Generate(os.Stdin, os.Stdout); err != nil {
		os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
}

func tiny(t *testing.T) Options {
	t.Helper()
	cpu, err := LastCPU()
	if err != nil {
		t.Fatal(err)
	}
	return Options{
		Scenarios: some("native", "netpila"), Metrics: Metrics(), Gates: QuickGates(), TooWide: 0.1, Rounds: 1, CPU: cpu, Seed: 1,
		Warmup: time.Millisecond, Window: 5 * time.Millisecond,
		Dir: filepath.Join(t.TempDir(), "bench"),
		Generator: func(ctx context.Context) *exec.Cmd {
			c := exec.CommandContext(ctx, os.Args[0])
			c.Env = append(os.Environ(), generatorEnv+"=1")
			return c
		},
		Progress: func(Step) {},
	}
}

// The mechanics of a run, not its speed: every scenario carries traffic, in segments that are cut too.
func TestRunOfAllScenarios(t *testing.T) {
	o := tiny(t)
	o.Scenarios = Scenarios()
	o.Metrics, _ = Pick(Metrics(), []string{"TCP_RR", "TCP_STREAM_CUT"})
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range o.Scenarios {
		for _, m := range o.Metrics {
			if x := r.find(s.Name, m.Name); x == nil || len(x.Samples) != 1 || !(x.Samples[0] > 0) {
				t.Errorf("%s %s: %+v", s.Name, m.Name, x)
			}
		}
	}
}

// Every metric can be had, and nothing stays.
func TestRunOfAllMetrics(t *testing.T) {
	o := tiny(t)
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range o.Scenarios {
		for _, m := range o.Metrics {
			x := r.find(s.Name, m.Name)
			if ours := strings.HasPrefix(s.Name, "netpila"); m.programs != 0 && !ours {
				if x != nil {
					t.Errorf("%s has no programs, and %s", s.Name, m.Name)
				}
				continue
			}
			if x == nil || len(x.Samples) != 1 || !(x.Samples[0] > 0) {
				t.Errorf("%s %s: %+v", s.Name, m.Name, x)
			}
		}
	}
	if i := slices.IndexFunc(r.Programs, func(p Program) bool { return p.Scenario == "netpila" && p.Name == "pil_container" && p.Ns.Median > 0 }); i < 0 || !(r.EmptyProgramNs > 0) {
		t.Errorf("programs %+v, empty %v", r.Programs, r.EmptyProgramNs)
	}
	if _, err := os.Stat(o.Dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", o.Dir, err)
	}
}

// Where segments are cut, no device of the wire is given more than one at once; afterwards all is as it was.
func TestCut(t *testing.T) {
	w, err := newWire(filepath.Join(t.TempDir(), "w"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := boundMacvlan(w); err != nil {
		t.Fatal(err)
	}
	features := func() (all []string) {
		for _, ns := range w.namespaces {
			err := inside(ns, func(h *netlink.Handle) error {
				eth0, err := h.LinkByName("eth0")
				if err != nil {
					return err
				}
				tso, err := ethtool("eth0", unix.ETHTOOL_GTSO, 0)
				all = append(all, fmt.Sprint(eth0.Type(), " ", tso, " ", eth0.Attrs().GSOMaxSegs))
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		return all
	}
	before := features()
	restore, err := w.cutAll()
	if err != nil {
		t.Fatal(err)
	}
	during := features()
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	veth, macvlan := "veth 1 65535", "macvlan 1 65535"
	if want := []string{veth, veth, macvlan, macvlan}; !slices.Equal(before, want) || !slices.Equal(features(), want) {
		t.Errorf("before %q, after %q", before, features())
	}
	if want := []string{"veth 0 65535", "veth 0 65535", "macvlan 1 1", "macvlan 1 1"}; !slices.Equal(during, want) {
		t.Errorf("cut: %q", during)
	}
}

func TestRunInRounds(t *testing.T) {
	o := tiny(t)
	o.Metrics, o.Rounds, o.CPU = o.Metrics[:2], 2, Free
	var steps []Step
	o.Progress = func(s Step) { steps = append(steps, s) }
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(steps, []Step{{1, "TCP_RR", 0.25}, {1, "UDP_RR", 0.5}, {2, "TCP_RR", 0.75}, {2, "UDP_RR", 1}}) {
		t.Errorf("progress %v", steps)
	}
	for _, x := range r.Results {
		if len(x.Samples) != 2 || x.Ratio.Low > x.Ratio.Median || x.Ratio.Median > x.Ratio.High {
			t.Errorf("%s %s: %+v", x.Scenario, x.Metric, x)
		}
		if x.Scenario == "native" && *x.Ratio != (Interval{1, 1, 1}) {
			t.Errorf("native against itself is %+v", x.Ratio)
		}
	}
	if len(r.Checks) != 2 || r.Checks[0].Scenario != "netpila" || r.Checks[0].Metric != "TCP_RR" || r.Checks[0].Verdict == "" {
		t.Errorf("checks %+v", r.Checks)
	}
}

// A run that was killed leaves namespaces bound and bpffs mounted; the next one clears them away.
func TestRunAfterACrash(t *testing.T) {
	o := tiny(t)
	w, err := newWire(filepath.Join(o.Dir, "netpila"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := netpila(variant{})(w); err != nil {
		t.Fatal(err)
	}
	for _, n := range w.nodes {
		n.ns.Close()
	}
	o.Metrics = o.Metrics[:1]
	if _, err := Run(t.Context(), o); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(o.Dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", o.Dir, err)
	}
}

func TestOneRunAtATime(t *testing.T) {
	o := tiny(t)
	release, err := claim(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "another bench") {
		t.Errorf("a second run: %v", err)
	}
}

// A scenario over which nothing flows is an error that names it, not a figure.
func TestRunOfABrokenScenario(t *testing.T) {
	o := tiny(t)
	o.Scenarios = append(o.Scenarios[:1:1], Scenario{Name: "cut", Build: func(w *wire) (p Pair, err error) {
		p, _ = native(w)
		p.Client, err = w.namespace("alone")
		return p, err
	}})
	_, err := Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "TCP_RR of cut: client: ") || !strings.Contains(err.Error(), "network is unreachable") {
		t.Errorf("ran: %v", err)
	}
}

func TestGenerateRefuses(t *testing.T) {
	for _, in := range []string{"", "{}", `{"Metric":"SCTP_RR"}`, `{"Metric":"TCP_RR","Target":"nonsense"}`} {
		if err := Generate(strings.NewReader(in), &bytes.Buffer{}); err == nil {
			t.Errorf("took %q", in)
		}
	}
}

func TestBootstrap(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	if got := bootstrap([]float64{0.9}, random); got != (Interval{0.9, 0.9, 0.9}) {
		t.Errorf("of one sample: %+v", got)
	}
	// The interval covers the true median in about 95 of 100 runs; 200 runs, five standard deviations.
	covered := 0
	for range 200 {
		samples := make([]float64, 20)
		for i := range samples {
			samples[i] = 0.9 + 0.05*random.NormFloat64()
		}
		if i := bootstrap(samples, random); i.Low <= 0.9 && 0.9 <= i.High {
			covered++
		}
	}
	if covered < 175 || covered == 200 {
		t.Errorf("covered in %d of 200", covered)
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		in   []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{3, 1}, 2}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 2, 3}, 2.5}} {
		if got := median(c.in); got != c.want {
			t.Errorf("median of %v is %v", c.in, got)
		}
	}
}

func TestJudge(t *testing.T) {
	low, whole, high := Gate{AtLeast: 0.85}, Gate{AtLeast: 0.85, Whole: true}, Gate{AtMost: 80}
	for _, c := range []struct {
		gate    Gate
		got     Interval
		tooWide float64
		want    Verdict
	}{
		{low, Interval{0.92, 0.91, 0.93}, 0.1, Passed},
		{low, Interval{0.85, 0.84, 0.86}, 0.1, Passed},
		{low, Interval{0.84, 0.83, 0.86}, 0.1, TooLow},
		{low, Interval{0.92, 0.86, 0.97}, 0.1, TooNoisy},
		{low, Interval{0.70, 0.60, 0.80}, 0.1, TooNoisy},
		{low, Interval{0.92, 0.50, 1.97}, 0, Passed},
		{low, Interval{0.70, 0.50, 1.97}, 0, TooLow},
		{low, Interval{1.70, 1.62, 1.78}, 0.1, Passed},
		{whole, Interval{0.86, 0.84, 0.88}, 0.1, TooLow},
		{whole, Interval{0.86, 0.85, 0.88}, 0.1, Passed},
		{high, Interval{79, 77, 81}, 0.1, Passed},
		{high, Interval{81, 77, 84}, 0.1, TooHigh},
		{high, Interval{70, 65, 75}, 0.1, TooNoisy},
		{Gate{AtMost: 80, Whole: true}, Interval{79, 77, 81}, 0.1, TooHigh},
	} {
		if got := c.gate.judge(c.got, c.tooWide); got != c.want {
			t.Errorf("%+v against %+v: %q, want %q", c.got, c.gate, got, c.want)
		}
	}
}

// Every gate names scenarios and metrics that there are, or that device kinds to come will bring.
func TestGatesNameWhatThereIs(t *testing.T) {
	known := append(Names(Scenarios()), "", best, "netpila-macvlan")
	for _, g := range slices.Concat(FullGates(), QuickGates(), SmokeGates()) {
		if _, ok := metricByName(g.Metric); !ok || !slices.Contains(known, g.Scenario) || !slices.Contains(known, g.Against) || g.AtLeast == 0 && g.AtMost == 0 {
			t.Errorf("%+v", g)
		}
	}
}

// reported is a report of what was taken, by scenario, metric and round.
func reported(t *testing.T, o Options, samples [][][]float64) *Report {
	t.Helper()
	o.Rounds = len(samples[0][0])
	r := &run{Options: o, random: rand.New(rand.NewPCG(0, 0))}
	for _, scenario := range samples {
		row := make([]taken, len(scenario))
		for m, values := range scenario {
			row[m] = taken{values: values, ops: 100, busy: 0.002, lost: 1}
		}
		r.taken, r.programs = append(r.taken, row), append(r.programs, map[string][]float64{"pil_container": {70, 72}})
	}
	return r.report(time.Now())
}

func TestReport(t *testing.T) {
	o := tiny(t)
	o.Scenarios, o.Metrics = some("native", "route", "netpila"), o.Metrics[:1]
	r := reported(t, o, [][][]float64{{{100_000, 120_000}}, {{80_000, 96_000}}, {{70_000, 84_000}}})
	if r.Pass {
		t.Error("0.70 of native passed")
	}
	var text bytes.Buffer
	table := tabwriter.NewWriter(&text, 0, 8, 3, ' ', 0)
	r.Table(table)
	table.Flush()
	for _, want := range []string{
		"TCP_RR   native     110,000 1/s   1                         20.00 µs/transaction",
		"TCP_RR   route      88,000 1/s    0.800       0.800–0.800",
		"TCP_RR   netpila    77,000 1/s    0.700       0.700–0.700",
		"pil_container   netpila    71               70–72",
		"netpila    native   TCP_RR   0.700   0.700–0.700   too low: at least 0.85",
		"3 datagrams were lost",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("table lacks %q:\n%s", want, &text)
		}
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(b, &back); err != nil || len(back.Results) != 3 || len(back.Checks) != 1 || back.Checks[0].Verdict != TooLow {
		t.Errorf("report.json reads back as %+v, %v", back, err)
	}
}

// A run without what a gate names is not judged by it; the best device is one, the same for all metrics.
func TestBestDevice(t *testing.T) {
	o := tiny(t)
	o.Scenarios = append(some("native", "vxlan", "netpila"), Scenario{Name: "netpila-macvlan"})
	o.Metrics, o.Gates = o.Metrics[:2], FullGates()
	r := reported(t, o, [][][]float64{{{100}, {100}}, {{50}, {50}}, {{97}, {76}}, {{90}, {90}}})
	var seen []string
	for _, c := range r.Checks {
		if c.Against == "vxlan" {
			seen = append(seen, fmt.Sprint(c.Scenario, " ", c.Metric, " ", c.Got.Median, " ", c.Verdict))
		}
		if strings.HasPrefix(c.Against, "bound") {
			t.Errorf("judged against what was not run: %+v", c)
		}
	}
	if !slices.Equal(seen, []string{"netpila-macvlan TCP_RR 1.8 ok", "netpila-macvlan UDP_RR 1.8 ok"}) {
		t.Errorf("best device: %q", seen)
	}
}

func TestFigure(t *testing.T) {
	for v, want := range map[float64]string{1: "1.0", 41.26: "41.3", 999: "999.0", 1000: "1,000", 135012.4: "135,012", 1234567: "1,234,567"} {
		if got := figure(v); got != want {
			t.Errorf("%v is written %s, want %s", v, got, want)
		}
	}
}
