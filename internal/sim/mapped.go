package sim

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/network"
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

// mappedSwitch is the forwarding state of one node as a network with mappings would program it: the node's containers,
// and which mappings of other nodes it has. It stores no entries, because those of 27,500 nodes with an entry for each
// other node exceed the memory. It survives a restart of the agent.
type mappedSwitch struct {
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

func newMappedSwitch(n *numbers) *mappedSwitch {
	return &mappedSwitch{numbers: n, tenants: map[string]*forwarding{}}
}

// mappedNetwork is a network with mappings of one node: the real address allocation, and a switch that counts mappings.
type mappedNetwork struct {
	network.Addresses
	*mappedSwitch
	node    netip.Prefix
	entries func([]module.Hosted) []network.Entries
	seen    map[string]bool // tenants whose list was received
	listed  func()          // called at each received list

	*subscriber
}

var (
	_ network.Network       = (*mappedNetwork)(nil)
	_ network.MappingPuller = (*mappedNetwork)(nil)
)

func newMappedNetwork(
	addresses network.Addresses,
	node netip.Prefix,
	s *mappedSwitch,
	entries func([]module.Hosted) []network.Entries,
	listed func(),
	pulls bool,
) *mappedNetwork {
	return &mappedNetwork{
		Addresses:    addresses,
		mappedSwitch: s,
		node:         node,
		entries:      entries,
		seen:         map[string]bool{},
		listed:       listed,
		subscriber:   newSubscriber(pulls),
	}
}

func (n *mappedNetwork) PutTenant(_ context.Context, t tenant.Tenant) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tenants[t.Name] == nil {
		n.tenants[t.Name] = new(forwarding)
	}
	n.tenants[t.Name].overlays = len(t.Overlays)
	return nil
}

func (n *mappedNetwork) DeleteTenant(_ context.Context, t tenant.Tenant) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.tenants, t.Name)
	delete(n.seen, t.Name)
	n.subscriber.forget(t.Name)
	return nil
}

func (n *mappedNetwork) Activate(_ context.Context, r endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	f, ok := n.tenants[r.Tenant]
	if !ok {
		return fmt.Errorf("endpoint %d: unknown tenant %s", r.ID, r.Tenant)
	}
	f.endpoints.add(r)
	return nil
}

func (n *mappedNetwork) Deactivate(_ context.Context, r endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f, ok := n.tenants[r.Tenant]; ok {
		f.endpoints.remove(r)
	}
	return nil
}

func (n *mappedNetwork) Check(context.Context, endpoint.Record) error { return nil }

// Repair keeps the mappings of other nodes until the next update.
func (n *mappedNetwork) Repair(ctx context.Context, _, found []endpoint.Record) error {
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

func (n *mappedNetwork) Replace(_ context.Context, name string, all []network.Mapping) error {
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

func (n *mappedNetwork) Apply(_ context.Context, name string, add, remove []network.Mapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	f, ok := n.tenants[name]
	if !ok {
		return nil
	}
	if n.pulls {
		add, remove = n.subscriber.only(add), n.subscriber.only(remove)
	} else if !n.seen[name] {
		return fmt.Errorf("tenant %s: received a change of mappings before the list", name)
	}
	for _, m := range remove {
		f.remote.set(n.numbers.number(name, m.To), false)
	}
	n.place(f, name, add)
	return nil
}

// place records the mappings to other nodes.
func (n *mappedNetwork) place(f *forwarding, name string, all []network.Mapping) {
	for _, m := range all {
		f.remote.set(n.numbers.number(name, m.To), m.Node != n.node)
	}
}

// Entries counts the entries that the network would program.
func (n *mappedNetwork) Entries(context.Context) ([]network.Entries, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var tenants []module.Hosted
	for _, f := range n.tenants {
		tenants = append(tenants, module.Hosted{
			Overlays: f.overlays, Addresses: f.endpoints.addresses, Remote: f.remote.count(),
		})
	}
	return n.entries(tenants), nil
}
