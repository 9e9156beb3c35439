package address

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Elsewhere lists prefixes with a special meaning in IP. No gateway prefix and no overlay of a tenant may overlap them.
var Elsewhere = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"), // link-local
	netip.MustParsePrefix("224.0.0.0/3"),    // multicast and reserved
	netip.MustParsePrefix("::/8"),
	netip.MustParsePrefix("fe80::/10"), // link-local
	netip.MustParsePrefix("ff00::/8"),  // multicast
}

// minGatewayBits leaves blocks for at least 16 nodes.
const minGatewayBits = 4

func (p Plan) validateGateways() error {
	for _, g := range []struct {
		prefix netip.Prefix
		is4    bool
		bits   int // of a block
	}{{p.Gateway4, true, GatewayBits4}, {p.Gateway6, false, GatewayBits6}} {
		switch {
		case g.prefix == netip.Prefix{}:
			continue
		case !g.prefix.IsValid() || g.prefix.Addr().Is4() != g.is4 || g.prefix.Addr().Is4In6():
			return fmt.Errorf("gateway prefix %v is not of its family", g.prefix)
		case g.prefix != g.prefix.Masked():
			return fmt.Errorf("gateway prefix %v has host bits set; write %v", g.prefix, g.prefix.Masked())
		case g.prefix.Bits() > g.bits-minGatewayBits:
			return fmt.Errorf(
				"gateway prefix %v has no room for 16 nodes, each with a /%d; use a /%d or shorter",
				g.prefix,
				g.bits,
				g.bits-minGatewayBits,
			)
		case g.prefix.Overlaps(p.Base), g.prefix.Overlaps(p.Private):
			return fmt.Errorf(
				"gateway prefix %v overlaps the base prefix %v or the private prefix %v; choose them apart",
				g.prefix,
				p.Base,
				p.Private,
			)
		}
		for _, other := range Elsewhere {
			if g.prefix.Overlaps(other) {
				return fmt.Errorf("gateway prefix %v overlaps %v, whose addresses are not for this", g.prefix, other)
			}
		}
	}
	return nil
}

// gateway returns the gateway prefix of a family and the length of a node's block in it.
func (p Plan) gateway(is4 bool) (netip.Prefix, int) {
	if is4 {
		return p.Gateway4, GatewayBits4
	}
	return p.Gateway6, GatewayBits6
}

// GatewayBlocks returns how many nodes have a block of virtual addresses of a family. Nodes with a number from this on
// have none.
func (p Plan) GatewayBlocks(is4 bool) uint64 {
	prefix, bits := p.gateway(is4)
	if !prefix.IsValid() {
		return 0
	}
	return 1 << (bits - prefix.Bits())
}

// GatewayBlock returns a node's block of virtual addresses of a family. The first address is the gateway's own. The
// node's number determines the block, so blocks of different nodes do not overlap. The result is false if that number
// is too high, or if the family has no gateway prefix.
func (p Plan) GatewayBlock(node netip.Prefix, is4 bool) (netip.Prefix, bool) {
	n := p.NodeNumber(node)
	if n >= p.GatewayBlocks(is4) {
		return netip.Prefix{}, false
	}
	prefix, bits := p.gateway(is4)
	return Subnet(prefix, bits, n), true
}

// Subnet returns the n-th prefix of a length within a wider prefix, from 0. The caller guarantees that it exists.
func Subnet(of netip.Prefix, bits int, n uint64) netip.Prefix {
	b := of.Masked().Addr().As16()
	shift := of.Addr().BitLen() - bits // position of the number's lowest bit, from the right
	hi, lo := binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	if shift < 64 {
		lo |= n << shift
		hi |= n >> (64 - shift) // 0 where shift is 0
	} else {
		hi |= n << (shift - 64)
	}
	binary.BigEndian.PutUint64(b[:8], hi)
	binary.BigEndian.PutUint64(b[8:], lo)
	a := netip.AddrFrom16(b)
	if of.Addr().Is4() {
		a = a.Unmap()
	}
	return netip.PrefixFrom(a, bits)
}

// SubnetNumber is the inverse of Subnet.
func SubnetNumber(of, subnet netip.Prefix) uint64 {
	b, first := subnet.Addr().As16(), of.Masked().Addr().As16()
	shift := of.Addr().BitLen() - subnet.Bits()
	hi := binary.BigEndian.Uint64(b[:8]) ^ binary.BigEndian.Uint64(first[:8])
	lo := binary.BigEndian.Uint64(b[8:]) ^ binary.BigEndian.Uint64(first[8:])
	if shift < 64 {
		return lo>>shift | hi<<(64-shift)
	}
	return hi >> (shift - 64)
}
