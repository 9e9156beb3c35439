package lab

import (
	"fmt"
	"maps"
	"slices"

	"github.com/goccy/go-yaml"

	"pilaster.io/pilaster/internal/specfile"
)

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
