package nimitz

import (
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Place is where packets to a prefix go. Its zero fields mean what they mean in pipeline.Forward.
type Place struct {
	VTEP    netip.Addr
	MAC     pipeline.MAC
	Bridged bool // packets are in the VNI of the tenant's Ethernet segment
	Outside bool // the VTEP is another speaker's: only sources that are there are accepted from it
	Keyed   bool // a container with an address key is there, which can move

	Replicas []netip.Addr // of tenant.Broadcast: the VTEPs to which frames are replicated
}

// Underlay knows the tunnel addresses of nodes, and of others.
type Underlay interface {
	// Accepts reports whether a mapping of a tenant with these CIDRs can be used.
	Accepts(overlays []netip.Prefix, m network.Mapping) bool
	// Place returns where an accepted mapping leads to; false for this node.
	Place(overlays []netip.Prefix, m network.Mapping) (Place, bool)
	// Adopt reverses Place for an entry that an earlier agent made; false if a mapping cannot lead there.
	Adopt(overlays []netip.Prefix, f pipeline.Forward) (Place, bool)
	// Segment returns the VNI of the Ethernet segment of the tenant with a VNI.
	Segment(vni pipeline.VNI) pipeline.VNI
	// Peers is the prefix of nodes that send from their VTEP (pipeline.VTEP); zero: none do.
	Peers() netip.Prefix
}

// region is the underlay of network nimitz: tunnels end at addresses that follow from the nodes' prefixes.
type region struct {
	plan address.Plan
	node netip.Prefix
}

// Accepts also accepts mappings of other speakers' addresses, which a tenant has while it moves between networks nimitz
// and evpn; Place leaves them out.
func (r region) Accepts(overlays []netip.Prefix, m network.Mapping) bool {
	if len(m.NextHops) > 0 {
		return !m.Node.IsValid()
	}
	return Allocated(overlays, m.To) && r.plan.ContainsNode(m.Node)
}

func (r region) Place(_ []netip.Prefix, m network.Mapping) (Place, bool) {
	if len(m.NextHops) > 0 {
		return Place{}, false
	}
	return Place{VTEP: pipeline.VTEP(m.Node), Keyed: m.Sequence != 0}, m.Node != r.node
}

func (r region) Adopt(overlays []netip.Prefix, f pipeline.Forward) (Place, bool) {
	return Place{VTEP: f.VTEP, Keyed: f.Relays}, Allocated(overlays, f.To) && pipeline.IsVTEP(f.VTEP)
}

func (r region) Peers() netip.Prefix { return r.plan.Base }

func (r region) Segment(vni pipeline.VNI) pipeline.VNI { return vni }
