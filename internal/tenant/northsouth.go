package tenant

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
)

// UnderlayService is a host on the underlay that containers of a tenant with overlays reach at an address that the
// tenant chose (NIMITZ §3.1, traffic (c)).
type UnderlayService struct {
	Name    string
	Virtual netip.Addr // the address that containers use
	Real    netip.Addr // the address on the underlay
}

// Publication is a container that the underlay reaches at an address of a node's gateway (NIMITZ appendix A, traffic
// (d)).
type Publication struct {
	Name      string
	Container netip.Addr
	Gateway   netip.Prefix // the /64 of the node
	Underlay  netip.Addr   // UnderlayAddress of an index; a gateway never gets the same index again
}

// Limits of one tenant: its record goes to every node that hosts it.
const (
	MaxUnderlayServices = 256
	MaxPublications     = 256
)

// FirstPublished is the lowest index of a publication. Index 1 is the gateway itself.
const FirstPublished address.Index = 2

// UnderlayAddress returns a gateway's address on the underlay with this index. Index 1 is the source that underlay
// services see; the others are for publications. The addresses have tenant id 0 and an app that nothing else on the
// node has, so the packet path recognises packets for them without a table.
func UnderlayAddress(node netip.Prefix, i address.Index) netip.Addr {
	return address.Plain{Node: node, App: address.GatewayApp, Index: i}.Addr()
}

// NodeAddress is the address from which a node sends to its containers.
func NodeAddress(node netip.Prefix) netip.Addr { return address.Plain{Node: node, Index: 1}.Addr() }

// TunnelAddress is the address at which a node receives packets in tunnels. It follows from the node's prefix, so no
// table stores it. Of a shorter prefix it is the address of the first node in it.
func TunnelAddress(node netip.Prefix) netip.Addr {
	return address.Plain{Node: netip.PrefixFrom(node.Masked().Addr(), address.NodeBits), Index: 2}.Addr()
}

// Broadcast is the prefix of a mapping whose next hops get the frames for all hosts of a tenant's Ethernet segment.
var Broadcast = netip.MustParsePrefix("255.255.255.255/32")

// GatewayID is the tenant id, in tunnels the VNI, of packets from gateways. No tenant gets it (NIMITZ §3.1).
const GatewayID address.TenantID = 0xff

// Index is the inverse of UnderlayAddress. It returns false where the address is not one of the gateway's publications.
func (p Publication) Index() (address.Index, bool) {
	if !p.Gateway.IsValid() || !p.Gateway.Contains(p.Underlay) {
		return 0, false
	}
	a := address.Split(p.Underlay)
	return a.Index, a.Tenant == 0 && a.App == address.GatewayApp && a.Index >= FirstPublished
}

// Unfit is an error whose cause is the existing state and not the request.
type Unfit struct{ error }

func unfit(format string, args ...any) error { return Unfit{fmt.Errorf(format, args...)} }

// CheckNorthSouth refuses underlay services and publications whose addresses conflict with others.
func (t Tenant) CheckNorthSouth(plan address.Plan) error {
	if len(t.UnderlayServices)+len(t.Publications) == 0 {
		return nil
	}
	switch own := t.overlay6(); {
	case !own.IsValid():
		return unfit("tenant %s has no IPv6 CIDR, and gateways lead to servers and clients of IPv6 alone", t.Name)
	case !plan.Gateway6.IsValid():
		return unfit("this cluster has no IPv6 gateway prefix, so its nodes have no gateways")
	case len(t.UnderlayServices) > MaxUnderlayServices:
		return unfit(
			"tenant %s has %d underlay services, and a tenant has %d at most",
			t.Name,
			len(t.UnderlayServices),
			MaxUnderlayServices,
		)
	case len(t.Publications) > MaxPublications:
		return unfit(
			"tenant %s has %d publications, and a tenant has %d at most",
			t.Name,
			len(t.Publications),
			MaxPublications,
		)
	}
	if err := t.checkUnderlayServices(plan); err != nil {
		return err
	}
	return t.checkPublications(plan)
}

