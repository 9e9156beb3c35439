package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// TestMacvlanSendsAsItself: a container with raw sockets can write any frame to the uplink that it shares with its
// node. The programs identify the container by its namespace, whatever the frame contains.
func TestMacvlanSendsAsItself(t *testing.T) {
	w := newWireOf(t, endpoint.Macvlan)
	n, peer := w.nodes[0], w.nodes[1]
	c, sibling, far := n.add(t, blue, 1), n.add(t, blue, 1), peer.add(t, blue, 1)
	raw, marked, secret := injector(t, c.ns), injector(t, c.ns), injector(t, c.ns)
	var mark uint32
	must(t, n.datapath.Objects.PacketMark.Get(&mark))
	must(t, marked.Mark(mark))
	must(t, n.datapath.Objects.AcceptMark.Get(&mark)) // if one day a container guesses it
	must(t, secret.Mark(mark))
	red1, red2 := n.add(t, red, 1), peer.add(t, red, 1)
	called := injector(t, c.ns)
	must(t, called.Call(packet.EtherTypeIPv6))
	onWire, err := packet.NewCapture(peer.ns, "eth0", packet.IncomingOnly)
	must(t, err)
	defer onWire.Close()
	router := peer.mac(t)
	broadcastMAC := net.HardwareAddr{255, 255, 255, 255, 255, 255}
	from := func(source, to netip.Addr, mac net.HardwareAddr) []byte {
		return packet.Packet{Source: source, Destination: to, Body: gram}.Frame(router, mac)
	}
	own := c.record.Device.ContainerMAC
	for _, a := range []struct {
		name  string
		send  sender
		frame []byte
		why   string
	}{
		{"as the node", raw, from(n.address(), peer.address(), n.mac(t)), "src-not-own"},
		{"as the node's underlay", raw, from(n.underlay, peer.underlay, n.mac(t)), "src-not-own"},
		{"as a sibling, with its MAC", raw, from(sibling.seen(), far.seen(), sibling.record.Device.ContainerMAC),
			"src-not-own"},
		{"as a sibling, with its own MAC", raw, from(sibling.seen(), far.seen(), own), "src-not-own"},
		{"in plaintext", raw, from(c.plain(), far.plain(), own), "src-not-own"},
		{"in plaintext to a host, with the mark", marked, from(c.plain(), peer.underlay, own), "src-not-own"},
		{"as the node, with the mark", marked, from(n.address(), far.plain(), n.mac(t)), "src-not-own"},
		{"as another tenant's, with the secret mark", secret, from(red1.plain(), red2.plain(), n.mac(t)),
			"src-not-own"},
		{"as the node, with the secret mark", secret, from(n.address(), peer.address(), n.mac(t)), "src-not-own"},
		{"IPv4", raw, packet.Frame(router, own, packet.EtherTypeIPv4, make([]byte, 40)), "not-ip6"},
		{"ARP, as the node", raw, packet.Frame(broadcastMAC, n.mac(t), packet.EtherTypeARP, make([]byte, 60)),
			"not-ip6"},
		{"to all hosts on the link", raw, packet.Packet{Source: c.seen(), Destination: netip.MustParseAddr("ff02::1"),
			Body: gram}.Frame(broadcastMAC, own), "multicast"},
		{"a tag that the socket calls IPv6", called, tag(from(c.seen(), far.seen(), own)), "not-ip6"},
		{"a tag", raw, tag(from(c.seen(), far.seen(), own)), "not-ip6"},
	} {
		before := n.drops(t)[a.why]
		must(t, a.send.Send(a.frame))
		if got := n.drops(t)[a.why] - before; got != 1 {
			t.Errorf("%s: %d drops for %s, want 1", a.name, got, a.why)
		}
	}
	for _, seen := range sentinelAfter(t, onWire, func(s packet.Sentinel) {
		must(t, n.ns.Do(func() error { return sendUDP(peer.underlay, s[:]) }))
	}) {
		if p, err := seen.Packet(); err == nil && p.Body.Protocol() == packet.ProtocolUDP &&
			p.Destination != peer.underlay {
			t.Errorf("leaked: %+v", p)
		}
	}
	mustReach(t, c, far, "after all of it")
	transfer(t, n.self(), c, 1000)
}

