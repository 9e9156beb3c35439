package tables

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/packet"
)

// packets is how many random packets a test tries: PACKETS, by default few.
func packets(t *testing.T) int {
	text := os.Getenv("PACKETS")
	if text == "" {
		return 3000
	}
	n, err := strconv.Atoi(text)
	must(t, err)
	return n
}

// try runs a program without reading the drop counters.
func (b *bed) try(t *testing.T, p *ebpf.Program, o *ebpf.RunOptions) uint32 {
	t.Helper()
	verdict, err := p.Run(o)
	must(t, err)
	return verdict
}

// inNode runs a function on a thread in the node's namespace.
func (b *bed) inNode(t *testing.T, do func()) {
	t.Helper()
	must(t, b.ns.Do(func() error { do(); return nil }))
}

// peersAt writes mappings of random containers of both tenants at random nodes.
func (b *bed) peersAt(t *testing.T, r *rand.Rand, n int) map[netip.Addr]ila.Peer {
	t.Helper()
	all := map[netip.Addr]ila.Peer{}
	for len(all) < n {
		a := sir([]address.TenantID{green, gold}[r.IntN(2)], r.Uint32())
		if address.LastBits(a) != 0 {
			all[a] = ila.Peer{Locator: locator(2 + r.Uint64N(plan.Nodes()-2)), App: appFar}
		}
	}
	must(t, b.SetPeers(all, nil))
	return all
}

func randomBody(r *rand.Rand) packet.Body {
	payload := make([]byte, r.IntN(200))
	for i := range payload {
		payload[i] = byte(r.Uint32())
	}
	if r.IntN(4) == 0 {
		clear(payload) // sums of 0 and 0xffff are frequent
	}
	port := func() uint16 { return uint16(r.Uint32() >> r.IntN(16)) }
	switch r.IntN(4) {
	case 0:
		return packet.TCP{SourcePort: port(), DestinationPort: port(), Sequence: r.Uint32(), Payload: payload}
	case 1:
		return packet.ICMP{Type: packet.EchoRequest, Rest: packet.Echo(port(), port()), Payload: payload}
	default:
		return packet.UDP{SourcePort: port(), DestinationPort: port(), Payload: payload}
	}
}

// neutralBody is the part of a frame that a node does not change: all behind the addresses.
func neutralBody(frame []byte) []byte { return frame[14+40:] }

// TestRandomPackets: with random addresses and contents, no checksum is wrong on the fabric or at the receiver, and no
// byte behind the IPv6 header changes (issue J: 0 wrong checksums).
func TestRandomPackets(t *testing.T) {
	b := newBed(t, nil)
	container, _ := b.Programs()
	r := rand.New(rand.NewPCG(23, 1))
	peers := b.peersAt(t, r, 500)
	var to []netip.Addr
	for a := range peers {
		if id, _ := use.Split(a); id.VNID == green {
			to = append(to, a)
		}
	}
	out := &ebpf.RunOptions{DataOut: make([]byte, 2048), Context: contextOf(b.device[own])}
	b.inNode(t, func() {
		for range packets(t) {
			a := to[r.IntN(len(to))]
			p := packet.Packet{Source: own, Destination: a, Body: randomBody(r)}
			out.Data, out.DataOut = sent(p), out.DataOut[:cap(out.DataOut)]
			verdict := b.try(t, container, out)
			got, err := packet.DecodeFrame(out.DataOut)
			if verdict != verdictRedirect || err != nil || got.Source != wire(own, 1) ||
				got.Destination != use.ToWire(a, peers[a].Locator) || !packet.ChecksumOK(out.DataOut[14:]) ||
				!bytes.Equal(neutralBody(out.DataOut), neutralBody(out.Data)) {
				t.Fatalf("%+v: verdict %d, %+v, %v", p, verdict, got, err)
			}
			back := packet.Packet{Source: a, Destination: own, Body: p.Body}
			want := b.coming(back)
			frame := bytes.Clone(want)
			source, destination := use.ToWire(a, peers[a].Locator).As16(), wire(own, 1).As16()
			copy(frame[14+8:], source[:])
			copy(frame[14+24:], destination[:])
			in := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, 2048), Context: contextOf(b.uplink)}
			verdict = b.try(t, b.path.Objects.PilUplinkIn, in)
			if verdict != verdictRedirect || !bytes.Equal(in.DataOut[14:], want[14:]) ||
				!packet.ChecksumOK(in.DataOut[14:]) {
				t.Fatalf("%+v: verdict %d, % x", back, verdict, in.DataOut)
			}
		}
	})
}

