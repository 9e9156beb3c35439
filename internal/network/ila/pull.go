package ila

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// A node that pulls subscribes to a mapping when a packet misses it. The cluster answers, and then sends each change.
// Packets are dropped until the answer. Subscriptions end by these rules, which also bound their number:
//
//   - no packet has used the mapping for idleTime, or for busyTime while there is no room for another one;
//   - unknownTime after the answer that there is no container (the negative cache): until then, further misses are
//     ignored, and a container that starts is reachable at once;
//   - answerTime without an answer.
//
// A container of this node with an address key has a subscription until the node no longer forwards for it: then its
// mapping elsewhere arrives as soon as it has moved.
const (
	idleTime    = 5 * time.Minute
	busyTime    = time.Minute
	unknownTime = 5 * time.Second
	answerTime  = 15 * time.Second
	// sweepTime is less than busyTime: packets of known flows count only at the next look.
	sweepTime = 30 * time.Second
	// maxUnknown limits the subscriptions of an origin without a mapping, so that a container that tries addresses
	// takes no room from other tenants.
	maxUnknown = 256
)

// subscriptions are those of a node that pulls. The lock of Network protects them.
type subscriptions struct {
	now     func() time.Time
	changed chan struct{}
	of      map[netip.Addr]*subscription
	unknown map[origin]int // subscriptions without a mapping
	begin   map[netip.Addr]network.Mapping
	end     map[netip.Addr]network.Mapping
	swept   time.Time
	full    bool // there was no room since the last sweep
	looked  bool // there was a sweep: the next one knows which mappings are used
	stats   network.PullStats
}

// origin has a limit of subscriptions without a mapping of its own, so that forged senders on the fabric take no room
// from containers.
type origin struct {
	tenant *hosted
	sender bool // see Miss
}

type subscription struct {
	origin
	known  bool      // there is a mapping to another node, or the container is here
	until  time.Time // end of the subscription if it is not known
	failed bool      // a change of the mapping was not applied: the node must ask again
	there  bool      // the orchestrator may have it also while begin has it
}

func newSubscriptions() *subscriptions {
	return &subscriptions{
		now: time.Now, swept: time.Now(), changed: make(chan struct{}, 1), of: map[netip.Addr]*subscription{},
		unknown: map[origin]int{}, begin: map[netip.Addr]network.Mapping{}, end: map[netip.Addr]network.Mapping{},
	}
}

func mappingOf(h *hosted, a netip.Addr) network.Mapping {
	return network.Mapping{Tenant: h.name, To: netip.PrefixFrom(a, a.BitLen())}
}

func (s *subscriptions) add(of origin, a netip.Addr, known bool, until time.Time) {
	_, there := s.end[a] // not sent
	s.of[a] = &subscription{origin: of, known: known, until: until, there: there}
	if !known {
		s.unknown[of]++
	}
	delete(s.end, a)
	s.begin[a] = mappingOf(of.tenant, a)
	s.signal()
}

func (s *subscriptions) remove(a netip.Addr) {
	is := s.of[a]
	s.set(a, true, time.Time{}) // counts
	delete(s.of, a)
	_, unsent := s.begin[a]
	delete(s.begin, a)
	if unsent && !is.there {
		return
	}
	s.end[a] = mappingOf(is.tenant, a)
	s.signal()
}

// set notes whether there is a mapping, and when a subscription without one ends.
func (s *subscriptions) set(a netip.Addr, known bool, until time.Time) {
	is := s.of[a]
	if is.known != known {
		if is.known {
			s.unknown[is.origin]++
		} else if s.unknown[is.origin]--; s.unknown[is.origin] == 0 {
			delete(s.unknown, is.origin)
		}
	}
	is.known, is.until = known, until
}

func (s *subscriptions) signal() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// Pulls reports whether the node subscribes to mappings.
func (n *Network) Pulls() bool { return n.config.Pull }

// SubscriptionsChanged receives a value when Subscriptions has changes.
func (n *Network) SubscriptionsChanged() <-chan struct{} { return n.subscribed.changed }

// Subscriptions returns the subscriptions to begin and to end.
func (n *Network) Subscriptions(all bool) (begin, end []network.Mapping) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.subscribed
	if all {
		for a, is := range s.of {
			s.begin[a] = mappingOf(is.tenant, a)
		}
		clear(s.end)
	}
	begin, end = slices.Collect(maps.Values(s.begin)), slices.Collect(maps.Values(s.end))
	clear(s.begin)
	clear(s.end)
	return begin, end
}

// PullStats describes the subscriptions.
func (n *Network) PullStats() network.PullStats {
	n.mu.Lock()
	defer n.mu.Unlock()
	stats := n.subscribed.stats
	stats.Subscriptions, stats.Capacity = len(n.subscribed.of), n.maxSubscriptions()
	for _, some := range n.subscribed.unknown {
		stats.Unknown += some
	}
	return stats
}

// maxSubscriptions is the room for mappings, and for subscriptions without one.
func (n *Network) maxSubscriptions() int { return min(n.config.MaxMappings, network.MaxSubscriptions) }

