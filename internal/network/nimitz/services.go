package nimitz

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Service is something on the underlay that a tenant's containers reach at an address of the tenant's own choice (§3.1, traffic (c)).
type Service struct {
	Tenant, Name string
	Virtual      netip.Addr // as containers have it
	Real         netip.Addr // as the underlay has it
}

// Publication is a container that the underlay reaches at an address of a node's gateway (appendix A, traffic (d)).
type Publication struct {
	Tenant, Name string
	Container    netip.Addr
	Gateway      netip.Prefix // the /64 of the node
	Underlay     netip.Addr   // one of UnderlayAddress
}

// services is what the cluster last said of the north and the south.
type services struct {
	of        map[string][]Service
	published map[string][]Publication // by tenant, in the order of their addresses
	heard     bool
}

// SetServices tells all services and publications of the cluster. Those of tenants that are not here count once these are.
func (n *Network) SetServices(ctx context.Context, all []Service, published []Publication) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.checkServices(all, published); err != nil {
		return fmt.Errorf("%w; nothing was changed", err)
	}
	n.services = services{map[string][]Service{}, map[string][]Publication{}, true}
	for _, s := range all {
		n.services.of[s.Tenant] = append(n.services.of[s.Tenant], s)
	}
	for _, p := range slices.SortedFunc(slices.Values(published), func(a, b Publication) int { return a.Underlay.Compare(b.Underlay) }) {
		n.services.published[p.Tenant] = append(n.services.published[p.Tenant], p)
	}
	if err := n.settle(ctx, slices.Collect(maps.Values(n.tenants))...); err != nil {
		return err
	}
	if n.config.Gateway == nil {
		return nil
	}
	return n.config.Gateway.Publish(ctx, n.publishedHere())
}