// TestMacvlanWithoutOwner: root in a container can redirect received frames to the uplink with any mark. No socket sent
// these frames and no route led them, so the programs attribute them to no container, and they do not leave.
func TestMacvlanWithoutOwner(t *testing.T) {
	w := newWireOf(t, endpoint.Macvlan)
	n, peer := w.nodes[0], w.nodes[1]
	c, far := n.add(t, blue, 1), peer.add(t, blue, 1)
	mustReach(t, far, c, "before")
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	var known, secret uint32
	must(t, n.datapath.Objects.PacketMark.Get(&known))
	must(t, n.datapath.Objects.AcceptMark.Get(&secret)) // if one day a container guesses it
	for name, mark := range map[string]uint32{"no mark": 0, "the mark": known, "the secret mark": secret} {
		const markOffset = 8 // in struct __sk_buff
		reflect, err := ebpf.NewProgram(
			&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
				asm.Mov.Imm32(asm.R2, int32(mark)), asm.StoreMem(asm.R1, markOffset, asm.R2, asm.Word),
				asm.Mov.Imm(
					asm.R1,
					int32(eth0.Attrs().Index),
				), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return(),
			}},
		)
		must(t, err)
		defer reflect.Close()
		var l link.Link
		must(t, c.ns.Do(func() (err error) {
			l, err = link.AttachTCX(
				link.TCXOptions{Interface: eth0.Attrs().Index, Program: reflect, Attach: ebpf.AttachTCXIngress},
			)
			return err
		}))
		before := n.drops(t)["src-not-own"]
		got := far.ping(t, c.seen(), 56, impatience)
		if drops := n.drops(t)["src-not-own"] - before; got.Received != 0 || drops != uint64(got.Sent) {
			t.Errorf("%s: %d of %d came back, %d drops", name, got.Received, got.Sent, drops)
		}
		must(t, l.Close())
	}
	mustReach(t, far, c, "after frames of no container")
}

