package lab

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/tenant"
)

// Names of the two namespaces every lab has beside those of its nodes and containers.
const (
	Router       = "router"       // the fabric
	Orchestrator = "orchestrator" // where the orchestrator runs
)

// Spec says what a lab consists of.
type Spec struct {
	Name       string      `yaml:"name" json:"name"`
	Nodes      []string    `yaml:"nodes" json:"nodes"`
	Device     string      `yaml:"device" json:"device,omitempty"` // how containers are joined to their nodes; empty means veth
	Nimitz     string      `yaml:"nimitz" json:"nimitz,omitempty"` // what carries network nimitz on the nodes; empty means ebpf where a tenant is on it
	Tenants    []Tenant    `yaml:"tenants" json:"tenants"`
	Containers []Container `yaml:"containers" json:"containers"`
}

// Tenant is one tenant of a lab, on netpila where no network is named; there Addressing is encrypted when empty. On nimitz
// it has addresses of its own, and each node gets a subnet of usual length of them.
type Tenant struct {
	Name        string            `yaml:"name" json:"name"`
	Network     string            `yaml:"network" json:"network,omitempty"`
	Addressing  tenant.Addressing `yaml:"addressing" json:"addressing,omitempty"`
	CIDRs       []netip.Prefix    `yaml:"cidrs" json:"cidrs,omitempty"`
	NoNodeCIDRs bool              `yaml:"noNodeCIDRs" json:"noNodeCIDRs,omitempty"` // addresses are given one by one
}

// hides reports whether what its containers see says nothing of where they are, and means the same to no other tenant.
func (t Tenant) hides() bool { return t.Network != tenant.Nimitz && t.Addressing != tenant.Clear }

func (t Tenant) overlays() []tenant.Overlay {
	var overlays []tenant.Overlay
	for _, cidr := range t.CIDRs {
		bits := tenant.DefaultNodeBits(cidr)
		if t.NoNodeCIDRs {
			bits = 0
		}
		overlays = append(overlays, tenant.Overlay{CIDR: cidr, NodeBits: bits})
	}
	return overlays
}

// nimitz is what its agents are told of the network.
func (s Spec) nimitz() string {
	onIt := func(t Tenant) bool { return t.Network == tenant.Nimitz }
	if s.Nimitz == "" && slices.ContainsFunc(s.Tenants, onIt) {
		return EBPF
	}
	return s.Nimitz
}

// Container is a namespace on a node, attached to a tenant's network by the CNI plugin.
type Container struct {
	Name   string            `yaml:"name" json:"name"`
	Node   string            `yaml:"node" json:"node"`
	Tenant string            `yaml:"tenant" json:"tenant"`
	Labels map[string]string `yaml:"labels" json:"labels,omitempty"`
}

// What carries network nimitz on a node.
const (
	EBPF = "ebpf"
	OVS  = "ovs"
)

// Limits of names. A node's name is a device name in the router; all of them together with the
// lab's folder must fit a unix socket's path.
const (
	maxLabName  = 24
	maxNodeName = 15
	maxName     = 40
	maxNodes    = 1000
)

var namePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// specError is what is wrong with a spec, and where: a path into the YAML like
// $.containers[2].node.
type specError struct{ path, text string }

func (e *specError) Error() string {
	if e.path == "$" {
		return e.text
	}
	return e.path[len("$."):] + ": " + e.text
}

// Validate says what is wrong with the spec, or returns nil.
func (s Spec) Validate() error {
	v := validator{names: map[string]string{Router: "the fabric", Orchestrator: "the orchestrator", "lo": "the loopback device"}}
	v.name("$.name", s.Name, maxLabName)
	if len(s.Nodes) == 0 || len(s.Nodes) > maxNodes {
		v.fail("$", "a lab has 1 to %d nodes, this one has %d; write them as nodes: [n1, n2]", maxNodes, len(s.Nodes))
	}
	if s.Device != "" && !slices.Contains(datapath.Choices(), s.Device) {
		v.fail("$.device", "device %q: say %s", s.Device, strings.Join(datapath.Choices(), ", "))
	}
	if !slices.Contains([]string{"", EBPF, OVS}, s.Nimitz) {
		v.fail("$.nimitz", "nimitz %q: say %s or %s", s.Nimitz, EBPF, OVS)
	}
	nodes, tenants := map[string]bool{}, map[string]bool{}
	for i, n := range s.Nodes {
		at := fmt.Sprintf("$.nodes[%d]", i)
		v.name(at, n, maxNodeName)
		v.unique(at, n, "a node")
		nodes[n] = true
	}
	for i, t := range s.Tenants {
		at := fmt.Sprintf("$.tenants[%d].name", i)
		v.name(at, t.Name, maxName)
		if tenants[t.Name] {
			v.fail(at, "a tenant is already called %q", t.Name)
		}
		tenants[t.Name] = true
		v.tenant(fmt.Sprintf("$.tenants[%d]", i), t)
	}
	for i, c := range s.Containers {
		at := fmt.Sprintf("$.containers[%d]", i)
		v.name(at+".name", c.Name, maxName)
		v.unique(at+".name", c.Name, "a container")
		if !nodes[c.Node] {
			v.fail(at+".node", "no node is called %q", c.Node)
		}
		if !tenants[c.Tenant] {
			v.fail(at+".tenant", "no tenant is called %q", c.Tenant)
		}
		if err := tenant.CheckLabels(c.Labels); err != nil {
			v.fail(at+".labels", "%v", err)
		}
	}
	if v.err == nil {
		return nil
	}
	return v.err
}

// validator keeps the first thing that is wrong.
type validator struct {
	names map[string]string // names in use, and what bears them
	err   *specError
}

func (v *validator) fail(path, format string, args ...any) {
	if v.err == nil {
		v.err = &specError{path, fmt.Sprintf(format, args...)}
	}
}

func (v *validator) tenant(at string, t Tenant) {
	switch t.Network {
	case "", tenant.Netpila:
		if len(t.CIDRs) > 0 || t.NoNodeCIDRs {
			v.fail(at, "cidrs and noNodeCIDRs are for network %s; on %s addresses follow from the node", tenant.Nimitz, tenant.Netpila)
		}
		if t.Addressing != "" && t.Addressing != tenant.Encrypted && t.Addressing != tenant.Clear {
			v.fail(at+".addressing", "addressing %q: say %s or %s", t.Addressing, tenant.Encrypted, tenant.Clear)
		}
	case tenant.Nimitz:
		if t.Addressing != "" {
			v.fail(at+".addressing", "addressing is for network %s; on %s containers have addresses of the tenant's own", tenant.Netpila, tenant.Nimitz)
		}
		if err := tenant.CheckOverlays(address.DefaultPlan(), t.overlays()); err != nil {
			v.fail(at+".cidrs", "%v", err)
		}
	default:
		v.fail(at+".network", "network %q: say %s or %s", t.Network, tenant.Netpila, tenant.Nimitz)
	}
}

func (v *validator) name(path, name string, longest int) {
	if !namePattern.MatchString(name) || len(name) > longest {
		v.fail(path, "name %q: use 1 to %d of a-z, 0-9 and -, a dash neither first nor last", name, longest)
	}
}

// unique holds over nodes and containers together: `lab exec NAME` takes either.
func (v *validator) unique(path, name, what string) {
	if bearer, taken := v.names[name]; taken {
		v.fail(path, "%s is already called %q", bearer, name)
	}
	v.names[name] = what
}
