package plot

import (
	"math"
	"testing"
)

func TestBarStep(t *testing.T) {
	for highest, want := range map[float64]float64{0.9: 0.2, 1: 0.25, 1.6: 0.25, 2.1: 1, 83: 20, 208: 100, 0: 1} {
		if got := barStepOf(highest); math.Abs(got-want) > 1e-9 {
			t.Errorf("steps of %v up to %v, want %v", got, highest, want)
		}
	}
}

// On linear and logarithmic axes, points are at their coordinates, and marks are within the axis.
func TestLines(t *testing.T) {
	for _, c := range []struct {
		log    bool
		points [][2]float64
		path   string
		marks  int
	}{
		{false, [][2]float64{{10, 0}, {20, 50}, {30, 80}}, "M64.0 270.0L344.0 136.7L624.0 56.7", 5}, // of 90
		{true, [][2]float64{{1, 1}, {10, 10}, {100, 100}}, "M64.0 270.0L344.0 150.0L624.0 30.0", 3},
	} {
		l := NewLines("x", Plot{Log: c.log, Lines: []Line{{Name: "a", Points: c.points}}})
		if l.Curves[0].Path != c.path {
			t.Errorf("logarithmic %v: %s, want %s", c.log, l.Curves[0].Path, c.path)
		}
		if l.YTicks[0].Text != "0" && !c.log {
			t.Errorf("the lowest mark is %s", l.YTicks[0].Text)
		}
		for _, m := range l.XTicks {
			if m.At < plotLeft || m.At > plotLeft+plotWidth {
				t.Errorf("a mark %s beside the axis, at %v", m.Text, m.At)
			}
		}
		if len(l.XTicks) != c.marks {
			t.Errorf("logarithmic %v: marks %v", c.log, l.XTicks)
		}
	}
}

// Logarithmic axes extend below 1 if there are values below 1, and separate points are crosses at their coordinates.
func TestLinesBelowOne(t *testing.T) {
	l := NewLines(
		"",
		Plot{Log: true, Lines: []Line{{Name: "a", Apart: true, Points: [][2]float64{{1, 0.1}, {10, 1}, {100, 1000}}}}},
	)
	want := "M64.0 270.0m-5 -5l10 10m0 -10l-10 10M344.0 210.0m-5 -5l10 10m0 -10l-10 10" +
		"M624.0 30.0m-5 -5l10 10m0 -10l-10 10"
	if l.Curves[0].Path != want {
		t.Errorf("%s, want %s", l.Curves[0].Path, want)
	}
	if len(l.YTicks) != 5 || l.YTicks[0].Text != "0.1" || l.YTicks[4].Text != "1000" {
		t.Errorf("marks %v", l.YTicks)
	}
}
