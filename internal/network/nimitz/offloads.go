package nimitz

import (
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// sharingMatches returns the matches of the entries of the tenant's offloads.
func (h *hosted) sharingMatches() (all []any) {
	if !h.node.IsValid() {
		return nil
	}
	for _, o := range h.offloads {
		all = append(all, pipeline.Offload{ID: o.ID}.Match())
		if o.Prefix == h.node {
			all = append(all, pipeline.Backend{VNI: h.vni}.Match())
		}
		if !o.HasFrontend(h.node) {
			continue
		}
		for _, e := range o.Endpoints {
			all = append(all, pipeline.Fronted{VNI: h.vni, Address: e.Address}.Match())
		}
	}
	return all
}

// wantedSharing is wanted for the matches of sharingMatches.
func (h *hosted) wantedSharing(match any) pipeline.Entry {
	if !h.node.IsValid() {
		return nil
	}
	for _, o := range h.offloads {
		switch m := match.(type) {
		case pipeline.Offload:
			if m.ID == o.ID {
				return h.offloadEntry(o)
			}
		case pipeline.Backend:
			if m.VNI == h.vni && o.Prefix == h.node {
				m.Offload = o.ID
				// In returning, the rules may still be on their way to the kernel.
				m.Asks = o.Phase == tenant.OffloadActive || o.Phase == tenant.OffloadReturning
				return m
			}
		case pipeline.Fronted:
			i := slices.IndexFunc(o.Endpoints, func(e tenant.OffloadedEndpoint) bool { return e.Address == m.Address })
			if m.VNI == h.vni && i >= 0 && o.HasFrontend(h.node) {
				m.Offload, m.App = o.ID, uint16(o.Endpoints[i].App)
				return m
			}
		}
	}
	return nil
}

func (h *hosted) offloadEntry(o tenant.Offload) pipeline.Offload {
	e := pipeline.Offload{
		ID: o.ID, VNI: h.vni, Backend: o.Prefix, Epoch: o.Epoch, Fronts: o.HasFrontend(h.node),
	}
	if o.Phase.Fronted() {
		for i, f := range o.Active() {
			e.To[i] = f.Prefix
		}
	}
	for i, f := range o.Frontends {
		e.From[i] = f.Prefix
	}
	return e
}

// offloadTo returns the id of the offload by whose frontends packets to a node go, or 0. A frontend accepts packets of
// other nodes in all phases, because these may be in the next phase before it, or in the previous one after it.
func (h *hosted) offloadTo(vtep netip.Addr) uint32 {
	if !h.node.IsValid() {
		return 0
	}
	for _, o := range h.offloads {
		if o.Prefix.Contains(vtep) && (o.Phase.Fronted() || o.HasFrontend(h.node)) {
			return o.ID
		}
	}
	return 0
}

// fronts reports whether this node is a frontend of an offload of the tenant. Then a sender may send it packets to a
// container that has moved, from or to the backend.
func (h *hosted) fronts() bool {
	return h.node.IsValid() &&
		slices.ContainsFunc(h.offloads, func(o tenant.Offload) bool { return o.HasFrontend(h.node) })
}
