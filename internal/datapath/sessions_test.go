package datapath

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// newSessionBench returns a node with a small session table. Its b1 may open every connection and accepts none; its b2
// and r1, of another tenant, may do both.
func newSessionBench(t *testing.T, sessions int) *progBench {
	b := newProgBench(t)
	config := b.datapath.config
	config.MaxSessions = sessions
	b.reopen(t, config)
	b.restore(t, b.b1, b.b2, b.r1)
	b.says(t, 10, 1, denies|ruleNothing, 0, 0)
	o := &b.datapath.Objects
	must(t, o.PolSubjectsV1.Put(bpfobj.PilasterPolTargetKey{Tenant: 2, App: appAny}, bpfobj.PilasterPolTarget{}))
	policed(t, b, bpfobj.PilasterPolTarget{Sets: [2]uint64{0, 10}})
	return b
}

// exchange has a port of a container of blue or red send a packet to another node, or receive one from it. It reports
// whether the session table refused the packet.
func (b *progBench) exchange(
	t *testing.T, c *testContainer, of tenant.Tenant, port uint16, in bool, body packet.Body,
) (refused bool) {
	t.Helper()
	program, ctx, frame := b.exchanged(c, of, in, body)
	verdict, _, reasons := b.run(t, program, frame, ctx)
	if verdict == verdictDrop && reasons["session-limit"] != 1 {
		t.Fatalf("port %d: dropped for %v", port, reasons)
	}
	return verdict == verdictDrop
}

// exchanged is the packet of exchange, and the program that it meets.
func (b *progBench) exchanged(
	c *testContainer, of tenant.Tenant, in bool, body packet.Body,
) (*ebpf.Program, skb, []byte) {
	peer := allocatedOf(of, address.Plain{Node: b.far.prefix, Tenant: of.Current().ID, App: 1, Index: 77}).Addr()
	if in {
		inside := packet.Packet{Source: peer, Destination: c.plain(), Body: body}
		return b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()},
			inside.Frame(b.uplinkMAC, host.ContainerMAC)
	}
	seen := address.NewCipher(of.Current().Key).Encrypt(peer)
	return b.datapath.Objects.PilContainer, skb{Ifindex: c.ifindex()},
		b.frame(packet.Packet{Source: c.seen(), Destination: seen, Body: body})
}

// openFrom has a container of blue or red open a connection from a port to another node, with a handshake if
// established is set. It reports whether the session table refused a packet.
func (b *progBench) openFrom(
	t *testing.T, c *testContainer, of tenant.Tenant, from uint16, established bool,
) (refused bool) {
	t.Helper()
	if b.exchange(t, c, of, from, false, tcp(from, 80, packet.SYN)) {
		return true
	}
	return established && (b.exchange(t, c, of, from, true, tcp(80, from, synAck)) ||
		b.exchange(t, c, of, from, false, tcp(from, 80, packet.ACK)))
}

// askFrom is openFrom with a datagram and its answer.
func (b *progBench) askFrom(t *testing.T, c *testContainer, of tenant.Tenant, from uint16) (refused bool) {
	t.Helper()
	return b.exchange(t, c, of, from, false, udp(from, 53)) || b.exchange(t, c, of, from, true, udp(53, from))
}

