package ila

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// pullBed is a node that subscribes to mappings, with a clock.
type pullBed struct {
	*bed
	t    *testing.T
	now  time.Time
	idle map[netip.Addr]time.Duration
}

type pullFake struct {
	fake
	*pullBed
}

func (f pullFake) Misses(context.Context, func(Miss)) error             { return nil }
func (f pullFake) Idle() (map[netip.Addr]time.Duration, error)          { return f.idle, nil }
func (f pullFake) Locals() (map[netip.Addr]Local, error)                { return f.fake.Locals() }
func (f pullFake) Peers() (map[netip.Addr]Peer, error)                  { return f.fake.Peers() }
func (f pullFake) Capacity() (int, int)                                 { return f.fake.Capacity() }
func (f pullFake) SetLocal(a netip.Addr, to *Local) error               { return f.fake.SetLocal(a, to) }
func (f pullFake) SetPeers(p map[netip.Addr]Peer, r []netip.Addr) error { return f.fake.SetPeers(p, r) }

func newPullBed(t *testing.T, room int) *pullBed {
	b := &pullBed{
		bed: &bed{locals: map[netip.Addr]Local{}, far: map[netip.Addr]Peer{}}, t: t, now: time.Now(),
		idle: map[netip.Addr]time.Duration{},
	}
	b.restart(room)
	return b
}

// restart begins anew with the tables as they are.
func (b *pullBed) restart(room int) {
	b.Network = New(Config{
		ILA: use, Locator: locator(1), Cluster: cluster{b.bed}, Tables: pullFake{fake{b.bed}, b}, MaxMappings: room,
		Pull: true,
	})
	b.subscribed.now, b.subscribed.swept = func() time.Time { return b.now }, b.now
	must(b.t, b.PutTenant(b.t.Context(), green))
	must(b.t, b.PutTenant(b.t.Context(), gold))
}

// later passes time, and ends subscriptions.
func (b *pullBed) later(d time.Duration) {
	b.t.Helper()
	b.now = b.now.Add(d)
	must(b.t, b.endSubscriptions())
}

// miss is one of a container's packet.
func (b *pullBed) miss(a netip.Addr) { b.Network.miss(Miss{Address: a}) }

// requests checks which subscriptions begin and end.
func (b *pullBed) requests(when string, begin, end []netip.Addr) {
	b.t.Helper()
	addresses := func(all []network.Mapping) (some []netip.Addr) {
		for _, m := range all {
			if m.Tenant != green.Name {
				b.t.Errorf("%s: a subscription of tenant %s", when, m.Tenant)
			}
			some = append(some, m.To.Addr())
		}
		slices.SortFunc(some, netip.Addr.Compare)
		return some
	}
	gotBegin, gotEnd := b.Subscriptions(false)
	if !slices.Equal(addresses(gotBegin), begin) || !slices.Equal(addresses(gotEnd), end) {
		b.t.Errorf("%s: begin %v, end %v; want %v, %v", when, gotBegin, gotEnd, begin, end)
	}
}

func (b *pullBed) answer(add, remove []network.Mapping) {
	b.t.Helper()
	must(b.t, b.Apply(b.t.Context(), green.Name, add, remove))
}

func some(a ...netip.Addr) []netip.Addr { return a }

