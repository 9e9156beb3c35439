package packet

import "net/netip"

// Protocol numbers (IANA) that appear as a next header.
const (
	HopByHop            uint8 = 0
	ProtocolTCP         uint8 = 6
	ProtocolUDP         uint8 = 17
	Routing             uint8 = 43
	FragmentHeader      uint8 = 44
	ProtocolICMPv6      uint8 = 58
	NoNextHeader        uint8 = 59
	DestinationOptions  uint8 = 60
	DefaultHopLimit     uint8 = 64
	ipv6HeaderLen             = 40
	udpHeaderLen              = 8
	tcpHeaderLen              = 20
	icmpHeaderLen             = 8
	fragmentHeaderLen         = 8
	extensionFixedBytes       = 2
)

// ICMPv6 types (RFC 4443, RFC 4861).
const (
	DestinationUnreachable uint8 = 1
	PacketTooBig           uint8 = 2
	TimeExceeded           uint8 = 3
	EchoRequest            uint8 = 128
	EchoReply              uint8 = 129
	RouterSolicitation     uint8 = 133
	RouterAdvertisement    uint8 = 134
	NeighborSolicitation   uint8 = 135
	NeighborAdvertisement  uint8 = 136
)

// Packet is a decoded IPv6 packet, or an IPv6 or IPv4 packet to be built. Its addresses determine the family.
type Packet struct {
	Source, Destination netip.Addr
	TrafficClass        uint8
	FlowLabel           uint32 // 20 bits
	HopLimit            uint8  // 0 builds 64
	Extensions          []Extension
	Body                Body // nil builds no next header (59)
}

// Extension is one extension header. Data follows its first two bytes and is 8n+6 bytes long.
type Extension struct {
	Type uint8 // HopByHop, Routing, FragmentHeader or DestinationOptions
	Data []byte
}

// Body is the upper layer of a packet: UDP, TCP, ICMP or Raw.
type Body interface {
	// Protocol is the next-header value that announces the body.
	Protocol() uint8
	// header appends the header with a zero checksum; checksumAt is the checksum's offset (-1: none).
	header(b []byte) (out []byte, checksumAt int)
	// payload returns the bytes after the header.
	payload() []byte
}

// UDP is a UDP datagram.
type UDP struct {
	SourcePort, DestinationPort uint16
	Payload                     []byte
}

// TCP is a TCP segment. The caller pads Options to a multiple of four.
type TCP struct {
	SourcePort, DestinationPort uint16
	Sequence, Acknowledgment    uint32
	Flags                       TCPFlags
	Window                      uint16
	Options                     []byte
	Payload                     []byte
}

// TCPFlags are the eight flag bits of a TCP header.
type TCPFlags uint8

const (
	FIN TCPFlags = 1 << iota
	SYN
	RST
	PSH
	ACK
)

// ICMP is an ICMPv6 message. Rest has the four bytes after the checksum: ID and sequence number of an echo, or the MTU
// of a packet too big. Other messages do not use it.
type ICMP struct {
	Type, Code uint8
	Rest       [4]byte
	Payload    []byte
}

// Raw is an upper layer that is not decoded: a later fragment, an unknown protocol, a truncated header.
type Raw struct {
	Proto uint8
	Data  []byte
}

func (UDP) Protocol() uint8   { return ProtocolUDP }
func (TCP) Protocol() uint8   { return ProtocolTCP }
func (ICMP) Protocol() uint8  { return ProtocolICMPv6 }
func (r Raw) Protocol() uint8 { return r.Proto }

func (u UDP) payload() []byte  { return u.Payload }
func (t TCP) payload() []byte  { return t.Payload }
func (i ICMP) payload() []byte { return i.Payload }
func (r Raw) payload() []byte  { return r.Data }

// Echo returns the Rest of an echo request or reply.
func Echo(id, seq uint16) [4]byte {
	return [4]byte{byte(id >> 8), byte(id), byte(seq >> 8), byte(seq)}
}

// Fragment returns a fragment header. The offset is in bytes, a multiple of 8.
func Fragment(offset uint16, more bool, id uint32) Extension {
	low := byte(offset)
	if more {
		low |= 1
	}
	return Extension{
		FragmentHeader,
		[]byte{byte(offset >> 8), low, byte(id >> 24), byte(id >> 16), byte(id >> 8), byte(id)},
	}
}
