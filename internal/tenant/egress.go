package tenant

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
)

// Limits of egress: a tenant's record goes to every node that hosts the tenant.
const (
	MaxEgressRules    = 256 // of a tenant
	MaxEgressGateways = 2   // of a rule
	MaxNodePrefixes   = 16  // of a tenant
	MaxProtected      = 64  // of a cluster
)

// Indexes of egress addresses of a node.
const (
	egressTunnelIndex  address.Index = 1       // EgressTunnel
	exposedTunnelIndex address.Index = 2       // ExposedTunnel
	FirstGatewayIndex  address.Index = 16      // addresses that the orchestrator allocates for gateways
	FirstEgressIndex   address.Index = 1 << 16 // addresses of containers, up to address.MaxIndex
)

// EgressRule says whether containers of a tenant may send to hosts outside of the cluster. Of the rules whose prefix
// contains a destination, that with the longest prefix decides; without one the packet is denied.
type EgressRule struct {
	To    netip.Prefix
	Allow bool
	// Gateways send the packets on with addresses of their own; without any, the container's node sends them with the
	// container's egress address.
	Via []EgressGateway
}

// EgressGateway is a node that translates the sources of a tenant's packets to one address.
type EgressGateway struct {
	Node    string
	Prefix  netip.Prefix // its /64
	Address netip.Addr   // what hosts outside see
}

// Equal compares all fields.
func (r EgressRule) Equal(other EgressRule) bool {
	return r.To == other.To && r.Allow == other.Allow && slices.Equal(r.Via, other.Via)
}

// ParseEgress parses egress rules from protobuf messages; CheckEgress checks them.
func ParseEgress[R interface {
	GetTo() string
	GetAllow() bool
	GetGateways() []G
}, G interface {
	GetNode() string
	GetPrefix() string
	GetAddress() string
}](list []R) (rules []EgressRule, err error) {
	for _, r := range list {
		out := EgressRule{Allow: r.GetAllow()}
		if out.To, err = netip.ParsePrefix(r.GetTo()); err != nil {
			return nil, fmt.Errorf("egress rule to %.80q: that is not a prefix such as 2001:db8:9::/48", r.GetTo())
		}
		for _, g := range r.GetGateways() {
			via := EgressGateway{Node: g.GetNode()}
			via.Prefix, err = netip.ParsePrefix(g.GetPrefix())
			if err != nil {
				return nil, fmt.Errorf("egress gateway %.80q: %.80q is not the /64 of a node", via.Node, g.GetPrefix())
			}
			if via.Address, err = parseAddr("egress gateway", via.Node, g.GetAddress()); err != nil {
				return nil, err
			}
			out.Via = append(out.Via, via)
		}
		rules = append(rules, out)
	}
	return rules, nil
}

// EgressAddress is an address at which hosts outside see a container or a gateway. Its tenant id is 0. node is the /64
// of the node for such addresses.
func EgressAddress(node netip.Prefix, i address.Index) netip.Addr {
	return address.Plain{Node: node, App: address.EgressApp, Index: i}.Addr()
}

// IsEgressAddress reports whether an address can be an EgressAddress of a node's /64.
func IsEgressAddress(a netip.Addr) bool {
	p := address.Split(a)
	return a.Is6() && p.Tenant == 0 && p.App == address.EgressApp
}

// NodeOfEgress returns the /64 in the base prefix of the node that has an egress address; false if none can have it.
func NodeOfEgress(plan address.Plan, a netip.Addr) (netip.Prefix, bool) {
	if !IsEgressAddress(a) {
		return netip.Prefix{}, false
	}
	node := netip.PrefixFrom(a, address.NodeBits).Masked()
	if plan.Egress.IsValid() && plan.Egress.Contains(a) {
		return plan.Node(address.Plan{Base: plan.Egress}.NodeNumber(node)), true
	}
	return node, plan.ContainsNode(node)
}

// EgressTunnel is the address at which a node receives packets from and to egress gateways in IPv6 tunnels. It follows
// from the node's prefix.
func EgressTunnel(node netip.Prefix) netip.Addr { return EgressAddress(node, egressTunnelIndex) }

// ExposedTunnel is the address at which a node receives packets of exposed ports of services in IPv6 tunnels. It
// follows from the node's prefix.
func ExposedTunnel(node netip.Prefix) netip.Addr { return EgressAddress(node, exposedTunnelIndex) }

// MayLeave reports whether containers of the tenant may send to hosts outside.
func (t Tenant) MayLeave() bool {
	return slices.ContainsFunc(t.Egress, func(r EgressRule) bool { return r.Allow })
}

// NeedsDefaultRoute reports whether containers of the tenant send to hosts outside: packets of their own, or answers to
// clients of exposed services.
func (t Tenant) NeedsDefaultRoute() bool { return t.Exposed || t.MayLeave() }

// NeedsEgressAddress reports whether containers of the tenant need egress addresses of their own.
func (t Tenant) NeedsEgressAddress() bool {
	return slices.ContainsFunc(t.Egress, func(r EgressRule) bool { return r.Allow && len(r.Via) == 0 })
}

