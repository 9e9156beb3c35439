package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/plot/plottest"
)

func TestBootstrap(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	if got := report.Bootstrap([]float64{0.9}, random); got != (report.Interval{Median: 0.9, Low: 0.9, High: 0.9}) {
		t.Errorf("one sample: got interval %+v", got)
	}
	// The interval should cover the true median in about 95 of 100 runs. The test makes 200 runs and allows five
	// standard deviations.
	covered := 0
	for range 200 {
		samples := make([]float64, 20)
		for i := range samples {
			samples[i] = 0.9 + 0.05*random.NormFloat64()
		}
		if i := report.Bootstrap(samples, random); i.Low <= 0.9 && 0.9 <= i.High {
			covered++
		}
	}
	if covered < 175 || covered == 200 {
		t.Errorf("the interval covered the median in %d of 200 runs", covered)
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		in   []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{3, 1}, 2}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 2, 3}, 2.5}} {
		if got := report.Median(c.in); got != c.want {
			t.Errorf("median of %v: got %v", c.in, got)
		}
	}
}

func TestJudge(t *testing.T) {
	low, whole, reach, high := Gate{
		AtLeast: 0.85,
	}, Gate{
		AtLeast: 0.85,
		Whole:   true,
	}, Gate{
		AtLeast: 0.80,
		Reach:   0.85,
	}, Gate{
		AtMost: 80,
	}
	for _, c := range []struct {
		gate    Gate
		got     report.Interval
		tooWide float64
		want    Verdict
	}{
		{low, report.Interval{Median: 0.92, Low: 0.91, High: 0.93}, 0.1, Passed},
		{low, report.Interval{Median: 0.85, Low: 0.84, High: 0.86}, 0.1, Passed},
		{low, report.Interval{Median: 0.84, Low: 0.83, High: 0.86}, 0.1, TooLow},
		{low, report.Interval{Median: 0.92, Low: 0.84, High: 0.97}, 0.1, TooNoisy},
		{low, report.Interval{Median: 0.80, Low: 0.75, High: 0.88}, 0.1, TooNoisy},
		{low, report.Interval{Median: 0.92, Low: 0.86, High: 0.97}, 0.1, Passed},
		{low, report.Interval{Median: 0.70, Low: 0.60, High: 0.80}, 0.1, TooLow},
		{low, report.Interval{Median: 0.92, Low: 0.50, High: 1.97}, 0, Passed},
		{low, report.Interval{Median: 0.70, Low: 0.50, High: 1.97}, 0, TooLow},
		{low, report.Interval{Median: 1.70, Low: 1.62, High: 1.78}, 0.1, Passed},
		{whole, report.Interval{Median: 0.86, Low: 0.84, High: 0.88}, 0.1, TooLow},
		{whole, report.Interval{Median: 0.86, Low: 0.85, High: 0.88}, 0.1, Passed},
		{high, report.Interval{Median: 79, Low: 77, High: 81}, 0.1, Passed},
		{high, report.Interval{Median: 81, Low: 77, High: 84}, 0.1, TooHigh},
		{high, report.Interval{Median: 79, Low: 70, High: 90}, 0.1, TooNoisy},
		{high, report.Interval{Median: 70, Low: 60, High: 75}, 0.1, Passed},
		{high, report.Interval{Median: 90, Low: 82, High: 99}, 0.1, TooHigh},
		{Gate{AtMost: 80, Whole: true}, report.Interval{Median: 79, Low: 77, High: 81}, 0.1, TooHigh},
		{reach, report.Interval{Median: 0.84, Low: 0.83, High: 0.86}, 0.1, Passed},
		{reach, report.Interval{Median: 0.83, Low: 0.82, High: 0.84}, 0.1, TooLow},
		{reach, report.Interval{Median: 0.92, Low: 0.91, High: 0.93}, 0.1, Passed},
		{reach, report.Interval{Median: 0.79, Low: 0.74, High: 0.88}, 0.2, TooLow},
		{reach, report.Interval{Median: 0.84, Low: 0.74, High: 0.90}, 0.1, TooNoisy},
		{reach, report.Interval{Median: 0.70, Low: 0.60, High: 0.75}, 0.1, TooLow},
	} {
		if got := c.gate.judge(c.got, c.tooWide); got != c.want {
			t.Errorf("%+v with gate %+v: got verdict %q, want %q", c.got, c.gate, got, c.want)
		}
	}
}

