package address

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// TenantID identifies a pair of tenant and key. It has 24 bits; 0 is the node itself and the services on it.
type TenantID uint32

// AppID is the policy identity inside a tenant. It has 16 bits; 0 means no app, and numbers from FirstReservedApp on
// are never those of a container.
type AppID uint16

// Index distinguishes containers with the same node, tenant ID and app. It has 24 bits; 0 is never allocated.
type Index uint32

const (
	MaxTenantID      TenantID = 1<<24 - 1
	FirstReservedApp AppID    = 0xff00
	GatewayApp       AppID    = 0xff00 // the node itself, as a tenant's containers see it
	EgressApp        AppID    = 0xff01 // a container or a gateway, as hosts outside see it; with tenant id 0
	MaxIndex         Index    = 1<<24 - 1

	// NodeBits is the length of the prefix that the base network routes to a node.
	NodeBits = 64
)

// Plain holds the fields of a plaintext address.
type Plain struct {
	Node   netip.Prefix // the /64 routed to the node
	Tenant TenantID
	App    AppID
	Index  Index
}

// Addr composes the address. It panics if a field exceeds its width, which is a programming error.
func (p Plain) Addr() netip.Addr {
	if p.Tenant > MaxTenantID || p.Index > MaxIndex || p.Node.Bits() != NodeBits {
		panic(fmt.Sprintf("address: field out of range in %+v", p))
	}
	b := p.Node.Masked().Addr().As16()
	binary.BigEndian.PutUint64(b[8:], uint64(p.Tenant)<<40|uint64(p.App)<<24|uint64(p.Index))
	return netip.AddrFrom16(b)
}

// Parse reads an IPv6 address in text form. It rejects zones, IPv4 addresses and IPv4-mapped addresses: none of them
// can be a Pilaster address.
func Parse(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%q is not an IPv6 address", s)
	}
	if a.Is4() {
		return netip.Addr{}, fmt.Errorf("%q is an IPv4 address; addresses of Pilaster are IPv6", s)
	}
	return ParseAny(s)
}

// ParseAny reads an address of either family, such as an address in a tenant's own CIDR.
func ParseAny(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", s)
	case a.Zone() != "":
		return netip.Addr{}, fmt.Errorf("%q has a zone; addresses of Pilaster are the same on every interface", s)
	case a.Is4In6():
		return netip.Addr{}, fmt.Errorf("%q is an IPv4 address; addresses of Pilaster are IPv6", s)
	}
	return a, nil
}

// Split returns the fields of a plaintext address. Every IPv6 address has these fields; the caller checks against the
// Plan whether they are valid. Split(p.Addr()) is p with its node prefix masked.
func Split(a netip.Addr) Plain {
	b := a.As16()
	low := binary.BigEndian.Uint64(b[8:])
	return Plain{
		Node:   netip.PrefixFrom(a, NodeBits).Masked(),
		Tenant: TenantID(low >> 40),
		App:    AppID(low >> 24),
		Index:  Index(low) & MaxIndex,
	}
}
