package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
)

var (
	echo    = packet.ICMP{Type: packet.EchoRequest, Rest: packet.Echo(1, 1), Payload: []byte("pilaster")}
	segment = packet.TCP{SourcePort: 1000, DestinationPort: 80, Flags: packet.SYN}
	gram    = packet.UDP{SourcePort: 1000, DestinationPort: 53, Payload: []byte("odd")}
)

// atLocator is an address of a container of network ila on the fabric.
var atLocator = netip.MustParseAddr("fd70:696c:e100:2:7000:7:0:f002")

// tenantLike is outside the base, with blue's id where a container has its tenant's.
var tenantLike = netip.MustParseAddr("2001:db8:70::100:100:4d")

// fromContainer returns packets of b1 with the verdicts on them (claims NP3 and NP4, §6.2).
func (b *progBench) fromContainer() []progCase {
	far := sees(b.b3.Addr())
	with := func(change func(*address.Plain)) netip.Addr {
		p := b.b3
		change(&p)
		return sees(allocated(p).Addr())
	}
	across := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return packet.Packet{
			Source:      b.b1.plain(),
			Destination: b.b3.Addr(),
			HopLimit:    63,
			Body:        body,
			Extensions:  extensions,
		}
	}
	lie := b.frame(b.sent(far, echo))
	lie[14+5] += 8 // payload length
	lengthless := b.frame(b.sent(far, segment))
	lengthless[14+4], lengthless[14+5] = 0, 0
	version := b.frame(b.sent(far, echo))
	version[14] = 0x40
	quote := func(from, to netip.Addr) []byte {
		return packet.Packet{Source: from, Destination: to, Body: gram}.Marshal()
	}
	unreachable := func(quoted []byte) packet.ICMP {
		return packet.ICMP{Type: packet.DestinationUnreachable, Code: 4, Payload: quoted}
	}
	// A checksum field of 0 means "no checksum": a checksum of 0 is written as 0xffff.
	zeroed := packet.UDP{Payload: []byte{0, 0}}
	binary.BigEndian.PutUint16(
		zeroed.Payload,
		packet.Checksum(b.b1.plain(), b.b3.Addr(), packet.ProtocolUDP, []byte{0, 0, 0, 0, 0, 10, 0, 0, 0, 0}),
	)
	short := b.frame(b.sent(far, unreachable(quote(far, b.b1.seen()))))
	short[14+5] = 16
	last := packet.Packet{Source: b.b1.seen(), Destination: far, HopLimit: 1, Body: echo}
	lastHere := packet.Packet{Source: b.b1.seen(), Destination: b.b2.seen(), HopLimit: 1, Body: echo}
	behind := b.frame(b.sent(far, packet.Raw{Proto: 17, Data: []byte("12345678")}, packet.Fragment(64, false, 9)))
	behind[14+5] = 0
	return []progCase{
		{name: "echo across", frame: b.frame(b.sent(far, echo)), out: across(echo)},
		{name: "TCP across", frame: b.frame(b.sent(far, segment)), out: across(segment)},
		{name: "UDP across", frame: b.frame(b.sent(far, gram)), out: across(gram)},
		{
			name:  "UDP without a checksum",
			frame: b.frame(b.sent(far, packet.Raw{Proto: 17, Data: []byte{0, 1, 0, 2, 0, 8, 0, 0}})),
			out:   across(packet.Raw{Proto: 17, Data: []byte{0, 1, 0, 2, 0, 8, 0, 0}}),
		},
		{name: "UDP whose checksum becomes 0", frame: b.frame(b.sent(far, zeroed)), out: across(zeroed)},
		{name: "UDP across, again from the cache", frame: b.frame(b.sent(far, gram)), out: across(gram)},
		{
			name:  "behind options",
			frame: b.frame(b.sent(far, gram, padding(packet.DestinationOptions))),
			out:   across(gram, padding(packet.DestinationOptions)),
		},
		{name: "no next header", frame: b.frame(b.sent(far, nil)), out: across(nil)},
		{
			name:  "first fragment",
			frame: b.frame(b.sent(far, gram, packet.Fragment(0, true, 9))),
			out:   across(gram, packet.Fragment(0, true, 9)),
		},
		{
			name:  "later fragment",
			frame: b.frame(b.sent(far, packet.Raw{Proto: 17, Data: []byte("12345678")}, packet.Fragment(64, false, 9))),
			out:   across(packet.Raw{Proto: 17, Data: []byte("12345678")}, packet.Fragment(64, false, 9)),
		},
		{name: "port unreachable", frame: b.frame(b.sent(far, unreachable(quote(far, b.b1.seen())))),
			out: across(unreachable(quote(b.b3.Addr(), b.b1.plain())))},
		{name: "same node", frame: b.frame(b.sent(b.b2.seen(), gram)),
			out: packet.Packet{Source: b.b1.seen(), Destination: b.b2.seen(), Body: gram}},
		{
			name:  "port unreachable on the same node",
			frame: b.frame(b.sent(b.b2.seen(), unreachable(quote(b.b2.seen(), b.b1.seen())))),
			out: packet.Packet{
				Source:      b.b1.seen(),
				Destination: b.b2.seen(),
				Body:        unreachable(quote(b.b2.seen(), b.b1.seen())),
			},
		},
		{
			name:  "UDP-Lite across",
			frame: b.frame(b.sent(far, summed(136, b.b1.seen(), far))),
			out:   across(summed(136, b.b1.plain(), b.b3.Addr())),
		},
		{
			name:  "DCCP across",
			frame: b.frame(b.sent(far, summed(33, b.b1.seen(), far))),
			out:   across(summed(33, b.b1.plain(), b.b3.Addr())),
		},

		{
			name:   "IPv4",
			frame:  packet.Frame(host.GatewayMAC, host.ContainerMAC, packet.EtherTypeIPv4, make([]byte, 40)),
			reason: "not-ip6",
		},
		{
			name:   "ARP",
			frame:  packet.Frame(host.GatewayMAC, host.ContainerMAC, packet.EtherTypeARP, make([]byte, 28)),
			reason: "not-ip6",
		},
		{name: "less data than the header says", frame: lie, reason: "malformed"},
		{name: "version 4", frame: version, reason: "malformed"},
		{
			name:   "half a TCP header",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 6, Data: make([]byte, 12)})),
			reason: "malformed",
		},
		{
			name:   "a TCP header short of a byte",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 6, Data: make([]byte, 19)})),
			reason: "malformed",
		},
		{
			name:   "half a TCP header, same node",
			frame:  b.frame(b.sent(b.b2.seen(), packet.Raw{Proto: 6, Data: make([]byte, 12)})),
			reason: "malformed",
		},
		{
			name:   "half a DCCP header",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 33, Data: make([]byte, 11)})),
			reason: "malformed",
		},
		{
			name:   "half a UDP header",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 17, Data: make([]byte, 4)})),
			reason: "malformed",
		},
		{
			name:   "half a UDP header, same node",
			frame:  b.frame(b.sent(b.b2.seen(), packet.Raw{Proto: 17, Data: make([]byte, 4)})),
			reason: "malformed",
		},
		{
			name:   "half a UDP-Lite header, same node",
			frame:  b.frame(b.sent(b.b2.seen(), packet.Raw{Proto: 136, Data: make([]byte, 4)})),
			reason: "malformed",
		},
		{
			name:   "half an ICMPv6 header",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 58, Data: []byte{128, 0}})),
			reason: "malformed",
		},
		{
			name:   "an ICMPv6 header short of a byte",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 58, Data: []byte{128, 0, 0, 0, 0, 0, 0}})),
			reason: "malformed",
		},
		{name: "a length of 0, not of segments", frame: lengthless, reason: "malformed"},
		{
			name:   "tiny first fragment",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 6, Data: make([]byte, 8)}, packet.Fragment(0, true, 9))),
			reason: "malformed",
		},
		{
			name:   "an option header longer than the packet",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: packet.HopByHop, Data: []byte{59, 9, 1, 4, 0, 0, 0, 0}})),
			reason: "malformed",
		},
		{name: "a fragment header behind the end", frame: behind, reason: "malformed"},
		{
			name: "an option without its length",
			frame: b.frame(
				b.sent(far, nil, packet.Extension{Type: packet.DestinationOptions, Data: []byte{1, 3, 0, 0, 0, 1}}),
			),
			reason: "malformed",
		},
		{
			name:   "nine extension headers",
			frame:  b.frame(b.sent(far, gram, repeat(padding(packet.DestinationOptions), 9)...)),
			reason: "malformed",
		},
		{
			name:   "routing header",
			frame:  b.frame(b.sent(far, gram, packet.Extension{Type: packet.Routing, Data: make([]byte, 6)})),
			reason: "routing-header",
		},
		{
			name:   "hop-by-hop options",
			frame:  b.frame(b.sent(far, gram, padding(packet.HopByHop))),
			reason: "hop-options",
		},
		{
			name: "hop-by-hop options of a later fragment",
			frame: b.frame(b.sent(far, packet.Raw{Proto: 17, Data: make([]byte, 8)}, padding(packet.HopByHop),
				packet.Fragment(64, false, 9))),
			reason: "hop-options",
		},
		{
			name: "BIG TCP's option of a packet without segments",
			frame: b.frame(b.sent(far, gram, packet.Extension{Type: packet.HopByHop, Data: []byte{
				0xc2, 4, 0, 0, 12, 0,
			}})),
			reason: "hop-options",
		},
		{
			name:   "an SCTP header that is cut short",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 132, Data: make([]byte, 11)})),
			reason: "malformed",
		},
		{
			name: "routing header behind options",
			frame: b.frame(
				b.sent(
					far,
					gram,
					padding(packet.HopByHop),
					packet.Extension{Type: packet.Routing, Data: make([]byte, 6)},
				),
			),
			reason: "routing-header",
		},
		{
			name:   "routing header behind authentication",
			frame:  b.frame(b.sent(far, packet.Raw{Proto: 51, Data: append([]byte{43, 4}, make([]byte, 22+8)...)})),
			reason: "routing-header",
		},
		{name: "home address", frame: b.frame(b.sent(far, gram, homeAddress())), reason: "routing-header"},
		{
			name: "home address behind a pad",
			frame: b.frame(b.sent(far, gram, packet.Extension{Type: packet.DestinationOptions,
				Data: append(append([]byte{0, 0xc9, 16}, make([]byte, 16)...), 1, 1, 0)})),
			reason: "routing-header",
		},
		{
			name: "home address behind 16 options",
			frame: b.frame(b.sent(far, gram, packet.Extension{Type: packet.DestinationOptions,
				Data: append(
					append(bytes.Repeat([]byte{1, 0}, 16), 0xc9, 16),
					make([]byte, 20)...)})),
			reason: "malformed",
		},
		{
			name:   "foreign source",
			frame:  b.frame(packet.Packet{Source: b.b2.seen(), Destination: far, Body: echo}),
			reason: "src-not-own",
		},
		{
			name:   "own plaintext as source",
			frame:  b.frame(packet.Packet{Source: b.b1.plain(), Destination: far, Body: echo}),
			reason: "src-not-own",
		},
		{
			name:   "no source",
			frame:  b.frame(packet.Packet{Source: netip.IPv6Unspecified(), Destination: far, Body: echo}),
			reason: "src-not-own",
		},
		{
			name:   "the internet",
			frame:  b.frame(b.sent(netip.MustParseAddr("2001:db8::1"), echo)),
			reason: "dst-not-private",
		},
		{name: "a plaintext address", frame: b.frame(b.sent(b.b3.Addr(), echo)), reason: "dst-not-private"},
		{name: "made up", frame: b.frame(b.sent(netip.MustParseAddr("fc12::1"), echo)), reason: "dst-undecryptable"},
		{name: "red's ciphertext", frame: b.frame(b.sent(b.r1.seen(), echo)), reason: "dst-undecryptable"},
		{
			name: "foreign base",
			frame: b.frame(
				b.sent(with(func(p *address.Plain) { p.Node = netip.MustParsePrefix("fd70:696c:6200:1::/64") }), echo),
			),
			reason: "dst-undecryptable",
		},
		{
			name:   "red's tenant id",
			frame:  b.frame(b.sent(with(func(p *address.Plain) { p.Tenant = 2 }), echo)),
			reason: "tenant-mismatch",
		},
		{
			name:   "unknown tenant id",
			frame:  b.frame(b.sent(with(func(p *address.Plain) { p.Tenant = 999 }), echo)),
			reason: "tenant-mismatch",
		},
		{
			name:   "tenant 0",
			frame:  b.frame(b.sent(with(func(p *address.Plain) { p.Tenant = 0 }), echo)),
			reason: "to-node",
		},
		{
			name:   "reserved app",
			frame:  b.frame(b.sent(with(func(p *address.Plain) { p.App = 0xff02 }), echo)),
			reason: "app-reserved",
		},
		{
			name:   "the alias of a node",
			frame:  b.frame(b.sent(with(func(p *address.Plain) { p.App = 0xff00 }), echo)),
			reason: "to-node",
		},
		{
			name:   "absent here",
			frame:  b.frame(b.sent(with(func(p *address.Plain) { p.Node = b.prefix }), echo)),
			reason: "no-endpoint",
		},
		{
			name: "a node without a route",
			frame: b.frame(
				b.sent(with(func(p *address.Plain) { p.Node = netip.MustParsePrefix("fd70:696c:6100:99::/64") }), echo),
			),
			reason: "no-route",
		},
		{name: "multicast", frame: b.frame(b.sent(netip.MustParseAddr("ff02::1"), gram)), reason: "multicast"},
		{
			name:   "last hop",
			frame:  b.frame(last),
			reason: "hop-limit",
			out:    b.icmpFromNode(packet.TimeExceeded, 0, last),
		},
		{name: "last hop, same node", frame: b.frame(lastHere), out: lastHere},
		{
			name:   "router advertisement",
			frame:  b.frame(b.sent(far, packet.ICMP{Type: packet.RouterAdvertisement})),
			reason: "nd-forbidden",
		},
		{
			name:   "neighbour advertisement",
			frame:  b.frame(b.sent(far, packet.ICMP{Type: packet.NeighborAdvertisement})),
			reason: "nd-forbidden",
		},
		{name: "redirect", frame: b.frame(b.sent(far, packet.ICMP{Type: 137})), reason: "nd-forbidden"},
		{
			name:   "neighbour solicitation",
			frame:  b.frame(b.sent(far, packet.ICMP{Type: packet.NeighborSolicitation})),
			reason: "nd-ignored",
		},
		{name: "router solicitation", frame: b.frame(b.sent(far, packet.ICMP{Type: 133})), reason: "nd-ignored"},
		{name: "listener query", frame: b.frame(b.sent(far, packet.ICMP{Type: 130})), reason: "mld-ignored"},
		{
			name:   "listener report, version 1",
			frame:  b.frame(b.sent(far, packet.ICMP{Type: 131})),
			reason: "mld-ignored",
		},
		{name: "listener done", frame: b.frame(b.sent(far, packet.ICMP{Type: 132})), reason: "mld-ignored"},
		{
			name:   "listener report",
			frame:  b.frame(b.sent(netip.MustParseAddr("ff02::16"), packet.ICMP{Type: 143}, padding(packet.HopByHop))),
			reason: "mld-ignored",
		},
		{
			name:   "an error about another sender's packet",
			frame:  b.frame(b.sent(far, unreachable(quote(b.b2.seen(), b.b1.seen())))),
			reason: "icmp-quote",
		},
		{
			name:   "an error about another sender's packet, same node",
			frame:  b.frame(b.sent(b.b2.seen(), unreachable(quote(b.b2.seen(), far)))),
			reason: "icmp-quote",
		},
		{
			name:   "an error about a packet for another receiver",
			frame:  b.frame(b.sent(far, unreachable(quote(far, b.b2.seen())))),
			reason: "icmp-quote",
		},
		{name: "an error with its quote behind the end", frame: short, reason: "icmp-quote"},
		{name: "an error that quotes nothing", frame: b.frame(b.sent(far, unreachable(nil))), reason: "icmp-quote"},
	}
}

