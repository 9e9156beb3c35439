package bench

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/plot"
)

// others are the scenarios of the second network, which ours replaced (NP11).
var others = []string{"nimitz-ebpf", "nimitz-ovs"}

// Comparison is a figure of ours of one of theirs, as the ratio within a round.
type Comparison struct {
	Scenario string   `json:"scenario"`
	Against  string   `json:"against"`
	Metric   string   `json:"metric"`
	Less     bool     `json:"lessIsBetter,omitempty"`
	Ratio    Interval `json:"ratio"`
	// CPU is the ratio of CPU times; 0 where none is told.
	CPU float64 `json:"cpu,omitempty"`
}

// beside compares all kinds of ours with all of theirs, and scenarios with those that they are to be compared to, in
// every metric that both have.
func (r *Report) beside(scenarios []Scenario) (all []Comparison) {
	for _, metric := range r.metrics() {
		compare := func(scenario, against string) {
			ours, theirs := r.find(scenario, metric), r.find(against, metric)
			if ours == nil || theirs == nil {
				return
			}
			c := Comparison{Scenario: scenario, Against: against, Metric: metric, Less: ours.Less}
			c.Ratio = r.Settings.interval(ratios(ours.Samples, theirs.Samples))
			if theirs.CPUMicros > 0 {
				c.CPU = ours.CPUMicros / theirs.CPUMicros
			}
			all = append(all, c)
		}
		for _, against := range others {
			for _, k := range kinds {
				compare(k.scenario, against)
			}
		}
		for _, s := range scenarios {
			compare(s.Name, s.Of)
		}
	}
	return all
}

// inPapers is what the comparisons are there for.
var inPapers = map[string]string{
	"nimitz-ebpf": ofNIMITZ, "nimitz-ovs": ofNIMITZ,
	"netpila": "from 0 to 1,000 rules, Nezha's lookups are slower by 18 % (table A1, NZ10)",
	"route":   "a filter by netfilter and one by eBPF cost nothing that could be measured, with one rule (CI1, fig. 14)",
}

const ofNIMITZ = "NETPILA table 1 and §7.2 (NP11): NIMITZ costs 2.5 % of latency and 2.6 % of throughput beside NETPILA, on servers whose NIC encapsulates"

func (c Comparison) cells() []string {
	cpu := ""
	if c.CPU > 0 {
		cpu = precise(c.CPU)
	}
	better := "more"
	if c.Less {
		better = "less"
	}
	return []string{c.Metric, better, c.Scenario, c.Against, precise(c.Ratio.Median), c.Ratio.String(), cpu}
}

var besideHead = []string{"metric", "better", "figure of", "by that of", "ratio", "95 %", "CPU time"}

func (r *Report) besideTable(w io.Writer) {
	if len(r.Beside) == 0 {
		return
	}
	fmt.Fprintln(w)
	writeRow(w, besideHead)
	for _, c := range r.Beside {
		writeRow(w, c.cells())
	}
}

func writeRow(w io.Writer, cells []string) { fmt.Fprintln(w, strings.Join(cells, "\t")) }

// besideSections are one of theirs each.
func (r *Report) besideSections() (all []plot.Section) {
	for _, against := range slices.Sorted(maps.Keys(inPapers)) {
		s := plot.Section{
			Title: "beside " + against,
			About: "In the papers: " + inPapers[against] + ". Here: a software datapath between namespaces. " +
				"Speeds of which more is better, round trips and programs' times of which less is.",
			Head: besideHead,
		}
		var bars []plot.Bar
		for _, c := range r.Beside {
			if c.Against == against {
				s.Rows = append(s.Rows, c.cells())
				bars = append(
					bars,
					plot.Bar{
						Name:   c.Metric + " · " + c.Scenario,
						Class:  class(c.Scenario),
						Figure: precise(c.Ratio.Median),
						At:     plot.Span(c.Ratio),
					},
				)
			}
		}
		if len(bars) > 0 {
			s.Bars = plot.NewBars(s.Title, "of "+against, besideNames, true, bars)
			all = append(all, s)
		}
	}
	return all
}

const besideNames = 270 // room for names
