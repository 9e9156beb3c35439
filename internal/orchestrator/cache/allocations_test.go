package cache

import (
	"fmt"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// The cache counts the mappings of each node, also when a mapping moves to another node or an event repeats.
func TestMappingsPerNode(t *testing.T) {
	g := newAllocations()
	for i, c := range []struct {
		to, node string // no node: the mapping ends
		want     string
	}{
		{"10.0.0.1/32", "n1", "map[n1:1]"},
		{"10.0.0.2/32", "n1", "map[n1:2]"},
		{"10.0.0.2/32", "n1", "map[n1:2]"},
		{"10.0.0.2/32", "n2", "map[n1:1 n2:1]"},
		{"10.0.0.3/32", "", "map[n1:1 n2:1]"},
		{"10.0.0.1/32", "", "map[n2:1]"},
		{"10.0.0.2/32", "", "map[]"},
	} {
		m := &pilasterv1.Mapping{Tenant: "green", To: c.to, Name: c.node}
		if c.node == "" {
			g.remove(m, int64(i))
		} else {
			g.add(m, int64(i))
		}
		if got := fmt.Sprint(g.ByNode); got != c.want {
			t.Errorf("step %d: mappings per node %s, want %s", i, got, c.want)
		}
	}
	if len(g.byTenant) != 0 {
		t.Errorf("after all mappings ended, the cache has %v, want none", g.byTenant)
	}
}
