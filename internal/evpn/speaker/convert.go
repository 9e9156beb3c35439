package speaker

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"pilaster.io/pilaster/internal/evpn"
)

// originIGP is the ORIGIN of announced routes (RFC 4271 §4.3).
const originIGP = 0

// toPath returns a route in GoBGP's form.
func toPath(r evpn.Route) (*apiutil.Path, error) {
	nlri, err := toNLRI(r)
	if err != nil {
		return nil, fmt.Errorf("route %v of %v: %w", r.Kind, r.RD, err)
	}
	nextHop, err := bgp.NewPathAttributeNextHop(r.VTEP)
	if err != nil {
		return nil, err
	}
	attrs := []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(originIGP), nextHop, bgp.NewPathAttributeExtendedCommunities(toCommunities(r)),
	}
	if r.Kind == evpn.KindMulticast {
		end, err := bgp.NewIngressReplTunnelID(r.Replication)
		if err != nil {
			return nil, err
		}
		attrs = append(attrs, bgp.NewPathAttributePmsiTunnel(bgp.PMSI_TUNNEL_TYPE_INGRESS_REPL, false, r.VNI, end))
	}
	return &apiutil.Path{Family: bgp.RF_EVPN, Nlri: nlri, Attrs: attrs}, nil
}

func toNLRI(r evpn.Route) (*bgp.EVPNNLRI, error) {
	rd := bgp.GetRouteDistinguisher(r.RD[:])
	esi := bgp.EthernetSegmentIdentifier{Type: bgp.ESI_ARBITRARY, Value: make([]byte, 9)}
	switch r.Kind {
	case evpn.KindMACIP:
		labels := []uint32{r.VNI}
		if r.L3VNI != 0 {
			labels = append(labels, r.L3VNI)
		}
		return bgp.NewEVPNMacIPAdvertisementRoute(rd, esi, r.Tag, r.MAC.String(), r.Prefix.Addr(), labels)
	case evpn.KindMulticast:
		return bgp.NewEVPNMulticastEthernetTagRoute(rd, r.Tag, r.Prefix.Addr())
	case evpn.KindPrefix:
		p := r.Prefix
		gateway := netip.IPv4Unspecified() // no overlay index: the router MAC says where to send packets
		if !p.Addr().Is4() {
			gateway = netip.IPv6Unspecified()
		}
		return bgp.NewEVPNIPPrefixRoute(rd, esi, r.Tag, uint8(p.Bits()), p.Addr(), gateway, r.VNI)
	}
	return nil, fmt.Errorf("routes of this type are not announced")
}

func toCommunities(r evpn.Route) (all []bgp.ExtendedCommunityInterface) {
	for _, t := range r.Targets {
		all = append(all, target(t))
	}
	all = append(all, bgp.NewEncapExtended(bgp.TunnelType(r.Encap)))
	if r.RouterMAC != (evpn.MAC{}) {
		all = append(all, bgp.NewRoutersMacExtended(r.RouterMAC.String()))
	}
	if r.Sequence != 0 || r.Sticky {
		all = append(all, bgp.NewMacMobilityExtended(r.Sequence, r.Sticky))
	}
	return all
}

// fromPath returns a route that a speaker of an AS received, and how many bytes its attributes have. A route that the
// table cannot represent, or that came from this AS, has a Fault.
func fromPath(p *apiutil.Path, asn uint32) (evpn.Route, int) {
	r := fromNLRI(p.Nlri)
	size := 0
	for _, a := range p.Attrs {
		size += a.Len()
		switch a := a.(type) {
		case *bgp.PathAttributeMpReachNLRI:
			r.VTEP = a.Nexthop.Unmap()
		case *bgp.PathAttributeExtendedCommunities:
			fromCommunities(&r, a.Value)
		case *bgp.PathAttributePmsiTunnel:
			fromTunnel(&r, a)
		case *bgp.PathAttributeAsPath:
			if contains(a, asn) {
				r.MarkLoop()
			}
		}
	}
	return r, size
}

// contains reports whether an AS is in a path.
func contains(path *bgp.PathAttributeAsPath, asn uint32) bool {
	return slices.ContainsFunc(path.Value, func(p bgp.AsPathParamInterface) bool {
		return slices.Contains(p.GetAS(), asn)
	})
}

