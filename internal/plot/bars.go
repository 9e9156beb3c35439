package plot

import (
	"fmt"
	"math"
	"strings"
)

// Bars is a chart of horizontal bars, in units of SVG.
type Bars struct {
	Title, Axis           string
	Bars                  []Bar
	Ticks                 []Mark
	Left, Names           int     // start of the bars, and end of their names
	AxisAt, Width, Height int     // of the whole chart
	Bottom                int     // lower end of the bars
	One                   float64 // position of the value 1; 0: no line
}

// Bar is one bar of the chart.
type Bar struct {
	Name, Class, Figure string
	At                  Span // the bar shows the median
	Y                   int
	Width, Low, Top     float64 // ends of the bar and of its interval
	Label               float64 // start of its figure
}

const (
	chartWidth  = 480 // of the bars
	figureWidth = 230 // after them
	barStep     = 26
)

// NewBars places bars. left is the room for their names; one adds a line at the value 1.
func NewBars(title, axis string, left int, one bool, bars []Bar) *Bars {
	c := &Bars{
		Title: title, Axis: axis, Bars: bars, Left: left, Names: left - 8,
		AxisAt: left + chartWidth + 30, Width: left + chartWidth + figureWidth,
	}
	highest := 0.0
	for _, b := range bars {
		highest = max(highest, b.At.High)
	}
	step := barStepOf(highest)
	scale := chartWidth / (max(math.Ceil(highest/step), 1) * step) // without a bar above 0, one step
	x := func(v float64) float64 { return float64(left) + v*scale }
	if one {
		c.One = x(1)
	}
	for v := 0.0; v*scale <= chartWidth+0.5; v += step {
		c.Ticks = append(c.Ticks, Mark{x(v), strings.TrimSuffix(fmt.Sprintf("%.4g", v), ".0")})
	}
	for i := range bars {
		b := &bars[i]
		b.Y, b.Width, b.Low, b.Top = i*barStep, b.At.Median*scale, x(b.At.Low), x(b.At.High)
		b.Label = max(b.Top, float64(left)+b.Width) + 8
	}
	c.Bottom = len(bars) * barStep
	c.Height = c.Bottom + 40
	return c
}

// barStepOf returns a round number: the step between the marks of an axis, which has two to seven steps.
func barStepOf(highest float64) float64 {
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
