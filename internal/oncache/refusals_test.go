package oncache

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/packet"
)

func entry(f func(*verdict)) func(*testing.T, *bench) {
	return func(t *testing.T, b *bench) { b.change(t, f) }
}

func noLease(t *testing.T, b *bench) { must(t, b.objects.OnceLease.Set(uint64(0))) }

// fin runs the program on a FIN, after which conntrack has to see the last ACK.
func fin(t *testing.T, b *bench) {
	b.run(t, step{program: "out", frame: b.sent(flags(said, packet.FIN|packet.ACK))})
}

func paused(t *testing.T, b *bench) {
	empty[flowKey, verdict](t, b.objects.OnceFilter)
	must(t, b.Pause())
}

// sumInner gives the inner IPv4 header its checksum, and tunnel packets the lengths of the frame.
func sumInner(f []byte, ip int) []byte {
	binary.BigEndian.PutUint16(f[ip+10:], 0)
	binary.BigEndian.PutUint16(f[ip+10:], headerSum(f[ip:ip+20]))
	return f
}

func raw(protocol uint8, size int) func(world) packet.Body {
	return func(world) packet.Body { return packet.Raw{Proto: protocol, Data: make([]byte, size)} }
}

func options(p *packet.Packet) {
	if !p.Source.Is4() {
		p.Extensions = []packet.Extension{{Type: packet.DestinationOptions, Data: []byte{1, 4, 0, 0, 0, 0}}}
	}
}

// lengthen adds a byte behind the inner packet, with outer lengths that count it.
func lengthen(w world, f []byte, ip int) []byte {
	if f = append(f, 0); ip == 14 {
		return f
	}
	udp := w.at("port")
	binary.BigEndian.PutUint16(f[udp+4:], uint16(len(f)-udp))
	if w.outer4 {
		binary.BigEndian.PutUint16(f[16:], uint16(len(f)-14))
	} else {
		binary.BigEndian.PutUint16(f[18:], uint16(len(f)-54))
	}
	return w.summed(f)
}

// refusals are all cases.
func refusals() []refusal {
	flow := edited(func(_ world, f []byte, _ int) []byte { return f })
	ofWorld := func(body func(world) packet.ICMP) func(world) packet.Body {
		return func(w world) packet.Body { return body(w) }
	}
	return slices.Concat(
		// The state of the cache.
		both(refusal{name: "no lease", prepare: noLease, cause: "no-lease"}, flow),
		both(refusal{name: "unknown, while learning is paused", prepare: paused, cause: "unknown"}, flow),
		both(refusal{name: "unknown", cause: "unknown", learns: true, prepare: func(t *testing.T, b *bench) {
			empty[flowKey, verdict](t, b.objects.OnceFilter)
		}}, flow),
		both(refusal{name: "another generation", prepare: entry(func(v *verdict) { v.Generation-- }), cause: "void",
			learns: true}, flow),
		both(refusal{name: "never let out", prepare: entry(func(v *verdict) { v.Out = 0 }), cause: "expired",
			learns: true}, flow),
		both(refusal{name: "never let in", prepare: entry(func(v *verdict) { v.In = 0 }), cause: "expired",
			learns: true}, flow),
		states(),
		// Packets that the overlay has to see.
		both(refusal{name: "SYN", cause: "tcp-flags", forgets: true}, segment(packet.SYN)),
		both(refusal{name: "FIN", cause: "fin", forgets: true}, segment(packet.FIN|packet.ACK)),
		both(refusal{name: "RST", cause: "tcp-flags", forgets: true}, segment(packet.RST|packet.ACK)),
		both(refusal{name: "after a FIN", prepare: fin, cause: "expired", learns: true}, flow),
		both(refusal{name: "SYN and ACK", cause: "syn-ack", learns: true}, segment(packet.SYN|packet.ACK)),
		both(refusal{name: "no flags", cause: "packet"}, segment(0)),
		both(refusal{name: "ICMP error", cause: "packet"}, frames(ofWorld(world.icmpError))),
		both(refusal{name: "echo of another identifier", cause: "unknown", learns: true}, frames(ofWorld(world.echo))),
		both(refusal{name: "GRE", cause: "packet"}, frames(func(world) packet.Body {
			data := make([]byte, 40)
			data[13] = byte(packet.ACK) // where TCP has it
			return packet.Raw{Proto: 47, Data: data}
		})),
		both(refusal{name: "half a TCP header", cause: "packet"}, frames(raw(packet.ProtocolTCP, 12))),
		both(refusal{name: "no ports", cause: "packet"}, frames(raw(packet.ProtocolUDP, 4))),
		both(refusal{name: "segments of no kind", gsoSize: 4, cause: "segments"}, flow),
		both(refusal{name: "segments of UDP", gsoSize: 4, cause: "segments"}, frames(func(world) packet.Body {
			return packet.UDP{SourcePort: 1, DestinationPort: 2, Payload: make([]byte, 8)}
		})),
		// IP headers.
		both(refusal{name: "first fragment", cause: "packet"}, map[string]func(world) []byte{
			"out": func(w world) []byte { return w.sent(said, fragment) },
			"in":  func(w world) []byte { return w.coming(answered, fragment) },
		}),
		both(refusal{name: "later fragment", cause: "packet"}, map[string]func(world) []byte{
			"out": func(w world) []byte { return w.sent(said, later) },
			"in":  func(w world) []byte { return w.coming(answered, later) },
		}),
		both(refusal{name: "extension header", only: inner6, cause: "packet"}, map[string]func(world) []byte{
			"out": func(w world) []byte { return w.sent(said, options) },
			"in":  func(w world) []byte { return w.coming(answered, options) },
		}),
		both(refusal{name: "IPv4 options", only: inner4, cause: "packet"},
			edited(func(_ world, f []byte, ip int) []byte { f[ip] = 0x46; return sumInner(f, ip) })),
		both(refusal{name: "header checksum", only: inner4, cause: "packet"}, set(10, 0x55)),
		both(refusal{name: "version", only: inner6, cause: "packet"}, set(0, 0x50)),
		both(refusal{name: "trailing byte", cause: "packet"}, edited(lengthen)),
		mapped(),
		hopLimits(),
		// Ethernet.
		both(refusal{name: "multicast MAC", cause: "packet"}, set(-14, 1)),
		both(refusal{name: "another MAC, bridged", only: bridged, cause: "packet"}, set(-9, 0x77)),
		both(refusal{name: "no IP", cause: "packet"}, map[string]func(world) []byte{
			"in": func(w world) []byte { return w.with(w.coming(answered), "inner type", 8, 6) },
			// The program reads an inner type, so this one is that of the packet's data.
			"out": func(w world) []byte { return w.sent(packet.Raw{Proto: 99, Data: make([]byte, 40)}) },
		}),
		outerHeaders(),
	)
}

