package modules_test

import (
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/tenant"
)

// Every network that tenants may be on has a module with its required parts, and every module is of such a network.
func TestModulesMatchTraits(t *testing.T) {
	var names []string
	for _, m := range modules.All() {
		names = append(names, m.Name)
		on, known := tenant.TraitsOf(m.Name)
		switch {
		case m.Name == "" || !known:
			t.Errorf("module %q is of no network of package tenant", m.Name)
		case m.NewAgent == nil || m.Addresses == nil:
			t.Errorf("module %s lacks NewAgent or Addresses", m.Name)
		case on.Has(tenant.Mappings) && m.SimulatedEntries == nil:
			t.Errorf("network %s has mappings, and its module lacks SimulatedEntries", m.Name)
		case m.Name == tenant.DefaultNetwork && !m.NewAgent().Enabled():
			t.Errorf("network %s is the default, and a node can lack it", m.Name)
		}
	}
	if want := tenant.Networks(); !slices.Equal(names, want) {
		t.Errorf("modules %v, networks of package tenant %v", names, want)
	}
}
