package suites

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// oncacheRatios are ratios of the cached overlay to the other that pass every gate, by metric.
var oncacheRatios = map[string]float64{
	"TCP_RR": 1.40, "UDP_RR": 1.40, "TCP_CRR": 1.01, "TCP_STREAM": 1.01, "TCP_STREAM4": 1.01, "MEMCACHED": 1.20,
}

// oncacheReport is a report in which every round has these ratios of speeds, and their inverse for CPU times, unless
// cpu has another one.
func oncacheReport(ratios, cpu map[string]float64) *bench.Report {
	r := &bench.Report{Pass: true, Settings: bench.Settings{Seed: 1, TooWide: 0.1}}
	for metric, ratio := range ratios {
		of := func(scenario string, speed, cpu float64) bench.Result {
			x := bench.Result{Scenario: scenario, Metric: metric, Counted: "transaction"}
			for round := range 10 {
				noise := 1 + 0.001*float64(round)
				x.Samples, x.CPUSamples = append(x.Samples, speed*noise), append(x.CPUSamples, cpu/noise)
			}
			return x
		}
		cpuRatio, given := cpu[metric]
		if !given {
			cpuRatio = 1 / ratio
		}
		r.Results = append(r.Results, of(overlay, 1000, 20), of(cachedOverlay, 1000*ratio, 20*cpuRatio))
	}
	return r
}

// TestOncacheGatesNotice: each gate of a full run fails if only its figure is a little worse than the limit.
func TestOncacheGatesNotice(t *testing.T) {
	good := oncacheReport(oncacheRatios, nil)
	good.Judge(FullOncache())
	if !good.Pass || len(good.Checks) != 7 || len(good.NotJudged) > 0 {
		t.Fatalf("good figures: pass %v, checks %+v, not checked %+v", good.Pass, good.Checks, good.NotJudged)
	}
	for metric, low := range map[string]float64{
		"TCP_RR": 1.355, "UDP_RR": 1.335, "TCP_CRR": 0.98, "TCP_STREAM": 0.98, "TCP_STREAM4": 0.98,
	} {
		ratios := maps.Clone(oncacheRatios)
		ratios[metric] = low
		cpu := map[string]float64{metric: 0.70}
		checkMissed(t, metric, false, oncacheReport(ratios, cpu))
		if strings.HasSuffix(metric, "P_RR") {
			checkMissed(t, metric, true, oncacheReport(oncacheRatios, map[string]float64{metric: 0.75}))
		}
	}
	// A noisy run, whose intervals contain all limits, must not pass.
	noisy := oncacheReport(oncacheRatios, nil)
	for i := range noisy.Results {
		for round := range noisy.Results[i].Samples {
			factor := float64(1 + (round+i)%2)
			noisy.Results[i].Samples[round] *= factor
			noisy.Results[i].CPUSamples[round] /= factor
		}
	}
	noisy.Judge(FullOncache())
	for _, c := range noisy.Checks {
		if c.Verdict != bench.TooNoisy {
			t.Errorf("noisy figures, %s: %s with %+v", c.Metric, c.Verdict, c.Got)
		}
	}
	// A run without CPU times must not pass.
	r := oncacheReport(oncacheRatios, nil)
	for i := range r.Results {
		clear(r.Results[i].CPUSamples)
	}
	r.Judge(FullOncache())
	if r.Pass || len(r.NotJudged) != 2 {
		t.Errorf("without CPU times: pass %v, not checked %+v", r.Pass, r.NotJudged)
	}
}

// checkMissed checks that exactly the gate on this metric is missed.
func checkMissed(t *testing.T, metric string, cpu bool, r *bench.Report) {
	t.Helper()
	r.Judge(FullOncache())
	var missed []string
	for _, c := range r.Checks {
		if c.Verdict != bench.Passed {
			missed = append(missed, fmt.Sprint(c.Metric, " ", c.CPU))
		}
	}
	if want := fmt.Sprint(metric, " ", cpu); r.Pass || !slices.Equal(missed, []string{want}) {
		t.Errorf("%s a little worse: pass %v, missed gates %q", want, r.Pass, missed)
	}
}

// TestOncacheForms: gates name scenarios and metrics of their form, and the smoke form judges nothing.
func TestOncacheForms(t *testing.T) {
	for gates, o := range map[int]bench.Options{7: FullOncache(), 3: QuickOncache(), 0: SmokeOncache()} {
		if len(o.Gates) != gates || len(o.Metrics) != 6 || len(o.Scenarios) < 5 || o.Scenarios[0].Name != "native" {
			t.Errorf("%s: %d gates, want %d; metrics %q, scenarios %q", o.Form, len(o.Gates), gates,
				scenario.Names(o.Metrics), scenario.Names(o.Scenarios))
		}
		for _, g := range o.Gates {
			names := scenario.Names(o.Scenarios)
			if !slices.Contains(names, g.Scenario) || !slices.Contains(names, g.Against) ||
				!slices.Contains(scenario.Names(o.Metrics), g.Metric) {
				t.Errorf("%s: gate on what is not measured: %+v", o.Form, g)
			}
		}
	}
}

