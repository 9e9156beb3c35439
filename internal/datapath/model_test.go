package datapath

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// The model that fuzzing compares the programs with: what the design promises for any packet, computed independently of
// the programs. It defines what must never happen, but not the reason of each drop.

const (
	authHeader    = 51
	homeOption    = 0xc9
	firstReserved = 0xff00
	ipv6At        = 14 // in a frame
)

// passage has the addresses of a packet before it passed a program, and those that it must have afterwards.
type passage struct {
	source, destination       netip.Addr // before
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
	copy(want[:12], out[:12]) // the caller checks the MACs
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

// translateQuote changes quote into the expected quote; got is the quote that left the program.
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

// keepSum copies the checksum of the packet that left (got) into the expected packet (want), if both checksums have the
// same error. With UDP, where 0 means "no checksum", it copies nothing if one of them is 0.
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

// model has the containers and tenants of the bench's node.
type model struct {
	node       netip.Prefix
	containers []*testContainer
	tenants    map[string]tenant.Tenant
}

// container returns the container with this plaintext address, nil if there is none.
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
	return address.DefaultPlan().Base.Contains(plain) && m.tenants[of.record.Tenant].Has(p.Tenant) &&
		p.App < firstReserved
}

// plaintext decrypts an address that a container wrote, with the key of each id of its tenant. It returns the result
// that is an address of the same id, else the zero Addr, which no prefix contains.
func (m model) plaintext(c *testContainer, a netip.Addr) netip.Addr {
	if c.cipher == nil {
		return a
	}
	for _, id := range m.tenants[c.record.Tenant].IDs {
		if p := address.NewCipher(id.Key).Decrypt(a); address.DefaultPlan().Base.Contains(p) &&
			address.Split(p).Tenant == id.ID {
			return p
		}
	}
	return netip.Addr{}
}

// sees returns a peer's address as a container sees it: encrypted with the key of the peer's tenant id.
func (m model) sees(c *testContainer, plain netip.Addr) netip.Addr {
	for _, id := range m.tenants[c.record.Tenant].IDs {
		if c.cipher != nil && id.ID == address.Split(plain).Tenant {
			return address.NewCipher(id.Key).Encrypt(plain)
		}
	}
	return plain
}

// outward returns what is wrong with a packet that left the device of c (nil: of no container) to the fabric or,
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
		return true, joinMACs(w.check(in, out, a), out, m.container(to).record.Device.ContainerMAC)
	}
	if in[ipv6At+7] <= 1 {
		return false, fmt.Errorf("its hop limit was %d", in[ipv6At+7])
	}
	return false, w.check(in, out, a)
}

// checkICMPError returns what is wrong with an ICMP error of the node about a packet from the device of c (RFC 4443
// §2.4, §3.2, §3.3).
func (m model) checkICMPError(c *testContainer, in, out []byte) error {
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
	if a.isError(in) || a.later && a.protocol == packet.ProtocolICMPv6 || in[0] == 0xff ||
		in[0] == 0x33 && in[1] == 0x33 {
		return fmt.Errorf("it was an error, or for many")
	}
	kind, mtu := packet.PacketTooBig, uint32(1500)
	if in[ipv6At+7] <= 1 {
		kind, mtu = packet.TimeExceeded, 0
	} else if len(in)-ipv6At <= 1500 {
		return fmt.Errorf("it was short enough and had hops left")
	}
	want := packet.Packet{Source: m.gateway(c), Destination: c.seen(), Body: errorAbout(kind, mtu, in[ipv6At:])}
	if want := want.Frame(c.record.Device.ContainerMAC, host.GatewayMAC); !bytes.Equal(want, out) {
		return fmt.Errorf("the answer should be\n%x", want)
	}
	return nil
}

// gateway returns the node's address as a container sees it.
func (m model) gateway(c *testContainer) netip.Addr {
	of := m.tenants[c.record.Tenant]
	for _, id := range of.IDs {
		if guest, err := of.Gateway(address.DefaultPlan(), m.node, id); err == nil && id.ID == c.record.TenantID {
			return guest.Address
		}
	}
	return netip.Addr{}
}

// inward returns what is wrong with a packet from the fabric that went to a container.
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
		_, source, _ = a.quoted(in) // a router sends errors for the peer it could not reach
	}
	if !m.peer(c, source) || m.node.Contains(a.source) || m.node.Contains(source) {
		return fmt.Errorf("source %v is of no container elsewhere of the tenant", source)
	}
	w := passage{source: source, destination: a.destination, newSource: m.sees(c, source), newDestination: c.seen()}
	return joinMACs(w.check(in, out, a), out, c.record.Device.ContainerMAC)
}

// claimsTenant reports whether only a container could have an address.
func claimsTenant(a netip.Addr) bool {
	plan := address.DefaultPlan()
	ila, err := plan.ILA()
	return plan.Base.Contains(a) && address.Split(a).Tenant != 0 || err == nil && ila.Prefix.Contains(a)
}

// isEgress reports whether hosts outside see a container or a gateway at an address.
func isEgress(a netip.Addr) bool {
	return address.DefaultPlan().Base.Contains(a) && tenant.IsEgressAddress(a)
}

// nodeAddressOf returns the address of the node that an address belongs to; invalid outside of the cluster.
func nodeAddressOf(a netip.Addr) netip.Addr {
	if !address.DefaultPlan().Base.Contains(a) {
		return netip.Addr{}
	}
	return tenant.NodeAddress(netip.PrefixFrom(a, address.NodeBits).Masked())
}

// onlyInside reports whether an address is one that containers see and the fabric never does.
func onlyInside(a netip.Addr) bool { return address.DefaultPlan().Private.Contains(a) }

func joinMACs(err error, out []byte, to net.HardwareAddr) error {
	if err == nil && !bytes.HasPrefix(out, packet.Frame(to, host.GatewayMAC, packet.EtherTypeIPv6, nil)) {
		return fmt.Errorf("it reached %v with MACs %x", to, out[:12])
	}
	return err
}
