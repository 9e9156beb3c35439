package tenant

import (
	"errors"
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
)

// Default prefix lengths of a node's subnet: a /24 has 254 addresses, and a /48 has more /80s than a cluster has nodes.
const (
	DefaultNodeBits4 = 24
	DefaultNodeBits6 = 80
)

// DefaultNodeBits returns the default for a CIDR's family.
func DefaultNodeBits(cidr netip.Prefix) int {
	if cidr.Addr().Is4() {
		return DefaultNodeBits4
	}
	return DefaultNodeBits6
}

// maxGiven bounds how many subnets or addresses of one overlay can be allocated.
const maxGiven = 1 << 32

// The first and the last address of a node's subnet are not allocated to containers.
const minSubnetBits = 2

// CheckOverlays refuses ranges that a tenant cannot have, or that conflict with other ranges of the cluster.
func CheckOverlays(plan address.Plan, overlays []Overlay) error {
	if len(overlays) == 0 {
		return errors.New(
			"the tenant's network wants a range of addresses of its own: give one with --cidr, or one of each family",
		)
	}
	for i, o := range overlays {
		if err := o.check(plan); err != nil {
			return err
		}
		if (o.NodeBits == 0) != (overlays[0].NodeBits == 0) {
			return fmt.Errorf(
				"nodes get subnets of %v or of %v, and not of both; choose one way for both CIDRs",
				overlays[0].CIDR,
				o.CIDR,
			)
		}
		if i > 0 && o.CIDR.Addr().Is4() == overlays[0].CIDR.Addr().Is4() || i > 1 {
			return fmt.Errorf(
				"%v and %v are of one family; a tenant has one CIDR of each at most",
				overlays[0].CIDR,
				o.CIDR,
			)
		}
	}
	return nil
}

func (o Overlay) check(plan address.Plan) error {
	if !o.CIDR.IsValid() || o.CIDR.Addr().Is4In6() {
		return fmt.Errorf("CIDR %v is not a prefix such as 10.0.0.0/16", o.CIDR)
	}
	if o.CIDR != o.CIDR.Masked() {
		return fmt.Errorf("CIDR %v has host bits set; write %v", o.CIDR, o.CIDR.Masked())
	}
	var services netip.Prefix
	if plan.Base.IsValid() { // nodes check without a plan, and keep CIDRs of earlier builds
		services, _ = plan.ServicePrefix()
	}
	for _, other := range []struct {
		name   string
		prefix netip.Prefix
	}{
		{"base", plan.Base}, {"private", plan.Private}, {"gateway", plan.Gateway4}, {"gateway", plan.Gateway6},
		{"egress", plan.Egress}, {"service", services},
	} {
		if o.CIDR.Overlaps(other.prefix) {
			return fmt.Errorf(
				"CIDR %v overlaps the cluster's %s prefix %v; choose another",
				o.CIDR,
				other.name,
				other.prefix,
			)
		}
	}
	for _, other := range address.Elsewhere {
		if o.CIDR.Overlaps(other) {
			return fmt.Errorf(
				"CIDR %v overlaps %v, whose addresses containers cannot have; choose another",
				o.CIDR,
				other,
			)
		}
	}
	if most := o.CIDR.Addr().BitLen() - minSubnetBits; o.NodeBits != 0 &&
		(o.NodeBits <= o.CIDR.Bits() || o.NodeBits > most) {
		return fmt.Errorf(
			"node bits %d leave no room in CIDR %v: a node's subnet is longer than it, and a /%d at most; choose "+
				"others, or have addresses given one by one",
			o.NodeBits,
			o.CIDR,
			most,
		)
	}
	if o.CIDR.Bits() > o.CIDR.Addr().BitLen()-minSubnetBits {
		return fmt.Errorf(
			"CIDR %v has no room for containers; use a /%d or shorter",
			o.CIDR,
			o.CIDR.Addr().BitLen()-minSubnetBits,
		)
	}
	return nil
}

// Bits returns the prefix length of one allocation: of a node's subnet, or of a single address.
func (o Overlay) Bits() int {
	if o.NodeBits != 0 {
		return o.NodeBits
	}
	return o.CIDR.Addr().BitLen()
}

// Given returns the first number that may be allocated, and how many numbers there are. In a CIDR without node subnets,
// number 0 and, in IPv4, the last number (the broadcast address) are not allocated.
func (o Overlay) Given() (first, count uint64) {
	count = maxGiven
	if bits := o.Bits() - o.CIDR.Bits(); bits < 32 {
		count = 1 << bits
	}
	switch {
	case o.NodeBits != 0:
		return 0, count
	case o.CIDR.Addr().Is4():
		return 1, count - 2
	default:
		return 1, count - 1
	}
}

// Contains returns the number of a prefix, and whether the prefix may be allocated.
func (o Overlay) Contains(given netip.Prefix) (n uint64, ok bool) {
	if given.Bits() != o.Bits() || given != given.Masked() || !o.CIDR.Contains(given.Addr()) {
		return 0, false
	}
	first, count := o.Given()
	n = address.SubnetNumber(o.CIDR, given)
	return n, n >= first && n-first < count
}

// At returns the prefix with a number; it is the inverse of Contains.
func (o Overlay) At(n uint64) netip.Prefix { return address.Subnet(o.CIDR, o.Bits(), n) }

// ParseOverlays parses overlays from protobuf messages; CheckOverlays checks them.
func ParseOverlays[O interface {
	GetCidr() string
	GetNodeBits() uint32
}](list []O) ([]Overlay, error) {
	var overlays []Overlay
	for _, o := range list {
		cidr, err := netip.ParsePrefix(o.GetCidr())
		if err != nil {
			return nil, fmt.Errorf("CIDR %q is not a prefix such as 10.0.0.0/16", o.GetCidr())
		}
		overlays = append(overlays, Overlay{cidr, int(o.GetNodeBits())})
	}
	return overlays, nil
}

// Usable reports whether a container may have an address, as opposed to a node's subnet: the last 16 bits of an
// identifier are never 0. So are those of every IPv6 address that is allocated alone.
func (o Overlay) Usable(given netip.Prefix) bool {
	return o.NodeBits != 0 || given.Addr().Is4() || address.LastBits(given.Addr()) != 0
}

// IdentifierRange returns the overlay of a tenant on a network with Identifiers.
func IdentifierRange(plan address.Plan, id address.TenantID) (Overlay, error) {
	ila, err := plan.ILA()
	if err != nil {
		return Overlay{}, err
	}
	return Overlay{CIDR: ila.Range(id)}, nil
}
