package ila

import (
	"fmt"
	"strconv"

	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/specfile"
)

const labHelp = `Containers of a tenant on network ila keep their addresses wherever they are:

  ila: true                      # default if a tenant uses it; nodes host tenants of network ila
  ilaMappings: push              # push (default) or pull; the agents' --ila-mappings
  tenants:
    - {name: silver, network: ila}
  containers:
    - {name: s1, node: n1, tenant: silver, addressKey: db-0}   # pilaster lab move s1 --to n2`

// Keys are the network's keys of a lab's spec.
type Keys struct {
	ILA      bool   `yaml:"ila" json:"ila,omitempty"` // nodes have the network, also if no tenant uses it
	Learning string `yaml:"ilaMappings" json:"ilaMappings,omitempty"`
}

// Check refuses unknown values.
func (k Keys) Check([]string) *specfile.Error {
	if k.Learning == "" || k.Learning == push || k.Learning == pull {
		return nil
	}
	return &specfile.Error{
		Path: "$.ilaMappings", Text: fmt.Sprintf("ilaMappings %q: use %s or %s", k.Learning, push, pull),
	}
}

// Enabled reports whether a node has the network.
func (k Keys) Enabled(_ string, used bool) bool { return k.ILA || used }

// NeedsOVS reports that the network needs no Open vSwitch.
func (k Keys) NeedsOVS(string, bool) bool { return false }

// Arguments turn the network on.
func (k Keys) Arguments(node string, used bool, _ string) []string {
	if !k.Enabled(node, used) {
		return nil
	}
	arguments := []string{"--" + Name}
	if k.Learning != "" {
		arguments = append(arguments, "--"+learningFlag, k.Learning)
	}
	return arguments
}

// agentArguments turn the network on, on a node with so many mappings.
func agentArguments(mappings int) []string {
	return []string{"--" + Name, "--" + mappingsFlag, strconv.Itoa(max(mappings, ila.DefaultMaxMappings))}
}

// simulatedEntries counts the entries that package ila would have: one for each container, here or elsewhere.
func simulatedEntries(tenants []module.Hosted) []network.Entries {
	here, remote := 0, 0
	for _, t := range tenants {
		here, remote = here+t.Addresses, remote+t.Remote
	}
	return []network.Entries{{Table: Name + "-locals", Used: here}, {Table: Name + "-mappings", Used: remote}}
}
