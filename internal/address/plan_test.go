package address

import (
	"net/netip"
	"strings"
	"testing"
)

func TestPlanValidate(t *testing.T) {
	for _, c := range []struct{ base, private, refused string }{
		{"fd70:696c:6100::/40", "fc00::/8", ""},
		{"2001:db8::/32", "fc00::/8", ""},
		{"fd70:696c:6100::/56", "fc80::/9", ""},
		{"fd70:696c:6100::/40", "4000::/4", ""},
		{"fd70:696c:6100::/40", "fc00::/10", ""},

		{"fd70:696c:6100::/40", "fc00::/11", "leaves 8192 addresses"},
		{"fd70:696c:6100::/40", "fc00::/25", "leaves 0 addresses"},
		{"fd70:696c:6100::/40", "fc00::/128", "leaves 0 addresses"},
		{"fd70:696c:6100::/40", "fd00::/8", "overlap"},
		{"fd70:696c:6100::/40", "fc00::/7", "overlap"},
		{"fc00::/8", "fc00::/8", "overlap"},
		{"fd70:696c:6100::/57", "fc00::/8", "holds 128 nodes"},
		{"fd70:696c:6100::/64", "fc00::/8", "holds 1 nodes"},
		{"fd70:696c:6100::/65", "fc00::/8", "shorter"},
		{"fd70:696c:6100::/128", "fc00::/8", "shorter"},
		{"fd70:696c:6100::1/40", "fc00::/8", "write fd70:696c:6100::/40"},
		{"fd70:696c:6100::/40", "fd00::/7", "write fc00::/7"},
		{"4000::/3", "fc00::/8", "wider than /4"},
		{"fd70:696c:6100::/40", "::/0", "wider than /4"},
		{"fd70:696c:6100::/40", "ff00::/8", "multicast"},
		{"fd70:696c:6100::/40", "fe00::/8", "link-local"},
		{"fd70:696c:6100::/40", "f000::/4", "multicast"},
		{"::/8", "fc00::/8", "reserved"},
		{"::ffff:10.0.0.0/104", "fc00::/8", "base prefix"},
		{"10.0.0.0/8", "fc00::/8", "base prefix 10.0.0.0/8 is not an IPv6 prefix"},
		{"fd70:696c:6100::/40", "10.0.0.0/8", "private prefix 10.0.0.0/8 is not an IPv6 prefix"},
		{"", "fc00::/8", "is not an IPv6 prefix"},
		{"fd70:696c:6100::/40", "", "is not an IPv6 prefix"},
	} {
		// A prefix that does not parse becomes the zero prefix, as from a caller that ignores the error.
		base, _ := netip.ParsePrefix(c.base)
		private, _ := netip.ParsePrefix(c.private)
		err := Plan{Base: base, Private: private}.Validate()
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("base %q, private %q: %v; want %q", c.base, c.private, err, c.refused)
		}
	}
}

