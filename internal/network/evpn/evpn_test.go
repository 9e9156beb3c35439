package evpn

import (
	"context"
	"maps"
	"net"
	"net/netip"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// memory is a switch that only has entries, by match.
type memory map[any]pipeline.Entry

func (m memory) Apply(_ context.Context, remove, add []pipeline.Entry) error {
	for _, e := range remove {
		delete(m, e.Match())
	}
	for _, e := range add {
		m[e.Match()] = e
	}
	return nil
}

func (m memory) Entries(context.Context) ([]pipeline.Entry, error) {
	return slices.Collect(maps.Values(m)), nil
}

func (memory) Plug(context.Context, pipeline.Port, pipeline.Device) error { return nil }
func (memory) Unplug(context.Context, pipeline.Port) error                { return nil }
func (memory) SetMTU(int) error                                           { return nil }
func (memory) Check(context.Context, pipeline.Port, pipeline.Device, []pipeline.Entry) error {
	return nil
}

var shop = tenant.Tenant{
	Name: "shop", IDs: []tenant.ID{{ID: 7}},
	Overlays: []tenant.Overlay{{CIDR: netip.MustParsePrefix("10.0.0.0/16")}},
}

func start(t *testing.T, m memory) *Network {
	t.Helper()
	plan := address.DefaultPlan()
	n := New(Config{
		Node: network.Node{Plan: plan, Prefix: plan.Node(1)}, Pool: netip.MustParsePrefix("10.71.0.0/16"), Switch: m,
	})
	if err := n.PutTenant(t.Context(), shop); err != nil {
		t.Fatal(err)
	}
	if err := n.Repair(t.Context(), nil, nil); err != nil {
		t.Fatal(err)
	}
	return n
}

func replicated(vteps ...string) network.Mapping {
	m := network.Mapping{Tenant: shop.Name, To: tenant.Broadcast}
	for _, text := range vteps {
		m.NextHops = append(m.NextHops, netip.MustParseAddr(text))
	}
	return m
}

// TestReplication: the VTEPs of the mapping of tenant.Broadcast become an entry, which survives a restart of the agent
// until the cluster sends another list.
func TestReplication(t *testing.T) {
	m := memory{}
	has := func(when string, vteps ...string) {
		t.Helper()
		want := replicated(vteps...).NextHops
		e, exists := m[pipeline.Replication{VNI: 7}].(pipeline.Replication)
		if exists != (len(vteps) > 0) || !slices.Equal(e.Used(), want) {
			t.Errorf("%s: %v", when, e)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	n := start(t, m)
	must(n.Replace(t.Context(), shop.Name, []network.Mapping{replicated("10.2.0.7")}))
	has("after the list", "10.2.0.7")
	must(n.Apply(t.Context(), shop.Name, []network.Mapping{replicated("10.2.0.7", "10.2.0.8")}, nil))
	has("after a change", "10.2.0.7", "10.2.0.8")
	n = start(t, m)
	has("after a restart", "10.2.0.7", "10.2.0.8")
	must(n.Replace(t.Context(), shop.Name, []network.Mapping{replicated("10.2.0.8")}))
	has("after the next list", "10.2.0.8")
	must(n.Apply(t.Context(), shop.Name, nil, []network.Mapping{{Tenant: shop.Name, To: tenant.Broadcast}}))
	has("after the end")
	many := make([]string, pipeline.MaxReplicas+1)
	for i := range many {
		many[i] = netip.AddrFrom4([4]byte{10, 2, 1, byte(i)}).String()
	}
	for _, bad := range []network.Mapping{replicated("10.71.0.2"), replicated("2001:db8::1"), replicated(many...)} {
		bad.MAC = net.HardwareAddr{2, 0, 0, 0, 0, 1}
		if n.Apply(t.Context(), shop.Name, []network.Mapping{bad}, nil) == nil {
			t.Errorf("accepted %v", bad)
		}
	}
}