// WithoutNorthSouth returns the tenant without underlay services, publications and other regions.
func (t Tenant) WithoutNorthSouth() Tenant {
	t.UnderlayServices, t.Publications, t.Regions = nil, nil, nil
	return t
}

// CheckUnderlayServiceName and CheckPublicationName refuse names that are not a DNS label.
func CheckUnderlayServiceName(name string) error { return checkName("underlay service", name) }
func CheckPublicationName(name string) error     { return checkName("publication", name) }

// overlay6 returns the tenant's IPv6 CIDR, if it has one.
func (t Tenant) overlay6() netip.Prefix {
	for _, o := range t.Overlays {
		if o.CIDR.Addr().Is6() {
			return o.CIDR
		}
	}
	return netip.Prefix{}
}

func (t Tenant) checkUnderlayServices(plan address.Plan) error {
	named, at := map[string]bool{}, map[netip.Addr]string{}
	for _, s := range t.UnderlayServices {
		if err := CheckUnderlayServiceName(s.Name); err != nil {
			return err
		}
		if named[s.Name] {
			return unfit("tenant %s has two underlay services %s", t.Name, s.Name)
		}
		named[s.Name] = true
		if err := t.checkUnderlayService(plan, s); err != nil {
			return fmt.Errorf("underlay service %s/%s: %w", t.Name, s.Name, err)
		}
		for _, a := range []netip.Addr{s.Virtual, s.Real} {
			if other := at[a]; other != "" {
				return unfit("underlay services %s and %s of tenant %s both have %v", other, s.Name, t.Name, a)
			}
			at[a] = s.Name
		}
	}
	return nil
}

func (t Tenant) checkUnderlayService(plan address.Plan, s UnderlayService) error {
	for _, a := range []netip.Addr{s.Virtual, s.Real} {
		switch {
		case !a.Is6() || a.Is4In6():
			return fmt.Errorf("%v is not an IPv6 address, and gateways are of IPv6 alone", a)
		case a.Zone() != "" || a.IsMulticast() || a.IsUnspecified() || a.IsLinkLocalUnicast() || a.IsLoopback():
			return fmt.Errorf("%v cannot be an underlay service's: gateways lead where routes do", a)
		case plan.Gateway6.Contains(a) || plan.Private.Contains(a):
			return fmt.Errorf(
				"%v is in the cluster's gateway prefix %v or its private prefix %v, whose addresses are others'",
				a,
				plan.Gateway6,
				plan.Private,
			)
		case slices.ContainsFunc(t.Overlays, func(o Overlay) bool { return o.CIDR.Contains(a) }):
			return fmt.Errorf("%v is in the tenant's own CIDR %v, whose addresses are containers'", a, t.overlay6())
		}
		for _, r := range t.Regions {
			if i := slices.IndexFunc(r.CIDRs, func(cidr netip.Prefix) bool { return cidr.Contains(a) }); i >= 0 {
				return fmt.Errorf(
					"%v is in the tenant's CIDR %v in region %s, whose addresses are containers'",
					a,
					r.CIDRs[i],
					r.Name,
				)
			}
		}
	}
	switch base := plan.Base; {
	case s.Virtual == s.Real:
		return fmt.Errorf("%v is both its virtual and its real address; choose another virtual one", s.Real)
	case base.Contains(s.Virtual):
		return fmt.Errorf("virtual address %v is in the base prefix %v", s.Virtual, base)
	case base.Contains(s.Real) && address.Split(s.Real).Tenant != 0:
		return fmt.Errorf("real address %v is a container's", s.Real)
	}
	return nil
}

