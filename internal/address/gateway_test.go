package address

import (
	"net/netip"
	"strings"
	"testing"
)

func TestGatewayBlock(t *testing.T) {
	p := DefaultPlan()
	for _, c := range []struct {
		node, four, six string // empty: none
	}{
		{"fd70:696c:6100:1::/64", "100.64.1.0/24", "fd70:696c:6700:0:1::/80"},
		{"fd70:696c:6100:3fff::/64", "100.127.255.0/24", "fd70:696c:6700:0:3fff::/80"},
		{"fd70:696c:6100:4000::/64", "", "fd70:696c:6700:0:4000::/80"},
		{"fd70:696c:61ff:ffff::/64", "", "fd70:696c:6700:ff:ffff::/80"},
	} {
		for is4, want := range map[bool]string{true: c.four, false: c.six} {
			got, ok := p.GatewayBlock(netip.MustParsePrefix(c.node), is4)
			if ok != (want != "") || ok && got.String() != want {
				t.Errorf("block of %s, IPv4 %v: %v, %v; want %q", c.node, is4, got, ok, want)
			}
		}
	}
	if four, six := p.GatewayBlocks(true), p.GatewayBlocks(false); four != 16384 || six < p.Nodes() {
		t.Errorf("%d and %d nodes have a block", four, six)
	}
	p.Gateway4 = netip.Prefix{}
	if block, ok := p.GatewayBlock(p.Node(1), true); ok || p.Validate() != nil {
		t.Errorf("without a gateway prefix: %v", block)
	}
}

func TestGatewayPrefixesAreRefused(t *testing.T) {
	for _, c := range []struct{ four, six, refused string }{
		{"100.64.0.0/10", "fd00::/48", ""},
		{"fd00::/48", "fd00::/48", "family"},
		{"100.64.0.0/10", "100.64.0.0/10", "family"},
		{"100.64.0.1/10", "fd00::/48", "write 100.64.0.0/10"},
		{"100.64.0.0/21", "fd00::/48", "/20 or shorter"},
		{"100.64.0.0/10", "fd00::/77", "/76 or shorter"},
		{"169.254.0.0/16", "fd00::/48", "169.254.0.0/16"},
		{"192.0.0.0/2", "fd00::/48", "224.0.0.0/3"},
		{"100.64.0.0/10", "fe80::/48", "fe80::/10"},
		{"100.64.0.0/10", "fd70:696c:6100::/48", "base prefix"},
		{"100.64.0.0/10", "fc12::/48", "private prefix"},
	} {
		p := DefaultPlan()
		p.Gateway4, p.Gateway6 = netip.MustParsePrefix(c.four), netip.MustParsePrefix(c.six)
		if err := p.Validate(); (err == nil) != (c.refused == "") ||
			err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s and %s: %v; want %q", c.four, c.six, err, c.refused)
		}
	}
}

// Subnets of all lengths have distinct numbers and lie in the wider prefix.
func FuzzSubnet(f *testing.F) {
	f.Add([]byte{10, 0, 0, 0}, 16, 24, uint64(3))
	f.Add(DefaultPlan().Gateway6.Addr().AsSlice(), 48, 80, uint64(1))
	f.Add(DefaultPlan().Gateway6.Addr().AsSlice(), 48, 64, uint64(7))
	f.Fuzz(func(t *testing.T, of []byte, bits, length int, n uint64) {
		a, _ := netip.AddrFromSlice(of)
		wide, err := a.Prefix(bits)
		if err != nil || length < bits || length > a.BitLen() || length-bits < 64 && n>>(length-bits) != 0 {
			return
		}
		got := Subnet(wide, length, n)
		if !wide.Contains(got.Addr()) || got.Bits() != length || got != got.Masked() || SubnetNumber(wide, got) != n {
			t.Errorf(
				"number %d of the /%ds of %v is %v, whose number is %d",
				n,
				length,
				wide,
				got,
				SubnetNumber(wide, got),
			)
		}
	})
}
