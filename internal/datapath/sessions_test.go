package datapath

import (
	"errors"
	"testing"

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

// openFrom has a container of blue or red open a connection from a port to another node, with a handshake if
// established is set. It reports whether the session table refused a packet.
func (b *progBench) openFrom(
	t *testing.T, c *testContainer, of tenant.Tenant, from uint16, established bool,
) (refused bool) {
	t.Helper()
	peer := allocatedOf(of, address.Plain{Node: b.far.prefix, Tenant: of.Current().ID, App: 1, Index: 77}).Addr()
	refuses := func(in bool, body packet.Body) bool {
		program, ctx := b.datapath.Objects.PilContainer, skb{Ifindex: c.ifindex()}
		seen := address.NewCipher(of.Current().Key).Encrypt(peer)
		frame := b.frame(packet.Packet{Source: c.seen(), Destination: seen, Body: body})
		if in {
			program, ctx = b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()}
			inside := packet.Packet{Source: peer, Destination: c.plain(), Body: body}
			frame = inside.Frame(b.uplinkMAC, host.ContainerMAC)
		}
		verdict, _, reasons := b.run(t, program, frame, ctx)
		if verdict == verdictDrop && reasons["session-limit"] != 1 {
			t.Fatalf("port %d: dropped for %v", from, reasons)
		}
		return verdict == verdictDrop
	}
	if refuses(false, tcp(from, 80, packet.SYN)) {
		return true
	}
	return established && (refuses(true, tcp(80, from, synAck)) || refuses(false, tcp(from, 80, packet.ACK)))
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
		t.Errorf("%d sessions of the container and %d of the tenant; want 5 and 5", own, all)
	}
	if _, all := b.usage(t, b.r1, red); all != 0 {
		t.Errorf("%d sessions of a tenant that has none", all)
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
	must(t, b.datapath.Attach(b.b1.record)) // as an ADD with the number does
	check(0, 500)
	b.begin(t, 1000, true)
	check(1, 500)
	must(t, b.datapath.RemoveDevice(t.Context(), b.r1.record))
	check(1, 0)
	if keys, err := bpfobj.MapKeys[uint32](b.datapath.Objects.PilSessionTenantsV1); err != nil || len(keys) != 1 {
		t.Errorf("tenants with sessions: %v, %v; want one", keys, err)
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
