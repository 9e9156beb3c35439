package address

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
)

// MinUsable is the least number of addresses a node must have for each tenant id and app.
const MinUsable = 16384

// Lengths that a private prefix may have. The longest one leaves MinUsable addresses.
const (
	MinPrivateBits = 4
	MaxPrivateBits = 10
)

// Plan is a cluster's use of the address space. Its prefixes are constant for the life of the cluster.
type Plan struct {
	Base    netip.Prefix // the /64s of nodes are allocated from it
	Private netip.Prefix // where ciphertexts lie
	// Every node has a block of virtual addresses in each of these prefixes. By virtual addresses, containers with
	// overlay addresses and hosts on the underlay reach each other (NIMITZ §3.1). The zero Prefix means none.
	Gateway4, Gateway6 netip.Prefix
	// Every node has a /64 in it for the addresses at which hosts outside see containers (EgressNode). The zero Prefix
	// means that these addresses are in the node's own /64.
	Egress netip.Prefix
	// A tenant uses identifiers as addresses, or has used them, so that nodes reserve their prefix (ReservedPrefix).
	// Unlike the prefixes, it can become true later.
	Identifiers bool
}

// Prefix lengths of a node's block in the gateway prefixes. 100.64.0.0/10 has 16,384 blocks of 256 addresses.
const (
	GatewayBits4 = 24
	GatewayBits6 = 80
)

// DefaultPlan is fd70:696c:6100::/40 ("pila") beside fc00::/8, with gateways in 100.64.0.0/10 (RFC 6598) and
// fd70:696c:6700::/48 ("pilg").
func DefaultPlan() Plan {
	return Plan{
		Base:     netip.MustParsePrefix("fd70:696c:6100::/40"),
		Private:  netip.MustParsePrefix("fc00::/8"),
		Gateway4: netip.MustParsePrefix("100.64.0.0/10"),
		Gateway6: netip.MustParsePrefix("fd70:696c:6700::/48"),
	}
}

// Usable returns how many addresses a node has for each tenant ID and app: the indexes whose ciphertext lies in the
// private prefix, 2^(24 - length).
func (p Plan) Usable() int {
	if p.Private.Bits() > 24 {
		return 0
	}
	return 1 << (24 - p.Private.Bits())
}

// Nodes returns how many /64s the base prefix of a valid plan holds.
func (p Plan) Nodes() uint64 { return 1 << (NodeBits - p.Base.Bits()) }

// Validate returns why a plan cannot work, or nil.
func (p Plan) Validate() error {
	for _, q := range []struct {
		name   string
		prefix netip.Prefix
	}{{"base", p.Base}, {"private", p.Private}} {
		switch {
		case !q.prefix.IsValid() || !q.prefix.Addr().Is6() || q.prefix.Addr().Is4In6():
			return fmt.Errorf("%s prefix %v is not an IPv6 prefix", q.name, q.prefix)
		case q.prefix != q.prefix.Masked():
			return fmt.Errorf("%s prefix %v has host bits set; write %v", q.name, q.prefix, q.prefix.Masked())
		case q.prefix.Bits() < MinPrivateBits:
			return fmt.Errorf(
				"%s prefix %v is wider than /4 and would swallow addresses that are not ours",
				q.name,
				q.prefix,
			)
		case q.prefix.Overlaps(netip.MustParsePrefix("ff00::/8")),
			q.prefix.Overlaps(netip.MustParsePrefix("fe80::/10")),
			q.prefix.Overlaps(netip.MustParsePrefix("::/8")):
			return fmt.Errorf("%s prefix %v overlaps multicast, link-local or reserved addresses", q.name, q.prefix)
		}
	}
	if p.Base.Bits() > NodeBits-8 {
		return fmt.Errorf(
			"base prefix %v holds %d nodes; use a /%d or shorter",
			p.Base,
			uint64(1)<<max(NodeBits-p.Base.Bits(), 0),
			NodeBits-8,
		)
	}
	if p.Usable() < MinUsable {
		return fmt.Errorf(
			"private prefix %v leaves %d addresses for each node, tenant id and app, fewer than %d; use a /10 or "+
				"shorter",
			p.Private,
			p.Usable(),
			MinUsable,
		)
	}
	if p.Base.Overlaps(p.Private) {
		return fmt.Errorf("base prefix %v and private prefix %v overlap; choose them apart", p.Base, p.Private)
	}
	return cmp.Or(p.validateGateways(), p.validateEgress())
}

// Lengths that an egress prefix may have. The longest one has a /64 for one node.
const (
	minEgressBits = 8
	maxEgressBits = NodeBits
)

func (p Plan) validateEgress() error {
	switch is := p.Egress; {
	case is == netip.Prefix{}:
		return nil
	case !is.IsValid() || !is.Addr().Is6() || is.Addr().Is4In6():
		return fmt.Errorf("egress prefix %v is not an IPv6 prefix", is)
	case is != is.Masked():
		return fmt.Errorf("egress prefix %v has host bits set; write %v", is, is.Masked())
	case is.Bits() < minEgressBits || is.Bits() > maxEgressBits:
		return fmt.Errorf("egress prefix %v: use a /%d to /%d", is, minEgressBits, maxEgressBits)
	}
	without := p
	without.Egress = netip.Prefix{} // it could hide what is reserved
	others := append([]netip.Prefix{p.Base, p.Private, p.Gateway6, without.ReservedPrefix()}, Elsewhere...)
	for _, other := range others {
		if other.IsValid() && p.Egress.Overlaps(other) {
			return fmt.Errorf("egress prefix %v overlaps %v, whose addresses are not for this; choose another",
				p.Egress, other)
		}
	}
	return nil
}

// ContainsNode reports whether a prefix is a node's /64 under this plan.
func (p Plan) ContainsNode(node netip.Prefix) bool {
	return node.Bits() == NodeBits && node == node.Masked() && p.Base.Contains(node.Addr())
}

// Node returns the n-th /64 of a valid plan's base prefix, n < Nodes().
func (p Plan) Node(n uint64) netip.Prefix {
	b := p.Base.Masked().Addr().As16()
	binary.BigEndian.PutUint64(b[:8], binary.BigEndian.Uint64(b[:8])|n&(p.Nodes()-1))
	return netip.PrefixFrom(netip.AddrFrom16(b), NodeBits)
}

// EgressNode returns the /64 that has the egress addresses of a node's containers; false if the egress prefix has none
// for a node with this number.
func (p Plan) EgressNode(node netip.Prefix) (netip.Prefix, bool) {
	if !p.Egress.IsValid() {
		return node, true
	}
	n := p.NodeNumber(node)
	if p.Egress.Bits() < NodeBits && n>>(NodeBits-p.Egress.Bits()) != 0 || p.Egress.Bits() == NodeBits && n != 0 {
		return netip.Prefix{}, false
	}
	b := p.Egress.Masked().Addr().As16()
	binary.BigEndian.PutUint64(b[:8], binary.BigEndian.Uint64(b[:8])|n)
	return netip.PrefixFrom(netip.AddrFrom16(b), NodeBits), true
}

// NodeNumber is the inverse of Node, for a node that ContainsNode accepts.
func (p Plan) NodeNumber(node netip.Prefix) uint64 {
	b := node.Addr().As16()
	return binary.BigEndian.Uint64(b[:8]) & (p.Nodes() - 1)
}
