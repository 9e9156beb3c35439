package bench

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"
	"time"
)

//go:embed page.html
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// Page writes the report as one HTML file that needs no other.
func (r *Report) Page(w io.Writer) error {
	page := struct {
		*Report
		How, When  string
		Checks     []checkRow
		Failed     int
		Plots      []plot
		EmptyClock string
	}{
		Report: r, How: r.Settings.text(r.Machine), When: r.Started.Format(time.RFC3339),
		EmptyClock: fmt.Sprintf("%.0f", r.EmptyProgramNs),
	}
	for _, c := range r.Checks {
		row := checkRow{Check: c, Beside: c.beside(), Is: precise(c.Got.Median), Text: c.verdict()}
		if row.Passed = c.Verdict == Passed; !row.Passed {
			page.Failed++
		}
		page.Checks = append(page.Checks, row)
	}
	for _, name := range r.metrics() {
		m, _ := metricByName(name)
		page.Plots = append(page.Plots, r.plot(m))
	}
	return pageTemplate.Execute(w, page)
}

type checkRow struct {
	Check
	Beside, Is, Text string
	Passed           bool
}

// plot is a metric's picture, in units of SVG.
type plot struct {
	Metric
	Unit   string // of the axis
	Bars   []bar
	Ticks  []tick
	One    float64 // where the reference stands; 0: no line
	Bottom int     // end of the bars
	Height int
}

type bar struct {
	Result
	Class           string
	Figure          string // the median, as people read it
	Ratio, Interval string
	CPU             string
	Y               int
	Width, Low, Top float64 // ends of the bar and of its interval
	Label           float64 // where its figure begins
}

type tick struct {
	X    float64
	Text string
}

// Where things are in a plot.
const (
	plotLeft  = 150 // names of scenarios stand before it
	plotWidth = 480
	barStep   = 26
)

// plot shows ratios to the reference where there are any, and figures where not.
func (r *Report) plot(m Metric) plot {
	p := plot{Metric: m, Unit: m.Unit}
	relative := r.find(r.Reference, m.Name) != nil
	shown := func(x Result) Interval {
		if relative {
			return *x.Ratio
		}
		return x.Spread
	}
	highest := 0.0
	for _, x := range r.of(m.Name) {
		highest = max(highest, shown(x).High)
	}
	step := tickStep(highest)
	scale := plotWidth / (math.Ceil(highest/step) * step)
	if relative {
		p.Unit, p.One = "of "+r.Reference, plotLeft+scale
	}
	for v := 0.0; v*scale <= plotWidth+0.5; v += step {
		p.Ticks = append(p.Ticks, tick{plotLeft + v*scale, strings.TrimSuffix(fmt.Sprintf("%.4g", v), ".0")})
	}
	for i, x := range r.of(m.Name) {
		at := shown(x)
		b := bar{
			Result: x, Class: class(x.Scenario), Figure: figure(x.Median) + " " + x.Unit, CPU: x.cpu(), Y: i * barStep,
			Width: at.Median * scale, Low: plotLeft + at.Low*scale, Top: plotLeft + at.High*scale,
		}
		b.Label = max(b.Top, plotLeft+b.Width) + 8
		if x.Ratio != nil {
			b.Ratio, b.Interval = precise(x.Ratio.Median), x.Ratio.String()
		}
		p.Bars = append(p.Bars, b)
	}
	p.Bottom = len(p.Bars) * barStep
	p.Height = p.Bottom + 40
	return p
}

// tickStep is a round number that divides an axis into two to seven parts.
func tickStep(highest float64) float64 {
	if !(highest > 0) || math.IsInf(highest, 1) {
		return 1
	}
	step := math.Pow(10, math.Floor(math.Log10(highest)))
	switch parts := highest / step; {
	case parts < 2:
		return step / 4
	case parts < 5:
		return step
	}
	return step * 2
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
