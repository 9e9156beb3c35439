package ovs

import (
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// entries returns entries of all kinds, with the smallest and largest values of their fields.
func entries() []pipeline.Entry {
	a, p := netip.MustParseAddr, netip.MustParsePrefix
	return append(
		packettest.Entries(),
		pipeline.Peer{Nodes: p("fd00::/8")},
		pipeline.Peer{Nodes: p("fd01:2:3:4::/64")},
		pipeline.Sender{Port: pipeline.Gateway, Address: a("10.1.1.1"), VNI: pipeline.MaxVNI, Identity: 0xffff},
		pipeline.Sender{Port: lastContainer, Address: a("fd10::1"), VNI: 1},
		pipeline.NorthSouth{
			VNI: 9,
			To:  p("0.0.0.0/0"),
		},
		pipeline.NorthSouth{VNI: 9, To: p("::/0")},
		pipeline.NorthSouth{VNI: pipeline.MaxVNI, To: p("2001:db8::/33")},
		pipeline.Forward{
			VNI:  9,
			To:   p("0.0.0.0/0"),
			Port: pipeline.Gateway,
		},
		pipeline.Forward{VNI: pipeline.Any, To: p("::/0")},
		pipeline.Forward{VNI: 9, To: p("fd10::/127"), Port: lastContainer},
		pipeline.Forward{VNI: 8, To: p("fd10::/127"), Port: 1, MAC: pipeline.MAC{0x0a, 1, 2, 3, 4, 5}},
		pipeline.Foreign{Edge: p("fd01:2:3:4::/64"), Theirs: pipeline.MaxVNI, Source: p("0.0.0.0/0"), VNI: 9},
		pipeline.Foreign{Edge: p("fd01:2:3:4::/64"), Theirs: 1, Source: p("fd10::/127"), VNI: pipeline.MaxVNI},
	)
}

// TestRender: parse is the inverse of render, and no two entries have the same cookie.
func TestRender(t *testing.T) {
	cookies := map[uint64]pipeline.Entry{}
	for _, e := range entries() {
		f, err := render(packettest.Region, e)
		if err != nil {
			t.Errorf("%v: %v", e, err)
			continue
		}
		if got, err := parse(f); err != nil || got != e {
			t.Errorf("%v: %v came back, %v; by %v", e, got, err, f)
		}
		if other, twice := cookies[f.Cookie]; twice {
			t.Errorf("%v and %v have one cookie", e, other)
		}
		cookies[f.Cookie] = e
	}
}

// TestRefused: render rejects entries that cannot be a flow.
func TestRefused(t *testing.T) {
	a, p := netip.MustParseAddr, netip.MustParsePrefix
	for _, e := range []pipeline.Entry{
		pipeline.Peer{Nodes: p("fd01::/65")}, pipeline.Peer{Nodes: p("10.0.0.0/8")},
		pipeline.Foreign{Edge: p("fd01::/60"), Theirs: 8, Source: p("10.0.0.0/8"), VNI: 7},
		pipeline.Sender{Port: lastContainer + 1, Address: a("10.0.0.1"), VNI: 7},
		pipeline.Sender{Address: a("10.0.0.1"), VNI: 7},
		pipeline.DNAT{VNI: 7, Virtual: a("10.0.0.1"), RealVNI: 7, Real: a("fd10::1")},
		pipeline.SNAT{VNI: 7, Virtual: a("10.0.0.1"), Real: a("fd10::1")},
		pipeline.Forward{VNI: 7, To: p("10.0.0.0/8"), Port: pipeline.VXLAN, VTEP: a("fd01::1")},
		pipeline.Forward{VNI: 7, To: p("10.0.0.0/8"), Port: lastContainer + 1},
	} {
		if f, err := render(packettest.Region, e); err == nil {
			t.Errorf("%v became %v", e, f)
		}
	}
}

// TestConstants: no two constant flows have the same key.
func TestConstants(t *testing.T) {
	places := map[string]bool{}
	for _, f := range constants(packettest.Region) {
		if places[place(f)] {
			t.Errorf("twice: %v", f)
		}
		places[place(f)] = true
	}
}
