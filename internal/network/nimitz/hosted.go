package nimitz

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/mobility"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// hosted is a tenant that this node hosts: its mappings, its containers here, and its entries in the switch.
type hosted struct {
	name     string
	vni      pipeline.VNI
	segment  pipeline.VNI // of its Ethernet segment
	overlays []netip.Prefix
	here     map[netip.Addr]port
	remote   map[netip.Prefix]Place // by subnet or address elsewhere
	synced   bool                   // the cluster has sent all mappings
	sealed   bool                   // its containers here may neither send nor receive
	former   bool                   // it has no containers here any more, see onlyRelays

	relays map[netip.Prefix]time.Time // until when packets from other nodes are forwarded to an address elsewhere

	services  []tenant.UnderlayService
	published []tenant.Publication
	regions   []tenant.Region
	offloads  []tenant.Offload
	node      netip.Prefix           // this node, if it can take part in offloads
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
		remote:    map[netip.Prefix]Place{},
		relays:    map[netip.Prefix]time.Time{},
		beyond:    map[any]pipeline.Entry{},
		installed: map[any]pipeline.Entry{},
	}
}

// vniOf returns the tenant's oldest id, which stays when the tenant gets more ids.
func vniOf(t tenant.Tenant) pipeline.VNI { return pipeline.VNI(t.IDs[0].ID) }

// set stores the tenant's current state.
func (h *hosted) set(u Underlay, t tenant.Tenant) {
	h.name, h.vni, h.overlays, h.former = t.Name, vniOf(t), nil, false
	h.segment = u.Segment(h.vni)
	for _, o := range t.Overlays {
		h.overlays = append(h.overlays, o.CIDR)
	}
	h.regions, h.offloads = t.Regions, t.Offloads
	h.services, h.published = t.UnderlayServices, slices.SortedFunc(
		slices.Values(t.Publications),
		func(a, b tenant.Publication) int { return a.Underlay.Compare(b.Underlay) },
	)
}

func (h *hosted) add(r endpoint.Record) {
	for _, a := range r.Attachments {
		delete(h.relays, host(a.Address))
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
		all = append(all, h.remoteMatches(to)...)
	}
	for a, p := range h.here {
		all = append(all, senderMatch(p.Port, a), h.forwardMatch(host(a)))
	}
	return append(all, h.sharingMatches()...)
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
	case pipeline.Foreign:
		if p := h.remote[m.Source]; p.Outside && m.Edge == host(p.VTEP) {
			m.VNI = h.vni
			return m
		}
	case pipeline.Replication:
		if p, ok := h.remote[tenant.Broadcast]; ok && m.VNI == h.vni {
			return pipeline.NewReplication(h.vni, p.Replicas)
		}
	case pipeline.Offload, pipeline.Backend, pipeline.Fronted:
		return h.wantedSharing(m)
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
		if p, ok := h.remote[m.To]; ok {
			m.Port, m.VTEP, m.MAC, m.Outside = pipeline.VXLAN, p.VTEP, p.MAC, p.Outside
			if p.Bridged {
				m.Wire = h.segment
			}
			m.Offload = h.offloadTo(p.VTEP)
			m.Relays = h.relaysTo(m.To, p)
			return m
		}
		if slices.Contains(h.overlays, m.To) && !h.former {
			return m
		}
	}
	return nil
}

// accepted returns the VNIs in which packets from a place outside may come. A host of the segment may be behind a
// router too.
func (p Place) accepted(h *hosted) []pipeline.VNI {
	if p.Bridged {
		return []pipeline.VNI{h.vni, h.segment}
	}
	return []pipeline.VNI{h.vni}
}

// remoteMatches returns the matches of the entries of a prefix elsewhere, as it is known at the moment.
func (h *hosted) remoteMatches(to netip.Prefix) []any {
	if to == tenant.Broadcast {
		return []any{pipeline.Replication{VNI: h.vni}}
	}
	all := []any{h.forwardMatch(to)}
	if p := h.remote[to]; p.Outside {
		for _, vni := range p.accepted(h) {
			all = append(all, pipeline.Foreign{Edge: host(p.VTEP), Theirs: vni, Source: to}.Match())
		}
	}
	return all
}

// Allocated reports whether a prefix can be an allocation of these overlays.
func Allocated(overlays []netip.Prefix, to netip.Prefix) bool {
	return to == to.Masked() && slices.ContainsFunc(overlays, func(cidr netip.Prefix) bool {
		return cidr.Contains(to.Addr()) && to.Bits() > cidr.Bits()
	})
}

// adopt takes over an entry of the switch until the cluster sends mappings. When it was written is unknown, so it
// forwards to a container that has moved for the whole time again.
func (h *hosted) adopt(u Underlay, e pipeline.Entry) {
	h.installed[e.Match()] = e
	if r, ok := e.(pipeline.Replication); ok && !h.synced {
		h.remote[tenant.Broadcast] = Place{Replicas: r.Used()}
	}
	if f, ok := e.(pipeline.Forward); ok && f.Port == pipeline.VXLAN && !h.synced {
		if p, valid := u.Adopt(h.overlays, f); valid || h.former {
			h.remote[f.To] = p
		}
		if f.Relays {
			h.relays[f.To] = time.Now().Add(mobility.FormerTime)
		}
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