// TestLookupGates: the gate fails if lookups become slower with the number of rules, for every kind of rules.
func TestLookupGates(t *testing.T) {
	of := func(rules int, by string, ns float64) LookupCost {
		return LookupCost{rules, by, isBegun, 64, report.Interval{Median: ns, Low: ns * 0.95, High: ns * 1.05}}
	}
	for want, many := range map[Verdict]float64{Passed: 1100, TooHigh: 2000} {
		r := &Report{
			Pass:     true,
			Settings: Settings{TooWide: 0.2},
			Lookups: []LookupCost{
				of(0, byNothing, 500),
				of(1, bySelectors, 1000),
				of(1, byAddresses, 1000),
				of(100, bySelectors, 9000),
				of(10_000, bySelectors, many),
				of(10_000, byAddresses, 1000),
			},
		}
		r.checkLookups(Lookups{Rules: []int{0, 1, 100, 10_000}, AtMost: 1.5})
		if len(r.Checks) != 2 || r.Checks[0].Verdict != want || r.Checks[1].Verdict != Passed ||
			r.Pass != (want == Passed) ||
			r.Checks[0].Scenario != "10,000 rules by labels" {
			t.Errorf("%v: unexpected checks %+v", many, r.Checks)
		}
	}
}

// TestPolicyGatesNotice: in every form of run, both gates fail for a loss of 18 %, which Nezha has from no rule to
// 1,000 rules (NZ10), and pass for equal figures.
func TestPolicyGatesNotice(t *testing.T) {
	for form, o := range map[string]Options{"quick": QuickPolicy(), "full": FullPolicy()} {
		for _, got := range []report.Interval{{Median: 0.82, Low: 0.81, High: 0.83}, {Median: 0.82, Low: 0.79,
			High: 0.86}, {Median: 0.82, Low: 0.74, High: 0.99}, {Median: 0.82, Low: 0.60, High: 1.20}} {
			if v := o.Gates[0].judge(got, o.TooWide); v == Passed {
				t.Errorf("%s: %+v passed", form, got)
			}
		}
		for _, got := range []report.Interval{{Median: 1, Low: 0.97, High: 1.03}, {Median: 0.97, Low: 0.93,
			High: 1.01}} {
			if v := o.Gates[0].judge(got, o.TooWide); v != Passed {
				t.Errorf("%s: %+v: got verdict %s", form, got, v)
			}
		}
	}
}

// TestGatesNameWhatThereIs: every gate names existing scenarios and metrics.
func TestGatesNameWhatThereIs(t *testing.T) {
	known := append(scenario.Names(scenario.Scenarios()), "", best)
	for _, g := range slices.Concat(FullGates(), QuickGates(), SmokeGates(), PolicyGates(ofNoRules)) {
		if _, ok := traffic.MetricByName(g.Metric); !ok || !slices.Contains(known, g.Scenario) ||
			!slices.Contains(known, g.Against) ||
			g.AtLeast == 0 && g.AtMost == 0 {
			t.Errorf("%+v", g)
		}
	}
	for form, gates := range map[string][]Gate{"full": FullGates(), "quick": QuickGates()} {
		for _, k := range kinds {
			if k.ofNative != nil &&
				!slices.ContainsFunc(
					gates,
					func(g Gate) bool {
						return g.Scenario == k.scenario && g.Against == "native" &&
							g.Metric == "TCP_RR"
					},
				) {
				t.Errorf("the gates of a %s run lack %s", form, k.scenario)
			}
		}
	}
}

// reported returns a report of samples by scenario, metric and round.
func reported(t *testing.T, o Options, samples [][][]float64) *Report {
	t.Helper()
	o.Rounds = len(samples[len(samples)-1][0])
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
		t.Error("a ratio of 0.70 to native passed")
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
		"netpila   native   TCP_RR   0.700   0.700–0.700   too low: at least 0.85",
		"3 datagrams were lost",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &text)
		}
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(b, &back); err != nil || len(back.Results) != 3 || len(back.Checks) != 1 ||
		back.Checks[0].Verdict != TooLow {
		t.Errorf("report.json decodes to %+v: %v", back, err)
	}
}