// TestEgressPrefix: an egress prefix is apart from all others, and has a /64 for each node that it has room for.
func TestEgressPrefix(t *testing.T) {
	for _, c := range []struct {
		egress, refused string
		identifiers     bool
	}{
		{"2001:db8:7::/48", "", true},
		{"2000::/8", "", false},
		{"2001:db8:7::/64", "", false},
		{"2001:db8:7::1/64", "write 2001:db8:7::/64", false},
		{"2001:db8:7::/65", "use a /8 to /64", false},
		{"2000::/7", "use a /8 to /64", false},
		{"10.0.0.0/8", "not an IPv6 prefix", false},
		{"fd70:696c:6100:8000::/49", "overlaps fd70:696c:6100::/40", false},
		{"fc80::/16", "overlaps fc00::/8", false},
		{"fd70:696c:6700::/48", "overlaps fd70:696c:6700::/48", false},
		{"fd70:696c:e100::/48", "", false},
		{"fd70:696c:e100::/48", "overlaps fd70:696c:e100::/40", true},
		{"fe80:7::/48", "overlaps fe80::/10", false},
	} {
		p := DefaultPlan()
		p.Egress, p.Identifiers = netip.MustParsePrefix(c.egress), c.identifiers
		err := p.Validate()
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("egress prefix %s, identifiers %v: %v; want %q", c.egress, c.identifiers, err, c.refused)
		}
	}
	p := DefaultPlan()
	for _, c := range []struct {
		egress string
		node   uint64
		want   string // empty: none
	}{
		{"", 7, "fd70:696c:6100:7::/64"},
		{"2001:db8:7::/48", 0xffff, "2001:db8:7:ffff::/64"},
		{"2001:db8:7::/48", 0x10000, ""},
		{"2001:db8:7:1::/64", 0, "2001:db8:7:1::/64"},
		{"2001:db8:7:1::/64", 1, ""},
	} {
		p.Egress, _ = netip.ParsePrefix(c.egress)
		got, ok := p.EgressNode(p.Node(c.node))
		if ok != (c.want != "") || ok && got.String() != c.want {
			t.Errorf("node %d in %q: %v, %v; want %q", c.node, c.egress, got, ok, c.want)
		}
	}
	p.Egress = netip.MustParsePrefix("fd70:696c:e100::/48")
	if _, err := p.ILA(); err == nil {
		t.Error("network ila may use the egress prefix")
	}
}

// Every plan that Validate accepts has the properties that the rest of Pilaster relies on.
func FuzzPlanValidate(f *testing.F) {
	d := DefaultPlan()
	f.Add(d.Base.Addr().AsSlice(), d.Base.Bits(), d.Private.Addr().AsSlice(), d.Private.Bits())
	f.Add(d.Base.Addr().AsSlice(), 200, []byte{1, 2, 3, 4}, -1)
	f.Fuzz(func(t *testing.T, base []byte, baseBits int, private []byte, privateBits int) {
		a, _ := netip.AddrFromSlice(base)
		b, _ := netip.AddrFromSlice(private)
		p := Plan{Base: netip.PrefixFrom(a, baseBits), Private: netip.PrefixFrom(b, privateBits)}
		if p.Validate() != nil {
			return
		}
		if p.Usable() < MinUsable || p.Nodes() < 256 || p.Base.Overlaps(p.Private) {
			t.Errorf("%v leaves %d addresses, %d nodes", p, p.Usable(), p.Nodes())
		}
		for _, n := range []uint64{0, 1, p.Nodes() - 1} {
			if node := p.Node(n); !p.ContainsNode(node) || p.NodeNumber(node) != n {
				t.Errorf(
					"node %d of %v is %v, contained %v, number %d",
					n,
					p,
					node,
					p.ContainsNode(node),
					p.NodeNumber(node),
				)
			}
		}
	})
}

func TestDefaultPlan(t *testing.T) {
	p := DefaultPlan()
	if err := p.Validate(); err != nil {
		t.Error(err)
	}
	if got := p.Node(3).String(); got != "fd70:696c:6100:3::/64" {
		t.Errorf("node 3 is %s", got)
	}
	if p.Usable() != 65536 || p.Nodes() != 1<<24 {
		t.Errorf("%d addresses, %d nodes", p.Usable(), p.Nodes())
	}
}

func TestContainsNode(t *testing.T) {
	p := DefaultPlan()
	for prefix, want := range map[string]bool{
		"fd70:696c:6100:3::/64":     true,
		"fd70:696c:61ff:ffff::/64":  true,
		"fd70:696c:6200::/64":       false,
		"fd70:696c:6100:3::/65":     false,
		"fd70:696c:6100:2::/63":     false,
		"fd70:696c:6100:3::1/64":    false,
		"::ffff:10.0.0.0/104":       false,
		"10.0.0.0/8":                false,
		"(what an error leaves us)": false,
	} {
		q, _ := netip.ParsePrefix(prefix)
		if got := p.ContainsNode(q); got != want {
			t.Errorf("ContainsNode(%s) = %v", prefix, got)
		}
	}
}
