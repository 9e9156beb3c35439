package evpn

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"
)

func TestRecords(t *testing.T) {
	table := newTable(t)
	update(t, table, peerA, host(t, vtep1, mac1, ip1, 3), member(vtep1), subnet(vtep1, "172.20.1.0/24"))
	routerMAC := MAC{0x02, 0, 0, 1, 0, 1}
	want := []Record{{
		RecordKey: RecordKey{Kind: RecordHost, VNI: 100, Prefix: HostPrefix(addr(ip1))}, Tenant: "shop",
		VTEP: addr(vtep1), HostMAC: mac(t, mac1), L3VNI: 4000, RouterMAC: routerMAC, Sequence: 3,
	}, {
		RecordKey: RecordKey{Kind: RecordMAC, VNI: 100, MAC: mac(t, mac1)}, Tenant: "shop",
		VTEP: addr(vtep1), Sequence: 3,
	}, {
		RecordKey: RecordKey{Kind: RecordMember, VNI: 100, Prefix: HostPrefix(addr(vtep1))}, Tenant: "shop",
		VTEP: addr(vtep1),
	}, {
		RecordKey: RecordKey{Kind: RecordPrefix, VNI: 4000, Prefix: prefix("172.20.1.0/24")}, Tenant: "shop",
		VTEP: addr(vtep1), L3VNI: 4000, RouterMAC: routerMAC,
	}}
	if got := table.Records(); !reflect.DeepEqual(got, want) {
		t.Errorf("records:\n%+v\nwant:\n%+v", got, want)
	}
	if keys := table.Changes(); len(keys) != 4 {
		t.Errorf("changes: %v", keys)
	}
	update(t, table, peerA, member(vtep1)) // the same again
	if keys := table.Changes(); len(keys) != 0 {
		t.Errorf("a repeated route changed %v", keys)
	}
	for _, r := range []Route{host(t, vtep1, mac1, ip1, 3), member(vtep1), subnet(vtep1, "172.20.1.0/24")} {
		table.Withdraw(peerA, r.Key)
	}
	if got := table.Records(); len(got) != 0 {
		t.Errorf("records after all withdrawals: %v", got)
	}
	checkEmpty(t, table)
}

// checkEmpty fails if a table without routes keeps something of earlier ones.
func checkEmpty(t *testing.T, table *Table) {
	t.Helper()
	if len(table.groups)+len(table.members)+len(table.records) != 0 {
		t.Errorf("left: %d groups, %d members, %d records", len(table.groups), len(table.members), len(table.records))
	}
	for _, p := range table.peers {
		if len(p.waiting) != 0 {
			t.Errorf("peer %v: %d records with waiting routes", p.addr, len(p.waiting))
		}
		c := table.Count(p.addr)
		if c.Routes != 0 || c.Size != 0 || c.Stale != 0 || len(c.Accepted) != 0 || len(c.Refused) != 0 {
			t.Errorf("peer %v: left %+v", p.addr, c)
		}
	}
}

// RFC 7432 §15: the higher mobility sequence wins, and of equal ones the lower VTEP.
func TestMobility(t *testing.T) {
	table := newTable(t)
	at := func(want string) {
		t.Helper()
		for _, kind := range []RecordKind{RecordHost, RecordMAC} {
			if got := find(table, kind); len(got) != 1 || got[0].VTEP != addr(want) {
				t.Errorf("%v: %v, not at %s", kind, got, want)
			}
		}
	}
	update(t, table, peerA, host(t, vtep2, mac1, ip1, 0))
	at(vtep2)
	update(t, table, peerA, host(t, vtep1, mac1, ip1, 0))
	at(vtep1)
	update(t, table, peerB, host(t, vtep2, mac1, ip1, 1))
	at(vtep2)
	if n := table.NextSequence(100, mac(t, mac1)); n != 2 {
		t.Errorf("next sequence %d, not 2", n)
	}
	if n := table.NextSequence(101, mac(t, mac1)); n != 0 {
		t.Errorf("next sequence %d in another tenant, not 0", n)
	}
	sticky := host(t, vtep1, mac1, ip1, 0)
	sticky.Sticky = true
	update(t, table, peerA, sticky)
	at(vtep1)
	table.Withdraw(peerA, sticky.Key)
	at(vtep2)
	table.Withdraw(peerB, host(t, vtep2, mac1, ip1, 1).Key)
	at(vtep2) // peer A's route with sequence 0
}

