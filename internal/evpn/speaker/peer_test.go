package speaker

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	ours "pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/evpn"
)

// keysOf returns the keys of the EVPN routes that updates announce and withdraw, in the order of their arrival.
func keysOf(updates []*bgp.BGPUpdate) (announced, withdrawn []evpn.Key) {
	for _, u := range updates {
		for _, a := range u.PathAttributes {
			switch a := a.(type) {
			case *bgp.PathAttributeMpReachNLRI:
				for _, n := range a.Value {
					announced = append(announced, fromNLRI(n.NLRI).Key)
				}
			case *bgp.PathAttributeMpUnreachNLRI:
				for _, n := range a.Value {
					withdrawn = append(withdrawn, fromNLRI(n.NLRI).Key)
				}
			}
		}
	}
	return announced, withdrawn
}

func TestAnnounceAndImport(t *testing.T) {
	t.Parallel()
	peer, config := listen(t, 2)
	s := start(t, Config{Peers: []ours.Peer{config}, Stale: time.Hour})
	if p := s.Status().Peers[0]; !p.Up && p.Reason == "" {
		t.Errorf("a peer before its first session: %+v", p)
	}
	_, changes := s.Records()
	defer changes.Close()
	peer.WaitUp(1)
	peer.WaitUpdates("with all routes of the cluster", func(u []*bgp.BGPUpdate) bool {
		announced, _ := keysOf(u)
		return len(announced) == len(evpn.Routes(ownASN, own()))
	})

	peer.Send(announcements(t, theirs(7))...)
	wait(t, s, "with 4 records", func(s Status) bool { return records(s) == 4 })
	if got, err := changes.Next(t.Context()); err != nil || len(got) == 0 || got[0].VTEP != addr("10.2.0.7") {
		t.Errorf("changes: %+v, %v", got, err)
	}
	all, sub := s.Records()
	sub.Close()
	for _, r := range all {
		if r.VTEP != addr("10.2.0.7") || r.Tenant != "shop" {
			t.Errorf("record %+v", r)
		}
	}

	// GoBGP sends no route of a peer to the same or another peer, and its table has none.
	if err := s.Announce(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	peer.WaitUpdates("without a route of the cluster", func(u []*bgp.BGPUpdate) bool {
		announced, withdrawn := keysOf(u)
		if len(announced) != len(evpn.Routes(ownASN, own())) {
			t.Errorf("announced: %v", announced)
		}
		return len(withdrawn) == len(announced)
	})
	if status := s.Status(); len(status.Announced) != 0 {
		t.Errorf("announced: %v", status.Announced)
	}

	for _, r := range theirs(7) {
		peer.Send(withdrawal(t, r))
	}
	status := wait(t, s, "without records", func(s Status) bool { return records(s) == 0 })
	if p := status.Peers[0]; !p.Up || p.Routes != 0 {
		t.Errorf("peer: %+v", p)
	}
}

// A changed route replaces itself without a withdrawal, with the sequence of the container's move.
func TestMovedContainerIsAnnouncedAgain(t *testing.T) {
	t.Parallel()
	peer, config := listen(t, 3)
	s := start(t, Config{Peers: []ours.Peer{config}})
	peer.WaitUp(1)
	moved := own()
	moved[0].Containers[0].Sequence = 4
	if err := s.Announce(t.Context(), moved); err != nil {
		t.Fatal(err)
	}
	sequences := func(u []*bgp.BGPUpdate) (found []uint32) {
		for _, update := range u {
			var r evpn.Route
			for _, a := range update.PathAttributes {
				if c, ok := a.(*bgp.PathAttributeExtendedCommunities); ok {
					fromCommunities(&r, c.Value)
				}
			}
			announced, _ := keysOf([]*bgp.BGPUpdate{update})
			for _, key := range announced {
				if key.Kind == evpn.KindMACIP {
					found = append(found, r.Sequence)
				}
			}
		}
		return found
	}
	peer.WaitUpdates("with the new sequence", func(u []*bgp.BGPUpdate) bool {
		found := sequences(u)
		return len(found) >= 2 && slices.Equal(found[len(found)-2:], []uint32{4, 4})
	})
	peer.WaitUpdates("without withdrawals", func(u []*bgp.BGPUpdate) bool {
		_, withdrawn := keysOf(u)
		return len(withdrawn) == 0
	})
	// A container that is gone, and a new one with its MAC and no move.
	if err := s.Announce(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Announce(t.Context(), own()); err != nil {
		t.Fatal(err)
	}
	peer.WaitUpdates("with sequence 0 again", func(u []*bgp.BGPUpdate) bool {
		found := sequences(u)
		return len(found) >= 2 && slices.Equal(found[len(found)-2:], []uint32{0, 0})
	})
}

func TestRoutesOfALostPeerAreStale(t *testing.T) {
	t.Parallel()
	peer, config := listen(t, 4)
	s := start(t, Config{Peers: []ours.Peer{config}, Stale: time.Hour})
	peer.WaitUp(1)
	peer.Send(announcements(t, theirs(7))...)
	peer.Send(announcements(t, theirs(8))...)
	wait(t, s, "with 8 records", func(s Status) bool { return records(s) == 8 })

	peer.Drop()
	status := wait(t, s, "without the peer", func(s Status) bool { return !s.Peers[0].Up })
	if p := status.Peers[0]; p.Stale != 6 || records(status) != 8 || p.Reason == "" || p.Flaps != 1 {
		t.Errorf("after the loss: %+v", status)
	}
	peer.WaitUp(2)
	peer.Send(announcements(t, theirs(7))...)
	wait(t, s, "with 3 routes repeated", func(s Status) bool { return s.Peers[0].Stale == 3 })
	peer.Send(bgp.NewEndOfRib(bgp.RF_EVPN))
	status = wait(t, s, "with the repeated routes alone", func(s Status) bool { return s.Peers[0].Routes == 3 })
	if p := status.Peers[0]; !p.Up || p.Stale != 0 || records(status) != 4 {
		t.Errorf("after the end of the peer's routes: %+v", status)
	}
}

func TestStaleRoutesGo(t *testing.T) {
	t.Parallel()
	const stale = 2 * time.Second
	peer, config := listen(t, 5)
	s := start(t, Config{Peers: []ours.Peer{config}, Stale: stale})
	peer.WaitUp(1)
	peer.Send(announcements(t, theirs(7))...)
	wait(t, s, "with 4 records", func(s Status) bool { return records(s) == 4 })
	lost := time.Now()
	peer.Drop()
	wait(t, s, "without records", func(s Status) bool { return records(s) == 0 && s.Peers[0].Routes == 0 })
	if is := time.Since(lost); is < stale {
		t.Errorf("the routes were gone after %v, not %v", is, stale)
	}
}

// foreignRoute returns a route that the cluster does not import.
func foreignRoute(i int) evpn.Route {
	r := theirs(9)[0]
	r.Targets = []evpn.Target{evpn.NewTarget(peerASN, 9000)}
	r.MAC = evpn.MAC{0x02, 1, 0, byte(i >> 16), byte(i >> 8), byte(i)}
	return r
}

// foreign returns messages with routes that the cluster does not import, each with attributes of its own.
func foreign(t testing.TB, n int, asns ...uint32) []byte {
	t.Helper()
	return foreignWith(t, n, nil, asns...)
}

// foreignWith also adds attributes.
func foreignWith(t testing.TB, n int, attrs []bgp.PathAttributeInterface, asns ...uint32) []byte {
	t.Helper()
	var raw []byte
	for i := range n {
		m := announcement(t, foreignRoute(i), asns...)
		update := m.Body.(*bgp.BGPUpdate)
		update.PathAttributes = append(update.PathAttributes, attrs...)
		text, err := m.Serialize()
		if err != nil {
			t.Fatal(err)
		}
		raw = append(raw, text...)
	}
	return raw
}

// A peer above a limit is shut down alone, the status names it, and it is started again.
func TestPeerLimits(t *testing.T) {
	t.Parallel()
	const limit = 200
	// GoBGP does not report routes that this speaker originated, but keeps them.
	originator, err := bgp.NewPathAttributeOriginatorId(addr("127.0.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	for i, test := range []struct {
		name   string
		asn    uint32
		limits Limits
		attrs  []bgp.PathAttributeInterface
		asns   []uint32
		atOnce bool // limit-10 routes are too many
		says   string
	}{
		{"routes", peerASN, Limits{Routes: limit}, nil, nil, false, "more than 200 routes"},
		{"bytes", peerASN, Limits{Routes: 100 * limit, Bytes: 100 * limit}, nil, nil, true, "more than 20000 bytes"},
		{"loops", peerASN, Limits{Routes: limit}, nil, []uint32{ownASN}, false, "came from this AS"},
		{
			"bytes of loops", peerASN, Limits{Routes: 100 * limit, Bytes: 100 * limit}, nil, []uint32{ownASN}, true,
			"more than 20000 bytes",
		},
		{
			"bytes of reflected routes", ownASN, Limits{Routes: 100 * limit, Bytes: limit * evpn.HiddenSize},
			[]bgp.PathAttributeInterface{originator}, nil, false, "more than 819200 bytes",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			good, goodConfig := listen(t, byte(60+2*i))
			bad, badConfig := listenAs(t, byte(61+2*i), test.asn)
			test.limits.Restart = time.Second
			s := start(t, Config{Peers: []ours.Peer{goodConfig, badConfig}, Limits: test.limits, Stale: time.Hour})
			good.WaitUp(1)
			bad.WaitUp(1)
			good.Send(announcements(t, theirs(7))...)
			bad.Send(announcements(t, theirs(8))...)
			if err := bad.Write(foreignWith(t, limit-10, test.attrs, test.asns...)); err != nil {
				t.Fatal(err)
			}
			status := wait(t, s, "with all routes", func(s Status) bool {
				return records(s) == 8 && (refused(s.Peers[1]) == limit-10 || s.Peers[1].Excesses > 0)
			})
			if p := status.Peers[1]; !test.atOnce && !p.Up {
				t.Errorf("below the limit: %+v", p)
			}
			if err := bad.Write(foreignWith(t, 2*limit, test.attrs, test.asns...)); err != nil && !test.atOnce {
				t.Fatal(err)
			}
			status = wait(t, s, "with one peer shut down", func(s Status) bool { return s.Peers[1].Excesses == 1 })
			if p := status.Peers[1]; !strings.Contains(p.Reason, test.says) {
				t.Errorf("reason %q, not %q", p.Reason, test.says)
			}
			if p := status.Peers[0]; !p.Up || p.Routes != 3 || p.Flaps != 0 || records(status) != 8 {
				t.Errorf("the other peer: %+v, records %v", p, status.Records)
			}
			bad.WaitUp(2)
			if n := bad.Notifications(); len(n) != 1 || !strings.Contains(n[0], test.says) {
				t.Errorf("notifications %q, without %q", n, test.says)
			}
			bad.Send(announcements(t, theirs(8))...)
			bad.Send(bgp.NewEndOfRib(bgp.RF_EVPN))
			status = wait(t, s, "with the peer again", func(s Status) bool {
				return s.Peers[1].Up && s.Peers[1].Stale == 0
			})
			if good.Sessions() != 1 || records(status) != 8 || !status.Peers[1].Restart.IsZero() {
				t.Errorf("in the end: %+v", status)
			}
		})
	}
}

// Damaged messages end the sender's session at most.
func TestMalformedMessages(t *testing.T) {
	t.Parallel()
	good, goodConfig := listen(t, 40)
	bad, badConfig := listen(t, 41)
	s := start(t, Config{Peers: []ours.Peer{goodConfig, badConfig}, Stale: time.Hour})
	good.WaitUp(1)
	good.Send(announcements(t, theirs(7))...)
	session := 1
	bad.WaitUp(session)
	for i, r := range theirs(8) {
		raw, err := announcement(t, r).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		for at := bgp.BGP_HEADER_LENGTH; at < len(raw); at += 3 {
			broken := slices.Clone(raw)
			broken[at] ^= byte(1 << (at % 8))
			if bad.Write(broken) != nil {
				break
			}
		}
		t.Logf("route %d: %+v", i, s.Status().Peers[1])
	}
	status := wait(t, s, "with the records of the good peer", func(s Status) bool { return records(s) >= 4 })
	if p := status.Peers[0]; !p.Up || p.Routes != 3 || good.Sessions() != 1 {
		t.Errorf("the other peer: %+v", p)
	}
}

// TestFlood measures the memory of refused routes: PILASTER_TEST_EVPN_FLOOD of them.
func TestFlood(t *testing.T) {
	n := floodSize(t)
	peer, config := listen(t, 50)
	s := start(t, Config{Peers: []ours.Peer{config}, Limits: Limits{Routes: n + 10}, Stale: time.Hour})
	peer.WaitUp(1)
	peer.Send(announcements(t, theirs(7))...)
	wait(t, s, "with 4 records", func(s Status) bool { return records(s) == 4 })
	raw := foreign(t, n)
	before := heap()
	began := time.Now()
	if err := peer.Write(raw); err != nil {
		t.Fatal(err)
	}
	status := wait(t, s, "with all routes", func(s Status) bool { return s.Peers[0].Routes == n+3 })
	took := time.Since(began)
	after := heap()
	runtime.KeepAlive(raw)
	if p := status.Peers[0]; !p.Up || p.Refused[evpn.UnknownTarget] != n || records(status) != 4 {
		t.Errorf("after the flood: %+v", status)
	}
	each := (float64(after) - float64(before)) / float64(n)
	t.Logf("%d refused routes: %.0f bytes each, %.1f MB, in %v", n, each, float64(after-before)/1e6, took)
	if each > maxBytesPerRoute {
		t.Errorf("a refused route takes %.0f bytes, above %d", each, maxBytesPerRoute)
	}

	if err := peer.Write(foreign(t, n+20)[len(raw):]); err != nil {
		t.Fatal(err)
	}
	status = wait(t, s, "with the peer shut down", func(s Status) bool { return s.Peers[0].Excesses == 1 })
	if p := status.Peers[0]; p.Up || p.Stale != 3 || p.Routes != 3 || records(status) != 4 {
		t.Errorf("above the limit: %+v", status)
	}
	peer.WaitDown()
	excess := func() float64 { return float64(heap()) - float64(before) }
	for deadline := time.Now().Add(waitTimeout); excess() > float64(n)*maxBytesPerRoute/10; time.Sleep(waitInterval) {
		if time.Now().After(deadline) {
			t.Fatalf("after the session %.1f MB remain of %d routes", excess()/1e6, n)
		}
	}
}

// withdrawnIn returns how many routes updates withdraw.
func withdrawnIn(updates []*bgp.BGPUpdate) (n int) {
	for _, u := range updates {
		for _, a := range u.PathAttributes {
			if unreach, ok := a.(*bgp.PathAttributeMpUnreachNLRI); ok {
				n += len(unreach.Value)
			}
		}
	}
	return n
}

// Routes that are repeated and withdrawn leave nothing in GoBGP, and neither do those that this side withdraws.
func TestMemoryIsReleased(t *testing.T) {
	const n, spare = 1000, 100 // spare: bytes of a route
	peer, config := listen(t, 51)
	s := start(t, Config{Peers: []ours.Peer{config}, Limits: Limits{Routes: n + 10}})
	raw := foreign(t, n)
	peer.WaitUp(1)
	for _, test := range []struct {
		name   string
		rounds int // GoBGP's queues may keep the routes of one
		round  func(t *testing.T)
	}{
		{"withdrawn", 2, func(t *testing.T) {
			for range 3 {
				if err := peer.Write(raw); err != nil {
					t.Fatal(err)
				}
			}
			wait(t, s, "with all routes", func(s Status) bool { return s.Peers[0].Routes == n })
			for i := range n {
				peer.Send(withdrawal(t, foreignRoute(i)))
			}
			wait(t, s, "without routes", func(s Status) bool { return s.Peers[0].Routes == 0 })
		}},
		{"own", 8, func(t *testing.T) {
			containers := own()
			first := containers[0].Containers[0]
			for i := range n {
				first.MAC = foreignRoute(i).MAC
				first.Addrs = []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}
				containers[0].Containers = append(containers[0].Containers, first)
			}
			for _, all := range [][]evpn.Own{containers, own()} {
				if err := s.Announce(t.Context(), all); err != nil {
					t.Fatal(err)
				}
			}
			peer.WaitUpdates("without the containers", func(u []*bgp.BGPUpdate) bool { return withdrawnIn(u) == n })
			peer.Reset()
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.round(t) // what remains of the first round is the capacity of maps and queues
			before := heap()
			for range test.rounds {
				test.round(t)
			}
			grown := func() float64 { return (float64(heap()) - float64(before)) / float64(test.rounds*n) }
			for deadline := time.Now().Add(waitTimeout); grown() > spare; time.Sleep(waitInterval) {
				if time.Now().After(deadline) {
					t.Fatalf("%.0f bytes remain of each of %d routes", grown(), test.rounds*n)
				}
			}
		})
	}
}

// maxBytesPerRoute bounds a refused route in GoBGP's table and ours.
const maxBytesPerRoute = 4096

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func floodSize(t *testing.T) int {
	n := 2000
	if text := os.Getenv("PILASTER_TEST_EVPN_FLOOD"); text != "" {
		if _, err := fmt.Sscan(text, &n); err != nil || n < 1 {
			t.Fatalf("PILASTER_TEST_EVPN_FLOOD=%q is not a number of routes", text)
		}
	}
	return n
}
