package lab

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/specfile"
	"pilaster.io/pilaster/internal/tenant"
)

// Names of the two namespaces of every lab besides those of its nodes and containers.
const (
	Router = "router" // the fabric
	// namespace of the orchestrator; in a lab with regions, each orchestrator's namespace has the region's name
	Orchestrator = "orchestrator"
)

// Spec describes a lab.
type Spec struct {
	Name    string   `yaml:"name"       json:"name"`
	Nodes   NodeList `yaml:"nodes"      json:"nodes"`
	Regions []Region `yaml:"regions"    json:"regions,omitempty"` // instead of nodes
	// kind of the containers' devices; empty means veth
	Device string `yaml:"device"     json:"device,omitempty"`
	// bytes by which containers' MTU is smaller than the uplinks'
	MTUReserve int `yaml:"mtuReserve" json:"mtuReserve,omitempty"`
	// rack of each node that has one; in YAML it is beside the node's name
	Racks map[string]string `yaml:"-"          json:"racks,omitempty"`
	// 2: each node has a second uplink, to the hosts outside; 0 or 1: none
	Uplinks int `yaml:"uplinks"    json:"uplinks,omitempty"`
	// hosts outside of the cluster
	Outside []OutsideHost `yaml:"outside"    json:"outside,omitempty"`
	// the orchestrator's --egress-prefix
	EgressPrefix netip.Prefix `yaml:"egressPrefix" json:"egressPrefix,omitzero"`
	// keys of networks
	modules.LabKeys `yaml:",inline"`
	Tenants         []Tenant    `yaml:"tenants"    json:"tenants"`
	Containers      []Container `yaml:"containers" json:"containers"`
}

// Switches maps nodes to their switches, if these differ from the lab's.
type Switches = map[string]string

// Tenant is a tenant of a lab. Without a network it is on the default one, where an empty Addressing means encrypted.
// On a network with own CIDRs each node gets a subnet of them.
type Tenant struct {
	Name       string            `yaml:"name"        json:"name"`
	Network    string            `yaml:"network"     json:"network,omitempty"`
	Addressing tenant.Addressing `yaml:"addressing"  json:"addressing,omitempty"`
	CIDRs      []netip.Prefix    `yaml:"cidrs"       json:"cidrs,omitempty"`
	// CIDRs by region, if the lab has regions
	Regions map[string][]netip.Prefix `yaml:"regions"     json:"regions,omitempty"`
	// prefix length of each node's subnet
	NodeBits NodeBits `yaml:"nodeBits"    json:"nodeBits,omitzero"`
	// addresses are allocated one by one, without subnets of nodes
	NoNodeCIDRs bool `yaml:"noNodeCIDRs" json:"noNodeCIDRs,omitempty"`
	// rules for hosts outside; a later rule replaces one for the same prefix
	Egress []EgressRule `yaml:"egress"      json:"egress,omitempty"`
	// nodes whose processes reach the containers, and are reached by them, as of `pilaster tenant set --nodes`
	Nodes string `yaml:"nodes"       json:"nodes,omitempty"`
}

// NodeBits are prefix lengths by family; 0 means the default.
type NodeBits struct {
	IPv4 int `yaml:"ipv4" json:"ipv4,omitempty"`
	IPv6 int `yaml:"ipv6" json:"ipv6,omitempty"`
}

func (b NodeBits) of(cidr netip.Prefix) int {
	if cidr.Addr().Is4() {
		return b.IPv4
	}
	return b.IPv6
}

// overlays returns a tenant's overlays in a region.
func (t Tenant) overlays(region string) []tenant.Overlay {
	var overlays []tenant.Overlay
	for _, cidr := range t.cidrs(region) {
		bits := cmp.Or(t.NodeBits.of(cidr), tenant.DefaultNodeBits(cidr))
		if t.NoNodeCIDRs {
			bits = 0
		}
		overlays = append(overlays, tenant.Overlay{CIDR: cidr, NodeBits: bits})
	}
	return overlays
}

// uses reports whether nodes need a network because of tenants or regions.
func (s Spec) uses(network string) bool {
	return len(s.Regions) > 0 && tenant.NetworkHas(network, tenant.Regions) ||
		slices.ContainsFunc(s.Tenants, func(t Tenant) bool { return t.Network == network })
}