func (t Tenant) checkPublications(plan address.Plan) error {
	type place struct {
		container netip.Addr
		gateway   netip.Prefix
	}
	named, at, of := map[string]bool{}, map[netip.Addr]string{}, map[place]string{}
	for _, p := range t.Publications {
		if err := CheckPublicationName(p.Name); err != nil {
			return err
		}
		if named[p.Name] {
			return unfit("tenant %s has two publications %s", t.Name, p.Name)
		}
		named[p.Name] = true
		if err := t.checkPublication(plan, p); err != nil {
			return fmt.Errorf("publication %s/%s: %w", t.Name, p.Name, err)
		}
		if other := at[p.Underlay]; other != "" {
			return unfit("publications %s and %s of tenant %s both have %v", other, p.Name, t.Name, p.Underlay)
		}
		at[p.Underlay] = p.Name
		// A container answers from its only virtual address at a gateway, so it can have one publication there.
		if other := of[place{p.Container, p.Gateway}]; other != "" {
			return unfit(
				"publications %s and %s of tenant %s are both of container %v at the gateway of %v, where a "+
					"container is published once; use another node's gateway",
				other,
				p.Name,
				t.Name,
				p.Container,
				p.Gateway,
			)
		}
		of[place{p.Container, p.Gateway}] = p.Name
	}
	return nil
}

func (t Tenant) checkPublication(plan address.Plan, p Publication) error {
	switch {
	case !p.Container.Is6() || p.Container.Is4In6():
		return fmt.Errorf("%v is not an IPv6 address, and gateways are of IPv6 alone", p.Container)
	case !t.overlay6().Contains(p.Container):
		return fmt.Errorf("%v is not in the tenant's CIDR %v, so it is no container's of it", p.Container, t.overlay6())
	case !plan.ContainsNode(p.Gateway):
		return fmt.Errorf("gateway %v is no node's prefix in %v", p.Gateway, plan.Base)
	}
	if _, ok := plan.GatewayBlock(p.Gateway, false); !ok {
		return unfit(
			"node %v has number %d, and gateway prefix %v has virtual addresses for the %d nodes below that; use the "+
				"gateway of a node with a lower prefix",
			p.Gateway,
			plan.NodeNumber(p.Gateway),
			plan.Gateway6,
			plan.GatewayBlocks(false),
		)
	}
	if _, ok := p.Index(); !ok {
		return fmt.Errorf(
			"%v is none of the gateway's addresses for publications, %v and above",
			p.Underlay,
			UnderlayAddress(p.Gateway, FirstPublished),
		)
	}
	return nil
}

// ParseUnderlayServices parses underlay services from protobuf messages; CheckNorthSouth checks them.
func ParseUnderlayServices[S interface {
	GetName() string
	GetVirtual() string
	GetReal() string
}](list []S) (services []UnderlayService, err error) {
	for _, s := range list {
		out := UnderlayService{Name: s.GetName()}
		if out.Virtual, err = parseAddr("underlay service", out.Name, s.GetVirtual()); err != nil {
			return nil, err
		}
		if out.Real, err = parseAddr("underlay service", out.Name, s.GetReal()); err != nil {
			return nil, err
		}
		services = append(services, out)
	}
	return services, nil
}

// ParsePublications parses publications from protobuf messages; CheckNorthSouth checks them.
func ParsePublications[P interface {
	GetName() string
	GetContainer() string
	GetGateway() string
	GetUnderlay() string
}](list []P) (publications []Publication, err error) {
	for _, p := range list {
		out := Publication{Name: p.GetName()}
		if out.Container, err = parseAddr("publication", out.Name, p.GetContainer()); err != nil {
			return nil, err
		}
		if out.Gateway, err = netip.ParsePrefix(p.GetGateway()); err != nil {
			return nil, fmt.Errorf(
				"publication %.80q: gateway %.80q is not a prefix such as fd70:696c:6100:1::/64",
				out.Name,
				p.GetGateway(),
			)
		}
		if out.Underlay, err = parseAddr("publication", out.Name, p.GetUnderlay()); err != nil {
			return nil, err
		}
		publications = append(publications, out)
	}
	return publications, nil
}

func parseAddr(kind, name, text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil {
		return a, fmt.Errorf("%s %.80q: %.80q is not an address such as fd09::7", kind, name, text)
	}
	return a, nil
}
