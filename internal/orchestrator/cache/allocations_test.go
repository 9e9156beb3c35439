package cache

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// A node receives every field of a mapping, except the key of another node's endpoint.
func TestVisible(t *testing.T) {
	m := &pilasterv1.Mapping{
		Tenant: "green", To: "10.0.0.1/32", Node: "fd70:696c:6100:1::/64", Name: "n1", Key: "c1/eth0",
		NextHops: []string{"192.0.2.1"}, Locator: "fd70:696c:6200:1::/64", Mac: "0a:01:02:03:04:05",
		App: 9, Sequence: 3, Origin: "192.0.2.254", AddressKey: "db-0",
	}
	fields := m.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if !m.ProtoReflect().Has(fields.Get(i)) {
			t.Errorf("the test does not set %s", fields.Get(i).Name())
		}
	}
	if got := Visible(m, "n1"); !proto.Equal(got, m) {
		t.Errorf("its own node receives %v, want %v", got, m)
	}
	want := proto.CloneOf(m)
	want.Key, want.AddressKey = "", ""
	if got := Visible(m, "n2"); !proto.Equal(got, want) {
		t.Errorf("another node receives %v, want %v", got, want)
	}
}

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
