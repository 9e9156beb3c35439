package nimitz

import (
	"cmp"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// hosted is a tenant that lives here: where all of it is, and what the switch has of that.
type hosted struct {
	name     string
	vni      pipeline.VNI
	overlays []netip.Prefix
	here     map[netip.Addr]port
	remote   map[netip.Prefix]netip.Prefix // the node of each subnet or address that is on another one
	heard    bool                          // the cluster has told all of them
	sealed   bool                          // its containers here neither send nor receive

	services  []tenant.Service
	published []tenant.Publication
	regions   []tenant.Region
	beyond    map[any]pipeline.Entry // what these come to, by match
	installed map[any]pipeline.Entry // by match
}

// port is a container's, and what it is to others.
type port struct {
	pipeline.Port
	app address.AppID
}

func newHosted() *hosted {
	return &hosted{
		here:      map[netip.Addr]port{},
		remote:    map[netip.Prefix]netip.Prefix{},
		beyond:    map[any]pipeline.Entry{},
		installed: map[any]pipeline.Entry{},
	}
}

// set takes the tenant as it is now. Its VNI is the oldest of its ids, which stays when it gets more.
func (h *hosted) set(t tenant.Tenant) {
	h.name, h.vni, h.overlays = t.Name, pipeline.VNI(t.IDs[0].ID), nil
	for _, o := range t.Overlays {
		h.overlays = append(h.overlays, o.CIDR)
	}
	h.regions = t.Regions
	h.services, h.published = t.Services, slices.SortedFunc(
		slices.Values(t.Publications),
		func(a, b tenant.Publication) int { return a.Underlay.Compare(b.Underlay) },
	)
}

func (h *hosted) add(r endpoint.Record) {
	for _, a := range r.Attachments {
		h.here[a.Address] = port{pipeline.Port(r.ID), cmp.Or(r.AppNow, r.App)}
	}
}

func (h *hosted) remove(r endpoint.Record) {
	for _, a := range r.Attachments {
		if h.here[a.Address].Port == pipeline.Port(r.ID) {
			delete(h.here, a.Address)
		}
	}
}

// matches are what entries of an endpoint are found by.
func (h *hosted) matches(r endpoint.Record) []any {
	var all []any
	for _, a := range r.Attachments {
		all = append(all, senderMatch(pipeline.Port(r.ID), a.Address), h.forwardMatch(host(a.Address)))
	}
	return all
}

// translations are what entries of an endpoint's virtual addresses are found by.
func (h *hosted) translations(r endpoint.Record) (all []any) {
	for _, a := range r.Attachments {
		match := pipeline.SNAT{VNI: h.vni, Real: a.Address}.Match()
		if e, ok := h.beyond[match].(pipeline.SNAT); ok {
			all = append(all, match, pipeline.DNAT{VNI: pipeline.GatewayVNI, Virtual: e.Virtual}.Match())
		}
	}
	return all
}

// allMatches are what entries of the tenant are found by, those that are there and those that are wanted.
func (h *hosted) allMatches() []any {
	var all []any
	for match := range h.installed {
		all = append(all, match)
	}
	for match := range h.beyond {
		all = append(all, match)
	}
	for _, cidr := range h.overlays {
		all = append(all, h.forwardMatch(cidr))
	}
	for to := range h.remote {
		all = append(all, h.forwardMatch(to))
	}
	for a, p := range h.here {
		all = append(all, senderMatch(p.Port, a), h.forwardMatch(host(a)))
	}
	return all
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func senderMatch(p pipeline.Port, a netip.Addr) any {
	return pipeline.Sender{Port: p, Address: a}.Match()
}

func (h *hosted) forwardMatch(to netip.Prefix) any {
	return pipeline.Forward{VNI: h.vni, To: to}.Match()
}

// wanted is the entry that a match is to have, nil for none. A container here comes before what the cluster last said
// of its address, and in what is left of the tenant's CIDRs is nobody.
func (h *hosted) wanted(match any) pipeline.Entry {
	if e, ok := h.beyond[match]; ok {
		return e
	}
	switch m := match.(type) {
	case pipeline.Sender:
		if p, ok := h.here[m.Address]; ok && p.Port == m.Port && !h.sealed {
			return pipeline.Sender{Port: p.Port, Address: m.Address, VNI: h.vni, Identity: uint16(p.app)}
		}
	case pipeline.Forward:
		if m.VNI != h.vni {
			return nil // it was another
		}
		if p, ok := h.here[m.To.Addr()]; ok && m.To.IsSingleIP() {
			if !h.sealed {
				m.Port = p.Port
			}
			return m
		}
		if node, ok := h.remote[m.To]; ok {
			m.Port, m.VTEP = pipeline.VXLAN, pipeline.VTEP(node)
			return m
		}
		if slices.Contains(h.overlays, m.To) {
			return m
		}
	}
	return nil
}

// has tells whether something of the tenant's overlays can be given to a node.
func (h *hosted) has(to netip.Prefix) bool {
	return to == to.Masked() && slices.ContainsFunc(h.overlays, func(cidr netip.Prefix) bool {
		return cidr.Contains(to.Addr()) && to.Bits() > cidr.Bits()
	})
}

// adopt believes what the switch has from before, until the cluster tells.
func (h *hosted) adopt(e pipeline.Entry) {
	h.installed[e.Match()] = e
	if f, ok := e.(pipeline.Forward); ok && f.Port == pipeline.VXLAN && !h.heard && h.has(f.To) &&
		pipeline.IsVTEP(f.VTEP) {
		h.remote[f.To] = netip.PrefixFrom(f.VTEP, address.NodeBits).Masked()
	}
}

func (h *hosted) forwards() int {
	n := 0
	for _, e := range h.installed {
		if e.Stage() == pipeline.Forwarding {
			n++
		}
	}
	return n
}
