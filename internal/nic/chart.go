package nic

import (
	"embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"
)

//go:embed page.html
var pages embed.FS

var page = template.Must(template.ParseFS(pages, "page.html"))

// Page writes the report as one HTML file that needs no other.
func (r *Report) Page(w io.Writer) error {
	type section struct {
		Figure
		Charts []chart
	}
	var sections []section
	for _, f := range r.Figures {
		s := section{Figure: f}
		for _, p := range f.Plots {
			s.Charts = append(s.Charts, newChart(p))
		}
		sections = append(sections, s)
	}
	return page.Execute(w, struct {
		*Report
		Sections []section
	}{r, sections})
}

// chart is a plot in units of SVG.
type chart struct {
	Plot
	XTicks, YTicks                     []tick
	Curves                             []curve
	Left, Right, Bottom, Width, Height int
}

type tick struct {
	At   float64
	Text string
}

type curve struct {
	Name, Class, Path string
	Y                 int // of its name
}

const (
	plotLeft, plotTop     = 64, 30
	plotWidth, plotHeight = 560, 240
	namesWidth            = 230 // beside the plot
)

func newChart(p Plot) chart {
	c := chart{
		Plot: p, Left: plotLeft, Right: plotLeft + plotWidth, Bottom: plotTop + plotHeight,
		Width: plotLeft + plotWidth + namesWidth, Height: plotTop + plotHeight + 44,
	}
	low, high, top := math.Inf(1), math.Inf(-1), 0.0
	for _, l := range p.Lines {
		for _, at := range l.Points {
			low, high, top = min(low, at[0]), max(high, at[0]), max(top, at[1])
		}
	}
	step := tickStep(top)
	top = max(math.Ceil(1.02*top/step), 1) * step // so that a line at the top is seen
	x := func(v float64) float64 { return plotLeft + (v-low)/max(high-low, 1e-9)*plotWidth }
	y := func(v float64) float64 { return plotTop + (1-v/top)*plotHeight }
	for v := 0.0; v <= top*1.001; v += step {
		c.YTicks = append(c.YTicks, tick{y(v), fmt.Sprintf("%g", v)})
	}
	for s, v := tickStep(high-low), 0.0; v <= high*1.001; v += s {
		if v >= low-1e-9 {
			c.XTicks = append(c.XTicks, tick{x(v), fmt.Sprintf("%g", v)})
		}
	}
	for i, l := range p.Lines {
		var path strings.Builder
		for j, at := range l.Points {
			fmt.Fprintf(&path, "%c%.1f %.1f", "ML"[min(j, 1)], x(at[0]), y(at[1]))
		}
		c.Curves = append(c.Curves, curve{l.Name, fmt.Sprintf("c%d", i), path.String(), plotTop + 12 + 20*i})
	}
	return c
}

// tickStep is a round number that divides an axis into two to ten parts.
func tickStep(length float64) float64 {
	if !(length > 0) || math.IsInf(length, 1) {
		return 1
	}
	step := math.Pow(10, math.Floor(math.Log10(length)))
	switch parts := length / step; {
	case parts < 2:
		return step / 5
	case parts < 5:
		return step / 2
	}
	return step
}
