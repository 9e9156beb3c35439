package bench

import (
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/plot"
)

// others are the scenarios of NIMITZ, the network that NETPILA replaced (NP11).
var others = []string{"nimitz-ebpf", "nimitz-ovs"}

// Comparison is the ratio of one scenario's figure to another scenario's figure of the same round.
type Comparison struct {
	Scenario string          `json:"scenario"`
	Against  string          `json:"against"`
	Metric   string          `json:"metric"`
	Less     bool            `json:"lessIsBetter,omitempty"`
	Ratio    report.Interval `json:"ratio"`
	// CPU is the ratio of CPU times; 0 if none was measured.
	CPU float64 `json:"cpu,omitempty"`
	// Paper is what a paper reports of the comparison.
	Paper string `json:"paper,omitempty"`
}

// beside compares our scenario of each device kind with all scenarios of NIMITZ, and each other scenario with the
// scenario in its field Of, in every metric that both have.
func (r *Report) beside(scenarios []scenario.Scenario) (all []Comparison) {
	for _, metric := range r.metrics() {
		compare := func(scenario, against, paper string) {
			ours, theirs := r.find(scenario, metric), r.find(against, metric)
			if ours == nil || theirs == nil {
				return
			}
			c := Comparison{Scenario: scenario, Against: against, Metric: metric, Less: ours.Less, Paper: paper}
			c.Ratio = r.Settings.interval(report.Ratios(ours.Samples, theirs.Samples))
			if theirs.CPUMicros > 0 {
				c.CPU = ours.CPUMicros / theirs.CPUMicros
			}
			all = append(all, c)
		}
		for _, against := range others {
			for _, k := range kinds {
				compare(k.scenario, against, "")
			}
		}
		for _, s := range scenarios {
			compare(s.Name, s.Of, s.Paper[metric])
		}
	}
	return all
}

// inPapers is what the papers report of each comparison.
var inPapers = map[string]string{
	"nimitz-ebpf": ofNIMITZ, "nimitz-ovs": ofNIMITZ,
	"netpila": "from 0 to 1,000 rules, Nezha's lookups are slower by 18 % (table A1, NZ10)",
	"route": "a filter by netfilter and one by eBPF have no measurable cost, with one rule (CI1, fig. " +
		"14)",
}

const ofNIMITZ = "NETPILA table 1 and §7.2 (NP11): NIMITZ costs 2.5 % of latency and 2.6 % of throughput beside " +
	"NETPILA, " +
	"on servers whose NIC encapsulates"

func (c Comparison) cells() []string {
	cpu := ""
	if c.CPU > 0 {
		cpu = report.Precise(c.CPU)
	}
	better := "more"
	if c.Less {
		better = "less"
	}
	return []string{c.Metric, better, c.Scenario, c.Against, report.Precise(c.Ratio.Median), c.Ratio.String(), cpu}
}

// besideTable has one line for each comparison, and a last column only if a paper reports a figure.
func besideTable(all []Comparison) *plot.Table {
	t := &plot.Table{Head: []string{"metric", "better", "figure of", "by that of", "ratio", "95 %", "CPU time"}}
	papers := slices.ContainsFunc(all, Comparison.inPaper)
	if papers {
		t.Head = append(t.Head, "in the paper")
	}
	for _, c := range all {
		row := c.cells()
		if papers {
			row = append(row, c.Paper)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func (c Comparison) inPaper() bool { return c.Paper != "" }

// besideNote says what papers report of comparisons with one scenario.
func besideNote(against string, of []Comparison) string {
	const ours = "Here: a software datapath between namespaces. More is better for speeds, less for round trips and " +
		"times of programs."
	switch in := inPapers[against]; {
	case slices.ContainsFunc(of, Comparison.inPaper):
		return "The last column has a paper's figures of the same comparison, between servers on a wire. " + ours
	case in != "":
		return "In the papers: " + in + ". " + ours
	}
	return ours
}

// besideSections returns one section for each scenario with which others were compared.
func (r *Report) besideSections() (all []plot.Section) {
	groups := map[string][]Comparison{}
	for _, c := range r.Beside {
		groups[c.Against] = append(groups[c.Against], c)
	}
	for _, against := range slices.Sorted(maps.Keys(groups)) {
		of := groups[against]
		var bars []plot.Bar
		for _, c := range of {
			bars = append(bars, plot.Bar{
				Name: c.Metric + " · " + c.Scenario, Class: class(c.Scenario), Figure: report.Precise(c.Ratio.Median),
				At: plot.Span(c.Ratio),
			})
		}
		title := "beside " + against
		all = append(all, plot.Section{
			Title: title,
			Notes: []plot.Note{{Text: besideNote(against, of)}},
			Bars:  plot.NewBars(title, "of "+against, report.NameWidth, true, bars),
			Table: besideTable(of),
		})
	}
	return all
}
