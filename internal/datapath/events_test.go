package datapath

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/packet"
)

// eventBurst is of bpf/common/event.h.
const eventBurst = 32

// eventBench drops packets for one reason, on one CPU, and reads the events of these drops.
type eventBench struct {
	*progBench
	ring *ringbuf.Reader
}

func newEventBench(t *testing.T) eventBench {
	b := newProgBench(t)
	keepOrder(t)
	ring, err := ringbuf.NewReader(b.datapath.Objects.PilEventsV2)
	must(t, err)
	t.Cleanup(func() { ring.Close() })
	return eventBench{b, ring}
}

// drop makes the programs drop n packets of no endpoint at once.
func (b eventBench) drop(t *testing.T, n int, body packet.Body) {
	t.Helper()
	frame := b.frame(packet.Packet{Source: b.far.underlay, Destination: b.b1.seen(), Body: body})
	verdict, err := b.datapath.Objects.PilContainer.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(n)})
	if must(t, err); verdict != verdictDrop {
		t.Fatalf("verdict %d, not a drop", verdict)
	}
}

// state returns the program's event state for the reason. No other drops change it.
func (b eventBench) state(t *testing.T) (sum bpfobj.PilasterDropState) {
	t.Helper()
	var all []bpfobj.PilasterDropState
	must(t, b.datapath.Objects.PilDropsV1.Lookup(uint32(dropreason.SrcNotOwn), &all))
	for _, s := range all {
		sum.Packets, sum.Pending, sum.Lost = sum.Packets+s.Packets, sum.Pending+s.Pending, sum.Lost+s.Lost
	}
	return sum
}

// later waits for the time that events are delayed.
func (b eventBench) later(t *testing.T) {
	t.Helper()
	var all []bpfobj.PilasterDropState
	must(t, b.datapath.Objects.PilDropsV1.Lookup(uint32(dropreason.SrcNotOwn), &all))
	for i := range all {
		all[i].Pace = 0
	}
	must(t, b.datapath.Objects.PilDropsV1.Put(uint32(dropreason.SrcNotOwn), all))
}

// events returns the unread events.
func (b eventBench) events(t *testing.T) (all []dpapi.Event) {
	t.Helper()
	for b.ring.AvailableBytes() > 0 {
		record, err := b.ring.Read()
		must(t, err)
		e, err := b.datapath.decodeEvent(record.RawSample)
		if must(t, err); e.Reason == "src-not-own" {
			all = append(all, e)
		}
	}
	return all
}

// TestEventsAddUp: each drop is counted; a flood of drops makes few events, each with the number of its drops.
func TestEventsAddUp(t *testing.T) {
	b := newEventBench(t)
	const flood = 2000
	b.drop(t, flood, gram)
	s, events := b.state(t), b.events(t)
	if s.Packets != flood {
		t.Errorf("counters: %d of %d drops", s.Packets, flood)
	}
	if len(events) < eventBurst || len(events) >= flood/2 {
		t.Errorf("pace: %d events of a flood", len(events))
	}
	b.later(t)
	b.drop(t, 1, gram)
	told := uint64(0)
	for _, e := range append(events, b.events(t)...) {
		told += e.Count
	}
	if s := b.state(t); told != flood+1 || s.Pending != 0 {
		t.Errorf("sum: the events stand for %d of %d drops, %d pending", told, flood+1, s.Pending)
	}
}

// TestEventsAreLost: without a reader, events are lost and counted; the next event has the number of lost events.
func TestEventsAreLost(t *testing.T) {
	b := newEventBench(t)
	sent := uint64(0)
	for b.state(t).Lost == 0 {
		if sent > 100000 {
			t.Fatal("lost: nothing, of a ring without a reader")
		}
		b.drop(t, eventBurst, gram)
		b.later(t)
		sent += eventBurst
	}
	told, lost := uint64(0), b.state(t).Lost
	before := b.events(t)
	b.drop(t, 1, gram)
	last := b.events(t)
	for _, e := range append(before, last...) {
		told += e.Count
	}
	if told != sent+1 {
		t.Errorf("sum: the events stand for %d of %d drops", told, sent+1)
	}
	if len(last) != 1 || last[0].Lost != lost {
		t.Errorf("lost: %d events, and they say %+v", lost, last)
	}
}

