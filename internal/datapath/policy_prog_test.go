package datapath

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/policy"
)

// Numbers of rules in these tests, and the actions of bpf/policy/rules.h above them.
const (
	ruleWeb = iota + 1
	ruleNothing
	ruleAudited

	accepts = 1 << 30
	denies  = 2 << 30
	appAny  = 0xffff
)

// policed gives tenant blue these policies for apps 1 and 2, which b1 and b2 have. Other apps have none.
func policed(t *testing.T, b *progBench, own bpfobj.PilasterPolTarget) {
	t.Helper()
	o := &b.datapath.Objects
	for app := range uint32(2) {
		must(t, o.PolSubjectsV1.Put(bpfobj.PilasterPolTargetKey{Tenant: 1, App: 1 + app}, own))
	}
	must(t, o.PolSubjectsV1.Put(bpfobj.PilasterPolTargetKey{Tenant: 1, App: appAny}, bpfobj.PilasterPolTarget{}))
	b.generation(t)
}

// generation invalidates cached flows and verdicts, as a change of policy does.
func (b *progBench) generation(t *testing.T) {
	t.Helper()
	must(t, b.datapath.InvalidateFlows())
	b.voidVerdicts(t)
}

// says gives a set the verdict rule for all peers, and the verdict other for one TCP port unless port is 0.
func (b *testNode) says(t testing.TB, set uint64, tier int, rule uint32, port uint16, other uint32) {
	t.Helper()
	o := &b.datapath.Objects
	must(t, o.PolAppsV1.Put(bpfobj.PilasterAppKey{Set: set, App: appAny}, bpfobj.PilasterAppRules{Table: set}))
	all, one := bpfobj.PilasterPortRules{}, bpfobj.PilasterPortRules{}
	all.Verdict.Rules[tier], one.Verdict.Rules[tier] = rule, other
	must(t, o.PolPortsV1.Put(bpfobj.PilasterPortKey{Table: set, Scope: 2}, all))
	if port != 0 {
		must(
			t,
			o.PolPortsV1.Put(bpfobj.PilasterPortKey{Table: set, Port: bigEndian(port), Proto: packet.ProtocolTCP}, one),
		)
	}
}

func bigEndian(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

// policedPacket is a packet and its expected verdict.
type policedPacket struct {
	name   string
	in     bool // from the fabric; else from b1
	body   packet.Body
	parts  []packet.Extension
	reason string
}

// fromEither returns a packet of b3 from the fabric, or of b1 to b3, and the program that processes it.
func (b *progBench) fromEither(in bool, body packet.Body, parts ...packet.Extension) (*ebpf.Program, skb, []byte) {
	if in {
		p := packet.Packet{Source: b.b3.Addr(), Destination: b.b1.plain(), Body: body, Extensions: parts}
		return b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()}, p.Frame(b.uplinkMAC, host.ContainerMAC)
	}
	return b.datapath.Objects.PilContainer, skb{
			Ifindex: b.b1.ifindex(),
		}, b.frame(
			b.sent(sees(b.b3.Addr()), body, parts...),
		)
}

func (b *progBench) policePackets(t *testing.T, steps ...policedPacket) {
	t.Helper()
	for _, s := range steps {
		program, ctx, frame := b.fromEither(s.in, s.body, s.parts...)
		verdict, _, reasons := b.run(t, program, frame, ctx)
		if s.reason == "" && (verdict != verdictRedirect || len(reasons) != 0) {
			t.Errorf("%s: verdict %d, drops %v; want it sent", s.name, verdict, reasons)
		}
		if s.reason != "" && (verdict != verdictDrop || reasons[s.reason] != 1) {
			t.Errorf("%s: verdict %d, drops %v; want a drop for %s", s.name, verdict, reasons, s.reason)
		}
	}
}

func tcp(from, to uint16, flags packet.TCPFlags) packet.TCP {
	return packet.TCP{SourcePort: from, DestinationPort: to, Flags: flags}
}

func udp(from, to uint16) packet.UDP {
	return packet.UDP{SourcePort: from, DestinationPort: to, Payload: []byte("1234567")}
}

const synAck = packet.SYN | packet.ACK

