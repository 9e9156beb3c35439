package evpn

import (
	"fmt"
	"net/netip"
	"slices"
)

// Reason says why a route is not imported.
type Reason uint8

// The reasons, in the order in which a route is checked.
const (
	Accepted Reason = iota
	Malformed
	UnsupportedType
	UnsupportedSegment
	UnsupportedGateway
	Loop
	OwnVTEP
	ForeignVTEP
	OtherEncapsulation
	TaggedRoute
	UnknownTarget
	OtherVNI
	BadMAC
	BadRouterMAC
	ForeignAddress
	OwnSubnet
	ForeignPrefix
	BadTunnel
	TooManyPaths
	reasonCount
)

var reasonNames = [reasonCount]struct{ name, text string }{
	Accepted:           {"accepted", "the route is imported"},
	Malformed:          {"malformed", "a field has a length or a value that the route type does not allow"},
	UnsupportedType:    {"type", "the route is not of type 2, 3 or 5"},
	UnsupportedSegment: {"segment", "the route is of a multihomed Ethernet segment"},
	UnsupportedGateway: {"gateway", "the prefix route has an overlay index (gateway address)"},
	Loop:               {"loop", "the route came from this AS or this orchestrator"},
	OwnVTEP:            {"own-vtep", "the next hop is in this cluster's --evpn-vtep-pool"},
	ForeignVTEP:        {"vtep", "the next hop is not in a prefix of --evpn-allow-vtep"},
	OtherEncapsulation: {"encapsulation", "the route does not say VXLAN"},
	TaggedRoute:        {"tag", "the Ethernet tag is not 0"},
	UnknownTarget:      {"target", "no route target is one of a tenant of this cluster"},
	OtherVNI:           {"vni", "a VNI is not the one of the tenant with this route target"},
	BadMAC:             {"mac", "the MAC address is not a unicast address, or is reserved for gateways"},
	BadRouterMAC:       {"router-mac", "the router MAC address is missing or is not a unicast address"},
	ForeignAddress:     {"address", "the address is not unicast, or neither in the tenant's CIDRs nor in --evpn-allow"},
	OwnSubnet:          {"subnet", "the address is in the subnet of a node of this cluster"},
	ForeignPrefix:      {"prefix", "the prefix is not unicast, in the tenant's CIDRs, or not in --evpn-allow"},
	BadTunnel:          {"tunnel", "the tunnel is not ingress replication to the next hop"},
	TooManyPaths: {
		"paths",
		fmt.Sprintf("%d other routes of the peer have the same address, prefix, VTEP, or bare MAC", MaxPaths),
	},
}

func (r Reason) String() string { return reasonNames[r].name }

// Text describes the reason in half a sentence.
func (r Reason) Text() string { return reasonNames[r].text }

// MarshalText writes the name.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (r *Reason) UnmarshalText(text []byte) error {
	for i, is := range reasonNames {
		if is.name == string(text) {
			*r = Reason(i)
			return nil
		}
	}
	return fmt.Errorf("%.40q is no reason to refuse a route", text)
}

// Reasons returns all reasons to refuse a route.
func Reasons() (all []Reason) {
	for r := Accepted + 1; r < reasonCount; r++ {
		all = append(all, r)
	}
	return all
}

// Settings say which routes are imported.
type Settings struct {
	ASNs     []uint32       // whose route targets ASN:VNI are imported: the cluster's and its peers'
	OwnVTEPs netip.Prefix   // of nodes of this cluster
	VTEPs    []netip.Prefix // of other speakers
	Gateways []MAC          // MACs of gateways on all nodes, which no other host may have
	Tenants  []Tenant
}

// rules are Settings, prepared for lookups.
type rules struct {
	settings Settings
	targets  map[Target]uint32 // route target to VNI
	tenants  map[uint32]*Tenant
}

