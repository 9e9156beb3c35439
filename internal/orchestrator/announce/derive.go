package announce

import (
	"cmp"
	"hash/fnv"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/nodeprobe"
	"pilaster.io/pilaster/internal/service"
)

// Node is a node that packets to an address can come in by.
type Node struct {
	Name string     `json:"name"`
	Addr netip.Addr `json:"address"` // NODE::1, which the fabric routes to it
}

// candidate is a node that hosts a tenant.
type candidate struct {
	Node
	live bool // its agent has a session
}

// target is an address of services, with the nodes that packets to it can come in by.
type target struct {
	addr       netip.Addr
	tenant     string
	candidates []candidate // by preference, which is another order for each address
	reason     string      // why there is none
}

// Reasons why an address has no next hop.
const (
	whyNoEndpoint = "its services have no ready endpoint"
	whyNoNode     = "no node hosts the tenant"
	whyNoneForAll = "policy Local: no node has a ready endpoint of each of its services"
	whySilent     = "no node answers probes"
	whySettling   = "its nodes have just received the address, or have not because their agents are dead"
)

// derive returns the addresses in order. A node is a candidate if it hosts the tenant and has endpoints of those
// services at the address whose traffic policy is Local. Services without a ready endpoint anywhere do not count.
func derive(tenants []cache.Exposed) (all []target) {
	for _, e := range tenants {
		nodes, endpoints := nodesOf(e), map[service.Name][]service.Slice{}
		for name, of := range e.Slices {
			for _, m := range of {
				if s, err := service.SliceFromProto(m); err == nil {
					endpoints[name] = append(endpoints[name], s)
				}
			}
		}
		for a, services := range byAddress(e) {
			t := target{addr: a, tenant: e.Tenant}
			t.candidates, t.reason = candidates(services, endpoints, nodes)
			t.candidates = rank(a, t.candidates)
			all = append(all, t)
		}
	}
	slices.SortFunc(all, func(a, b target) int { return a.addr.Compare(b.addr) })
	return all
}

func nodesOf(e cache.Exposed) (all []candidate) {
	for _, n := range e.Nodes {
		if a := nodeprobe.Address(n); a.IsValid() {
			all = append(all, candidate{Node{n.Name, a}, e.Live[n.Name]})
		}
	}
	return all
}

func byAddress(e cache.Exposed) map[netip.Addr][]service.Service {
	all := map[netip.Addr][]service.Service{}
	for _, m := range e.Services {
		s, err := service.FromProto(m)
		if err != nil {
			continue // the store has checked it
		}
		for _, a := range s.Outside() {
			all[a] = append(all[a], s)
		}
	}
	return all
}

func candidates(
	services []service.Service, endpoints map[service.Name][]service.Slice, nodes []candidate,
) (all []candidate, reason string) {
	if len(nodes) == 0 {
		return nil, whyNoNode
	}
	reason = whyNoEndpoint
	for _, s := range services {
		of := endpoints[s.Name]
		s.Distribution = service.Anywhere
		if len(service.Select(s, of, "", "").Active) == 0 {
			continue
		}
		reason = ""
		if s.TrafficPolicy == service.Local {
			nodes = withEndpoint(s, of, nodes)
		}
	}
	switch {
	case reason != "":
		return nil, reason
	case len(nodes) == 0:
		return nil, whyNoneForAll
	}
	return nodes, ""
}

// withEndpoint returns the nodes that have endpoints of a service for hosts outside.
func withEndpoint(s service.Service, endpoints []service.Slice, nodes []candidate) (with []candidate) {
	of := map[string][]service.Slice{}
	for _, slice := range endpoints {
		of[slice.Node] = append(of[slice.Node], slice)
	}
	for _, n := range nodes {
		if len(service.SelectExposed(s, of[n.Name], n.Name).Active) > 0 {
			with = append(with, n)
		}
	}
	return with
}

// rank orders nodes by the highest random weight (Thaler, Ravishankar, 1998): addresses spread over nodes, and a node
// that comes or goes changes no more than its own place.
func rank(a netip.Addr, nodes []candidate) []candidate {
	type weighted struct {
		candidate
		weight uint64
	}
	all := make([]weighted, 0, len(nodes))
	for _, n := range nodes {
		h := fnv.New64a()
		for _, raw := range [][16]byte{a.As16(), n.Addr.As16()} {
			h.Write(raw[:])
		}
		all = append(all, weighted{n, mix(h.Sum64())})
	}
	slices.SortFunc(all, func(a, b weighted) int {
		return cmp.Or(cmp.Compare(b.weight, a.weight), a.Addr.Compare(b.Addr))
	})
	nodes = make([]candidate, 0, len(all))
	for _, w := range all {
		nodes = append(nodes, w.candidate)
	}
	return nodes
}

// mix spreads the bits of a hash (the finalizer of MurmurHash3): FNV leaves similar inputs with similar high bits.
func mix(h uint64) uint64 {
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
