package datapath

import (
	"net"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// TestFrontendsMoved: packets reach a container that has moved from or to a backend, whatever node does not know that
// yet (NZ12).
func TestFrontendsMoved(t *testing.T) {
	w := newFrontWire(t)
	moved := w.nodes[ofSender].addOverlay(t, w.switches[ofSender], ofBackend+1, 7, 9)
	hot, near := w.add(t, ofBackend, 2), w.add(t, ofFront1, 2)
	for i, n := range w.nodes {
		n.rules(t, i == ofBackend)
	}
	w.offload(t, true, moved, hot)
	tell := func(node int, c *testContainer, to int, offload uint32, relays bool) {
		t.Helper()
		var all []pipeline.Entry
		for _, a := range c.record.Attachments {
			all = append(all, pipeline.Forward{
				VNI: 7, To: netip.PrefixFrom(a.Address, a.Address.BitLen()), Port: pipeline.VXLAN,
				VTEP: pipeline.VTEP(w.nodes[to].prefix), Offload: offload, Relays: relays,
			})
		}
		must(t, w.switches[node].Apply(t.Context(), nil, all))
	}
	reach := func(when string, from, to *testContainer) {
		t.Helper()
		for family := range 2 {
			from, to := from.of(family), to.of(family)
			mustReach(t, from, to, when)
			for range 4 { // some by each frontend
				if !connects(t, from, to, 80) {
					t.Errorf("%s: port 80 of %v is closed", when, to.seen())
				}
			}
			if connects(t, from, to, 81) {
				t.Errorf("%s: port 81 of %v is open", when, to.seen())
			}
		}
	}
	tell(ofBackend, moved, ofSender, 0, true)
	reach("only the backend knows", near, moved)
	for family := range 2 {
		transfer(t, near.of(family), moved.of(family), 4<<20) // in segments
		datagram(t, near.of(family), moved.of(family), 20000)
	}
	tell(ofFront2, moved, ofSender, 0, true)
	reach("one frontend knows", near, moved)
	tell(ofFront1, moved, ofSender, 0, true)
	reach("all know", near, moved)

	// To the backend: the sender's node has had the container, and one frontend does not know yet that it has moved.
	far := w.add(t, ofSender, 3)
	tell(ofSender, hot, ofBackend, frontOffload, true)
	tell(ofFront2, hot, ofSender, 0, true)
	reach("to the backend", near, hot)
	reach("to the backend", far, hot)

	fronted := func(offload uint32, nodes ...int) {
		t.Helper()
		var all []pipeline.Entry
		for _, a := range hot.record.Attachments {
			all = append(all, pipeline.Fronted{VNI: 7, Address: a.Address, Offload: offload, App: 1})
		}
		for _, i := range nodes {
			must(t, w.switches[i].Apply(t.Context(), nil, all))
		}
	}
	tell(ofFront2, hot, ofBackend, frontOffload, true)
	fronted(frontOffload+1, ofFront1, ofFront2)
	reach("of another offload", far, hot)

	// Nodes that disagree pass a packet on twice, then one drops it.
	tell(ofSender, hot, ofFront2, 0, false)
	tell(ofBackend, hot, ofFront2, 0, true)
	circulates := func(when string, messages uint64, at int) {
		t.Helper()
		for family := range 2 {
			from, to := far.of(family), hot.of(family)
			before, sent := w.nodes[at].drops(t), w.sent(t, ofFront2)
			must(t, from.ns.Do(func() error {
				conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.seen(), 80)))
				if err != nil {
					return err
				}
				defer conn.Close()
				_, err = conn.Write([]byte("once"))
				return err
			}))
			w.nodes[at].dropped(t, when, before, dropreason.NoRoute)
			if n := w.sent(t, ofFront2)[1] - sent[1]; n != messages {
				t.Errorf("%s: %d messages with pre-actions, want %d", when, n, messages)
			}
		}
	}
	circulates("backend and frontend return it as it is", 0, ofFront2)
	fronted(frontOffload, ofFront2)
	circulates("the frontend returns it with pre-actions", 3, ofBackend)
}