// newRules fails if two tenants share a number or a VNI.
func newRules(s Settings) (*rules, error) {
	r := &rules{settings: s, targets: map[Target]uint32{}, tenants: map[uint32]*Tenant{}}
	numbers := map[uint16]string{}
	for i := range s.Tenants {
		t := &s.Tenants[i]
		if err := t.Check(); err != nil {
			return nil, err
		}
		if other := numbers[t.Number]; other != "" {
			return nil, fmt.Errorf("tenants %s and %s both have number %d", other, t.Name, t.Number)
		}
		numbers[t.Number] = t.Name
		for _, vni := range []uint32{t.VNI, t.L3VNI} {
			if other := r.tenants[vni]; other != nil {
				return nil, fmt.Errorf("tenants %s and %s both have VNI %d", other.Name, t.Name, vni)
			}
			r.tenants[vni] = t
			for _, asn := range s.ASNs {
				r.targets[NewTarget(asn, vni)] = vni
				r.targets[newAutoTarget(asn, vni)] = vni
			}
		}
	}
	return r, nil
}

// check returns the reason to refuse a route, and the tenant of an accepted one.
func (r *rules) check(route *Route) (*Tenant, Reason) {
	if reason := r.checkForm(route); reason != Accepted {
		return nil, reason
	}
	known := slices.ContainsFunc(route.Targets, func(t Target) bool { return r.targets[t] != 0 })
	if !known {
		return nil, UnknownTarget
	}
	// The VNI decides where packets go, so it must be the one that the target permits.
	tenant := r.tenants[route.VNI]
	if tenant == nil || !r.has(route, route.VNI) || (route.VNI == tenant.L3VNI) != (route.Kind == KindPrefix) {
		return nil, OtherVNI
	}
	switch route.Kind {
	case KindMACIP:
		return tenant, r.checkMACIP(tenant, route)
	case KindPrefix:
		return tenant, tenant.checkPrefix(route)
	}
	if route.Replication != route.VTEP || route.Prefix != HostPrefix(route.VTEP) {
		return nil, BadTunnel
	}
	return tenant, Accepted
}

func (r *rules) has(route *Route, vni uint32) bool {
	return slices.ContainsFunc(route.Targets, func(t Target) bool { return r.targets[t] == vni })
}

// checkForm checks what does not depend on the tenant.
func (r *rules) checkForm(route *Route) Reason {
	switch {
	case route.Fault != Accepted:
		return route.Fault
	case route.Kind != KindMACIP && route.Kind != KindMulticast && route.Kind != KindPrefix:
		return UnsupportedType
	case r.settings.OwnVTEPs.Contains(route.VTEP):
		return OwnVTEP
	case !route.VTEP.Is4() || !contains(r.settings.VTEPs, HostPrefix(route.VTEP)):
		return ForeignVTEP
	case route.Encap != VXLAN:
		return OtherEncapsulation
	case route.Tag != 0:
		return TaggedRoute
	}
	return Accepted
}

func (r *rules) checkMACIP(t *Tenant, route *Route) Reason {
	if !route.MAC.IsUnicast() || slices.Contains(r.settings.Gateways, route.MAC) {
		return BadMAC
	}
	if route.L3VNI != 0 {
		if route.L3VNI != t.L3VNI {
			return OtherVNI
		}
		if !route.RouterMAC.IsUnicast() {
			return BadRouterMAC
		}
	}
	if p := route.Prefix; p.IsValid() && (contains(notUnicast, p) || !contains(t.CIDRs, p) && !contains(t.Allow, p)) {
		return ForeignAddress
	}
	return Accepted
}

// checkPrefix refuses a prefix in the tenant's own CIDR: it would attract packets to containers of this cluster.
func (t *Tenant) checkPrefix(route *Route) Reason {
	p := route.Prefix
	switch {
	case !route.RouterMAC.IsUnicast():
		return BadRouterMAC
	case contains(notUnicast, p) || contains(t.CIDRs, p) || !contains(t.Allow, p):
		return ForeignPrefix
	}
	return Accepted
}

// notUnicast has the addresses that no host has: loopback, multicast, reserved, broadcast.
var notUnicast = []netip.Prefix{
	netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("224.0.0.0/3"), netip.MustParsePrefix("ff00::/8"),
}

// contains reports whether one of the prefixes contains all addresses of p.
func contains(prefixes []netip.Prefix, p netip.Prefix) bool {
	return slices.ContainsFunc(prefixes, func(in netip.Prefix) bool {
		return in.Bits() <= p.Bits() && in.Contains(p.Addr())
	})
}