// TestPolice: a container whose policies deny all ingress receives answers, errors and fragments of connections that it
// opened, and nothing else.
func TestPolice(t *testing.T) {
	b := newProgBench(t)
	far := sees(b.b3.Addr())
	b.policePackets(t, policedPacket{name: "without policies", in: true, body: tcp(7, 80, packet.SYN)})
	if c := b.sessions(t); c.Created != 0 {
		t.Errorf("a tenant without policies has %d sessions", c.Created)
	}
	b.says(t, 10, 1, denies|ruleNothing, 80, accepts|ruleWeb) // in: TCP to 80 alone
	b.says(t, 20, 1, accepts|ruleWeb, 25, denies|ruleNothing) // out: all but TCP to 25
	policed(t, b, bpfobj.PilasterPolTarget{Sets: [2]uint64{20, 10}})

	quoted := func(source, destination netip.Addr, body packet.Body) packet.ICMP {
		return packet.ICMP{
			Type:    packet.DestinationUnreachable,
			Code:    4,
			Payload: packet.Packet{Source: source, Destination: destination, Body: body}.Marshal(),
		}
	}
	astray := quoted(b.b1.plain(), b.b3.Addr(), udp(53, 9))
	astray.Payload = packet.Packet{
		Source:      b.b1.plain(),
		Destination: b.b3.Addr(),
		Body:        udp(53, 9),
		Extensions:  []packet.Extension{{Type: packet.Routing, Data: make([]byte, 6)}},
	}.Marshal()
	more := func(offset uint16, more bool, id uint32) []packet.Extension {
		return []packet.Extension{packet.Fragment(offset, more, id)}
	}
	tail := packet.Raw{Proto: packet.ProtocolUDP, Data: []byte("12345678")}
	lateOf := func(id uint32) packet.ICMP {
		return packet.ICMP{
			Type: packet.DestinationUnreachable,
			Code: 1,
			Payload: packet.Packet{
				Source:      b.b1.plain(),
				Destination: b.b3.Addr(),
				Body:        tail,
				Extensions:  more(64, false, id),
			}.Marshal(),
		}
	}
	short := quoted(b.b1.plain(), b.b3.Addr(), udp(53, 9))
	short.Payload = short.Payload[:40+4]
	const denied = "policy-denied"
	b.policePackets(
		t,
		policedPacket{name: "to the open port", in: true, body: tcp(7, 80, packet.SYN)},
		policedPacket{name: "its answer", body: tcp(80, 7, synAck)},
		policedPacket{name: "the answer's answer", in: true, body: tcp(7, 80, packet.ACK)},
		policedPacket{name: "established", in: true, body: tcp(7, 80, packet.ACK)},
		policedPacket{name: "from the cache", body: tcp(80, 7, packet.ACK)},
		policedPacket{name: "another session of it", in: true, body: tcp(8, 80, packet.SYN)},
		policedPacket{name: "to another port", in: true, body: tcp(7, 81, packet.SYN), reason: denied},
		policedPacket{name: "of the middle of nothing", in: true, body: tcp(7, 81, packet.ACK), reason: denied},
		policedPacket{name: "datagram", in: true, body: udp(9, 53), reason: denied},
		policedPacket{name: "echo", in: true, body: echo, reason: denied},

		policedPacket{name: "asked from here", body: udp(53, 9)},
		policedPacket{name: "answered from there", in: true, body: udp(9, 53)},
		policedPacket{name: "from another port", in: true, body: udp(10, 53), reason: denied},
		policedPacket{name: "echo from here", body: echo},
		policedPacket{
			name: "echoed",
			in:   true,
			body: packet.ICMP{Type: packet.EchoReply, Rest: echo.Rest, Payload: echo.Payload},
		},
		policedPacket{
			name:   "another echo's answer",
			in:     true,
			body:   packet.ICMP{Type: packet.EchoReply, Rest: packet.Echo(2, 1), Payload: echo.Payload},
			reason: denied,
		},
		policedPacket{name: "mail", body: tcp(9, 25, packet.SYN), reason: denied},

		policedPacket{
			name: "an error about what was asked",
			in:   true,
			body: quoted(b.b1.plain(), b.b3.Addr(), udp(53, 9)),
		},
		policedPacket{
			name:   "an error about what was not",
			in:     true,
			body:   quoted(b.b1.plain(), b.b3.Addr(), udp(53, 11)),
			reason: denied,
		},
		policedPacket{name: "an error of ours", body: quoted(far, b.b1.seen(), udp(9, 53))},
		policedPacket{name: "an error of ours about nothing", body: quoted(far, b.b1.seen(), udp(9, 60))},
		policedPacket{name: "which begins nothing", in: true, body: udp(9, 60), reason: denied},
		policedPacket{name: "an error whose quote leads nowhere", in: true, body: astray, reason: "icmp-quote"},
		policedPacket{
			name:   "half a port",
			in:     true,
			body:   packet.Raw{Proto: 132, Data: []byte{0, 7}},
			reason: "malformed",
		},

		policedPacket{
			name:   "a later fragment before the first",
			in:     true,
			body:   tail,
			parts:  more(64, false, 5),
			reason: "fragment-unknown",
		},
		policedPacket{name: "a first fragment", in: true, body: udp(9, 53), parts: more(0, true, 5)},
		policedPacket{name: "a later fragment", in: true, body: tail, parts: more(64, false, 5)},
		policedPacket{
			name:   "of another packet",
			in:     true,
			body:   tail,
			parts:  more(64, false, 6),
			reason: "fragment-unknown",
		},
		policedPacket{
			name:   "a first fragment that may not",
			in:     true,
			body:   udp(10, 53),
			parts:  more(0, true, 7),
			reason: denied,
		},
		policedPacket{
			name:   "what follows it",
			in:     true,
			body:   tail,
			parts:  more(64, false, 7),
			reason: "fragment-unknown",
		},
		policedPacket{name: "a fragment of ours", body: udp(53, 9), parts: more(0, true, 5)},
		policedPacket{name: "its rest", body: tail, parts: more(64, false, 5)},
		policedPacket{name: "an error about its rest", in: true, body: lateOf(5)},
		policedPacket{name: "an error about a rest of nothing", in: true, body: lateOf(6), reason: "fragment-unknown"},
		policedPacket{
			name:   "an error about a rest of nothing, 0",
			in:     true,
			body:   lateOf(0),
			reason: "fragment-unknown",
		},
		policedPacket{name: "a fragment of ours, 0", body: udp(53, 9), parts: more(0, true, 0)},
		policedPacket{name: "its rest, 0", body: tail, parts: more(64, false, 0)},
		policedPacket{name: "an error about its rest, 0", in: true, body: lateOf(0)},
		policedPacket{name: "an error that does not say about what", in: true, body: short, reason: "icmp-quote"},
	)

	// A change takes effect with the next packet, also of established connections. Other connections are not affected.
	b.says(t, 11, 1, denies|ruleNothing, 0, 0)
	policed(t, b, bpfobj.PilasterPolTarget{Sets: [2]uint64{20, 11}})
	b.policePackets(t,
		policedPacket{name: "to the port that was open", in: true, body: tcp(7, 80, packet.ACK), reason: denied},
		policedPacket{name: "its answer", body: tcp(80, 7, packet.ACK), reason: denied},
		policedPacket{name: "answered from there as before", in: true, body: udp(9, 53)},
	)
}