// TestReportWithoutRatios: a metric that the reference lacks has no ratio, whichever scenario is first.
func TestReportWithoutRatios(t *testing.T) {
	o := tiny(t)
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"PROGRAM_IN"})
	r := reported(t, o, [][][]float64{{nil}, {{60, 62}}})
	var text, page bytes.Buffer
	r.Table(&text)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text.String(), "PROGRAM_IN\tnetpila\t61.0 ns\t\t\t") ||
		!strings.Contains(text.String(), "of native") ||
		!strings.Contains(page.String(), `<td>61.0 ns</td><td></td>`) {
		t.Errorf("table:\n%s", &text)
	}
}

// TestPage: the page is one well-formed file without references to other files, with each metric's plot and table.
func TestPage(t *testing.T) {
	o := tiny(t)
	o.Scenarios = some("native", "route", "netpila")
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "FIRST_RTT", "PROGRAM_OUT"})
	r := reported(
		t,
		o,
		[][][]float64{{{100, 120}, {20, 20}, nil}, {{80, 96}, {30, 30}, nil}, {{70, 84}, {40, 44}, {71, 75}}},
	)
	var page bytes.Buffer
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	text := page.String()
	for _, want := range []string{
		"a software datapath between namespaces", "NETPILA fig. 20", "1 of 1 not reached", "too low: at least 0.85",
		`<th scope="row">route</th><td>88.0 1/s</td><td>0.800</td>`,
		`<th scope="row">netpila</th><td>42.0 µs</td><td>2.100</td>`,
		`<th scope="row">netpila</th><td>73.0 ns</td><td></td>`, `<th scope="row">pil_container</th>`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	plottest.CheckPage(t, text, 3)
	// The lengths of bars are proportional to their ratios: route's is 0.8 of native's.
	widths := regexp.MustCompile(`<rect class="theirs" x="150" y="5" width="([0-9.]+)"`).FindAllStringSubmatch(text, 2)
	var native, route float64
	fmt.Sscan(widths[0][1], &native)
	fmt.Sscan(widths[1][1], &route)
	if !(native > 100) || math.Abs(route/native-0.8) > 0.01 {
		t.Errorf("got bars of lengths %v and %v", native, route)
	}
}

// TestPolicyPage: the page distinguishes gates that were too noisy from gates that were not reached, and has the right
// conclusion.
func TestPolicyPage(t *testing.T) {
	o := tiny(t)
	o.Scenarios, o.Metrics = some("netpila", "netpila-rules-1"), o.Metrics[:1]
	o.TooWide = 0.2
	o.Gates = []Gate{{Scenario: "netpila-rules-1", Against: "netpila", Metric: "TCP_RR", AtLeast: 0.9}}
	for _, c := range []struct {
		samples      []float64
		want, wanted string // the conclusion, and the class of the verdict's cell
	}{
		{[]float64{60, 100, 140}, "1 of 1 gates too noisy to tell;", "about"},
		{[]float64{50, 50, 50}, "1 of 1 gates not reached.", "bad wrap"},
		{[]float64{100, 100, 100}, "policy rules cost less than the limits allow: all 1 gates passed.", "about"},
	} {
		r := reported(t, o, [][][]float64{{{100, 100, 100}}, {c.samples}})
		var page bytes.Buffer
		if err := r.Page(&page); err != nil {
			t.Fatal(err)
		}
		text := page.String()
		for _, want := range []string{
			"<title>Pilaster: policy rules measured, ", "<strong>Result:</strong> " + c.want, "is the divisor",
			`<td class="` + c.wanted + `">`,
		} {
			if !strings.Contains(text, want) {
				t.Errorf("the page of %v lacks %q", c.samples, want)
			}
		}
		if noisy := r.Checks[0].Verdict == TooNoisy; noisy && strings.Contains(text, "not reached") {
			t.Errorf("the page of %v reports a noisy gate as not reached", c.samples)
		}
	}
}

