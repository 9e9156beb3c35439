package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
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
		Scenarios: Datapath(), Metrics: Metrics(), Rounds: 2, CPU: cpu, Seed: 1,
		Warmup: time.Millisecond, Window: 5 * time.Millisecond,
		Dir: filepath.Join(t.TempDir(), "bench"),
		Generator: func(ctx context.Context) *exec.Cmd {
			c := exec.CommandContext(ctx, os.Args[0])
			c.Env = append(os.Environ(), generatorEnv+"=1")
			return c
		},
		Progress: func(int) {},
	}
}

// The mechanics of a run, not its speed: every scenario carries every metric, and nothing stays.
func TestRun(t *testing.T) {
	o := tiny(t)
	rounds := []int{}
	o.Progress = func(round int) { rounds = append(rounds, round) }
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(rounds, []int{1, 2}) {
		t.Errorf("progress %v", rounds)
	}
	if len(r.Results) != len(o.Scenarios)*len(o.Metrics) {
		t.Fatalf("%d results", len(r.Results))
	}
	for _, x := range r.Results {
		if len(x.Samples) != 2 || slices.Min(x.Samples) <= 0 || x.Ratio.Low > x.Ratio.Median || x.Ratio.Median > x.Ratio.High {
			t.Errorf("%s %s: %+v", x.Scenario, x.Metric, x)
		}
		if x.Scenario == "native" && x.Ratio != (Interval{1, 1, 1}) {
			t.Errorf("native against itself is %+v", x.Ratio)
		}
		if judged := x.Verdict != NotJudged; judged != (x.Scenario == "netpila") {
			t.Errorf("%s is judged %q", x.Scenario, x.Verdict)
		}
	}
	if _, err := os.Stat(o.Dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", o.Dir, err)
	}
}

// A run that was killed leaves namespaces bound and bpffs mounted; the next one clears them away.
func TestRunAfterACrash(t *testing.T) {
	o := tiny(t)
	w, err := newWire(filepath.Join(o.Dir, "netpila"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := netpila(w); err != nil {
		t.Fatal(err)
	}
	for _, n := range w.nodes {
		n.ns.Close()
	}
	o.Rounds = 1
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
	for _, c := range []struct {
		ratio Interval
		bar   float64
		want  Verdict
	}{
		{Interval{0.92, 0.91, 0.93}, 0.85, Passed},
		{Interval{0.85, 0.84, 0.86}, 0.85, Passed},
		{Interval{0.84, 0.83, 0.86}, 0.85, TooLow},
		{Interval{0.92, 0.86, 0.97}, 0.85, TooNoisy},
		{Interval{0.70, 0.60, 0.80}, 0.85, TooNoisy},
		{Interval{0.10, 0.10, 0.10}, 0, NotJudged},
	} {
		if got := judge(c.ratio, c.bar); got != c.want {
			t.Errorf("%+v against %v: %q, want %q", c.ratio, c.bar, got, c.want)
		}
	}
}

func TestReport(t *testing.T) {
	o := tiny(t)
	o.Metrics = o.Metrics[:1]
	r := o.report(time.Now(), [][][]float64{{{100_000, 120_000}}, {{80_000, 96_000}}, {{70_000, 84_000}}}, 3, rand.New(rand.NewPCG(0, 0)))
	if r.Pass {
		t.Error("0.70 of native passed")
	}
	var text bytes.Buffer
	table := tabwriter.NewWriter(&text, 0, 8, 3, ' ', 0)
	r.Table(table)
	table.Flush()
	for _, want := range []string{
		"TCP_RR   native     110,000 1/s   1 ",
		"TCP_RR   route      88,000 1/s    0.800       0.800–0.800",
		"TCP_RR   netpila    77,000 1/s    0.700       0.700–0.700   too low: below 0.85",
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
	if err := json.Unmarshal(b, &back); err != nil || len(back.Results) != 3 || back.Results[2].Verdict != TooLow {
		t.Errorf("report.json reads back as %+v, %v", back, err)
	}
}

func TestFigure(t *testing.T) {
	for v, want := range map[float64]string{1: "1.0", 41.26: "41.3", 999: "999.0", 1000: "1,000", 135012.4: "135,012", 1234567: "1,234,567"} {
		if got := figure(v); got != want {
			t.Errorf("%v is written %s, want %s", v, got, want)
		}
	}
}
