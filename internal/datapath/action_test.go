package datapath

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/packet"
)

// Of bpf/policy/ct.h.
const (
	wayTX, wayRX = 0, 1

	seenBeginner = 1 << (iota - 1)
	seenPeer
	established
	finBeginner
	finPeer
	reset
	adopted
)

// arrival is a packet of a session and its expected result.
type arrival struct {
	way    uint8
	flags  packet.TCPFlags
	error  bool
	passes bool
	by     uint8 // direction whose pre-action decides
	seen   uint8 // bits of the session afterwards; 0: the result has no session state
}

// TestAction checks the decision, action = f(packet, pre-actions, state), with Nezha's cases (NZ8, §5.1) and with whole
// connections.
func TestAction(t *testing.T) {
	b := newProgBench(t)
	const (
		tcp, udp = packet.ProtocolTCP, packet.ProtocolUDP
		syn, ack = packet.SYN, packet.ACK
		fin, rst = packet.FIN, packet.RST
	)
	handshake := []arrival{
		{wayTX, syn, false, true, wayTX, seenBeginner},
		{wayRX, syn | ack, false, true, wayTX, seenBeginner | seenPeer},
		{wayTX, ack, false, true, wayTX, seenBeginner | seenPeer | established},
	}
	const lives = seenBeginner | seenPeer | established
	after := func(more ...arrival) []arrival { return append(handshake[:len(handshake):len(handshake)], more...) }
	for _, c := range []struct {
		name     string
		proto    uint8
		out, in  bool // what rules accept
		arrivals []arrival
	}{
		{"begun here, answered although nothing may begin there (§5.1)", tcp, true, false, after(arrival{wayRX, ack,
			false, true, wayTX, lives})},
		{"begun there where nothing may (§5.1)", tcp, true, false, []arrival{{wayRX, syn, false, false, wayRX, 0}}},
		{"begun there, answered although nothing may begin here", tcp, false, true, []arrival{
			{wayRX, syn, false, true, wayRX, seenBeginner}, {wayTX, syn | ack, false, true, wayRX,
				seenBeginner | seenPeer},
			{wayRX, ack, false, true, wayRX, lives}, {wayTX, ack, false, true, wayRX, lives}}},
		{"begun here where nothing may", tcp, false, true, []arrival{{wayTX, syn, false, false, wayTX, 0}}},
		{"nothing may either way", udp, false, false, []arrival{{wayTX, 0, false, false, wayTX, 0}, {wayRX, 0, false,
			false, wayRX, 0}}},
		{"datagrams", udp, true, false, []arrival{{wayTX, 0, false, true, wayTX, seenBeginner}, {wayTX, 0, false, true,
			wayTX, seenBeginner},
			{wayRX, 0, false, true, wayTX, lives}, {wayTX, 0, false, true, wayTX, lives}}},
		{"a flood of SYN, answered, stays half open", tcp, false, true, []arrival{{wayRX, syn, false, true, wayRX,
			seenBeginner},
			{wayTX, syn | ack, false, true, wayRX, seenBeginner | seenPeer}, {wayRX, syn, false, true, wayRX,
				seenBeginner | seenPeer}, {wayTX, syn | ack, false, true, wayRX, seenBeginner | seenPeer}}},
		{"of the middle, by its own way", tcp, true, false, []arrival{{wayRX, ack, false, false, wayRX, 0},
			{wayTX, ack, false, true, wayTX, seenBeginner},
			{wayRX, ack, false, true, wayTX, seenBeginner | seenPeer}, {wayTX, ack, false, true, wayTX, lives}}},
		{"an end of nothing begins nothing", tcp, true, true, []arrival{{wayTX, rst, false, true, wayTX, 0},
			{wayTX, fin | ack, false, true, wayTX, 0}, {wayRX, rst | ack, false, true, wayRX, 0}}},
		{"both end", tcp, true, false, after(arrival{wayTX, fin | ack, false, true, wayTX, lives | finBeginner},
			arrival{wayRX, ack, false, true, wayTX, lives | finBeginner},
			arrival{wayRX, fin | ack, false, true, wayTX, lives | finBeginner | finPeer}, arrival{wayTX, ack, false,
				true, wayTX, lives | finBeginner | finPeer})},
		{"its ports are used again from here", tcp, true, false, after(arrival{wayTX, rst, false, true, wayTX,
			lives | reset}, arrival{wayTX, syn, false, true, wayTX, seenBeginner})},
		{"its ports are used again from there, which may not", tcp, true, false, after(arrival{wayTX, rst, false, true,
			wayTX, lives | reset}, arrival{wayRX, syn, false, false, wayRX, 0})},
		{"its ports are used again from there, which may", tcp, true, true, after(arrival{wayRX, rst, false, true,
			wayTX, lives | reset}, arrival{wayRX, syn, false, true, wayRX, seenBeginner})},
		{"another SYN from there ends nothing", tcp, true, true, after(arrival{wayRX, syn, false, true, wayRX, 0},
			arrival{wayRX, ack, false, true, wayTX, lives})},
		{"another SYN from there, which may not, ends nothing", tcp, true, false, after(arrival{wayRX, syn, false,
			false, wayRX, 0}, arrival{wayRX, ack, false, true, wayTX, lives})},
		{"an error about it", tcp, true, false, after(arrival{wayRX, 0, true, true, wayTX, 0}, arrival{wayRX, ack,
			false, true, wayTX, lives})},
		{"an error about nothing", tcp, true, false, []arrival{{wayRX, 0, true, false, wayRX, 0}}},
	} {
		request := bpfobj.PilasterActionRequest{}
		request.Pre.Version = 1
		request.Pre.Verdicts = [2]uint8{flag(c.out), flag(c.in)}
		for i, a := range c.arrivals {
			b.arrive(t, fmt.Sprintf("%s, packet %d", c.name, i), &request, c.proto, a)
		}
	}
}

