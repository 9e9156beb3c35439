package bench

import (
	"fmt"
	"math"
	"slices"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// Gate asks something of one metric of a scenario.
type Gate struct {
	Scenario string `json:"scenario"`
	// Against is the scenario whose figure of the same round this one's is divided by; "": the figure itself counts.
	Against string  `json:"against,omitempty"`
	Metric  string  `json:"metric"`
	AtLeast float64 `json:"atLeast,omitempty"`
	AtMost  float64 `json:"atMost,omitempty"`
	// Whole asks it of the interval's far end, not of the median.
	Whole bool `json:"whole,omitempty"`
	// Reach is what the interval's better end must be at least: below it the figures show that the two are not equal.
	Reach float64 `json:"reach,omitempty"`
}

// Check is a gate and what came of it.
type Check struct {
	Gate
	// Best says that the scenario was chosen, as the best of the device kinds.
	Best    bool            `json:"bestDevice,omitempty"`
	Got     report.Interval `json:"got"`
	Verdict Verdict         `json:"verdict"`
}

// Unjudged is a gate that the run has no figures for, and why.
type Unjudged struct {
	Gate
	Why string `json:"why"`
}

// Verdict says whether a gate was reached.
type Verdict string

const (
	Passed   Verdict = "ok"
	TooLow   Verdict = "too low"
	TooHigh  Verdict = "too high"
	TooNoisy Verdict = "too noisy"
)

// judge knows no verdict where the interval is wider than tooWide of one, or of the figure where that is more, and
// what is asked lies in it; 0 takes any width.
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

// wants is what a gate asks, in words.
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
	ofNative        map[string]float64 // nil: nothing is asked
}

// kinds are our scenarios by device kind, and what the same device does without us.
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

// ofVXLAN is what the best of the kinds must be of kernel VXLAN.
var ofVXLAN = map[string]float64{"TCP_RR": 1.5, "UDP_RR": 1.5, "TCP_CRR": 1.5, "TCP_STREAM": 1.25}

const (
	ofBound     = 0.97 // of the same device without BPF, in every speed
	ofClear     = 0.97 // an encrypted tenant, of a clear one
	ofLocal     = 1.00 // within a node, of node to node
	firstPacket = 1.05 // of native's, at most
	programTime = 80   // ns a packet and direction, cached, at most
)

// FullGates are what a run on a quiet machine, pinned to one CPU, has to show.
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
	for _, local := range []string{"netpila-local", "netpila-local-macvlan"} {
		gates = append(gates, atLeast(local, "native", false, speeds(ofLocal))...)
	}
	gates = append(gates, atLeast(best, "vxlan", false, ofVXLAN)...)
	return append(gates, noWorse(best, "oncache")...)
}

// QuickGates notice a datapath that is broken or slow by a great deal; a quick run shows no more.
func QuickGates() []Gate {
	var gates []Gate
	for _, k := range kinds {
		gates = append(gates, atLeast(k.scenario, "native", false, map[string]float64{
			"TCP_RR": 0.85, "UDP_RR": 0.85, "TCP_STREAM": 0.85, "TCP_CRR": 0.75, "UDP_PPS": 0.75,
		})...)
	}
	return append(gates, noWorse(best, "oncache")...)
}

// policyBars are what a tenant under policies is to be of one without, and under many rules of one under a single rule:
// the median at least, for the medians of streams under the same program differ by 5 % from one run to the next, and
// the interval's better end.
type policyBars struct{ median, reach float64 }

// A quick run only notices what is slow by a great deal, as by the 18 % of NZ10.
var (
	ofNoRules      = policyBars{0.92, 0.97}
	ofNoRulesQuick = policyBars{0.87, 0.92}
)

// ofOneRule is what asking many rules may take of asking one: the machine's noise, and not the number of them.
const ofOneRule = 1.5

// PolicyGates ask that the number of rules costs nothing, and a policy next to nothing where connections last: that
// they are equal within the interval.
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

// SmokeGates hold on a machine that does other things meanwhile.
func SmokeGates() []Gate {
	return atLeast("netpila", "native", false, speeds(0.25))
}

// atLeast are gates of one scenario, in the order of metrics.
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

// noWorse asks for at least the other's figure in every metric, or at most where less is better, of the whole interval.
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

// speeds asks the same of every metric of which more is better.
func speeds(bar float64) map[string]float64 {
	bars := map[string]float64{}
	for _, m := range traffic.Metrics() {
		if !m.Less {
			bars[m.Name] = bar
		}
	}
	return bars
}

// best stands for the device kind that does best of those in the run: one, and the same for all metrics.
const best = "best device"

// bestOf is the kind with the highest product over the metrics, inverted where less is better: of ratios to the
// reference, which are of the same rounds as what is judged, or of figures where the reference has none.
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

// check judges the run's gates. One that has no figures is no pass, unless the run was to have none: the kernel lacks
// the scenario, or somebody chose others.
func (r *Report) check(o Options) {
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
		values := slices.Clone(ours.Samples)
		if theirs != nil {
			values = report.Ratios(ours.Samples, theirs.Samples)
		}
		c := Check{Gate: g, Best: isBest, Got: r.Settings.interval(values)}
		c.Verdict = g.judge(c.Got, r.Settings.TooWide)
		r.Pass = r.Pass && c.Verdict == Passed
		r.Checks = append(r.Checks, c)
	}
}

// missing is why a run has no figures for a gate, and whether it was not to have them.
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
	return "it ran and has no figures, no pass", false
}

// unjudged is a line for all metrics of the same scenarios.
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
			lines[len(lines)-1] += ", " + u.Metric
			continue
		}
		lines, before = append(lines, of+": "+u.Metric), of
	}
	return lines
}
