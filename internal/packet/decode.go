package packet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

var (
	// ErrNotIPv6 means that the frame or packet is not IPv6.
	ErrNotIPv6 = errors.New("not an IPv6 packet")
	// ErrTruncated means that a header or the packet is incomplete.
	ErrTruncated = errors.New("truncated packet")
)

// DecodeFrame decodes an Ethernet frame with an IPv6 packet.
func DecodeFrame(frame []byte) (Packet, error) {
	if len(frame) < ethernetHeaderLen {
		return Packet{}, fmt.Errorf("%w: Ethernet header", ErrTruncated)
	}
	if t := binary.BigEndian.Uint16(frame[12:]); t != EtherTypeIPv6 {
		return Packet{}, fmt.Errorf("%w: EtherType %#04x", ErrNotIPv6, t)
	}
	return Decode(frame[ethernetHeaderLen:])
}

// Decode decodes an IPv6 packet. It ignores bytes after the packet's length, which are padding. Payloads are slices of
// b. Decode does not check checksums: see ChecksumOK.
func Decode(b []byte) (Packet, error) {
	if len(b) < 1 || b[0]>>4 != 6 {
		return Packet{}, ErrNotIPv6
	}
	if len(b) < ipv6HeaderLen {
		return Packet{}, fmt.Errorf("%w: IPv6 header", ErrTruncated)
	}
	word := binary.BigEndian.Uint32(b)
	p := Packet{
		Source:       netip.AddrFrom16([16]byte(b[8:24])),
		Destination:  netip.AddrFrom16([16]byte(b[24:40])),
		TrafficClass: uint8(word >> 20),
		FlowLabel:    word & 0xfffff,
		HopLimit:     b[7],
	}
	next, length := b[6], int(binary.BigEndian.Uint16(b[4:]))
	b = b[ipv6HeaderLen:]
	if len(b) < length {
		return p, fmt.Errorf("%w: %d bytes of %d", ErrTruncated, len(b), length)
	}
	b = b[:length]
	for isExtension(next) {
		e, following, rest, err := cutExtension(next, b)
		if err != nil {
			return p, err
		}
		p.Extensions = append(p.Extensions, e)
		next, b = following, rest
		if e.Type == FragmentHeader && binary.BigEndian.Uint16(e.Data)&^7 != 0 {
			p.Body = Raw{next, b} // a later fragment has no upper header
			return p, nil
		}
	}
	body, err := decodeBody(next, b)
	p.Body = body
	return p, err
}

func isExtension(header uint8) bool {
	return header == HopByHop || header == Routing || header == FragmentHeader || header == DestinationOptions
}

func cutExtension(header uint8, b []byte) (e Extension, next uint8, rest []byte, err error) {
	if len(b) < fragmentHeaderLen {
		return e, 0, nil, fmt.Errorf("%w: extension header %d", ErrTruncated, header)
	}
	length := fragmentHeaderLen
	if header != FragmentHeader {
		length = (int(b[1]) + 1) * 8
	}
	if len(b) < length {
		return e, 0, nil, fmt.Errorf("%w: extension header %d", ErrTruncated, header)
	}
	return Extension{header, b[extensionFixedBytes:length]}, b[0], b[length:], nil
}

func decodeBody(protocol uint8, b []byte) (Body, error) {
	cut := func(what string) (Body, error) {
		return Raw{protocol, b}, fmt.Errorf("%w: %s header", ErrTruncated, what)
	}
	switch protocol {
	case ProtocolUDP:
		if len(b) < udpHeaderLen {
			return cut("UDP")
		}
		return UDP{
			SourcePort:      binary.BigEndian.Uint16(b),
			DestinationPort: binary.BigEndian.Uint16(b[2:]),
			Payload:         b[udpHeaderLen:],
		}, nil
	case ProtocolTCP:
		if len(b) < tcpHeaderLen || int(b[12]>>4)*4 < tcpHeaderLen || len(b) < int(b[12]>>4)*4 {
			return cut("TCP")
		}
		length := int(b[12]>>4) * 4
		return TCP{
			SourcePort:      binary.BigEndian.Uint16(b),
			DestinationPort: binary.BigEndian.Uint16(b[2:]),
			Sequence:        binary.BigEndian.Uint32(b[4:]),
			Acknowledgment:  binary.BigEndian.Uint32(b[8:]),
			Flags:           TCPFlags(b[13]),
			Window:          binary.BigEndian.Uint16(b[14:]),
			Options:         b[tcpHeaderLen:length],
			Payload:         b[length:],
		}, nil
	case ProtocolICMPv6:
		if len(b) < icmpHeaderLen {
			return cut("ICMPv6")
		}
		return ICMP{Type: b[0], Code: b[1], Rest: [4]byte(b[4:8]), Payload: b[icmpHeaderLen:]}, nil
	}
	return Raw{protocol, b}, nil
}

// ChecksumOK reports whether the upper layer's checksum is correct. It returns true for fragments and for protocols
// without a known checksum. A packet captured before it left its machine may have a partial checksum (see
// Captured.ChecksumPartial).
func ChecksumOK(b []byte) bool {
	p, err := Decode(b)
	if err != nil {
		return false
	}
	for _, e := range p.Extensions {
		if e.Type == FragmentHeader {
			return true
		}
	}
	switch p.Body.(type) {
	case UDP, TCP, ICMP:
	default:
		return true
	}
	header, _ := p.Body.header(nil)
	upper := len(header) + len(p.Body.payload())
	end := ipv6HeaderLen + int(binary.BigEndian.Uint16(b[4:]))
	return Checksum(p.Source, p.Destination, p.Body.Protocol(), b[end-upper:end]) == 0
}
