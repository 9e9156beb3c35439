package datapath

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

const genModeNone = 1 // IN6_ADDR_GEN_MODE_NONE of linux/if_link.h

// tunnel joins two containers by a VXLAN of their own, and returns its ends.
func tunnel(t *testing.T, from, to *testContainer, id int, noSum bool) (ends [2]*testContainer) {
	t.Helper()
	var opened [2]*netlink.Handle
	var devices [2]*netlink.Vxlan
	for i, c := range []*testContainer{from, to} {
		h, err := c.ns.Netlink()
		must(t, err)
		defer h.Close()
		eth0, err := h.LinkByName("eth0")
		must(t, err)
		attrs := netlink.NewLinkAttrs()
		attrs.Name = fmt.Sprint("vx", id)
		far := []*testContainer{to, from}[i]
		opened[i], devices[i] = h, &netlink.Vxlan{
			LinkAttrs: attrs, VxlanId: id, VtepDevIndex: eth0.Attrs().Index, Port: 4700 + id, Learning: true,
			SrcAddr: c.seen().AsSlice(), Group: far.seen().AsSlice(), UDP6ZeroCSumTx: noSum, UDP6ZeroCSumRx: noSum,
		}
		must(t, h.LinkAdd(devices[i]))
		// Without an address the kernel sends nothing: a packet without a checksum would count as wrong if the other
		// end does not listen yet.
		must(t, h.LinkSetIP6AddrGenMode(devices[i], genModeNone))
		must(t, h.LinkSetUp(devices[i]))
	}
	for i, c := range []*testContainer{from, to} {
		inner := netip.MustParseAddr(fmt.Sprintf("2001:db8:%d::%d", id, i+1))
		must(
			t,
			opened[i].AddrAdd(
				devices[i],
				&netlink.Addr{IPNet: host.IPNet(netip.PrefixFrom(inner, 64)), Flags: unix.IFA_F_NODAD},
			),
		)
		ends[i] = &testContainer{
			ns:     c.ns,
			record: endpoint.Record{Attachments: []endpoint.Attachment{{Address: inner}}},
		}
	}
	return ends
}

// sent returns the counters of a container's device; a packet of many segments counts once.
func sent(t *testing.T, c *testContainer) (packets, bytes uint64) {
	t.Helper()
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	return eth0.Attrs().Statistics.TxPackets, eth0.Attrs().Statistics.TxBytes
}

// noneOnTheWire checks that segments of a tunnel without checksums have none on the wire.
func noneOnTheWire(t *testing.T, name string, from, to *testContainer, port uint16, ends [2]*testContainer) bool {
	t.Helper()
	wire := capture(t, to.node.ns)
	var listener net.Listener
	must(t, ends[1].ns.Do(func() (err error) {
		listener, err = net.Listen("tcp6", netip.AddrPortFrom(ends[1].seen(), 0).String())
		return err
	}))
	defer listener.Close()
	var conn net.Conn
	must(t, ends[0].ns.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp6", listener.Addr().String(), patience)
		return err
	}))
	defer conn.Close()
	go func() { _, _ = conn.Write(make([]byte, 200000)) }() // it waits where nothing gets through, until the end
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	bytes, wrong := 0, uint16(0)
	_, err := wire.Until(ctx, func(c packet.Captured) bool {
		if p, err := c.Packet(); err == nil && p.Source == from.plain() &&
			binary.BigEndian.Uint16(c.Frame[l4+2:]) == port {
			bytes += len(c.Frame)
			wrong |= binary.BigEndian.Uint16(c.Frame[l4+6:])
		}
		return wrong != 0 || bytes > 40000
	})
	must(t, err)
	if wrong != 0 {
		t.Errorf("%s: segments of a tunnel without checksums have some", name)
		return false
	}
	return true
}

// TestTunnelOfContainers: a stream inside a container's tunnel leaves the container as packets of many segments, with
// two checksums that a device has to compute. The data arrives whole and all checksums are right, whether the uplink or
// the kernel cuts the packets into segments.
func TestTunnelOfContainers(t *testing.T) {
	for name, prepare := range map[string]func(n *testNode) error{
		"uplink that cuts":         func(*testNode) error { return nil },
		"uplink without checksums": func(*testNode) error { return sumsInSoftware("eth0") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWire(t)
			a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
			for _, n := range w.nodes {
				must(t, n.ns.Do(func() error { return prepare(n) }))
			}
			for id, noSum := range map[int]bool{71: false, 72: true} {
				ends := tunnel(t, a, b, id, noSum)
				if noSum && !noneOnTheWire(t, name, a, b, uint16(4700+id), ends) {
					return // nothing gets through
				}
				packetsBefore, bytesBefore := sent(t, a)
				transfer(t, ends[0], ends[1], 4<<20)
				packets, bytes := sent(t, a)
				if mean := (bytes - bytesBefore) / (packets - packetsBefore); mean < 3000 {
					t.Errorf(
						"without outer sums %v: packets have %d bytes on average, so few are of many segments",
						noSum,
						mean,
					)
				}
				transfer(t, ends[1], ends[0], 1<<20)
				datagram(t, ends[0], ends[1], 1000)
				datagram(t, ends[0], ends[1], 20000)
			}
			for _, ns := range []*netns.Namespace{a.ns, b.ns, w.nodes[0].ns, w.nodes[1].ns} {
				must(t, ns.Do(wrongSums))
			}
			for i, n := range w.nodes {
				for reason, count := range n.drops(t) {
					if reason == "nd-ignored" || reason == "mld-ignored" {
						continue
					}
					t.Errorf("node %d dropped %d: %s", i, count, reason)
				}
			}
		})
	}
}
