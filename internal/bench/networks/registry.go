package networks

import (
	"net/netip"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/tenant"
)

// Network is a row of the comparison.
type Network struct {
	Name     string // of the row
	Scenario string // of package scenario: speed and wire
	// Tenant of the row on real nodes; nil for a path that no agent of ours builds.
	Tenant *lab.Tenant
	// Nodes is how agents are started, if not by default. Rows with equal values share two nodes.
	Nodes Agents
	// Spec sets keys of a lab without tenants that the network needs; nil for none.
	Spec func(*lab.Spec)
	// Clusters are simulated clusters with this network.
	Clusters []Cluster
	Design   Design
	Smoke    bool // part of the smoke form
}

// Agents are settings of real nodes.
type Agents struct {
	Switch    string // of network nimitz
	Arguments string // one more argument of agents; empty for none
}

// Cluster is a simulated cluster, and what arithmetic predicts of it.
type Cluster struct {
	Name        string
	NoNodeCIDRs bool // addresses are allocated one by one
	// Entries is the number of entries for other nodes on a node, in a cluster of so many nodes with so many containers
	// each.
	Entries func(nodes, each int) int
	// ActivePeers is the number of containers elsewhere with which a node's containers exchange packets, if agents
	// subscribe to mappings; 0: they receive those of all containers.
	ActivePeers int
	Arguments   []string // more arguments of agents
	// PerNode is the number of messages to each node that follows the orchestrator, when a container starts or stops on
	// one of them.
	PerNode int
}

// Missing is a row that this machine does not support.
type Missing struct {
	Network string `json:"network"`
	Reason  string `json:"reason"`
}

// Names returns the names of rows.
func Names(all []Network) (names []string) {
	for _, n := range all {
		names = append(names, n.Name)
	}
	return names
}

// All returns the rows in the order of reports. Add a network here.
func All() []Network {
	return []Network{
		{Name: "native", Scenario: "native", Design: designNative, Smoke: true},
		{
			Name: "netpila", Scenario: "netpila", Tenant: &lab.Tenant{Name: "blue", Network: tenant.Netpila},
			Clusters: []Cluster{{Name: "netpila", Entries: none}},
			Design:   designNetpila, Smoke: true,
		},
		{
			Name: "ila", Scenario: "ila", Tenant: &lab.Tenant{Name: "silver", Network: tenant.ILA},
			Clusters: []Cluster{
				{Name: "ila, mappings by push", Entries: containers, PerNode: 1},
				{
					Name: "ila, mappings by pull", Entries: peers(activePeers), ActivePeers: activePeers,
					Arguments: []string{"--ila-mappings", "pull"},
				},
			},
			Design: designILA, Smoke: true,
		},
		{
			Name: "evpn", Scenario: "evpn", Tenant: own("red", tenant.EVPN),
			Spec: func(s *lab.Spec) { s.EVPN = s.Pool.Prefix().String() },
			Clusters: []Cluster{
				{Name: "evpn, prefixes", Entries: others},
				{Name: "evpn, host routes", NoNodeCIDRs: true, Entries: containers, PerNode: 1},
			},
			Design: designEVPN,
		},
		{
			Name: "nimitz-ebpf", Scenario: "nimitz-ebpf", Tenant: own("green", tenant.Nimitz),
			Clusters: []Cluster{
				{Name: "nimitz, node CIDRs", Entries: others},
				{Name: "nimitz, single addresses", NoNodeCIDRs: true, Entries: containers, PerNode: 1},
			},
			Design: designNimitz,
		},
		{
			Name: "nimitz-oncache", Scenario: "nimitz-oncache", Tenant: own("green", tenant.Nimitz),
			Nodes: Agents{Arguments: "--accelerate=oncache"}, Design: designNimitzCached,
		},
		{
			Name: "nimitz-ovs", Scenario: "nimitz-ovs", Tenant: own("green", tenant.Nimitz),
			Nodes: Agents{Switch: lab.OVS}, Design: designNimitzOVS,
		},
		{Name: "vxlan", Scenario: "vxlan", Design: designVXLAN, Smoke: true},
	}
}

// Flannel is the name of the peer that is Flannel.
const Flannel = "flannel"

// Peer is the row of a network that a command builds between our nodes.
func Peer(name string) Network {
	n := Network{Name: name, Scenario: name, Smoke: true}
	if name == Flannel {
		n.Design = designFlannel
	}
	return n
}

// own is a tenant with addresses of its own, and a subnet for each node.
func own(name, network string) *lab.Tenant {
	return &lab.Tenant{Name: name, Network: network, CIDRs: []netip.Prefix{netip.MustParsePrefix("fd10::/48")}}
}

// none: no entries for other nodes.
func none(int, int) int { return 0 }

// others: an entry for each other node.
func others(nodes, _ int) int { return nodes - 1 }

// containers: an entry for each container of other nodes.
func containers(nodes, each int) int { return (nodes - 1) * each }

// activePeers is the number of active peers of each node in a cluster whose nodes subscribe to mappings.
const activePeers = 10

// peers: an entry for each active peer, however many containers there are.
func peers(active int) func(nodes, each int) int {
	return func(_, each int) int { return min(active, each) }
}
