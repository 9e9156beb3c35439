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

// Region is an orchestrator with nodes of its own, and an Edge Switch by which tenants of network nimitz reach those of
// other regions.
type Region struct {
	Name       string       `yaml:"name"       json:"name"`
	BasePrefix netip.Prefix `yaml:"basePrefix" json:"basePrefix"`
	Nodes      []string     `yaml:"nodes"      json:"nodes"`
	Edge       string       `yaml:"edge"       json:"edge"` // a node more, without containers
}

// regions of a lab: where none are named it is one of its nodes, with no other to reach.
func (s Spec) regions() []Region {
	if len(s.Regions) == 0 {
		return []Region{{Nodes: s.Nodes}}
	}
	return s.Regions
}

// AllNodes are those of all regions, in their order, each region's Edge Switch last.
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

// place is what the namespace of the region's orchestrator is called, its process, and the router's link to it.
func (r Region) place() string { return cmp.Or(r.Name, Orchestrator) }

// at is the region that a condition holds for, and its number.
func (s Spec) at(is func(Region) bool) (Region, int, bool) {
	regions := s.regions()
	i := slices.IndexFunc(regions, is)
	if i < 0 {
		return Region{}, 0, false
	}
	return regions[i], i, true
}

// RegionOf is the region that a node is in; its name is empty where the lab has none.
func (s Spec) RegionOf(node string) (Region, bool) {
	r, _, ok := s.at(func(r Region) bool { return slices.Contains(r.all(), node) })
	return r, ok
}

// cidrs of a tenant in a region.
func (t Tenant) cidrs(region string) []netip.Prefix {
	if region == "" {
		return t.CIDRs
	}
	return t.Regions[region]
}

// in tells whether a tenant is in a region: one of network nimitz where it has addresses, others everywhere.
func (t Tenant) in(region string) bool {
	return t.Network != tenant.Nimitz || len(t.cidrs(region)) > 0
}

// OperatorOf is the API for people of a region's orchestrator.
func (l *Lab) OperatorOf(region string) pilasterv1connect.OperatorServiceClient {
	return pilasterv1connect.NewOperatorServiceClient(
		unixrpc.Client(l.folder.orchestratorSocket(region)),
		unixrpc.URL,
		connect.WithGRPC(),
	)
}

// RegionOf is the name of the region that a node is in; empty where the lab has none.
func (l *Lab) RegionOf(node string) string {
	r, _ := l.state.Spec.RegionOf(node)
	return r.Name
}

// OrchestratorOf is what the supervisor calls a region's orchestrator, and its namespace is called.
func OrchestratorOf(region string) string { return Region{Name: region}.place() }

// joinRegions has each region import what the others export.
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