// needsOVS reports whether an Open vSwitch must run on a node.
func (s Spec) needsOVS(node string) bool {
	for name, part := range s.LabParts() {
		if part.NeedsOVS(node, s.uses(name)) {
			return true
		}
	}
	return false
}

// networkArguments returns the agent's arguments for its networks.
func (s Spec) networkArguments(node, ovsDir string) (all []string) {
	parts := s.LabParts()
	for _, name := range slices.Sorted(maps.Keys(parts)) {
		all = append(all, parts[name].Arguments(node, s.uses(name), ovsDir)...)
	}
	return all
}

// hasTunnels4 reports whether a node has an IPv4 tunnel address.
func (s Spec) hasTunnels4(node string) bool { return s.Pool.Enabled(node, s.uses(tenant.EVPN)) }

// Container is a namespace on a node, attached to a tenant's network by the CNI plugin.
type Container struct {
	Name   string            `yaml:"name"   json:"name"`
	Node   string            `yaml:"node"   json:"node"`
	Tenant string            `yaml:"tenant" json:"tenant"`
	Labels map[string]string `yaml:"labels" json:"labels,omitempty"`
	// The container has the address of this key, which it keeps on another node; see Lab.Move.
	AddressKey string `yaml:"addressKey" json:"addressKey,omitempty"`
	// Ports of the node that lead to the container: "HOSTPORT:PORT[/udp]"; see endpoint.ParseHostPort.
	Publish []string `yaml:"publish" json:"publish,omitempty"`

	// Besides labels, policies select containers by these fields.
	Namespace       string            `yaml:"namespace"       json:"namespace,omitempty"`
	NamespaceLabels map[string]string `yaml:"namespaceLabels" json:"namespaceLabels,omitempty"`
	Ports           map[string]string `yaml:"ports"           json:"ports,omitempty"` // http: 80/TCP
}

// identity returns the container's labels, with namespace and ports as further labels.
func (c Container) identity() (map[string]string, error) {
	place := tenant.Place{Namespace: c.Namespace, NamespaceLabels: c.NamespaceLabels, Ports: map[string]tenant.Port{}}
	for name, text := range c.Ports {
		port, err := tenant.ParsePort(text)
		if err := cmp.Or(tenant.CheckPortName(name), err); err != nil {
			return nil, err
		}
		place.Ports[name] = port
	}
	labels := place.With(c.Labels)
	return labels, tenant.CheckLabels(labels)
}