// begin is openFrom for b1.
func (b *progBench) begin(t *testing.T, from uint16, established bool) (refused bool) {
	t.Helper()
	return b.openFrom(t, b.b1, blue, from, established)
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

// TestHalfOpenGoFirst: a flood of half-open connections evicts no established one (NZ11, §7.3), and little is refused.
func TestHalfOpenGoFirst(t *testing.T) {
	const room, established, flood = 64 * slotsPerBucket, 16, 4000
	b := newSessionBench(t, room)
	kept := ports(1000, established)
	for _, port := range kept {
		if b.begin(t, port, true) {
			t.Fatalf("refused with %d of %d", port-1000, room)
		}
	}
	refused := b.flood(t, flood)
	b.voidVerdicts(t) // what is in the table counts, not what is cached
	for _, port := range kept {
		if !b.knows(t, port) {
			t.Errorf("the connection from port %d was evicted", port)
		}
	}
	c := b.sessions(t)
	if c.Created != established+flood || c.Evicted < uint64(flood-room) || refused != 0 {
		t.Errorf("%+v, %d refused; want %d created, %d of them by eviction, none refused", c, refused,
			established+flood, flood-room)
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

// fill has b1 establish connections until the table refuses the most of them. It returns the ports of those that it
// has.
func (b *progBench) fill(t *testing.T, sessions int) (kept []uint16) {
	t.Helper()
	for _, port := range ports(1000, 2*sessions) {
		if !b.begin(t, port, true) {
			kept = append(kept, port)
		}
	}
	if s, err := b.datapath.Sessions(); err != nil || s.Used != len(kept) || s.Used < sessions*95/100 {
		t.Fatalf("%d connections were accepted, the table of %d has %+v, %v", len(kept), sessions, s, err)
	}
	return kept
}

// usage reads how many sessions the programs count for an endpoint and for a tenant.
func (b *progBench) usage(t *testing.T, c *testContainer, of tenant.Tenant) (endpoint, tenant int64) {
	t.Helper()
	o := &b.datapath.Objects
	must(t, o.PilSessionUsersV1.Lookup(uint32(c.record.ID), &endpoint))
	if err := o.PilSessionTenantsV1.Lookup(uint32(of.Current().ID), &tenant); !errors.Is(err, ebpf.ErrKeyNotExist) {
		must(t, err)
	}
	return endpoint, tenant
}

// TestEstablishedStay: an endpoint alone may fill the table, is refused more, and loses no established session to its
// own new ones.
func TestEstablishedStay(t *testing.T) {
	const sessions = 16 * slotsPerBucket
	b := newSessionBench(t, sessions)
	kept := b.fill(t, sessions)
	b.voidVerdicts(t)
	for _, port := range kept {
		if !b.knows(t, port) {
			t.Errorf("the connection from port %d was evicted", port)
		}
	}
	if c := b.sessions(t); c.Refused == 0 || c.Evicted != 0 {
		t.Errorf("%+v; want some refused and none evicted", c)
	}
}

// TestFairShares: users find room in a table that others have filled with established connections, until they have
// about half as many as the largest one. Users are compared by tenant, and within a tenant by endpoint. No user takes
// established sessions from one that has not twice as many.
func TestFairShares(t *testing.T) {
	const sessions = 32 * slotsPerBucket
	b := newSessionBench(t, sessions)
	b.fill(t, sessions)
	fight := func(name string, c *testContainer, of tenant.Tenant) {
		t.Helper()
		for _, port := range ports(1, sessions/4) {
			if b.openFrom(t, c, of, port, true) {
				t.Fatalf("%s: connection %d of %d was refused", name, port, sessions/4)
			}
		}
		for _, port := range ports(1000, 2*sessions) {
			b.openFrom(t, c, of, port, true)
		}
	}
	users := func() (b1, b2, blues, reds int64) {
		t.Helper()
		b1, blues = b.usage(t, b.b1, blue)
		b2, _ = b.usage(t, b.b2, blue)
		_, reds = b.usage(t, b.r1, red)
		if s, err := b.datapath.Sessions(); err != nil || int64(s.Used) != blues+reds || b1+b2 > blues {
			t.Errorf("usage: the programs count %d and %d of %d sessions, and %d; the table has %+v, %v", b1, b2, blues,
				reds, s, err)
		}
		return b1, b2, blues, reds
	}
	const third, some = sessions / 3, sessions / 20
	about := func(n int64, want int) bool { return n > int64(want-some) && n < int64(want+some) }

	fight("another container of the tenant", b.b2, blue)
	if b1, b2, _, _ := users(); !about(b1, 2*third) || !about(b2, third) {
		t.Errorf("two containers: of %d sessions, the first has %d and the second %d; want two thirds and one third",
			sessions, b1, b2)
	}
	fight("another tenant", b.r1, red)
	_, _, blues, reds := users()
	if !about(blues, 2*third) || !about(reds, third) {
		t.Errorf("two tenants: of %d sessions, the first has %d and the second %d; want two thirds and one third",
			sessions, blues, reds)
	}
	newcomer := b.add(t, blue, 3)
	for _, port := range ports(1000, sessions) {
		b.openFrom(t, newcomer, blue, port, true)
	}
	if _, _, _, after := users(); after != reds {
		t.Errorf("a new container of the larger tenant: it took %d established sessions of the smaller one", reds-after)
	}
}

// TestEvictCheapFirst: a user that may evict both half-open and established sessions evicts half-open ones.
func TestEvictCheapFirst(t *testing.T) {
	const sessions, established = 64 * slotsPerBucket, 150
	b := newSessionBench(t, sessions)
	b.flood(t, 4000)
	for _, port := range ports(1000, established) {
		if b.begin(t, port, true) {
			t.Fatalf("the connection from port %d was refused", port)
		}
	}
	for _, port := range ports(1, 40) {
		if b.openFrom(t, b.r1, red, port, true) {
			t.Fatalf("another tenant: connection %d was refused", port)
		}
	}
	b.voidVerdicts(t)
	for _, port := range ports(1000, established) {
		if !b.knows(t, port) {
			t.Errorf("an established session: of port %d, was evicted", port)
		}
	}
}

// testUser is a container with its tenant.
type testUser struct {
	c  *testContainer
	of tenant.Tenant
}

// placed is a session of TestVictims.
type placed struct {
	user string // b1, b2 or r1
	kind string
	idle time.Duration
}

const (
	halfOpen  = "half-open"
	connected = "connected"
	datagrams = "datagrams"
)

// TestVictims: which session a new one evicts from a table of one bucket. A new session is half open.
func TestVictims(t *testing.T) {
	const none = -1
	b := newSessionBench(t, slotsPerBucket)
	users := map[string]testUser{"b1": {b.b1, blue}, "b2": {b.b2, blue}, "r1": {b.r1, red}}
	many := func(n int, p placed) []placed { return slices.Repeat([]placed{p}, n) }
	minute := func(user, kind string) placed { return placed{user, kind, time.Minute} }
	now := func(user, kind string) placed { return placed{user, kind, 0} }
	for _, c := range []struct {
		name   string
		table  []placed
		user   string
		victim int // index in table
	}{
		{
			"idle for longest",
			slices.Concat(
				many(5, now("b1", datagrams)), []placed{minute("b1", connected)}, many(1, now("b1", datagrams)),
			), "r1", 5,
		},
		{
			"of the largest endpoint of a tenant",
			slices.Concat(
				many(3, minute("b2", datagrams)), many(3, now("b1", connected)),
				[]placed{{"b1", connected, time.Second}},
			), "r1", 6,
		},
		{
			"of the largest tenant",
			slices.Concat(many(2, minute("b1", connected)), many(4, now("r1", connected)),
				[]placed{{"r1", connected, time.Second}}), "b2", 6,
		},
		{
			"half open, of the endpoint itself first",
			slices.Concat(many(2, now("b1", connected)), []placed{now("b1", halfOpen)},
				many(4, placed{"b2", halfOpen, time.Second})), "b1", 2,
		},
		{
			"half open, of the tenant before others",
			slices.Concat([]placed{now("b1", connected), now("b2", halfOpen)},
				many(5, placed{"r1", halfOpen, time.Second})), "b1", 1,
		},
		{
			"half open, of a smaller endpoint",
			slices.Concat(many(4, now("b1", connected)), many(3, placed{"b2", halfOpen, time.Second})), "b1", none,
		},
		{
			"half open, of a tenant with twice as many",
			slices.Concat(many(2, now("b1", connected)), many(4, now("r1", halfOpen)),
				[]placed{{"r1", halfOpen, time.Second}}), "b1", 6,
		},
		{
			"half open, of a tenant that has not twice as many",
			slices.Concat(many(3, now("b1", connected)), many(4, placed{"r1", halfOpen, time.Second})), "b1", none,
		},
	} {
		b.clearSessions(t)
		for i, p := range c.table {
			u, port := users[p.user], uint16(1000+i)
			refused := false
			if p.kind == datagrams {
				refused = b.askFrom(t, u.c, u.of, port)
			} else {
				refused = b.openFrom(t, u.c, u.of, port, p.kind == connected)
			}
			if refused {
				t.Fatalf("%s: session %d was refused by a table that is not full", c.name, i)
			}
			b.letIdle(t, port, p.idle)
		}
		u := users[c.user]
		refused := b.openFrom(t, u.c, u.of, 2000, false)
		victim := none
		left := b.sessionPorts(t)
		for i := range c.table {
			if !left[uint16(1000+i)] {
				victim = i
			}
		}
		if victim != c.victim || refused != (victim == none) {
			t.Errorf("%s: it evicted session %d, refused: %v; want session %d", c.name, victim, refused, c.victim)
		}
	}
}

// clearSessions empties the session table.
func (b *progBench) clearSessions(t *testing.T) {
	t.Helper()
	b.overAll(t)
	must(t, b.datapath.recountUsage())
	b.voidVerdicts(t)
}

// letIdle makes the session from a port as old as if its last packet had been earlier by this time.
func (b *progBench) letIdle(t *testing.T, from uint16, by time.Duration) {
	t.Helper()
	b.forEachSession(t, func(s *bpfobj.PilasterSession) {
		if s.Key.LocalPort == bigEndian(from) {
			s.Until -= uint64(by)
		}
	})
}

// sessionPorts returns the local ports of all sessions.
func (b *progBench) sessionPorts(t *testing.T) map[uint16]bool {
	t.Helper()
	all := map[uint16]bool{}
	b.forEachSession(t, func(s *bpfobj.PilasterSession) { all[bigEndian(s.Key.LocalPort)] = true })
	return all
}

// forEachSession changes the sessions of the table.
func (b *progBench) forEachSession(t *testing.T, change func(*bpfobj.PilasterSession)) {
	t.Helper()
	m := b.datapath.Objects.PilSessionsV1
	for i := range m.MaxEntries() {
		var bucket bpfobj.PilasterSessionBucket
		must(t, m.LookupWithFlags(i, &bucket, ebpf.LookupLock))
		for j, tag := range bucket.Tags {
			if tag != 0 {
				change(&bucket.Entries[j])
			}
		}
		must(t, m.Update(i, &bucket, ebpf.UpdateLock))
	}
}

// TestBystandersStay: a tenant's new sessions take entries of the largest endpoint of the largest tenant. Datagram
// sessions of another endpoint there stay, although they expire long before TCP sessions.
func TestBystandersStay(t *testing.T) {
	const sessions, live, news = 32 * slotsPerBucket, 20, 60
	b := newSessionBench(t, sessions)
	for _, port := range ports(100, live) {
		if b.askFrom(t, b.b2, blue, port) {
			t.Fatal("refused in an empty table")
		}
	}
	for _, port := range ports(1000, 2*sessions) {
		b.begin(t, port, true)
	}
	for _, port := range ports(1000, news) {
		if b.openFrom(t, b.r1, red, port, true) {
			t.Errorf("a new session: of port %d, was refused", port)
		}
	}
	if n, _ := b.usage(t, b.b2, blue); n != live {
		t.Errorf("a bystander: %d of %d sessions are left", n, live)
	}
}

// TestHalfOpenOfLargerTenantsStay: a tenant's flood of half-open connections evicts its own, and not those of a larger
// tenant that has less than twice as many sessions.
func TestHalfOpenOfLargerTenantsStay(t *testing.T) {
	const sessions, opened, opening = 32 * slotsPerBucket, 90, 40
	b := newSessionBench(t, sessions)
	for _, port := range ports(1, opened) {
		b.openFrom(t, b.r1, red, port, true)
	}
	for _, port := range ports(1000, opening) {
		b.openFrom(t, b.r1, red, port, false)
	}
	b.flood(t, 1000)
	if _, n := b.usage(t, b.r1, red); n < opened+opening-2 {
		t.Errorf("a larger tenant: %d of %d sessions are left", n, opened+opening)
	}
}

// TestNegativeUsage: a count that is too low gives no right to evict.
func TestNegativeUsage(t *testing.T) {
	b := newSessionBench(t, slotsPerBucket)
	b.fill(t, slotsPerBucket)
	must(t, b.datapath.Objects.PilSessionTenantsV1.Put(uint32(blue.Current().ID), int64(0)))
	must(t, b.datapath.Objects.PilSessionTenantsV1.Put(uint32(red.Current().ID), int64(-100)))
	if !b.openFrom(t, b.r1, red, 1000, false) {
		t.Error("a tenant with a count below 0 evicted a session of one with a count of 0")
	}
}

// TestHalfOpenOfSmallerUsersStay: a flood of half-open connections does not evict those of smaller users, also if all
// other sessions are established.
func TestHalfOpenOfSmallerUsersStay(t *testing.T) {
	const sessions = 32 * slotsPerBucket
	b := newSessionBench(t, sessions)
	for _, port := range ports(1, 20) {
		if b.openFrom(t, b.r1, red, port, false) {
			t.Fatal("refused in an empty table")
		}
	}
	for _, port := range ports(1000, 2*sessions) {
		b.begin(t, port, true)
	}
	b.flood(t, 1000)
	if _, n := b.usage(t, b.r1, red); n != 20 {
		t.Errorf("half-open sessions of a smaller tenant: %d of 20 are left", n)
	}
}

// TestUsageIsRecounted: an agent that starts counts the sessions of each endpoint and tenant anew.
func TestUsageIsRecounted(t *testing.T) {
	b := newSessionBench(t, 16*slotsPerBucket)
	for _, port := range ports(1000, 5) {
		b.begin(t, port, true)
	}
	o := &b.datapath.Objects
	must(t, o.PilSessionUsersV1.Put(uint32(b.b1.record.ID), int64(0)))
	must(t, o.PilSessionTenantsV1.Put(uint32(blue.Current().ID), int64(0)))
	must(t, o.PilSessionTenantsV1.Put(uint32(red.Current().ID), int64(7)))
	b.reopen(t, b.datapath.config)
	if own, all := b.usage(t, b.b1, blue); own != 5 || all != 5 {
		t.Errorf("after a start: %d sessions of the container and %d of the tenant; want 5 and 5", own, all)
	}
	if _, all := b.usage(t, b.r1, red); all != 0 {
		t.Errorf("%d sessions of a tenant that has none", all)
	}
}

// TestRecountOfOthersChanges: sessions that a build began which counts none are counted at the end of Restore.
func TestRecountOfOthersChanges(t *testing.T) {
	b := newSessionBench(t, 16*slotsPerBucket)
	for _, port := range ports(1000, 5) {
		b.begin(t, port, true)
	}
	o := &b.datapath.Objects
	must(t, o.PilSessionUsersV1.Put(uint32(b.b1.record.ID), int64(0)))
	must(t, o.PilSessionTenantsV1.Delete(uint32(blue.Current().ID)))
	b.restore(t, b.b1, b.b2, b.r1)
	if own, all := b.usage(t, b.b1, blue); own != 5 || all != 5 {
		t.Errorf("%d sessions of the container and %d of the tenant; want 5 and 5", own, all)
	}
}

// TestRecountUnderTraffic: sessions that begin during a recount are counted once.
func TestRecountUnderTraffic(t *testing.T) {
	b := newSessionBench(t, DefaultMaxSessions)
	program, ctx, frame := b.exchanged(b.b1, blue, false, tcp(0, 0, packet.SYN))
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- b.ns.Do(func() error {
			for i := range uint32(DefaultMaxSessions / 2) {
				select {
				case <-stop:
					return nil
				default:
				}
				binary.BigEndian.PutUint32(frame[l4:], i) // both ports
				if _, err := program.Run(&ebpf.RunOptions{Data: frame, Context: ctx}); err != nil {
					return err
				}
			}
			return nil
		})
	}()
	for range 20 {
		must(t, b.datapath.recountUsage())
	}
	close(stop)
	must(t, <-done)
	s, err := b.datapath.Sessions()
	must(t, err)
	if own, all := b.usage(t, b.b1, blue); own != int64(s.Used) || all != own || own < 1000 {
		t.Errorf("under traffic: %d sessions of the container and %d of the tenant; the table has %d", own, all, s.Used)
	}
}

// TestSessionsOfDeletedEndpoint: DEL deletes an endpoint's sessions, and only those. An endpoint that gets the number
// starts with none, also if something was left.
func TestSessionsOfDeletedEndpoint(t *testing.T) {
	const sessions = 4 * sweepBuckets * slotsPerBucket
	b := newSessionBench(t, sessions)
	for _, port := range ports(1000, 500) {
		if b.begin(t, port, true) || b.openFrom(t, b.r1, red, port, true) {
			t.Fatal("refused in an empty table")
		}
	}
	check := func(blues, reds int64) {
		t.Helper()
		if own, all := b.usage(t, b.b1, blue); own != blues || all != blues {
			t.Errorf("the endpoint: %d sessions, and %d of its tenant; want %d", own, all, blues)
		}
		if own, all := b.usage(t, b.r1, red); own != reds || all != reds {
			t.Errorf("another endpoint: %d sessions, and %d of its tenant; want %d", own, all, reds)
		}
		if s, err := b.datapath.Sessions(); err != nil || s.Used != int(blues+reds) {
			t.Errorf("the table: %+v, %v; want %d in use", s, err, blues+reds)
		}
	}
	check(500, 500)
	drifted := int64(507)
	must(t, b.datapath.Objects.PilSessionUsersV1.Put(uint32(b.b1.record.ID), drifted))
	must(t, b.datapath.Attach(b.b1.record)) // as an ADD with the number does
	check(0, 500)
	b.begin(t, 1000, true)
	check(1, 500)
	must(t, b.datapath.RemoveDevice(t.Context(), b.r1.record))
	check(1, 0)
	// A tenant with policies may begin a session at any moment.
	tenants := func(want ...uint32) {
		t.Helper()
		keys, err := bpfobj.MapKeys[uint32](b.datapath.Objects.PilSessionTenantsV1)
		slices.Sort(keys)
		if err != nil || !slices.Equal(keys, want) {
			t.Errorf("counted tenants: %v, %v; want %v", keys, err, want)
		}
	}
	tenants(1, 2)
	must(t, b.datapath.Objects.PolSubjectsV1.Delete(bpfobj.PilasterPolTargetKey{Tenant: 2, App: appAny}))
	must(t, b.datapath.Attach(b.b1.record))
	check(0, 0)
	tenants(1)
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
	b.begin(t, 1005, true)
	for _, c := range []testUser{{b.b2, blue}, {b.b2, blue}, {b.r1, red}} {
		b.askFrom(t, c.c, c.of, uint16(3000+b.sessions(t).Created))
	}
	want := dpapi.Sessions{
		Capacity: 16 * slotsPerBucket,
		Used:     12,
		HalfOpen: 3,
		Begun:    12,
		Largest:  b.b1.record.ID,
		Most:     9,

		LargestTenant: uint32(blue.Current().ID),
		MostOfTenant:  11,
	}
	if s, err := b.datapath.Sessions(); err != nil || s != want {
		t.Errorf("%+v, %v; want %+v", s, err, want)
	}
	b.overAll(t)
	want = dpapi.Sessions{Capacity: want.Capacity, Begun: want.Begun}
	if s, err := b.datapath.Sessions(); err != nil || s != want {
		t.Errorf("when all time is over: %+v, %v; want %+v", s, err, want)
	}
}

// TestExpiredSessions: the sessions of tenants are counted without expired ones, which are looked for every 10 s.
func TestExpiredSessions(t *testing.T) {
	const size = 4096 * slotsPerBucket // so large that the last session does not take the entry of an expired one
	b := newSessionBench(t, size)
	want := func(when string, want int) {
		t.Helper()
		used, capacity, err := b.datapath.TenantSessions()
		if n := used[uint32(blue.Current().ID)]; err != nil || n != want || capacity != size {
			t.Errorf("%s: %d of %d sessions, %v; want %d", when, n, capacity, err, want)
		}
	}
	for _, port := range ports(1000, 5) {
		b.begin(t, port, true)
	}
	want("before they expire", 5)
	b.overAll(t)
	b.begin(t, 2000, true)
	b.datapath.swept = time.Now()
	want("before the table is swept again", 6)
	b.datapath.swept = time.Now().Add(-sweepEvery)
	want("after that", 1)
}

// TestSessionsAge: a session's slot is free when it expires, without any cleanup.
func TestSessionsAge(t *testing.T) {
	b := newSessionBench(t, slotsPerBucket)
	for _, port := range ports(1000, slotsPerBucket) {
		if b.begin(t, port, true) {
			t.Fatalf("port %d was refused", port)
		}
	}
	if !b.begin(t, 2000, true) {
		t.Fatal("nothing is refused by a full table")
	}
	b.overAll(t)
	if b.knows(t, 1000) {
		t.Error("a session is found after it expired")
	}
	if b.begin(t, 2000, true) {
		t.Error("refused although all other sessions have expired")
	}
	if own, all := b.usage(t, b.b1, blue); own != int64(slotsPerBucket) || all != own {
		t.Errorf("%d sessions of the container and %d of the tenant; want %d", own, all, slotsPerBucket)
	}
}

// overAll ends the time of all sessions.
func (b *progBench) overAll(t *testing.T) {
	t.Helper()
	b.forEachSession(t, func(s *bpfobj.PilasterSession) { s.Until = 1 })
	b.voidVerdicts(t)
}

func (b *testNode) voidVerdicts(t testing.TB) {
	t.Helper()
	var n uint32
	must(t, b.datapath.Objects.PolGenerationV1.Lookup(uint32(0), &n))
	must(t, b.datapath.Objects.PolGenerationV1.Put(uint32(0), n+1))
}
