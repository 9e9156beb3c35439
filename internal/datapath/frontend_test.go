package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// frontWire is four nodes on one link: a sender's, the backend, and two frontends. Their containers are of tenant 7.
type frontWire struct {
	hub      *netns.Namespace
	nodes    []*testNode
	switches []*Nimitz
}

// Nodes of a frontWire.
const (
	ofSender = iota
	ofBackend
	ofFront1
	ofFront2
	frontNodes
)

const frontOffload, frontEpoch = 77, 0xfeed

func newFrontWire(t testing.TB) *frontWire {
	t.Helper()
	hub := namespace(t, "hub")
	w := &frontWire{hub: hub}
	h, err := hub.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "hub", 9000
	must(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	bridge, err := h.LinkByName("hub")
	must(t, err)
	must(t, h.LinkSetUp(bridge))
	for i := range frontNodes {
		n := &testNode{
			ns:       namespace(t, fmt.Sprint("node", i)),
			prefix:   netip.MustParsePrefix(fmt.Sprintf("fd70:696c:6100:%d::/64", i+1)),
			underlay: netip.MustParseAddr(fmt.Sprintf("2001:db8:70::%d", i+1)),
			reserve:  tenant.OffloadOverhead,
			room:     16384, // a small table is read fast
		}
		w.nodes = append(w.nodes, n)
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Index, attrs.MasterIndex, attrs.MTU = fmt.Sprint("port", i), 100+i, bridge.Attrs().Index, 9000
		pair := netlink.NewVeth(attrs)
		pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(n.ns.FD())
		must(t, h.LinkAdd(pair))
		port, err := h.LinkByName(attrs.Name)
		must(t, err)
		must(t, h.LinkSetUp(port))
	}
	for i, n := range w.nodes {
		n.configure(t, w.nodes[(i+1)%frontNodes])
		for j := 2; j < frontNodes; j++ {
			peer := w.nodes[(i+j)%frontNodes]
			must(t, n.ns.Do(func() error {
				return netlink.RouteAdd(&netlink.Route{
					Dst: &net.IPNet{IP: peer.prefix.Addr().AsSlice(), Mask: net.CIDRMask(64, 128)},
					Gw:  peer.underlay.AsSlice(),
				})
			}))
		}
	}
	for _, n := range w.nodes {
		must(t, n.ns.WaitUp(t.Context(), "eth0"))
	}
	openAll(t, endpoint.Veth, w.nodes...)
	for i, n := range w.nodes {
		s, err := n.datapath.Nimitz()
		must(t, err)
		w.switches = append(w.switches, s)
		entries := []pipeline.Entry{pipeline.Peer{Nodes: netip.MustParsePrefix("fd70:696c:6100::/48")}}
		for j, peer := range w.nodes {
			for _, to := range overlay(j + 1) {
				if i != j {
					entries = append(entries, pipeline.Forward{
						VNI: 7, To: to, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(peer.prefix),
					})
				}
			}
		}
		must(t, s.Apply(t.Context(), nil, entries))
	}
	return w
}

func (w *frontWire) add(t testing.TB, node int, host byte) *testContainer {
	return w.nodes[node].addOverlay(t, w.switches[node], node+1, 7, host)
}

// offload makes all nodes use the frontends for the backend's containers.
func (w *frontWire) offload(t testing.TB, asks bool, containers ...*testContainer) {
	t.Helper()
	o := pipeline.Offload{ID: frontOffload, VNI: 7, Backend: w.nodes[ofBackend].prefix, Epoch: frontEpoch}
	o.To = [8]netip.Prefix{w.nodes[ofFront1].prefix, w.nodes[ofFront2].prefix}
	copy(o.From[:], o.To[:])
	for i, s := range w.switches {
		e := o
		e.Fronts = i == ofFront1 || i == ofFront2
		entries := []pipeline.Entry{e}
		if i == ofBackend {
			entries = append(entries, pipeline.Backend{VNI: 7, Offload: frontOffload, Asks: asks})
		} else {
			for _, to := range overlay(ofBackend + 1) {
				entries = append(entries, pipeline.Forward{
					VNI: 7, To: to, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(o.Backend), Offload: frontOffload,
				})
			}
		}
		for _, c := range containers {
			if e.Fronts {
				for _, a := range c.record.Attachments {
					entries = append(entries, pipeline.Fronted{
						VNI: 7, Address: a.Address, Offload: frontOffload, App: 70,
					})
				}
			}
		}
		must(t, s.Apply(t.Context(), nil, entries))
	}
}

// rules makes a node accept TCP to port 80 and ICMP and UDP to all, or, for a backend without rules, nothing.
func (n *testNode) rules(t testing.TB, none bool) {
	t.Helper()
	if none {
		n.says(t, 10, 1, denies|ruleNothing, 0, 0)
	} else {
		n.says(t, 10, 1, accepts|ruleWeb, 81, denies|ruleMail)
	}
	n.says(t, 20, 1, accepts|ruleWeb, 0, 0)
	must(t, n.datapath.Objects.PolSubjectsV1.Put(
		bpfobj.PilasterPolTargetKey{Tenant: 7, App: appAny}, bpfobj.PilasterPolTarget{Sets: [2]uint64{20, 10}},
	))
	n.voidVerdicts(t)
}

func (w *frontWire) sent(t *testing.T, node int) (all [8]uint64) {
	t.Helper()
	each, err := w.nodes[node].datapath.Messages()
	must(t, err)
	return each[frontOffload]
}

// connects reports whether a TCP connection to a port succeeds.
func connects(t *testing.T, from, to *testContainer, port int) bool {
	t.Helper()
	var l net.Listener
	must(t, to.ns.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(to.seen(), uint16(port)).String())
		return err
	}))
	defer l.Close()
	var conn net.Conn
	var err error
	must(t, from.ns.Do(func() error {
		conn, err = (&net.Dialer{Timeout: impatience}).DialContext(t.Context(), "tcp", l.Addr().String())
		return nil
	}))
	if err != nil {
		return false
	}
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	conn.Close()
	return true
}