// TestActionVersions: packets are denied if another build wrote the pre-actions or the state, whatever these contain.
func TestActionVersions(t *testing.T) {
	b := newProgBench(t)
	for name, change := range map[string]func(*bpfobj.PilasterActionRequest){
		"pre-actions without a version": func(r *bpfobj.PilasterActionRequest) { r.Pre.Version = 0 },
		"newer pre-actions":             func(r *bpfobj.PilasterActionRequest) { r.Pre.Version = 2 },
		"a newer state":                 func(r *bpfobj.PilasterActionRequest) { r.State.Version = 2 },
	} {
		request := bpfobj.PilasterActionRequest{}
		request.Pre.Version, request.Pre.Verdicts = 1, [2]uint8{1, 1}
		request.Pkt.Proto = packet.ProtocolUDP
		change(&request)
		b.ask(t, b.datapath.Objects.PilTryAction, &request)
		if o := request.Result; o.Verdict != 0 || o.State.Version != 0 {
			t.Errorf("%s: verdict %d, stores %+v; want a denial and no state", name, o.Verdict, o.State)
		}
	}
}

// arrive runs the decision on a packet, with the session state that the packets before it have left.
func (b *progBench) arrive(t *testing.T, name string, request *bpfobj.PilasterActionRequest, proto uint8, a arrival) {
	t.Helper()
	request.Pkt.Dir, request.Pkt.Proto, request.Pkt.Flags, request.Pkt.Error = a.way, proto, uint8(
		a.flags,
	), flag(
		a.error,
	)
	b.ask(t, b.datapath.Objects.PilTryAction, request)
	o := request.Result
	if passes := o.Verdict == 1; passes != a.passes || o.Dir != a.by {
		t.Errorf("%s: passes %v by what way %d may begin; want %v by %d", name, passes, o.Dir, a.passes, a.by)
	}
	begun := a.by
	if request.State.Version != 0 && o.State.Seen&adopted != 0 {
		begun = request.State.First // either end's rules may decide
	}
	if remembered := o.State.Version != 0; remembered != (a.seen != 0) ||
		remembered && (o.State.Seen != a.seen || o.State.First != begun) {
		t.Errorf("%s: remembers %+v, want %#x begun by way %d", name, o.State, a.seen, begun)
	}
	if o.State.Version != 0 {
		request.State = o.State
	}
}

// TestActionAdopts: if a connection may be older than the policies, the rules of either end may allow it, also when the
// rules change later. This exception allows no new connection.
func TestActionAdopts(t *testing.T) {
	b := newProgBench(t)
	const (
		tcp, udp = packet.ProtocolTCP, packet.ProtocolUDP
		syn, ack = packet.SYN, packet.ACK
		rst      = packet.RST
		lives    = seenBeginner | seenPeer | established | adopted
	)
	type step struct {
		name    string
		out, in bool // what rules accept from now on
		arrival
	}
	for proto, steps := range map[uint8][]step{
		udp: {{"a datagram", true, false, arrival{wayRX, 0, false, false, wayRX, 0}}},
		tcp: {
			{"a connection is begun", true, false, arrival{wayRX, syn, false, false, wayRX, 0}},
			{"an error about nothing", true, false, arrival{wayRX, 0, true, false, wayRX, 0}},
			{"neither may begin", false, false, arrival{wayRX, ack, false, false, wayTX, 0}},
			{"an end of it", true, false, arrival{wayRX, rst | ack, false, true, wayTX, 0}},
			{"an answer to what was begun before", true, false, arrival{wayRX, ack, false, true, wayTX,
				adopted | seenPeer}},
			{"answered", true, false, arrival{wayTX, ack, false, true, wayTX, lives}},
			{"the other's may begin it now", false, true, arrival{wayTX, ack, false, true, wayRX, lives}},
			{"an error about it", false, true, arrival{wayTX, 0, true, true, wayRX, 0}},
			{"a new one in its place, which may not", false, true, arrival{wayTX, syn, false, false, wayTX, 0}},
			{"a new one in its place from there, which may", false, true, arrival{wayRX, syn, false, true, wayRX, 0}},
			{"it lives", false, true, arrival{wayRX, ack, false, true, wayRX, lives}},
			{"none may begin it now", false, false, arrival{wayRX, ack, false, false, wayRX, 0}},
		},
	} {
		request := bpfobj.PilasterActionRequest{}
		request.Pre.Version = 1
		for _, s := range steps {
			request.Pkt.Pickup = 1
			request.Pre.Verdicts = [2]uint8{flag(s.out), flag(s.in)}
			b.arrive(t, s.name, &request, proto, s.arrival)
		}
	}
}

func flag(is bool) uint8 {
	if is {
		return 1
	}
	return 0
}

// ask runs a program that processes requests and no packets.
func (b *progBench) ask(t *testing.T, program *ebpf.Program, request any) {
	t.Helper()
	if result, err := program.Run(&ebpf.RunOptions{Context: request, ContextOut: request}); err != nil || result != 0 {
		t.Fatalf("%v: result %d, %v", program, result, err)
	}
}
