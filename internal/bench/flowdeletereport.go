package bench

import (
	"fmt"
	"io"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// FlowDeleteReport is what `pilaster bench flow-delete` found. Times are of one transaction that deletes the batch, in ms,
// medians with 95 % intervals.
type FlowDeleteReport struct {
	Started time.Time        `json:"started"`
	Seconds float64          `json:"seconds"`
	Machine Machine          `json:"machine"`
	Switch  string           `json:"switch"`
	Batch   int              `json:"batch"`
	Rounds  int              `json:"rounds"`
	Seed    uint64           `json:"seed"`
	Results []FlowDeleteCost `json:"results"`
}

// FlowDeleteCost is with that many entries installed.
type FlowDeleteCost struct {
	Installed int      `json:"installed"`
	Loose     Interval `json:"looseMs"`
	Strict    Interval `json:"strictMs"`
}

// growth is how many times as long it takes as with the fewest entries.
func (r *FlowDeleteReport) growth(c FlowDeleteCost) (loose, strict float64) {
	return c.Loose.Median / r.Results[0].Loose.Median, c.Strict.Median / r.Results[0].Strict.Median
}

var flowDeleteHead = []string{"installed", "loose, ms", "growth", "strict, ms", "growth", "loose to strict"}

func (r *FlowDeleteReport) rows() (rows [][]string) {
	for _, c := range r.Results {
		loose, strict := r.growth(c)
		times := func(f float64) string { return fmt.Sprintf("%.1f", f) }
		rows = append(
			rows,
			[]string{
				humanize.Grouped(c.Installed),
				spread(c.Loose),
				times(loose),
				tenths(c.Strict),
				times(strict),
				times(c.Loose.Median / c.Strict.Median),
			},
		)
	}
	return rows
}

func tenths(i Interval) string { return fmt.Sprintf("%.1f (%.1f–%.1f)", i.Median, i.Low, i.High) }

// Table writes the results for a person; columns are separated by tabs.
func (r *FlowDeleteReport) Table(w io.Writer) {
	fmt.Fprintf(w, "deleting %s of the installed entries of %s: median (95 %%); %s, Linux %s\n\n",
		humanize.Grouped(r.Batch), r.Switch, humanize.Of(r.Rounds, "round", "rounds"), r.Machine.Kernel)
	for _, row := range append([][]string{flowDeleteHead}, r.rows()...) {
		for _, cell := range row {
			fmt.Fprintf(w, "  %s\t", cell)
		}
		fmt.Fprintln(w)
	}
}

// Page writes the report as one HTML file that needs no other.
func (r *FlowDeleteReport) Page(w io.Writer) error {
	sections := []plot.Section{
		r.section(
			"loose",
			"The switch searches all its entries for what matches each deletion, as in NIMITZ §4, fig 10: the time grows with what is installed.",
			"theirs",
			func(c FlowDeleteCost) Interval { return c.Loose },
		),
		r.section(
			"strict",
			"Each deletion names its entry by match and priority, which is a look-up: the time does not follow what is installed.",
			"ours",
			func(c FlowDeleteCost) Interval { return c.Strict },
		),
	}
	both := []plot.Bar{}
	for _, c := range r.Results {
		loose, strict := r.growth(c)
		name := humanize.Of(c.Installed, "entry", "entries")
		both = append(
			both,
			plot.Bar{
				Name:   "loose · " + name,
				Class:  "theirs",
				Figure: fmt.Sprintf("%.1f ×", loose),
				At:     plot.Span(scaled(c.Loose, r.Results[0].Loose.Median)),
			},
			plot.Bar{
				Name:   "strict · " + name,
				Class:  "ours",
				Figure: fmt.Sprintf("%.1f ×", strict),
				At:     plot.Span(scaled(c.Strict, r.Results[0].Strict.Median)),
			},
		)
	}
	sections = append([]plot.Section{{
		Title: "growth", About: "Each way's time as a multiple of its own with the fewest entries. The paper's is 28 × at 50,000, with hardware to clean up too.",
		Bars: plot.NewBars("growth", "times", scaleNames, true, both), Head: flowDeleteHead, Rows: r.rows(),
	}}, sections...)
	return pageTemplates.ExecuteTemplate(w, "flowdeletepage.html", struct {
		*FlowDeleteReport
		When     string
		Deleted  string
		Sections []plot.Section
	}{r, r.Started.Format(time.RFC3339), humanize.Grouped(r.Batch), sections})
}

func scaled(i Interval, by float64) Interval { return Interval{i.Median / by, i.Low / by, i.High / by} }

// section has one way in ms.
func (r *FlowDeleteReport) section(title, about, class string, of func(FlowDeleteCost) Interval) plot.Section {
	s := plot.Section{Title: title, About: about, Head: []string{"installed", "ms"}}
	var bars []plot.Bar
	for _, c := range r.Results {
		at := of(c)
		bars = append(
			bars,
			plot.Bar{
				Name:   humanize.Of(c.Installed, "entry", "entries"),
				Class:  class,
				Figure: fmt.Sprintf("%.0f ms", at.Median),
				At:     plot.Span(at),
			},
		)
		s.Rows = append(s.Rows, []string{humanize.Grouped(c.Installed), tenths(at)})
	}
	s.Bars = plot.NewBars(title+" deletions", "ms", scaleNames, false, bars)
	return s
}