// TestOncachePeers: a peer with the cache is compared with the same peer without it, and checked in a full run.
func TestOncachePeers(t *testing.T) {
	for _, o := range []bench.Options{FullOncache(), SmokeOncache()} {
		before := len(o.Gates)
		for _, name := range []string{"flannel", "flannel-oncache", "reference-oncache"} {
			o.Scenarios = append(o.Scenarios, scenario.Peer(name, "true"))
		}
		ComparePeers(&o)
		got := map[string]string{}
		for _, s := range o.Scenarios {
			if s.Of != "" {
				got[s.Name] = fmt.Sprint(s.Of, " ", s.Paper != nil)
			}
		}
		for name, want := range map[string]string{
			"flannel": "vxlan false", "flannel-oncache": "flannel true", "reference-oncache": "vxlan false",
			"oncache": "vxlan true", "nimitz-oncache": "nimitz-ebpf true",
		} {
			if got[name] != want {
				t.Errorf("%s: %s is compared with %q, want %q", o.Form, name, got[name], want)
			}
		}
		more := o.Gates[before:]
		if full := o.Form == "full"; full != (len(more) == 7) || full && more[0].Scenario != "flannel-oncache" ||
			full && more[0].Against != "flannel" || !full && len(more) > 0 {
			t.Errorf("%s: more gates %+v", o.Form, more)
		}
	}
}

// tinyOncache is the smoke form with shorter windows.
func tinyOncache(t *testing.T) bench.Options {
	t.Helper()
	o := SmokeOncache()
	cpu, err := traffic.LastCPU()
	if err != nil {
		t.Fatal(err)
	}
	o.CPU, o.Seed, o.Rounds, o.Warmup, o.Window = cpu, 1, 1, time.Millisecond, 5*time.Millisecond
	o.Dir, o.Progress = filepath.Join(t.TempDir(), "bench"), func(bench.Step) {}
	o.Generator = func(ctx context.Context) *exec.Cmd {
		c := exec.CommandContext(ctx, os.Args[0])
		c.Env = append(os.Environ(), generatorEnv+"=1")
		return c
	}
	return o
}

// TestOncache: a run has a figure of every metric in every scenario, beside those of the talk.
func TestOncache(t *testing.T) {
	o := tinyOncache(t)
	o.Metrics, _ = scenario.Pick(o.Metrics, []string{"TCP_RR", "TCP_CRR", "MEMCACHED"})
	o.Scenarios, _ = scenario.Pick(o.Scenarios, []string{"native", overlay, cachedOverlay})
	r, err := bench.Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if want := len(o.Scenarios) * len(o.Metrics); len(r.Results) != want || !r.Pass || len(r.Checks) > 0 {
		t.Errorf("%d results, want %d; pass %v, checks %+v", len(r.Results), want, r.Pass, r.Checks)
	}
	for _, x := range r.Results {
		if !(x.Median > 0) || len(x.CPUSamples) != 1 {
			t.Errorf("%s %s: %v, CPU times %v", x.Scenario, x.Metric, x.Median, x.CPUSamples)
		}
	}
	for _, c := range r.Beside {
		if c.Paper != talk[c.Metric] {
			t.Errorf("%s by %s, %s: the talk's figure is %q, want %q", c.Scenario, c.Against, c.Metric, c.Paper,
				talk[c.Metric])
		}
	}
	if len(r.Beside) != len(o.Metrics) {
		t.Errorf("%d comparisons, want one of each metric: %+v", len(r.Beside), r.Beside)
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
	var text, page bytes.Buffer
	r.Table(&text)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"MEMCACHED", "in the paper", talk["TCP_RR"]} {
		if !strings.Contains(text.String(), want) || !strings.Contains(page.String(), want) {
			t.Errorf("%q is not in the text and in the page:\n%s", want, &text)
		}
	}
}

// TestMemcachedEnds: no memcached is left in a scenario's namespace after its measurement, and one that cannot start
// fails the run with the reason.
func TestMemcachedEnds(t *testing.T) {
	o := tinyOncache(t)
	o.Scenarios, o.Metrics = o.Scenarios[:1], o.Metrics[len(o.Metrics)-1:]
	var server unix.Stat_t
	build := o.Scenarios[0].Build
	o.Scenarios[0].Build = func(w *scenario.Wire) (scenario.Pair, error) {
		p, err := build(w)
		if err == nil {
			err = unix.Stat(p.Server.Path(), &server)
		}
		return p, err
	}
	if _, err := bench.Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	all, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil || len(all) == 0 {
		t.Fatalf("no processes: %v", err)
	}
	for _, path := range all {
		var is unix.Stat_t
		if unix.Stat(path, &is) == nil && is.Ino == server.Ino && is.Dev == server.Dev {
			t.Errorf("%s is still in the server's namespace", path)
		}
	}

	t.Setenv("PATH", t.TempDir())
	if err := o.Metrics[0].Lacks(); err == nil || !strings.Contains(err.Error(), "(Debian: memcached)") {
		t.Errorf("without memcached: %v", err)
	}
	if _, err := bench.Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "start memcached: ") {
		t.Errorf("a run without memcached: %v", err)
	}
}
