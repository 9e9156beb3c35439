package offload

import (
	"strings"
	"testing"
)

// TestModelled: short lookups gain nothing worth mentioning, also with many frontends; long ones do from two on.
func TestModelled(t *testing.T) {
	for _, c := range []struct {
		blocks, n int
		low, high float64
		set       string
	}{
		{0, 4, 0.5, 1.2, "labels-1000"},
		{999, 8, 0.5, 1.2, "labels-1000"},
		{1000, 4, 0.5, 1.5, "blocks-10000"},
		{100_000, 1, 0.5, 1.2, "wide"},
		{262_144, 4, 1.5, 4, "wide"},
	} {
		m := Modelled(c.blocks)
		gain, text := m.Gain(c.n), m.Text(c.n)
		if gain <= c.low || gain >= c.high || !strings.Contains(text, c.set) ||
			!strings.Contains(text, "on another machine") {
			t.Errorf("%d CIDRs, %d frontends: %v, %s; want %v to %v by set %s",
				c.blocks, c.n, gain, text, c.low, c.high, c.set)
		}
	}
}
