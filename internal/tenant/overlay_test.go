package tenant

import (
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
)

func overlay(cidr string, bits int) Overlay { return Overlay{netip.MustParsePrefix(cidr), bits} }

func TestCheckOverlays(t *testing.T) {
	for _, c := range []struct {
		overlays []Overlay
		refused  string
	}{
		{[]Overlay{overlay("10.0.0.0/16", 24)}, ""},
		{[]Overlay{overlay("fd12:3456::/48", 80), overlay("10.0.0.0/16", 24)}, ""},
		{[]Overlay{overlay("10.0.0.0/30", 0)}, ""},
		{[]Overlay{overlay("10.0.0.0/16", 30)}, ""},
		{nil, "--cidr"},
		{[]Overlay{overlay("10.0.0.0/16", 24), overlay("10.1.0.0/16", 24)}, "one family"},
		{[]Overlay{overlay("10.0.0.0/16", 24), overlay("fd12:3456::/48", 80), overlay("10.1.0.0/16", 24)},
			"one family"},
		{[]Overlay{overlay("10.0.0.0/16", 0), overlay("fd12:3456::/48", 80)}, "one way"},
		{[]Overlay{{}}, "not a prefix"},
		{[]Overlay{overlay("::ffff:10.0.0.0/112", 0)}, "not a prefix"},
		{[]Overlay{overlay("10.0.0.1/16", 24)}, "write 10.0.0.0/16"},
		{[]Overlay{overlay("fd70:696c:6100:7::/64", 80)}, "base prefix"},
		{[]Overlay{overlay("fd00::/8", 80)}, "base prefix"},
		{[]Overlay{overlay("fc12::/48", 80)}, "private prefix"},
		{[]Overlay{overlay("100.64.0.0/16", 24)}, "gateway prefix 100.64.0.0/10"},
		{[]Overlay{overlay("fd70:696c:6700::/64", 80)}, "gateway prefix"},
		{[]Overlay{overlay("169.254.0.0/16", 24)}, "169.254.0.0/16"},
		{[]Overlay{overlay("224.0.0.0/16", 24)}, "224.0.0.0/3"},
		{[]Overlay{overlay("127.0.0.0/16", 24)}, "127.0.0.0/8"},
		{[]Overlay{overlay("fe80::/48", 80)}, "fe80::/10"},
		{[]Overlay{overlay("ff02::/48", 80)}, "ff00::/8"},
		{[]Overlay{overlay("10.0.0.0/16", 16)}, "node bits 16"},
		{[]Overlay{overlay("10.0.0.0/16", 8)}, "node bits 8"},
		{[]Overlay{overlay("10.0.0.0/16", 31)}, "a /30 at most"},
		{[]Overlay{overlay("fd12:3456::/48", 127)}, "a /126 at most"},
		{[]Overlay{overlay("10.0.0.0/31", 0)}, "/30 or shorter"},
	} {
		err := CheckOverlays(address.DefaultPlan(), c.overlays)
		if (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%v: %v; want %q", c.overlays, err, c.refused)
		}
	}
}

func TestGiven(t *testing.T) {
	for _, c := range []struct {
		of           Overlay
		first, count uint64
		given, not   string
	}{
		{overlay("10.0.0.0/16", 24), 0, 256, "10.0.0.0/24", "10.1.0.0/24"},
		{overlay("10.0.0.0/16", 24), 0, 256, "10.0.255.0/24", "10.0.0.0/25"},
		{overlay("10.0.0.0/24", 0), 1, 254, "10.0.0.1/32", "10.0.0.0/32"},
		{overlay("10.0.0.0/24", 0), 1, 254, "10.0.0.254/32", "10.0.0.255/32"},
		{overlay("fd12:3456::/48", 80), 0, 1 << 32, "fd12:3456:0:ffff:ffff::/80", "fd12:3456:0:ffff:ffff::/81"},
		{overlay("fd12:3456::/48", 0), 1, 1<<32 - 1, "fd12:3456::ffff:ffff/128", "fd12:3456::1:0:0/128"},
		{overlay("fd12:3456::/48", 0), 1, 1<<32 - 1, "fd12:3456::1/128", "fd12:3456::/128"},
	} {
		if first, count := c.of.Given(); first != c.first || count != c.count {
			t.Errorf("%v gives %d from %d", c.of, count, first)
		}
		given := netip.MustParsePrefix(c.given)
		if n, ok := c.of.Contains(given); !ok || c.of.At(n) != given {
			t.Errorf("%v: %v has number %d, %v", c.of, given, n, ok)
		}
		if n, ok := c.of.Contains(netip.MustParsePrefix(c.not)); ok {
			t.Errorf("%v: %s has number %d", c.of, c.not, n)
		}
	}
}