func TestFromContainer(t *testing.T) {
	b := newProgBench(t)
	for _, c := range b.fromContainer() {
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, c)
	}

	far := sees(b.b3.Addr())
	lengthless := b.frame(b.sent(far, segment))
	lengthless[14+4], lengthless[14+5] = 0, 0
	// The kernel's packets of segments can be longer than the length field can express (BIG TCP).
	if verdict, _, reasons := b.run(t, b.datapath.Objects.PilContainer, lengthless, skb{Ifindex: b.b1.ifindex(),
		Segments: 2}); verdict != verdictRedirect {
		t.Errorf("a length of 0, of segments: verdict %d, counted %v", verdict, reasons)
	}
	// What a socket with PACKET_VNET_HDR says of segments proves no BIG TCP: the header stays in short packets.
	short := b.frame(b.sent(far, segment, packet.Extension{Type: packet.HopByHop, Data: []byte{0xc2, 4, 0, 1, 0, 8}}))
	short[14+4], short[14+5] = 0, 0
	if verdict, _, reasons := b.run(t, b.datapath.Objects.PilContainer, short, skb{Ifindex: b.b1.ifindex(),
		Segments: 2}); verdict != verdictDrop || reasons["hop-options"] != 1 {
		t.Errorf("BIG TCP's option of short segments: verdict %d, counted %v; want a drop", verdict, reasons)
	}
	// Kernels before 6.15 leave mark and time to us when a packet goes into a container.
	ctx := skb{Ifindex: b.b1.ifindex(), Mark: 7, Timestamp: 7}
	must(t, b.ns.Do(func() error {
		_, err := b.datapath.Objects.PilContainer.Run(
			&ebpf.RunOptions{Data: b.frame(b.sent(b.b2.seen(), gram)), Context: ctx, ContextOut: &ctx},
		)
		return err
	}))
	if ctx.Mark != 0 || ctx.Timestamp != 0 {
		t.Errorf("a packet goes to a neighbour with mark %d and time %d", ctx.Mark, ctx.Timestamp)
	}
	// A source address is only valid on the device of its container.
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: uint32(b.b2.record.Device.HostIfindex)},
		progCase{name: "own source from another device", frame: b.frame(b.sent(far, echo)), reason: "src-not-own"})
}

