package tables

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

var (
	unknown, unknown6     = netip.MustParseAddr("10.0.9.9"), netip.MustParseAddr("fd12::ab:cdef")
	noAddress, noAddress6 = netip.IPv4Unspecified(), netip.IPv6Unspecified()
	allNodes              = netip.MustParseAddr("ff02::1")
	everybody             = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	noMAC                 = make(net.HardwareAddr, 6)
	liedMAC               = net.HardwareAddr{2, 9, 9, 9, 9, 9}
)

// multicastMAC is the MAC of an IPv6 group (RFC 2464 §7).
func multicastMAC(group netip.Addr) net.HardwareAddr {
	a := group.As16()
	return append(net.HardwareAddr{0x33, 0x33}, a[12:]...)
}

// arp builds a frame (RFC 826).
func arp(to, from net.HardwareAddr, operation uint16, sha net.HardwareAddr, spa netip.Addr, tha net.HardwareAddr,
	tpa netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4}
	b = binary.BigEndian.AppendUint16(b, operation)
	b = slices.Concat(b, sha, spa.AsSlice(), tha, tpa.AsSlice())
	return packet.Frame(to, from, packet.EtherTypeARP, b)
}

// who asks by ARP.
func who(mac net.HardwareAddr, asker, target netip.Addr) []byte {
	return arp(everybody, mac, 1, mac, asker, noMAC, target)
}

// at answers by ARP.
func at(to net.HardwareAddr, asker netip.Addr, mac net.HardwareAddr, target netip.Addr) []byte {
	return arp(to, mac, 2, mac, target, to, asker)
}

// nd builds a message of neighbour discovery (RFC 4861 §4.3, §4.4) with one option.
func nd(to, from net.HardwareAddr, src, dst netip.Addr, kind, flags uint8, target netip.Addr, option uint8,
	mac net.HardwareAddr) []byte {
	body := packet.ICMP{
		Type: kind, Rest: [4]byte{flags}, Payload: slices.Concat(target.AsSlice(), []byte{option, 1}, mac),
	}
	return packet.Packet{Source: src, Destination: dst, HopLimit: 255, Body: body}.Frame(to, from)
}

// who6 asks by neighbour discovery.
func who6(mac net.HardwareAddr, asker, target netip.Addr) []byte {
	a := target.As16()
	group := netip.AddrFrom16([16]byte{0: 0xff, 1: 2, 11: 1, 12: 0xff, 13: a[13], 14: a[14], 15: a[15]})
	return nd(multicastMAC(group), mac, asker, group, packet.NeighborSolicitation, 0, target, 1, mac)
}

// at6 answers by neighbour discovery.
func at6(to net.HardwareAddr, asker netip.Addr, mac net.HardwareAddr, target netip.Addr) []byte {
	return nd(to, mac, target, asker, packet.NeighborAdvertisement, 0x60, target, 2, mac)
}

func damaged(frame []byte, at int, to byte) []byte {
	frame = bytes.Clone(frame)
	frame[at] = to
	return frame
}

// message is a frame of the container, or of a tunnel if outer is set, and what becomes of it.
type message struct {
	name   string
	outer  outer
	frame  []byte
	answer []byte  // where the frame came from
	to     []byte  // at the container, of a frame from a tunnel
	copies []outer // that leave, with the frame replica
	copied []byte
	reason string
	sum    bool // of the container: a device is to compute a checksum, and to write it into the sender's address
}

