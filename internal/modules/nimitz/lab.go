package nimitz

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/specfile"
)

const labHelp = `A tenant of network nimitz has IPv4 or IPv6 CIDRs of its own, or both. Each node gets a subnet of them:

  nimitz: ebpf                   # default if a tenant uses it; the switch on the nodes: ebpf, ovs
  switches: {n2: ovs}            # nodes with another switch
  tenants:
    - {name: green, network: nimitz, cidrs: [10.0.0.0/16, "fd12::/48"]}
    - {name: gold, network: nimitz, cidrs: [10.0.0.0/16], nodeBits: {ipv4: 26}}   # default 24; of ipv6, 80
    - {name: grey, network: nimitz, cidrs: [10.0.0.0/16], noNodeCIDRs: true}   # addresses are allocated one by one`

// LabKeys are the network's keys of a lab's spec.
type LabKeys struct {
	// switch on the nodes; empty means ebpf if a tenant is on the network
	Nimitz string `yaml:"nimitz" json:"nimitz,omitempty"`
	// switches of nodes that have another one
	Switches map[string]string `yaml:"switches" json:"switches,omitempty"`
}

// Check refuses switches that there are not, and nodes that the lab does not have.
func (k LabKeys) Check(nodes []string) *specfile.Error {
	if !slices.Contains([]string{"", EBPF, OVS}, k.Nimitz) {
		return wrong("$.nimitz", "nimitz %q: use %s or %s", k.Nimitz, EBPF, OVS)
	}
	for _, node := range slices.Sorted(maps.Keys(k.Switches)) {
		if !slices.Contains(nodes, node) {
			return wrong("$.switches."+node, "no node is called %q", node)
		}
		if on := k.Switches[node]; on != EBPF && on != OVS {
			return wrong("$.switches."+node, "switch %q of node %s: use %s or %s", on, node, EBPF, OVS)
		}
	}
	return nil
}

func wrong(path, format string, args ...any) *specfile.Error {
	return &specfile.Error{Path: path, Text: fmt.Sprintf(format, args...)}
}

// Enabled reports whether the node has a switch.
func (k LabKeys) Enabled(node string, used bool) bool { return k.kind(node, used) != "" }

// NeedsOVS reports whether the node's switch is Open vSwitch.
func (k LabKeys) NeedsOVS(node string, used bool) bool { return k.kind(node, used) == OVS }

// Arguments returns the flags that select the switch.
func (k LabKeys) Arguments(node string, used bool, ovsDir string) []string {
	if kind := k.kind(node, used); kind != "" {
		return []string{"--" + Name, kind, "--ovs-run-dir", ovsDir}
	}
	return nil
}

// kind returns the switch of a node; empty for none.
func (k LabKeys) kind(node string, used bool) string {
	chosen := cmp.Or(k.Switches[node], k.Nimitz)
	if chosen == "" && (used || len(k.Switches) > 0) {
		return EBPF
	}
	return chosen
}
