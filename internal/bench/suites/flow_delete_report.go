package suites

import (
	"fmt"
	"io"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// FlowDeleteReport is the result of `pilaster bench flow-delete`. Times are medians with 95 % intervals, in ms, for the
// transaction that deletes the batch.
type FlowDeleteReport struct {
	report.Header
	Switch  string           `json:"switch"`
	Batch   int              `json:"batch"`
	Rounds  int              `json:"rounds"`
	Seed    uint64           `json:"seed"`
	Results []FlowDeleteCost `json:"results"`
}

// FlowDeleteCost is the cost with a number of installed entries.
type FlowDeleteCost struct {
	Installed int             `json:"installed"`
	Loose     report.Interval `json:"looseMs"`
	Strict    report.Interval `json:"strictMs"`
}

// growth returns the times as multiples of the times with the fewest entries.
func (r *FlowDeleteReport) growth(c FlowDeleteCost) (loose, strict float64) {
	return c.Loose.Median / r.Results[0].Loose.Median, c.Strict.Median / r.Results[0].Strict.Median
}

// table has one line for each number of entries.
func (r *FlowDeleteReport) table() *plot.Table {
	t := &plot.Table{Head: []string{"installed", "loose, ms", "growth", "strict, ms", "growth", "loose to strict"}}
	times := func(f float64) string { return fmt.Sprintf("%.1f", f) }
	for _, c := range r.Results {
		loose, strict := r.growth(c)
		t.Rows = append(t.Rows, []string{
			humanize.Grouped(c.Installed), report.Spread(c.Loose), times(loose), report.Tenths(c.Strict), times(strict),
			times(c.Loose.Median / c.Strict.Median),
		})
	}
	return t
}

// Table writes the results for a terminal; columns are separated by tabs.
func (r *FlowDeleteReport) Table(w io.Writer) {
	fmt.Fprintf(w, "deleting %s of the installed entries of %s: median (95 %%); %s, Linux %s\n\n",
		humanize.Grouped(r.Batch), r.Switch, humanize.Of(r.Rounds, "round", "rounds"), r.Machine.Kernel)
	r.table().Text(w, "  ")
}

// Page writes the report as one HTML file.
func (r *FlowDeleteReport) Page(w io.Writer) error {
	var both []plot.Bar
	for _, c := range r.Results {
		loose, strict := r.growth(c)
		name := humanize.Of(c.Installed, "entry", "entries")
		both = append(both,
			growthBar("loose · "+name, "theirs", loose, c.Loose, r.Results[0].Loose),
			growthBar("strict · "+name, "ours", strict, c.Strict, r.Results[0].Strict))
	}
	return r.WritePage(w, plot.Page{
		Title:   "time Open vSwitch takes to delete entries",
		Heading: "Time Open vSwitch takes to delete entries",
		Notes: []plot.Note{
			{
				Class: "what",
				Lead:  humanize.Grouped(r.Batch) + " entries",
				Text: "are deleted in one transaction, out of as many " +
					"as each line says, and installed again.",
			},
			{Text: fmt.Sprintf("%d rounds, both ways in turn. %s", r.Rounds, report.BarNote)},
		},
		Sections: []plot.Section{
			{
				Title: "growth",
				Notes: []plot.Note{
					{Text: "The time of each way as a multiple of its own time with the fewest entries. " +
						"The paper reports 28 × at 50,000, where hardware entries are deleted too."},
				},
				Bars: plot.NewBars("growth", "times", report.NameWidth, true, both), Table: r.table(),
			},
			r.section("loose", "theirs", func(c FlowDeleteCost) report.Interval { return c.Loose },
				"For each deletion the switch searches all its entries for matches, as in NIMITZ §4, fig 10: "+
					"the time grows with the number of installed entries."),
			r.section("strict", "ours", func(c FlowDeleteCost) report.Interval { return c.Strict },
				"Each deletion names its entry by match and priority, so the switch looks it up: "+
					"the time does not depend on the number of installed entries."),
		},
	}, "docs/results/flow-delete.md explains them.", r.Switch)
}

func growthBar(name, class string, growth float64, of, least report.Interval) plot.Bar {
	by := least.Median
	return plot.Bar{
		Name: name, Class: class, Figure: fmt.Sprintf("%.1f ×", growth),
		At: plot.Span{Median: of.Median / by, Low: of.Low / by, High: of.High / by},
	}
}

// section shows one way to delete, in ms.
func (r *FlowDeleteReport) section(
	title, class string,
	of func(FlowDeleteCost) report.Interval,
	about string,
) plot.Section {
	t := &plot.Table{Head: []string{"installed", "ms"}}
	var bars []plot.Bar
	for _, c := range r.Results {
		at := of(c)
		bars = append(bars, plot.Bar{
			Name: humanize.Of(c.Installed, "entry", "entries"), Class: class,
			Figure: fmt.Sprintf("%.0f ms", at.Median), At: plot.Span(at),
		})
		t.Rows = append(t.Rows, []string{humanize.Grouped(c.Installed), report.Tenths(at)})
	}
	return plot.Section{
		Title: title, Notes: []plot.Note{{Text: about}}, Table: t,
		Bars: plot.NewBars(title+" deletions", "ms", report.NameWidth, false, bars),
	}
}