// TestEventsSayWhich: an event has the packet's ports if the packet had any, and no data of the event before.
func TestEventsSayWhich(t *testing.T) {
	b := newEventBench(t)
	for _, c := range []struct {
		name     string
		body     packet.Body
		from, to uint16
	}{
		{"TCP", segment, 1000, 80},
		{"UDP", gram, 1000, 53},
		{"ICMPv6", echo, 0, 0},
	} {
		b.drop(t, 1, c.body)
		events := b.events(t)
		if len(events) != 1 || events[0].SourcePort != c.from || events[0].DestinationPort != c.to ||
			events[0].Source != b.far.underlay ||
			events[0].Destination != b.b1.seen() {
			t.Errorf("%s: %+v", c.name, events)
		}
	}
}

// TestEventsOfIPv4: events of IPv4 packets have the same fields, also of short packets; those of later fragments have
// no ports.
func TestEventsOfIPv4(t *testing.T) {
	b := newEventBench(t)
	from, to := netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("192.0.2.4")
	empty := packet.Packet{Source: from, Destination: to, Body: packet.UDP{SourcePort: 1000, DestinationPort: 53}}
	of := func(body packet.Body, change func(header []byte)) []byte {
		p := empty
		p.Body = body
		frame := p.Frame(host.ContainerMAC, host.GatewayMAC)
		change(frame[14:])
		return frame
	}
	same := func([]byte) {}
	for _, c := range []struct {
		name     string
		frame    []byte
		from, to uint16
	}{
		{"TCP of IPv4", of(segment, same), 1000, 80},
		{"a short one", of(empty.Body, same), 1000, 53},
		{"ICMP of IPv4", of(packet.ICMP{Type: packet.EchoRequest4, Payload: make([]byte, 30)}, same), 0, 0},
		{"a later fragment of IPv4", of(gram, func(h []byte) { h[7] = 1 }), 0, 0},
		{"a first fragment of IPv4", of(gram, func(h []byte) { h[6] = 0x20 }), 1000, 53},
		{"options of IPv4", of(packet.Raw{Proto: packet.ProtocolUDP, Data: []byte{1, 1, 1, 1, 1000 >> 8, 1000 & 0xff,
			0, 53, 0, 8, 0, 0}}, func(h []byte) { h[0] = 0x46 }), 1000, 53},
	} {
		if verdict, _, _ := b.run(t, b.datapath.Objects.PilContainer, c.frame,
			skb{Ifindex: b.b1.ifindex()}); verdict != verdictDrop {
			t.Fatalf("%s: verdict %d, not a drop", c.name, verdict)
		}
		e := b.next(t, dropreason.NotIp6)
		if e.Source != from || e.Destination != to || e.Protocol != c.frame[14+9] || e.SourcePort != c.from ||
			e.DestinationPort != c.to ||
			e.Length != len(c.frame)-14 {
			t.Errorf("%s: %+v", c.name, e)
		}
	}
}

// next returns the next event of a reason. It skips other events, because containers' kernels may send packets, too.
func (b eventBench) next(t *testing.T, why dropreason.Reason) (e dpapi.Event) {
	t.Helper()
	for e.Reason != why.String() {
		record, err := b.ring.Read()
		must(t, err)
		e, err = b.datapath.decodeEvent(record.RawSample)
		must(t, err)
	}
	return e
}

// TestEventsOfOtherFrames: bytes of ARP, or of what is only called IPv4, are not shown as addresses.
func TestEventsOfOtherFrames(t *testing.T) {
	b := newEventBench(t)
	looksLikeIt := b.frame(packet.Packet{Source: b.b1.seen(), Destination: b.b2.seen(), Body: gram})
	for name, frame := range map[string][]byte{
		"ARP":    packet.Frame(host.ContainerMAC, host.GatewayMAC, 0x0806, looksLikeIt[14:]),
		"IPv4":   packet.Frame(host.ContainerMAC, host.GatewayMAC, packet.EtherTypeIPv4, looksLikeIt[14:]),
		"tagged": tag(looksLikeIt),
	} {
		if verdict, _, _ := b.run(t, b.datapath.Objects.PilContainer, frame,
			skb{Ifindex: b.b1.ifindex()}); verdict != verdictDrop {
			t.Fatalf("%s: verdict %d, not a drop", name, verdict)
		}
		e := b.next(t, dropreason.NotIp6)
		if e.Source.IsValid() || e.Destination.IsValid() || e.Protocol != 0 || e.DestinationPort != 0 ||
			e.Length != len(frame)-14 {
			t.Errorf("%s: %+v", name, e)
		}
	}
}