// miss subscribes to the mapping of an address.
func (n *Network) miss(m Miss) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s, a := n.subscribed, m.Address
	h := n.ownerOf(a)
	of := origin{h, m.Sender}
	switch {
	case h == nil || s.of[a] != nil || h.here[a] != (Local{}):
		s.stats.Ignored++
	case s.unknown[of] >= maxUnknown:
		s.stats.Refused++
	case len(s.of) >= n.maxSubscriptions():
		s.full = true
		s.stats.Refused++
	default:
		s.stats.Begun++
		s.add(of, a, false, s.now().Add(answerTime))
	}
}

// ownerOf returns the tenant that has an address; nil if it is not hosted here.
func (n *Network) ownerOf(a netip.Addr) *hosted {
	id, ok := n.config.ILA.Split(a)
	if !ok || id.Locator.IsValid() {
		return nil
	}
	return n.byVNID[id.VNID]
}

// applyPulled is Apply for mappings that this node has subscribed to. Others came too late, and are ignored.
func (n *Network) applyPulled(h *hosted, add, remove []network.Mapping) error {
	s := n.subscribed
	other := func(m network.Mapping) bool {
		is := s.of[m.To.Addr()]
		return is == nil || is.tenant != h || !m.To.IsSingleIP()
	}
	add, remove = slices.DeleteFunc(slices.Clone(add), other), slices.DeleteFunc(slices.Clone(remove), other)
	err := n.apply(h, add, remove)
	failed := map[netip.Addr]bool{}
	if err != nil {
		// One by one: a mapping that cannot be used must not keep others from their changes.
		for _, m := range remove {
			failed[m.To.Addr()] = n.apply(h, nil, []network.Mapping{m}) != nil
		}
		for _, m := range add {
			failed[m.To.Addr()] = n.apply(h, []network.Mapping{m}, nil) != nil
		}
	}
	for _, m := range slices.Concat(add, remove) {
		a := m.To.Addr()
		_, known := h.remote[a]
		s.set(a, known || n.keyed[a], s.now().Add(unknownTime))
		s.of[a].failed = s.of[a].known && failed[a] // others end, and the next miss begins them again
	}
	return err
}

// subscribeOwn subscribes to the address of a container here that can move. The caller holds the lock.
func (n *Network) subscribeOwn(h *hosted, r endpoint.Record, a netip.Addr) {
	if !n.config.Pull || r.AddressKey == "" {
		return
	}
	n.keyed[a] = true
	if n.subscribed.of[a] == nil {
		n.subscribed.add(origin{tenant: h}, a, true, time.Time{})
	}
	n.subscribed.set(a, true, time.Time{})
}

// leaveOwn gives the subscription of a container that was removed an end. The caller holds the lock.
func (n *Network) leaveOwn(h *hosted, a netip.Addr) {
	delete(n.keyed, a)
	if _, moved := h.remote[a]; !moved && n.subscribed.of[a] != nil {
		n.subscribed.set(a, false, n.subscribed.now().Add(2*FormerTime))
	}
}

// adoptPulled subscribes to the mappings of a tenant that the tables have.
func (n *Network) adoptPulled(h *hosted) {
	if !n.config.Pull {
		return
	}
	for a := range h.remote {
		if n.subscribed.of[a] == nil {
			n.subscribed.add(origin{tenant: h}, a, true, time.Time{})
		}
	}
}

// forgetPulled ends the subscriptions of a tenant that this node no longer hosts. The caller holds the lock.
func (n *Network) forgetPulled(h *hosted) {
	for a, is := range n.subscribed.of {
		if is.tenant == h {
			n.subscribed.remove(a)
		}
	}
}

// endSubscriptions ends those whose time is over, and repeats those whose changes were not applied.
func (n *Network) endSubscriptions() error {
	if !n.config.Pull {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.subscribed
	now := s.now()
	for a, is := range s.of {
		switch {
		case !is.known && now.After(is.until):
			s.remove(a)
		case is.failed:
			is.failed, is.there, s.begin[a] = false, true, mappingOf(is.tenant, a)
			s.signal()
		}
	}
	if now.Sub(s.swept) < sweepTime {
		return nil
	}
	limit := idleTime
	if s.full {
		limit = busyTime
	}
	s.swept, s.full = now, false
	idle, err := n.pulls.Idle()
	if err != nil {
		return err
	}
	if !s.looked {
		s.looked = true // a process that does not pull may have been here before: its programs note no use
		return nil
	}
	gone := map[*hosted][]netip.Addr{}
	for a, unused := range idle {
		if is := s.of[a]; is != nil && is.known && unused > limit {
			gone[is.tenant] = append(gone[is.tenant], a)
		}
	}
	for h, all := range gone {
		if err := n.setPeers(h, nil, all); err != nil {
			return err
		}
		for _, a := range all {
			s.remove(a)
		}
	}
	return nil
}

// missRetry is the pause after a failure to read misses.
const missRetry = time.Second

// readMisses subscribes at each miss until ctx ends.
func (n *Network) readMisses(ctx context.Context, log *slog.Logger) {
	for ctx.Err() == nil {
		if err := n.pulls.Misses(ctx, n.miss); err != nil {
			log.Error("reading cache misses failed; new peers are unreachable; retrying", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(missRetry):
		}
	}
}
