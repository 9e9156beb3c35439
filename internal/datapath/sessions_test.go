package datapath

import (
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/packet"
)

// newSessionBench is a bench whose node keeps few sessions, and whose b1 may begin all and is begun nothing to.
func newSessionBench(t *testing.T, sessions int) *progBench {
	b := newProgBench(t)
	config := b.datapath.config
	config.MaxSessions = sessions
	b.reopen(t, config)
	b.restore(t, b.b1, b.b2, b.r1)
	b.says(t, 10, 1, denies|ruleNothing, 0, 0)
	policed(t, b, bpfobj.PilasterPolTarget{Sets: [2]uint64{0, 10}})
	return b
}

// begin has b1 begin a connection from a port, answered and answered again if it is to stand.
func (b *progBench) begin(t *testing.T, from uint16, stands bool) (refused bool) {
	t.Helper()
	refuses := func(in bool, body packet.Body) bool {
		program, ctx, frame := b.fromEither(in, body)
		verdict, _, reasons := b.run(t, program, frame, ctx)
		if verdict == verdictDrop && reasons["session-limit"] != 1 {
			t.Fatalf("port %d: dropped for %v", from, reasons)
		}
		return verdict == verdictDrop
	}
	if refuses(false, tcp(from, 80, packet.SYN)) {
		return true
	}
	return stands && (refuses(true, tcp(80, from, synAck)) || refuses(false, tcp(from, 80, packet.ACK)))
}

// knows tells whether a connection that b1 began is remembered: else nothing comes in.
func (b *progBench) knows(t *testing.T, from uint16) bool {
	t.Helper()
	program, ctx, frame := b.fromEither(true, tcp(80, from, packet.ACK))
	verdict, _, _ := b.run(t, program, frame, ctx)
	return verdict == verdictRedirect
}

func ports(first uint16, n int) (all []uint16) {
	for i := range n {
		all = append(all, first+uint16(i))
	}
	return all
}

// TestHalfOpenGoFirst: a flood of half-open connections takes no place from what is established (NZ11, §7.3).
func TestHalfOpenGoFirst(t *testing.T) {
	const room, stand, flood = 64 * slotsPerBucket, 16, 4000
	b := newSessionBench(t, room)
	standing := ports(1000, stand)
	for _, port := range standing {
		if b.begin(t, port, true) {
			t.Fatalf("refused with %d of %d", port-1000, room)
		}
	}
	refused := b.flood(t, flood)
	b.voidVerdicts(t) // what is remembered counts, not what is cached
	for _, port := range standing {
		if !b.knows(t, port) {
			t.Errorf("the connection from port %d was forgotten", port)
		}
	}
	c := b.sessions(t)
	t.Logf("%d begun, %d evicted, %d refused", c.Created, c.Evicted, c.Refused)
	// The flood's own share is half of the table, and few pairs of buckets have nothing of it to give away.
	if c.Created+c.Refused != uint64(stand+flood) || c.Evicted < uint64(flood-refused-room/2) ||
		c.Refused != uint64(refused) ||
		refused > flood/50 {
		t.Errorf("%+v; want %d begun, all but half a table of %d evicted, next to none refused", c, stand+flood, flood)
	}
}

// flood has b1 begin connections that stay half open, and says how many found no room.
func (b *progBench) flood(t *testing.T, n int) (refused int) {
	t.Helper()
	for _, port := range ports(10000, n) {
		program, ctx, frame := b.fromEither(false, tcp(port, 80, packet.SYN))
		must(t, b.ns.Do(func() error {
			verdict, err := program.Run(&ebpf.RunOptions{Data: frame, Context: ctx})
			if verdict != verdictRedirect {
				refused++
			}
			return err
		}))
	}
	return refused
}