// A container of the cluster keeps its MAC and address whatever others announce.
func TestOwnContainers(t *testing.T) {
	table := newTable(t)
	update(t, table, peerA, host(t, vtep1, mac1, ip1, 5))
	own := []Own{{Tenant: shop(), Containers: []Container{{
		Node{addr("10.1.0.1"), MAC{2}}, mac(t, mac1), []netip.Addr{addr(ip1)}, 6,
	}}}}
	table.SetOwn(own)
	if r := table.Records(); len(r) != 0 {
		t.Errorf("records for a container of the cluster: %v", r)
	}
	if c := table.Contested(); len(c) != 2 {
		t.Errorf("contested: %v", c)
	}
	update(t, table, peerA, host(t, vtep1, mac1, ip1, 9))
	if r := table.Records(); len(r) != 0 {
		t.Errorf("a higher sequence took a container's place: %v", r)
	}
	table.SetOwn(nil)
	if r := table.Records(); len(r) != 2 || len(table.Contested()) != 0 {
		t.Errorf("records after the container is gone: %v", r)
	}
}

// An address in a node's subnet is refused while the node has the subnet.
func TestOwnSubnets(t *testing.T) {
	table := newTable(t)
	table.SetOwn(ownSubnet("10.0.0.0/24"))
	update(t, table, peerA, host(t, vtep1, mac1, ip1, 5), host(t, vtep1, mac1, "10.0.1.11", 5))
	check := func(when string, refused int, vteps ...string) {
		t.Helper()
		c := table.Count(peerA)
		if c.Refused[OwnSubnet] != refused || c.Accepted[KindMACIP] != len(vteps) ||
			len(find(table, RecordHost)) != len(vteps) {
			t.Errorf("%s: %+v, %v", when, c, find(table, RecordHost))
		}
	}
	check("at first", 1, vtep1)
	table.SetOwn(nil)
	check("without the subnet", 0, vtep1, vtep1)
	table.SetOwn(ownSubnet("10.0.1.0/24"))
	check("with another subnet", 1, vtep1)
	table.PeerDown(peerA, now.Add(time.Minute))
	table.SetOwn(ownSubnet("10.0.0.0/16"))
	if c := table.Count(peerA); c.Routes != 0 || c.Stale != 0 {
		t.Errorf("stale routes in a new subnet: %+v", c)
	}
	checkEmpty(t, table)
}

// A peer can announce a record with any number of route distinguishers. A bounded number is imported; the others wait.
func TestPathsAreBounded(t *testing.T) {
	const waiting = 50
	table := newTable(t)
	path := func(number int) Route {
		r := host(t, vtep1, mac1, ip1, 1)
		r.RD = NewRD(addr(vtep1), uint16(number))
		return r
	}
	check := func(when string, accepted, refused int) {
		t.Helper()
		c := table.Count(peerA)
		if c.Accepted[KindMACIP] != accepted || c.Refused[TooManyPaths] != refused || len(table.Records()) != 2 {
			t.Errorf("%s: %+v, records %v", when, c, table.Records())
		}
	}
	for i := range MaxPaths + waiting {
		update(t, table, peerA, path(i))
	}
	check("at first", MaxPaths, waiting)
	update(t, table, peerB, path(0))
	if c := table.Count(peerB); c.Accepted[KindMACIP] != 1 {
		t.Errorf("the other peer: %+v", c)
	}
	table.Withdraw(peerB, path(0).Key)
	update(t, table, peerA, path(MaxPaths), path(0)) // the same again
	check("after updates", MaxPaths, waiting)
	if err := table.Configure(settings()); err != nil {
		t.Fatal(err)
	}
	check("with the same rules", MaxPaths, waiting)
	for i := range MaxPaths {
		table.Withdraw(peerA, path(i).Key)
		check("after a withdrawal", min(MaxPaths, MaxPaths+waiting-i-1), max(0, waiting-i-1))
	}
	table.PeerDown(peerA, now.Add(time.Minute))
	check("without the peer", waiting, 0)
	table.Expire(now.Add(time.Minute))
	checkEmpty(t, table)
}

