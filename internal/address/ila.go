package address

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
)

// ILA is how network ila uses the address space (draft-herbert-intarea-ila-01). Containers see addresses of the SIR
// prefix. On the fabric the locator of a node, a /64 beside its node prefix, replaces the SIR prefix. The mapping is
// checksum-neutral. An identifier has the type 011, the C bit, which is set on the fabric (unless NoCBit), a VNID of 28
// bits, which is the tenant's id, and an index of 32 bits.
type ILA struct {
	Prefix netip.Prefix // has the SIR prefix and all locators
	SIR    netip.Prefix
	NoCBit bool // addresses on the fabric have no C bit, as with "neutral-map-auto" of the kernel's ILA
	plan   Plan
}

const (
	// identifierBits is the length of the prefix that all identifiers of a tenant share.
	identifierBits = NodeBits + 32

	identifierType = 3 << 61 // "virtual networking identifier for IPv6 unicast"
	neutralBit     = 1 << 60 // the C bit
)

// LastBits returns the last 16 bits of an address. An identifier never has 0 there: the checksum-neutral mapping could
// not restore it.
func LastBits(a netip.Addr) uint16 {
	b := a.As16()
	return binary.BigEndian.Uint16(b[14:])
}

// ILA returns the prefixes of network ila. They follow from the base prefix: its 33rd bit is flipped, or its last one
// if it is shorter. The first /64 is the SIR prefix. An error means that the plan uses these addresses for something
// else.
func (p Plan) ILA() (ILA, error) {
	b := p.Base.Masked().Addr().As16()
	bit := min(p.Base.Bits(), maxFlipped) - 1
	b[bit/8] ^= 0x80 >> (bit % 8)
	all := netip.PrefixFrom(netip.AddrFrom16(b), p.Base.Bits())
	others := append([]netip.Prefix{p.Private, p.Gateway6, p.Egress}, Elsewhere...)
	for _, other := range others {
		if other.IsValid() && all.Overlaps(other) {
			return ILA{}, fmt.Errorf(
				"network ila would use %v, which follows from the base prefix %v, and overlaps %v", all, p.Base, other,
			)
		}
	}
	return ILA{Prefix: all, SIR: netip.PrefixFrom(all.Addr(), NodeBits), plan: p}, nil
}

// ReservedILA returns the prefixes of network ila, whose addresses only containers have on the fabric; false if no
// tenant uses them.
func (p Plan) ReservedILA() (ILA, bool) {
	if !p.Identifiers {
		return ILA{}, false
	}
	i, err := p.ILA()
	return i, err == nil
}

// ReservedPrefix returns the prefix that ReservedILA reserves; the zero Prefix if that is none.
func (p Plan) ReservedPrefix() netip.Prefix {
	i, _ := p.ReservedILA()
	return i.Prefix
}

// IdentifierPrefix returns the prefix that a cluster with this plan reserves for its first tenant with identifiers.
func (p Plan) IdentifierPrefix() (netip.Prefix, error) {
	i, err := p.ILA()
	return i.Prefix, err
}

// IsDerivedFrom reports whether a /64 can be the SIR prefix or a locator in the cluster of a node, whatever the length
// of its base prefix is: ILA flips one of the first 33 bits.
func IsDerivedFrom(p, node netip.Prefix) bool {
	a, b := p.Addr().As16(), node.Addr().As16()
	return bits.OnesCount64((binary.BigEndian.Uint64(a[:])^binary.BigEndian.Uint64(b[:]))>>(64-maxFlipped)) == 1
}

// maxFlipped is the last bit of a base prefix that distinguishes it from the prefix of network ila, from 1.
const maxFlipped = 33

// Locator returns the locator of a node. The node with number 0 has none: its locator would be the SIR prefix.
func (i ILA) Locator(node netip.Prefix) (netip.Prefix, error) {
	n := i.plan.NodeNumber(node)
	if n == 0 {
		return netip.Prefix{}, fmt.Errorf("node %v has number 0 and so no locator; choose another node prefix", node)
	}
	return Subnet(i.Prefix, NodeBits, n), nil
}