// TestAdoption: for a while after a tenant's first policies, connections that are older pass if the rules of either end
// allow them, and get a session. New connections do not pass in this way. Later changes of policies, and an agent that
// finds policies in force, do not start this time again.
func TestAdoption(t *testing.T) {
	b := newProgBench(t)
	b.policePackets(t, policedPacket{name: "before policies", in: true, body: tcp(7, 80, packet.ACK)})
	isolated := func(port policy.PortKey) dpapi.TenantPolicies {
		deny, accept := policy.Verdict{
			Tiers: [3]uint32{1: denies | ruleNothing},
		}, policy.Verdict{
			Tiers: [3]uint32{1: accepts | ruleWeb},
		}
		return dpapi.TenantPolicies{Tenant: "blue", IDs: []address.TenantID{1}, Tables: policy.Tables{
			Subjects: map[address.AppID]policy.Subject{
				policy.AnyApp: {},
				1:             {Sets: [2]policy.ID{policy.Egress: 20, policy.Ingress: 10}},
			},
			Peers: map[policy.PeerKey]policy.Peer{
				{Set: 10, App: policy.AnyApp}: {Table: 10},
				{Set: 20, App: policy.AnyApp}: {Table: 20},
			},
			Ports: map[policy.PortKey]policy.PortEntry{
				port:                  {Verdict: accept},
				{Table: 10, Scope: 2}: {Verdict: deny},
				{Table: 20, Scope: 2}: {Verdict: deny},
			},
		}}
	}
	const denied = "policy-denied"
	must(t, b.datapath.SetPolicies(isolated(policy.PortKey{Table: 10, Protocol: packet.ProtocolTCP, Port: 80})))
	b.policePackets(t,
		policedPacket{name: "an answer of ours first", body: tcp(80, 7, packet.ACK)},
		policedPacket{name: "and theirs, so that the session lasts", in: true, body: tcp(7, 80, packet.ACK)},
		policedPacket{name: "another one's", body: tcp(80, 8, packet.ACK)},
		policedPacket{name: "to another port", body: tcp(81, 7, packet.ACK), reason: denied},
		policedPacket{name: "a connection from here", body: tcp(80, 9, packet.SYN), reason: denied},
		policedPacket{name: "a datagram from here", body: udp(80, 9), reason: denied},
	)
	// The time is over. Neither the same policies nor a new agent starts it again.
	must(t, b.datapath.Objects.PolAdoptionsV1.Put(uint32(1), uint64(1)))
	must(t, b.datapath.SetPolicies(isolated(policy.PortKey{Table: 10, Protocol: packet.ProtocolTCP, Port: 80})))
	b.datapath.PolicyMapsSynced = false
	must(t, b.datapath.SetPolicies(isolated(policy.PortKey{Table: 10, Protocol: packet.ProtocolTCP, Port: 80})))
	b.reopen(t, b.datapath.config)
	b.restore(t, b.b1, b.b2, b.r1)
	b.policePackets(t,
		policedPacket{name: "later", body: tcp(80, 9, packet.ACK), reason: denied},
		policedPacket{name: "adopted", body: tcp(80, 7, packet.ACK)},
		policedPacket{name: "from there", in: true, body: tcp(7, 80, packet.ACK)},
	)
	// A session table of another size is empty, so the time starts again.
	config := b.datapath.config
	config.MaxSessions /= 2
	b.reopen(t, config)
	b.restore(t, b.b1, b.b2, b.r1)
	b.policePackets(t, policedPacket{name: "adopted again", body: tcp(80, 7, packet.ACK)})

	must(t, b.datapath.SetPolicies(isolated(policy.PortKey{Table: 20, Protocol: packet.ProtocolTCP, Port: 7})))
	b.policePackets(t, policedPacket{name: "which we may have begun", in: true, body: tcp(7, 80, packet.ACK)})
	must(t, b.datapath.SetPolicies(isolated(policy.PortKey{Table: 20, Protocol: packet.ProtocolTCP, Port: 8})))
	b.policePackets(
		t,
		policedPacket{name: "that no peer may begin", in: true, body: tcp(7, 80, packet.ACK), reason: denied},
	)
}

