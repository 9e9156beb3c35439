package ovs

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// TestCheck: CHECK detects a missing or changed entry, a device that is no port, and a device that is gone.
func TestCheck(t *testing.T) {
	b := newBed(t)
	b.plug(t)
	must(t, b.s.Apply(limit(t), nil, packettest.Entries()))
	own := netip.MustParseAddr("10.0.1.2")
	sender := pipeline.Sender{Port: 2, Address: own, VNI: 7, Identity: 70}
	forward := pipeline.Forward{VNI: 7, To: netip.PrefixFrom(own, 32), Port: 2}
	device := pipeline.Device{Name: "c2"}
	check := func(name string, sound bool, entries ...pipeline.Entry) {
		t.Helper()
		if err := b.s.Check(limit(t), 2, device, entries); (err == nil) != sound {
			t.Errorf("%s: %v", name, err)
		}
	}
	check("as it is", true, sender, forward)
	check("another identity", false, pipeline.Sender{Port: 2, Address: own, VNI: 7, Identity: 71})
	must(t, b.s.Apply(limit(t), []pipeline.Entry{sender}, nil))
	check("without its sender", false, sender, forward)
	check("what is left", true, forward)
	must(t, b.s.Unplug(limit(t), 2))
	check("unplugged", false, forward)
	must(t, b.s.Plug(limit(t), 2, device))
	check("plugged again", true, forward)
	h, err := b.node.Netlink()
	must(t, err)
	defer h.Close()
	l, err := h.LinkByName("c2")
	must(t, err)
	must(t, h.LinkDel(l))
	check("no device", false, forward)
}

// TestWideUplink: after SetMTU, packets as long as the MTU of a wide uplink leave by it.
func TestWideUplink(t *testing.T) {
	b := newBed(t)
	b.plug(t)
	must(t, b.s.Apply(limit(t), nil, packettest.Entries()))
	for _, ns := range []*netns.Namespace{b.node, b.beyond} {
		h, err := ns.Netlink()
		must(t, err)
		defer h.Close()
		for _, name := range []string{"eth0", "c2"} {
			l, err := h.LinkByName(name)
			must(t, err)
			must(t, h.LinkSetMTU(l, 9000))
		}
	}
	must(t, b.s.SetMTU(9000))
	ends := map[pipeline.Port]end{2: b.end(t, 2), pipeline.VXLAN: b.end(t, pipeline.VXLAN)}
	long := packet.Packet{
		Source:      netip.MustParseAddr("10.0.1.2"),
		Destination: netip.MustParseAddr("10.0.2.2"),
		Body:        packet.UDP{Payload: make([]byte, 8930-28)},
	}
	reply := packet.Packet{Source: long.Destination, Destination: long.Source, Body: long.Body}
	inner := long.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)
	b.arrives(t, ends, 2, pipeline.VXLAN, inner)
	b.arrives(
		t,
		ends,
		pipeline.VXLAN,
		2,
		encapsulate(
			pipeline.VTEP(packettest.There),
			pipeline.VTEP(packettest.Here),
			7,
			71,
			reply.Frame(pipeline.InsideMAC, pipeline.OutsideMAC),
		),
	)
}

// arrives repeats a frame until something of its length arrives: Open vSwitch learns of a changed device a little
// later.
func (b *bed) arrives(t *testing.T, ends map[pipeline.Port]end, from, to pipeline.Port, frame []byte) {
	t.Helper()
	for ctx := limit(t); ; {
		must(t, ends[from].Send(frame))
		try, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		got, err := ends[to].next(try)
		cancel()
		if err == nil && len(got) > 8900 {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("%d bytes from %v did not arrive at %v", len(frame), from, to)
		}
	}
}