// TestNobodyTakesAll: an endpoint has no more of the table than is left free, so that another finds room however much
// it begins.
func TestNobodyTakesAll(t *testing.T) {
	const room = 16 * slotsPerBucket
	b := newSessionBench(t, room)
	for _, port := range ports(1000, 2*room) {
		b.begin(t, port, true)
	}
	want := dpapi.Sessions{Used: room / 2, Largest: b.b1.record.ID, Most: room / 2}
	if s, err := b.datapath.Sessions(); err != nil || s.Used != want.Used || s.Largest != want.Largest ||
		s.Most != want.Most {
		t.Errorf("one alone: %+v, %v; want %+v", s, err, want)
	}
	another := func(surely uint16) {
		t.Helper()
		for _, port := range ports(0, 2*room) {
			frame := b.frame(
				packet.Packet{Source: b.b2.seen(), Destination: sees(b.b3.Addr()), Body: tcp(port, 80, packet.SYN)},
			)
			_, _, reasons := b.run(t, b.datapath.Objects.PilContainer, frame, skb{Ifindex: b.b2.ifindex()})
			if reasons["session-limit"] != 0 && port < surely {
				t.Fatalf("another one's connection %d of %d was refused", port, surely)
			}
		}
	}
	another(uint16(room / 4))
	if s, err := b.datapath.Sessions(); err != nil || s.Used != room*3/4 || s.Most != want.Most {
		t.Errorf("with another one: %+v, %v; want %d, of which %d the first one's", s, err, room*3/4, want.Most)
	}
	// What each has is counted anew when an agent comes.
	must(t, b.datapath.Objects.PilSessionUsersV1.Put(uint32(b.b1.record.ID), int64(0)))
	b.reopen(t, b.datapath.config)
	b.restore(t, b.b1, b.b2, b.r1)
	if !b.begin(t, 999, true) {
		t.Error("after a start the first one has more than its share")
	}
	b.overAll(t)
	another(uint16(room / 4))
	if s, err := b.datapath.Sessions(); err != nil || s.Used != room/2 {
		t.Errorf("when all time is over: %+v, %v; want %d, the other one's", s, err, room/2)
	}
}

// TestEstablishedStay: who has all that he may have is refused more, and nothing is given away that stands.
func TestEstablishedStay(t *testing.T) {
	const room = 16 * slotsPerBucket
	b := newSessionBench(t, room)
	var standing []uint16
	refused := 0
	for _, port := range ports(1000, 2*room) {
		if b.begin(t, port, true) {
			refused++
		} else {
			standing = append(standing, port)
		}
	}
	b.voidVerdicts(t)
	for _, port := range standing {
		if !b.knows(t, port) {
			t.Errorf("the connection from port %d was forgotten", port)
		}
	}
	if c := b.sessions(t); len(standing) != room/2 || refused == 0 || c.Refused == 0 {
		t.Errorf(
			"%d connections stand of %d that one may have, %d were refused, %+v",
			len(standing),
			room/2,
			refused,
			c,
		)
	}
}

// TestSessionsAreCounted: what the table holds is read with who has most of it.
func TestSessionsAreCounted(t *testing.T) {
	b := newSessionBench(t, 16*slotsPerBucket)
	for _, port := range ports(1000, 5) {
		b.begin(t, port, true)
	}
	for _, port := range ports(2000, 3) {
		b.begin(t, port, false)
	}
	want := dpapi.Sessions{
		Capacity: 16 * slotsPerBucket,
		Used:     8,
		HalfOpen: 3,
		Begun:    8,
		Largest:  b.b1.record.ID,
		Most:     8,
	}
	if s, err := b.datapath.Sessions(); err != nil || s != want {
		t.Errorf("%+v, %v; want %+v", s, err, want)
	}
	b.overAll(t)
	want = dpapi.Sessions{Capacity: want.Capacity, Begun: 8}
	if s, err := b.datapath.Sessions(); err != nil || s != want {
		t.Errorf("when all time is over: %+v, %v; want %+v", s, err, want)
	}
}

// TestSessionsAge: a session's slot is free when it expires, without any cleanup.
func TestSessionsAge(t *testing.T) {
	b := newSessionBench(t, slotsPerBucket)
	for _, port := range ports(1000, (slotsPerBucket+1)/2) {
		if b.begin(t, port, true) {
			t.Fatalf("port %d was refused", port)
		}
	}
	if !b.begin(t, 2000, true) {
		t.Fatal("nothing is refused when as much is taken as is free")
	}
	b.overAll(t)
	if b.knows(t, 1000) {
		t.Error("a session is remembered when its time is over")
	}
	if b.begin(t, 2000, true) {
		t.Error("refused although all others' time is over")
	}
}

// overAll ends the time of all sessions.
func (b *progBench) overAll(t *testing.T) {
	t.Helper()
	m := b.datapath.Objects.PilSessionsV1
	for i := range m.MaxEntries() {
		var bucket bpfobj.PilasterSessionBucket
		must(t, m.LookupWithFlags(i, &bucket, ebpf.LookupLock))
		for j := range bucket.Entries {
			bucket.Entries[j].Until = 1
		}
		must(t, m.Update(i, &bucket, ebpf.UpdateLock))
	}
	b.voidVerdicts(t)
}

func (b *testNode) voidVerdicts(t *testing.T) {
	t.Helper()
	var n uint32
	must(t, b.datapath.Objects.PolGenerationV1.Lookup(uint32(0), &n))
	must(t, b.datapath.Objects.PolGenerationV1.Put(uint32(0), n+1))
}