// fromFabric returns packets from the fabric with the verdicts on them (claim NP3, §6.2).
func (b *progBench) fromFabric() []progCase {
	frame := func(p packet.Packet) []byte { return p.Frame(b.uplinkMAC, host.ContainerMAC) }
	from := func(source netip.Addr, body packet.Body, extensions ...packet.Extension) []byte {
		return frame(packet.Packet{Source: source, Destination: b.b1.plain(), Body: body, Extensions: extensions})
	}
	to := func(destination netip.Addr) []byte {
		return frame(packet.Packet{Source: b.b3.Addr(), Destination: destination, Body: echo})
	}
	inside := func(body packet.Body, extensions ...packet.Extension) packet.Packet {
		return packet.Packet{Source: sees(b.b3.Addr()), Destination: b.b1.seen(), Body: body, Extensions: extensions}
	}
	b3 := b.b3.Addr()
	return []progCase{
		{name: "echo", frame: from(b3, echo), out: inside(echo)},
		{name: "TCP", frame: from(b3, segment), out: inside(segment)},
		{name: "TCP from the cache", frame: from(b3, segment), out: inside(segment)},
		{name: "UDP", frame: from(b3, gram), out: inside(gram)},
		{name: "last hop", frame: frame(packet.Packet{Source: b3, Destination: b.b1.plain(), HopLimit: 1, Body: gram}),
			out: packet.Packet{Source: sees(b3), Destination: b.b1.seen(), HopLimit: 1, Body: gram}},
		{
			name:  "first fragment",
			frame: from(b3, gram, packet.Fragment(0, true, 9)),
			out:   inside(gram, packet.Fragment(0, true, 9)),
		},
		{
			name:  "later fragment",
			frame: from(b3, packet.Raw{Proto: 17, Data: []byte("12345678")}, packet.Fragment(64, false, 9)),
			out:   inside(packet.Raw{Proto: 17, Data: []byte("12345678")}, packet.Fragment(64, false, 9)),
		},

		{
			name:  "IPv4",
			frame: packet.Frame(b.uplinkMAC, host.ContainerMAC, packet.EtherTypeIPv4, make([]byte, 40)),
			next:  true,
		},
		{
			name: "IPv4 that reads like our own /64",
			frame: packet.Frame(
				b.uplinkMAC,
				host.ContainerMAC,
				packet.EtherTypeIPv4,
				packet.Packet{Source: b.b2.plain(), Destination: b.b1.plain()}.Marshal(),
			),
			next: true,
		},
		{
			name: "neighbour discovery",
			frame: frame(
				packet.Packet{
					Source:      b.far.underlay,
					Destination: netip.MustParseAddr("ff02::1:ff00:1"),
					Body:        packet.ICMP{Type: packet.NeighborSolicitation},
				},
			),
			next: true,
		},
		{
			name:  "the node's underlay address",
			frame: frame(packet.Packet{Source: b.far.underlay, Destination: b.underlay, Body: echo}),
			next:  true,
		},
		{
			name:  "another node",
			frame: frame(packet.Packet{Source: b.far.underlay, Destination: b.far.prefix.Addr().Next(), Body: echo}),
			next:  true,
		},
		{
			name:  "a container elsewhere, from a container",
			frame: to(changed(b3, func(p *address.Plain) { p.Index++ })),
			next:  true,
		},
		{
			name:  "the node itself",
			frame: frame(packet.Packet{Source: b.far.underlay, Destination: b.prefix.Addr().Next(), Body: echo}),
			next:  true,
		},
		{
			name:  "the node itself, from a host whose address reads like a tenant's",
			frame: frame(packet.Packet{Source: tenantLike, Destination: b.prefix.Addr().Next(), Body: echo}),
			next:  true,
		},
		{
			name: "the node itself, from a node",
			frame: frame(
				packet.Packet{Source: b.far.prefix.Addr().Next(), Destination: b.prefix.Addr().Next(), Body: echo},
			),
			next: true,
		},
		{name: "a tag of VLAN 5", frame: tag(to(b.prefix.Addr().Next())), next: true},
		{name: "a tag of VLAN 0", frame: priorityTag(to(b.prefix.Addr().Next())), reason: "malformed"},
		{name: "an urgent frame that is not IPv6", frame: priorityTag(profinet), next: true},
		{
			name:   "a provider's tag of VLAN 0",
			frame:  header8021(0x88a8, 0, to(b.prefix.Addr().Next())),
			reason: "malformed",
		},
		{
			name: "for another machine on the link",
			frame: packet.Packet{
				Source:      b3,
				Destination: b.b1.plain(),
				Body:        echo,
			}.Frame(
				host.ContainerMAC,
				host.GatewayMAC,
			),
			next: true,
		},

		{
			name:   "a ciphertext for the node itself",
			frame:  frame(packet.Packet{Source: sees(b3), Destination: b.prefix.Addr().Next(), Body: echo}),
			reason: "private-outside",
		},
		{
			name:   "a ciphertext for the underlay",
			frame:  frame(packet.Packet{Source: sees(b3), Destination: b.underlay, Body: echo}),
			reason: "private-outside",
		},
		{
			name:   "for a ciphertext",
			frame:  frame(packet.Packet{Source: b.far.underlay, Destination: b.b1.seen(), Body: echo}),
			reason: "private-outside",
		},
		{
			name: "the gateway of a node without one",
			frame: frame(packet.Packet{
				Source:      b.far.underlay,
				Destination: address.Plain{Node: b.prefix, App: address.GatewayApp, Index: 7}.Addr(),
				Body:        echo,
			}),
			reason: "no-endpoint",
		},
		{name: "the node itself, from a container", frame: to(b.prefix.Addr().Next()), next: true},
		{
			name:   "the node itself, from a container of network ila",
			frame:  frame(packet.Packet{Source: atLocator, Destination: b.prefix.Addr().Next(), Body: echo}),
			reason: "tenant-to-node",
		},
		{
			name:   "another address of this node, from a container",
			frame:  to(b.prefix.Addr().Next().Next()),
			reason: "tenant-to-node",
		},
		{name: "the node's underlay address, from a container", frame: to(b.underlay), reason: "tenant-to-node"},
		{name: "our own /64 as source", frame: from(b.b2.plain(), echo), reason: "own-source"},
		{
			name:   "our own /64 as source, for the node's underlay",
			frame:  frame(packet.Packet{Source: b.b2.plain(), Destination: b.underlay, Body: echo}),
			reason: "own-source",
		},
		{name: "our own node as source", frame: from(b.prefix.Addr().Next(), echo), reason: "own-source"},
		{
			name:   "no such container",
			frame:  to(changed(b.b1.plain(), func(p *address.Plain) { p.Index++ })),
			reason: "no-endpoint",
		},
		{
			name:   "the container under another app",
			frame:  to(changed(b.b1.plain(), func(p *address.Plain) { p.App = 9 })),
			reason: "no-endpoint",
		},
		{
			name:   "reserved app",
			frame:  to(changed(b.b1.plain(), func(p *address.Plain) { p.App = 0xffff })),
			reason: "app-reserved",
		},
		{
			name:   "from a reserved app",
			frame:  from(changed(b3, func(p *address.Plain) { p.App = 0xff01 }), echo),
			reason: "app-reserved",
		},
		{
			name:   "from another tenant",
			frame:  from(changed(b3, func(p *address.Plain) { p.Tenant = 2 }), echo),
			reason: "tenant-mismatch",
		},
		{
			name:   "from an unknown tenant",
			frame:  from(changed(b3, func(p *address.Plain) { p.Tenant = 999 }), echo),
			reason: "tenant-mismatch",
		},
		{name: "from a node", frame: from(b.far.prefix.Addr().Next(), echo), reason: "tenant-mismatch"},
		{name: "from an egress address", frame: from(egressOf(b.far.prefix), echo), reason: "tenant-mismatch"},
		{name: "from a fabric host", frame: from(b.far.underlay, echo), reason: "tenant-mismatch"},
		{
			name:   "a tenant id outside the base",
			frame:  from(netip.MustParseAddr("fd70:696c:6200:2:0:100:100:4d"), echo),
			reason: "tenant-mismatch",
		},
		{name: "a ciphertext on the wire", frame: from(sees(b3), echo), reason: "tenant-mismatch"},
		{
			name:   "routing header",
			frame:  from(b3, echo, packet.Extension{Type: packet.Routing, Data: make([]byte, 6)}),
			reason: "routing-header",
		},
		{
			name:   "neighbour advertisement",
			frame:  from(b3, packet.ICMP{Type: packet.NeighborAdvertisement}),
			reason: "nd-forbidden",
		},
		{name: "half a TCP header", frame: from(b3, packet.Raw{Proto: 6, Data: make([]byte, 12)}), reason: "malformed"},
	}
}