func messages() []message {
	segmentOf := func(vtep netip.Addr) outer { return outer{vtep, ownVTEP, segment, 0} }
	other := segmentOf(otherVTEP)
	both := []outer{{ownVTEP, otherVTEP, segment, 0}, {ownVTEP, silentVTEP, segment, 0}}
	gateway, gateway6 := netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")
	mac, router := ownMAC, host.GatewayMAC
	return []message{
		{name: "for the gateway", frame: who(mac, own, gateway), answer: at(mac, own, router, gateway)},
		{name: "for the gateway, IPv6", frame: who6(mac, own6, gateway6), answer: at6(mac, own6, router, gateway6)},
		{name: "for a container here", frame: who(mac, own, beside), answer: at(mac, own, besideMAC, beside)},
		{name: "for one on another node", frame: who(mac, own, far), answer: at(mac, own, router, far)},
		{name: "for one on another node, IPv6", frame: who6(mac, own6, far6), answer: at6(mac, own6, router, far6)},
		{name: "for a host in the segment", frame: who(mac, own, switched), answer: at(mac, own, hostMAC, switched)},
		{name: "for a host in the segment, IPv6", frame: who6(mac, own6, switched6),
			answer: at6(mac, own6, hostMAC, switched6)},
		{name: "for one behind a router", frame: who(mac, own, beyond), answer: at(mac, own, router, beyond)},
		{name: "for an unknown address", frame: who(mac, own, unknown), copies: both, copied: who(mac, own, unknown)},
		{name: "for an unknown address, IPv6", frame: who6(mac, own6, unknown6), copies: both,
			copied: who6(mac, own6, unknown6)},
		{name: "with another MAC", frame: who(liedMAC, own, unknown), copies: both, copied: who(mac, own, unknown)},
		{name: "with more bytes", frame: append(who(mac, own, unknown), "secret"...), copies: both,
			copied: who(mac, own, unknown)},
		{name: "outside of the subnets", frame: who(mac, own, netip.MustParseAddr("10.7.0.1")),
			reason: "not-replicated"},
		{name: "with another source", frame: who(mac, far, unknown), reason: "src-not-own"},
		{name: "with another source, IPv6", frame: who6(mac, far6, unknown6), reason: "src-not-own"},
		{name: "without a source", frame: who(mac, noAddress, own), reason: "not-replicated"},
		{name: "in a VLAN", frame: slices.Insert(who(mac, own, far), 12, 0x81, 0, 0, 5), reason: "not-replicated"},
		{name: "with a pending checksum", frame: who(mac, own, far), sum: true, reason: "not-replicated"},
		{name: "about itself", frame: who(mac, own, own), reason: "not-replicated"},
		{name: "an answer", frame: at(router, gateway, mac, own), reason: "not-replicated"},
		{name: "an answer, IPv6", frame: at6(router, far6, mac, own6), reason: "nd-forbidden"},
		{name: "of another hardware", frame: damaged(who(mac, own, far), 15, 6), reason: "not-replicated"},
		{name: "of another protocol", frame: damaged(who(mac, own, far), 16, 0x86), reason: "not-replicated"},
		{name: "a broadcast", frame: packet.Packet{Source: own, Destination: netip.MustParseAddr("255.255.255.255"),
			Body: gram}.Frame(everybody, mac), reason: "not-replicated"},
		{name: "a multicast, IPv6", frame: packet.Packet{Source: own6, Destination: allNodes, Body: gram}.Frame(
			multicastMAC(allNodes), mac), reason: "not-replicated"},

		{name: "for the container", outer: other, frame: who(hostMAC, switched, own),
			answer: at(hostMAC, switched, mac, own)},
		{name: "for the container, IPv6", outer: other, frame: who6(hostMAC, switched6, own6),
			answer: at6(hostMAC, switched6, mac, own6)},
		{name: "of a host without routes", outer: segmentOf(silentVTEP), frame: who(liedMAC, unknown, own),
			answer: at(liedMAC, unknown, mac, own)},
		{name: "of a host that looks for duplicates", outer: other, frame: who(hostMAC, noAddress, own),
			answer: at(hostMAC, noAddress, mac, own)},
		{name: "of a host that looks for duplicates, IPv6", outer: other, frame: who6(hostMAC, noAddress6, own6),
			answer: nd(multicastMAC(allNodes), mac, own6, allNodes, packet.NeighborAdvertisement, 0x20, own6, 2, mac)},
		{name: "for a container elsewhere", outer: other, frame: who(hostMAC, switched, far), reason: "not-replicated"},
		{name: "for an unknown address", outer: other, frame: who(hostMAC, switched, unknown),
			reason: "not-replicated"},
		{name: "of another VTEP", outer: segmentOf(strangeVTEP), frame: who(hostMAC, switched, own),
			reason: "foreign-unknown"},
		{name: "of a node", outer: outer{nodeVTEP, ownVTEP, segment, 0}, frame: who(hostMAC, switched, own),
			reason: "not-replicated"},
		{name: "of another tenant's segment", outer: outer{otherVTEP, ownVTEP, segment + 1, 0},
			frame: who(hostMAC, switched, own), reason: "foreign-unknown"},
		{name: "in the L3 VNI", outer: outer{otherVTEP, ownVTEP, vni, 0}, frame: who(hostMAC, switched, own),
			reason: "not-replicated"},
		{name: "with a multicast MAC", outer: other, frame: who(multicastMAC(allNodes), switched, own),
			reason: "not-replicated"},
		{name: "from beyond a router", outer: other, frame: damaged(who6(hostMAC, switched6, own6), 14+7, 254),
			reason: "not-replicated"},
		{name: "an answer", outer: segmentOf(silentVTEP), frame: at(mac, own, liedMAC, unknown),
			to: at(mac, own, liedMAC, unknown)},
		{name: "an answer, IPv6", outer: segmentOf(silentVTEP), frame: at6(mac, own6, liedMAC, unknown6),
			to: at6(mac, own6, liedMAC, unknown6)},
		{name: "an answer of a known host", outer: other, frame: at(mac, own, hostMAC, switched),
			to: at(mac, own, hostMAC, switched)},
		{name: "an answer for a known host elsewhere", outer: segmentOf(silentVTEP),
			frame: at(mac, own, liedMAC, switched), reason: "foreign-unknown"},
		{name: "an answer for a container", outer: other, frame: at(mac, own, liedMAC, far), reason: "foreign-unknown"},
		{name: "an answer for the gateway", outer: other, frame: at(mac, own, liedMAC, gateway),
			reason: "not-replicated"},
		{name: "an answer to another MAC", outer: other, frame: at(besideMAC, own, hostMAC, switched),
			reason: "not-replicated"},
		{name: "a broadcast", outer: other, frame: packet.Packet{Source: switched, Destination: own, Body: gram}.Frame(
			everybody, hostMAC), reason: "not-replicated"},
	}
}

