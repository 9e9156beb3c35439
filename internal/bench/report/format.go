package report

import (
	"fmt"
	"math"

	"pilaster.io/pilaster/internal/humanize"
)

func (i Interval) String() string { return Precise(i.Low) + "–" + Precise(i.High) }

// Precise formats a ratio, or a figure that has its own gate.
func Precise(v float64) string {
	if v < 10 {
		return fmt.Sprintf("%.3f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

// Figure formats a number: "135,012" and "41.2".
func Figure(v float64) string {
	if v < 1000 {
		return fmt.Sprintf("%.1f", v)
	}
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func Spread(i Interval) string { return fmt.Sprintf("%.0f (%.0f–%.0f)", i.Median, i.Low, i.High) }

func Tenths(i Interval) string { return fmt.Sprintf("%.1f (%.1f–%.1f)", i.Median, i.Low, i.High) }

func Nanos(i Interval) string {
	if i.High == 0 {
		return "–"
	}
	return fmt.Sprintf("%s (%s–%s)", Whole(i.Median), Whole(i.Low), Whole(i.High))
}

// Whole formats a number without a fraction.
func Whole(v float64) string { return humanize.Grouped(int(math.Round(max(v, 0)))) }

func Percent(part float64) string { return fmt.Sprintf("%.0f %%", 100*part) }