func TestFromFabric(t *testing.T) {
	b := newProgBench(t)
	for _, c := range b.fromFabric() {
		b.check(t, b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()}, c)
	}
}

// TestToFabric: the host stack may send only as itself.
func TestToFabric(t *testing.T) {
	b := newProgBench(t)
	frame := func(source netip.Addr) []byte {
		return packet.Packet{Source: source, Destination: b.b3.Addr(), Body: echo}.Frame(host.ContainerMAC, b.uplinkMAC)
	}
	mark := b.mark(t)
	var secret uint32
	must(t, b.datapath.Objects.AcceptMark.Get(&secret))
	for _, c := range []struct {
		progCase
		ctx skb
	}{
		{progCase{name: "the node", frame: frame(b.prefix.Addr().Next()), next: true}, skb{}},
		{progCase{name: "the underlay", frame: frame(b.underlay), next: true}, skb{}},
		{progCase{name: "an address that reads like a tenant's", frame: frame(tenantLike), next: true}, skb{}},
		{progCase{name: "a container's packet on its way", frame: frame(b.b1.plain()), next: true}, skb{Mark: mark,
			IngressIfindex: uint32(b.b1.record.Device.HostIfindex)}},
		{progCase{name: "a container's packet from a netkit", frame: frame(b.b1.plain()), next: true},
			skb{Mark: secret}},
		{progCase{name: "a container of network ila as source", frame: frame(atLocator), reason: "host-claims-tenant"},
			skb{}},
		{progCase{name: "a process with a container's address", frame: frame(b.b1.plain()),
			reason: "host-claims-tenant"}, skb{}},
		{progCase{name: "a process that knows the mark", frame: frame(b.b1.plain()), reason: "host-claims-tenant"},
			skb{Mark: mark}},
		{progCase{name: "forwarded from another device", frame: frame(b.b1.plain()), reason: "host-claims-tenant"},
			skb{IngressIfindex: b.uplinkIfindex()}},
		{progCase{name: "a ciphertext as source", frame: frame(b.b1.seen()), reason: "private-outside"}, skb{}},
		{progCase{name: "a ciphertext as destination", frame: packet.Packet{Source: b.prefix.Addr().Next(),
			Destination: sees(b.b3.Addr()), Body: echo}.Frame(host.ContainerMAC, b.uplinkMAC),
			reason: "private-outside"}, skb{}},
		{progCase{name: "a tag of VLAN 5", frame: tag(frame(b.b1.plain())), next: true}, skb{}},
		{progCase{name: "a tag of VLAN 0", frame: priorityTag(frame(b.b1.plain())), reason: "malformed"}, skb{}},
		{progCase{name: "two tags of VLAN 0", frame: priorityTag(priorityTag(frame(b.b1.plain()))),
			reason: "malformed"}, skb{}},
		{progCase{name: "an urgent frame that is not IPv6", frame: priorityTag(profinet), next: true}, skb{}},
		{progCase{name: "another node's container", frame: frame(b.b3.Addr()), reason: "host-claims-tenant"}, skb{}},
		{progCase{name: "a container's egress address", frame: frame(egressOf(b.prefix)),
			reason: "host-claims-tenant"}, skb{}},
		{progCase{name: "another node's egress address", frame: frame(egressOf(b.far.prefix)),
			reason: "host-claims-tenant"}, skb{}},
	} {
		c.ctx.Ifindex = b.uplinkIfindex()
		b.check(t, b.datapath.Objects.PilUplinkOut, c.ctx, c.progCase)
	}

	// The mark is internal; no program behind ours sees it.
	ctx := skb{Ifindex: b.uplinkIfindex(), IngressIfindex: b.b1.ifindex(), Mark: mark}
	must(t, b.ns.Do(func() error {
		_, err := b.datapath.Objects.PilUplinkOut.Run(
			&ebpf.RunOptions{Data: frame(b.b1.plain()), Context: ctx, ContextOut: &ctx},
		)
		return err
	}))
	if ctx.Mark != 0 {
		t.Errorf("a packet leaves with a mark: %#x", ctx.Mark)
	}
}