// departed is what leaves a node: a frame at the container's side, or in a tunnel.
type departed struct {
	outer outer
	frame string
}

// leaves returns what a frame causes to leave, until there are as many as wanted or a drop is counted.
func (b *bed) leaves(t *testing.T, wanted int, before map[string]uint64) (all []departed) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		in, atContainer := soon(t, b.to)
		out, atFabric := soon(t, b.toFabric)
		if atContainer == nil && !in.Outgoing && concerns(in.Frame) {
			all = append(all, departed{frame: string(in.Frame)})
		}
		if atFabric == nil {
			if o, inner, ok := untunnel(out.Frame); ok && o.from == ownVTEP && o.to != ownVTEP {
				all = append(all, departed{o, string(inner)})
			}
		}
		if atContainer != nil && atFabric != nil && (len(all) >= wanted || len(b.reasons(t, before)) > 0) {
			return all
		}
	}
	return all
}

func soon(t *testing.T, at *packet.Capture) (packet.Captured, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	return at.Next(ctx)
}

// concerns reports whether a frame is of ARP or neighbour discovery, or a test's. The kernel beyond the device asks for
// link-local addresses by itself.
func concerns(f []byte) bool {
	switch {
	case len(f) > 54 && f[12] == 0x86 && f[20] == packet.ProtocolICMPv6 && f[54] == packet.NeighborSolicitation:
		return f[22] == 0xfd
	case len(f) > 54 && f[12] == 0x86 && f[20] == packet.ProtocolICMPv6:
		return f[54] == packet.NeighborAdvertisement
	}
	return f[12] == 8 && f[13] == 6 || bytes.Contains(f, gram.Payload)
}

