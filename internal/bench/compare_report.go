package bench

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// CompareReport is the result of `pilaster bench compare`.
type CompareReport struct {
	report.Header
	This    Build           `json:"this"`
	Other   Build           `json:"other"`
	Pairs   int             `json:"pairs"`
	AtLeast float64         `json:"atLeast"` // of speeds
	TooWide float64         `json:"tooWide"` // width from which an interval around AtLeast gives no verdict
	Seed    uint64          `json:"seed"`
	Results []CompareResult `json:"results"`
	Pass    bool            `json:"pass"`
}

// Build is a program and its version.
type Build struct {
	Program string `json:"program"`
	Version string `json:"version,omitempty"`
}

// CompareResult compares two builds in one metric of a scenario, or in all metrics of the scenario that are speeds.
type CompareResult struct {
	Scenario string `json:"scenario"`
	Metric   string `json:"metric"`
	Unit     string `json:"unit"`
	Less     bool   `json:"lessIsBetter,omitempty"`
	// This and Other are the medians of the runs, by pair. They are absolute figures. Ratios to a scenario without our
	// programs would add the noise of that scenario, and the two runs of a pair are only seconds apart anyway.
	This  []float64 `json:"this"`
	Other []float64 `json:"other"`
	// Ratio is the median over the pairs of This / Other.
	Ratio   report.Interval `json:"ratio"`
	Verdict Verdict         `json:"verdict,omitempty"` // empty for times, which have no gate
}

// together is the metric for all speeds of a scenario: the geometric mean of the speeds' ratios in each pair. Single
// speeds may differ from it.
const together = "all speeds"

// judge computes the results from the runs and applies the gate to the speeds.
func (r *CompareReport) judge(o CompareOptions, this, other []*Report) error {
	draw := Settings{Seed: r.Seed}
	for _, scenario := range o.Scenarios {
		all := CompareResult{
			Scenario: scenario,
			Metric:   together,
			This:     slices.Repeat([]float64{1}, len(this)),
			Other:    slices.Repeat([]float64{1}, len(this)),
		}
		speeds := 0
		for _, metric := range o.Metrics {
			x := CompareResult{Scenario: scenario, Metric: metric}
			var err error
			if x.This, err = x.samples(this); err != nil {
				return fmt.Errorf("%s: %w", r.This.Program, err)
			}
			if x.Other, err = x.samples(other); err != nil {
				return fmt.Errorf("%s: %w", r.Other.Program, err)
			}
			x.Ratio = draw.interval(report.Ratios(x.This, x.Other))
			r.Results = append(r.Results, x)
			if x.Less {
				continue
			}
			speeds++
			for pair := range this {
				all.This[pair] *= x.This[pair]
				all.Other[pair] *= x.Other[pair]
			}
		}
		if speeds < 2 {
			continue
		}
		for pair := range this {
			all.This[pair] = math.Pow(all.This[pair], 1/float64(speeds))
			all.Other[pair] = math.Pow(all.Other[pair], 1/float64(speeds))
		}
		all.Ratio = draw.interval(report.Ratios(all.This, all.Other))
		r.Results = append(r.Results, all)
	}
	r.Pass = true
	for i := range r.Results {
		if x := &r.Results[i]; !x.Less {
			x.Verdict = r.gate().judge(x.Ratio, r.TooWide)
			r.Pass = r.Pass && x.Verdict == Passed
		}
	}
	return nil
}

// samples returns the medians of the runs, and sets the unit and direction of the metric.
func (x *CompareResult) samples(runs []*Report) ([]float64, error) {
	var all []float64
	for _, run := range runs {
		found := run.find(x.Scenario, x.Metric)
		if found == nil || !(found.Median > 0) {
			return nil, fmt.Errorf("the run has no %s of %s", x.Metric, x.Scenario)
		}
		x.Unit, x.Less = found.Unit, found.Less
		all = append(all, found.Median)
	}
	return all, nil
}

// gate returns the gate of each speed.
func (r *CompareReport) gate() Gate { return Gate{AtLeast: r.AtLeast} }

// table has one line for each result.
func (r *CompareReport) table() *plot.Table {
	t := &plot.Table{Head: []string{"scenario", "metric", "this", "other", "this / other", "95 %", "verdict"}}
	for _, x := range r.Results {
		verdict := "–"
		if x.Verdict != "" {
			verdict = Check{Gate: r.gate(), Verdict: x.Verdict}.verdict()
		}
		t.Rows = append(t.Rows, []string{
			x.Scenario, x.Metric, x.text(x.This), x.text(x.Other), report.Precise(x.Ratio.Median), x.Ratio.String(),
			verdict,
		})
	}
	return t
}

// text is the median with its unit.
func (x CompareResult) text(samples []float64) string {
	if x.Unit == "" {
		return ""
	}
	return report.Figure(report.Median(samples)) + " " + x.Unit
}

func (b Build) String() string {
	return fmt.Sprintf("%s (%s)", b.Program, cmp.Or(b.Version, "the program does not state its version"))
}

func (r *CompareReport) how() string {
	return fmt.Sprintf(
		"%s of runs, in random order within a pair; ratios are of the same pair",
		humanize.Of(r.Pairs, "pair", "pairs"),
	)
}

// Table writes the results for a terminal; columns are separated by tabs.
func (r *CompareReport) Table(w io.Writer) {
	fmt.Fprintf(w, "this:  %v\nother: %v\n%s; Linux %s\n\n", r.This, r.Other, r.how(), r.Machine.Kernel)
	r.table().Text(w, "")
}

// Page writes the report as one HTML file.
func (r *CompareReport) Page(w io.Writer) error {
	const title = "this build / other build"
	var bars []plot.Bar
	for _, x := range r.Results {
		bars = append(bars, plot.Bar{
			Name: x.Scenario + " " + x.Metric, Class: "ours", Figure: report.Precise(x.Ratio.Median),
			At: plot.Span(x.Ratio),
		})
	}
	s := plot.Section{
		Title: title,
		Notes: []plot.Note{
			{Text: "Medians of the pairs' ratios. A speed is faster above 1. A time (RTT, PROGRAM) is slower " +
				"above 1; no gate applies to times."},
		},
		Bars:  plot.NewBars(title, "times", report.NameWidth, true, bars),
		Table: r.table(),
	}
	return r.WritePage(w, plot.Page{
		Title:   "two builds",
		Heading: "Two builds",
		Notes: []plot.Note{
			{Class: "what", Lead: "This:", Text: r.This.String()},
			{Class: "what", Lead: "Other:", Text: r.Other.String()},
			{Text: r.how() + ". " + report.BarNote},
		},
		Sections: []plot.Section{s},
	}, "docs/results/compare.md explains them.")
}