// TestNothingRandomGetsThrough sends ciphertexts that no node allocated (claim NP3, §6.2: 2^-24, here 2^-64).
func TestNothingRandomGetsThrough(t *testing.T) {
	b := newProgBench(t)
	const tries = 1000
	before := b.drops(t)["dst-undecryptable"]
	for range tries {
		var raw [16]byte
		for i := range raw {
			raw[i] = byte(rand.Uint32())
		}
		raw[0] = 0xfc
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: uint32(b.b1.record.Device.HostIfindex)},
			progCase{name: "random", frame: b.frame(b.sent(netip.AddrFrom16(raw), echo)), reason: "dst-undecryptable"})
	}
	if got := b.drops(t)["dst-undecryptable"] - before; got != tries {
		t.Errorf("counted %d of %d", got, tries)
	}
}

// profinet is a PROFINET frame to a multicast address, by which industrial devices find each other. They send it with a
// tag of VLAN 0, for its priority (IEC 61158).
var profinet = append([]byte{0x01, 0x0e, 0xcf, 0, 0, 0, 2, 0, 0, 0, 0, 1, 0x88, 0x92}, make([]byte, 46)...)

// TestDSCP: containers choose the DSCP of their packets to the fabric, unless the node clears it. ECN always stays, and
// so does the traffic class of packets that stay on the node.
func TestDSCP(t *testing.T) {
	b := newProgBench(t)
	const class, ecn = 0xb8 | 1, 1
	gram := packet.UDP{SourcePort: 1000, DestinationPort: 53, Payload: []byte("pilaster")}
	for name, clear := range map[string]bool{"keep": false, "clear": true} {
		config := b.datapath.config
		config.ClearDSCP = clear
		b.reopen(t, config)
		b.restore(t, b.b1, b.b2, b.r1)
		for again := range 2 { // a miss of the flow cache, and a hit
			out := packet.Packet{
				Source: b.b1.plain(), Destination: b.b3.Addr(), HopLimit: 63, TrafficClass: class, Body: gram,
			}
			if clear {
				out.TrafficClass = ecn
			}
			sent := b.sent(sees(b.b3.Addr()), gram)
			sent.TrafficClass = class
			b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()},
				progCase{name: fmt.Sprintf("%s, packet %d", name, again), frame: b.frame(sent), out: out})
			here := b.sent(b.b2.seen(), gram)
			here.TrafficClass = class
			inside := packet.Packet{
				Source: b.b1.seen(), Destination: b.b2.seen(), HopLimit: 64, TrafficClass: class, Body: gram,
			}
			b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()},
				progCase{
					name: fmt.Sprintf("%s on the node, packet %d", name, again), frame: b.frame(here), out: inside,
				})
		}
	}
}
