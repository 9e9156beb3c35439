package lab

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestHalves: both halves together have the addresses of the route, in each family.
func TestHalves(t *testing.T) {
	for to, want := range map[string][2]string{
		"0.0.0.0/0": {"0.0.0.0/1", "128.0.0.0/1"}, "10.1.0.0/16": {"10.1.0.0/17", "10.1.128.0/17"},
		"::/0": {"::/1", "8000::/1"}, "fd12::/63": {"fd12::/64", "fd12:0:0:1::/64"},
	} {
		_, dst, err := net.ParseCIDR(to)
		if err != nil {
			t.Fatal(err)
		}
		for i, half := range halvesOf(netlink.Route{Dst: dst}) {
			if got := half.Dst.String(); got != want[i] {
				t.Errorf("half %d of %v is %v, want %v", i, to, got, want[i])
			}
		}
	}
}