// TestMacvlanKeepsItsARP: root in a container can make its kernel send ARP for an IPv4 address. The programs can
// attribute such a frame to no container; only the source MAC distinguishes it from the node's own ARP.
func TestMacvlanKeepsItsARP(t *testing.T) {
	w := newWireOf(t, endpoint.Macvlan)
	n, peer := w.nodes[0], w.nodes[1]
	c := n.add(t, blue, 1)
	onWire := capture(t, peer.ns)
	tell := func(ns *netns.Namespace, ip string, also func(*netlink.Handle, netlink.Link) error) {
		t.Helper()
		h, err := ns.Netlink()
		must(t, err)
		defer h.Close()
		eth0, err := h.LinkByName("eth0")
		must(t, err)
		must(t, ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/conf/eth0/arp_notify", []byte("1"), 0) }))
		must(
			t,
			errors.Join(h.AddrAdd(eth0, &netlink.Addr{IPNet: host.IPNet(netip.MustParsePrefix(ip))}), also(h, eth0)),
		)
	}
	before := n.drops(t)["not-ip6"]
	tell(c.ns, "192.0.2.1/24", func(h *netlink.Handle, eth0 netlink.Link) error {
		return errors.Join(h.LinkSetDown(eth0), h.LinkSetARPOn(eth0), h.LinkSetUp(eth0))
	})
	if got := n.drops(t)["not-ip6"] - before; got == 0 {
		t.Error("drops of the ARP of a container: none")
	}
	tell(n.ns, "192.0.2.2/24", func(*netlink.Handle, netlink.Link) error { return nil })
	must(t, n.ns.Do(func() error { return sendUDP(netip.MustParseAddr("192.0.2.99"), []byte("who is it?")) }))
	var senders []string
	for _, seen := range sentinelAfter(t, onWire, func(s packet.Sentinel) {
		must(t, n.ns.Do(func() error { return sendUDP(peer.underlay, s[:]) }))
	}) {
		if binary.BigEndian.Uint16(seen.Frame[12:]) == packet.EtherTypeARP {
			senders = append(senders, net.HardwareAddr(seen.Frame[6:12]).String())
		}
	}
	if len(senders) == 0 || slices.ContainsFunc(senders, func(mac string) bool { return mac != n.mac(t).String() }) {
		t.Errorf("ARP on the wire: of %v, want of the node, %v", senders, n.mac(t))
	}
}

// TestMacvlanHearsTheFabricOnlyThroughUs: frames from the fabric to a container's MAC or to a multicast MAC reach the
// container only through our programs.
func TestMacvlanHearsTheFabricOnlyThroughUs(t *testing.T) {
	for _, without := range []string{"", "uplink_in", "guard_in"} {
		t.Run("without "+without, func(t *testing.T) {
			w := newWireOf(t, endpoint.Macvlan)
			n, peer := w.nodes[0], w.nodes[1]
			c, far := n.add(t, blue, 1), peer.add(t, blue, 1)
			if without != "" {
				n.detach(t, without)
			}
			peer.detach(t, "uplink_out") // it would drop the frames that follow
			inside, onPeer := capture(t, c.ns), capture(t, peer.ns)
			raw := injector(t, peer.ns)
			keepOrder(t)
			own, broadcastMAC := c.record.Device.ContainerMAC, net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
			frame := packet.Packet{Source: far.seen(), Destination: c.seen(), Body: gram}.Frame(own, raw.MAC())
			many := packet.Packet{
				Source:      peer.underlay,
				Destination: netip.MustParseAddr("ff02::1"),
				Body:        echo,
			}.Frame(
				broadcastMAC,
				raw.MAC(),
			)
			why := map[string]string{"": "mac-outside", "uplink_in": "no-program", "guard_in": "mac-outside"}[without]
			for _, f := range [][]byte{frame, tag(frame), packet.Frame(own, raw.MAC(), packet.EtherTypeARP,
				make([]byte, 46)), many, tag(many)} {
				must(t, raw.Send(f))
			}
			if seen := drain(t, inside, c); len(seen) != 1 {
				t.Errorf("the container received: %x", seen[0].Frame)
			}
			if got := n.drops(t)[why]; got != 3 {
				t.Errorf("drops for %s: %d, want 3", why, got)
			}
			// The node itself receives multicast, and answers.
			ok := false
			for _, seen := range sentinelAfter(t, onPeer, func(s packet.Sentinel) {
				must(t,
					n.ns.Do(func() error { return sendUDP(peer.underlay, s[:]) }))
			}) {
				p, err := seen.Packet()
				body, icmp := p.Body.(packet.ICMP)
				ok = ok || err == nil && icmp && body.Type == packet.EchoReply && p.Source == n.underlay
			}
			if !ok {
				t.Error("the node did not answer what was for all nodes on the link")
			}
		})
	}
}

// TestMacvlanRefusals: replies that a container's kernel sends without a socket reach the peer, too.
func TestMacvlanRefusals(t *testing.T) {
	w := newWireOf(t, endpoint.Macvlan)
	n, peer := w.nodes[0], w.nodes[1]
	c, sibling, far := n.add(t, blue, 1), n.add(t, blue, 1), peer.add(t, blue, 1)
	for name, from := range map[string]*testContainer{"another node's container": far, "a sibling": sibling} {
		must(t, from.ns.Do(func() error {
			_, err := net.DialTimeout("tcp6", netip.AddrPortFrom(c.seen(), 9).String(), patience)
			if !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s: %v", name, err)
			}
			return nil
		}))
	}
}

