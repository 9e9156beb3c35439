package demo

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"connectrpc.com/connect"
	"github.com/vishvananda/netlink"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/netns"
)

// entries prints the entries of each node. A table that is not a cache must not have more entries than the node has
// endpoints. The node must not have a route or neighbour in another node's prefix.
func (p *proof) entries(ctx context.Context) error {
	title := "4  Entries of each node"
	for _, node := range spec.Nodes {
		response, err := p.lab.Agent(node).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		if err != nil {
			return err
		}
		s := response.Msg
		own := 0
		for _, c := range spec.Containers {
			if c.Node == node {
				own++
			}
		}
		p.check(int(s.Endpoints) == own, "4: %s has %d endpoints, want %d", node, s.Endpoints, own)
		var tables []string
		for _, e := range s.GetDatapath().GetEntries() {
			if e.Cache {
				continue
			}
			p.check(int(e.Used) <= own, "4: %s has %d entries in %s for %d endpoints", node, e.Used, e.Table, own)
			tables = append(tables, fmt.Sprintf("%s %d", e.Table, e.Used))
		}
		p.check(len(tables) > 0, "4: %s reports no table", node)
		foreign, err := p.foreign(node)
		if err != nil {
			return err
		}
		p.check(len(foreign) == 0, "4: %s has %s, want none", node, strings.Join(foreign, ", "))
		p.print(
			"%-46s%s: %s, %s, %s for other nodes  (%s)",
			title,
			node,
			humanize.Of(s.Endpoints, "endpoint", "endpoints"),
			humanize.Of(
				s.Tenants,
				"tenant",
				"tenants",
			),
			humanize.Of(len(foreign), "entry", "entries"),
			strings.Join(tables, ", "),
		)
		title = ""
	}
	return nil
}

// foreign lists a node's routes and neighbours in other nodes' prefixes.
func (p *proof) foreign(node string) ([]string, error) {
	ns, err := p.lab.Namespace(node)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	routes, err := netns.List(func() ([]netlink.Route, error) { return h.RouteList(nil, netlink.FAMILY_V6) })
	if err != nil {
		return nil, err
	}
	neighbours, err := netns.List(func() ([]netlink.Neigh, error) { return h.NeighList(0, netlink.FAMILY_V6) })
	if err != nil {
		return nil, err
	}
	var found []string
	for _, other := range spec.Nodes {
		prefix, err := p.lab.Prefix(other)
		if err != nil {
			return nil, err
		}
		if other == node {
			continue
		}
		for _, r := range routes {
			if r.Dst == nil {
				continue // the default route
			}
			to, _ := netip.AddrFromSlice(r.Dst.IP)
			bits, _ := r.Dst.Mask.Size()
			if bits > 0 && netip.PrefixFrom(to, bits).Overlaps(prefix) {
				found = append(found, fmt.Sprintf("route %v", r.Dst))
			}
		}
		for _, n := range neighbours {
			if to, _ := netip.AddrFromSlice(n.IP); prefix.Contains(to) {
				found = append(found, fmt.Sprintf("neighbour %v", n.IP))
			}
		}
	}
	return found, nil
}
