package packet

import "encoding/binary"

const (
	ipv4HeaderLen  = 20
	protocolICMPv4 = 1
)

// ICMP of IPv4 (RFC 792).
const (
	EchoReply4          uint8 = 0
	Unreachable4        uint8 = 3
	EchoRequest4        uint8 = 8
	TimeExceeded4       uint8 = 11
	FragmentationNeeded uint8 = 4 // a code of Unreachable4
)

// marshal4 builds a packet with IPv4 addresses. The only allowed extension is FragmentHeader, whose fields marshal4
// writes into the IPv4 header. An ICMP body must be an ICMP message of IPv4.
func (p Packet) marshal4() []byte {
	body := p.Body
	if body == nil {
		body = Raw{Proto: NoNextHeader}
	}
	b, checksumAt := body.header(make([]byte, ipv4HeaderLen))
	b = append(b, body.payload()...)
	upper, protocol := b[ipv4HeaderLen:], body.Protocol()
	_, icmp := body.(ICMP)
	if icmp {
		protocol = protocolICMPv4
	}
	if checksumAt >= 0 {
		sum := onesSum(0, upper)
		if !icmp {
			sum = Checksum(p.Source, p.Destination, protocol, upper)
		}
		if sum == 0 && protocol == ProtocolUDP {
			sum = 0xffff
		}
		binary.BigEndian.PutUint16(upper[checksumAt:], sum)
	}

	b[0], b[1] = 4<<4|ipv4HeaderLen/4, p.TrafficClass
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	for _, e := range p.Extensions {
		offset := binary.BigEndian.Uint16(e.Data)
		binary.BigEndian.PutUint16(b[4:], binary.BigEndian.Uint16(e.Data[4:]))
		binary.BigEndian.PutUint16(b[6:], offset>>3|offset<<13) // the last bit says that more follow
	}
	b[8], b[9] = p.HopLimit, protocol
	if p.HopLimit == 0 {
		b[8] = DefaultHopLimit
	}
	source, destination := p.Source.As4(), p.Destination.As4()
	copy(b[12:], source[:])
	copy(b[16:], destination[:])
	binary.BigEndian.PutUint16(b[10:], onesSum(0, b[:ipv4HeaderLen]))
	return b
}
