package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// TestNimitzAnswers: a container gets an error from its next hop for a packet that cannot go to another node
// (RFC 4443, RFC 1812 §4.3.2).
func TestNimitzAnswers(t *testing.T) {
	b := newNimitzBench(t)
	const narrow = 1400
	for _, w := range []struct {
		family                    string
		own, far, beside, gate    netip.Addr
		header, quote             int // bytes
		tooBig, exceeded, unreach packet.ICMP
		mtu                       int // where an error has it
		icmp                      uint8
	}{
		{"IPv4", own4, far4, beside4, netip.MustParseAddr("169.254.1.1"), 28, 576 - 28,
			packet.ICMP{Type: packet.Unreachable4, Code: packet.FragmentationNeeded},
			packet.ICMP{Type: packet.TimeExceeded4}, packet.ICMP{Type: packet.Unreachable4}, 2, 1},
		{"IPv6", own6, far6, netip.MustParseAddr("fd10:0:0:1::4"), netip.MustParseAddr("fe80::1"), 48, 1280 - 48,
			packet.ICMP{Type: packet.PacketTooBig}, packet.ICMP{Type: packet.TimeExceeded},
			packet.ICMP{Type: packet.DestinationUnreachable}, 2, packet.ProtocolICMPv6},
	} {
		gram := func(bytes, hops int) packet.Packet {
			return packet.Packet{
				Source:      w.own,
				Destination: w.far,
				HopLimit:    uint8(hops),
				Body:        packet.UDP{SourcePort: 7, DestinationPort: 7, Payload: make([]byte, bytes-w.header)},
			}
		}
		// The expected ICMP error about a packet.
		told := func(e packet.ICMP, mtu int, about packet.Packet) packet.Packet {
			quoted := about.Marshal()
			e.Payload = quoted[:min(len(quoted), w.quote)]
			binary.BigEndian.PutUint16(e.Rest[w.mtu:], uint16(mtu))
			return packet.Packet{Source: w.gate, Destination: w.own, Body: e}
		}
		// silent checks that the container received no error: the next packet to arrive is one that silent sends.
		silent := func(name string) {
			next := packet.Packet{Source: w.beside, Destination: w.own, Body: packet.UDP{Payload: []byte(name)}}
			must(t, b.inject[4].Send(next.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)))
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			got, err := b.captures[2].Next(ctx)
			if want := next.Frame(pipeline.InsideMAC, pipeline.OutsideMAC); err != nil ||
				!bytes.Equal(got.Frame, want) {
				t.Errorf("%s: the next packet is %x, %v", name, got.Frame, err)
			}
		}
		unreachable := w.unreach
		unreachable.Payload = packet.Packet{Source: w.far, Destination: w.own, Body: packet.UDP{}}.Marshal()
		for _, c := range []struct {
			name   string
			mtu    int // of what leaves by the uplink
			sent   packet.Packet
			why    dropreason.Reason
			answer packet.Packet // none where it has no source
		}{
			{"out of hops", 1500, gram(100, 1), dropreason.HopLimit, told(w.exceeded, 0, gram(100, 1))},
			{"a long one out of hops", 1500, gram(1430, 1), dropreason.HopLimit, told(w.exceeded, 0, gram(1430, 1))},
			{"a later fragment out of hops", 1500, packet.Packet{Source: w.own, Destination: w.far, HopLimit: 1,
				Body:       packet.Raw{Proto: w.icmp, Data: make([]byte, 64)},
				Extensions: []packet.Extension{packet.Fragment(64, false, 9)}}, dropreason.HopLimit, packet.Packet{}},
			{"an error out of hops", 1500, packet.Packet{Source: w.own, Destination: w.far, HopLimit: 1,
				Body: unreachable}, dropreason.HopLimit, packet.Packet{}},
			{"longer than a tunnel takes", 1500, gram(1431, 64), dropreason.TooBig, told(w.tooBig, 1430,
				gram(1431, 64))},
			{"longer than a narrow one takes", narrow, gram(narrow-70+1, 64), dropreason.TooBig, told(w.tooBig,
				narrow-70, gram(narrow-70+1, 64))},
		} {
			must(t, b.nimitz.SetMTU(c.mtu))
			before := b.drops(t)
			must(t, b.inject[2].Send(c.sent.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)))
			b.dropped(t, c.name+", "+w.family, before, c.why)
			if c.answer.Source.IsValid() {
				want := packettest.Result{Frame: c.answer.Frame(b.records[0].Device.ContainerMAC, pipeline.OutsideMAC)}
				want.To = 2
				b.leaves(t, c.name+", "+w.family, b.drops(t), want)
				continue
			}
			silent(c.name + ", " + w.family)
		}
		must(t, b.nimitz.SetMTU(narrow))
		last := gram(narrow-70, 64)
		before := b.drops(t)
		must(t, b.inject[2].Send(last.Frame(pipeline.OutsideMAC, pipeline.InsideMAC)))
		last.HopLimit--
		want := packettest.Result{Frame: last.Frame(pipeline.InsideMAC, pipeline.OutsideMAC)}
		want.To, want.VTEP, want.VNI, want.Identity = pipeline.VXLAN, pipeline.VTEP(packettest.There), 7, 70
		b.leaves(t, "as long as may be, "+w.family, before, want)
		must(t, b.nimitz.SetMTU(1500))

		var tunnels uint32
		swap := func(v *bpfobj.PilasterNimitzNode) { v.Vxlan, tunnels = tunnels, v.Vxlan }
		tunnels = 1 << 30
		must(t, b.datapath.SetTunnelNode(swap))
		before = b.drops(t)
		must(t, b.inject[2].Send(gram(100, 1).Frame(pipeline.OutsideMAC, pipeline.InsideMAC)))
		b.dropped(t, "without the tunnels' device, "+w.family, before, dropreason.NoRoute)
		silent("without the tunnels' device, " + w.family)
		must(t, b.datapath.SetTunnelNode(swap))
	}
}

