// Package evpn is network evpn on a node (claim EV1): NIMITZ's pipeline with tunnels over IPv4, as other EVPN speakers
// have them, and with mappings to what these announce. The orchestrators speak BGP for the nodes; the routes' rules are
// in internal/evpn. Package tables opens the programs and maps.
package evpn

import (
	"context"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// Name is the network's name in attachments.
const Name = "evpn"

// DefaultMaxMappings is the default limit of forwarding entries on a node.
const DefaultMaxMappings = nimitz.DefaultMaxMappings

// Config configures a Network.
type Config struct {
	Node        network.Node
	Pool        netip.Prefix // of the nodes' tunnel addresses
	Switch      nimitz.Switch
	MaxMappings int
}

// Network is network evpn on one node: what of NIMITZ's it has.
type Network struct {
	network.Network
	network.MappingSink
	inner *nimitz.Network
	pool  netip.Prefix
}

// New returns the network of a node. It changes nothing in the switch before Repair.
func New(c Config) *Network {
	n := nimitz.New(nimitz.Config{
		Name: Name, Underlay: underlay{c.Pool, c.Node.Plan, c.Node.Prefix}, Plan: c.Node.Plan, Node: c.Node.Prefix,
		Indexes: c.Node.Indexes, Cluster: c.Node.Cluster, Switch: c.Switch, MaxMappings: c.MaxMappings,
	})
	return &Network{n, n, n, c.Pool}
}

// Close closes the switch; its devices and entries stay.
func (n *Network) Close() error { return n.inner.Close() }

// Pipeline returns the entries of this node's tables, read from the kernel.
func (n *Network) Pipeline(ctx context.Context) ([]pipeline.Entry, error) {
	return n.inner.Pipeline(ctx)
}

// TunnelPool returns the prefix of the nodes' tunnel addresses.
func (n *Network) TunnelPool() netip.Prefix { return n.pool }

// HasMappings reports whether the cluster has sent all mappings of a tenant.
func (n *Network) HasMappings(tenant string) bool { return n.inner.HasMappings(tenant) }

// FollowMTU sets the MTU of the tunnels after the uplink's MTU, in bytes, changed.
func (n *Network) FollowMTU(mtu int) error { return n.inner.FollowMTU(mtu) }

// underlay has the IPv4 tunnel addresses of nodes, which follow from their numbers, and those of other speakers.
type underlay struct {
	pool netip.Prefix
	plan address.Plan
	node netip.Prefix
}

func (u underlay) vtep(node netip.Prefix) (netip.Addr, bool) {
	return evpn.VTEP(u.pool, u.plan.NodeNumber(node))
}

// Accepts refuses mappings to nodes without a tunnel address, and those of other speakers' addresses without exactly
// what a packet there needs: one VTEP, outside of the pool, and a MAC.
func (u underlay) Accepts(overlays []netip.Prefix, m network.Mapping) bool {
	if len(m.NextHops) == 0 {
		_, has := u.vtep(m.Node)
		return nimitz.Allocated(overlays, m.To) && u.plan.ContainsNode(m.Node) && has
	}
	if m.To == tenant.Broadcast {
		return len(m.NextHops) <= pipeline.MaxReplicas && !slices.ContainsFunc(m.NextHops, u.isNoSpeaker)
	}
	return len(m.NextHops) == 1 && !u.isNoSpeaker(m.NextHops[0]) && len(m.MAC) == 6 &&
		m.To == m.To.Masked() && (!inside(overlays, m.To) || inSegment(overlays, m.To))
}

// isNoSpeaker reports whether an address cannot be the VTEP of another speaker.
func (u underlay) isNoSpeaker(a netip.Addr) bool { return !a.Is4() || u.pool.Contains(a) }

// inside reports whether a prefix is one of these, or part of one.
func inside(overlays []netip.Prefix, to netip.Prefix) bool {
	return slices.Contains(overlays, to) || nimitz.Allocated(overlays, to)
}

// inSegment reports whether an address is in the tenant's Ethernet segment: packets to it are bridged.
func inSegment(overlays []netip.Prefix, to netip.Prefix) bool {
	return to.IsSingleIP() && nimitz.Allocated(overlays, to)
}

// Place routes packets to nodes, by the L3 VNI, and bridges those to other hosts of the segment.
func (u underlay) Place(overlays []netip.Prefix, m network.Mapping) (nimitz.Place, bool) {
	if len(m.NextHops) == 0 {
		vtep, _ := u.vtep(m.Node)
		return nimitz.Place{VTEP: vtep, MAC: pipeline.MAC(evpn.RouterMAC(vtep))}, m.Node != u.node
	}
	if m.To == tenant.Broadcast {
		return nimitz.Place{Replicas: m.NextHops}, true
	}
	return nimitz.Place{
		VTEP: m.NextHops[0], MAC: pipeline.MAC(m.MAC), Bridged: inSegment(overlays, m.To), Outside: true,
	}, true
}

// Adopt reverses Place.
func (u underlay) Adopt(overlays []netip.Prefix, f pipeline.Forward) (nimitz.Place, bool) {
	p := nimitz.Place{VTEP: f.VTEP, MAC: f.MAC, Bridged: f.Wire != 0, Outside: f.Outside}
	inside := u.pool.Contains(f.VTEP)
	return p, f.VTEP.Is4() && inside != f.Outside && (f.Outside || nimitz.Allocated(overlays, f.To))
}

// Peers are none: no node sends from an IPv6 tunnel address.
func (u underlay) Peers() netip.Prefix { return netip.Prefix{} }

// Segment returns the VNI of a tenant's Ethernet segment.
func (u underlay) Segment(vni pipeline.VNI) pipeline.VNI {
	return pipeline.VNI(evpn.SegmentVNI(uint32(vni)))
}
