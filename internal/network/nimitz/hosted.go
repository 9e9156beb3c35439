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

// hosted is a tenant that this node hosts: its mappings, its containers here, and its entries in the switch.
type hosted struct {
	name     string
	vni      pipeline.VNI
	overlays []netip.Prefix
	here     map[netip.Addr]port
	remote   map[netip.Prefix]netip.Prefix // by subnet or address on another node: that node
	synced   bool                          // the cluster has sent all mappings
	sealed   bool                          // its containers here may neither send nor receive

	services  []tenant.Service
	published []tenant.Publication
	regions   []tenant.Region
	beyond    map[any]pipeline.Entry // the entries of services, publications and regions, by match
	installed map[any]pipeline.Entry // by match
}

// port is a container's port, its app and its MAC.
type port struct {
	pipeline.Port
	app address.AppID
	mac pipeline.MAC
}

func newHosted() *hosted {
	return &hosted{
		here:      map[netip.Addr]port{},
		remote:    map[netip.Prefix]netip.Prefix{},
		beyond:    map[any]pipeline.Entry{},
		installed: map[any]pipeline.Entry{},
	}
}

// set stores the tenant's current state. The VNI is the tenant's oldest id, which stays when the tenant gets more ids.
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
		h.here[a.Address] = port{
			pipeline.Port(r.ID), cmp.Or(r.AppNow, r.App), pipeline.NewMAC(r.Device.ContainerMAC),
		}
	}
}

func (h *hosted) remove(r endpoint.Record) {
	for _, a := range r.Attachments {
		if h.here[a.Address].Port == pipeline.Port(r.ID) {
			delete(h.here, a.Address)
		}
	}
}

// matches returns the matches of an endpoint's entries.
func (h *hosted) matches(r endpoint.Record) []any {
	var all []any
	for _, a := range r.Attachments {
		all = append(all, senderMatch(pipeline.Port(r.ID), a.Address), h.forwardMatch(host(a.Address)))
	}
	return all
}

// translations returns the matches of the entries of an endpoint's virtual addresses.
func (h *hosted) translations(r endpoint.Record) (all []any) {
	for _, a := range r.Attachments {
		match := pipeline.SNAT{VNI: h.vni, Real: a.Address}.Match()
		if e, ok := h.beyond[match].(pipeline.SNAT); ok {
			all = append(all, match, pipeline.DNAT{VNI: pipeline.GatewayVNI, Virtual: e.Virtual}.Match())
		}
	}
	return all
}

// allMatches returns the matches of the tenant's entries, installed or wanted.
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

// wanted returns the entry that a match should have, nil for none. A container here takes precedence over the cluster's
// mapping of its address; the rest of the tenant's CIDRs leads to no port.
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
			return nil // the entry of a former container
		}
		if p, ok := h.here[m.To.Addr()]; ok && m.To.IsSingleIP() {
			if !h.sealed {
				m.Port, m.MAC = p.Port, p.mac
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

// has reports whether a prefix can be an allocation of the tenant's overlays.
func (h *hosted) has(to netip.Prefix) bool {
	return to == to.Masked() && slices.ContainsFunc(h.overlays, func(cidr netip.Prefix) bool {
		return cidr.Contains(to.Addr()) && to.Bits() > cidr.Bits()
	})
}

// adopt takes over an entry of the switch until the cluster sends mappings.
func (h *hosted) adopt(e pipeline.Entry) {
	h.installed[e.Match()] = e
	if f, ok := e.(pipeline.Forward); ok && f.Port == pipeline.VXLAN && !h.synced && h.has(f.To) &&
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