// hostPorts returns the ports of the node that lead to the container.
func (c Container) hostPorts() (all []endpoint.HostPort, err error) {
	for _, text := range c.Publish {
		p, err := endpoint.ParseHostPort(text)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return endpoint.CheckHostPorts(all)
}

// Switches on a node.
const (
	EBPF = "ebpf"
	OVS  = "ovs"
)

// Limits of names. A node's name is also a device name in the router. The lab's folder and the names together must fit
// in the path of a Unix socket.
const (
	maxLabName  = 24
	maxNodeName = 15
	maxName     = 40
	maxNodes    = 1000
)

var namePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// Validate returns the first error of the spec, or nil.
func (s Spec) Validate() error {
	v := validator{
		names: map[string]string{Router: "the fabric", Orchestrator: "the orchestrator", "lo": "the loopback device"},
	}
	v.name("$.name", s.Name, maxLabName)
	if all := len(s.AllNodes()); all == 0 || all > maxNodes {
		v.fail("$", "a lab has 1 to %d nodes, not %d; write them as nodes: [n1, n2]", maxNodes, all)
	}
	if len(s.Regions) > 0 && len(s.Nodes) > 0 {
		v.fail("$.nodes", "a lab with regions lists its nodes in its regions")
	}
	if s.Device != "" && !slices.Contains(device.DeviceChoices(), s.Device) {
		v.fail("$.device", "device %q: use %s", s.Device, strings.Join(device.DeviceChoices(), ", "))
	}
	if s.Uplinks < 0 || s.Uplinks > 2 {
		v.fail("$.uplinks", "uplinks %d: write 1, or 2 for a second one to the hosts outside", s.Uplinks)
	}
	if s.Uplinks > 1 && s.Device == endpoint.Macvlan {
		v.fail("$.uplinks", "uplinks %d: nodes with macvlans have one uplink; use another device", s.Uplinks)
	}
	if s.MTUReserve < 0 {
		v.fail("$.mtuReserve", "mtuReserve %d is negative", s.MTUReserve)
	}
	v.networks(s)
	v.nodes("$.nodes", s.Nodes, s.Racks)
	for i, r := range s.Regions {
		v.region(fmt.Sprintf("$.regions[%d]", i), s.Regions, i, r, s.Racks)
	}
	v.outside(s)
	tenants := map[string]Tenant{}
	for i, t := range s.Tenants {
		at := fmt.Sprintf("$.tenants[%d].name", i)
		v.name(at, t.Name, maxName)
		if _, taken := tenants[t.Name]; taken {
			v.fail(at, "a tenant is already called %q", t.Name)
		}
		tenants[t.Name] = t
		v.tenant(fmt.Sprintf("$.tenants[%d]", i), s, t)
	}
	for i, c := range s.Containers {
		at := fmt.Sprintf("$.containers[%d]", i)
		v.name(at+".name", c.Name, maxName)
		v.unique(at+".name", c.Name, "a container")
		v.place(at, s, c, tenants)
		if err := tenant.CheckLabels(c.Labels); err != nil {
			v.fail(at+".labels", "%v", err)
		}
		if _, err := c.identity(); err != nil {
			v.fail(at, "%v", err)
		}
		v.addressKey(at+".addressKey", s, i, tenants)
		v.publish(at+".publish", s, i, tenants)
	}
	if v.err == nil {
		return nil
	}
	return v.err
}

// validator keeps the first error.
type validator struct {
	names map[string]string // user of each name, by name
	err   *specfile.Error
}

func (v *validator) fail(path, format string, args ...any) {
	if v.err == nil {
		v.err = &specfile.Error{Path: path, Text: fmt.Sprintf(format, args...)}
	}
}

// networks checks the keys of networks, and that the device suits the networks that nodes have.
func (v *validator) networks(s Spec) {
	for name, part := range s.LabParts() {
		if err := part.Check(s.AllNodes()); err != nil {
			v.fail(err.Path, "%s", err.Text)
		}
		on := func(node string) bool { return part.Enabled(node, s.uses(name)) }
		if s.Device == endpoint.Macvlan && tenant.NetworkHas(name, tenant.HostDevices) &&
			slices.ContainsFunc(s.AllNodes(), on) {
			v.fail(
				"$.device",
				"device %s does not work with network %s or with regions: containers behind macvlans have no devices "+
					"on the node; use %s or %s",
				s.Device,
				name,
				endpoint.Veth,
				endpoint.Netkit,
			)
		}
	}
}

// nodes checks nodes and reserves their names.
func (v *validator) nodes(at string, names []string, racks map[string]string) {
	for i, n := range names {
		at := fmt.Sprintf("%s[%d]", at, i)
		v.name(at, n, maxNodeName)
		v.unique(at, n, "a node")
		if rack, has := racks[n]; has {
			if err := tenant.CheckRackName(rack); err != nil {
				v.fail(at, "%v", err)
			}
		}
	}
}

func (v *validator) region(at string, all []Region, i int, r Region, racks map[string]string) {
	v.name(at+".name", r.Name, maxNodeName) // also the name of the router's link
	v.unique(at+".name", r.Name, "a region")
	v.nodes(at+".nodes", r.Nodes, racks)
	if r.Edge == "" {
		v.fail(
			at+".edge",
			"region %s needs an Edge Switch: name one with edge:, an additional node without containers",
			r.Name,
		)
	}
	v.name(at+".edge", r.Edge, maxNodeName)
	v.unique(at+".edge", r.Edge, "a node")
	plan := r.plan()
	if err := plan.Validate(); err != nil {
		v.fail(at+".basePrefix", "%v", err)
	}
	for _, other := range all[:i] {
		if other.BasePrefix.Overlaps(plan.Base) {
			v.fail(at+".basePrefix", "base prefix %v overlaps %v of region %s", plan.Base, other.BasePrefix, other.Name)
		}
	}
}

// plan is the region's address plan, with its base prefix if it has one.
func (r Region) plan() address.Plan {
	plan := address.DefaultPlan()
	if r.Name != "" {
		plan.Base = r.BasePrefix
	}
	return plan
}

// place checks a container's node and tenant.
func (v *validator) place(at string, s Spec, c Container, tenants map[string]Tenant) {
	region, ok := s.RegionOf(c.Node)
	if !ok {
		v.fail(at+".node", "no node is called %q", c.Node)
	}
	if region.Edge == c.Node {
		v.fail(at+".node", "node %q is the Edge Switch of region %s, and has no containers", c.Node, region.Name)
	}
	t, ok := tenants[c.Tenant]
	if !ok {
		v.fail(at+".tenant", "no tenant is called %q", c.Tenant)
	}
	if !t.in(region.Name) {
		v.fail(at+".tenant", "tenant %q has no CIDRs in region %s", c.Tenant, region.Name)
	}
}

// publish checks that a container can have its host ports.
func (v *validator) publish(at string, s Spec, i int, tenants map[string]Tenant) {
	c := s.Containers[i]
	ports, err := c.hostPorts()
	if err == nil {
		network := cmp.Or(tenants[c.Tenant].Network, tenant.DefaultNetwork)
		err = tenant.CheckPublishes(c.Tenant, network, len(ports))
	}
	if err != nil {
		v.fail(at, "%v", err)
	}
	for _, other := range s.Containers[:i] {
		its, _ := other.hostPorts()
		for _, p := range its {
			if other.Node == c.Node && slices.ContainsFunc(ports, p.Overlaps) {
				v.fail(at, "container %q has host port %s of node %s already; use another", other.Name, p.At(), c.Node)
			}
		}
	}
}

// addressKey checks that a container can have its address key.
func (v *validator) addressKey(at string, s Spec, i int, tenants map[string]Tenant) {
	c := s.Containers[i]
	if err := tenant.CheckAddressKey(c.AddressKey); err != nil {
		v.fail(at, "%v", err)
	}
	network := cmp.Or(tenants[c.Tenant].Network, tenant.DefaultNetwork)
	if err := tenant.CheckKeyed(c.Tenant, network, c.AddressKey); err != nil {
		v.fail(at, "%v", err)
	}
	region, _ := s.RegionOf(c.Node)
	overlays := tenants[c.Tenant].overlays(region.Name)
	if c.AddressKey != "" && tenant.NetworkHas(network, tenant.AddressKeys) && len(overlays) > 0 {
		if err := (tenant.Tenant{Name: c.Tenant, Overlays: overlays}).CheckKeyable(); err != nil {
			v.fail(at, "%v", err)
		}
	}
	for _, o := range s.Containers[:i] {
		if c.AddressKey != "" && o.AddressKey == c.AddressKey && o.Tenant == c.Tenant {
			v.fail(at, "container %q has the address key %q already", o.Name, c.AddressKey)
		}
	}
}

func (v *validator) tenant(at string, s Spec, t Tenant) {
	v.egress(at, s, t)
	with, without := tenant.NetworksWith(tenant.OwnCIDRs), tenant.NetworksWithout(tenant.OwnCIDRs)
	on, known := tenant.TraitsOf(t.Network)
	switch {
	case !known:
		v.fail(at+".network", "network %q: use %s", t.Network, tenant.OneOf(tenant.Networks()))
	case on.Has(tenant.OwnCIDRs):
		if t.Addressing != "" {
			v.fail(
				at+".addressing",
				"addressing is for network %s; on %s containers have addresses of the tenant's own",
				without,
				on.Name,
			)
		}
		v.overlays(at, s, t)
	default:
		if len(t.CIDRs) > 0 || len(t.Regions) > 0 || t.NodeBits != (NodeBits{}) || t.NoNodeCIDRs {
			v.fail(
				at,
				"cidrs, nodeBits and noNodeCIDRs are for network %s; %s chooses the addresses itself",
				with,
				on.Name,
			)
		}
		if t.Addressing != "" && !slices.Contains(on.Addressings, t.Addressing) {
			v.fail(at+".addressing", "addressing %q: use %s", t.Addressing, tenant.OneOf(on.AddressingNames()))
		}
	}
}

// overlays checks that a tenant's CIDRs in each region are valid and do not overlap.
func (v *validator) overlays(at string, s Spec, t Tenant) {
	if len(s.Regions) == 0 && len(t.Regions) > 0 {
		v.fail(at+".regions", "this lab has no regions; write the tenant's addresses as cidrs: [10.0.0.0/16]")
	}
	if len(s.Regions) > 0 && (len(t.CIDRs) > 0 || len(t.Regions) == 0) {
		v.fail(
			at,
			"in a lab with regions, write a tenant's CIDRs by region, as regions: {%s: [10.0.0.0/16]}",
			s.Regions[0].Name,
		)
	}
	for name := range t.Regions {
		if _, _, ok := s.at(func(r Region) bool { return r.Name == name }); !ok {
			v.fail(at+".regions", "no region is called %q", name)
		}
	}
	if t.NodeBits != (NodeBits{}) && t.NoNodeCIDRs {
		v.fail(at+".nodeBits", "use either nodeBits or noNodeCIDRs")
	}
	var others []netip.Prefix
	for _, r := range s.regions() {
		if r.Name != "" && !t.in(r.Name) {
			continue
		}
		if len(t.cidrs(r.Name)) == 0 {
			key := ""
			if r.Name != "" {
				key = fmt.Sprintf("regions: {%s: [10.0.0.0/16]}", r.Name)
			}
			v.fail(
				at,
				"a tenant of network %s needs its own CIDR: write it as %s, or one of each family",
				t.Network,
				cmp.Or(key, "cidrs: [10.0.0.0/16]"),
			)
		}
		if err := tenant.CheckOverlays(r.plan(), t.overlays(r.Name)); err != nil {
			v.fail(at+".cidrs", "%v", err)
		}
		for _, cidr := range t.cidrs(r.Name) {
			if i := slices.IndexFunc(others, cidr.Overlaps); i >= 0 {
				v.fail(at+".regions", "%v in region %s and %v in another overlap", cidr, r.Name, others[i])
			}
		}
		others = append(others, t.cidrs(r.Name)...)
	}
	has := func(four bool) bool {
		return slices.ContainsFunc(others, func(p netip.Prefix) bool { return p.Addr().Is4() == four })
	}
	if t.NodeBits.IPv4 != 0 && !has(true) || t.NodeBits.IPv6 != 0 && !has(false) {
		v.fail(at+".nodeBits", "nodeBits for a family without a CIDR of tenant %s", t.Name)
	}
}

func (v *validator) name(path, name string, longest int) {
	if !namePattern.MatchString(name) || len(name) > longest {
		v.fail(path, "name %q: use 1 to %d of a-z, 0-9 and -, a dash neither first nor last", name, longest)
	}
}

// unique reserves a name among nodes and containers together: `lab exec NAME` accepts both.
func (v *validator) unique(path, name, what string) {
	if bearer, taken := v.names[name]; taken {
		v.fail(path, "%s is already called %q", bearer, name)
	}
	v.names[name] = what
}

// ReadSpec reads a lab's YAML file. The file's name is the default name of the lab.
func ReadSpec(path string) (Spec, error) {
	b, err := specfile.Read("lab", path)
	if err != nil {
		return Spec{}, err
	}
	return ParseSpec(path, b)
}

// ParseSpec parses YAML. The file's name is the default name of the lab. Errors name the file and the line.
func ParseSpec(file string, b []byte) (Spec, error) {
	s, f, err := specfile.Parse[Spec](file, b)
	if err != nil {
		return Spec{}, err
	}
	if s.Racks, err = racksIn(b); err != nil {
		return Spec{}, f.Wrong(err)
	}
	if s.Name == "" {
		s.Name = strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
	}
	err = s.Validate()
	if err == nil && s.Device == "" && f.Has("$.device") {
		err = &specfile.Error{
			Path: "$.device",
			Text: fmt.Sprintf("device is empty: use %s, or omit it", strings.Join(device.DeviceChoices(), ", ")),
		}
	}
	if err != nil {
		return Spec{}, f.Wrong(err)
	}
	return s, nil
}
