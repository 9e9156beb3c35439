package plot

import (
	"fmt"
	"math"
	"strings"
)

// Plot is a set of lines with common axes.
type Plot struct {
	Title string `json:"title"`
	X     string `json:"x"`
	Y     string `json:"y"`
	// Log makes both axes logarithmic; all coordinates must then be above 0.
	Log   bool   `json:"logarithmic,omitempty"`
	Lines []Line `json:"lines"`
}

// Line is a list of points in order.
type Line struct {
	Name string `json:"name"`
	// Apart shows a cross for each point and no line between them.
	Apart  bool         `json:"apart,omitempty"`
	Points [][2]float64 `json:"points"`
}

// Lines is a plot in units of SVG.
type Lines struct {
	Plot
	Mark                               string // an optional label before the title
	XTicks, YTicks                     []Mark
	Curves                             []Curve
	Left, Right, Bottom, Width, Height int
}

// Mark is a position on an axis.
type Mark struct {
	At   float64
	Text string
}

// Curve is a line, and the position of its name.
type Curve struct {
	Name, Class, Path string
	Y                 int
	Apart             bool
}

const (
	plotLeft, plotTop     = 64, 30
	plotWidth, plotHeight = 560, 240
	namesWidth            = 250 // beside the plot
)

// axis maps values to positions.
type axis struct {
	low, high  float64
	log        bool
	from, span float64
}

func (a axis) at(v float64) float64 {
	low, high := a.low, a.high
	if a.log {
		v, low, high = math.Log10(v), math.Log10(low), math.Log10(high)
	}
	return a.from + (v-low)/max(high-low, 1e-9)*a.span
}

// marks returns the marks, at round numbers.
func (a axis) marks() (all []Mark) {
	if a.log {
		for v := a.low; v <= a.high*1.001; v *= 10 {
			all = append(all, Mark{a.at(v), fmt.Sprintf("%.9g", v)})
		}
		return all
	}
	step := markStep(a.high - a.low)
	for v := math.Ceil(a.low/step-1e-9) * step; v <= a.high*1.001; v += step {
		all = append(all, Mark{a.at(v), fmt.Sprintf("%g", v+0)}) // adding 0 turns a negative zero into 0
	}
	return all
}

// NewLines places a plot.
func NewLines(mark string, p Plot) *Lines {
	c := &Lines{
		Plot: p, Mark: mark, Left: plotLeft, Right: plotLeft + plotWidth, Bottom: plotTop + plotHeight,
		Width: plotLeft + plotWidth + namesWidth, Height: plotTop + plotHeight + 44,
	}
	low, high, bottom, top := math.Inf(1), math.Inf(-1), 1.0, 0.0
	for _, l := range p.Lines {
		for _, at := range l.Points {
			low, high, bottom, top = min(low, at[0]), max(high, at[0]), min(bottom, at[1]), max(top, at[1])
		}
	}
	x, y := axis{low: low, high: high}, axis{}
	if p.Log {
		decade := func(v float64, round func(float64) float64) float64 { return math.Pow(10, round(math.Log10(v))) }
		x.low, x.high, y.low, y.high = decade(
			low,
			math.Floor,
		), decade(
			high,
			math.Ceil,
		), decade(
			bottom,
			math.Floor,
		), decade(
			top,
			math.Ceil,
		)
	} else {
		step := markStep(top)
		y.high = max(math.Ceil(1.02*top/step), 1) * step // leaves room above the highest line
	}
	x.log, x.from, x.span = p.Log, plotLeft, plotWidth
	y.log, y.from, y.span = p.Log, plotTop+plotHeight, -plotHeight
	c.XTicks, c.YTicks = x.marks(), y.marks()
	for i, l := range p.Lines {
		var path strings.Builder
		for j, at := range l.Points {
			if l.Apart {
				fmt.Fprintf(&path, "M%.1f %.1fm-5 -5l10 10m0 -10l-10 10", x.at(at[0]), y.at(at[1]))
				continue
			}
			fmt.Fprintf(&path, "%c%.1f %.1f", "ML"[min(j, 1)], x.at(at[0]), y.at(at[1]))
		}
		c.Curves = append(c.Curves, Curve{l.Name, fmt.Sprintf("c%d", i), path.String(), plotTop + 12 + 20*i, l.Apart})
	}
	return c
}

// markStep returns a round number: the step between the marks of an axis, which has two to ten steps.
func markStep(length float64) float64 {
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
