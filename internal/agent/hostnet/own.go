package hostnet

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
)

// OwnAddresses returns the IPv6 addresses of all devices of this node, sorted, without those that are valid on one link
// or one machine only.
func OwnAddresses() ([]netip.Addr, error) {
	addrs, err := netns.List(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V6) })
	if err != nil {
		return nil, fmt.Errorf("list the addresses of this node: %w", err)
	}
	var own []netip.Addr
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && !ip.IsLinkLocalUnicast() && !ip.IsLoopback() {
			own = append(own, ip)
		}
	}
	slices.SortFunc(own, netip.Addr.Compare)
	return slices.Compact(own), nil
}

// SourceTo returns the source that the kernel gives packets of this node's processes to an address, unless they choose
// one.
func SourceTo(to netip.Addr) (netip.Addr, error) {
	routes, err := netns.List(func() ([]netlink.Route, error) { return netlink.RouteGet(to.AsSlice()) })
	if err != nil {
		return netip.Addr{}, fmt.Errorf("route to %v: %w", to, err)
	}
	for _, r := range routes {
		if source, ok := netip.AddrFromSlice(r.Src); ok {
			return source, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("the route to %v has no source", to)
}

// ownRetry is the pause after a failure.
const ownRetry = 5 * time.Second

// FollowOwnAddresses calls set with the node's addresses, and again after each change, until ctx ends. set is called
// with other addresses than the time before, except after a failure.
func FollowOwnAddresses(ctx context.Context, changed <-chan struct{}, set func([]netip.Addr) error, log *slog.Logger) {
	var known []netip.Addr
	for first := true; ; {
		own, err := OwnAddresses()
		if err == nil && (first || !slices.Equal(own, known)) {
			err = set(own)
		}
		var again <-chan time.Time
		if err != nil {
			log.Error("a change of the node's addresses is not in force; retrying", "error", err)
			again, first = time.After(ownRetry), true
		} else {
			known, first = own, false
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}
