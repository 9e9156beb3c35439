// Package modules lists the networks of this build: the one place, besides their own folders and their traits in
// package tenant, that has their names.
package modules

import (
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/modules/evpn"
	"pilaster.io/pilaster/internal/modules/ila"
	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/modules/netpila"
	"pilaster.io/pilaster/internal/modules/nimitz"
)

// All returns the modules in the order in which an agent opens them. A new network needs a line here.
func All() []module.Module {
	return []module.Module{
		netpila.Module(),
		nimitz.Module(),
		ila.Module(),
		evpn.Module(),
	}
}

// LabKeys are the keys that networks add to a lab's spec: a network that has some is embedded here, and listed in
// LabParts.
type LabKeys struct {
	nimitz.LabKeys `yaml:",inline"`
	ila.Keys       `yaml:",inline"`
	evpn.Pool      `yaml:",inline"`
}

// LabParts returns the parts of networks, by name.
func (k LabKeys) LabParts() map[string]module.LabKeys {
	return map[string]module.LabKeys{nimitz.Name: k.LabKeys, ila.Name: k.Keys, evpn.Name: k.Pool}
}

// Of returns the module of a network; false if there is none.
func Of(name string) (module.Module, bool) {
	all := All()
	i := slices.IndexFunc(all, func(m module.Module) bool { return m.Name == name })
	if i < 0 {
		return module.Module{}, false
	}
	return all[i], true
}

// OnFabric reports whether a device of the node may have addresses and routes of the fabric because a network made it.
func OnFabric(device string) bool {
	return slices.ContainsFunc(All(), func(m module.Module) bool {
		return slices.ContainsFunc(m.FabricDevices, func(prefix string) bool {
			return strings.HasPrefix(device, prefix)
		})
	})
}
