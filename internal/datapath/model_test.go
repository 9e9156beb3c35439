package datapath

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// What fuzzing holds the programs to: what the design promises of any packet, read from the packet
// by rules of its own. It says what must never happen, and leaves open which reason a drop has.

const (
	authHeader    = 51
	homeOption    = 0xc9
	firstReserved = 0xff00
	ipv6At        = 14 // in a frame
)

// anatomy is an IPv6 packet as RFC 8200 reads it. Offsets count from the IPv6 header.
type anatomy struct {
	source, destination netip.Addr
	protocol            uint8
	upper               int  // where the upper layer begins
	end                 int  // behind the last byte of the packet; the frame may have more
	later               bool // a later fragment: what is at upper is not a header
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

// checksumAt is where a protocol whose checksum covers the addresses has it; -1 where none does.
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

// mayPass says why a packet may not be delivered whomever it is from, or returns nil.
func (a anatomy) mayPass(frame []byte) error {
	upper := frame[ipv6At+a.upper : ipv6At+a.end]
	least := map[uint8]int{packet.ProtocolTCP: 20, 33: 12, packet.ProtocolUDP: 8, 136: 8, packet.ProtocolICMPv6: 8}[a.protocol]
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

// quoted are source and destination of the packet that an ICMPv6 error is about.
func (a anatomy) quoted(frame []byte) (from, to netip.Addr, ok bool) {
	if a.upper+8+40 > a.end {
		return from, to, false
	}
	q := frame[ipv6At+a.upper+8:]
	return netip.AddrFrom16([16]byte(q[8:24])), netip.AddrFrom16([16]byte(q[24:40])), true
}

// passage is how a delivered packet must have changed: from the addresses the sender meant to others.
type passage struct {
	source, destination       netip.Addr // in, as the rules take them
	newSource, newDestination netip.Addr
	hops                      uint8
}

// check compares what a program let out with what it was given, byte for byte.
func (w passage) check(in, out []byte, a anatomy) error {
	if len(in) != len(out) {
		return fmt.Errorf("%d bytes became %d", len(in), len(out))
	}
	want := bytes.Clone(in)
	p, got := want[ipv6At:], out[ipv6At:]
	copy(want[:12], out[:12]) // MACs are judged by the caller
	p[7] -= w.hops
	put(p[8:], w.newSource, w.newDestination)
	if a.isError(in) {
		from, to, whole := a.quoted(in)
		if !whole || from != w.destination || to != w.source {
			return fmt.Errorf("an error from %v to %v quotes a packet from %v to %v", w.source, w.destination, from, to)
		}
		if w.source != w.newSource || w.destination != w.newDestination {
			if err := w.translateQuote(p[a.upper+8:a.end], got[a.upper+8:a.end]); err != nil {
				return err
			}
		}
	}
	if at := checksumAt(a.protocol); at >= 0 && !a.later {
		before := packet.Checksum(a.source, a.destination, a.protocol, in[ipv6At+a.upper:ipv6At+a.end])
		keepSum(p[a.upper+at:], got[a.upper+at:], a.protocol, func() bool {
			return before == packet.Checksum(w.newSource, w.newDestination, a.protocol, got[a.upper:a.end])
		})
	}
	if !bytes.Equal(want, out) {
		return fmt.Errorf("it left as\n%x, should be\n%x", out, want)
	}
	return nil
}

// translateQuote makes quote what it should be; got is what it became.
func (w passage) translateQuote(quote, got []byte) error {
	var a anatomy
	if !a.follow(quote) || a.diverts {
		return fmt.Errorf("it quotes a packet that was not let out")
	}
	upper := quote[a.upper:]
	if a.protocol == packet.ProtocolICMPv6 && !a.later && len(upper) > 0 && upper[0] < 128 {
		return fmt.Errorf("it is an error about an error")
	}
	before := packet.Checksum(w.destination, w.source, a.protocol, upper)
	put(quote[8:], w.newDestination, w.newSource)
	if at := checksumAt(a.protocol); at >= 0 && !a.later && at+2 <= len(upper) {
		keepSum(upper[at:], got[a.upper+at:], a.protocol, func() bool {
			return before == packet.Checksum(w.newDestination, w.newSource, a.protocol, got[a.upper:])
		})
	}
	return nil
}

// keepSum takes over a checksum as it left, if it is as right or wrong as the one that came: right by
// the same, with 0 for "none" kept and never made where it means that.
func keepSum(want, got []byte, protocol uint8, equallyRight func() bool) {
	zeroIsNone := protocol == packet.ProtocolUDP
	if zeroIsNone && (bytes.HasPrefix(want, []byte{0, 0}) || bytes.HasPrefix(got, []byte{0, 0})) {
		return
	}
	if equallyRight() {
		copy(want[:2], got[:2])
	}
}

func put(b []byte, source, destination netip.Addr) {
	s, d := source.As16(), destination.As16()
	copy(b, s[:])
	copy(b[16:], d[:])
}

// model is what the bench's node holds, as its operator would tell it.
type model struct {
	node       netip.Prefix
	containers []*testContainer
	tenants    map[string]tenant.Tenant
}

// container is the one with this plaintext address.
func (m model) container(plain netip.Addr) *testContainer {
	for _, c := range m.containers {
		if c.plain() == plain {
			return c
		}
	}
	return nil
}

// peer splits a plaintext address and reports whether a container of the same tenant may have it.
func (m model) peer(of *testContainer, plain netip.Addr) bool {
	p := address.Split(plain)
	return address.DefaultPlan().Base.Contains(plain) && m.tenants[of.record.Tenant].Has(p.Tenant) && p.App < firstReserved
}

// plaintext is what an address means that a container wrote: of the ids of its tenant, one whose key makes it an
// address of that very id. Without one it is the zero Addr, which nothing contains.
func (m model) plaintext(c *testContainer, a netip.Addr) netip.Addr {
	if c.cipher == nil {
		return a
	}
	for _, id := range m.tenants[c.record.Tenant].IDs {
		if p := address.NewCipher(id.Key).Decrypt(a); address.DefaultPlan().Base.Contains(p) && address.Split(p).Tenant == id.ID {
			return p
		}
	}
	return netip.Addr{}
}

// sees is what a container sees of a peer: the address under the key of the peer's own id.
func (m model) sees(c *testContainer, plain netip.Addr) netip.Addr {
	for _, id := range m.tenants[c.record.Tenant].IDs {
		if c.cipher != nil && id.ID == address.Split(plain).Tenant {
			return address.NewCipher(id.Key).Encrypt(plain)
		}
	}
	return plain
}

// outward says what is wrong with a packet that left the device of c (nil: of nobody) by the fabric or,
// if local, went to a container here.
func (m model) outward(c *testContainer, in, out []byte, segments bool) (local bool, err error) {
	a, whole := dissect(in, segments)
	if !whole {
		return false, fmt.Errorf("it is not a whole IPv6 packet")
	}
	if err := a.mayPass(in); err != nil {
		return false, err
	}
	if c == nil || a.source != c.seen() {
		return false, fmt.Errorf("source %v is not of this device", a.source)
	}
	if a.destination == m.gateway(c) {
		return true, m.toNode(c, in, out, a)
	}
	to := m.plaintext(c, a.destination)
	if !m.peer(c, to) || c.cipher != nil && !address.DefaultPlan().Private.Contains(a.destination) {
		return false, fmt.Errorf("destination %v is %v, no container of the tenant", a.destination, to)
	}
	w := passage{source: a.source, destination: a.destination, newSource: c.plain(), newDestination: to, hops: 1}
	if m.node.Contains(to) {
		if m.container(to) == nil {
			return true, fmt.Errorf("no container here has %v", to)
		}
		w.newSource, w.newDestination, w.hops = a.source, a.destination, 0
		return true, joinMACs(w.check(in, out, a), out)
	}
	if in[ipv6At+7] <= 1 {
		return false, fmt.Errorf("its hop limit was %d", in[ipv6At+7])
	}
	return false, w.check(in, out, a)
}

// told says what is wrong with an answer of the node to a packet from the device of c (RFC 4443 §2.4, §3.2, §3.3).
func (m model) told(c *testContainer, in, out []byte) error {
	a, whole := dissect(in, true)
	if !whole || c == nil || a.source != c.seen() {
		return fmt.Errorf("it was not the container's own packet")
	}
	if err := a.mayPass(in); err != nil {
		return err
	}
	if to := m.plaintext(c, a.destination); !m.peer(c, to) || m.node.Contains(to) {
		return fmt.Errorf("it was for %v, to where there are no hops", to)
	}
	if a.isError(in) || a.later && a.protocol == packet.ProtocolICMPv6 || in[0] == 0xff || in[0] == 0x33 && in[1] == 0x33 {
		return fmt.Errorf("it was an error, or for many")
	}
	kind, mtu := packet.PacketTooBig, uint32(1500)
	if in[ipv6At+7] <= 1 {
		kind, mtu = packet.TimeExceeded, 0
	} else if len(in)-ipv6At <= 1500 {
		return fmt.Errorf("it was short enough and had hops left")
	}
	want := packet.Packet{Source: m.gateway(c), Destination: c.seen(), Body: errorAbout(kind, mtu, in[ipv6At:])}
	if want := want.Frame(containerMAC, gatewayMAC); !bytes.Equal(want, out) {
		return fmt.Errorf("the answer should be\n%x", want)
	}
	return nil
}

// gateway is the node as a container sees it.
func (m model) gateway(c *testContainer) netip.Addr {
	of := m.tenants[c.record.Tenant]
	for _, id := range of.IDs {
		if guest, err := of.Gateway(address.DefaultPlan(), m.node, id); err == nil && id.ID == c.record.TenantID {
			return guest.Address
		}
	}
	return netip.Addr{}
}

// inward says what is wrong with a packet from the fabric that went to a container.
func (m model) inward(in, out []byte, segments bool) error {
	a, whole := dissect(in, segments)
	if !whole {
		return fmt.Errorf("it is not a whole IPv6 packet")
	}
	if err := a.mayPass(in); err != nil {
		return err
	}
	c, source := m.container(a.destination), a.source
	if c == nil {
		return fmt.Errorf("no container here has %v", a.destination)
	}
	if a.isError(in) && !claimsTenant(source) {
		_, source, _ = a.quoted(in) // a router speaks for the peer it could not reach
	}
	if !m.peer(c, source) || m.node.Contains(a.source) || m.node.Contains(source) {
		return fmt.Errorf("source %v is of no container elsewhere of the tenant", source)
	}
	w := passage{source: source, destination: a.destination, newSource: m.sees(c, source), newDestination: c.seen()}
	return joinMACs(w.check(in, out, a), out)
}

// claimsTenant reports whether only a container could have an address.
func claimsTenant(a netip.Addr) bool {
	return address.DefaultPlan().Base.Contains(a) && address.Split(a).Tenant != 0
}

// onlyInside reports whether an address is one that containers see and the fabric never does.
func onlyInside(a netip.Addr) bool { return address.DefaultPlan().Private.Contains(a) }

func joinMACs(err error, out []byte) error {
	if err == nil && !bytes.HasPrefix(out, packet.Frame(containerMAC, gatewayMAC, packet.EtherTypeIPv6, nil)) {
		return fmt.Errorf("it reached a container with MACs %x", out[:12])
	}
	return err
}

// TestModelKnowsItsPackets: the model reads a chain of headers as it should, or fuzzing would prove little.
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
		{"routing", []packet.Extension{padding(packet.HopByHop), {Type: packet.Routing, Data: make([]byte, 6)}}, 56, true, false},
		{"home address", []packet.Extension{homeAddress()}, 64, true, false},
		{"later fragment", []packet.Extension{packet.Fragment(8, false, 1)}, 48, false, true},
	} {
		b.Extensions, b.Body = c.extensions, gram
		a, ok := dissect(b.Frame(gatewayMAC, containerMAC), false)
		if !ok || a.upper != c.upper || a.diverts != c.diverts || a.later != c.later || a.protocol != packet.ProtocolUDP {
			t.Errorf("%s: %+v, %v", c.name, a, ok)
		}
	}
}
