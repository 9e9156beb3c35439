package scenario

import (
	"context"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// Cluster replaces the orchestrator in a simulation. It computes the placement of subnets and addresses from the
// numbers of nodes and containers. All nodes have the same number of containers.
type Cluster struct {
	Tenant  tenant.Tenant
	Density int // containers on each node
}

// NewCluster creates a cluster with a tenant on network nimitz. Without node CIDRs each container has its own mapping.
func NewCluster(nodeCIDRs bool, density int) *Cluster {
	overlay := tenant.Overlay{CIDR: netip.MustParsePrefix("fd10::/48")}
	if nodeCIDRs {
		overlay.NodeBits = tenant.DefaultNodeBits6
	}
	return &Cluster{Density: density, Tenant: tenant.Tenant{
		Name: "blue", Network: tenant.Nimitz, Addressing: tenant.Own, Overlays: []tenant.Overlay{overlay},
		IDs: []tenant.ID{{ID: 7}},
	}}
}

func (c *Cluster) nodeCIDRs() bool { return c.Tenant.Overlays[0].NodeBits != 0 }

// node returns a node's /64, by its number from 0.
func (c *Cluster) node(number int) netip.Prefix {
	return address.DefaultPlan().Node(uint64(number + 1))
}

// of returns the allocation of a node: its subnet, or the addresses of its containers.
func (c *Cluster) of(number int) (all []netip.Prefix) {
	overlay := c.Tenant.Overlays[0]
	first, _ := overlay.Given()
	each := c.Density
	if c.nodeCIDRs() {
		each = 1
	}
	for i := range each {
		all = append(all, overlay.At(first+uint64(number*each+i)))
	}
	return all
}

// Mappings returns the mappings of the first nodes.
func (c *Cluster) Mappings(nodes int) (all []network.Mapping) {
	for number := range nodes {
		for _, to := range c.of(number) {
			all = append(all, network.Mapping{Tenant: c.Tenant.Name, To: to, Node: c.node(number)})
		}
	}
	return all
}

// Member is a node's view of the cluster.
type Member struct {
	*Cluster
	number int
	taken  int // number of allocated addresses, if they are allocated one by one
	drawn  address.Index
}

var (
	_ network.Cluster = (*Member)(nil)
	_ network.Indexes = (*Member)(nil)
)

func (m *Member) NodeCIDRs(context.Context, string) ([]netip.Prefix, error) {
	return m.of(m.number), nil
}

func (m *Member) Allocate(context.Context, string, string, address.AppID) ([]netip.Addr, error) {
	all := m.of(m.number)
	if m.taken == len(all) {
		return nil, endpoint.ErrExhausted
	}
	m.taken++
	return []netip.Addr{all[m.taken-1].Addr()}, nil
}

func (m *Member) Free(context.Context, string, string) error { return nil }

func (m *Member) AllocateIndex(
	_ endpoint.CursorKey,
	find func(address.Index) (address.Index, error),
) (address.Index, error) {
	i, err := find(m.drawn)
	m.drawn = i + 1
	return i, err
}

func (m *Member) ReleaseIndex(endpoint.CursorKey, address.Index) error { return nil }
