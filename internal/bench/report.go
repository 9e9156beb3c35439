package bench

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// Report is a complete run, including all samples, so that its results can be recomputed.
type Report struct {
	report.Header
	Settings Settings `json:"settings"`
	// Reference is the scenario that ratios refer to.
	Reference string `json:"reference"`
	// LeftOut lists scenarios that the kernel does not support, with the reasons.
	LeftOut []string `json:"leftOut,omitempty"`
	Results []Result `json:"results"`
	// Beside are ratios of our scenarios to those of NIMITZ.
	Beside   []Comparison `json:"beside,omitempty"`
	Programs []Program    `json:"programs,omitempty"`
	// Lookups are the costs of first packets by rules and size.
	Lookups []LookupCost `json:"lookups,omitempty"`
	// Profiles attribute the CPU time of a UDP_RR transaction to parts of the path.
	Profiles []Profile `json:"profiles,omitempty"`
	// EmptyProgramNs is the time that the kernel reports for an empty program; the times of all programs include it.
	EmptyProgramNs float64 `json:"emptyProgramNs,omitempty"`
	Checks         []Check `json:"checks,omitempty"`
	// NotJudged are the gates without figures.
	NotJudged []Unjudged `json:"notJudged,omitempty"`
	// Lost is the number of datagrams without an echo within 100 ms; each adds that time to UDP_RR.
	Lost int  `json:"lost"`
	Pass bool `json:"pass"` // all checks passed, and none is missing
}

type Settings struct {
	Form       string  `json:"form"`
	Rounds     int     `json:"rounds"`
	WarmupMs   int64   `json:"warmupMs"`
	WindowMs   int64   `json:"windowMs"`
	CPU        int     `json:"cpu"` // CPU of both client and server; -1: any
	Congestion string  `json:"congestion"`
	Seed       uint64  `json:"seed"`
	TooWide    float64 `json:"tooWide"` // width from which an interval gives no verdict, relative to 1 or to its median
}

// Result is one metric of one scenario.
type Result struct {
	Scenario string    `json:"scenario"`
	About    string    `json:"about"`
	Metric   string    `json:"metric"`
	Unit     string    `json:"unit"`
	Less     bool      `json:"lessIsBetter,omitempty"`
	Median   float64   `json:"median"`
	Samples  []float64 `json:"samples"` // by round
	// Spread is the interval of the median. It is wider than the interval of Ratio, because it includes differences
	// between rounds.
	Spread report.Interval `json:"spread"`
	// Ratio is the median of the rounds' ratios. Each divides the sample by the reference's sample of the same round.
	// It is nil if the reference does not have this metric.
	Ratio *report.Interval `json:"ratio,omitempty"`
	// CPUMicros is the CPU time in µs per Counted, on all CPUs or on the CPU to which the run was pinned.
	CPUMicros float64 `json:"cpuMicros,omitempty"`
	Counted   string  `json:"counted,omitempty"`
	// CPUSamples are the CPU times by round, in µs per Counted.
	CPUSamples []float64 `json:"cpuSamples,omitempty"`
}

// Program is one of our programs, and its time per packet.
type Program struct {
	Scenario string          `json:"scenario"`
	Name     string          `json:"name"`
	Ns       report.Interval `json:"ns"`
	Samples  []float64       `json:"samples"`
}

// interval always uses the same seed, so that equal samples have equal intervals in the whole report.
func (s Settings) interval(samples []float64) report.Interval {
	return report.Bootstrap(samples, rand.New(rand.NewPCG(s.Seed, 1)))
}

// report computes the report from the samples.
func (r *run) report(started time.Time) *Report {
	p := &Report{
		Header: report.NewHeader(started),
		Settings: Settings{
			Form: r.Form, Rounds: r.Rounds, WarmupMs: r.Warmup.Milliseconds(), WindowMs: r.Window.Milliseconds(),
			CPU: r.CPU, Congestion: traffic.Congestion, Seed: r.Seed, TooWide: r.TooWide,
		},
		Reference: r.Scenarios[0].Name, LeftOut: r.LeftOut, EmptyProgramNs: r.emptyProgram,
		Pass: true,
	}
	for s, scenario := range r.Scenarios {
		for m, metric := range r.Metrics {
			t, reference := r.taken[s][m], r.taken[0][m]
			p.Lost += t.lost
			if len(t.values) == 0 {
				continue
			}
			x := Result{
				Scenario: scenario.Name, About: scenario.About, Metric: metric.Name, Unit: metric.Unit,
				Less:   metric.Less,
				Median: report.Median(t.values), Samples: t.values, Spread: p.Settings.interval(t.values),
			}
			if len(reference.values) > 0 {
				ratio := p.Settings.interval(report.Ratios(t.values, reference.values))
				x.Ratio = &ratio
			}
			if metric.Counted != "" && t.ops > 0 {
				x.CPUMicros, x.Counted, x.CPUSamples = t.busy/t.ops*1e6, metric.Counted, t.cpu
			}
			p.Results = append(p.Results, x)
		}
		for _, name := range slices.Sorted(maps.Keys(r.programs[s])) {
			samples := r.programs[s][name]
			p.Programs = append(p.Programs, Program{scenario.Name, name, p.Settings.interval(samples), samples})
		}
	}
	p.Beside, p.Profiles, p.Lookups = p.beside(r.Scenarios), r.profilesOf(p.Settings), r.looked
	p.Judge(r.Options)
	p.checkLookups(r.Options.Lookups)
	return p
}

// find returns nil if the run has no such result.
func (r *Report) find(scenario, metric string) *Result {
	i := slices.IndexFunc(r.Results, func(x Result) bool { return x.Scenario == scenario && x.Metric == metric })
	if i < 0 {
		return nil
	}
	return &r.Results[i]
}

func (r *Report) has(scenario string) bool {
	return slices.ContainsFunc(r.Results, func(x Result) bool { return x.Scenario == scenario })
}

// metrics are the metrics that any scenario has, in the order of traffic.All.
func (r *Report) metrics() []string {
	var names []string
	for _, m := range traffic.All() {
		if slices.ContainsFunc(r.Results, func(x Result) bool { return x.Metric == m.Name }) {
			names = append(names, m.Name)
		}
	}
	return names
}

// of returns the results of a metric.
func (r *Report) of(metric string) []Result {
	return slices.DeleteFunc(slices.Clone(r.Results), func(x Result) bool { return x.Metric != metric })
}
