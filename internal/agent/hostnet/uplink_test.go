package hostnet

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

// UplinkAddresses also returns tentative addresses, which a node has just after boot. Node ports are at global ones.
func TestUplinkAddresses(t *testing.T) {
	ns := testNetns(t)
	var got, ports []netip.Addr
	err := ns.Do(func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		for _, text := range []string{"fe80::2/64", "2001:db8::2/64"} {
			a, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(veth, a); err != nil { // tentative while the link is down
				return err
			}
		}
		var err error
		if got, err = UplinkAddresses([]string{"eth0"}, netip.Prefix{}); err != nil {
			return err
		}
		ports, err = NodePortAddresses([]string{"eth0", "missing"}, netip.MustParsePrefix("fd70:696c:6100:1::/64"))
		return err
	})
	if want := []netip.Addr{netip.MustParseAddr("2001:db8::2"), netip.MustParseAddr("fe80::2")}; err != nil ||
		!slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if want := []netip.Addr{netip.MustParseAddr("fd70:696c:6100:1::1"), got[0]}; !slices.Equal(ports, want) {
		t.Errorf("node ports are at %v, want %v", ports, want)
	}
}