func states() []refusal {
	out := func(w world) []byte { return w.sent(said) }
	in := func(w world) []byte { return w.coming(answered) }
	long := func(w world) []byte {
		body := said
		body.Payload = make([]byte, 1500)
		return w.sent(body)
	}
	return []refusal{
		{name: "out: another container", frame: out, prepare: entry(func(v *verdict) { v.Device++ }), cause: "device"},
		{name: "out: another container answers a SYN", cause: "syn-ack",
			prepare: entry(func(v *verdict) { v.Device++ }),
			frame:   func(w world) []byte { return w.sent(flags(said, packet.SYN|packet.ACK)) }},
		{name: "out: another container, void", frame: out, cause: "void", learns: true,
			prepare: entry(func(v *verdict) { v.Device++; v.Generation-- })},
		{name: "out: destination unknown", frame: out, cause: "no-route", learns: true, forgets: true,
			prepare: func(t *testing.T, b *bench) { empty[innerKey, egressEntry](t, b.objects.OnceEgress) }},
		{name: "out: VTEP unknown", frame: out, cause: "no-route", learns: true, forgets: true,
			prepare: func(t *testing.T, b *bench) { empty[[16]byte, vtepEntry](t, b.objects.OnceVtep) }},
		{name: "out: too long", frame: long, cause: "too-long"},
		{name: "out: from another MAC", frame: edited(func(_ world, f []byte, ip int) []byte {
			f[ip-3] = 0x77
			return f
		})["out"], cause: "device"},
		{name: "out: to another MAC", only: routed, frame: set(-9, 0x77)["out"], cause: "device"},
		{name: "out: another port", cause: "unknown", learns: true, frame: func(w world) []byte {
			return w.sent(packet.TCP{SourcePort: 4001, DestinationPort: 80, Flags: packet.ACK})
		}},
		{name: "out: another protocol", cause: "unknown", learns: true, frame: func(w world) []byte {
			return w.sent(packet.UDP{SourcePort: 4000, DestinationPort: 80})
		}},
		{name: "out: ARP", frame: func(w world) []byte {
			return packet.Frame(gateway, eth0, 0x0806, make([]byte, 40))
		}},
		// Validity of one direction does not come back with the other.
		{name: "out: void, then let out", frame: out, cause: "expired", learns: true,
			prepare: func(t *testing.T, b *bench) {
				must(t, b.Void())
				b.run(t, step{program: "out", frame: b.sent(said)})
				b.run(t, step{program: "learn out", frame: b.leaving(said), mark: b.field(1)})
			}},
		{name: "out: let out, but claimed by another container", frame: out, cause: "device",
			prepare: func(t *testing.T, b *bench) {
				empty[flowKey, verdict](t, b.objects.OnceFilter)
				b.run(t, step{program: "out", frame: b.sent(said), device: b.uplink})
				b.run(t, step{program: "learn out", frame: b.leaving(said), mark: b.field(1)})
				b.change(t, func(v *verdict) { v.In = v.Out }) // so that it is complete
			}},
		{name: "out: let out for another container, then let in", frame: out, cause: "expired", learns: true,
			prepare: func(t *testing.T, b *bench) {
				empty[flowKey, verdict](t, b.objects.OnceFilter)
				b.run(t, step{program: "out", frame: b.sent(said), device: b.uplink})
				b.run(t, step{program: "learn out", frame: b.leaving(said), mark: b.field(1)})
				b.run(t, step{program: "learn in", frame: b.received(answered), mark: b.field(2)})
			}},
		{name: "out: let in to another device before", frame: out, cause: "expired", learns: true,
			prepare: func(t *testing.T, b *bench) {
				b.change(t, func(v *verdict) { v.Device++ })
				b.run(t, step{program: "learn in", frame: b.received(answered), mark: b.field(2)})
			}},
		{name: "out: void, then let in", frame: out, cause: "expired", learns: true,
			prepare: func(t *testing.T, b *bench) {
				must(t, b.Void())
				b.run(t, step{program: "learn in", frame: b.received(answered), mark: b.field(2)})
			}},
		{name: "out: let in with other MACs before", frame: out, cause: "expired", learns: true,
			prepare: func(t *testing.T, b *bench) {
				b.change(t, func(v *verdict) { v.MACs[5]++ })
				b.run(t, step{program: "learn in", frame: b.received(answered), mark: b.field(2)})
			}},
		{name: "in: container has moved", frame: in, prepare: entry(func(v *verdict) { v.Device++ }), cause: "no-route",
			learns: true, forgets: true},
		{name: "in: container unknown", frame: in, cause: "no-route", learns: true, forgets: true,
			prepare: func(t *testing.T, b *bench) { empty[innerKey, ingressEntry](t, b.objects.OnceIngress) }},
		{name: "in: too long", frame: in, cause: "too-long", prepare: func(t *testing.T, b *bench) {
			here, _, _, _ := b.ends()
			key, e := innerKey{here.As16(), vni}, ingressEntry{}
			must(t, b.objects.OnceIngress.Lookup(key, &e))
			e.MTU = 45
			must(t, b.objects.OnceIngress.Put(key, e))
		}},
	}
}