// TestHalfAPolicy: the write of a tenant's first policy fails half-way. When the next change succeeds, the policy is in
// force, also for packets of cached flows.
func TestHalfAPolicy(t *testing.T) {
	b := newProgBench(t)
	const denied = "policy-denied"
	first := dpapi.TenantPolicies{
		Tenant:    "blue",
		IDs:       []address.TenantID{1},
		Tables:    policy.Isolating(),
		Overrides: map[netip.Addr]address.AppID{netip.MustParseAddr("fd00::1"): 3},
	}
	must(
		t,
		b.datapath.SetPolicies(dpapi.TenantPolicies{Tenant: "green"}),
	) // from now on the manager knows the content of the tables
	b.fillCache(t, b.cached(t, b.b3.Addr(), 1500))
	b.policePackets(t, policedPacket{name: "before policies", body: udp(80, 9)})
	overrides := b.datapath.Objects.PolOverridesV1
	b.datapath.Objects.PolOverridesV1 = b.datapath.Objects.PolPortsV1
	err := b.datapath.SetPolicies(first)
	if b.datapath.Objects.PolOverridesV1 = overrides; err == nil {
		t.Fatal("overrides can be written to the table of ports")
	}
	must(t, b.datapath.SetPolicies(first))
	b.policePackets(t, policedPacket{name: "tried again", body: udp(82, 9), reason: denied})
}

// TestPoliceBetweenTwo: between containers of one node, the rules of sender and receiver apply.
func TestPoliceBetweenTwo(t *testing.T) {
	b := newProgBench(t)
	b.says(t, 10, 1, denies|ruleNothing, 80, accepts|ruleWeb)
	policed(t, b, bpfobj.PilasterPolTarget{Sets: [2]uint64{0, 10}})
	for _, c := range []struct {
		from, to *testContainer
		body     packet.Body
		reason   string
	}{
		{b.b1, b.b2, tcp(7, 81, packet.SYN), "policy-denied"},
		{b.b1, b.b2, tcp(7, 80, packet.SYN), ""},
		{b.b2, b.b1, tcp(80, 7, synAck), ""},
		{b.b2, b.b1, tcp(80, 8, synAck), "policy-denied"},
	} {
		verdict, _, reasons := b.run(
			t,
			b.datapath.Objects.PilContainer,
			b.frame(packet.Packet{Source: c.from.seen(), Destination: c.to.seen(), Body: c.body}),
			skb{Ifindex: c.from.ifindex()},
		)
		if c.reason == "" && verdict != verdictRedirect || c.reason != "" && reasons[c.reason] != 1 {
			t.Errorf("%+v: verdict %d, drops %v; want %q", c.body, verdict, reasons, c.reason)
		}
	}
}