// segments sends ten datagrams in one piece, and returns how many arrive.
func segments(t *testing.T, from, to *testContainer) (arrived int) {
	t.Helper()
	listen := func(c *testContainer) (conn *net.UDPConn) {
		must(t, c.ns.Do(func() (err error) {
			conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.seen(), 0)))
			return err
		}))
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	a, b := listen(from), listen(to)
	raw, err := a.SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000)
	}))
	must(t, err)
	_, err = a.WriteTo(make([]byte, 10_000), b.LocalAddr())
	must(t, err)
	must(t, b.SetDeadline(time.Now().Add(impatience)))
	for buf := make([]byte, 2000); ; arrived++ {
		if _, _, err := b.ReadFromUDPAddrPort(buf); err != nil {
			return arrived
		}
	}
}

// TestFrontends: packets to an offloaded container pass a frontend, whose rules decide, from containers of another
// node, of a frontend and of the backend itself; its own connections and their answers pass too (Nezha §3, NZ1, NZ2).
func TestFrontends(t *testing.T) {
	w := newFrontWire(t)
	hot, beside := w.add(t, ofBackend, 2), w.add(t, ofBackend, 3)
	far, near := w.add(t, ofSender, 2), w.add(t, ofFront1, 2)
	for i, n := range w.nodes {
		n.rules(t, i == ofBackend)
	}
	w.offload(t, true, hot, beside)
	for family := range 2 {
		hot, beside, far, near := hot.of(family), beside.of(family), far.of(family), near.of(family)
		for name, pair := range map[string][2]*testContainer{
			"from far": {far, hot}, "from a frontend": {near, hot}, "from beside": {beside, hot}, "to far": {hot, far},
			"to a frontend": {hot, near}, "to beside": {hot, beside},
		} {
			t.Run(fmt.Sprintf("%s %v", name, pair[1].seen()), func(t *testing.T) {
				from, to := pair[0], pair[1]
				mustReach(t, from, to, "ping")
				if !connects(t, from, to, 80) {
					t.Error("port 80 is closed")
				}
				if connects(t, from, to, 81) {
					t.Error("port 81 is open")
				}
				transfer(t, from, to, 4<<20)
				datagram(t, from, to, 100)
				datagram(t, from, to, 20000)
			})
		}
	}
	if got := segments(t, far.of(1), hot.of(1)); got != 10 {
		t.Errorf("%d of 10 datagrams sent with UDP_SEGMENT arrived", got)
	}
	w.onlyPackets(t, func() {
		for _, from := range []*testContainer{far, near, beside} {
			if !connects(t, from.of(1), hot.of(1), 80) || !connects(t, hot.of(1), from.of(1), 80) {
				t.Error("port 80 is closed")
			}
		}
	})
	for i := range w.nodes {
		t.Logf("node %d sent %v, dropped %v", i, w.sent(t, i), w.nodes[i].drops(t))
	}
	for _, i := range []int{ofFront1, ofFront2} {
		if sent := w.sent(t, i); sent[1] == 0 || sent[4] == 0 {
			t.Errorf("frontend %d sent %v by kind, want pre-actions and answers", i, sent)
		}
	}
}

