package agent

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// uplinkAddresses are the next hops the fabric can use, best first: global addresses that last,
// then the link-local one. At boot they may still be tentative; almost always they come to last. Our
// own prefix is no way to itself.
func (d *daemon) uplinkAddresses() ([]netip.Addr, error) {
	link, err := netlink.LinkByName(d.Uplink)
	if err != nil {
		return nil, fmt.Errorf("uplink %s: %w", d.Uplink, err)
	}
	addrs, err := netns.List(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_V6) })
	if err != nil {
		return nil, fmt.Errorf("uplink %s: %w", d.Uplink, err)
	}
	m, _ := d.node.Membership()
	var global, linkLocal []netip.Addr
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		switch {
		case !ok, a.Flags&(unix.IFA_F_DADFAILED|unix.IFA_F_DEPRECATED|unix.IFA_F_TEMPORARY) != 0,
			m.Prefix.Contains(ip):
		case ip.IsLinkLocalUnicast():
			linkLocal = append(linkLocal, ip)
		default:
			global = append(global, ip)
		}
	}
	return append(global, linkLocal...), nil
}
