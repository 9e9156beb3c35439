package nimitz

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// checkRegions refuses CIDRs that overlap the tenant's or another region's, and Edge Switches on the wrong side of the
// base prefix.
func (n *Network) checkRegions(t tenant.Tenant) error {
	var cidrs []netip.Prefix
	for _, o := range t.Overlays {
		cidrs = append(cidrs, o.CIDR)
	}
	for _, r := range t.Regions {
		if !n.config.Plan.ContainsNode(r.Edge) || n.config.Plan.Base.Overlaps(r.PeerEdge) {
			return fmt.Errorf(
				"tenant %s, region %s: the Edge Switch of this region must be in %v, but %v is not, and the other "+
					"one, %v, must be elsewhere; nothing was changed",
				t.Name,
				r.Name,
				n.config.Plan.Base,
				r.Edge,
				r.PeerEdge,
			)
		}
		for _, cidr := range r.CIDRs {
			if i := slices.IndexFunc(cidrs, cidr.Overlaps); i >= 0 {
				return fmt.Errorf(
					"tenant %s, region %s: CIDR %v overlaps the tenant's %v; nothing was changed",
					t.Name,
					r.Name,
					cidr,
					cidrs[i],
				)
			}
			cidrs = append(cidrs, cidr)
		}
	}
	return nil
}

// regional returns the entries for a tenant's containers in another region: packets go through the Edge Switch of this
// region to the other region's, and only packets from that one are accepted.
func (n *Network) regional(h *hosted, r tenant.Region) (all []pipeline.Entry) {
	here := r.Edge == n.config.Node
	if here && !n.config.Edge {
		return nil // this node is the Edge Switch
	}
	to := r.Edge
	if here {
		to = r.PeerEdge
	}
	for _, cidr := range r.CIDRs {
		all = append(
			all,
			pipeline.Forward{VNI: h.vni, To: cidr, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(to), Outside: true},
		)
		if here {
			all = append(
				all,
				pipeline.Foreign{Edge: r.PeerEdge, Theirs: pipeline.VNI(r.PeerVNI), Source: cidr, VNI: h.vni},
			)
		}
	}
	return all
}