// TestPull: a miss begins a subscription; a change of its mapping reaches the table, and no other mapping does.
func TestPull(t *testing.T) {
	b := newPullBed(t, 8)
	must(t, b.Repair(t.Context(), nil, nil))
	must(t, b.Activate(t.Context(), record(green, 1, 1)))
	b.requests("at first", nil, nil)
	peer := at(green, 2)
	b.miss(peer)
	b.miss(peer)
	b.miss(at(green, 1)) // here
	b.miss(locator(2).Addr())
	b.miss(at(tenantOf("lime", 9), 1)) // not hosted
	b.requests("after a miss", some(peer), nil)
	b.answer([]network.Mapping{mapping(green, 2, 2, 9), mapping(green, 3, 2, 9)}, nil)
	want := map[netip.Addr]Peer{peer: {Locator: locator(2), App: 9}}
	if !maps.Equal(b.far, want) {
		t.Errorf("after the answer: %+v", b.far)
	}
	b.answer([]network.Mapping{mapping(green, 2, 3, 9)}, nil)
	want[peer] = Peer{Locator: locator(3), Former: locator(2), App: 9}
	if !maps.Equal(b.far, want) {
		t.Errorf("after a move: %+v", b.far)
	}
	must(t, b.Replace(t.Context(), green.Name, nil)) // not asked for
	if s := b.PullStats(); !maps.Equal(b.far, want) || s.Begun != 1 || s.Ignored != 4 || s.Subscriptions != 1 ||
		s.Unknown != 0 {
		t.Errorf("%+v, mappings %+v", s, b.far)
	}
	b.later(idleTime)
	b.requests("while it is used", nil, nil)
	b.idle[peer] = idleTime
	b.later(idleTime)
	b.requests("after five minutes", nil, nil)
	b.idle[peer]++
	b.later(sweepTime - time.Second)
	b.requests("before the next look", nil, nil)
	b.later(time.Second)
	b.requests("later", nil, some(peer))
	if len(b.far) != 0 {
		t.Errorf("after the end: %+v", b.far)
	}
	b.answer([]network.Mapping{mapping(green, 2, 2, 9)}, nil) // too late
	if len(b.far) != 0 {
		t.Errorf("after a late change: %+v", b.far)
	}
	must(t, b.DeleteTenant(t.Context(), green))
	b.miss(peer)
	b.requests("without the tenant", nil, nil)
}

// TestUnknownIdentifiers: of an unknown identifier, further misses are ignored for a time. A container that starts
// meanwhile is reachable at once. One tenant cannot use the room of others.
func TestUnknownIdentifiers(t *testing.T) {
	b := newPullBed(t, 300)
	must(t, b.Repair(t.Context(), nil, nil))
	peer := at(green, 2)
	end := func(a netip.Addr) []network.Mapping {
		return []network.Mapping{{Tenant: green.Name, To: netip.PrefixFrom(a, 128)}}
	}
	b.miss(peer)
	b.requests("after a miss", some(peer), nil)
	b.answer(nil, end(peer))
	b.later(unknownTime)
	b.miss(peer)
	b.requests("while it is known to be absent", nil, nil)
	b.later(time.Second)
	b.requests("later", nil, some(peer))
	b.miss(peer)
	b.requests("after another miss", some(peer), nil)
	b.answer(nil, end(peer))
	b.answer([]network.Mapping{mapping(green, 2, 2, 9)}, nil)
	b.later(2 * unknownTime)
	if len(b.far) != 1 {
		t.Errorf("after it has started: %+v", b.far)
	}
	b.answer(nil, end(peer))
	if len(b.far) != 0 {
		t.Errorf("after it has ended: %+v", b.far)
	}
	b.later(2 * unknownTime)
	b.requests("after its end", nil, some(peer))
	b.miss(peer)
	b.later(answerTime)
	b.requests("without an answer", some(peer), nil)
	b.later(time.Second)
	b.requests("without an answer, later", nil, some(peer))
	b.miss(peer)
	b.later(2 * answerTime)
	b.requests("without a stream", nil, nil)

	for i := range uint32(maxUnknown + 10) {
		a := green.Overlays[0].CIDR.Addr().As16()
		a[13], a[14], a[15] = 1, byte((i+1)>>8), byte(i+1)
		b.miss(netip.AddrFrom16(a))
	}
	b.miss(at(gold, 2))
	b.Network.miss(Miss{Address: at(green, 2), Sender: true})
	if s := b.PullStats(); s.Refused != 10 || s.Unknown != maxUnknown+2 {
		t.Errorf("%+v; want %d without a mapping", s, maxUnknown+2)
	}
}

