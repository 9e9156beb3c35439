package evpn_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// questionsOfHosts has FRR's bridge pass on ARP requests, which it answers itself in the other tests. They come to all
// nodes, and the container's node answers.
func (b bed) questionsOfHosts(n *frrNode) {
	n.suppress(false)
	defer n.suppress(true)
	inside := handle(b.T, n.switched)
	for _, name := range []string{"c1", "c2", "c3"} {
		c, err := b.Container(name)
		must(b.T, err)
		to := c.Address
		forget(b.T, inside, to)
		until(b.T, "the switched host reaches "+name, func() bool { return pings(n.switched, to.String()) })
		if mac := neighbour(b.T, inside, to); !bytes.Equal(mac, address.SegmentMAC(to)) {
			b.Errorf("the switched host has %v for %s, want %v", mac, name, address.SegmentMAC(to))
		}
	}
}

// neighbour returns the MAC that a host has for an address.
func neighbour(t *testing.T, h *netlink.Handle, of netip.Addr) net.HardwareAddr {
	t.Helper()
	all, err := h.NeighList(0, unix.AF_INET)
	must(t, err)
	for _, n := range all {
		if n.IP.Equal(of.AsSlice()) {
			return n.HardwareAddr
		}
	}
	return nil
}

func forget(t *testing.T, h *netlink.Handle, a netip.Addr) {
	t.Helper()
	all, err := h.NeighList(0, unix.AF_INET)
	must(t, err)
	for _, n := range all {
		if n.IP.Equal(a.AsSlice()) {
			must(t, h.NeighDel(&n))
		}
	}
}

// suppress sets whether FRR's bridge answers ARP requests for hosts behind the tunnel.
func (n *frrNode) suppress(is bool) {
	n.t.Helper()
	l, err := n.kern.LinkByName("vx-l2")
	must(n.t, err)
	must(n.t, n.kern.LinkSetBrNeighSuppress(l, is))
}

// silentHost is an address of the switched host that no speaker has announced.
const silentHost = "10.0.200.33"

// questionsOfContainers asks for a silent host as a container with a static neighbour for its gateway alone never does.
// The question comes to the host behind FRR's bridge, and the host's answer to the container.
func (b bed) questionsOfContainers(n *frrNode) {
	inside := handle(b.T, n.switched)
	up(b.T, inside, "eth0", silentHost+"/32")
	ns, err := b.Namespace("c1")
	must(b.T, err)
	defer ns.Close()
	c, err := b.Container("c1")
	must(b.T, err)
	atHost, atContainer := capture(b.T, n.switched), capture(b.T, ns)
	in, err := packet.NewInjector(ns, "eth0")
	must(b.T, err)
	defer in.Close()
	host, err := net.ParseMAC(switchedMAC)
	must(b.T, err)
	silent, own := netip.MustParseAddr(silentHost), address.SegmentMAC(c.Address)
	question, answer := arp(1, own, c.Address, nil, silent), arp(2, host, silent, own, c.Address)
	until(b.T, "the host gets the question, and the container the answer", func() bool {
		must(b.T, in.Send(question))
		return arrives(atHost, question) && arrives(atContainer, answer)
	})
	known := arp(1, own, c.Address, nil, netip.MustParseAddr(switchedHost))
	must(b.T, in.Send(known))
	if !arrives(atContainer, arp(2, host, netip.MustParseAddr(switchedHost), own, c.Address)) {
		b.Errorf("the node does not answer for %s", switchedHost)
	}
	if arrives(atHost, known) {
		b.Errorf("the question for %s, which is known, is replicated", switchedHost)
	}
}

// arp builds a frame; a question has no receiver.
func arp(operation uint16, sender net.HardwareAddr, from netip.Addr, receiver net.HardwareAddr, to netip.Addr) []byte {
	all, target := receiver, receiver
	if receiver == nil {
		all, target = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, make(net.HardwareAddr, 6)
	}
	body := binary.BigEndian.AppendUint16([]byte{0, 1, 8, 0, 6, 4}, operation)
	body = slices.Concat(body, sender, from.AsSlice(), target, to.AsSlice())
	return packet.Frame(all, sender, packet.EtherTypeARP, body)
}

func capture(t *testing.T, ns *netns.Namespace) *packet.Capture {
	t.Helper()
	c, err := packet.NewCapture(ns, "eth0")
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// arrives reports whether a frame arrives within a second.
func arrives(at *packet.Capture, frame []byte) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := at.Until(ctx, func(got packet.Captured) bool { return !got.Outgoing && bytes.Equal(got.Frame, frame) })
	return err == nil
}