// IsNode reports whether a prefix is that of a node.
func (i ILA) IsNode(node netip.Prefix) bool { return i.plan.ContainsNode(node) }

// Node returns the node with a locator; false if the prefix is none.
func (i ILA) Node(locator netip.Prefix) (netip.Prefix, bool) {
	if locator.Bits() != NodeBits || locator != locator.Masked() || locator == i.SIR ||
		!i.Prefix.Contains(locator.Addr()) {
		return netip.Prefix{}, false
	}
	return i.plan.Node(SubnetNumber(i.Prefix, locator)), true
}

// Range returns the addresses of a tenant's containers.
func (i ILA) Range(vnid TenantID) netip.Prefix {
	b := i.SIR.Addr().As16()
	binary.BigEndian.PutUint64(b[8:], identifierType|uint64(vnid)<<32)
	return netip.PrefixFrom(netip.AddrFrom16(b), identifierBits)
}

// Identifier is what an address on network ila says.
type Identifier struct {
	VNID    TenantID
	Index   uint32
	Locator netip.Prefix // of the node, if the address is one on the fabric
}

// Split returns the fields of an address that containers see, or of one on the fabric; false if it is neither.
func (i ILA) Split(a netip.Addr) (id Identifier, ok bool) {
	if !i.SIR.Contains(a) {
		locator := netip.PrefixFrom(a, NodeBits).Masked()
		if _, is := i.Node(locator); !is {
			return Identifier{}, false
		}
		id.Locator = locator
		if a, ok = i.ToSIR(a); !ok {
			return Identifier{}, false
		}
	}
	b := a.As16()
	low := binary.BigEndian.Uint64(b[8:])
	id.VNID, id.Index = TenantID(low>>32&0x0fffffff), uint32(low)
	return id, low>>60 == identifierType>>60 && id.VNID <= MaxTenantID && LastBits(a) != 0
}

// ToWire returns the address on the fabric of a container at a locator.
func (i ILA) ToWire(sir netip.Addr, locator netip.Prefix) netip.Addr {
	b, prefix := sir.As16(), locator.Addr().As16()
	copy(b[:8], prefix[:8])
	b[8] |= i.cBit()
	return neutral(b, sum16(sir.As16()), sum16(b))
}

// ToSIR returns the address that containers see of one on the fabric; false if it is none.
func (i ILA) ToSIR(wire netip.Addr) (netip.Addr, bool) {
	b, prefix := wire.As16(), i.SIR.Addr().As16()
	if b[8]&(neutralBit>>56) != i.cBit() || LastBits(wire) == 0 {
		return netip.Addr{}, false
	}
	copy(b[:8], prefix[:8])
	b[8] &^= i.cBit()
	return neutral(b, sum16(wire.As16()), sum16(b)), true
}

// cBit returns the C bit in the first byte of an identifier on the fabric.
func (i ILA) cBit() byte {
	if i.NoCBit {
		return 0
	}
	return neutralBit >> 56
}

// neutral changes the last 16 bits of an address so that its sum is no longer is but was.
func neutral(b [16]byte, was, is uint16) netip.Addr {
	last := onesAdd(binary.BigEndian.Uint16(b[14:]), onesAdd(was, ^is))
	binary.BigEndian.PutUint16(b[14:], last)
	return netip.AddrFrom16(b)
}

// sum16 is the sum of an address's 16-bit words in ones' complement (RFC 1071).
func sum16(b [16]byte) (sum uint16) {
	for at := 0; at < len(b); at += 2 {
		sum = onesAdd(sum, binary.BigEndian.Uint16(b[at:]))
	}
	return sum
}

func onesAdd(a, b uint16) uint16 {
	sum := uint32(a) + uint32(b)
	return uint16(sum) + uint16(sum>>16)
}
