package lab

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"connectrpc.com/connect"
	"github.com/goccy/go-yaml"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/specfile"
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

// NodeList are names of nodes. In YAML an element is a name, or a mapping of a name and a rack: {name: n1, rack: a}.
type NodeList []string

// nodeEntry is an element of a NodeList in YAML. The library loses the line of an error here, so racksIn returns it.
type nodeEntry struct{ name, rack, wrong string }

func (e *nodeEntry) UnmarshalYAML(unmarshal func(any) error) error {
	if unmarshal(&e.name) == nil {
		return nil
	}
	keys := map[string]string{}
	if unmarshal(&keys) != nil {
		e.wrong = "nodes: write a name, or a name with its rack, such as {name: n1, rack: a}"
		return nil
	}
	e.name, e.rack = keys["name"], keys["rack"]
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if key != "name" && key != "rack" {
			e.wrong = fmt.Sprintf("unknown key %q of a node: the keys here are name, rack", key)
		}
	}
	if _, has := keys["rack"]; has && e.rack == "" {
		e.wrong = fmt.Sprintf("the rack of node %q is empty: write a name, or omit it", e.name)
	}
	return nil
}

func (l *NodeList) UnmarshalYAML(unmarshal func(any) error) error {
	var entries []nodeEntry
	if err := unmarshal(&entries); err != nil {
		return err
	}
	*l = nil
	for _, e := range entries {
		*l = append(*l, e.name)
	}
	return nil
}

// racksIn returns the racks of a lab's nodes in a YAML file, or the first error in a list of nodes.
func racksIn(b []byte) (racks map[string]string, err error) {
	var top struct {
		Nodes   []nodeEntry `yaml:"nodes"`
		Regions []struct {
			Nodes []nodeEntry `yaml:"nodes"`
		} `yaml:"regions"`
	}
	if err := yaml.Unmarshal(b, &top); err != nil {
		return nil, &specfile.Error{Path: "$.nodes", Text: err.Error()}
	}
	lists := map[string][]nodeEntry{"$.nodes": top.Nodes}
	for i, r := range top.Regions {
		lists[fmt.Sprintf("$.regions[%d].nodes", i)] = r.Nodes
	}
	for _, at := range slices.Sorted(maps.Keys(lists)) {
		for i, e := range lists[at] {
			if e.wrong != "" {
				return nil, &specfile.Error{Path: fmt.Sprintf("%s[%d]", at, i), Text: e.wrong}
			}
			if e.rack == "" {
				continue
			}
			if racks == nil {
				racks = map[string]string{}
			}
			racks[e.name] = e.rack
		}
	}
	return racks, nil
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