func mapped() []refusal {
	ip4 := netip.MustParseAddr("::ffff:10.1.1.1")
	edit := func(at int) map[string]func(world) []byte {
		return edited(func(_ world, f []byte, ip int) []byte { copy(f[ip+at:], ip4.AsSlice()); return f })
	}
	return slices.Concat(
		both(refusal{name: "mapped source", only: inner6, cause: "packet"}, edit(8)),
		both(refusal{name: "mapped destination", only: inner6, cause: "packet"}, edit(24)))
}

func hopLimits() []refusal {
	last := func(f packet.TCPFlags) map[string]func(world) []byte {
		return map[string]func(world) []byte{
			"out": func(w world) []byte { return w.sent(flags(said, f), hops(1)) },
			"in": func(w world) []byte {
				if w.bridged {
					return w.coming(flags(answered, f), hops(1))
				}
				return w.coming(flags(answered, f), hops(0)) // the overlay would count it down to 0
			},
		}
	}
	return slices.Concat(
		both(refusal{name: "last hop", cause: "hop-limit"}, last(packet.ACK)),
		both(refusal{name: "last hop of SYN and ACK", cause: "hop-limit"}, last(packet.SYN|packet.ACK)))
}

// outerHeaders are packets from the uplink that are none of the overlay, or whose outer headers say more than the cache
// can do.
func outerHeaders() []refusal {
	in := func(field string, value ...byte) func(world) []byte {
		return func(w world) []byte { return w.with(w.coming(answered), field, value...) }
	}
	ecn := func(inner, outer byte) func(world) []byte {
		return func(w world) []byte {
			f := w.coming(answered, class(inner))
			if w.outer4 {
				return w.with(f, "class", outer)
			}
			return w.with(f, "class", 0x60, outer<<4)
		}
	}
	return []refusal{
		{name: "in: congestion", frame: ecn(2, 3), cause: "congested"},
		{name: "in: congestion of a flow without ECN", frame: ecn(0, 3), cause: "congested"},
		{name: "in: ECT(1) around ECT(0)", frame: ecn(2, 1), cause: "congested"},
		{name: "in: to another inner MAC", frame: in("inner to", 2, 0, 0, 0, 7, 7), cause: "packet"},
		{name: "in: half an inner header", cause: "packet", frame: func(w world) []byte {
			return lengthen(w, w.coming(answered)[:w.at("inner")+14], 0)
		}},
		{name: "in: another node's", frame: in("destination", 9)},
		{name: "in: from another node", frame: in("source", 9), cause: "sender"},
		{name: "in: unverified checksum", frame: in("checksum", 1, 2), cause: "unverified", learns: true},
		{name: "in: another port", frame: in("target", 9, 9)},
		{name: "in: another network", frame: in("vni", 9)},
		{name: "in: group policy", frame: in("flags", 0x88)},
		{name: "in: reserved byte", frame: in("reserved", 1)},
		{name: "in: outer TCP", frame: in("protocol", packet.ProtocolTCP)},
		{name: "in: another length in UDP", frame: in("length", 0, 99)},
		{name: "in: another's frame", frame: func(w world) []byte {
			f := w.coming(answered)
			f[5] = 9
			return f
		}},
		{name: "in: other ethertype", frame: func(w world) []byte {
			f := w.coming(answered)
			copy(f[12:], []byte{0x88, 0xb5})
			return f
		}},
		{name: "in: cut", frame: func(w world) []byte { return w.coming(answered)[:w.at("flags")+2] }},
	}
}

