package datapath

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
)

// splitPackets is how many random packets TestFrontendVerdicts sends; PILASTER_TEST_PACKETS sets another number.
func splitPackets(t *testing.T) int {
	n, err := strconv.Atoi(os.Getenv("PILASTER_TEST_PACKETS"))
	if os.Getenv("PILASTER_TEST_PACKETS") == "" {
		n, err = 6000, nil
	}
	must(t, err)
	return n
}

// TestFrontendVerdicts: random packets get the same verdict, leave as the same bytes and give the same sessions and
// hits of rules with frontends, without them, and in a reference that knows neither.
func TestFrontendVerdicts(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	beds := []*splitBed{newSplitBed(t, false), newSplitBed(t, true)}
	const batch = 2000
	var delivered, all int
	decides := func() bool { return delivered >= all/10 && delivered <= all*9/10 }
	// A few sets of random rules may all deny, or all accept: then there are more.
	for sent := 0; sent < splitPackets(t) || !decides() && sent < splitPackets(t)+20*batch; sent += batch {
		rules := splitRules{
			out: splitRule{r.IntN(3) > 0, uint16(80 + r.IntN(3)), r.IntN(2) == 0},
			in:  splitRule{r.IntN(3) > 0, uint16(80 + r.IntN(3)), r.IntN(2) == 0},
		}
		ref := splitReference{rules: rules, sessions: map[splitKey]splitState{}}
		for _, b := range beds {
			b.restart(t, rules)
		}
		var want []splitPacket
		for i := range batch {
			p := randomSplit(r, uint32(sent+i))
			if r.IntN(250) == 0 { // rules change in between
				rules.in.all = !rules.in.all
				ref.rules = rules
				for _, b := range beds {
					b.apply(t, rules)
				}
			}
			if ref.passes(p) {
				want = append(want, p)
			}
			for _, b := range beds {
				b.send(t, p)
			}
		}
		outs := [2]map[string]int{beds[0].out(t), beds[1].out(t)}
		ids := map[uint32]bool{}
		for frame := range outs[0] {
			ids[binary.BigEndian.Uint32([]byte(frame)[len(frame)-4:])] = true
		}
		for _, p := range want {
			if !ids[p.id] && !t.Failed() {
				t.Errorf("reference: accepts %+v, which is not delivered", p)
			}
			delete(ids, p.id)
		}
		if len(ids) > 0 {
			t.Errorf("reference: denies packets %v, which are delivered", slices.Collect(maps.Keys(ids)))
		}
		if !maps.Equal(outs[0], outs[1]) {
			t.Errorf("bytes: %d frames without frontends, %d with them, differ", len(outs[0]), len(outs[1]))
		}
		sessions := [2]map[bpfobj.PilasterSessionKey]bpfobj.PilasterSessionState{
			beds[0].sessions(t), beds[1].sessions(t),
		}
		if !maps.Equal(sessions[0], sessions[1]) {
			t.Errorf("sessions: %d without frontends, %d with them, differ", len(sessions[0]), len(sessions[1]))
		}
		hits := [2]map[uint32]uint64{beds[0].hits(t), beds[1].hits(t)}
		if !maps.Equal(hits[0], hits[1]) {
			t.Errorf("hits: %v without frontends, %v with them", hits[0], hits[1])
		}
		delivered, all = delivered+len(want), all+batch
		if t.Failed() {
			t.Fatalf("batch of packets %d to %d, rules %+v", sent, sent+batch, rules)
		}
	}
	t.Logf("%d of %d packets delivered", delivered, all)
	if !decides() {
		t.Errorf("%d of %d packets are delivered: the rules decide little", delivered, all)
	}
	if sent := beds[1].sent(t, ofFront1); sent[1] == 0 || sent[2] == 0 || sent[4] == 0 {
		t.Errorf("a frontend sent %v by kind", sent)
	}
}

