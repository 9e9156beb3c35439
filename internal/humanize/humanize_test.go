package humanize

import "testing"

func TestOf(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0 entries", 1: "1 entry", 2: "2 entries", 999: "999 entries", 1000: "1,000 entries",
		1_000_001: "1,000,001 entries",
	} {
		if got := Of(n, "entry", "entries"); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
