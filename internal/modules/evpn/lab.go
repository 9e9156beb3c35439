package evpn

import (
	"cmp"
	"net/netip"
	"strconv"

	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/modules/nimitz"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/evpn"
	"pilaster.io/pilaster/internal/specfile"
)

const labHelp = `A tenant of network evpn has CIDRs of its own too. Nodes have tunnel addresses of an IPv4 prefix:

  evpn: 10.71.0.0/16             # default if a tenant uses it; the nodes' tunnel addresses
  tenants:
    - {name: bronze, network: evpn, cidrs: [10.0.0.0/16, "fd12::/48"], noNodeCIDRs: true}`

// simulatedPool is the pool of nodes in labs and simulations, unless a lab has another.
var simulatedPool = netip.MustParsePrefix("10.71.0.0/16")

// Pool is the network's key of a lab's spec.
type Pool struct {
	EVPN string `yaml:"evpn" json:"evpn,omitempty"` // the prefix of the nodes' tunnel addresses
}

// Check refuses what is no prefix for nodes.
func (k Pool) Check([]string) *specfile.Error {
	if k.EVPN == "" {
		return nil
	}
	a := agent{text: k.EVPN, mappings: 1}
	if err := a.Check(module.Settings{}); err != nil {
		return &specfile.Error{Path: "$.evpn", Text: err.Error()}
	}
	return nil
}

// Enabled reports whether a node has the network.
func (k Pool) Enabled(_ string, used bool) bool { return k.EVPN != "" || used }

// NeedsOVS reports that the network needs no Open vSwitch.
func (k Pool) NeedsOVS(string, bool) bool { return false }

// Arguments turn the network on.
func (k Pool) Arguments(node string, used bool, _ string) []string {
	if !k.Enabled(node, used) {
		return nil
	}
	return []string{"--" + Name, k.Prefix().String()}
}

// Prefix returns the prefix of the nodes' tunnel addresses, which the lab's fabric routes.
func (k Pool) Prefix() netip.Prefix {
	p, _ := netip.ParsePrefix(cmp.Or(k.EVPN, simulatedPool.String()))
	return p
}

// agentArguments turn the network on, on a node with so many mappings.
func agentArguments(mappings int) []string {
	return []string{
		"--" + Name, simulatedPool.String(), "--" + mappingsFlag, strconv.Itoa(max(mappings, evpn.DefaultMaxMappings)),
	}
}

// simulatedEntries counts the entries that package evpn would have without other speakers.
func simulatedEntries(tenants []module.Hosted) []network.Entries {
	return nimitz.PipelineEntries(Name, 0, tenants)
}
