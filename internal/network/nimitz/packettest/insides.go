package packettest

import (
	"encoding/binary"
	"net/netip"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// insides returns packets whose addresses every table accepts, but whose other headers may be a reason for a drop. They
// go to a container, from the same node and from another node, and to the gateway.
func (w world) insides() (all []Case) {
	for _, way := range []struct {
		name         string
		from         pipeline.Port
		src, dst     netip.Addr
		untranslated bool
	}{
		{"same node", 4, w.beside, w.own, true}, {"arrives", pipeline.VXLAN, w.far, w.own, true},
		{"to the service", 2, w.own, w.service, false},
	} {
		add := func(name string, why dropreason.Reason, body packet.Body, extensions ...packet.Extension) *Case {
			c := Case{
				Name:   name + ", " + way.name,
				From:   way.from,
				Drop:   why,
				Packet: packet.Packet{Source: way.src, Destination: way.dst, Body: body, Extensions: extensions},
			}
			if way.from == pipeline.VXLAN {
				c.Outer, c.VNI, c.Identity = pipeline.VTEP(There), 7, 71
			}
			all = append(all, c)
			return &all[len(all)-1]
		}
		add("half a TCP header", dropreason.Malformed, packet.Raw{Proto: packet.ProtocolTCP, Data: make([]byte, 12)})
		add("half a UDP header", dropreason.Malformed, packet.Raw{Proto: packet.ProtocolUDP, Data: make([]byte, 4)})
		if way.src.Is4() {
			c := add("options", dropreason.RoutingHeader, gram)
			c.Frame = withOptions(c.In())
		} else {
			add("a routing header", dropreason.RoutingHeader, gram,
				packet.Extension{Type: packet.Routing, Data: make([]byte, 6)})
			add("a home address", dropreason.RoutingHeader, gram,
				packet.Extension{Type: packet.DestinationOptions, Data: append([]byte{0xc9, 16}, make([]byte, 20)...)})
		}
		if !way.untranslated { // each switch treats translated errors in its own way
			continue
		}
		quoting := func(src, dst netip.Addr) packet.ICMP {
			e := packet.ICMP{
				Type:    packet.TimeExceeded,
				Payload: packet.Packet{Source: src, Destination: dst, Body: gram}.Marshal(),
			}
			if src.Is4() {
				e.Type = packet.TimeExceeded4
			}
			return e
		}
		add("an error", 0, quoting(way.dst, way.src))
		add("an error about another sender's packet", dropreason.IcmpQuote, quoting(w.unused, way.src))
		add("an error about a packet for another receiver", dropreason.IcmpQuote, quoting(way.dst, w.unused))
		nothing := quoting(way.dst, way.src)
		nothing.Payload = nil
		add("an error that quotes nothing", dropreason.IcmpQuote, nothing)
	}
	return all
}

// withOptions adds four bytes of empty options to an IPv4 packet.
func withOptions(frame []byte) []byte {
	const ethernet, header = 14, 20
	all := append(append([]byte{}, frame[:ethernet+header]...), 1, 1, 1, 0)
	all = append(all, frame[ethernet+header:]...)
	h := all[ethernet : ethernet+header+4]
	h[0]++
	binary.BigEndian.PutUint16(h[2:], uint16(len(all)-ethernet))
	h[10], h[11] = 0, 0
	var sum uint32
	for i := 0; i < len(h); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum+sum>>16))
	return all
}
