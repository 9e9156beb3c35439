package nimitz

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// checkNorthSouth refuses services and publications whose addresses conflict with others. No two tenants have the same
// address on the underlay.
func (n *Network) checkNorthSouth(t tenant.Tenant) error {
	err := t.CheckNorthSouth(n.config.Plan)
	for _, h := range n.tenants {
		for _, has := range h.published {
			same := func(p tenant.Publication) bool { return p.Underlay == has.Underlay }
			if h.name != t.Name && err == nil && slices.ContainsFunc(t.Publications, same) {
				err = fmt.Errorf("tenants %s and %s both have %v", h.name, t.Name, has.Underlay)
			}
		}
	}
	if err != nil {
		return fmt.Errorf("%w; nothing was changed", err)
	}
	return nil
}

// at reports whether a publication is at this node's gateway, and the gateway exists.
func (n *Network) at(p tenant.Publication) bool {
	return n.config.Gateway != nil && p.Gateway == n.config.Node
}

// virtual returns this node's virtual address of a container that is published here. A container of this node uses the
// same virtual address towards services, so it keeps its connections when it is published.
func (n *Network) virtual(h *hosted, p tenant.Publication) netip.Addr {
	block, _ := n.config.Plan.GatewayBlock(n.config.Node, false)
	if own, here := h.here[p.Container]; here {
		return ContainerAddress(block, endpoint.ID(own.Port))
	}
	i, _ := p.Index()
	return PublishedAddress(block, i)
}

// virtuals returns the virtual address of each of a tenant's containers that needs one: containers here, if the tenant
// has services, and containers anywhere that are published here.
func (n *Network) virtuals(h *hosted) map[netip.Addr]netip.Addr {
	all := map[netip.Addr]netip.Addr{}
	for _, p := range h.published {
		if n.at(p) {
			all[p.Container] = n.virtual(h, p)
		}
	}
	if len(h.services) == 0 || n.config.Gateway == nil {
		return all
	}
	block, _ := n.config.Plan.GatewayBlock(n.config.Node, false)
	for a, p := range h.here {
		if a.Is6() {
			all[a] = ContainerAddress(block, endpoint.ID(p.Port))
		}
	}
	return all
}

// renew computes the wanted entries of services, containers and other regions. Their number is linear in the services,
// the containers here, their publications, the publications at this node's gateway, and the CIDRs in other regions.
func (n *Network) renew(h *hosted) {
	if h == n.region {
		return
	}
	clear(h.beyond)
	put := func(all ...pipeline.Entry) {
		for _, e := range all {
			h.beyond[e.Match()] = e
		}
	}
	for _, s := range h.services {
		if n.config.Gateway != nil {
			put(
				pipeline.DNAT{VNI: h.vni, Virtual: s.Virtual, RealVNI: h.vni, Real: s.Real},
				pipeline.SNAT{VNI: h.vni, Real: s.Real, Virtual: s.Virtual},
			)
			put(outside(h, host(s.Real))...)
		}
	}
	for a, v := range n.virtuals(h) {
		put(
			pipeline.DNAT{VNI: pipeline.GatewayVNI, Virtual: v, RealVNI: h.vni, Real: a},
			pipeline.SNAT{VNI: h.vni, Real: a, Virtual: v},
		)
	}
	for _, p := range h.published {
		// Clients have the gateway's address, so that answers come back to the gateway that knows the connection.
		client := n.client(p.Gateway)
		if _, here := h.here[p.Container]; n.at(p) {
			put(outside(h, client)...)
		} else if here && p.Gateway != n.config.Node {
			put(pipeline.Forward{VNI: h.vni, To: client, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(p.Gateway),
				Outside: true})
		}
	}
	for _, r := range h.regions {
		put(n.regional(h, r)...)
	}
}

// outside returns the entries that make the gateway a tenant's next hop for a prefix.
func outside(h *hosted, to netip.Prefix) []pipeline.Entry {
	return []pipeline.Entry{
		pipeline.NorthSouth{VNI: h.vni, To: to},
		pipeline.Forward{VNI: h.vni, To: to, Port: pipeline.Gateway},
	}
}

// client returns the source address of clients of a node's gateway.
func (n *Network) client(node netip.Prefix) netip.Prefix {
	block, _ := n.config.Plan.GatewayBlock(node, false)
	return host(GatewayAddress(block))
}

// renewRegion computes the wanted entries that belong to no tenant: the peers.
func (n *Network) renewRegion() {
	clear(n.region.beyond)
	if nodes := n.config.Underlay.Peers(); nodes.IsValid() {
		peer := pipeline.Peer{Nodes: nodes}
		n.region.beyond[peer.Match()] = peer
	}
	for _, h := range n.tenants {
		for _, e := range h.beyond {
			if e, is := e.(pipeline.Foreign); is {
				edge := pipeline.Peer{Nodes: e.Edge}
				n.region.beyond[edge.Match()] = edge
			}
		}
	}
}

// publish sends the gateway its publications where they have changed, and ends the connections of withdrawn ones,
// because an address may be allocated again.
func (n *Network) publish(ctx context.Context) error {
	if n.config.Gateway == nil {
		return nil
	}
	all, used := map[netip.Addr]netip.Addr{}, map[netip.Addr]bool{}
	for _, h := range n.tenants {
		for _, p := range h.published {
			if n.at(p) {
				all[p.Underlay] = n.virtual(h, p)
			}
		}
		for _, v := range n.virtuals(h) {
			used[v] = true
		}
	}
	withdrawn := n.published == nil
	for at, v := range n.published {
		withdrawn = withdrawn || all[at] != v
	}
	for v := range n.used {
		withdrawn = withdrawn || !used[v]
	}
	if n.published == nil || !maps.Equal(all, n.published) {
		if err := n.config.Gateway.Publish(ctx, all); err != nil {
			return err
		}
	}
	if withdrawn {
		if err := n.config.Gateway.Keep(ctx, all, used); err != nil {
			n.published = nil // Publish is called again the next time.
			return err
		}
	}
	n.published, n.used = all, used
	return nil
}

// update applies the changes of a container that was added or removed to the switch, by the matches of its entries.
func (n *Network) update(ctx context.Context, h *hosted, matches []any) error {
	matches = slices.AppendSeq(matches, maps.Keys(h.beyond))
	n.renew(h)
	if err := n.change(ctx, h, slices.AppendSeq(matches, maps.Keys(h.beyond))); err != nil || !n.repaired {
		return err
	}
	return n.publish(ctx)
}

// reconcile applies all wanted entries of tenants, and the entries that belong to no tenant, in one step. The caller
// holds the lock.
func (n *Network) reconcile(ctx context.Context, all ...*hosted) error {
	for _, h := range all {
		n.renew(h)
	}
	n.renewRegion()
	if !n.repaired {
		return nil // Repair installs everything at once.
	}
	all = append(all, n.region)
	var remove, add []pipeline.Entry
	for _, h := range all {
		r, a := h.difference(h.allMatches())
		remove, add = append(remove, r...), append(add, a...)
	}
	if err := n.apply(ctx, remove, add); err != nil {
		return err
	}
	for _, h := range all {
		h.have(h.difference(h.allMatches()))
	}
	return n.publish(ctx)
}