// IsEgressGateway reports whether a node is an egress gateway of the tenant.
func (t Tenant) IsEgressGateway(node netip.Prefix) bool {
	return slices.ContainsFunc(t.Egress, func(r EgressRule) bool {
		return slices.ContainsFunc(r.Via, func(g EgressGateway) bool { return g.Prefix == node })
	})
}

// AlwaysProtected are prefixes to which no egress rule leads: they are local to a machine, a link or a cloud, or reach
// private IPv4 addresses by NAT64 (RFC 6052, RFC 8215 §3). The prefixes of the cluster are protected, too.
func AlwaysProtected(plan address.Plan) []netip.Prefix {
	protected := []netip.Prefix{plan.Base, plan.Private}
	services, _ := plan.ServicePrefix()
	for _, p := range []netip.Prefix{plan.Gateway6, plan.Egress, plan.ReservedPrefix(), services} {
		if p.IsValid() {
			protected = append(protected, p)
		}
	}
	for _, text := range []string{
		"::/96", "::ffff:0:0/96", "fe80::/10", "fec0::/10", "ff00::/8", // loopback, mapped IPv4, link-local, multicast
		"fd00:ec2::254/128", // metadata of instances
		"64:ff9b::/104", "64:ff9b::a00:0/104", "64:ff9b::6440:0/106", "64:ff9b::7f00:0/104", "64:ff9b::a9fe:0/112",
		"64:ff9b::ac10:0/108", "64:ff9b::c0a8:0/112", "64:ff9b::e000:0/99", "64:ff9b:1::/48",
	} {
		protected = append(protected, netip.MustParsePrefix(text))
	}
	return protected
}

// CheckEgress refuses invalid egress rules and node prefixes.
func (t Tenant) CheckEgress(plan address.Plan) error {
	if len(t.Egress)+len(t.Nodes) == 0 {
		return nil
	}
	switch {
	case !NetworkHas(t.Network, Egress):
		return unfit("tenant %s is on network %s, and only tenants of network %s have egress rules and reach nodes",
			t.Name, t.Network, NetworksWith(Egress))
	case len(t.Egress) > MaxEgressRules:
		return unfit("tenant %s has %d egress rules, and a tenant has %d at most", t.Name, len(t.Egress),
			MaxEgressRules)
	case len(t.Nodes) > MaxNodePrefixes:
		return unfit("tenant %s has %d prefixes of nodes, and a tenant has %d at most: use wider prefixes", t.Name,
			len(t.Nodes), MaxNodePrefixes)
	}
	for i, r := range t.Egress {
		if err := r.check(plan); err != nil {
			return fmt.Errorf("egress rule to %v: %w", r.To, err)
		}
		if slices.ContainsFunc(t.Egress[:i], func(o EgressRule) bool { return o.To == r.To }) {
			return unfit("tenant %s has two egress rules to %v", t.Name, r.To)
		}
	}
	for _, p := range t.Nodes {
		if err := CheckNodePrefix(plan, p); err != nil {
			return err
		}
	}
	return nil
}

// CheckNodePrefix refuses a prefix that has no whole nodes of the cluster.
func CheckNodePrefix(plan address.Plan, p netip.Prefix) error {
	if !p.IsValid() || p != p.Masked() || p.Bits() > address.NodeBits || !plan.Base.Overlaps(p) ||
		p.Bits() < plan.Base.Bits() {
		return fmt.Errorf("%v has no nodes: nodes are /64s of the base prefix %v, and `pilaster node list` shows them",
			p, plan.Base)
	}
	return nil
}

func (r EgressRule) check(plan address.Plan) error {
	switch {
	case !r.To.IsValid() || !r.To.Addr().Is6() || r.To.Addr().Is4In6():
		return fmt.Errorf("%v is not an IPv6 prefix", r.To)
	case r.To != r.To.Masked():
		return fmt.Errorf("%v has host bits set; write %v", r.To, r.To.Masked())
	case len(r.Via) > MaxEgressGateways:
		return fmt.Errorf("it has %d gateways, and a rule has %d at most", len(r.Via), MaxEgressGateways)
	case len(r.Via) > 0 && !r.Allow:
		return fmt.Errorf("it denies, so it has no gateway")
	}
	for i, g := range r.Via {
		switch {
		case !plan.ContainsNode(g.Prefix):
			return fmt.Errorf("gateway %s: %v is not a node's /64 in %v", g.Node, g.Prefix, plan.Base)
		case !g.Address.Is6() || g.Address.Is4In6() || g.Address.Zone() != "" || !g.Address.IsGlobalUnicast():
			return fmt.Errorf("gateway %s: %v is not an IPv6 unicast address", g.Node, g.Address)
		case plan.Private.Contains(g.Address) || plan.Base.Contains(g.Address) && !IsEgressAddress(g.Address):
			return fmt.Errorf("gateway %s: %v is in the private or base prefix, whose addresses are containers'",
				g.Node, g.Address)
		}
		for _, o := range r.Via[:i] {
			if o.Prefix == g.Prefix {
				return fmt.Errorf("it has gateway %s twice", g.Node)
			}
			if o.Address == g.Address {
				return fmt.Errorf("gateways %s and %s have the same address %v", o.Node, g.Node, g.Address)
			}
		}
	}
	return nil
}
