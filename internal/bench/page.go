package bench

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// Page writes the report as one HTML file that needs no other.
func (r *Report) Page(w io.Writer) error {
	page := struct {
		*Report
		How, When  string
		Checks     []checkRow
		Failed     int
		Plots      []plot
		Sections   []scaleSection
		Unjudged   []string
		EmptyClock string
	}{
		Report: r, How: r.Settings.text(r.Machine), When: r.Started.Format(time.RFC3339),
		Sections:   append(r.besideSections(), r.profileSections()...),
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

// plot is a metric's picture and its table.
type plot struct {
	Metric
	Chart chart
	Rows  []resultRow
}

// resultRow is a result as people read it.
type resultRow struct {
	Result
	Figure, Ratio, Interval, CPU string
}

// plot shows ratios to the reference where there are any, and figures where not.
func (r *Report) plot(m Metric) plot {
	p := plot{Metric: m}
	axis, relative := m.Unit, r.find(r.Reference, m.Name) != nil
	if relative {
		axis = "of " + r.Reference
	}
	var bars []bar
	for _, x := range r.of(m.Name) {
		row := resultRow{Result: x, Figure: figure(x.Median) + " " + x.Unit, CPU: x.cpu()}
		b := bar{Name: x.Scenario, Class: class(x.Scenario), Figure: row.Figure, At: x.Spread}
		if relative {
			b.At = *x.Ratio
		}
		if x.Ratio != nil {
			row.Ratio, row.Interval = precise(x.Ratio.Median), x.Ratio.String()
		}
		p.Rows, bars = append(p.Rows, row), append(bars, b)
	}
	p.Chart = newChart(m.Name+" by scenario", axis, 150, relative, bars)
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
