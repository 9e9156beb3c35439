package lab

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Region is an orchestrator with its own nodes, and an Edge Switch that connects tenants with own CIDRs with their
// containers in other regions.
type Region struct {
	Name       string       `yaml:"name"       json:"name"`
	BasePrefix netip.Prefix `yaml:"basePrefix" json:"basePrefix"`
	Nodes      NodeList     `yaml:"nodes"      json:"nodes"`
	Edge       string       `yaml:"edge"       json:"edge"` // an additional node without containers
}

// regions returns the regions. A lab without regions is one region that connects to no other.
func (s Spec) regions() []Region {
	if len(s.Regions) == 0 {
		return []Region{{Nodes: s.Nodes}}
	}
	return s.Regions
}

// AllNodes returns the nodes of all regions, in order; each region's Edge Switch is last.
func (s Spec) AllNodes() (all []string) {
	for _, r := range s.regions() {
		all = append(all, r.all()...)
	}
	return all
}

func (r Region) all() []string {
	if r.Edge == "" {
		return r.Nodes
	}
	return append(slices.Clone(r.Nodes), r.Edge)
}

// place is the name of the namespace of the region's orchestrator, of its process, and of the router's link to it.
func (r Region) place() string { return cmp.Or(r.Name, Orchestrator) }

// at returns the region for which a condition holds, and its number.
func (s Spec) at(is func(Region) bool) (Region, int, bool) {
	regions := s.regions()
	i := slices.IndexFunc(regions, is)
	if i < 0 {
		return Region{}, 0, false
	}
	return regions[i], i, true
}

// RegionOf returns the region of a node; its name is empty if the lab has no regions.
func (s Spec) RegionOf(node string) (Region, bool) {
	r, _, ok := s.at(func(r Region) bool { return slices.Contains(r.all(), node) })
	return r, ok
}

// cidrs returns a tenant's CIDRs in a region.
func (t Tenant) cidrs(region string) []netip.Prefix {
	if region == "" {
		return t.CIDRs
	}
	return t.Regions[region]
}

// in reports whether a tenant is in a region: on a network with own CIDRs if it has some there, on others always.
func (t Tenant) in(region string) bool {
	return !tenant.NetworkHas(t.Network, tenant.OwnCIDRs) || len(t.cidrs(region)) > 0
}

// OperatorOf returns a client of the operator API of a region's orchestrator.
func (l *Lab) OperatorOf(region string) pilasterv1connect.OperatorServiceClient {
	return pilasterv1connect.NewOperatorServiceClient(
		unixrpc.Client(l.folder.orchestratorSocket(region)),
		unixrpc.URL,
		connect.WithGRPC(),
	)
}

// RegionOf returns the name of a node's region; empty if the lab has no regions.
func (l *Lab) RegionOf(node string) string {
	r, _ := l.state.Spec.RegionOf(node)
	return r.Name
}

// OrchestratorOf is the supervisor's name for a region's orchestrator, and the name of its namespace.
func OrchestratorOf(region string) string { return Region{Name: region}.place() }

// joinRegions imports every region's export into each other region.
func (l *Lab) joinRegions(ctx context.Context) error {
	regions := l.state.Spec.regions()
	for _, from := range regions {
		for _, to := range regions {
			if from.Name == to.Name {
				continue
			}
			exported, err := l.OperatorOf(from.Name).
				ExportRegion(ctx, connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
			if err != nil {
				return fmt.Errorf("export region %s: %w", from.Name, err)
			}
			_, err = l.OperatorOf(to.Name).
				ImportRegion(ctx, connect.NewRequest(&pilasterv1.ImportRegionRequest{Region: exported.Msg.Region}))
			if err != nil {
				return fmt.Errorf("import region %s in %s: %w", from.Name, to.Name, err)
			}
		}
	}
	return nil
}