// TestForgedPackets: of packets whose addresses are nearly right, exactly those are delivered that are right (issue J:
// 0 forged packets delivered).
func TestForgedPackets(t *testing.T) {
	b := newBed(t, nil)
	container, _ := b.Programs()
	r := rand.New(rand.NewPCG(23, 2))
	peers := b.peersAt(t, r, 100)
	peers[far] = ila.Peer{Locator: locator(2)}
	must(t, b.SetPeers(peers, []netip.Addr{moved, alien, gone}))
	here := []netip.Addr{own, beside, other, edge}
	valid := map[[2]netip.Addr]bool{}
	var there, locators []netip.Addr
	for a, p := range peers {
		there, locators = append(there, a), append(locators, p.Locator.Addr())
		for _, l := range here {
			if vnidOf(a) == vnidOf(l) {
				valid[[2]netip.Addr{use.ToWire(a, p.Locator), wire(l, 1)}] = true
				valid[[2]netip.Addr{l, a}] = true
			}
			for _, other := range here {
				valid[[2]netip.Addr{l, other}] = vnidOf(l) == vnidOf(other)
			}
		}
	}
	pick := func(of []netip.Addr) netip.Addr { return of[r.IntN(len(of))] }
	// twist returns an address that is right or has one fault.
	twist := func(sirAddress netip.Addr, at netip.Prefix) netip.Addr {
		a := use.ToWire(sirAddress, at)
		switch r.IntN(8) {
		case 0:
			b := a.As16()
			b[r.IntN(16)] ^= 1 << r.IntN(8)
			return netip.AddrFrom16(b)
		case 1:
			return withPrefix(a, pick(locators))
		case 2:
			return use.ToWire(sirAddress, netip.PrefixFrom(pick(locators), address.NodeBits))
		case 3:
			return sirAddress
		case 4:
			return withPrefix(sirAddress, at.Addr())
		}
		return a
	}
	delivered, forged := 0, 0
	count := func(verdict uint32, right bool, from, to netip.Addr) {
		if (verdict == verdictRedirect) != right {
			t.Fatalf("from %v to %v: verdict %d, valid: %v", from, to, verdict, right)
		}
		if right {
			delivered++
		} else {
			forged++
		}
	}
	b.inNode(t, func() {
		for forged < packets(t) {
			source := pick(there)
			from, to := twist(source, peers[source].Locator), twist(pick(here), locator(1))
			in := &ebpf.RunOptions{
				Data:    b.coming(packet.Packet{Source: from, Destination: to, Body: gram}),
				Context: contextOf(b.uplink),
			}
			verdict := b.try(t, b.path.Objects.PilUplinkIn, in)
			count(verdict, valid[[2]netip.Addr{from, to}], from, to)

			sender, from, to := pick(here), pick(here), pick(append(there, here...))
			if r.IntN(4) == 0 {
				from = twist(from, locator(1))
			}
			if r.IntN(4) == 0 {
				to = twist(to, locator(2))
			}
			out := &ebpf.RunOptions{
				Data:    sent(packet.Packet{Source: from, Destination: to, Body: gram}),
				Context: contextOf(b.device[sender]),
			}
			verdict = b.try(t, container, out)
			count(verdict, from == sender && valid[[2]netip.Addr{from, to}], from, to)
		}
	})
	if delivered < forged/100 {
		t.Errorf("%d of %d packets were right", delivered, delivered+forged)
	}
	t.Logf("%d forged packets, %d right ones", forged, delivered)
}

func vnidOf(a netip.Addr) address.TenantID {
	id, _ := use.Split(a)
	return id.VNID
}