// misunderstood returns the messages that go wrong.
func (b *bed) misunderstood(t *testing.T) (failed []string) {
	t.Helper()
	for rest := error(nil); rest == nil; _, rest = soon(t, b.to) { // frames of earlier tests
	}
	for rest := error(nil); rest == nil; _, rest = soon(t, b.toFabric) {
	}
	for _, c := range messages() {
		before := b.drops(t)
		name, sender, frame, back := "asked, "+c.name, b.from, c.frame, departed{frame: string(c.answer)}
		if c.outer.to.IsValid() {
			name, sender = "asked by tunnel, "+c.name, b.fromFabric
			frame = c.outer.frame(b.uplinkMAC, fabricMAC, c.frame)
			back.outer = outer{ownVTEP, c.outer.from, segment, 0}
		}
		var want []departed
		if c.answer != nil {
			want = append(want, back)
		}
		if c.to != nil {
			want = append(want, departed{frame: string(c.to)})
		}
		for _, o := range c.copies {
			want = append(want, departed{o, string(c.copied)})
		}
		if c.sum {
			must(t, b.fromPacketSocket(t, frame))
		} else {
			must(t, sender.Send(frame))
		}
		got := b.leaves(t, len(want), before)
		slices.SortFunc(got, func(a, b departed) int { return a.outer.to.Compare(b.outer.to) })
		said := b.reasons(t, before)
		wanted := []string(nil)
		if c.reason != "" {
			wanted = []string{c.reason}
		}
		if !slices.Equal(got, want) || !slices.Equal(said, wanted) {
			t.Logf("%s: dropped for %v, want %v; sent %s; want %s", name, said, wanted, show(got), show(want))
			failed = append(failed, name)
		}
	}
	return failed
}

// fromPacketSocket sends a frame of the container, of which a device is to compute a checksum.
func (b *bed) fromPacketSocket(t *testing.T, frame []byte) error {
	t.Helper()
	return b.container.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		c1, err := net.InterfaceByName("c1")
		if err != nil {
			return err
		}
		const needsSum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
		header := []byte{needsSum, 0}
		for _, v := range []uint16{0, 0, 28, 0} { // lengths, then start and offset of the checksum
			header = binary.NativeEndian.AppendUint16(header, v)
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: c1.Index}); err != nil {
			return err
		}
		_, err = unix.Write(fd, append(header, frame...))
		return err
	})
}

func show(all []departed) (text string) {
	for _, is := range all {
		text += fmt.Sprintf("\n  %+v % x", is.outer, is.frame)
	}
	return text
}

// TestNeighbours asks and answers by ARP and neighbour discovery, at the container and by the tunnel.
func TestNeighbours(t *testing.T) {
	b := newBed(t, nil)
	if failed := b.misunderstood(t); len(failed) > 0 {
		t.Errorf("%q", failed)
	}
}

// overrun asks for many unknown addresses, with as many VTEPs as there may be. It returns what goes wrong.
func (b *bed) overrun(t *testing.T) (failed []string) {
	t.Helper()
	var vteps []netip.Addr
	for i := range pipeline.MaxReplicas {
		vteps = append(vteps, netip.AddrFrom4([4]byte{10, 2, 1, byte(i + 1)}))
	}
	must(t, b.Apply(t.Context(), nil, []pipeline.Entry{pipeline.NewReplication(vni, vteps)}))
	before := b.drops(t)
	const questions = 100
	began := time.Now()
	for i := range questions {
		must(t, b.from.Send(who(ownMAC, own, netip.AddrFrom4([4]byte{10, 0, 100, byte(i)}))))
	}
	got, limited := map[netip.Addr]int{}, 0
	for end := began.Add(patience); time.Now().Before(end); {
		out, err := soon(t, b.toFabric)
		if o, _, ok := untunnel(out.Frame); err == nil && ok && o.from == ownVTEP {
			got[o.to]++
		}
		limited = int(b.drops(t)["replication-limit"] - before["replication-limit"])
		if err != nil && limited+got[vteps[0]] == questions {
			break
		}
	}
	most := 20 + int(time.Since(began)/(50*time.Millisecond)) + 1
	n := got[vteps[0]]
	if n < 20 || n > most || limited+n != questions {
		t.Logf("of %d questions %d were replicated, want 20 to %d, and %d dropped", questions, n, most, limited)
		failed = append(failed, "too many questions")
	}
	if slices.ContainsFunc(vteps, func(a netip.Addr) bool { return got[a] != n }) || len(got) != len(vteps) {
		t.Logf("VTEPs got %v questions", got)
		failed = append(failed, "many VTEPs")
	}
	return failed
}

// TestReplicationLimit: a container that asks for many unknown addresses is limited, and all copies are made.
func TestReplicationLimit(t *testing.T) {
	b := newBed(t, nil)
	if failed := b.overrun(t); len(failed) > 0 {
		t.Errorf("%q", failed)
	}
}