// splitBed is a frontWire whose containers send and capture.
type splitBed struct {
	*frontWire
	containers []*testContainer // hot, beside, far, near
	inject     []*packet.Injector
	captures   []*packet.Capture
	ends       []*packet.Injector // at the node's side of the containers' devices
	split      bool
}

func newSplitBed(t *testing.T, split bool) *splitBed {
	b := &splitBed{frontWire: newFrontWire(t), split: split}
	b.containers = []*testContainer{
		b.add(t, ofBackend, 2), b.add(t, ofBackend, 3), b.add(t, ofSender, 2), b.add(t, ofFront1, 2),
	}
	if split {
		b.offload(t, true, b.containers[:2]...)
	}
	for _, c := range b.containers {
		i, err := packet.NewInjector(c.ns, "eth0")
		must(t, err)
		t.Cleanup(func() { i.Close() })
		b.inject = append(b.inject, i)
		b.captures = append(b.captures, capture(t, c.ns))
		end, err := packet.NewInjector(c.node.ns, c.record.Device.HostName)
		must(t, err)
		t.Cleanup(func() { end.Close() })
		b.ends = append(b.ends, end)
		silence(t, c)
	}
	return b
}

// silence removes a container's addresses, so that its stack answers nothing.
func silence(t *testing.T, c *testContainer) {
	t.Helper()
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	all, err := h.AddrList(eth0, netlink.FAMILY_ALL)
	must(t, err)
	for _, a := range all {
		must(t, h.AddrDel(eth0, &a))
	}
}

// splitRule is the rule of one direction: for TCP to a port, and for all else.
type splitRule struct {
	all  bool // accepts
	port uint16
	one  bool // accepts
}

type splitRules struct{ out, in splitRule }

func (s splitRule) accepts(proto uint8, port uint16) bool {
	if proto == packet.ProtocolTCP && port == s.port {
		return s.one
	}
	return s.all
}

// Numbers of the rules.
const ruleSplit = 40

// restart begins a batch: without sessions, with these rules.
func (b *splitBed) restart(t *testing.T, rules splitRules) {
	t.Helper()
	for _, n := range b.nodes {
		(&progBench{testNode: n}).clearSessions(t)
		for rule := uint32(ruleSplit); rule < ruleSplit+4; rule++ {
			must(t, n.datapath.Objects.PolHitsV1.Put(rule, make([]uint64, len(n.counts(t)))))
		}
	}
	b.apply(t, rules)
	for i := range b.captures {
		b.drain(t, i)
	}
}

func (b *splitBed) apply(t *testing.T, rules splitRules) {
	t.Helper()
	word := func(accept bool, rule uint32) uint32 {
		if accept {
			return accepts | rule
		}
		return denies | rule
	}
	for i, n := range b.nodes {
		rules := rules
		if b.split && i == ofBackend {
			rules = splitRules{}
		}
		for table := range 3 { // remove the other ports' rules
			for _, set := range []uint64{10, 20} {
				_ = n.datapath.Objects.PolPortsV1.Delete(bpfobj.PilasterPortKey{
					Table: set, Port: bigEndian(uint16(80 + table)), Proto: packet.ProtocolTCP,
				})
			}
		}
		n.says(t, 20, 1, word(rules.out.all, ruleSplit), rules.out.port, word(rules.out.one, ruleSplit+1))
		n.says(t, 10, 1, word(rules.in.all, ruleSplit+2), rules.in.port, word(rules.in.one, ruleSplit+3))
		must(t, n.datapath.Objects.PolSubjectsV1.Put(
			bpfobj.PilasterPolTargetKey{Tenant: 7, App: appAny}, bpfobj.PilasterPolTarget{Sets: [2]uint64{20, 10}},
		))
		n.voidVerdicts(t)
	}
}

