package nimitz

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/mobility"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// AllocateKeyed is as far as the store's for one key: the address is that of the container's node until a call with a
// sequence moves it.
func (n *node) AllocateKeyed(_ context.Context, name string, of network.KeyedEndpoint) (network.KeyedAddress, error) {
	i := slices.IndexFunc(n.c.where[name], func(m network.Mapping) bool { return m.Sequence != 0 })
	if i < 0 {
		given, err := n.c.give(name, n, of.Key)
		last := &n.c.where[name][len(n.c.where[name])-1]
		last.Sequence = 1
		return network.KeyedAddress{Address: given[0].Addr(), Sequence: 1}, err
	}
	m := n.c.where[name][i]
	is := network.KeyedAddress{Address: m.To.Addr(), Sequence: m.Sequence + 1, Elsewhere: true}
	if of.Sequence == 0 || n.c.away != nil {
		return is, n.c.away
	}
	is.Former, is.Elsewhere = m.Node, false
	for key, all := range n.c.given {
		if slices.Contains(all, m.To) {
			delete(n.c.given, key)
		}
	}
	m.Node, m.Sequence = n.prefix, of.Sequence
	n.c.where[name][i] = m
	return is, n.c.tell(name, []network.Mapping{m}, nil)
}

// TestMove: a container with an address key keeps its address on another node, whose entry exists before the mapping
// changes. Its former node delivers what still comes to it, then forwards that for a time, also without another
// container of the tenant (NZ12).
func TestMove(t *testing.T) {
	ten := tenantOf(9, overlay("10.0.0.0/16", 0))
	c := newCluster(t, 3, ten)
	from, to, sender := c.nodes[0], c.nodes[1], c.nodes[2]
	client := sender.add(ten, 1)
	here, err := from.tryAddKeyed(ten, 2, "db-0")
	from.must(err)
	a := here.Attachments[0].Address
	late := func() pipeline.Verdict {
		v, _ := from.sw.table().Run(pipeline.Packet{
			From: pipeline.VXLAN, Outer: pipeline.VTEP(sender.prefix), VNI: 9, Identity: 1,
			Src: client.Attachments[0].Address, Dst: a,
		})
		return v
	}
	is := func(when string, v pipeline.Verdict, port pipeline.Port, at *node) {
		t.Helper()
		if v.Drop != 0 || v.To != port || port == pipeline.VXLAN && v.VTEP != pipeline.VTEP(at.prefix) {
			t.Errorf("%s: %+v, want %v of %v", when, v, port, at.prefix)
		}
	}
	is("before", late(), pipeline.Port(here.ID), from)

	c.away = fmt.Errorf("moved meanwhile")
	_, err = to.tryAddKeyed(ten, 2, "db-0")
	if err == nil || !strings.Contains(err.Error(), "moved meanwhile") {
		t.Errorf("got %v", err)
	}
	c.away = nil
	there, err := to.tryAddKeyed(ten, 2, "db-0")
	to.must(err)
	if at := there.Attachments[0]; at.Address != a || at.Sequence != 2 {
		t.Errorf("attachment %+v, want %v with sequence 2", at, a)
	}
	if !from.Moved(here) || to.Moved(there) || sender.Moved(client) {
		t.Error("moved: want the former container alone")
	}
	is("with both devices", late(), pipeline.Port(here.ID), from)
	_, out := c.send(sender, client, client.Attachments[0].Address, a)
	is("to the new node", out, pipeline.Port(there.ID), to)

	from.remove(here)
	is("without containers of the tenant", late(), pipeline.VXLAN, to)
	other := from.add(ten, 3)
	is("with another container", late(), pipeline.VXLAN, to)
	_, out = c.send(from, other, other.Attachments[0].Address, a)
	is("from the former node", out, pipeline.Port(there.ID), to)
	from.must(from.endRelays(t.Context(), time.Now()))
	is("while it forwards", late(), pipeline.VXLAN, to)
	from.must(from.endRelays(t.Context(), time.Now().Add(2*mobility.FormerTime)))
	if v := late(); v.Drop == 0 {
		t.Errorf("after that: %+v", v)
	}
	from.remove(other)
	if len(from.sw.has) != 1 || len(from.leaving) != 0 {
		t.Errorf("entries %v, leaving %v", from.sw.has, from.leaving)
	}

	back, err := from.tryAddKeyed(ten, 2, "db-0")
	from.must(err)
	is("back again", late(), pipeline.Port(back.ID), from)
	to.remove(there)
	to.must(to.endRelays(t.Context(), time.Now().Add(2*mobility.FormerTime)))
	if len(to.sw.has) != 1 || len(to.leaving) != 0 {
		t.Errorf("entries %v, leaving %v", to.sw.has, to.leaving)
	}
}