// onlyPackets checks that all that the nodes receive meanwhile are packets of containers, in VXLAN or in messages, and
// neighbour discovery: no node tells another about a session (NZ1, NZ2).
func (w *frontWire) onlyPackets(t *testing.T, meanwhile func()) {
	t.Helper()
	var captures []*packet.Capture
	for _, n := range w.nodes {
		captures = append(captures, capture(t, n.ns))
	}
	meanwhile()
	kinds := map[byte]int{}
	for i, c := range captures {
		hub, err := packet.NewInjector(w.hub, fmt.Sprint("port", i))
		must(t, err)
		defer hub.Close()
		end := packet.NewSentinel()
		must(t, hub.Send(append([]byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x88\xb5"), end[:]...)))
		deadline, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		got, err := c.Until(deadline, end.In)
		must(t, err)
		for _, c := range got[:len(got)-1] {
			p, err := packet.DecodeFrame(c.Frame)
			gram, isUDP := p.Body.(packet.UDP)
			icmp, isICMP := p.Body.(packet.ICMP)
			switch {
			case isICMP && icmp.Type >= 130, isUDP && gram.DestinationPort == pipeline.UDPPort:
			case isUDP && gram.DestinationPort == pipeline.OffloadPort && len(c.Frame) > atPre+32:
				inner, err := packet.DecodeFrame(c.Frame[atPre+32:])
				if _, isTCP := inner.Body.(packet.TCP); err != nil || !isTCP {
					t.Errorf("node %d receives a message without a packet: %+v, %v", i, inner, err)
				}
				kinds[c.Frame[atKind]]++
			default:
				t.Errorf("node %d receives %x: %+v, %v", i, c.Frame, p, err)
			}
		}
	}
	if len(kinds) != 3 || kinds[1] == 0 || kinds[3] == 0 || kinds[4] == 0 {
		t.Errorf("messages by kind %v, want pre-actions, questions and answers", kinds)
	}
}

// Offsets in a message's frame.
const (
	atSource = 14 + 8
	atVNI    = 66
	atNSH    = 70
	atPath   = 74
	atMsg    = 78
	atKind   = atMsg + 5
	atEpoch  = atMsg + 44
	atApps   = atMsg + 48
	atFrom   = atMsg + 52
	atPre    = atMsg + 56
)

// message captures the next message to a node, of a datagram that a function sends.
func (w *frontWire) message(t *testing.T, node int, kind byte, send func()) []byte {
	t.Helper()
	c := capture(t, w.nodes[node].ns)
	send()
	deadline, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	got, err := c.Until(deadline, func(c packet.Captured) bool {
		return len(c.Frame) > atPre && binary.BigEndian.Uint16(c.Frame[56:58]) == pipeline.OffloadPort &&
			c.Frame[atKind] == kind
	})
	must(t, err)
	return got[len(got)-1].Frame
}

// readMessage compares the fields that tshark reads in a message: version, O bit, TTL, length in words, MD type, next
// protocol, service path and index, class, type and length of the metadata, and the metadata's first bytes.
func (w *frontWire) readMessage(t *testing.T, frame []byte, want string) {
	t.Helper()
	file := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4) // pcap
	for _, v := range []uint32{2 | 4<<16, 0, 0, 1 << 18, 1, 0, 0, uint32(len(frame)), uint32(len(frame))} {
		file = binary.LittleEndian.AppendUint32(file, v)
	}
	path := filepath.Join(t.TempDir(), "message.pcap")
	must(t, os.WriteFile(path, append(file, frame...), 0o600))
	args := []string{"-n", "-r", path, "-T", "fields", "-E", "separator=|"}
	for _, field := range []string{
		"version", "Obit", "ttl", "length", "mdtype", "nextproto", "spi", "si", "metadataclass", "metadatatype",
		"metadatalen", "metadata",
	} {
		args = append(args, "-e", "nsh."+field)
	}
	out, err := exec.Command("tshark", args...).Output()
	must(t, err)
	if got := strings.TrimSpace(string(out)); !strings.HasPrefix(got, want) {
		t.Errorf("tshark: reads %s, want %s", got, want)
	}
}

// TestFrontendMessages: a backend accepts messages of its frontends only, a frontend those of its backends, and only
// whole ones of this activation. What a message says about a packet is no use to others.
func TestFrontendMessages(t *testing.T) {
	keepOrder(t) // and the cache of verdicts
	w := newFrontWire(t)
	hot, beside, far := w.add(t, ofBackend, 2).of(1), w.add(t, ofBackend, 3).of(1), w.add(t, ofSender, 2).of(1)
	for i, n := range w.nodes {
		n.rules(t, i == ofBackend)
	}
	w.offload(t, true, hot, beside)
	hub := map[int]*packet.Injector{}
	must(t, w.switches[ofSender].Apply(t.Context(), nil, []pipeline.Entry{pipeline.Offload{
		ID: 78, VNI: 8, Backend: netip.MustParsePrefix("fd70:696c:6100:9::/64"), Epoch: 1, Fronts: true,
	}}))
	for i := range w.nodes {
		var err error
		hub[i], err = packet.NewInjector(w.hub, fmt.Sprint("port", i))
		must(t, err)
		t.Cleanup(func() { hub[i].Close() })
	}
	pre := w.message(t, ofBackend, 1, func() { datagram(t, far, hot, 100) })
	answer := w.message(t, ofBackend, 4, func() { datagram(t, beside, hot, 100) })
	var ask []byte
	asked := ofFront1
	for _, i := range []int{ofFront1, ofFront2} { // the answer's frontend
		if node := w.nodes[i].prefix.Addr().As16(); bytes.Equal(answer[atSource:atSource+8], node[:8]) {
			asked = i
		}
	}
	ask = bytes.Clone(answer) // what it answered
	copy(ask[atSource:atSource+16], answer[atSource+16:])
	copy(ask[atSource+16:atSource+32], answer[atSource:])
	ask[atPath+3], ask[atKind] = 255, 3

	w.readMessage(t, pre, fmt.Sprintf("0|0|0x003f|24|2|3|%d|254|%d|1|0x54|01011100%x", frontOffload, 0xfff6,
		hot.seen().As16()))
	w.readMessage(t, ask, fmt.Sprintf("0|0|0x003f|24|2|3|%d|255|%d|1|0x54|01031100", frontOffload, 0xfff6))

	put := func(at int, b ...byte) func([]byte) { return func(f []byte) { copy(f[at:], b) } }
	from := func(node int) func([]byte) {
		a := pipeline.VTEP(w.nodes[node].prefix).As16()
		return put(atSource, a[:]...)
	}
	to := func(node int) func([]byte) {
		a := pipeline.VTEP(w.nodes[node].prefix).As16()
		return put(atSource+16, a[:]...)
	}
	arrives := capture(t, hot.ns)
	// judge sends a packet and waits until it arrives or a node drops it, why if that is not 0.
	judge := func(name string, node int, send func(), inner []byte, answers uint64, why dropreason.Reason) {
		t.Helper()
		before, sent := w.nodes[node].drops(t), w.sent(t, node)
		send()
		var got map[string]uint64
		arrived := false
		for end := time.Now().Add(patience); !arrived && len(got) == 0 && time.Now().Before(end); {
			soon, stop := context.WithTimeout(t.Context(), time.Millisecond)
			_, err := arrives.Until(soon, func(got packet.Captured) bool { return bytes.Equal(got.Frame[14:], inner) })
			stop()
			arrived, got = err == nil, w.nodes[node].counted(t, before)
		}
		answered := w.sent(t, node)[4] - sent[4]
		switch {
		case arrived != (why == 0):
			t.Errorf("%s: delivered %v, dropped %v", name, arrived, got)
		case why != 0 && (got[why.String()] != 1 || len(got) != 1):
			t.Errorf("%s: dropped %v, want %v", name, got, why)
		case why == 0 && len(got) != 0, answered != answers:
			t.Errorf("%s: dropped %v, %d answers", name, got, answered)
		}
	}
	const inner = atPre + 32
	for _, c := range []struct {
		name  string
		frame []byte
		to    int
		with  func([]byte)
		why   dropreason.Reason // 0: accepted
	}{
		{"pre-actions", pre, ofBackend, nil, 0},
		{"an answer", answer, ofBackend, nil, 0},
		{"a question", ask, asked, nil, 0},
		{"pre-actions of a node that is no frontend", pre, ofBackend, from(ofSender), dropreason.NshForged},
		{"pre-actions of the backend itself", pre, ofBackend, from(ofBackend), dropreason.OwnSource},
		{"pre-actions of a host", pre, ofBackend, put(atSource+15, 3), dropreason.NshForged},
		{"a question of a node that is no backend", ask, asked, from(ofSender), dropreason.NshForged},
		{"a question to a node that is no frontend", ask, ofSender, to(ofSender), dropreason.NshForged},
		{"pre-actions to a frontend", pre, ofFront1, func(f []byte) {
			from(ofFront2)(f)
			to(ofFront1)(f)
		}, dropreason.NshForged},
		{"a question to the backend", ask, ofBackend, nil, dropreason.OwnSource},
		{"a question among pre-actions", pre, ofBackend, put(atKind, 3), dropreason.NshMalformed},
		{"a question with pre-actions' index", ask, asked, put(atPath+3, 254), dropreason.NshMalformed},
		{"another index", pre, ofBackend, put(atPath+3, 7), dropreason.NshMalformed},
		{"of another offload", pre, ofBackend, put(atPath, 0, 0, 78), dropreason.NshUnknown},
		{"of another activation", pre, ofBackend, put(atEpoch, 1), dropreason.NshStale},
		{"a question of another activation", ask, asked, put(atEpoch, 1), dropreason.NshStale},
		{"of another tenant", pre, ofBackend, put(atVNI, 0, 0, 8), dropreason.NshForged},
		{"of another version", pre, ofBackend, put(atMsg+4, 2), dropreason.NshMalformed},
		{"of another class", pre, ofBackend, put(atMsg, 1), dropreason.NshMalformed},
		{"of another type", pre, ofBackend, put(atMsg+2, 2), dropreason.NshMalformed},
		{"of another length", pre, ofBackend, put(atMsg+3, 80), dropreason.NshMalformed},
		{"of no kind", pre, ofBackend, put(atKind, 0), dropreason.NshMalformed},
		{"of an unknown kind", pre, ofBackend, put(atKind, 7), dropreason.NshMalformed},
		{"of MD type 1", pre, ofBackend, put(atNSH+2, 1), dropreason.NshMalformed},
		{"of a shorter NSH", pre, ofBackend, put(atNSH+1, pre[atNSH+1]-1), dropreason.NshMalformed},
		{"NSH in NSH", pre, ofBackend, put(atNSH+3, 4), dropreason.NshMalformed},
		{"pre-actions of another version", pre, ofBackend, put(atPre, 9), dropreason.PolicyDenied},
		{"pre-actions for another app", pre, ofBackend, put(atApps+1, 71), dropreason.NshStale},
		{"an answer for another app", answer, ofBackend, put(atApps+1, 71), dropreason.NshStale},
		{"an answer for another container", answer, ofBackend, put(atFrom, 0, 0, 0, 1), dropreason.NshForged},
		{"an answer for no port", answer, ofBackend, put(atFrom, 9), dropreason.NshMalformed},
	} {
		frame := bytes.Clone(c.frame)
		if c.with != nil {
			c.with(frame)
		}
		copy(frame, w.nodes[c.to].mac(t))
		answers := uint64(0)
		if c.to == asked && c.why == 0 {
			answers = 1
		}
		judge(c.name, c.to, func() { must(t, hub[c.to].Send(frame)) }, frame[inner+14:], answers, c.why)
	}

	// The verdict of an established session is cached with the pre-actions, and counts only for packets with these.
	ports := pre[inner+14+40:]
	far2hot := packet.UDP{
		SourcePort: binary.BigEndian.Uint16(ports), DestinationPort: binary.BigEndian.Uint16(ports[2:]),
		Payload: []byte("far"),
	}
	back := capture(t, far.ns)
	must(t, injector(t, hot.ns).Send(packet.Packet{
		Source: hot.seen(), Destination: far.seen(),
		Body: packet.UDP{
			SourcePort: far2hot.DestinationPort, DestinationPort: far2hot.SourcePort, Payload: []byte("hot"),
		},
	}.Frame(host.GatewayMAC, hot.record.Device.ContainerMAC)))
	deadline, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	_, err := back.Until(deadline, func(c packet.Captured) bool { return bytes.HasSuffix(c.Frame, []byte("hot")) })
	must(t, err)
	copy(pre, w.nodes[ofBackend].mac(t))
	denied := bytes.Clone(pre)
	denied[atPre+2] = 0
	message := func(frame []byte) func() { return func() { must(t, hub[ofBackend].Send(frame)) } }
	judge("of an established session", ofBackend, message(pre), pre[inner+14:], 0, 0)
	judge("which the rules deny now", ofBackend, message(denied), pre[inner+14:], 0, dropreason.PolicyDenied)
	judge("which they accept again", ofBackend, message(pre), pre[inner+14:], 0, 0)
	var direct []pipeline.Entry
	for _, to := range overlay(ofBackend + 1) {
		direct = append(direct, pipeline.Forward{
			VNI: 7, To: to, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(w.nodes[ofBackend].prefix),
		})
	}
	must(t, w.switches[ofSender].Apply(t.Context(), nil, direct))
	must(t, w.switches[ofBackend].Apply(t.Context(), nil, []pipeline.Entry{
		pipeline.Backend{VNI: 7, Offload: frontOffload},
	}))
	must(t, hub[ofBackend].Send(pre)) // so that it is cached now
	judge("without pre-actions, at a backend with rules", ofBackend, func() {
		must(t, injector(t, far.ns).Send(packet.Packet{
			Source: far.seen(), Destination: hot.seen(), Body: far2hot,
		}.Frame(host.GatewayMAC, far.record.Device.ContainerMAC)))
	}, []byte("never"), 0, dropreason.PolicyDenied)
}

// TestFrontendDrops: what cannot be decided is dropped and counted, and never accepted.
func TestFrontendDrops(t *testing.T) {
	w := newFrontWire(t)
	hot, beside, far := w.add(t, ofBackend, 2).of(1), w.add(t, ofBackend, 3).of(1), w.add(t, ofSender, 2).of(1)
	w.nodes[ofSender].rules(t, false)
	w.nodes[ofBackend].rules(t, true)
	w.offload(t, true, hot)
	fronts := []int{ofFront1, ofFront2}
	dropped := func(name string, why dropreason.Reason, at []int, from, to *testContainer) {
		t.Helper()
		before := map[int]map[string]uint64{}
		for _, i := range at {
			before[i] = w.nodes[i].drops(t)
		}
		if r := from.ping(t, to.seen(), 56, impatience); r.Received != 0 {
			t.Errorf("%s: %d pings answered", name, r.Received)
		}
		counted := uint64(0)
		for _, i := range at {
			got := w.nodes[i].counted(t, before[i])
			counted += got[why.String()]
			if delete(got, why.String()); len(got) > 0 {
				t.Errorf("%s: node %d dropped %v", name, i, got)
			}
		}
		if counted == 0 {
			t.Errorf("%s: no %v counted", name, why)
		}
	}
	dropped("at frontends without rules", dropreason.NshUnknown, fronts, far, hot)
	dropped("asking frontends without rules", dropreason.NshUnknown, fronts, beside, hot)
	for _, i := range fronts {
		w.nodes[i].rules(t, false)
	}
	mustReach(t, far, hot, "with rules")
	// The backend has no rules, so it asks about a packet that a frontend has passed on.
	mustReach(t, far, beside, "a container that the frontends do not know")
	if connects(t, far, beside, 81) {
		t.Error("port 81 of a container that the frontends do not know is open")
	}

	// Rules for what leaves the region apply where it begins; an error about it comes back after the frontend's answer.
	backend := w.switches[ofBackend]
	outside := netip.MustParsePrefix("fd10:9::/32")
	must(t, backend.Apply(t.Context(), nil, []pipeline.Entry{pipeline.Forward{
		VNI: 7, To: outside, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(w.nodes[ofSender].prefix), Outside: true,
	}}))
	inject, errors := injector(t, hot.ns), capture(t, hot.ns)
	must(t, inject.Send(packet.Packet{
		Source: hot.seen(), Destination: outside.Addr().Next(), HopLimit: 1,
		Body: packet.UDP{SourcePort: 5, DestinationPort: 6, Payload: []byte("far")},
	}.Frame(host.GatewayMAC, hot.record.Device.ContainerMAC)))
	deadline, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	if _, err := errors.Until(deadline, func(c packet.Captured) bool {
		return len(c.Frame) > 54 && c.Frame[20] == packet.ProtocolICMPv6 && c.Frame[54] == packet.TimeExceeded
	}); err != nil {
		t.Errorf("out of hops: no error about it: %v; dropped %v", err, w.nodes[ofBackend].drops(t))
	}

	o := pipeline.Offload{ID: frontOffload, VNI: 7, Backend: w.nodes[ofBackend].prefix, Epoch: frontEpoch}
	must(t, backend.Apply(t.Context(), nil, []pipeline.Entry{o}))
	dropped("asking no node", dropreason.NoFrontend, []int{ofBackend}, beside, hot)
	o.To[0] = netip.MustParsePrefix("2001:db8:1::/64")
	must(t, backend.Apply(t.Context(), nil, []pipeline.Entry{o}))
	dropped("asking who has no route", dropreason.NoRoute, []int{ofBackend}, beside, hot)
}

// TestFrontendProbe: a frontend's program answers the backend's probes, and no other node else's (NZ6).
func TestFrontendProbe(t *testing.T) {
	w := newFrontWire(t)
	hot := w.add(t, ofBackend, 2)
	for i, n := range w.nodes {
		if i != ofFront2 {
			n.rules(t, i == ofBackend)
		}
	}
	w.offload(t, true, hot)
	o := dpapi.Probe{Offload: frontOffload, VNI: 7, Epoch: frontEpoch}
	backend := w.nodes[ofBackend].datapath
	answered := func(from int, o dpapi.Probe, to int) bool {
		t.Helper()
		d := w.nodes[from].datapath
		before := w.sent(t, to)[6]
		must(t, d.Probe(o, w.nodes[to].prefix))
		for end := time.Now().Add(impatience); time.Now().Before(end); time.Sleep(time.Millisecond) {
			ago, ok, err := backend.ProbeAnswered(frontOffload, w.nodes[to].prefix)
			must(t, err)
			if ok && ago < impatience && w.sent(t, to)[6] > before {
				return true
			}
		}
		return false
	}
	if answered(ofBackend, o, ofFront2) {
		t.Error("a frontend without rules answers")
	}
	answers := backend.Objects.NimProbesV2
	if n, err := bpfobj.MapKeys[bpfobj.PilasterProbeKey](answers); err != nil || len(n) != 2 ||
		answers.MaxEntries() < maxOffloads*tenant.MaxFrontends {
		t.Errorf("%d frontends may answer, of %d, %v; the offload has 2", len(n), answers.MaxEntries(), err)
	}
	w.nodes[ofFront2].rules(t, false)
	if !answered(ofBackend, o, ofFront1) || !answered(ofBackend, o, ofFront2) {
		t.Error("a frontend does not answer")
	}
	if answered(ofSender, o, ofFront1) {
		t.Error("a frontend answers a node that is not the backend")
	}
	stale := o
	stale.Epoch++
	if answered(ofBackend, stale, ofFront1) {
		t.Error("a frontend answers a probe of another activation")
	}
	if answered(ofBackend, o, ofSender) {
		t.Error("a node that is no frontend answers")
	}

	stop, closed := make(chan struct{}), make(chan error, 1)
	go func() {
		var err error
		for err == nil {
			select {
			case <-stop:
				closed <- nil
				return
			default:
				err = backend.CloseProbes()
			}
		}
		closed <- err
	}()
	for range 2000 {
		if err := backend.Probe(o, w.nodes[ofFront1].prefix); err != nil {
			t.Errorf("while the socket is closed again and again: %v", err)
			break
		}
	}
	close(stop)
	must(t, <-closed)

	entries, err := w.switches[ofBackend].Entries(t.Context())
	must(t, err)
	must(t, w.switches[ofBackend].Apply(t.Context(), slices.DeleteFunc(entries, func(e pipeline.Entry) bool {
		return e.Stage() != pipeline.Sharing
	}), nil))
	if n, err := bpfobj.MapKeys[bpfobj.PilasterProbeKey](answers); err != nil || len(n) > 0 {
		t.Errorf("after the end %d frontends may answer, %v", len(n), err)
	}
}

// TestFrontendWork: what a frontend is charged for an offload is counted: messages, runs and time of the programs that
// the offload's packets pass, and packets of containers' devices. Counters end with the offload (NZ5).
func TestFrontendWork(t *testing.T) {
	w := newFrontWire(t)
	hot, far := w.add(t, ofBackend, 2), w.add(t, ofSender, 2)
	for i, n := range w.nodes {
		n.rules(t, i == ofBackend)
	}
	w.offload(t, true, hot)
	counting, err := w.nodes[ofFront1].datapath.MeasureWork()
	must(t, err)
	defer counting.Close()
	type counted struct {
		work    dpapi.Work
		sent    [8]uint64
		packets map[int]uint64
	}
	read := func(node int) (c counted) {
		t.Helper()
		c.work, err = w.nodes[node].datapath.Work()
		must(t, err)
		c.packets, err = w.nodes[node].datapath.DevicePackets()
		must(t, err)
		c.sent = w.sent(t, node)
		return c
	}
	start := read(ofSender)
	charged := func(when string, fronts ...int) {
		t.Helper()
		before := map[int]counted{}
		for _, node := range fronts {
			before[node] = read(node)
		}
		for range 20 { // each one by the frontend of its port
			if !connects(t, far.of(1), hot.of(1), 80) {
				t.Fatal("port 80 is closed")
			}
		}
		for _, node := range fronts {
			was, is := before[node], read(node)
			passed := is.sent[dpapi.MessagePre] - was.sent[dpapi.MessagePre]
			fabric, tunnel := is.work.FromFabric.Count-was.work.FromFabric.Count,
				is.work.FromTunnel.Count-was.work.FromTunnel.Count
			out := is.work.ToFabric.Count - was.work.ToFabric.Count
			if passed == 0 || fabric < passed || tunnel < passed || out < passed {
				t.Errorf("%s, node %d: %d packets to the backend, %d runs for packets of the fabric, %d of the "+
					"tunnel, %d to the fabric", when, node, passed, fabric, tunnel, out)
			}
			spent := is.work.FromTunnel.Time - was.work.FromTunnel.Time
			if total := is.work.Total - was.work.Total; spent <= 0 || total <= spent {
				t.Errorf("%s, node %d: %v in all, %v for packets of the tunnel", when, node, total, spent)
			}
		}
	}
	charged("without a trace", ofFront1, ofFront2)
	ctx, end := context.WithCancel(t.Context())
	defer end()
	events, err := w.nodes[ofFront1].datapath.Follow(ctx, dpapi.PacketFilter{
		Sources: []netip.Addr{hot.of(1).seen()}, Destinations: []netip.Addr{hot.of(1).seen()}, // no packet
	})
	must(t, err)
	charged("while a trace runs", ofFront1)
	during := read(ofFront1).work
	end()
	for range events {
	}
	if is := read(ofFront1).work; is.Total < during.Total || is.FromTunnel.Count < during.FromTunnel.Count {
		t.Errorf("the end of a trace takes work back: %+v, during it %+v", is, during)
	}
	charged("after a trace", ofFront1)
	index := far.record.Device.HostIfindex
	if n := read(ofSender).packets[index] - start.packets[index]; n < 60 {
		t.Errorf("%d packets of the container that began 20 connections", n)
	}
	used, capacity, err := w.nodes[ofBackend].datapath.TenantSessions()
	must(t, err)
	if used[7] < 20 || capacity < used[7] {
		t.Errorf("%v of %d sessions", used, capacity)
	}
	entries, err := w.switches[ofFront1].Entries(t.Context())
	must(t, err)
	must(t, w.switches[ofFront1].Apply(t.Context(), slices.DeleteFunc(entries, func(e pipeline.Entry) bool {
		return e.Stage() != pipeline.Sharing
	}), nil))
	left, err := w.nodes[ofFront1].datapath.Messages()
	must(t, err)
	if len(left) > 0 {
		t.Errorf("after the end: %v", left)
	}
}
