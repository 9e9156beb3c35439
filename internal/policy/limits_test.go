package policy

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestFree: two rules whose hashes start with the same bits get different numbers, and no rule gets 0, which means no
// rule.
func TestFree(t *testing.T) {
	const last = 1<<numberBits - 1
	taken := map[uint32]struct{}{5: {}, 6: {}, last: {}}
	for _, c := range []struct{ n, want uint32 }{{5, 7}, {6, 8}, {9, 9}, {0, 1}, {last, 2}} {
		if got := free(taken, c.n); got != c.want {
			t.Errorf("from %d: %d, want %d", c.n, got, c.want)
		}
	}
}

func TestWhatDoesNotFitIsRefused(t *testing.T) {
	c := &compiler{rows: make([]peerRow, maxEntries), most: maxEntries}
	if err := c.fits(); err != nil {
		t.Error(err)
	}
	c.rows = append(c.rows, peerRow{})
	if err := c.fits(); err == nil ||
		!strings.Contains(err.Error(), "1,048,577 entries of peers on a node, more than 1,048,576") {
		t.Error(err)
	}
}

// Policies whose compilation would take minutes are rejected at once.
func TestWhatTakesTooLongIsRefused(t *testing.T) {
	rule := Rule{Action: Accept, Everyone: true}
	for i := range uint16(maxRanges + 1) {
		rule.Ports = append(rule.Ports, Port{Protocol: TCP, First: i + 1, Last: i + 1000})
	}
	many := Rule{Action: Accept}
	for i := range 2100 {
		many.Blocks = append(
			many.Blocks,
			Block{
				netip.MustParsePrefix("0.0.0.0/0"),
				[]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i)}), 24)},
			},
		)
	}
	for want, r := range map[string]Rule{"4,097 ranges of ports": rule, "blocks lie within each other more than " +
		"4,194,304 times": many} {
		p := Policy{Name: "a", Rules: [2][]Rule{{r}}}
		if _, err := Compile("acme", []Policy{p}, nil, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestManyThatExceptTheSame: the time for as many blocks as a tenant's documents can hold, each with the same
// exceptions, does not grow with the square of their number.
func TestManyThatExceptTheSame(t *testing.T) {
	r := Rule{Action: Accept}
	for range 150_000 {
		r.Blocks = append(
			r.Blocks,
			Block{
				netip.MustParsePrefix("10.0.0.0/8"),
				[]netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("10.2.0.0/16")},
			},
		)
	}
	var tables Tables
	var err error
	begun := time.Now()
	tables, err = Compile(
		"acme",
		[]Policy{{Name: "a", Tier: NetworkPolicy, Isolates: [2]bool{Ingress: true}, Rules: [2][]Rule{Ingress: {r}}}},
		nil,
		nil,
	)
	if took := time.Since(begun); err != nil || took > 10*time.Second {
		t.Errorf("%v, %v", took, err)
	}
	for addr, want := range map[string]bool{"10.0.0.1": true, "10.1.0.1": false, "10.2.0.1": false, "10.3.0.1": true} {
		if d := tables.Decide(AnyApp, Ingress, Outside, netip.MustParseAddr(addr), TCP, 80); d.Allowed != want {
			t.Errorf("%s is allowed: %v", addr, d.Allowed)
		}
	}
}

// Two contents may have the same 64-bit hash. Compile must detect that. Otherwise packets would get the verdicts of the
// wrong content.
func TestTwoContentsOfOneHashAreRefused(t *testing.T) {
	c := &compiler{sums: map[ID][32]byte{}}
	id, isNew, err := c.identify("set", []byte("a"))
	if err != nil || !isNew {
		t.Fatalf("%v, %v", isNew, err)
	}
	if again, isNew, err := c.identify("set", []byte("a")); again != id || isNew || err != nil {
		t.Errorf("the same content: %v, %v, %v", again, isNew, err)
	}
	sum := c.sums[id]
	sum[31]++
	c.sums[id] = sum
	if _, _, err := c.identify("set", []byte("a")); err == nil ||
		!strings.Contains(err.Error(), "two sets have the same hash") {
		t.Errorf("another content of the same hash: %v", err)
	}
}

func TestPrefixesOfPorts(t *testing.T) {
	for _, c := range []struct {
		first, last uint16
		most        int
	}{{0, maxPort, 1}, {1, maxPort, 16}, {80, 80, 1}, {1000, 2000, 12}, {1, 65534, 30}, {1024, 2047, 1}} {
		covered := map[uint16]int{}
		keys := prefixes(c.first, c.last)
		for _, k := range keys {
			for i := range 1 << (16 - k.Bits) {
				covered[k.Port+uint16(i)]++
			}
		}
		if len(keys) > c.most || len(covered) != int(c.last)-int(c.first)+1 || covered[c.first] != 1 ||
			covered[c.last] != 1 {
			t.Errorf("%d to %d: %d prefixes of %d ports", c.first, c.last, len(keys), len(covered))
		}
	}
}
