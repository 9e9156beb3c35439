package bench

import (
	"embed"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/plot"
)

//go:embed comparepage.html entriespage.html flowdeletepage.html page.html scalepage.html
var pages embed.FS

var pageTemplates = plot.Pages(pages)

// Page writes the report as one HTML file that needs no other.
func (r *Report) Page(w io.Writer) error {
	page := struct {
		*Report
		How, When  string
		Checks     []checkRow
		Failed     int
		Plots      []metricPlot
		Sections   []plot.Section
		Unjudged   []string
		EmptyClock string
	}{
		Report: r, How: r.Settings.text(r.Machine), When: r.Started.Format(time.RFC3339),
		Sections:   slices.Concat(r.besideSections(), r.lookupsSections(), r.profileSections()),
		Unjudged:   r.unjudged(),
		EmptyClock: fmt.Sprintf("%.0f", r.EmptyProgramNs),
	}
	for _, c := range r.Checks {
		row := checkRow{Check: c, Of: c.of(), Beside: c.beside(), Is: precise(c.Got.Median), Text: c.verdict()}
		if row.Passed = c.Verdict == Passed; !row.Passed {
			page.Failed++
		}
		page.Checks = append(page.Checks, row)
	}
	for _, name := range r.metrics() {
		m, _ := metricByName(name)
		page.Plots = append(page.Plots, r.plot(m))
	}
	return pageTemplates.ExecuteTemplate(w, "page.html", page)
}

type checkRow struct {
	Check
	Of, Beside, Is, Text string
	Passed               bool
}

// metricPlot is a metric's picture and its table.
type metricPlot struct {
	Metric
	Bars *plot.Bars
	Rows []resultRow
}

// resultRow is a result as people read it.
type resultRow struct {
	Result
	Figure, Ratio, Interval, CPU string
}

// plot shows ratios to the reference where there are any, and figures where not.
func (r *Report) plot(m Metric) metricPlot {
	p := metricPlot{Metric: m}
	axis, relative := m.Unit, r.find(r.Reference, m.Name) != nil
	if relative {
		axis = "of " + r.Reference
	}
	var bars []plot.Bar
	for _, x := range r.of(m.Name) {
		row := resultRow{Result: x, Figure: figure(x.Median) + " " + x.Unit, CPU: x.cpu()}
		b := plot.Bar{Name: x.Scenario, Class: class(x.Scenario), Figure: row.Figure, At: plot.Span(x.Spread)}
		if relative {
			b.At = plot.Span(*x.Ratio)
		}
		if x.Ratio != nil {
			row.Ratio, row.Interval = precise(x.Ratio.Median), x.Ratio.String()
		}
		p.Rows, bars = append(p.Rows, row), append(bars, b)
	}
	p.Bars = plot.NewBars(m.Name+" by scenario", axis, 150, relative, bars)
	return p
}

// class is the colour of a scenario; its name tells as much.
func class(scenario string) string {
	switch {
	case strings.HasPrefix(scenario, "netpila"):
		return "ours"
	case strings.HasPrefix(scenario, "bound"):
		return "bound"
	}
	return "theirs"
}
