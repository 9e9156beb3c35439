package address

import (
	"net/netip"
	"strings"
	"testing"
)

// NP1, §6.1: node 64 bits, tenant 24. We split the 40 bits of the container into app (16) and index (24).
func TestAddrLayout(t *testing.T) {
	node := netip.MustParsePrefix("fd70:696c:6100:3::/64")
	for _, c := range []struct {
		plain Plain
		want  string
	}{
		{Plain{node, 1, 1, 19}, "fd70:696c:6100:3:0:100:100:13"},
		{Plain{node, 0, 0, 1}, "fd70:696c:6100:3::1"},
		{Plain{node, 0xabcdef, 0x1234, 0x567890}, "fd70:696c:6100:3:abcd:ef12:3456:7890"},
		{Plain{node, MaxTenantID, 0xffff, MaxIndex}, "fd70:696c:6100:3:ffff:ffff:ffff:ffff"},
		{Plain{node, 1, 0, 0}, "fd70:696c:6100:3:0:100::"},
	} {
		if got := c.plain.Addr().String(); got != c.want {
			t.Errorf("%+v composed to %s, want %s", c.plain, got, c.want)
		}
		if got := Split(netip.MustParseAddr(c.want)); got != c.plain {
			t.Errorf("%s taken apart is %+v, want %+v", c.want, got, c.plain)
		}
	}
}

func TestAddrPanicsBeyondItsFields(t *testing.T) {
	node := netip.MustParsePrefix("fd70:696c:6100:3::/64")
	for name, p := range map[string]Plain{
		"tenant": {node, MaxTenantID + 1, 0, 1},
		"index":  {node, 1, 0, MaxIndex + 1},
		"node":   {netip.MustParsePrefix("fd70:696c:6100:3::/63"), 1, 0, 1},
		"none":   {Tenant: 1, Index: 1},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s out of range was composed", name)
				}
			}()
			p.Addr()
		}()
	}
}

func FuzzSplit(f *testing.F) {
	f.Add(netip.MustParseAddr("fd70:696c:6100:3:0:100:100:13").AsSlice())
	f.Add(netip.MustParseAddr("::ffff:192.0.2.1").AsSlice())
	f.Fuzz(func(t *testing.T, b []byte) {
		a, ok := netip.AddrFromSlice(b)
		if !ok || !a.Is6() {
			return
		}
		if p := Split(a); p.Addr() != a {
			t.Errorf("%v is %+v, which is %v", a, p, p.Addr())
		}
	})
}

func TestParse(t *testing.T) {
	for _, c := range []struct{ in, want, refused string }{
		{"fd70:696c:6100:3:0:100:100:13", "fd70:696c:6100:3:0:100:100:13", ""},
		{"FD70:696C:6100:0003::0001", "fd70:696c:6100:3::1", ""},
		{"::1", "::1", ""},
		{"fe80::1%eth0", "", "zone"},
		{"192.0.2.1", "", "IPv4"},
		{"::ffff:192.0.2.1", "", "IPv4"},
		{"fd70::/64", "", "not an IPv6 address"},
		{"[fd70::1]", "", "not an IPv6 address"},
		{" fd70::1", "", "not an IPv6 address"},
		{"", "", "not an IPv6 address"},
	} {
		got, err := Parse(c.in)
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("Parse(%q) = %v, %v; want an error with %q", c.in, got, err, c.refused)
			}
		} else if err != nil || got.String() != c.want {
			t.Errorf("Parse(%q) = %v, %v; want %s", c.in, got, err, c.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"fd70::1", "fe80::1%eth0", "::ffff:192.0.2.1", "192.0.2.1", "fd70::/64", "::%"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := Parse(s)
		if err != nil {
			return
		}
		if !a.Is6() || a.Is4In6() || a.Zone() != "" {
			t.Errorf("Parse(%q) let %v through", s, a)
		}
		if again, err := Parse(a.String()); err != nil || again != a {
			t.Errorf("Parse(%q) = %v, which reads as %v, %v", s, a, again, err)
		}
	})
}
