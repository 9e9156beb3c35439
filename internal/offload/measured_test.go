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
		counted   string
	}{
		{0, 4, 0.5, 1.2, "0 CIDRs"},
		{999, 8, 0.5, 1.2, "999 CIDRs"},
		{1000, 4, 0.5, 1.5, "1,000 CIDRs"},
		{100_000, 1, 0.5, 1.2, "100,000 CIDRs"},
		{262_144, 4, 1.5, 4, "262,144 CIDRs"},
	} {
		m := Modelled(c.blocks)
		gain, text := m.Gain(c.n), m.Text(c.n)
		if gain <= c.low || gain >= c.high || !strings.Contains(text, "\ncounted: "+c.counted) ||
			!strings.Contains(text, "of another machine") {
			t.Errorf("%d CIDRs, %d frontends: %v, %s; want %v to %v with %s",
				c.blocks, c.n, gain, text, c.low, c.high, c.counted)
		}
	}
}
