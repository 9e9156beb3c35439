package nimitz

import (
	"strconv"

	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// agentArguments select the switch that needs no other program.
func agentArguments(mappings int) []string {
	return []string{"--" + Name, EBPF, "--max-mappings", strconv.Itoa(max(mappings, nimitz.DefaultMaxMappings))}
}

// simulatedEntries counts the entries that package nimitz would program without services: one for the region's nodes,
// a sender entry and a local forwarding entry for each container, and a remote forwarding entry for each mapping to
// another node.
func simulatedEntries(tenants []module.Hosted) []network.Entries {
	return PipelineEntries(Name, 1, tenants)
}

// PipelineEntries counts the entries of a network that has NIMITZ's pipeline.
func PipelineEntries(name string, decap int, tenants []module.Hosted) []network.Entries {
	used := map[pipeline.Stage]int{pipeline.Decap: decap}
	for _, t := range tenants {
		used[pipeline.Register] += t.Addresses
		used[pipeline.Forwarding] += t.Overlays + t.Remote + t.Addresses
	}
	var all []network.Entries
	for _, s := range pipeline.Stages {
		all = append(all, network.Entries{Table: name + "-" + s.String(), Used: used[s]})
	}
	return all
}
