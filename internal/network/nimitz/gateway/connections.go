package gateway

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Keep ends all connections except those from virtual addresses in use, and those to published addresses whose target
// has not changed. Without Keep, the kernel would keep all connections and send their packets to the next container
// with the address.
func (g *Gateway) Keep(_ context.Context, published map[netip.Addr]netip.Addr, used map[netip.Addr]bool) error {
	var h *netlink.Handle
	if err := g.ns.Do(func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	}); err != nil {
		return err
	}
	defer h.Close()
	if _, err := h.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET6,
		withdrawn{g.config, published, used}); err != nil {
		return fmt.Errorf("end the gateway's connections by addresses that were withdrawn: %w", err)
	}
	return nil
}

// withdrawn matches connections from virtual addresses that are no longer in use, and to published addresses whose
// target has changed.
type withdrawn struct {
	Config
	published map[netip.Addr]netip.Addr
	used      map[netip.Addr]bool
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (w withdrawn) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	from, to, answers := parse(flow.Forward.SrcIP), parse(flow.Forward.DstIP), parse(flow.Reverse.SrcIP)
	return w.Block.Contains(from) && !w.used[from] || w.Block.Contains(answers) && w.published[to] != answers
}

func parse(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a
}