// checkServices refuses what could take a packet that is another's.
func (n *Network) checkServices(all []Service, published []Publication) error {
	type named struct {
		tenant string
		addr   netip.Addr
	}
	seen := map[named]string{}
	once := func(tenant string, a netip.Addr, name string) error {
		if other, twice := seen[named{tenant, a}]; twice {
			return fmt.Errorf("%s and %s both have %v", other, name, a)
		}
		seen[named{tenant, a}] = name
		return nil
	}
	if n.config.Gateway == nil && len(all)+len(published) > 0 {
		return errors.New("there are services, and this node has no gateway to them")
	}
	for _, s := range all {
		name := "service " + s.Tenant + "/" + s.Name
		if err := errors.Join(n.checkService(s), once(s.Tenant, s.Virtual, name), once(s.Tenant, s.Real, name)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for _, p := range published {
		name := "publication " + p.Tenant + "/" + p.Name
		_, ok := underlayIndex(p.Gateway, p.Underlay)
		switch {
		case !ok || !n.config.Plan.ContainsNode(p.Gateway):
			return fmt.Errorf("%s: %v is not one of the gateway's addresses that publications have, %v and above", name, p.Underlay, firstPublished(p.Gateway))
		case !p.Container.Is6():
			return fmt.Errorf("%s: gateways are of IPv6, and %v is not", name, p.Container)
		}
		if _, ok := n.config.Plan.GatewayBlock(p.Gateway, false); !ok {
			return fmt.Errorf("%s: node %v has no block of virtual addresses", name, p.Gateway)
		}
		if err := once("", p.Underlay, name); err != nil {
			return err
		}
	}
	return nil
}

func firstPublished(node netip.Prefix) netip.Addr {
	if node.Bits() != address.NodeBits || !node.Addr().Is6() {
		return netip.Addr{}
	}
	return UnderlayAddress(node, 2)
}

func (n *Network) checkService(s Service) error {
	plan := n.config.Plan
	if _, ok := plan.GatewayBlock(n.config.Node, false); !ok {
		return fmt.Errorf("node %v has no block of virtual addresses", n.config.Node)
	}
	for _, a := range []netip.Addr{s.Virtual, s.Real} {
		switch h := n.tenants[s.Tenant]; {
		case !a.Is6() || a.Is4In6() || a.Zone() != "" || a.IsMulticast() || a.IsUnspecified() || a.IsLinkLocalUnicast() || a.IsLoopback():
			return fmt.Errorf("%v cannot be a service's, for gateways are of IPv6 and lead where routes do", a)
		case plan.Gateway6.Contains(a) || plan.Private.Contains(a):
			return fmt.Errorf("%v is of %v or %v, which are others'", a, plan.Gateway6, plan.Private)
		case h != nil && slices.ContainsFunc(h.overlays, func(o netip.Prefix) bool { return o.Contains(a) }):
			return fmt.Errorf("%v is in the tenant's own addresses, %v", a, h.overlays)
		}
	}
	switch base := plan.Base; {
	case s.Virtual == s.Real:
		return fmt.Errorf("%v is its address and its name; choose another name", s.Real)
	case base.Contains(s.Virtual):
		return fmt.Errorf("%v is in the base prefix %v", s.Virtual, base)
	case base.Contains(s.Real) && address.Split(s.Real).Tenant != 0:
		return fmt.Errorf("%v is a container's address", s.Real)
	}
	return nil
}

// virtual is this node's virtual address of each of a tenant's containers that need one: those here that may speak to services, and those anywhere that
// this node's gateway publishes. A container has one, whatever it is for.
func (n *Network) virtual(name string) map[netip.Addr]netip.Addr {
	all := map[netip.Addr]netip.Addr{}
	block, _ := n.config.Plan.GatewayBlock(n.config.Node, false)
	for _, p := range n.services.published[name] {
		if i, _ := underlayIndex(p.Gateway, p.Underlay); p.Gateway == n.config.Node && !all[p.Container].IsValid() {
			all[p.Container] = PublishedAddress(block, i)
		}
	}
	h := n.tenants[name]
	if h == nil || len(n.services.of[name]) == 0 {
		return all
	}
	for a, p := range h.here {
		if a.Is6() && !all[a].IsValid() {
			all[a] = ContainerAddress(block, endpoint.ID(p.Port))
		}
	}
	return all
}

func (n *Network) publishedHere() map[netip.Addr]netip.Addr {
	all := map[netip.Addr]netip.Addr{}
	for name, published := range n.services.published {
		virtual := n.virtual(name)
		for _, p := range published {
			if p.Gateway == n.config.Node {
				all[p.Underlay] = virtual[p.Container]
			}
		}
	}
	return all
}

// renew notes what services and containers come to: of a tenant, entries as many as services, its containers here, and publications of
// these or at this node's gateway. Until the cluster has told, what the switch has is believed.
func (n *Network) renew(h *hosted) {
	if !n.services.heard || h == n.region {
		return
	}
	clear(h.nat)
	put := func(all ...pipeline.Entry) {
		for _, e := range all {
			h.nat[e.Match()] = e
		}
	}
	for _, s := range n.services.of[h.name] {
		put(pipeline.DNAT{VNI: h.vni, Virtual: s.Virtual, RealVNI: h.vni, Real: s.Real},
			pipeline.SNAT{VNI: h.vni, Real: s.Real, Virtual: s.Virtual},
			pipeline.Forward{VNI: h.vni, To: host(s.Real), Port: pipeline.Gateway})
	}
	for a, v := range n.virtual(h.name) {
		put(pipeline.DNAT{VNI: pipeline.GatewayVNI, Virtual: v, RealVNI: h.vni, Real: a}, pipeline.SNAT{VNI: h.vni, Real: a, Virtual: v})
	}
	for _, p := range n.services.published[h.name] {
		// Clients look like the gateway, so that answers come back to the one that knows them.
		client := n.client(p.Gateway)
		if _, here := h.here[p.Container]; p.Gateway == n.config.Node {
			put(pipeline.Forward{VNI: h.vni, To: client, Port: pipeline.Gateway})
		} else if here {
			put(pipeline.Forward{VNI: h.vni, To: client, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(p.Gateway)})
		}
	}
}

// client is what clients of a node's gateway look like.
func (n *Network) client(node netip.Prefix) netip.Prefix {
	block, _ := n.config.Plan.GatewayBlock(node, false)
	return host(GatewayAddress(block))
}

// renewRegion notes what is no tenant's: whom packets are taken from, and what lies outside.
func (n *Network) renewRegion() {
	peer := pipeline.Peer{Nodes: n.config.Plan.Base}
	n.region.nat[peer.Match()] = peer
	if !n.services.heard {
		return
	}
	clear(n.region.nat)
	n.region.nat[peer.Match()] = peer
	for _, h := range n.tenants {
		for _, e := range h.nat {
			if f, ok := e.(pipeline.Forward); ok && f.Port == pipeline.Gateway {
				outside := pipeline.NorthSouth{To: f.To}
				n.region.nat[outside.Match()] = outside
			}
		}
	}
}

// believe takes note of what the switch has of services, until the cluster tells of them. What is of a container that is gone goes.
func (n *Network) believe(h *hosted, e pipeline.Entry) {
	var real, virtual netip.Addr
	switch e := e.(type) {
	case pipeline.NorthSouth:
	case pipeline.DNAT:
		real, virtual = e.Real, e.Virtual
	case pipeline.SNAT:
		real, virtual = e.Real, e.Virtual
	case pipeline.Forward:
		if e.VNI != h.vni || e.Port != pipeline.Gateway && (e.Port != pipeline.VXLAN || e.To != n.client(netip.PrefixFrom(e.VTEP, address.NodeBits).Masked())) {
			return
		}
	default:
		return
	}
	block, _ := n.config.Plan.GatewayBlock(n.config.Node, false)
	if p, here := h.here[real]; block.Contains(virtual) && isContainer(virtual) && (!here || virtual != ContainerAddress(block, endpoint.ID(p.Port))) {
		return
	}
	if h == n.region != (e.Stage() == pipeline.NAT && !real.IsValid()) {
		return // of a tenant that is not here
	}
	h.nat[e.Match()] = e
}

// forget takes the translations of a container that goes from what is only believed.
func (h *hosted) forget(r endpoint.Record) {
	for _, match := range h.translations(r) {
		delete(h.nat, match)
	}
}

// translations are what entries of an endpoint's virtual addresses are found by.
func (h *hosted) translations(r endpoint.Record) (all []any) {
	for _, a := range r.Attachments {
		if h.here[a.Address].Port != pipeline.Port(r.ID) {
			continue // another's by now
		}
		match := pipeline.SNAT{VNI: h.vni, Real: a.Address}.Match()
		if e, ok := h.nat[match].(pipeline.SNAT); ok {
			all = append(all, match, pipeline.DNAT{VNI: pipeline.GatewayVNI, Virtual: e.Virtual}.Match())
		}
	}
	return all
}

// update makes the switch have what a container that has come or gone changes, by what its entries are found by.
func (n *Network) update(ctx context.Context, h *hosted, matches []any) error {
	matches = slices.AppendSeq(matches, maps.Keys(h.nat))
	n.renew(h)
	return n.change(ctx, h, slices.AppendSeq(matches, maps.Keys(h.nat)))
}

// settle makes the switch have all that is wanted of tenants, and of what is no tenant's, in one step. The caller holds the lock.
func (n *Network) settle(ctx context.Context, all ...*hosted) error {
	for _, h := range all {
		n.renew(h)
	}
	n.renewRegion()
	if !n.repaired {
		return nil // which does all at once
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
	return nil
}
