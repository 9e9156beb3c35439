package sim

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// numbers assigns each subnet or address of a tenant a number, the same on all nodes, so that a node stores one bit for
// each mapping.
type numbers struct {
	mu sync.RWMutex
	of map[string]map[netip.Prefix]int
}

func newNumbers() *numbers { return &numbers{of: map[string]map[netip.Prefix]int{}} }

func (n *numbers) number(tenant string, to netip.Prefix) int {
	n.mu.RLock()
	i, ok := n.of[tenant][to]
	n.mu.RUnlock()
	if ok {
		return i
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.of[tenant] == nil {
		n.of[tenant] = map[netip.Prefix]int{}
	}
	if i, ok = n.of[tenant][to]; !ok {
		i = len(n.of[tenant])
		n.of[tenant][to] = i
	}
	return i
}

// nimitzSwitch is the forwarding state of one node: its containers, and which mappings of other nodes it has. Unlike
// package nimitz, it stores no entries, because 27,500 nodes with an entry for each other node would exceed the memory.
// The switch survives a restart of the agent.
type nimitzSwitch struct {
	numbers *numbers
	mu      sync.Mutex
	tenants map[string]*forwarding
}

// forwarding is the switch's state of one tenant.
type forwarding struct {
	overlays  int
	remote    bitset
	endpoints active
}

func newNimitzSwitch(n *numbers) *nimitzSwitch {
	return &nimitzSwitch{numbers: n, tenants: map[string]*forwarding{}}
}

// nimitzNetwork is network nimitz of one node: the real address allocation, and a switch that counts mappings.
type nimitzNetwork struct {
	network.Addresses
	*nimitzSwitch
	node   netip.Prefix
	seen   map[string]bool // tenants whose list was received
	listed func()          // called at each received list
}

var (
	_ network.Network     = (*nimitzNetwork)(nil)
	_ network.MappingSink = (*nimitzNetwork)(nil)
)

func newNimitzNetwork(c nimitz.Config, s *nimitzSwitch, listed func()) *nimitzNetwork {
	return &nimitzNetwork{
		Addresses:    nimitz.New(c),
		nimitzSwitch: s,
		node:         c.Node,
		seen:         map[string]bool{},
		listed:       listed,
	}
}

func (n *nimitzNetwork) PutTenant(_ context.Context, t tenant.Tenant) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tenants[t.Name] == nil {
		n.tenants[t.Name] = new(forwarding)
	}
	n.tenants[t.Name].overlays = len(t.Overlays)
	return nil
}

func (n *nimitzNetwork) DeleteTenant(_ context.Context, t tenant.Tenant) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.tenants, t.Name)
	delete(n.seen, t.Name)
	return nil
}

func (n *nimitzNetwork) Activate(_ context.Context, r endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	f, ok := n.tenants[r.Tenant]
	if !ok {
		return fmt.Errorf("endpoint %d: unknown tenant %s", r.ID, r.Tenant)
	}
	f.endpoints.add(r)
	return nil
}

func (n *nimitzNetwork) Deactivate(_ context.Context, r endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f, ok := n.tenants[r.Tenant]; ok {
		f.endpoints.remove(r)
	}
	return nil
}

func (n *nimitzNetwork) Check(context.Context, endpoint.Record) error { return nil }

// Repair keeps the mappings of other nodes until the next update.
func (n *nimitzNetwork) Repair(ctx context.Context, _, found []endpoint.Record) error {
	n.mu.Lock()
	for _, f := range n.tenants {
		f.endpoints = active{}
	}
	n.mu.Unlock()
	for _, r := range found {
		if err := n.Activate(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

func (n *nimitzNetwork) Replace(_ context.Context, name string, all []network.Mapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f, ok := n.tenants[name]; ok {
		clear(f.remote)
		n.place(f, name, all)
		n.seen[name] = true
		n.listed()
	}
	return nil
}

func (n *nimitzNetwork) Apply(_ context.Context, name string, add, remove []network.Mapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	f, ok := n.tenants[name]
	if !ok {
		return nil
	}
	if !n.seen[name] {
		return fmt.Errorf("tenant %s: received a change of mappings before the list", name)
	}
	for _, m := range remove {
		f.remote.set(n.numbers.number(name, m.To), false)
	}
	n.place(f, name, add)
	return nil
}

// place records the mappings to other nodes.
func (n *nimitzNetwork) place(f *forwarding, name string, all []network.Mapping) {
	for _, m := range all {
		f.remote.set(n.numbers.number(name, m.To), m.Node != n.node)
	}
}

// Entries counts the entries that package nimitz would program for tenants without services: one decap entry for the
// region's nodes; for each container address, a register entry and a forwarding entry; and a forwarding entry for each
// overlay and for each mapping to another node.
func (n *nimitzNetwork) Entries(context.Context) ([]network.Entries, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	used := map[pipeline.Stage]int{pipeline.Decap: 1}
	for _, f := range n.tenants {
		used[pipeline.Register] += f.endpoints.addresses
		used[pipeline.Forwarding] += f.overlays + f.remote.count() + f.endpoints.addresses
	}
	var all []network.Entries
	for _, s := range pipeline.Stages {
		all = append(all, network.Entries{Table: nimitz.Name + "-" + s.String(), Used: used[s]})
	}
	return all, nil
}