// TestMacvlanKinds: a node changes from macvlans to another kind only when its last macvlan is gone. It refuses
// macvlans on an uplink where the kernel would lead packets past our programs.
func TestMacvlanKinds(t *testing.T) {
	w := newWireOf(t, paired)
	n, peer := w.nodes[0], w.nodes[1]
	old, far := n.add(t, blue, 1), peer.add(t, blue, 1)
	config := n.datapath.config
	config.Device = endpoint.Macvlan
	n.reopen(t, config)
	must(t, n.datapath.putTenant(blue))
	n.restore(t, old)
	fresh := n.add(t, blue, 1)
	mustReach(t, old, far, "a pair beside macvlans")
	mustReach(t, old, fresh, "a pair to a macvlan")
	mustReach(t, fresh, old, "a macvlan to a pair")
	mustReach(t, fresh, far, "a macvlan beside pairs")
	transfer(t, n.self(), fresh, 1000)
	if ids, err := n.datapath.Attached(); err != nil || len(ids) != 2 {
		t.Errorf("packets are carried for %v, %v", ids, err)
	}

	config.Device = endpoint.Veth
	n.reopen(t, config)
	if _, err := n.datapath.restoreAll(t.Context(), []endpoint.Record{old.record, fresh.record}); err == nil ||
		!strings.Contains(err.Error(), "--device macvlan") {
		t.Errorf("back to veths: %v", err)
	}
	mustReach(t, fresh, far, "after a refusal")

	config.Device = "bond"
	if err := n.ns.Do(func() error { return CheckUplink(config) }); err == nil ||
		!strings.Contains(err.Error(), "choose veth, macvlan") {
		t.Errorf("an unknown kind: %v", err)
	}
	must(t, n.ns.Do(func() error {
		return netlink.LinkAdd(
			&netlink.Macvlan{
				LinkAttrs: netlink.LinkAttrs{Name: "upper", ParentIndex: n.datapath.Uplinks[0].Attrs().Index},
				Mode:      netlink.MACVLAN_MODE_BRIDGE,
			},
		)
	}))
	config.Device, config.Uplinks = endpoint.Macvlan, []string{"upper"}
	if err := n.ns.Do(func() error { return CheckUplink(config) }); err == nil ||
		!strings.Contains(err.Error(), "would bypass our programs") {
		t.Errorf("an uplink that is a macvlan: %v", err)
	}
}

// TestMacvlanMACs: MACs of macvlans are unique, and the programs compute the same MACs.
func TestMacvlanMACs(t *testing.T) {
	if got, want := device.MacvlanMAC(device.OnUplink|0x01020304), (net.HardwareAddr{0x06, 0x70, 1, 2, 3,
		4}); !bytes.Equal(
		got,
		want,
	) {
		t.Errorf("%v, not %v", got, want)
	}
}

// TestMacvlanLeftovers: an agent that starts removes the device of an interrupted ADD. It does not remove a device with
// a record, nor a device whose number is also in a stale record.
func TestMacvlanLeftovers(t *testing.T) {
	w := newWireOf(t, endpoint.Macvlan)
	n := w.nodes[0]
	kept, far := n.add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	half := n.create(t, blue, 1)
	eth0 := func(c *testContainer) error {
		h, err := c.ns.Netlink()
		must(t, err)
		defer h.Close()
		_, err = h.LinkByName("eth0")
		return err
	}
	// A record from before the last boot, with a number that now belongs to another container.
	stale := kept.record
	stale.ID, stale.Netns = 77, kept.record.Netns+"-gone"
	n.reopen(t, n.datapath.config) // an agent first continues pending removals
	must(t, n.datapath.Driver(stale).Remove(stale))
	must(t, eth0(kept))
	must(t, n.datapath.putTenant(blue))
	mustReach(t, kept, far, "after a stale record")

	must(t, eth0(half))
	config := n.datapath.config
	n.reopen(t, config)
	must(t, n.datapath.putTenant(blue))
	n.restore(t, kept)
	if err := eth0(half); err == nil {
		t.Error("a device without a record is left")
	}
	mustReach(t, kept, far, "after a start")

	// On another uplink no policy would be applied to its frames.
	h, err := n.ns.Netlink()
	must(t, err)
	defer h.Close()
	must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth9"}, PeerName: "eth9far"}))
	config.Uplinks = []string{"eth9"}
	n.reopen(t, config)
	if _, err := n.datapath.restoreAll(t.Context(), []endpoint.Record{kept.record}); err == nil ||
		!strings.Contains(err.Error(), "another device than the uplink") {
		t.Errorf("with another uplink: %v", err)
	}
	mustReach(t, kept, far, "after a refusal")
}

