package sim

import (
	"maps"
	"net/netip"
	"sync"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// With activePeers, nodes subscribe to mappings, as agents that pull mappings do: after each event, each node
// exchanges packets with so many containers of other nodes, and no longer with those of before.

// peer is a container that a node exchanges packets with.
type peer struct {
	tenant string
	to     netip.Prefix
}

func (p peer) mapping() network.Mapping { return network.Mapping{Tenant: p.tenant, To: p.to} }

// subscriber is the subscribing part of a simulated network.
type subscriber struct {
	pulls   bool
	changed chan struct{}

	held       sync.Mutex
	wanted     map[peer]bool
	begin, end []network.Mapping
}

func newSubscriber(pulls bool) *subscriber {
	return &subscriber{pulls: pulls, changed: make(chan struct{}, 1)}
}

func (s *subscriber) Pulls() bool                           { return s.pulls }
func (s *subscriber) SubscriptionsChanged() <-chan struct{} { return s.changed }

func (s *subscriber) PullStats() network.PullStats {
	s.held.Lock()
	defer s.held.Unlock()
	return network.PullStats{Subscriptions: len(s.wanted)}
}

func (s *subscriber) Subscriptions(all bool) (begin, end []network.Mapping) {
	s.held.Lock()
	defer s.held.Unlock()
	begin, end = s.begin, s.end
	s.begin, s.end = nil, nil
	if all {
		begin, end = nil, nil
		for p := range s.wanted {
			begin = append(begin, p.mapping())
		}
	}
	return begin, end
}

// subscribe replaces the subscriptions.
func (s *subscriber) subscribe(wanted map[peer]bool) {
	s.held.Lock()
	defer s.held.Unlock()
	for p := range wanted {
		if !s.wanted[p] {
			s.begin = append(s.begin, p.mapping())
		}
	}
	for p := range s.wanted {
		if !wanted[p] {
			s.end = append(s.end, p.mapping())
		}
	}
	s.wanted = wanted
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// forget ends the subscriptions of a tenant that the node no longer hosts, as the orchestrator does.
func (s *subscriber) forget(tenant string) {
	s.held.Lock()
	defer s.held.Unlock()
	maps.DeleteFunc(s.wanted, func(p peer, _ bool) bool { return p.tenant == tenant })
}

// only returns the mappings with a subscription.
func (s *subscriber) only(all []network.Mapping) (some []network.Mapping) {
	s.held.Lock()
	defer s.held.Unlock()
	for _, m := range all {
		if s.wanted[peer{m.Tenant, m.To}] {
			some = append(some, m)
		}
	}
	return some
}

// talk makes the node exchange packets with these containers, and with no others.
func (n *mappedNetwork) talk(wanted map[peer]bool) {
	n.subscribe(wanted)
	n.mappedSwitch.mu.Lock()
	defer n.mappedSwitch.mu.Unlock()
	stay := map[string]bitset{}
	for p := range wanted {
		if at := n.numbers.number(p.tenant, p.to); n.tenants[p.tenant] != nil && n.tenants[p.tenant].remote.has(at) {
			some := stay[p.tenant]
			some.set(at, true)
			stay[p.tenant] = some
		}
	}
	for name, f := range n.tenants {
		f.remote = stay[name]
	}
}

// talk makes every node exchange packets with as many containers of other nodes as the scenario says, if there are so
// many: with one of each following node, then with another one of each.
func (w *world) talk() {
	addresses := make([][]peer, len(w.nodes))
	for i, n := range w.nodes {
		for _, r := range n.store.List() {
			addresses[i] = append(addresses[i], peersOf(r)...)
		}
	}
	for i, n := range w.nodes {
		hosts := map[string]bool{}
		for _, p := range addresses[i] {
			hosts[p.tenant] = true
		}
		wanted := map[peer]bool{}
		for c, more := 0, true; more; c++ {
			more = false
			for d := 1; d < len(w.nodes); d++ {
				others := addresses[(i+d)%len(w.nodes)]
				if c >= len(others) {
					continue
				}
				if more = true; len(wanted) < w.scenario.ActivePeers && hosts[others[c].tenant] {
					wanted[others[c]] = true
				}
			}
			more = more && len(wanted) < w.scenario.ActivePeers
		}
		n.received.talk(wanted)
	}
}

func peersOf(r endpoint.Record) (all []peer) {
	for _, a := range r.Attachments {
		all = append(all, peer{r.Tenant, netip.PrefixFrom(a.Address, a.Address.BitLen())})
	}
	return all
}

// checkPulled compares a node's mappings with its subscriptions, and these with the placement.
func (n *node) checkPulled(v *violations, live map[string]*placed) {
	n.received.held.Lock()
	defer n.received.held.Unlock()
	has := 0
	for _, f := range n.mapped.tenants {
		has += f.remote.count()
	}
	lacking := 0
	for p := range n.received.wanted {
		at := n.mapped.numbers.number(p.tenant, p.to)
		there, hosted := live[p.tenant], n.mapped.tenants[p.tenant]
		if there == nil || hosted == nil || !there.all.has(at) || !hosted.remote.has(at) {
			lacking++
		}
	}
	if lacking > 0 || has != len(n.received.wanted) {
		v.add("a node lacks mappings that it uses", "%s has %d mappings; of %d that it uses, %d are missing", n.name,
			has, len(n.received.wanted), lacking)
	}
}