func (b *splitBed) sessions(t *testing.T) map[bpfobj.PilasterSessionKey]bpfobj.PilasterSessionState {
	t.Helper()
	all := map[bpfobj.PilasterSessionKey]bpfobj.PilasterSessionState{}
	(&progBench{testNode: b.nodes[ofBackend]}).forEachSession(t, func(s *bpfobj.PilasterSession) {
		all[s.Key] = s.State
	})
	return all
}

func (b *splitBed) hits(t *testing.T) map[uint32]uint64 {
	t.Helper()
	hits, err := b.nodes[ofBackend].datapath.RuleHits()
	must(t, err)
	return hits
}

// out returns the frames that the containers received, by container and what follows the MACs.
func (b *splitBed) out(t *testing.T) map[string]int {
	t.Helper()
	all := map[string]int{}
	for i := range b.captures {
		for _, frame := range b.drain(t, i) {
			if len(frame) > 14 && (frame[12] == 0x86 || frame[12] == 0x08 && frame[13] == 0) {
				all[fmt.Sprint(i)+string(frame[14:])]++
			}
		}
	}
	return all
}

// drain returns the frames that a container has received. A last frame from its node marks their end.
func (b *splitBed) drain(t *testing.T, i int) (frames [][]byte) {
	t.Helper()
	end := packet.NewSentinel()
	must(t, b.ends[i].Send(append([]byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x88\xb5"), end[:]...)))
	deadline, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	got, err := b.captures[i].Until(deadline, end.In)
	must(t, err)
	for _, c := range got[:len(got)-1] {
		frames = append(frames, c.Frame)
	}
	lost, err := b.captures[i].Lost()
	must(t, err)
	if lost > 0 {
		t.Fatalf("a capture lost %d frames", lost)
	}
	return frames
}

// splitPacket is a packet between two of the containers.
type splitPacket struct {
	id           uint32 // its last bytes
	from, to     int    // container
	family       int
	proto        uint8
	sport, dport uint16
	flags        packet.TCPFlags
	part         int // 0: whole; 1: first fragment; 2: later fragment
	fragment     uint32
	error        bool // an ICMP error about the packet in the opposite direction
}

func randomSplit(r *rand.Rand, id uint32) splitPacket {
	pairs := [][2]int{{2, 0}, {2, 0}, {0, 2}, {3, 0}, {0, 3}, {1, 0}, {0, 1}, {2, 1}}
	pair := pairs[r.IntN(len(pairs))]
	p := splitPacket{
		id: id, from: pair[0], to: pair[1], family: r.IntN(2),
		sport: uint16(1000 + r.IntN(4)), dport: uint16(80 + r.IntN(3)),
		proto: []uint8{packet.ProtocolTCP, packet.ProtocolTCP, packet.ProtocolUDP}[r.IntN(3)],
	}
	if r.IntN(2) == 0 { // an answer
		p.sport, p.dport = p.dport, p.sport
	}
	const syn, ack, fin, rst = packet.SYN, packet.ACK, packet.FIN, packet.RST
	if p.proto == packet.ProtocolTCP {
		p.flags = []packet.TCPFlags{syn, syn | ack, ack, ack, fin | ack, rst, syn | fin}[r.IntN(7)]
	}
	switch r.IntN(8) {
	case 0:
		p.part, p.fragment = 1, uint32(1+r.IntN(3))
	case 1:
		p.part, p.fragment = 2, uint32(1+r.IntN(3))
	case 2:
		p.error = true
	}
	return p
}

func (b *splitBed) send(t *testing.T, p splitPacket) {
	t.Helper()
	from, to := b.containers[p.from].of(p.family), b.containers[p.to].of(p.family)
	tail := binary.BigEndian.AppendUint32([]byte("wide"), p.id)
	body := func(sport, dport uint16) packet.Body {
		if p.proto == packet.ProtocolTCP {
			return packet.TCP{SourcePort: sport, DestinationPort: dport, Flags: p.flags, Payload: tail}
		}
		return packet.UDP{SourcePort: sport, DestinationPort: dport, Payload: tail}
	}
	out := packet.Packet{Source: from.seen(), Destination: to.seen(), Body: body(p.sport, p.dport)}
	switch {
	case p.error:
		e := overlayFamilies()[p.family].tooBig
		e.Payload = packet.Packet{
			Source: to.seen(), Destination: from.seen(), Body: body(p.dport, p.sport),
		}.Marshal()
		out.Body = e
	case p.part == 1:
		out.Extensions = []packet.Extension{packet.Fragment(0, true, p.fragment)}
	case p.part == 2:
		out.Extensions = []packet.Extension{packet.Fragment(64, false, p.fragment)}
		out.Body = packet.Raw{Proto: p.proto, Data: tail}
	}
	must(t, b.inject[p.from].Send(out.Frame(host.GatewayMAC, from.record.Device.ContainerMAC)))
}

// splitKey is a session at one end, splitState its state: written anew from the rules in
// docs/explanation/policy-and-sessions.md.
type splitKey struct {
	local, remote, family int
	lport, rport          uint16
	proto                 uint8
	fragment              uint32 // of an entry for later fragments
	out                   bool   // of such an entry: the container sends them
}

type splitState struct {
	first                      bool // the container opened it
	opener, other              bool // have sent
	openerFIN, otherFIN, reset bool
}

type splitReference struct {
	rules    splitRules
	sessions map[splitKey]splitState
}

// passes reports whether a packet is delivered, and keeps the sessions of both ends.
func (f splitReference) passes(p splitPacket) bool {
	here := splitKey{p.from, p.to, p.family, p.sport, p.dport, p.proto, 0, false}
	there := splitKey{p.to, p.from, p.family, p.dport, p.sport, p.proto, 0, false}
	return f.end(here, p, true, false) && f.end(there, p, false, true)
}

func (f splitReference) end(k splitKey, p splitPacket, out, checked bool) bool {
	fragments := splitKey{k.local, k.remote, k.family, 0, 0, 0, p.fragment, out}
	if p.family == 0 { // IPv4 has a number space for each protocol (RFC 791)
		fragments.proto = p.proto
	}
	if p.part == 2 {
		_, known := f.sessions[fragments]
		return known || !checked
	}
	accepts := func(opened bool) bool { // by the container
		port := k.lport
		if opened {
			port = k.rport
		}
		return !checked || f.rules.out.accepts(k.proto, port) && f.rules.in.accepts(k.proto, port)
	}
	s, known := f.sessions[k]
	closed := s.reset || s.openerFIN && s.otherFIN
	tcp := p.proto == packet.ProtocolTCP && !p.error
	opens := tcp && p.flags&(packet.SYN|packet.ACK|packet.RST) == packet.SYN
	fresh := !known || opens && (closed || out != s.first)
	first := s.first
	if fresh {
		first = out
	}
	if !accepts(first) {
		return false
	}
	if p.error {
		return true
	}
	if !(fresh && known && !closed) && !(fresh && tcp && p.flags&(packet.RST|packet.FIN) != 0) {
		if fresh {
			s = splitState{first: first}
		}
		opener := out == s.first
		switch {
		case tcp && p.flags&packet.RST != 0:
			s.reset = true
		default:
			s.opener, s.other = s.opener || opener, s.other || !opener
			if tcp && p.flags&packet.FIN != 0 {
				s.openerFIN, s.otherFIN = s.openerFIN || opener, s.otherFIN || !opener
			}
		}
		f.sessions[k] = s
	}
	if p.part == 1 {
		f.sessions[fragments] = splitState{}
	}
	return true
}

// of a capture's frame, for messages
func (p splitPacket) String() string {
	return fmt.Sprintf(
		"packet %d: %d to %d, family %d, protocol %d, ports %d to %d, flags %#x, part %d of %d, error %v",
		p.id, p.from, p.to, p.family, p.proto, p.sport, p.dport, p.flags, p.part, p.fragment, p.error)
}