// TestBestDevice: the gates of all metrics apply to the same best device.
func TestBestDevice(t *testing.T) {
	o := tiny(t)
	o.Scenarios = some("native", "vxlan", "oncache", "netpila", "netpila-macvlan")
	o.Metrics, o.Gates = o.Metrics[:2], FullGates()
	r := reported(t, o, [][][]float64{
		{
			{100, 102, 99},
			{100, 95, 104},
		}, {{50, 51, 49.5}, {50, 47.5, 52}}, {{85, 86, 84}, {89, 86, 93}}, {{97, 98, 95}, {76, 75, 77}}, {{90, 92, 89},
			{90, 85, 93.5}},
	})
	var seen []string
	for _, c := range r.Checks {
		if c.Against == "native" && c.Got != *r.find(c.Scenario, c.Metric).Ratio {
			t.Errorf("%s: the gate checked %v, but the report shows %v", c.Metric, c.Got,
				r.find(c.Scenario, c.Metric).Ratio)
		}
		if c.Against == "vxlan" || c.Against == "oncache" {
			seen = append(
				seen,
				fmt.Sprintf("%s %s %s %.1f %s", c.Scenario, c.Against, c.Metric, c.Got.Median, c.Verdict),
			)
		}
		if strings.HasPrefix(c.Against, "bound") {
			t.Errorf("a gate has a verdict against a scenario that did not run: %+v", c)
		}
	}
	if n := len(r.Checks) + len(r.NotJudged); n != len(o.Gates) {
		t.Errorf("%d of %d gates have a verdict or are listed as not checked", n, len(o.Gates))
	}
	if !slices.Equal(seen, []string{
		"netpila-macvlan vxlan TCP_RR 1.8 ok", "netpila-macvlan vxlan UDP_RR 1.8 ok",
		"netpila-macvlan oncache TCP_RR 1.1 ok", "netpila-macvlan oncache UDP_RR 1.0 too low",
	}) {
		t.Errorf("unexpected checks of the best device: %q", seen)
	}
	var text, page bytes.Buffer
	r.Table(&text)
	err := r.Page(&page)
	if b, _ := json.Marshal(r); err != nil ||
		!strings.Contains(text.String(), "\nnetpila-macvlan (best device)\tvxlan\t") ||
		!strings.Contains(page.String(), "netpila-macvlan (best device)") ||
		strings.Count(string(b), `"bestDevice":true`) != 4 {
		t.Errorf("the text or page does not name the best device: %v\n%s", err, &text)
	}
}

// TestBestDeviceOfTheSameRounds: some rounds are slow. By ratios within each round macvlan is better, by medians veth.
func TestBestDeviceOfTheSameRounds(t *testing.T) {
	o := tiny(t)
	o.Scenarios, o.Gates = some("native", "oncache", "netpila", "netpila-macvlan"), FullGates()
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "FIRST_RTT"})
	r := reported(t, o, [][][]float64{
		{
			{100, 200, 300},
			{1, 2, 3},
		}, {{50, 100, 150}, {2, 4, 6}}, {{80, 190, 240}, {1.2, 2.1, 3.6}}, {{90, 180, 270}, {1.1, 2.2, 3.3}},
	})
	if got := r.bestOf([]string{"TCP_RR", "FIRST_RTT"}); got != "netpila-macvlan" {
		t.Errorf("got best device %s", got)
	}
}