// lessons are all cases of learning.
func lessons() []lesson {
	out := func(w world) []byte { return w.leaving(said) }
	in := func(w world) []byte { return w.received(answered) }
	way := func(way, generation uint32) func(*bench) uint32 {
		return func(b *bench) uint32 { return ((b.marks+generation)<<wayBits | way) << 4 }
	}
	pause := func(t *testing.T, b *bench) { must(t, b.Pause()) }
	return []lesson{
		{name: "learn out: no mark", frame: out, mark: func(*bench) uint32 { return 0 }},
		{name: "learn in: no mark", frame: in, mark: func(*bench) uint32 { return 0 }},
		{name: "learn out: the other direction", frame: out, mark: way(2, 0), cause: "changed-before"},
		{name: "learn in: the other direction", frame: in, mark: way(1, 0), cause: "changed-before"},
		{name: "learn out: marked before a change", frame: out, mark: way(1, ^uint32(0)), cause: "changed-before"},
		{name: "learn in: marked before a change", frame: in, mark: way(2, ^uint32(0)), cause: "changed-before"},
		{name: "learn out: paused", frame: out, prepare: pause, mark: way(1, 0), cause: "changed-before"},
		{name: "learn in: paused", frame: in, prepare: pause, mark: way(2, 0), cause: "changed-before"},
		{name: "learn out: no lease", frame: out, prepare: noLease},
		{name: "learn in: no lease", frame: in, prepare: noLease},
		{name: "learn out: outer checksum", only: outer6, cause: "checksum",
			frame: func(w world) []byte { return w.with(w.leaving(said), "checksum", 1, 2) }},
		{name: "learn out: not sent by a tunnel device", frame: out, plain: true, cause: "changed-before"},
		{name: "learn out: not the tunnel", frame: func(w world) []byte { return w.sent(said) }},
		{name: "learn out: another node's", frame: func(w world) []byte { return w.coming(said) }},
		{name: "learn out: another network", frame: func(w world) []byte { return w.with(w.leaving(said), "vni", 9) }},
		{name: "learn out: fragment", frame: func(w world) []byte { return w.leaving(said, fragment) }},
		{name: "learn in: fragment", frame: func(w world) []byte { return w.received(answered, fragment) }},
		{name: "learn in: to another MAC", cause: "flooded", frame: func(w world) []byte {
			f := w.received(answered)
			f[5] = 0x77
			return f
		}},
		{name: "learn in: the container has sent nothing", frame: in, cause: "flooded",
			prepare: func(t *testing.T, b *bench) { empty[uint32, uint64](t, b.objects.OnceSender) }},
		{name: "learn out: SYN", frame: func(w world) []byte { return w.leaving(flags(said, packet.SYN)) }},
		{name: "learn in: FIN", frame: func(w world) []byte {
			return w.received(flags(answered, packet.FIN|packet.ACK))
		}},
	}
}