// TestFormerNode: a former node forwards also if the tenant's last container left before the mapping changed, and if
// the agent starts again meanwhile, and no longer than for a time.
func TestFormerNode(t *testing.T) {
	ten := tenantOf(9, overlay("10.0.0.0/16", 0))
	c := newCluster(t, 2, ten)
	from, to := c.nodes[0], c.nodes[1]
	here, err := from.tryAddKeyed(ten, 2, "db-0")
	from.must(err)
	forwards := func(when string, want bool) {
		t.Helper()
		v, _ := from.sw.table().Run(pipeline.Packet{
			From: pipeline.VXLAN, Outer: pipeline.VTEP(to.prefix), VNI: 9, Src: netip.MustParseAddr("10.0.9.9"),
			Dst: here.Attachments[0].Address,
		})
		if is := v.Drop == 0 && v.VTEP == pipeline.VTEP(to.prefix); is != want {
			t.Errorf("%s: %+v, want forwarding %v", when, v, want)
		}
	}
	over := func() { from.must(from.endRelays(t.Context(), time.Now().Add(2*mobility.FormerTime))) }

	from.late = true
	_, err = to.tryAddKeyed(ten, 2, "db-0")
	to.must(err)
	from.remove(here)
	forwards("before the mapping", false)
	other := network.Mapping{Tenant: ten.Name, To: host(here.Attachments[0].Address.Next()), Node: to.prefix}
	from.must(from.Apply(t.Context(), ten.Name, append(slices.Clone(c.where[ten.Name]), other), nil))
	forwards("after the mapping", true)
	if len(from.sw.has) != 2 {
		t.Errorf("entries %v", from.sw.has)
	}
	from.start(memory{})
	from.must(from.endRelays(t.Context(), time.Now()))
	forwards("after a restart without containers of the tenant", true)
	over()
	forwards("after its time", false)
	if len(from.sw.has) != 1 || len(from.leaving) != 0 {
		t.Errorf("entries %v, leaving %v", from.sw.has, from.leaving)
	}

	from.late = false
	back, err := from.tryAddKeyed(ten, 2, "db-0")
	from.must(err)
	from.add(ten, 3)
	c.where[ten.Name][0].Node = to.prefix
	from.receive(ten)
	from.must(from.Deactivate(t.Context(), back))
	delete(from.record, back.ID)
	forwards("again", true)
	from.start(memory{})
	from.must(from.endRelays(t.Context(), time.Now()))
	forwards("after a restart", true)
	over()
	forwards("after its time again", false)
}

// TestKeyRefused: a tenant or a node without single addresses that can move is refused, and nothing changes.
func TestKeyRefused(t *testing.T) {
	both := tenantOf(10, overlay("fd00:1::/48", 0), overlay("10.0.0.0/20", 0))
	subnets, one := tenantOf(7, overlay("10.0.0.0/16", 24)), tenantOf(9, overlay("10.0.0.0/16", 0))
	c := newCluster(t, 1, both, subnets, one)
	n := c.nodes[0]
	refused := func(err error, why string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), "nothing was changed") {
			t.Errorf("got %v, want %q", err, why)
		}
	}
	_, err := n.tryAddKeyed(both, 1, "k")
	refused(err, "has 2 CIDRs")
	_, err = n.tryAddKeyed(subnets, 1, "k")
	refused(err, "has a subnet")
	n.stays = true
	n.start(memory{})
	_, err = n.tryAddKeyed(one, 1, "k")
	refused(err, "cannot forward to a container that has moved away")
	if len(n.sw.has) != 1 || len(c.where[one.Name]) != 0 {
		t.Errorf("entries %v, mappings %v", n.sw.has, c.where)
	}
}
