package nic

import (
	"errors"
	"math"
	"net/netip"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// steady is a megaflow with a packet every 10 µs.
func steady(_ Handle, from, to time.Duration) uint64 {
	return uint64((to - from) / (10 * time.Microsecond))
}

// filled returns a NIC with n entries.
func filled(t testing.TB, s Spec, n int) *Model {
	t.Helper()
	m := NewModel(s, steady)
	for h := range n {
		if _, err := m.Install(0, Handle(h), Megaflow{}); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// TestRemoval covers NIMITZ §4.1 (NM8): the removal of 2,000 entries takes 28 times as long if the NIC has 50,000
// entries as if it has only these 2,000.
func TestRemoval(t *testing.T) {
	m := filled(t, Production(), 50_000)
	var batches []time.Duration
	for n := 50_000; n > 0; {
		var batch time.Duration
		for range 2000 {
			n--
			took, err := m.Remove(0, Handle(n))
			if err != nil {
				t.Fatal(err)
			}
			batch += took
		}
		if len(batches) > 0 && batch >= batches[len(batches)-1] {
			t.Errorf("with %d entries left a batch takes %v, want less than the previous batch's %v",
				n, batch, batches[len(batches)-1])
		}
		batches = append(batches, batch)
	}
	if ratio := batches[0].Seconds() / batches[len(batches)-1].Seconds(); ratio < 27.5 || ratio > 28.5 {
		t.Errorf("the first batch takes %.1f times as long as the last", ratio)
	}
	if m.Len() != 0 {
		t.Errorf("got %d entries left, want none", m.Len())
	}
}

// TestCounters: a new entry shows zero for one to two seconds, and no counter is later than two seconds (§4.2).
func TestCounters(t *testing.T) {
	for _, delay := range []time.Duration{0, 2 * time.Second} {
		for _, begin := range []time.Duration{0, 300 * time.Millisecond, 999 * time.Millisecond, 4 * time.Second} {
			s := Production()
			s.CounterDelay = delay
			m := NewModel(s, steady)
			took, err := m.Install(begin, 7, Megaflow{})
			if err != nil {
				t.Fatal(err)
			}
			since, first := begin+took, time.Duration(-1)
			if c, _ := m.Dump(since - 1); len(c) != 0 || m.Holds(since-1, 7) {
				t.Errorf("an entry forwards before the channel has processed it")
			}
			for at := since; at < since+6*time.Second; at += time.Millisecond {
				c, _ := m.Dump(at)
				if len(c) != 1 || c[0].Handle != 7 || !m.Holds(at, 7) {
					t.Fatalf("unexpected dump at %v: %v", at, c)
				}
				if c[0].Packets > 0 && first < 0 {
					first = at - since
				}
				if least := steady(7, since, max(since, at-delay)); c[0].Packets < least {
					t.Fatalf("at %v the counter is %d; %v earlier there were %d packets",
						at, c[0].Packets, delay, least)
				}
			}
			if first < delay/2 || first > delay+time.Millisecond {
				t.Errorf("delay %v, installed at %v: first count after %v", delay, begin, first)
			}
		}
	}
}

// TestRoom: the NIC rejects entries beyond its capacity, duplicate entries, and removals of unknown entries.
func TestRoom(t *testing.T) {
	s := Production()
	s.Capacity = 3
	m := filled(t, s, 3)
	if _, err := m.Install(0, 9, Megaflow{}); !errors.Is(err, ErrFull) || m.Len() != 3 {
		t.Errorf("a fourth entry in a NIC for three: got error %v, %d entries", err, m.Len())
	}
	if _, err := m.Install(0, 1, Megaflow{}); err == nil || errors.Is(err, ErrFull) {
		t.Errorf("a duplicate entry: got error %v", err)
	}
	if _, err := m.Remove(0, 9); err == nil {
		t.Error("the removal of an unknown entry succeeded")
	}
	if _, err := m.Remove(0, 0); err != nil {
		t.Error(err)
	}
	for h, held := range []bool{false, true, true} {
		if m.Holds(time.Second, Handle(h)) != held {
			t.Errorf("entry %d: want Holds = %v", h, held)
		}
	}
}

// TestFlowGroups: each flow group beyond FreeGroups reduces the speed of all offloaded traffic (§4.2).
func TestFlowGroups(t *testing.T) {
	s := Production()
	free := s.FreeGroups * s.GroupSize
	for n, want := range map[int]float64{0: 1, 1000: 1, free: 1, free +
		1: float64(s.FreeGroups) / float64(s.FreeGroups+1), 2 * free: 0.5} {
		s.Capacity = 2 * free
		if got := filled(t, s, n).Speed(); math.Abs(got-want) > 1e-9 {
			t.Errorf("%d entries: %.3f of the line rate, want %.3f", n, got, want)
		}
	}
}

// TestGrouping: a megaflow matches the same destinations as the pipeline's forwarding entry. So containers of one node
// share a megaflow if the node has a CIDR; otherwise each container has its own.
func TestGrouping(t *testing.T) {
	node := pipeline.VTEP(netip.MustParsePrefix("fd70:696c:6100:2::/64"))
	entries := []pipeline.Entry{
		pipeline.Sender{Port: 2, Address: netip.MustParseAddr("10.0.0.1"), VNI: 7},
		pipeline.NorthSouth{VNI: 7, To: netip.MustParsePrefix("192.0.2.0/24")},
		pipeline.SNAT{VNI: 7, Real: netip.MustParseAddr("10.0.0.1"), Virtual: netip.MustParseAddr("203.0.113.1")},
		pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.0.0/16")},
		pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.1.0/29"), Port: pipeline.VXLAN, VTEP: node},
		pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.2.1/32"), Port: pipeline.VXLAN, VTEP: node},
		pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.2.2/32"), Port: pipeline.VXLAN, VTEP: node},
		pipeline.Forward{VNI: pipeline.Any, To: netip.MustParsePrefix("192.0.2.0/24"), Port: pipeline.Gateway},
		pipeline.Forward{VNI: pipeline.Any, To: netip.MustParsePrefix("10.0.0.0/8"), Port: pipeline.Gateway},
		pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("fd00:2::/64"), Port: pipeline.VXLAN, VTEP: node},
	}
	table, judge := NewTable(entries), pipeline.Table{Entries: entries}
	if table.Entries != len(entries) {
		t.Errorf("%d entries", table.Entries)
	}
	found := map[netip.Addr]Handle{}
	for _, to := range []string{"10.0.1.1", "10.0.1.2", "10.0.2.1", "10.0.2.2", "10.0.9.9", "192.0.2.9",
		"198.51.100.1", "fd00:2::1"} {
		dst := netip.MustParseAddr(to)
		verdict, met := judge.Run(pipeline.Packet{From: 2, Src: netip.MustParseAddr("10.0.0.1"), Dst: dst})
		h, ok := table.Lookup(7, dst)
		if ok != (verdict.Drop == 0) {
			t.Errorf("%s: found %v, but the pipeline's verdict is %v", to, ok, verdict)
		}
		if f := (pipeline.Forward{}); ok {
			if f = met[len(met)-1].(pipeline.Forward); table.flows[h] != (Megaflow{f.VNI, f.To}) {
				t.Errorf("%s: got megaflow %v, but the pipeline matched %v", to, table.flows[h], f)
			}
			found[dst] = h
		}
	}
	a := netip.MustParseAddr
	if found[a("10.0.1.1")] != found[a("10.0.1.2")] || found[a("10.0.2.1")] == found[a("10.0.2.2")] || len(found) != 6 {
		t.Errorf("got megaflows %v", found)
	}
	if _, ok := table.Lookup(8, a("fd00:2::1")); ok {
		t.Error("two tenants share a megaflow")
	}
}
