package datapath

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/packet"
)

// lldp is one of the link-local MACs: a bridge does not forward their frames, and leaves them to the port's stack.
var lldp = net.HardwareAddr{0x01, 0x80, 0xc2, 0, 0, 0x0e}

// TestStrangerAtPort: our program checks the frames that a bridge leaves to the stack at a port; all other frames pass
// on to the bridge unchecked.
func TestStrangerAtPort(t *testing.T) {
	w := newWire(t)
	n, peer := w.nodes[0], w.nodes[1]
	c, far := n.add(t, blue, 1), peer.add(t, blue, 1)
	s := n.secondNIC(t)
	h := n.datapath.Netlink
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br0"
	must(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	br0, err := h.LinkByName("br0")
	must(t, err)
	eth1, err := h.LinkByName("eth1")
	must(t, err)
	must(t, h.LinkSetMaster(eth1, br0))
	must(t, h.LinkSetUp(br0))
	must(t, n.ns.WaitUp(t.Context(), "br0"))
	must(t, n.datapath.GuardInterfaces(nil))
	var heard *net.UDPConn
	must(t, n.ns.Do(func() (err error) {
		heard, err = net.ListenUDP("udp6", &net.UDPAddr{IP: n.address().AsSlice(), Port: 53})
		return err
	}))
	defer heard.Close()
	raw, err := packet.NewInjector(s.ns, s.device)
	must(t, err)
	defer raw.Close()
	keepOrder(t)
	send := func(source netip.Addr, to net.HardwareAddr, said string, vlans ...uint16) {
		t.Helper()
		p := packet.Packet{
			Source:      source,
			Destination: n.address(),
			Body:        packet.UDP{SourcePort: 1, DestinationPort: 53, Payload: []byte(said)},
		}
		must(t, raw.Send(tagAs(p.Frame(to, raw.MAC()), vlans...)))
	}
	// receives everything up to the last frame of an honest stranger.
	hears := func(to net.HardwareAddr) (all []string) {
		t.Helper()
		send(strangerAddress, to, "last")
		must(t, heard.SetDeadline(deadline()))
		for buf := make([]byte, 100); ; {
			size, err := heard.Read(buf)
			must(t, err)
			if all = append(all, string(buf[:size])); all[len(all)-1] == "last" {
				return all
			}
		}
	}
	for _, a := range []struct {
		name   string
		source netip.Addr
		vlans  []uint16
		why    string
	}{
		{"container here", c.plain(), nil, "own-source"},
		{"the node itself", n.address(), nil, "own-source"},
		{"container elsewhere", far.plain(), nil, "tenant-to-node"},
		{"what containers see", c.seen(), nil, "private-outside"},
		{"behind a priority", far.plain(), []uint16{0}, "tenant-to-node"},
		{"behind two priorities", far.plain(), []uint16{0, 0}, "malformed"},
	} {
		for where, to := range map[string]net.HardwareAddr{"at the port": lldp, "in the bridge": s.to} {
			before := n.drops(t)
			send(a.source, to, "forged", a.vlans...)
			if got := hears(to); len(got) != 1 {
				t.Errorf("%s, %s: the node received %q", a.name, where, got)
			}
			if got, want := droppedSince(before, n.drops(t)), []string{a.why}; !slices.Equal(got, want) {
				t.Errorf("%s, %s: dropped for %q, want %q", a.name, where, got, want)
			}
		}
	}
}