// TestMacvlansElsewhere: containers are found where the agent does not see the paths of their namespaces, all in one
// walk, and distinguished from those that are gone.
func TestMacvlansElsewhere(t *testing.T) {
	w := newWireOf(t, endpoint.Macvlan)
	n := w.nodes[0]
	seen, hidden, hidden2, unplugged, gone := n.add(
		t,
		blue,
		1,
	), n.add(
		t,
		blue,
		1,
	), n.add(
		t,
		blue,
		1,
	), n.add(
		t,
		blue,
		1,
	), n.add(
		t,
		blue,
		1,
	)
	unplugged.unplug(t)
	gone.record.Device.HostIfindex = device.OnUplink | 0x7fffffff // no endpoint's
	// from before the machine was booted, whose number is another's now
	stale := hidden.record
	stale.ID, stale.Interface = 77, "eth7"
	stale.Netns += "-elsewhere"
	records := []endpoint.Record{seen.record, stale}
	for i, c := range []*testContainer{hidden, hidden2, unplugged, gone} {
		c.record.Netns += "-elsewhere"
		if i%2 == 0 { // as unmounting leaves it
			must(t, os.WriteFile(c.record.Netns, nil, 0o600))
		}
		records = append(records, c.record)
	}
	lost, err := n.datapath.MissingDevices(records)
	must(t, err)
	var notFound netlink.LinkNotFoundError
	if len(lost) != 3 || !errors.As(lost[unplugged.record.ID], &notFound) || !errors.As(lost[stale.ID], &notFound) ||
		!errors.Is(lost[gone.record.ID], dpapi.ErrNoNamespace) {
		t.Errorf("lost are %v", lost)
	}
}

// TestMacvlanWithoutItsJudge: without the program that checks what containers send, their packets do not leave the
// node. Packets of the node still do.
func TestMacvlanWithoutItsJudge(t *testing.T) {
	w := newWireOf(t, endpoint.Macvlan)
	n, peer := w.nodes[0], w.nodes[1]
	c, far := n.add(t, blue, 1), peer.add(t, blue, 1)
	mustReach(t, c, far, "before")
	n.detach(t, "uplink_out")
	onWire, err := packet.NewCapture(peer.ns, "eth0", packet.IncomingOnly)
	must(t, err)
	defer onWire.Close()
	raw := injector(t, c.ns)
	before := n.drops(t)["no-program"]
	for _, source := range []netip.Addr{n.underlay, c.plain(), c.seen()} {
		must(
			t,
			raw.Send(
				packet.Packet{Source: source, Destination: peer.underlay, Body: gram}.Frame(peer.mac(t), n.mac(t)),
			),
		)
	}
	if got := n.drops(t)["no-program"] - before; got < 3 {
		t.Errorf("drops for no-program: %d, want 3", got)
	}
	for _, seen := range sentinelAfter(t, onWire, func(s packet.Sentinel) {
		must(t, n.ns.Do(func() error { return sendUDP(peer.underlay, s[:]) }))
	}) {
		p, err := seen.Packet()
		if body, ok := p.Body.(packet.UDP); err == nil && ok && body.DestinationPort == gram.DestinationPort {
			t.Errorf("leaked: %+v", p)
		}
	}
	n.restore(t, c)
	mustReach(t, c, far, "after a start")
}