// fromNLRI returns a route without what its attributes say.
func fromNLRI(nlri bgp.NLRI) evpn.Route {
	n, ok := nlri.(*bgp.EVPNNLRI)
	if !ok {
		return malformed(0, nlri)
	}
	switch d := n.RouteTypeData.(type) {
	case *bgp.EVPNMacIPAdvertisementRoute:
		return fromMACIP(n, d)
	case *bgp.EVPNMulticastEthernetTagRoute:
		if !d.IPAddress.IsValid() {
			return malformed(evpn.KindMulticast, n)
		}
		return evpn.Route{Key: evpn.Key{
			Kind: evpn.KindMulticast, RD: rdOf(d.RD), Tag: d.ETag, Prefix: evpn.HostPrefix(d.IPAddress),
		}}
	case *bgp.EVPNIPPrefixRoute:
		return fromPrefix(n, d)
	}
	r := malformed(evpn.Kind(n.RouteType), n)
	r.Fault = evpn.UnsupportedType
	return r
}

func fromMACIP(n *bgp.EVPNNLRI, d *bgp.EVPNMacIPAdvertisementRoute) evpn.Route {
	if d.MacAddressLength != 48 || len(d.MacAddress) != 6 || len(d.Labels) == 0 {
		return malformed(evpn.KindMACIP, n)
	}
	r := evpn.Route{
		Key: evpn.Key{Kind: evpn.KindMACIP, RD: rdOf(d.RD), Tag: d.ETag, MAC: evpn.MAC(d.MacAddress)},
		VNI: d.Labels[0],
	}
	if d.IPAddressLength != 0 {
		r.Prefix = evpn.HostPrefix(d.IPAddress)
	}
	if len(d.Labels) > 1 {
		r.L3VNI = d.Labels[1]
	}
	if isMultihomed(d.ESI) {
		r.Fault = evpn.UnsupportedSegment
	}
	return r
}

func fromPrefix(n *bgp.EVPNNLRI, d *bgp.EVPNIPPrefixRoute) evpn.Route {
	p, err := d.IPPrefix.Prefix(int(d.IPPrefixLength))
	if err != nil || p.Addr() != d.IPPrefix {
		return malformed(evpn.KindPrefix, n)
	}
	r := evpn.Route{
		Key: evpn.Key{Kind: evpn.KindPrefix, RD: rdOf(d.RD), Tag: d.ETag, Prefix: p},
		VNI: d.Label,
	}
	switch {
	case isMultihomed(d.ESI):
		r.Fault = evpn.UnsupportedSegment
	case d.GWIPAddress.IsValid() && !d.GWIPAddress.IsUnspecified():
		r.Fault = evpn.UnsupportedGateway
	}
	return r
}

// isMultihomed reports whether an Ethernet segment identifier is not 0 (RFC 7432 §5).
func isMultihomed(esi bgp.EthernetSegmentIdentifier) bool {
	if esi.Type != 0 {
		return true
	}
	for _, b := range esi.Value {
		if b != 0 {
			return true
		}
	}
	return false
}

func fromCommunities(r *evpn.Route, all []bgp.ExtendedCommunityInterface) {
	for _, c := range all {
		switch c := c.(type) {
		case *bgp.EncapExtended:
			r.Encap = evpn.Encapsulation(c.TunnelType)
		case *bgp.RouterMacExtended:
			r.RouterMAC = macOf(c.Mac)
		case *bgp.MacMobilityExtended:
			r.Sequence, r.Sticky = c.Sequence, c.IsSticky
		default:
			if t, ok := toTarget(c); ok {
				r.Targets = append(r.Targets, t)
			}
		}
	}
}

func fromTunnel(r *evpn.Route, t *bgp.PathAttributePmsiTunnel) {
	if r.Kind != evpn.KindMulticast {
		return
	}
	r.VNI = t.Label
	if end, ok := t.TunnelID.(*bgp.IngressReplTunnelID); ok {
		r.Replication = end.Value.Unmap()
	}
}

func malformed(kind evpn.Kind, nlri bgp.NLRI) evpn.Route {
	return evpn.Route{Key: evpn.OtherKey(kind, nlri.String()), Fault: evpn.Malformed}
}

func rdOf(rd bgp.RouteDistinguisherInterface) (is evpn.RD) {
	if raw, err := rd.Serialize(); err == nil {
		copy(is[:], raw)
	}
	return is
}

func macOf(hw net.HardwareAddr) (m evpn.MAC) {
	if len(hw) == len(m) {
		m = evpn.MAC(hw)
	}
	return m
}
