package evpn

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Table has the routes of all peers and the records that follow from them. Only one goroutine may use it at a time.
type Table struct {
	rules   *rules
	peers   map[netip.Addr]*peer
	groups  map[RecordKey]group
	members map[uint32][]RecordKey // by VNI, in order
	own     map[RecordKey]bool
	subnets map[uint32][]netip.Prefix // of nodes, by VNI of the segment
	records map[RecordKey]Record
	changed map[RecordKey]bool // since the last Changes
}

// peer has what one peer announces.
type peer struct {
	addr   netip.Addr
	up     bool
	routes map[Key]*entry
	// Entries that are refused as TooManyPaths, by the records that they concern.
	waiting map[RecordKey]map[*entry]bool
	size    int // sum of the entries' sizes
	counts  [reasonCount]map[Kind]int
	stale   int
	hidden  int // loops that are not among the routes
}

// entry is one route of one peer.
type entry struct {
	peer   *peer
	route  Route
	tenant *Tenant // of an accepted route
	reason Reason
	size   int
	stale  time.Time // when the route goes; zero while the peer is up
}

// NewTable returns an empty table that imports nothing.
func NewTable() *Table {
	return &Table{
		rules:   &rules{},
		peers:   map[netip.Addr]*peer{},
		groups:  map[RecordKey]group{},
		members: map[uint32][]RecordKey{},
		own:     map[RecordKey]bool{},
		records: map[RecordKey]Record{},
		changed: map[RecordKey]bool{},
	}
}

// Configure sets the rules and checks all routes again. If it fails, the rules are unchanged.
func (t *Table) Configure(s Settings) error {
	r, err := newRules(s)
	if err != nil {
		return err
	}
	t.rules = r
	for _, p := range t.peers {
		for _, e := range p.routes {
			t.checkAgain(e)
		}
	}
	return nil
}

// check returns the reason to refuse a route, and the tenant of an accepted one.
func (t *Table) check(route *Route) (*Tenant, Reason) {
	tenant, reason := t.rules.check(route)
	if reason == Accepted && route.Kind == KindMACIP && contains(t.subnets[route.VNI], route.Prefix) {
		return nil, OwnSubnet
	}
	return tenant, reason
}

func (t *Table) checkAgain(e *entry) {
	tenant, reason := t.check(&e.route)
	t.change(e, func() { e.tenant, e.reason = tenant, reason })
	if e.reason != Accepted && !e.stale.IsZero() {
		t.remove(e)
	}
}

// SetOwn sets the containers and subnets of this cluster. While they exist, no record has a container's MAC or address,
// and addresses in a node's subnet are refused, whatever other speakers announce.
func (t *Table) SetOwn(own []Own) {
	before, subnets := t.own, t.subnets
	t.own, t.subnets = map[RecordKey]bool{}, map[uint32][]netip.Prefix{}
	for _, o := range own {
		for _, s := range o.Subnets {
			t.subnets[o.Tenant.VNI] = append(t.subnets[o.Tenant.VNI], s.Prefix)
		}
		for _, c := range o.Containers {
			t.own[RecordKey{Kind: RecordMAC, VNI: o.Tenant.VNI, MAC: c.MAC}] = true
			for _, a := range c.Addrs {
				t.own[RecordKey{Kind: RecordHost, VNI: o.Tenant.VNI, Prefix: HostPrefix(a)}] = true
			}
		}
	}
	if !maps.EqualFunc(subnets, t.subnets, slices.Equal[[]netip.Prefix]) {
		t.changeSubnets(subnets)
	}
	for _, keys := range []map[RecordKey]bool{before, t.own} {
		for key := range keys {
			if before[key] != t.own[key] {
				t.decide(key)
			}
		}
	}
}

// changeSubnets checks the routes again whose address is, or was, in a node's subnet.
func (t *Table) changeSubnets(before map[uint32][]netip.Prefix) {
	for _, p := range t.peers {
		for _, e := range p.routes {
			r := &e.route
			if r.Kind == KindMACIP && contains(before[r.VNI], r.Prefix) != contains(t.subnets[r.VNI], r.Prefix) {
				t.checkAgain(e)
			}
		}
	}
}

// errNotUp is the reason why a route of a lost peer is ignored.
var errNotUp = errors.New("the peer is not up")

// PeerUp begins a session. Routes of the session before remain, stale, until the peer repeats them.
func (t *Table) PeerUp(addr netip.Addr) {
	p := t.peers[addr]
	if p == nil {
		p = &peer{addr: addr, routes: map[Key]*entry{}, waiting: map[RecordKey]map[*entry]bool{}}
		t.peers[addr] = p
	}
	p.up = true
}

// Update records a route. Size is how many bytes its attributes have.
func (t *Table) Update(addr netip.Addr, route Route, size int) error {
	p := t.peers[addr]
	if p == nil || !p.up {
		return errNotUp
	}
	tenant, reason := t.check(&route)
	e := p.routes[route.Key]
	if e == nil {
		e = &entry{peer: p, route: route, tenant: tenant, reason: reason, size: size}
		p.routes[route.Key] = e
		p.size += size
		t.link(e)
		t.decideAll(e.keys())
		return nil
	}
	t.change(e, func() {
		p.size += size - e.size
		e.route, e.tenant, e.reason, e.size, e.stale = route, tenant, reason, size, time.Time{}
	})
	return nil
}

// Withdraw removes a route, which need not exist.
func (t *Table) Withdraw(addr netip.Addr, key Key) {
	if p := t.peers[addr]; p != nil && p.up && p.routes[key] != nil {
		t.remove(p.routes[key])
	}
}