// TestMissingRulesDeny: if a policy entry refers to missing rules, packets are denied.
func TestMissingRulesDeny(t *testing.T) {
	b := newProgBench(t)
	o := &b.datapath.Objects
	must(t, o.PolAppsV1.Put(bpfobj.PilasterAppKey{Set: 11, App: appAny}, bpfobj.PilasterAppRules{Table: 11}))
	b.says(t, 12, 1, accepts|ruleWeb, 0, 0)
	must(t, o.PolAppsV1.Put(bpfobj.PilasterAppKey{Set: 12, App: appAny}, bpfobj.PilasterAppRules{Table: 12, Cidrs: 1}))
	all := bpfobj.PilasterCidrKey{Bits: 64, Set: 12}
	must(t, o.PolBlocksV1.Put(all, bpfobj.PilasterCidrRules{Bits: all.Bits, Table: 13}))
	for set, name := range map[uint64]string{10: "a set", 11: "a table", 12: "a table of blocks"} {
		policed(t, b, bpfobj.PilasterPolTarget{Sets: [2]uint64{0, set}})
		b.policePackets(t, policedPacket{name: name, in: true, body: udp(9, 53), reason: "policy-denied"})
	}
}

// TestEventsNameTheRule: an event has the rule that dropped the packet, and none if no rule did.
func TestEventsNameTheRule(t *testing.T) {
	b := newEventBench(t)
	b.says(t, 10, 1, denies|ruleNothing, 0, 0)
	policed(t, b.progBench, bpfobj.PilasterPolTarget{Sets: [2]uint64{0, 10}})
	program, ctx, frame := b.fromEither(true, udp(9, 53))
	b.run(t, program, frame, ctx)
	if e := b.next(t, dropreason.PolicyDenied); e.Rule != ruleNothing {
		t.Errorf("by policy: %+v, want rule %d", e, ruleNothing)
	}
	b.drop(t, 1, gram)
	if e := b.next(t, dropreason.SrcNotOwn); e.Rule != 0 {
		t.Errorf("without: %+v, want no rule", e)
	}
}

// TestAudit: packets that a policy in audit mode would deny pass, and each is counted.
func TestAudit(t *testing.T) {
	b := newProgBench(t)
	b.says(t, 10, 1, denies|ruleAudited, 80, accepts|ruleWeb)
	must(t, b.datapath.Objects.PolHitsV1.Put(uint32(ruleAudited), make([]uint64, len(b.hits(t, 0)))))
	policed(t, b, bpfobj.PilasterPolTarget{Audits: [2]uint64{0, 10}})
	for range 3 {
		b.policePackets(
			t,
			policedPacket{name: "what would be denied", in: true, body: udp(9, 53)},
			policedPacket{name: "answered", body: udp(53, 9)},
			policedPacket{name: "what would not", in: true, body: tcp(7, 80, packet.SYN)},
		)
	}
	var sum uint64
	for _, n := range b.hits(t, ruleAudited) {
		sum += n
	}
	if sum != 6 {
		t.Errorf("%d would-be drops were counted, want 6", sum)
	}
}

func (b *progBench) hits(t *testing.T, rule uint32) []uint64 {
	t.Helper()
	var all []uint64
	if rule == 0 {
		return make([]uint64, len(b.counts(t)))
	}
	must(t, b.datapath.Objects.PolHitsV1.Lookup(rule, &all))
	return all
}

func (b *testNode) counts(t *testing.T) (all []bpfobj.PilasterSessionCounts) {
	t.Helper()
	must(t, b.datapath.Objects.PilSessionCountsV1.Lookup(uint32(0), &all))
	return all
}

func (b *testNode) sessions(t *testing.T) (sum bpfobj.PilasterSessionCounts) {
	t.Helper()
	for _, c := range b.counts(t) {
		sum.Created, sum.Evicted, sum.Refused = sum.Created+c.Created, sum.Evicted+c.Evicted, sum.Refused+c.Refused
	}
	return sum
}
