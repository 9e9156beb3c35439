package address

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

func testILA(t *testing.T) ILA {
	ila, err := DefaultPlan().ILA()
	if err != nil {
		t.Fatal(err)
	}
	return ila
}

func TestILAPrefixes(t *testing.T) {
	for _, c := range []struct{ base, private, all, refused string }{
		{"fd70:696c:6100::/40", "fc00::/8", "fd70:696c:e100::/40", ""},
		{"2001:db8::/32", "fc00::/8", "2001:db9::/32", ""},
		{"fd70:696c::/33", "fc00::/8", "fd70:696c:8000::/33", ""},
		{"fd00::/8", "fc00::/8", "", "overlaps fc00::/8"},
		{"fd70:696c:6100::/40", "fd70:696c:e000::/36", "", "overlaps"},
	} {
		plan := Plan{Base: netip.MustParsePrefix(c.base), Private: netip.MustParsePrefix(c.private)}
		ila, err := plan.ILA()
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("base %s: %v; want %q", c.base, err, c.refused)
			}
			continue
		}
		if err != nil || ila.Prefix.String() != c.all || ila.SIR.Addr() != ila.Prefix.Addr() || ila.SIR.Bits() != 64 {
			t.Errorf("base %s: %+v, %v; want %s", c.base, ila, err, c.all)
		}
		if ila.Prefix.Overlaps(plan.Base) {
			t.Errorf("%v overlaps the base prefix %v", ila.Prefix, plan.Base)
		}
	}
}

// TestReserved: only a plan with identifiers reserves their prefix. Locators and the SIR prefix are recognised as
// derived from a node, other prefixes are not.
func TestReserved(t *testing.T) {
	plan, use := DefaultPlan(), testILA(t)
	if p := plan.ReservedPrefix(); p.IsValid() {
		t.Errorf("a plan without identifiers reserves %v", p)
	}
	plan.Identifiers = true
	if p := plan.ReservedPrefix(); p != use.Prefix {
		t.Errorf("reserved %v, want %v", p, use.Prefix)
	}
	locator, err := use.Locator(plan.Node(3))
	if err != nil {
		t.Fatal(err)
	}
	for p, want := range map[netip.Prefix]bool{
		locator: true, use.SIR: true, plan.Node(3): false, plan.Node(4): false,
		netip.MustParsePrefix("fd71:696c:e100:3::/64"): false, netip.MustParsePrefix("2001:db8::/64"): false,
	} {
		if got := IsDerivedFrom(p, plan.Node(3)); got != want {
			t.Errorf("%v is derived from %v: %v", p, plan.Node(3), got)
		}
	}
}

func TestLocators(t *testing.T) {
	plan, ila := DefaultPlan(), testILA(t)
	node := plan.Node(3)
	locator, err := ila.Locator(node)
	if err != nil || locator.String() != "fd70:696c:e100:3::/64" {
		t.Fatalf("locator %v: %v", locator, err)
	}
	if back, ok := ila.Node(locator); !ok || back != node {
		t.Errorf("node %v, %v of locator %v", back, ok, locator)
	}
	if l, err := ila.Locator(plan.Node(0)); err == nil {
		t.Errorf("node 0 has locator %v", l)
	}
	for _, p := range []netip.Prefix{ila.SIR, node, netip.MustParsePrefix("fd70:696c:e100:3::/63")} {
		if n, ok := ila.Node(p); ok {
			t.Errorf("%v is the locator of %v", p, n)
		}
	}
}

func TestIdentifiers(t *testing.T) {
	ila := testILA(t)
	locator, _ := ila.Locator(DefaultPlan().Node(2))
	if r := ila.Range(0x123456).String(); r != "fd70:696c:e100:0:6012:3456::/96" {
		t.Errorf("range %s", r)
	}
	sir := netip.MustParseAddr("fd70:696c:e100:0:6000:7:0:5")
	want := Identifier{VNID: 7, Index: 5}
	if id, ok := ila.Split(sir); !ok || id != want {
		t.Errorf("%v: %+v, %v", sir, id, ok)
	}
	wire := ila.ToWire(sir, locator)
	// the prefix's sum is higher by 2, the C bit adds 0x1000
	if wire.String() != "fd70:696c:e100:2:7000:7:0:f002" {
		t.Errorf("%v on the fabric: %v", sir, wire)
	}
	want.Locator = locator
	if id, ok := ila.Split(wire); !ok || id != want {
		t.Errorf("%v: %+v, %v", wire, id, ok)
	}
	for _, a := range []string{
		"fd70:696c:e100:0:6000:7:0:0",    // the last 16 bits are 0
		"fd70:696c:e100:0:6000:7:1:0",    //
		"fd70:696c:e100:0:7000:7:0:5",    // the C bit, for containers
		"fd70:696c:e100:0:2000:7:0:5",    // another type
		"fd70:696c:e100:0:6100:0:0:5",    // a VNID that no tenant has
		"fd70:696c:e100:2:6000:7:0:f002", // no C bit, on the fabric
		"fd70:696c:e100:2:7000:7:0:0",    //
		"fd70:696c:6100:2:7000:7:0:5",    // a node prefix
		"2001:db8::1",
	} {
		if id, ok := ila.Split(netip.MustParseAddr(a)); ok {
			t.Errorf("%s is %+v", a, id)
		}
	}
}

// For every identifier and locator, the mapping keeps the sum of the address, and can be undone.
func TestMappingIsNeutral(t *testing.T) {
	ila := testILA(t)
	r := rand.New(rand.NewPCG(1, 2))
	for range 200_000 {
		b := ila.Range(TenantID(r.Uint32()) & MaxTenantID).Addr().As16()
		binary.BigEndian.PutUint32(b[12:], r.Uint32())
		switch last := uint16(r.Uint32N(4)); { // the values where ones' complement is special are frequent
		case last < 2:
			binary.BigEndian.PutUint16(b[14:], 0xffff-last)
		case LastBits(netip.AddrFrom16(b)) == 0:
			continue
		}
		sir := netip.AddrFrom16(b)
		locator, err := ila.Locator(DefaultPlan().Node(1 + r.Uint64N(DefaultPlan().Nodes()-1)))
		if err != nil {
			t.Fatal(err)
		}
		ila.NoCBit = !ila.NoCBit
		wire := ila.ToWire(sir, locator)
		if !locator.Contains(wire) || wire.As16()[8]&0x10 == 0 != ila.NoCBit {
			t.Fatalf("%v at %v is %v", sir, locator, wire)
		}
		if was, is := sum16(sir.As16()), sum16(wire.As16()); was != is {
			t.Fatalf("%v at %v is %v: the sum was %#x and is %#x", sir, locator, wire, was, is)
		}
		if back, ok := ila.ToSIR(wire); !ok || back != sir {
			t.Fatalf("%v at %v is %v, and back %v", sir, locator, wire, back)
		}
		other := ila
		other.NoCBit = !ila.NoCBit
		if back, ok := other.ToSIR(wire); ok {
			t.Fatalf("%v is read as %v by a node with another form", wire, back)
		}
	}
}
