package sharing

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestGain: the slower kind of node limits the transactions (NZ9).
func TestGain(t *testing.T) {
	c := Costs{Unsplit: 12, Backend: 3, Frontend: 11, Lookup: 10}
	for n, want := range map[int]float64{1: 12.0 / 11, 2: 24.0 / 11, 4: 4, 8: 4} {
		if got := c.Gain(n); math.Abs(got-want) > 1e-12 {
			t.Errorf("%d frontends gain %v, want %v", n, got, want)
		}
	}
	if got := c.Limit(); got != 4 {
		t.Errorf("limit %v, want 4", got)
	}
	if got, want := c.WithLookup(20), (Costs{Unsplit: 22, Backend: 3, Frontend: 21, Lookup: 20}); got != want {
		t.Errorf("with a lookup of 20: %+v, want %+v", got, want)
	}
}

func TestLookupOnTheWay(t *testing.T) {
	other := Costs{Frontend: 10, Lookup: 1}
	for frontend, want := range map[float64]float64{40: 31, 12: 8, 9: 8} {
		if got := (Costs{Frontend: frontend}).lookupOnTheWay(other, 8); got != want {
			t.Errorf("a frontend takes %v, with a lookup of 1 10: the lookup takes %v, want %v", frontend, got, want)
		}
	}
}

// TestLookupFor: from the lookup time on that LookupFor returns, the gain is reached, and with shorter ones it is not.
func TestLookupFor(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	reached, never := 0, 0
	for range 10_000 {
		lookup := 10 * r.Float64()
		c := Costs{
			Unsplit: lookup + 10*r.Float64(), Backend: 0.1 + 10*r.Float64(), Frontend: lookup + 10*r.Float64(),
			Lookup: lookup,
		}
		gain, n := 0.5+5*r.Float64(), Frontends[r.IntN(len(Frontends))]
		at := c.LookupFor(gain, n)
		if math.IsNaN(at) {
			never++
			for x := 0.0; x < 200; x += 0.5 {
				if got := c.WithLookup(x).Gain(n); got > gain+1e-9 {
					t.Fatalf("%+v, %d frontends: no lookup for gain %v, and one of %v gains %v", c, n, gain, x, got)
				}
			}
			continue
		}
		reached++
		if got := c.WithLookup(at).Gain(n); got < gain-1e-9 {
			t.Fatalf("%+v, %d frontends: lookup %v for gain %v gains %v", c, n, at, gain, got)
		}
		if got := c.WithLookup(0.99 * at).Gain(n); at > 1e-6 && got >= gain {
			t.Fatalf("%+v, %d frontends: lookup %v for gain %v, and a shorter one gains %v", c, n, at, gain, got)
		}
	}
	if reached < 1000 || never < 1000 {
		t.Errorf("%d gains reached, %d not: the test compares little", reached, never)
	}
	if at := (Costs{Unsplit: 2, Backend: 1, Frontend: 2}).LookupFor(1, 1); at != 0 {
		t.Errorf("as many frontends as the gain: %v, want 0", at)
	}
}

// TestCapacity counts tenants one by one.
func TestCapacity(t *testing.T) {
	for entries := 1; entries < 40; entries++ {
		c := Capacity{Entries: entries, Room: 100}
		alone, lent := 0, 0
		for entries <= c.Room-(alone+1)*entries { // at most half of what others leave
			alone++
		}
		for (lent+1)*entries <= c.Room/2 {
			lent++
		}
		for _, n := range append([]int{0}, Frontends...) {
			if got, want := c.Spread(n), alone+n*lent; got != want {
				t.Errorf("%d entries, %d frontends: %d tenants, want %d", entries, n, got, want)
			}
			if got, want := c.Copied(n), alone+min(n, 1)*lent; got != want {
				t.Errorf("%d entries, %d frontends with copies: %d tenants, want %d", entries, n, got, want)
			}
		}
	}
}