// EndOfRIB removes the routes that the peer has not repeated since it is up (RFC 4724 §4.2).
func (t *Table) EndOfRIB(addr netip.Addr) {
	if p := t.peers[addr]; p != nil && p.up {
		t.removeStale(p, func(*entry) bool { return true })
	}
}

// PeerDown ends a session. Refused routes go at once, the others at until, or when a later session ends without them. A
// route that was stale before keeps its time, so a peer that flaps cannot prolong it.
func (t *Table) PeerDown(addr netip.Addr, until time.Time) {
	p := t.peers[addr]
	if p == nil || !p.up {
		return
	}
	p.up, p.hidden = false, 0
	for _, e := range p.routes {
		if e.reason != Accepted {
			t.remove(e)
		} else if e.stale.IsZero() {
			t.change(e, func() { e.stale = until })
		}
	}
	rest := make(map[Key]*entry, len(p.routes)) // a map keeps the room of deleted entries
	maps.Copy(rest, p.routes)
	p.routes = rest
}

// Expire removes stale routes whose time has come, and returns the next such time; zero without stale routes.
func (t *Table) Expire(now time.Time) (next time.Time) {
	for _, p := range t.peers {
		t.removeStale(p, func(e *entry) bool { return !e.stale.After(now) })
		if p.stale == 0 {
			continue
		}
		for _, e := range p.routes {
			if !e.stale.IsZero() && (next.IsZero() || e.stale.Before(next)) {
				next = e.stale
			}
		}
	}
	return next
}

func (t *Table) removeStale(p *peer, which func(*entry) bool) {
	if p.stale == 0 {
		return
	}
	for _, e := range p.routes {
		if !e.stale.IsZero() && which(e) {
			t.remove(e)
		}
	}
}

func (t *Table) remove(e *entry) {
	keys := e.keys()
	t.unlink(e)
	delete(e.peer.routes, e.route.Key)
	e.peer.size -= e.size
	t.decideAll(keys)
	t.admit(e.peer, keys)
}

// change changes an entry, which may change its place in its groups or the groups.
func (t *Table) change(e *entry, mutate func()) {
	before := e.keys()
	t.unlink(e)
	mutate()
	t.link(e)
	t.decideAll(before)
	t.decideAll(e.keys())
	t.admit(e.peer, before)
}

// link counts an entry and adds an accepted one to its groups; unlink undoes it.
func (t *Table) link(e *entry) {
	if e.reason == Accepted && t.isFull(e.peer, e.route.bounded()) {
		e.tenant, e.reason = nil, TooManyPaths
	}
	e.wait(true)
	e.count(1)
	for _, key := range e.keys() {
		t.groups[key] = t.groups[key].with(e)
	}
}

func (t *Table) unlink(e *entry) {
	e.wait(false)
	e.count(-1)
	for _, key := range e.keys() {
		if g := t.groups[key].without(e); len(g) > 0 {
			t.groups[key] = g
		} else {
			delete(t.groups, key)
		}
	}
}

func (t *Table) decideAll(keys []RecordKey) {
	for _, key := range keys {
		t.decide(key)
	}
}

func (e *entry) count(n int) {
	p := e.peer
	if p.counts[e.reason] == nil {
		p.counts[e.reason] = map[Kind]int{}
	}
	p.counts[e.reason][e.route.Kind] += n
	if !e.stale.IsZero() {
		p.stale += n
	}
}

// keys returns the keys of the records that an accepted route concerns.
func (e *entry) keys() []RecordKey {
	if e.reason != Accepted {
		return nil
	}
	return e.route.records()
}

// records returns the keys of the records that a route concerns if it is accepted.
func (r *Route) records() []RecordKey {
	switch r.Kind {
	case KindMACIP:
		keys := []RecordKey{{Kind: RecordMAC, VNI: r.VNI, MAC: r.MAC}}
		if r.Prefix.IsValid() {
			keys = append(keys, RecordKey{Kind: RecordHost, VNI: r.VNI, Prefix: r.Prefix})
		}
		return keys
	case KindMulticast:
		return []RecordKey{{Kind: RecordMember, VNI: r.VNI, Prefix: HostPrefix(r.VTEP)}}
	default:
		return []RecordKey{{Kind: RecordPrefix, VNI: r.VNI, Prefix: r.Prefix}}
	}
}

// Records returns all records in order.
func (t *Table) Records() []Record {
	all := make([]Record, 0, len(t.records))
	for _, r := range t.records {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b Record) int { return a.RecordKey.Compare(b.RecordKey) })
	return all
}

// Record returns the record with a key.
func (t *Table) Record(key RecordKey) (Record, bool) {
	r, ok := t.records[key]
	return r, ok
}

// Changes returns the keys of the records that changed since the last call, in order.
func (t *Table) Changes() []RecordKey {
	if len(t.changed) == 0 {
		return nil
	}
	keys := make([]RecordKey, 0, len(t.changed))
	for key := range t.changed {
		keys = append(keys, key)
	}
	clear(t.changed)
	slices.SortFunc(keys, RecordKey.Compare)
	return keys
}

// NextSequence returns the mobility sequence with which a container's MAC is announced, so that all speakers choose
// the container over the places that they know now (RFC 7432 §15).
func (t *Table) NextSequence(vni uint32, mac MAC) uint32 {
	g := t.groups[RecordKey{Kind: RecordMAC, VNI: vni, MAC: mac}]
	if len(g) == 0 {
		return 0
	}
	return g[0].route.Sequence + 1
}