// TestNotJudged: the report names gates without figures, and fails unless the kernel does not support their scenarios
// or the user did not choose them.
func TestNotJudged(t *testing.T) {
	o := tiny(t)
	o.Scenarios = some("native", "netpila")
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "UDP_RR"})
	o.Gates = []Gate{
		{
			Scenario: "netpila",
			Against:  "native",
			Metric:   "TCP_RR",
			AtLeast:  0.9,
		}, {Scenario: "netpila", Against: "native", Metric: "TCP_CRR", AtLeast: 0.9},
		{
			Scenario: "netpila-netkit",
			Against:  "native",
			Metric:   "TCP_RR",
			AtLeast:  0.9,
		}, {Scenario: "netpila-netkit", Against: "native", Metric: "UDP_RR", AtLeast: 0.9},
		{
			Scenario: best,
			Against:  "oncache",
			Metric:   "TCP_RR",
			AtLeast:  1,
		}, {Scenario: "netpila", Metric: "UDP_RR", AtLeast: 1},
	}
	meant := []string{
		"netpila beside native, these metrics did not run: TCP_CRR",
		"netpila-netkit beside native, netpila-netkit did not run: TCP_RR, UDP_RR",
		"netpila beside oncache, oncache did not run: TCP_RR",
	}
	for _, c := range []struct {
		udp  []float64
		pass bool
		want []string
	}{
		{[]float64{9, 9}, true, meant},
		{nil, false, append(slices.Clone(meant), "netpila, the scenario ran but has no figures: failed: UDP_RR")},
	} {
		r := reported(t, o, [][][]float64{{{10, 10}, {10, 10}}, {{10, 10}, c.udp}})
		var text, page bytes.Buffer
		r.Table(&text)
		if err := r.Page(&page); err != nil {
			t.Fatal(err)
		}
		for _, line := range c.want {
			if !strings.Contains(text.String(), "\nnot checked: "+line+"\n") ||
				!strings.Contains(page.String(), "<p>not checked: "+line+"</p>") {
				t.Errorf("the text or page lacks: %s", line)
			}
		}
		b, err := json.Marshal(r)
		if got := r.unjudged(); r.Pass != c.pass || len(r.Checks)+len(r.NotJudged) != len(o.Gates) ||
			!slices.Equal(got, c.want) ||
			err != nil ||
			!strings.Contains(string(b), `"notJudged":[{"scenario":"netpila"`) {
			t.Errorf("got pass %v, gates without verdict %q, %v\n%s", r.Pass, got, err, b)
		}
		plottest.CheckPage(t, page.String(), 2)
	}
}

func TestFigure(t *testing.T) {
	for v, want := range map[float64]string{1: "1.0", 41.26: "41.3", 999: "999.0", 1000: "1,000", 135012.4: "135,012",
		1234567: "1,234,567"} {
		if got := report.Figure(v); got != want {
			t.Errorf("Figure(%v) = %s, want %s", v, got, want)
		}
	}
}

func TestAgreements(t *testing.T) {
	all := Agreements{
		{
			Metric:  "TCP_RR",
			Tool:    "sockperf",
			Unit:    "1/s",
			Ours:    50_000,
			Theirs:  48_000,
			Ratio:   report.Interval{Median: 1.04, Low: 1.01, High: 1.06},
			Verdict: Passed,
		},
		{
			Metric:  "TCP_STREAM",
			Tool:    "iperf3",
			Unit:    "Gbit/s",
			Ours:    20,
			Theirs:  40,
			Ratio:   report.Interval{Median: 0.5, Low: 0.48, High: 0.52},
			Verdict: TooLow,
		},
		{
			Metric:  "UDP_RR",
			Tool:    "sockperf",
			Unit:    "1/s",
			Ours:    1,
			Theirs:  1,
			Ratio:   report.Interval{Median: 1, Low: 0.5, High: 2},
			Verdict: TooNoisy,
		},
	}
	var text bytes.Buffer
	all.Table(&text)
	if all.Agree() || !all[:1].Agree() || !strings.Contains(text.String(), "\ttoo low: not between 0.80 and 1.25\n") ||
		!strings.Contains(text.String(), "too noisy to tell\n") ||
		!strings.Contains(text.String(), "TCP_RR\tsockperf\t50,000 1/s\t48,000\t1.040\t1.010–1.060\tok\n") {
		t.Errorf("table:\n%s", &text)
	}
	for said, want := range map[string]float64{"x\nsockperf: Summary: Round trip is 12.500 " +
		"usec\n": 80_000, "sockperf: ERROR": 0} {
		if got, err := roundTripRate([]byte(said)); got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: got %v, %v", said, got, err)
		}
	}
	for said, want := range map[string]float64{
		`{"end":{"sum_received":{"bits_per_second":4e10}}}`: 40, `{"end":{}}`: 0, `x`: 0,
	} {
		if got, err := received([]byte(said)); got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: got %v, %v", said, got, err)
		}
	}
}
