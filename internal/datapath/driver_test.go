package datapath

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
)

// TestMacvlanKindsLoseNothing: a node changes to macvlans and back. Meanwhile packets of containers with a device pair
// pass programs of both configurations on their way, and none is lost.
func TestMacvlanKindsLoseNothing(t *testing.T) {
	w := newWireOf(t, paired)
	n := w.nodes[0]
	far := w.nodes[1].add(t, blue, 1)
	c := n.add(t, blue, 1)
	mustReach(t, c, far, "before") // the neighbours are known
	begin := func(kind string) {
		config := n.datapath.config
		config.Device = kind
		n.reopen(t, config)
		must(t, n.datapath.putTenant(blue))
	}
	losesNothing(t, [][2]*testContainer{{c, far}, {far, c}}, time.Millisecond, func() {
		for _, kind := range []string{endpoint.Macvlan, paired, endpoint.Macvlan, paired} {
			begin(kind)
			n.restore(t, c)
		}
		for _, kind := range []string{endpoint.Macvlan, paired} { // and again, slowly
			begin(kind)
			keep, lost := []endpoint.Record{c.record}, map[endpoint.ID]error{}
			must(t, n.datapath.Netpila().Repair(t.Context(), keep, keep))
			for i, move := range n.datapath.attachSteps(keep, lost) {
				must(t, move())
				mustReach(t, c, far, fmt.Sprintf("to %s, move %d", kind, i))
			}
			n.restore(t, c)
		}
	})
	for reason, packets := range n.drops(t) {
		if reason != "nd-ignored" && reason != "mld-ignored" {
			t.Errorf("%d drops for %s", packets, reason)
		}
	}
}

// TestMacvlanForwards: a container forwards a packet that has the container's address as source and came in by another
// of its devices. Our programs accept the packet like one that the container sent itself.
func TestMacvlanForwards(t *testing.T) {
	w := newWireOf(t, paired)
	n := w.nodes[0]
	sibling := n.add(t, blue, 1)
	config := n.datapath.config
	config.Device = endpoint.Macvlan
	n.reopen(t, config)
	must(t, n.datapath.putTenant(blue))
	n.restore(t, sibling)
	c, behind := n.add(t, blue, 1), namespace(t, "behind")
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	pair := netlink.NewVeth(netlink.LinkAttrs{Name: "inner", Index: 100})
	pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(behind.FD())
	must(t, h.LinkAdd(pair))
	must(t, h.LinkSetUp(pair))
	inner, err := h.LinkByName("inner")
	must(t, err)
	there, err := behind.Netlink()
	must(t, err)
	defer there.Close()
	eth0, err := there.LinkByName("eth0")
	must(t, err)
	must(t, there.LinkSetUp(eth0))
	must(t, behind.WaitUp(t.Context(), "eth0"))
	must(t, c.ns.WaitUp(t.Context(), "inner"))
	must(t, c.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0) }))
	mustReach(t, c, sibling, "by its own")

	heard := capture(t, sibling.ns)
	keepOrder(t)
	must(
		t,
		injector(
			t,
			behind,
		).Send(packet.Packet{Source: c.seen(), Destination: sibling.seen(),
			Body: gram}.Frame(inner.Attrs().HardwareAddr, host.ContainerMAC)),
	)
	if got := drain(t, heard, sibling); len(got) != 2 { // with the sentinel of drain
		t.Errorf("forwarded: %d packets arrived, want 2: %v", len(got), n.drops(t))
	}
}
