package packet

import (
	"encoding/binary"
	"net"
	"net/netip"
)

// EtherTypes.
const (
	EtherTypeIPv6 uint16 = 0x86dd
	EtherTypeIPv4 uint16 = 0x0800
	EtherTypeARP  uint16 = 0x0806
)

const ethernetHeaderLen = 14

// Frame puts an Ethernet header in front of a payload.
func Frame(destination, source net.HardwareAddr, etherType uint16, payload []byte) []byte {
	b := make([]byte, 0, ethernetHeaderLen+len(payload))
	b = append(b, destination[:6]...)
	b = append(b, source[:6]...)
	b = binary.BigEndian.AppendUint16(b, etherType)
	return append(b, payload...)
}

// Marshal builds the packet from the IP header on, with correct lengths and checksums.
func (p Packet) Marshal() []byte {
	if p.Source.Is4() {
		return p.marshal4()
	}
	body := p.Body
	if body == nil {
		body = Raw{Proto: NoNextHeader}
	}
	b := make([]byte, ipv6HeaderLen, ipv6HeaderLen+128+len(body.payload()))
	next := &b[6]
	for _, e := range p.Extensions {
		*next = e.Type
		at := len(b)
		b = append(b, 0, byte((len(e.Data)+extensionFixedBytes)/8-1))
		if e.Type == FragmentHeader {
			b[at+1] = 0 // reserved, not a length
		}
		b = append(b, e.Data...)
		next = &b[at]
	}
	*next = body.Protocol()

	upper := len(b)
	b, checksumAt := body.header(b)
	b = append(b, body.payload()...)
	if checksumAt >= 0 {
		sum := Checksum(p.Source, p.Destination, body.Protocol(), b[upper:])
		if sum == 0 && body.Protocol() == ProtocolUDP {
			sum = 0xffff // RFC 8200 §8.1: zero means none and is forbidden
		}
		binary.BigEndian.PutUint16(b[upper+checksumAt:], sum)
	}

	binary.BigEndian.PutUint32(b, 6<<28|uint32(p.TrafficClass)<<20|p.FlowLabel&0xfffff)
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-ipv6HeaderLen))
	b[7] = p.HopLimit
	if p.HopLimit == 0 {
		b[7] = DefaultHopLimit
	}
	source, destination := p.Source.As16(), p.Destination.As16()
	copy(b[8:], source[:])
	copy(b[24:], destination[:])
	return b
}

// Frame builds the packet behind an Ethernet header.
func (p Packet) Frame(destination, source net.HardwareAddr) []byte {
	kind := EtherTypeIPv6
	if p.Source.Is4() {
		kind = EtherTypeIPv4
	}
	return Frame(destination, source, kind, p.Marshal())
}

// VXLAN returns the payload of a UDP datagram that carries a frame, with a group policy id (RFC 7348,
// draft-smith-vxlan-group-policy) unless it is 0.
func VXLAN(vni uint32, group uint16, frame []byte) []byte {
	flags := uint32(0x08000000)
	if group != 0 {
		flags |= 0x80000000 | uint32(group)
	}
	header := binary.BigEndian.AppendUint32(nil, flags)
	return append(binary.BigEndian.AppendUint32(header, vni<<8), frame...)
}

func (u UDP) header(b []byte) ([]byte, int) {
	b = binary.BigEndian.AppendUint16(b, u.SourcePort)
	b = binary.BigEndian.AppendUint16(b, u.DestinationPort)
	b = binary.BigEndian.AppendUint16(b, uint16(udpHeaderLen+len(u.Payload)))
	return append(b, 0, 0), 6
}

func (t TCP) header(b []byte) ([]byte, int) {
	b = binary.BigEndian.AppendUint16(b, t.SourcePort)
	b = binary.BigEndian.AppendUint16(b, t.DestinationPort)
	b = binary.BigEndian.AppendUint32(b, t.Sequence)
	b = binary.BigEndian.AppendUint32(b, t.Acknowledgment)
	b = append(b, byte((tcpHeaderLen+len(t.Options))/4)<<4, byte(t.Flags))
	b = binary.BigEndian.AppendUint16(b, t.Window)
	b = append(b, 0, 0, 0, 0) // checksum, urgent pointer
	return append(b, t.Options...), 16
}

func (i ICMP) header(b []byte) ([]byte, int) {
	b = append(b, i.Type, i.Code, 0, 0)
	return append(b, i.Rest[:]...), 2
}

func (r Raw) header(b []byte) ([]byte, int) { return b, -1 }

// Checksum returns the Internet checksum over the pseudo header and the upper layer, whose checksum field must be zero.
// If this field has the correct checksum, the result is 0. (An IPv4 address in IPv6 form begins with 0xffff, which does
// not change the sum.)
func Checksum(source, destination netip.Addr, protocol uint8, upper []byte) uint16 {
	s, d := source.As16(), destination.As16()
	return onesSum(uint64(len(upper))+uint64(protocol), s[:], d[:], upper)
}

// onesSum returns the Internet checksum (RFC 1071) over parts. All parts except the last must have an even length.
func onesSum(sum uint64, parts ...[]byte) uint16 {
	for _, part := range parts {
		for len(part) >= 2 {
			sum += uint64(binary.BigEndian.Uint16(part))
			part = part[2:]
		}
		if len(part) == 1 {
			sum += uint64(part[0]) << 8
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
