package hostnet

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// UplinkAddresses returns the next hops for the fabric, best first: those of the first uplink, and of each the
// permanent global addresses before the link-local one. At boot they may be tentative; usually they become permanent.
// Addresses in own, the node's prefix, are excluded.
func UplinkAddresses(uplinks []string, own netip.Prefix) (all []netip.Addr, err error) {
	for _, name := range uplinks {
		its, err := uplinkAddresses(name, own)
		if err != nil {
			return nil, err
		}
		all = append(all, its...)
	}
	return all, nil
}

func uplinkAddresses(uplink string, own netip.Prefix) ([]netip.Addr, error) {
	link, err := netlink.LinkByName(uplink)
	if err != nil {
		return nil, fmt.Errorf("uplink %s: %w", uplink, err)
	}
	addrs, err := netns.List(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_V6) })
	if err != nil {
		return nil, fmt.Errorf("uplink %s: %w", uplink, err)
	}
	var global, linkLocal []netip.Addr
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		switch {
		case !ok, a.Flags&(unix.IFA_F_DADFAILED|unix.IFA_F_DEPRECATED|unix.IFA_F_TEMPORARY) != 0,
			own.Contains(ip):
		case ip.IsLinkLocalUnicast():
			linkLocal = append(linkLocal, ip)
		default:
			global = append(global, ip)
		}
	}
	return append(global, linkLocal...), nil
}

// NodePortAddresses returns the addresses of this node at which hosts outside of the cluster reach node ports: NODE::1,
// and those of the uplinks that are not of one link. An uplink that is missing has none.
func NodePortAddresses(uplinks []string, own netip.Prefix) ([]netip.Addr, error) {
	var all []netip.Addr
	for _, name := range uplinks {
		its, err := uplinkAddresses(name, own)
		if _, missing := errors.AsType[netlink.LinkNotFoundError](err); err != nil && !missing {
			return nil, err
		}
		all = append(all, its...)
	}
	all = slices.DeleteFunc(all, netip.Addr.IsLinkLocalUnicast)
	slices.SortFunc(all, netip.Addr.Compare)
	return append([]netip.Addr{tenant.NodeAddress(own)}, slices.Compact(all)...), nil
}
