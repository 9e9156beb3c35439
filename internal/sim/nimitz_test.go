package sim

import (
	"context"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// table is a switch that stores the entries.
type table map[any]pipeline.Entry

func (s table) Plug(context.Context, pipeline.Port, pipeline.Device) error { return nil }
func (s table) Unplug(context.Context, pipeline.Port) error                { return nil }
func (s table) Check(context.Context, pipeline.Port, pipeline.Device, []pipeline.Entry) error {
	return nil
}
func (s table) SetMTU(int) error { return nil }
func (s table) Entries(context.Context) ([]pipeline.Entry, error) {
	return slices.Collect(maps.Values(s)), nil
}

func (s table) Apply(_ context.Context, remove, add []pipeline.Entry) error {
	for _, e := range remove {
		delete(s, e.Match())
	}
	for _, e := range add {
		s[e.Match()] = e
	}
	return nil
}

// networks is a network that receives tenants, endpoints and mappings.
type networks interface {
	network.Dataplane
	network.MappingSink
}

// TestNimitzCounts compares mappedNetwork with the real network: after any input both have as many entries in each
// stage.
func TestNimitzCounts(t *testing.T) {
	ctx, plan := t.Context(), address.DefaultPlan()
	own := plan.Node(1)
	real := nimitz.New(nimitz.Config{Plan: plan, Node: own, Switch: table{}})
	of, _ := modules.Of(nimitz.Name)
	counting := newMappedNetwork(real, own, newMappedSwitch(newNumbers()), of.SimulatedEntries, func() {}, false)
	random := rand.New(rand.NewPCG(1, 2))
	tenants := []tenant.Tenant{overlaid("t1", 7, 26), overlaid("t2", 8, 0)}
	both := func(do func(networks) error) {
		t.Helper()
		if one, other := do(real), do(counting); (one == nil) != (other == nil) {
			t.Fatalf("the real network returned %v, the counting network %v", one, other)
		}
	}
	both(func(n networks) error { return n.Repair(ctx, nil, nil) })
	for step := range 2000 {
		of := tenants[random.IntN(2)]
		r := endpoint.Record{ID: endpoint.ID(1 + random.IntN(8)), Tenant: of.Name, TenantID: of.IDs[0].ID}
		r.ID += 8 * endpoint.ID(of.IDs[0].ID-7)
		r.Attachments = []endpoint.Attachment{
			{Network: nimitz.Name, Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(r.ID)})},
		}
		some, gone := mappings(random, plan, of), mappings(random, plan, of)
		switch random.IntN(12) {
		case 0:
			both(func(n networks) error { return n.PutTenant(ctx, of) })
		case 1:
			if random.IntN(10) == 0 {
				both(func(n networks) error { return n.DeleteTenant(ctx, of) })
			}
		case 2:
			both(func(n networks) error { return n.Replace(ctx, of.Name, some) })
		case 3, 4, 5:
			both(func(n networks) error { return n.Activate(ctx, r) })
		case 6:
			both(func(n networks) error { return n.Deactivate(ctx, r) })
		default:
			both(func(n networks) error { return n.Apply(ctx, of.Name, some, gone) })
		}
		want, _ := real.Entries(ctx)
		got, _ := counting.Entries(ctx)
		for i := range want {
			if want[i].Used != got[i].Used {
				t.Fatalf(
					"step %d: table %s has %d entries in the real network, counted %d",
					step,
					want[i].Table,
					want[i].Used,
					got[i].Used,
				)
			}
		}
	}
}

func overlaid(name string, id address.TenantID, nodeBits int) tenant.Tenant {
	return tenant.Tenant{
		Name: name, Network: tenant.Nimitz, Addressing: tenant.Own, IDs: []tenant.ID{{ID: id}},
		Overlays: []tenant.Overlay{{CIDR: netip.MustParsePrefix("10.0.0.0/16"), NodeBits: nodeBits}},
	}
}

// mappings returns random mappings of subnets to nodes, also to this node. If the tenant's nodes have no subnets, it
// returns mappings of addresses to other nodes only, because the addresses of this node's containers are not on another
// node.
func mappings(random *rand.Rand, plan address.Plan, t tenant.Tenant) (some []network.Mapping) {
	for range random.IntN(5) {
		i := uint64(1 + random.IntN(20))
		m := network.Mapping{
			Tenant: t.Name,
			To:     netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i), 0}), 26),
			Node:   plan.Node(i % 4),
		}
		if t.Overlays[0].NodeBits == 0 {
			m.To, m.Node = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}), 32), plan.Node(2+i%4)
		}
		if m.Node == plan.Node(0) {
			continue
		}
		some = append(some, m)
	}
	return some
}
