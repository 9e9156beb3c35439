package datapath

import (
	"fmt"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
)

// anatomy is an IPv6 packet as RFC 8200 reads it. Offsets count from the IPv6 header.
type anatomy struct {
	source, destination netip.Addr
	protocol            uint8
	upper               int  // where the upper layer begins
	end                 int  // after the last byte of the packet; the frame may have more
	later               bool // a later fragment: the bytes at upper are not a header
	diverts             bool // a routing header, or a home-address option
}

// dissect reads a frame's packet; ok means that it is IPv6, its headers are whole and their chain ends.
func dissect(frame []byte, segments bool) (a anatomy, ok bool) {
	if len(frame) < ipv6At+40 || frame[12] != 0x86 || frame[13] != 0xdd || frame[ipv6At]>>4 != 6 {
		return a, false
	}
	p := frame[ipv6At:]
	a.source, a.destination = netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
	a.end = 40 + int(p[4])<<8 + int(p[5])
	if a.end == 40 && segments {
		a.end = len(p) // BIG TCP
	}
	if a.end > len(p) {
		return a, false
	}
	return a, a.follow(p[:a.end])
}

// follow finds where the upper layer of p begins, and reports whether the headers before it are whole.
func (a *anatomy) follow(p []byte) bool {
	a.protocol, a.upper = p[6], 40
	for {
		rest := p[a.upper:]
		length := 8
		switch a.protocol {
		case packet.HopByHop, packet.Routing, packet.DestinationOptions, authHeader, packet.FragmentHeader:
			if len(rest) < 8 {
				return false
			}
		default:
			return true
		}
		switch a.protocol {
		case packet.FragmentHeader:
			if rest[2] != 0 || rest[3]&0xf8 != 0 {
				a.later = true
			}
		case authHeader:
			length = (int(rest[1]) + 2) * 4
		default:
			length = (int(rest[1]) + 1) * 8
		}
		if length > len(rest) {
			return false
		}
		if a.protocol == packet.Routing || a.protocol == packet.DestinationOptions && hasHomeAddress(rest[2:length]) {
			a.diverts = true
		}
		a.protocol, a.upper = rest[0], a.upper+length
		if a.later {
			return true
		}
	}
}

func hasHomeAddress(options []byte) bool {
	for len(options) > 0 {
		switch {
		case options[0] == homeOption:
			return true
		case options[0] == 0: // Pad1 has no length
			options = options[1:]
		case len(options) < 2:
			return false
		default:
			options = options[min(len(options), 2+int(options[1])):]
		}
	}
	return false
}

// checksumAt returns the offset of a protocol's checksum; -1 if the protocol has none that covers the addresses.
func checksumAt(protocol uint8) int {
	switch protocol {
	case packet.ProtocolTCP:
		return 16
	case packet.ProtocolUDP, 33, 136: // DCCP, UDP-Lite
		return 6
	case packet.ProtocolICMPv6:
		return 2
	}
	return -1
}

// mayPass returns why a packet must not be delivered, whatever its source is; nil if it may.
func (a anatomy) mayPass(frame []byte) error {
	upper := frame[ipv6At+a.upper : ipv6At+a.end]
	least := map[uint8]int{packet.ProtocolTCP: 20, 33: 12, packet.ProtocolUDP: 8, 136: 8,
		packet.ProtocolICMPv6: 8}[a.protocol]
	switch {
	case a.diverts:
		return fmt.Errorf("it has a routing header or a home address")
	case a.later:
	case len(upper) < least:
		return fmt.Errorf("%d bytes of an upper header of %d", len(upper), least)
	case a.protocol == packet.ProtocolICMPv6 && (upper[0] >= 130 && upper[0] <= 137 || upper[0] == 143):
		return fmt.Errorf("ICMPv6 type %d belongs to one link", upper[0])
	}
	return nil
}

func (a anatomy) isError(frame []byte) bool {
	return a.protocol == packet.ProtocolICMPv6 && !a.later && a.upper+1 <= a.end && frame[ipv6At+a.upper] < 128
}

// quoted returns source and destination of the packet that an ICMPv6 error quotes.
func (a anatomy) quoted(frame []byte) (from, to netip.Addr, ok bool) {
	if a.upper+8+40 > a.end {
		return from, to, false
	}
	q := frame[ipv6At+a.upper+8:]
	return netip.AddrFrom16([16]byte(q[8:24])), netip.AddrFrom16([16]byte(q[24:40])), true
}

// TestModelKnowsItsPackets: the model reads chains of headers correctly; otherwise fuzzing would prove little.
func TestModelKnowsItsPackets(t *testing.T) {
	b := packet.Packet{Source: netip.MustParseAddr("fc00::1"), Destination: netip.MustParseAddr("fc00::2")}
	for _, c := range []struct {
		name       string
		extensions []packet.Extension
		upper      int
		diverts    bool
		later      bool
	}{
		{"none", nil, 40, false, false},
		{"options", []packet.Extension{padding(packet.HopByHop), padding(packet.DestinationOptions)}, 56, false, false},
		{"routing", []packet.Extension{padding(packet.HopByHop), {Type: packet.Routing, Data: make([]byte, 6)}}, 56,
			true, false},
		{"home address", []packet.Extension{homeAddress()}, 64, true, false},
		{"later fragment", []packet.Extension{packet.Fragment(8, false, 1)}, 48, false, true},
	} {
		b.Extensions, b.Body = c.extensions, gram
		a, ok := dissect(b.Frame(host.GatewayMAC, host.ContainerMAC), false)
		if !ok || a.upper != c.upper || a.diverts != c.diverts || a.later != c.later ||
			a.protocol != packet.ProtocolUDP {
			t.Errorf("%s: %+v, %v", c.name, a, ok)
		}
	}
}