// A MAC may have more addresses than an address may have routes.
func TestAddressesOfOneMAC(t *testing.T) {
	const addresses = 2*MaxPaths - 1
	table := newTable(t)
	for i := range addresses {
		ip := netip.AddrFrom4([4]byte{10, 0, 3, byte(i)})
		update(t, table, peerA, host(t, vtep1, mac1, ip.String(), 0))
	}
	if c := table.Count(peerA); c.Accepted[KindMACIP] != addresses || len(table.Records()) != addresses+1 {
		t.Errorf("%+v, %d records", c, len(table.Records()))
	}
	withoutAddress := host(t, vtep1, mac1, ip1, 0)
	withoutAddress.Prefix = netip.Prefix{}
	for i := range MaxPaths + 1 {
		withoutAddress.RD = NewRD(addr(vtep1), uint16(i+1))
		update(t, table, peerA, withoutAddress)
	}
	if c := table.Count(peerA); c.Accepted[KindMACIP] != addresses+MaxPaths || c.Refused[TooManyPaths] != 1 {
		t.Errorf("with routes without an address: %+v", c)
	}
}

func TestStale(t *testing.T) {
	table := newTable(t)
	accepted, refused := host(t, vtep1, mac1, ip1, 0), host(t, "10.3.0.1", mac1, ip1, 0)
	update(t, table, peerA, accepted, refused, member(vtep1))
	table.PeerDown(peerA, now.Add(time.Minute))
	if c := table.Count(peerA); c.Up || c.Routes != 2 || c.Stale != 2 || len(c.Refused) != 0 {
		t.Errorf("after the loss: %+v", c)
	}
	for _, r := range table.Records() {
		if !r.Stale {
			t.Errorf("record is not stale: %+v", r)
		}
	}
	if err := table.Update(peerA, accepted, 1); err == nil {
		t.Error("a route of a lost peer is recorded")
	}
	if next := table.Expire(now.Add(59 * time.Second)); !next.Equal(now.Add(time.Minute)) || len(table.Records()) != 3 {
		t.Errorf("next %v, records %v", next, table.Records())
	}

	// The peer is back for a moment: what it repeats is fresh, and the rest keeps its time.
	table.PeerUp(peerA)
	update(t, table, peerA, accepted)
	if c := table.Count(peerA); c.Stale != 1 {
		t.Errorf("after one route was repeated: %+v", c)
	}
	table.PeerDown(peerA, now.Add(2*time.Minute))
	if next := table.Expire(now.Add(time.Minute)); !next.Equal(now.Add(2*time.Minute)) || len(table.Records()) != 2 {
		t.Errorf("next %v, records %v", next, table.Records())
	}

	// It is back and done: what it did not repeat is gone.
	table.PeerUp(peerA)
	update(t, table, peerA, member(vtep1))
	table.EndOfRIB(peerA)
	if r := table.Records(); len(r) != 1 || r[0].Kind != RecordMember || r[0].Stale {
		t.Errorf("after the end of the peer's routes: %v", r)
	}
	table.PeerDown(peerA, now)
	if next := table.Expire(now); !next.IsZero() || len(table.Records()) != 0 {
		t.Errorf("next %v, records %v", next, table.Records())
	}
	checkEmpty(t, table)
}

// A route of a peer that is up replaces the stale one of another peer, with the same record.
func TestTwoPeers(t *testing.T) {
	table := newTable(t)
	update(t, table, peerA, host(t, vtep1, mac1, ip1, 0))
	update(t, table, peerB, host(t, vtep1, mac1, ip1, 0))
	table.Changes()
	table.PeerDown(peerA, now.Add(time.Minute))
	table.Expire(now.Add(time.Hour))
	if keys := table.Changes(); len(keys) != 0 {
		t.Errorf("the loss of one of two peers changed %v", keys)
	}
}

func TestConfigureChecksAgain(t *testing.T) {
	table := newTable(t)
	s := settings()
	s.Tenants = nil
	update(t, table, peerA, host(t, vtep1, mac1, ip1, 0), member(vtep1))
	if err := table.Configure(s); err != nil {
		t.Fatal(err)
	}
	if c := table.Count(peerA); c.Refused[UnknownTarget] != 2 || len(table.Records()) != 0 {
		t.Errorf("without tenants: %+v, %v", c, table.Records())
	}
	if err := table.Configure(settings()); err != nil {
		t.Fatal(err)
	}
	if c := table.Count(peerA); len(c.Refused) != 0 || len(table.Records()) != 3 {
		t.Errorf("with the tenants again: %+v, %v", c, table.Records())
	}
	table.PeerDown(peerA, now.Add(time.Minute))
	if err := table.Configure(s); err != nil {
		t.Fatal(err)
	}
	checkEmpty(t, table) // a stale route that is refused is of no use
}