// TestBetweenMessages: a subscription that the orchestrator has gets its end, also if it has begun again meanwhile.
func TestBetweenMessages(t *testing.T) {
	b := newPullBed(t, 8)
	must(t, b.Repair(t.Context(), nil, nil))
	peer := at(green, 2)
	b.miss(peer)
	b.requests("after a miss", some(peer), nil)
	b.later(2 * answerTime)
	b.miss(peer)
	b.later(2 * answerTime)
	b.requests("ended, begun and ended", nil, some(peer))
	b.miss(peer)
	b.later(2 * answerTime)
	b.requests("begun and ended", nil, nil)

	b.miss(peer)
	b.answer([]network.Mapping{mapping(green, 2, 2, 9)}, nil)
	b.requests("after another miss", some(peer), nil)
	b.fail = errors.New("the table cannot be written")
	refused(t, b.Apply(t.Context(), green.Name, []network.Mapping{mapping(green, 2, 3, 9)}, nil), "cannot be written")
	b.fail = nil
	b.later(time.Second)
	must(t, b.DeleteTenant(t.Context(), green))
	b.requests("begun again because of a failure, and ended", nil, some(peer))
}

// TestPullFailure: the node asks again for a mapping whose change could not be applied. Other changes of the same
// message are applied.
func TestPullFailure(t *testing.T) {
	b := newPullBed(t, 8)
	must(t, b.Repair(t.Context(), nil, nil))
	for i := byte(2); i <= 4; i++ {
		b.miss(at(green, i))
		b.answer([]network.Mapping{mapping(green, i, 2, 9)}, nil)
	}
	b.requests("three", some(at(green, 2), at(green, 3), at(green, 4)), nil)
	bad := mapping(green, 2, 3, 9)
	bad.Node = netip.Prefix{}
	ended := mapping(green, 4, 2, 9)
	err := b.Apply(t.Context(), green.Name, []network.Mapping{bad, mapping(green, 3, 3, 9)}, []network.Mapping{ended})
	refused(t, err, "is no node")
	if b.far[at(green, 2)].Locator != locator(2) || b.far[at(green, 3)].Locator != locator(3) || len(b.far) != 2 {
		t.Errorf("after an invalid mapping, a move and an end: %+v", b.far)
	}
	b.requests("at once", nil, nil)
	b.later(time.Second)
	b.requests("later", some(at(green, 2)), nil)
	b.answer([]network.Mapping{mapping(green, 2, 3, 9)}, nil)
	b.later(time.Second)
	b.requests("after a valid answer", nil, nil)

	b.fail = errors.New("the table cannot be written")
	refused(t, b.Apply(t.Context(), green.Name, nil, []network.Mapping{mapping(green, 3, 3, 9)}), "cannot be written")
	b.fail = nil
	b.later(time.Second)
	b.requests("after an end that failed", some(at(green, 3)), nil)
}

// TestPullRoom: without room, subscriptions that were not used for a minute end; others stay.
func TestPullRoom(t *testing.T) {
	b := newPullBed(t, 2)
	must(t, b.Repair(t.Context(), nil, nil))
	for i := byte(2); i <= 3; i++ {
		b.miss(at(green, i))
		b.answer([]network.Mapping{mapping(green, i, 2, 9)}, nil)
	}
	b.requests("two", some(at(green, 2), at(green, 3)), nil)
	b.idle[at(green, 2)], b.idle[at(green, 3)] = busyTime+1, busyTime
	b.later(sweepTime) // the first look
	b.later(sweepTime)
	b.requests("with room", nil, nil)
	b.miss(at(green, 4))
	b.requests("without room", nil, nil)
	b.later(sweepTime)
	b.requests("later", nil, some(at(green, 2)))
	b.miss(at(green, 4))
	b.requests("with room again", some(at(green, 4)), nil)
}

