package bench

import (
	"fmt"
	"math"
	"slices"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// Gate is a limit for one metric of a scenario.
type Gate struct {
	Scenario string `json:"scenario"`
	// Against is the scenario whose figure of the same round is the divisor. If it is empty, the limit applies to the
	// figure itself.
	Against string `json:"against,omitempty"`
	Metric  string `json:"metric"`
	// CPU applies the limit to the CPU time of an operation instead of the figure.
	CPU     bool    `json:"cpu,omitempty"`
	AtLeast float64 `json:"atLeast,omitempty"`
	AtMost  float64 `json:"atMost,omitempty"`
	// Whole applies the limit to the worse end of the interval instead of the median.
	Whole bool `json:"whole,omitempty"`
	// Reach is the minimum of the interval's upper end. If the upper end is lower, the figures show that the scenario
	// is slower.
	Reach float64 `json:"reach,omitempty"`
}

// Check is a gate with its result.
type Check struct {
	Gate
	// Best reports that the scenario is the best of the device kinds.
	Best    bool            `json:"bestDevice,omitempty"`
	Got     report.Interval `json:"got"`
	Verdict Verdict         `json:"verdict"`
}

// Unjudged is a gate that was not applied because the run has no figures for it, and the reason.
type Unjudged struct {
	Gate
	Why string `json:"why"`
}

// Verdict is the result of a gate.
type Verdict string

const (
	Passed   Verdict = "ok"
	TooLow   Verdict = "too low"
	TooHigh  Verdict = "too high"
	TooNoisy Verdict = "too noisy"
)

// judge returns TooNoisy if the limit is inside the interval and the interval is too wide: wider than tooWide, or than
// tooWide times the median if the median exceeds 1. If tooWide is 0, no interval is too wide.
func (g Gate) judge(got report.Interval, tooWide float64) Verdict {
	low, high := got.Median, got.Median
	wide := tooWide > 0 && got.High-got.Low > tooWide*max(1, got.Median)
	if g.Whole || wide {
		low, high = got.Low, got.High
	}
	inside := g.AtLeast > got.Low && g.AtLeast < got.High || g.AtMost > got.Low && g.AtMost < got.High
	switch {
	case wide && inside:
		return TooNoisy
	case g.AtLeast > 0 && low < g.AtLeast, got.High < g.Reach:
		return TooLow
	case g.AtMost > 0 && high > g.AtMost:
		return TooHigh
	}
	return Passed
}

// wants describes the gate in words.
func (g Gate) wants() string {
	what := fmt.Sprintf("at least %.2f", g.AtLeast)
	if g.AtMost > 0 {
		what = fmt.Sprintf("at most %.4g", g.AtMost)
	}
	if g.Whole {
		what += " (whole interval)"
	}
	if g.Reach > 0 {
		what += fmt.Sprintf(", and the interval's end %.2f", g.Reach)
	}
	return what
}

type kind struct {
	scenario, bound string
	ofNative        map[string]float64 // nil: no gate
}

// kinds are our scenarios by device kind, and the scenario of the same device without our programs.
var kinds = []kind{
	{
		"netpila",
		"bound-veth",
		map[string]float64{"TCP_RR": 0.91, "UDP_RR": 0.88, "TCP_STREAM": 0.96, "TCP_CRR": 0.88, "UDP_PPS": 0.86},
	},
	{
		"netpila-macvlan",
		"bound-macvlan",
		map[string]float64{"TCP_RR": 0.96, "UDP_RR": 0.95, "TCP_STREAM": 0.95, "TCP_CRR": 0.93, "UDP_PPS": 0.92},
	},
	{"netpila-netkit", "bound-netkit", nil},
}

// ofVXLAN is the minimum ratio of the best kind to kernel VXLAN.
var ofVXLAN = map[string]float64{"TCP_RR": 1.5, "UDP_RR": 1.5, "TCP_CRR": 1.5, "TCP_STREAM": 1.25}

// ofTunnel is the minimum ratio of a network without tunnels to kernel VXLAN.
var ofTunnel = map[string]float64{"TCP_RR": 1.5, "UDP_RR": 1.5}

const (
	ofBound     = 0.97 // ratio to the same device without BPF, for every speed
	ofClear     = 0.97 // ratio of an encrypted tenant to a clear one
	ofIPv6      = 0.97 // ratio of tunnels over IPv4 to the same programs with tunnels over IPv6
	ofLocal     = 1.00 // ratio of traffic within a node to traffic between nodes
	firstPacket = 1.05 // maximum ratio to native
	programTime = 80   // maximum of cached packets, in ns per packet and direction
)

// FullGates are the gates of a full run on an idle machine, pinned to one CPU.
func FullGates() []Gate {
	var gates []Gate
	for _, k := range kinds {
		gates = append(gates, atLeast(k.scenario, "native", false, k.ofNative)...)
		gates = append(gates, atLeast(k.scenario, k.bound, true, speeds(ofBound))...)
		gates = append(gates,
			Gate{Scenario: k.scenario, Against: "native", Metric: "FIRST_RTT", AtMost: firstPacket},
			Gate{Scenario: k.scenario, Metric: "PROGRAM_OUT", AtMost: programTime},
			Gate{Scenario: k.scenario, Metric: "PROGRAM_IN", AtMost: programTime})
	}
	gates = append(gates, atLeast("netpila", "netpila-clear", true, speeds(ofClear))...)
	gates = append(gates, atLeast("ila", "netpila-clear", false, speeds(ofClear))...)
	gates = append(gates, atLeast("ila", "vxlan", false, ofTunnel)...)
	gates = append(gates, atLeast("evpn", "nimitz-ebpf", false, speeds(ofIPv6))...)
	for _, local := range []string{"netpila-local", "netpila-local-macvlan"} {
		gates = append(gates, atLeast(local, "native", false, speeds(ofLocal))...)
	}
	gates = append(gates, atLeast(best, "vxlan", false, ofVXLAN)...)
	return append(gates, noWorse(best, "oncache")...)
}

// QuickGates detect a datapath that is broken or much slower. A quick run cannot show smaller differences.
func QuickGates() []Gate {
	var gates []Gate
	for _, k := range kinds {
		gates = append(gates, atLeast(k.scenario, "native", false, map[string]float64{
			"TCP_RR": 0.85, "UDP_RR": 0.85, "TCP_STREAM": 0.85, "TCP_CRR": 0.75, "UDP_PPS": 0.75,
		})...)
	}
	return append(gates, noWorse(best, "oncache")...)
}

// policyBars are minimum ratios of a tenant with policies to a tenant without, and of many rules to a single rule.
// median applies to the median of the ratio. It allows for 5 %, by which medians of streams under the same program
// differ between runs. reach applies to the upper end of the interval.
type policyBars struct{ median, reach float64 }

// Limits of quick and full runs. A quick run detects only large differences, such as the 18 % of NZ10.
var (
	ofNoRules      = policyBars{0.92, 0.97}
	ofNoRulesQuick = policyBars{0.87, 0.92}
)

// ofOneRule is the maximum ratio of a lookup's time under many rules to its time under a single rule. It only allows
// for noise of the machine.
const ofOneRule = 1.5

// PolicyGates require that the number of rules does not change the figures, and that a policy almost does not change
// the figures of long connections.
func PolicyGates(of policyBars) []Gate {
	bar := of.median
	var gates []Gate
	lasting := map[string]float64{"TCP_RR": bar, "UDP_RR": bar, "UDP_PPS": bar, "TCP_STREAM": bar, "TCP_STREAM4": bar}
	for _, n := range scenario.RuleCounts {
		name := fmt.Sprint("netpila-rules-", n)
		gates = append(gates, atLeast(name, "netpila", false, lasting)...)
		if n > 1 {
			gates = append(gates, atLeast(name, "netpila-rules-1", false, map[string]float64{"TCP_CRR": bar})...)
		}
	}
	for i := range gates {
		gates[i].Reach = of.reach
	}
	return gates
}

// SmokeGates are loose enough for a busy machine.
func SmokeGates() []Gate {
	return atLeast("netpila", "native", false, speeds(0.25))
}

// atLeast returns gates of one scenario, in the order of traffic.Metrics.
func atLeast(scenario, against string, whole bool, bars map[string]float64) []Gate {
	var gates []Gate
	for _, m := range traffic.Metrics() {
		if bar, asked := bars[m.Name]; asked {
			gates = append(
				gates,
				Gate{Scenario: scenario, Against: against, Metric: m.Name, AtLeast: bar, Whole: whole},
			)
		}
	}
	return gates
}

// noWorse returns gates for all metrics. Each requires that no part of the interval is worse than the other scenario's
// figure.
func noWorse(scenario, against string) []Gate {
	var gates []Gate
	for _, m := range traffic.Metrics() {
		g := Gate{Scenario: scenario, Against: against, Metric: m.Name, AtLeast: 1, Whole: true}
		if m.Less {
			g.AtLeast, g.AtMost = 0, 1
		}
		gates = append(gates, g)
	}
	return gates
}

// speeds returns the same limit for every metric whose larger values are better.
func speeds(bar float64) map[string]float64 {
	bars := map[string]float64{}
	for _, m := range traffic.Metrics() {
		if !m.Less {
			bars[m.Name] = bar
		}
	}
	return bars
}

// best stands for the scenario of the best device kind of the run. It is the same scenario for all metrics.
const best = "best device"

// bestOf returns the scenario of the device kind whose product over the metrics is highest. The factors are ratios to
// the reference, or figures if the reference has none. If less is better, the factor is the inverse.
func (r *Report) bestOf(metrics []string) string {
	name, highest := "", math.Inf(-1)
	for _, k := range kinds {
		sum := 0.0
		for _, metric := range metrics {
			x := r.find(k.scenario, metric)
			if x == nil {
				continue
			}
			is := x.Median
			if x.Ratio != nil {
				is = x.Ratio.Median
			}
			if x.Less {
				is = 1 / is
			}
			sum += math.Log(is)
		}
		if r.has(k.scenario) && sum > highest {
			name, highest = k.scenario, sum
		}
	}
	return name
}

// Judge applies the gates of a run to its results. A gate without figures fails, unless the kernel does not support the
// scenario or the user chose other scenarios.
func (r *Report) Judge(o Options) {
	var judged []string
	for _, g := range o.Gates {
		if g.Scenario == best && !slices.Contains(judged, g.Metric) {
			judged = append(judged, g.Metric)
		}
	}
	chosen := r.bestOf(judged)
	for _, g := range o.Gates {
		isBest := g.Scenario == best && chosen != ""
		if isBest {
			g.Scenario = chosen
		}
		ours, theirs := r.find(g.Scenario, g.Metric), r.find(g.Against, g.Metric)
		if ours == nil || g.Against != "" && theirs == nil {
			why, meant := o.missing(g)
			r.NotJudged = append(r.NotJudged, Unjudged{g, why})
			r.Pass = r.Pass && meant
			continue
		}
		values := g.values(ours, theirs)
		if len(values) == 0 {
			r.NotJudged = append(r.NotJudged, Unjudged{g, "no CPU time was measured: failed"})
			r.Pass = false
			continue
		}
		c := Check{Gate: g, Best: isBest, Got: r.Settings.interval(values)}
		c.Verdict = g.judge(c.Got, r.Settings.TooWide)
		r.Pass = r.Pass && c.Verdict == Passed
		r.Checks = append(r.Checks, c)
	}
}

// values returns the samples that a gate applies to: figures or CPU times, or their ratios to those of the other
// scenario in the same round. A round in which a CPU time is too short to be measured has no ratio.
func (g Gate) values(ours, theirs *Result) []float64 {
	of := func(x *Result) []float64 {
		if g.CPU {
			return x.CPUSamples
		}
		return x.Samples
	}
	if theirs == nil {
		return slices.Clone(of(ours))
	}
	values := report.Ratios(of(ours), of(theirs))
	if g.CPU {
		values = slices.DeleteFunc(values, func(v float64) bool { return !(v > 0) || math.IsInf(v, 1) })
	}
	return values
}

// what names the figure that a gate applies to.
func (g Gate) what() string {
	if g.CPU {
		return "CPU time of " + g.Metric
	}
	return g.Metric
}

// missing returns the reason why a run has no figures for a gate. meant reports whether the kernel or the user's choice
// is the reason.
func (o Options) missing(g Gate) (why string, meant bool) {
	ran := scenario.Names(o.Scenarios)
	if g.Scenario == best &&
		!slices.ContainsFunc(kinds, func(k kind) bool { return slices.Contains(ran, k.scenario) }) {
		return "no device kind of ours ran", true
	}
	for _, name := range []string{g.Scenario, g.Against} {
		if name != "" && name != best && !slices.Contains(ran, name) {
			return name + " did not run", true
		}
	}
	if !slices.Contains(scenario.Names(o.Metrics), g.Metric) {
		return "these metrics did not run", true
	}
	return "the scenario ran but has no figures: failed", false
}

// unjudged describes the gates without figures, in one line for all metrics of the same scenarios.
func (r *Report) unjudged() []string {
	var lines []string
	before := ""
	for _, u := range r.NotJudged {
		of := u.Scenario
		if u.Against != "" {
			of += " beside " + u.Against
		}
		of += ", " + u.Why
		if of == before {
			lines[len(lines)-1] += ", " + u.what()
			continue
		}
		lines, before = append(lines, of+": "+u.what()), of
	}
	return lines
}