func TestMembersAreBounded(t *testing.T) {
	table := newTable(t)
	order := rand.New(rand.NewPCG(1, 2)).Perm(100)
	for _, i := range order {
		update(t, table, peerA, member(fmt.Sprintf("10.2.0.%d", i)))
	}
	check := func(first, unreplicated int) {
		t.Helper()
		got := find(table, RecordMember)
		if len(got) != MaxMembers || table.Unreplicated() != unreplicated {
			t.Fatalf("%d members, %d unreplicated", len(got), table.Unreplicated())
		}
		for i, r := range got {
			if want := addr(fmt.Sprintf("10.2.0.%d", first+i)); r.VTEP != want {
				t.Fatalf("member %d is %v, not %v", i, r.VTEP, want)
			}
		}
	}
	check(0, 36)
	for i := range 10 {
		table.Withdraw(peerA, member(fmt.Sprintf("10.2.0.%d", i)).Key)
	}
	check(10, 26)
}

// The records depend on the routes and not on the order of their arrival, on withdrawn routes, or on repeated ones.
func TestRecordsAreDeterministic(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 7))
		var final []Route
		for range 40 {
			final = append(final, randomRoute(t, random))
		}
		final = distinct(final)
		peers := []netip.Addr{peerA, peerB}
		var want []Record
		for round := range 4 {
			table := newTable(t)
			if round > 0 {
				for range 60 {
					r := randomRoute(t, random)
					p := peers[random.IntN(2)]
					update(t, table, p, r)
					if random.IntN(3) > 0 {
						table.Withdraw(p, r.Key)
					}
				}
				for _, p := range table.peers {
					for key := range p.routes {
						if random.IntN(2) > 0 {
							table.Withdraw(p.addr, key)
						}
					}
				}
			}
			for _, i := range random.Perm(len(final)) {
				update(t, table, peers[i%2], final[i])
			}
			keep := map[Key]netip.Addr{}
			for i, r := range final {
				keep[r.Key] = peers[i%2]
			}
			for _, p := range table.peers {
				for key := range p.routes {
					if keep[key] != p.addr {
						table.Withdraw(p.addr, key)
					}
				}
			}
			got := table.Records()
			if round == 0 {
				want = got
			} else if !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d, round %d:\n%+v\nwant:\n%+v", seed, round, got, want)
			}
		}
	}
}

func randomRoute(t *testing.T, random *rand.Rand) Route {
	vtep := fmt.Sprintf("10.2.0.%d", random.IntN(4))
	switch random.IntN(3) {
	case 0:
		return member(vtep)
	case 1:
		r := subnet(vtep, fmt.Sprintf("172.20.%d.0/24", random.IntN(4)))
		r.RouterMAC[5] = byte(random.IntN(3))
		return r
	}
	m := fmt.Sprintf("02:00:00:00:02:%02x", random.IntN(3))
	r := host(t, vtep, m, fmt.Sprintf("10.0.0.%d", random.IntN(3)), uint32(random.IntN(3)))
	r.Sticky = random.IntN(10) == 0
	return r
}

// distinct keeps the first route with each key.
func distinct(routes []Route) (first []Route) {
	for _, r := range routes {
		if !slices.ContainsFunc(first, func(f Route) bool { return f.Key == r.Key }) {
			first = append(first, r)
		}
	}
	return first
}

// The stream sends each subscriber what changed since its snapshot, and only the last state of each record.
func TestStream(t *testing.T) {
	table, stream := newTable(t), NewStream()
	sub := stream.Subscribe()
	defer sub.Close()
	update(t, table, peerA, host(t, vtep1, mac1, ip1, 0), member(vtep1))
	stream.Publish(table)
	table.Withdraw(peerA, member(vtep1).Key)
	update(t, table, peerA, host(t, vtep2, mac1, ip1, 1))
	stream.Publish(table)
	changes, err := sub.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(changes) != 3 || changes[0].VTEP != addr(vtep2) || changes[1].VTEP != addr(vtep2) ||
		!changes[2].Deleted || changes[2].Prefix != HostPrefix(addr(vtep1)) {
		t.Errorf("changes: %+v", changes)
	}
	late := stream.Subscribe()
	late.Close()
	update(t, table, peerA, member(vtep2))
	stream.Publish(table)
	if changes, err = sub.Next(t.Context()); err != nil || len(changes) != 1 || changes[0].Deleted {
		t.Errorf("changes: %+v, %v", changes, err)
	}
	if len(late.pending) != 0 {
		t.Errorf("a closed subscription received %v", late.pending)
	}
}
