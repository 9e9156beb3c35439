package cache

import (
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// TestMappingsDuringMove: a node that subscribes to the mappings of one network receives all mappings of a tenant as
// long as the tenant is on another network too.
func TestMappingsDuringMove(t *testing.T) {
	m, _ := newTestCache()
	f := m.Subscribe(testNode(1), store.Session{},
		&pilasterv1.FollowRequest{HostedTenants: []string{"blue"}, PulledNetworks: []string{"ila"}}, func(error) {})
	mapping := &pilasterv1.Mapping{Tenant: "blue", To: "10.0.0.2/32"}
	for _, c := range []struct {
		network, leaving string
		all              bool
	}{
		{"nimitz", "", true}, {"ila", "nimitz", true}, {"ila", "", false}, {"nimitz", "ila", true},
		{"ila", "ila", false},
	} {
		is := &pilasterv1.Tenant{Name: "blue", Network: c.network, Leaving: c.leaving}
		m.Apply(store.Batch{Revision: m.Revision + 1, Events: []store.Event{{Tenant: is}}})
		if got := f.receives(mapping); got != c.all || m.byMappings["blue"][f] != c.all {
			t.Errorf("on %q, leaving %q: it receives a mapping: %v, and is in the index: %v; want %v", c.network,
				c.leaving, got, m.byMappings["blue"][f], c.all)
		}
	}
}