// TestPullRestart: a restart keeps all mappings, and subscribes to them; the answers end those that are gone.
func TestPullRestart(t *testing.T) {
	b := newPullBed(t, 8)
	must(t, b.Repair(t.Context(), nil, nil))
	for i := byte(2); i <= 3; i++ {
		b.miss(at(green, i))
		b.answer([]network.Mapping{mapping(green, i, 2, 9)}, nil)
	}
	b.restart(8)
	must(t, b.Repair(t.Context(), nil, nil))
	if len(b.far) != 2 {
		t.Errorf("after a restart: %+v", b.far)
	}
	b.requests("after a restart", some(at(green, 2), at(green, 3)), nil)
	b.answer([]network.Mapping{mapping(green, 3, 3, 9)}, []network.Mapping{{
		Tenant: green.Name, To: netip.PrefixFrom(at(green, 2), 128)}})
	if p := b.far[at(green, 3)]; len(b.far) != 1 || p.Locator != locator(3) {
		t.Errorf("after the answers: %+v", b.far)
	}
	if begin, end := b.Subscriptions(true); len(begin) != 2 || len(end) != 0 {
		t.Errorf("on a new stream: begin %v, end %v", begin, end)
	}
}

// TestPullAfterPush: with push, nothing notes which mappings packets use. So the first look ends no subscription.
func TestPullAfterPush(t *testing.T) {
	b := newPullBed(t, 8)
	peer := at(green, 2)
	b.far[peer] = Peer{Locator: locator(2), App: 9}
	b.idle[peer] = time.Hour
	must(t, b.Repair(t.Context(), nil, nil))
	b.requests("after the switch", some(peer), nil)
	b.later(sweepTime)
	b.requests("after the first look", nil, nil)
	b.later(sweepTime)
	b.requests("still not used", nil, some(peer))
	if len(b.far) != 0 {
		t.Errorf("after the end: %+v", b.far)
	}
}

// TestPullOwn: a container that can move has a subscription from its start on, so that its node forwards after a move.
func TestPullOwn(t *testing.T) {
	b := newPullBed(t, 8)
	must(t, b.Repair(t.Context(), nil, nil))
	r := record(green, 1, 1)
	r.AddressKey = "db-0"
	must(t, b.Activate(t.Context(), r))
	b.requests("after its start", some(at(green, 1)), nil)
	b.answer([]network.Mapping{mapping(green, 1, 1, 5)}, nil)
	b.later(time.Hour)
	b.requests("an hour later", nil, nil)
	b.answer([]network.Mapping{mapping(green, 1, 2, 5)}, nil)
	if p := b.far[at(green, 1)]; p != (Peer{Locator: locator(2), Former: locator(1), App: 5}) || !b.Moved(r) {
		t.Errorf("after a move: %+v", b.far)
	}
	must(t, b.Deactivate(t.Context(), r))
	b.later(time.Minute)
	b.requests("after a move", nil, nil)

	r3 := record(green, 3, 3)
	r3.AddressKey = "db-2"
	b.miss(at(green, 3))
	must(t, b.Activate(t.Context(), r3))
	b.requests("of one to which a packet was sent before", some(at(green, 3)), nil)
	b.later(time.Hour)
	if s := b.PullStats(); s.Subscriptions != 2 || s.Unknown != 0 {
		t.Errorf("%+v; want the container here, and the one that has moved", s)
	}
	r2 := record(green, 2, 2)
	r2.AddressKey = "db-1"
	must(t, b.Activate(t.Context(), r2))
	must(t, b.Deactivate(t.Context(), r2))
	b.requests("one that was here for a moment", some(at(green, 2)), nil)
	b.later(FormerTime)
	b.requests("while this node would forward", nil, nil)
	b.later(FormerTime + time.Second)
	b.requests("later", nil, some(at(green, 2)))

	must(t, b.Activate(t.Context(), r2))
	b.restart(8)
	must(t, b.Repair(t.Context(), nil, []endpoint.Record{r2}))
	b.requests("after another restart", some(at(green, 1), at(green, 2)), nil)
}