// TestNimitzNarrowUplink: if the uplink's MTU falls below that of containers, their connections continue, in both
// families.
func TestNimitzNarrowUplink(t *testing.T) {
	w := newNimitzWire(t)
	near, far := w.add(t, 1, 7, 2), w.add(t, 2, 7, 2)
	for i, n := range w.nodes {
		h, err := n.ns.Netlink()
		must(t, err)
		defer h.Close()
		eth0, err := h.LinkByName("eth0")
		must(t, err)
		must(t, h.LinkSetMTU(eth0, 1400))
		mtu, err := n.datapath.MTU()
		must(t, err)
		must(t, w.switches[i].SetMTU(mtu))
		tunnel, err := h.LinkByName(hook.TunnelDevice)
		must(t, err)
		if got := tunnel.Attrs().MTU; got != 1400-pipeline.Overhead {
			t.Errorf("the tunnels' device has an MTU of %d", got)
		}
	}
	for family := range 2 {
		transfer(t, near.of(family), far.of(family), 4<<20)
		transfer(t, far.of(family), near.of(family), 4<<20)
		datagram(t, near.of(family), far.of(family), 1400)
	}
	if got := w.nodes[0].counted(t, nil); got[dropreason.TooBig.String()] == 0 {
		t.Errorf("nothing was too long: %v", got)
	}
}

// TestNimitzCheck: CHECK detects a missing or changed entry, and a device that is no port.
func TestNimitzCheck(t *testing.T) {
	b := newNimitzBench(t)
	device := func() pipeline.Device {
		l, err := b.datapath.Netlink.LinkByIndex(int(b.nimitz.ports[2]))
		must(t, err)
		return pipeline.Device{Name: l.Attrs().Name}
	}()
	forward := pipeline.Forward{VNI: 7, To: netip.PrefixFrom(own4, 32), Port: 2}
	sender := pipeline.Sender{Port: 2, Address: own4, VNI: 7, Identity: 70}
	check := func(name string, sound bool, entries ...pipeline.Entry) {
		t.Helper()
		if err := b.nimitz.Check(t.Context(), 2, device, entries); (err == nil) != sound {
			t.Errorf("%s: %v", name, err)
		}
	}
	check("as it is", true, forward, sender)
	check("another identity", false, forward, pipeline.Sender{Port: 2, Address: own4, VNI: 7, Identity: 71})
	check("a prefix that lies in one", false, pipeline.Forward{VNI: 7, To: netip.MustParsePrefix("10.0.7.7/32")})
	must(t, b.nimitz.Apply(t.Context(), []pipeline.Entry{sender}, nil))
	check("without its sender", false, forward, sender)
	check("what is left", true, forward)
	must(t, b.datapath.Objects.PilPortsV1.Delete(b.nimitz.ports[2]))
	check("no port", false, forward)
	must(t, b.nimitz.Plug(t.Context(), 2, device))
	check("plugged again", true, forward)
	l, err := b.datapath.Netlink.LinkByName(device.Name)
	must(t, err)
	must(t, b.datapath.Netlink.LinkDel(l))
	if _, err := b.datapath.Netlink.LinkByName(device.Name); err == nil {
		t.Fatal("the device stays")
	}
	check("no device", false, forward)
}
