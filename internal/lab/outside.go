package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// OutsideHost is a host outside of the cluster, behind the fabric's router. In YAML it is a name, or name=address.
type OutsideHost struct {
	Name    string
	Address netip.Addr // on a /64 of its own, whose router is the address before; by default of 2001:db8:f00d::/48
}

func (h *OutsideHost) UnmarshalText(text []byte) (err error) {
	name, addr, has := strings.Cut(string(text), "=")
	h.Name, h.Address = name, netip.Addr{}
	if has {
		h.Address, err = netip.ParseAddr(addr)
	}
	return err
}

func (h OutsideHost) MarshalText() ([]byte, error) {
	if !h.Address.IsValid() {
		return []byte(h.Name), nil
	}
	return []byte(h.Name + "=" + h.Address.String()), nil
}

// EgressRule is a rule of `pilaster egress set`.
type EgressRule struct {
	To     netip.Prefix `yaml:"to"     json:"to"`
	Action string       `yaml:"action" json:"action"` // allow or deny
	Via    []string     `yaml:"via"    json:"via,omitempty"`
}

// Actions of egress rules.
const (
	AllowEgress = "allow"
	DenyEgress  = "deny"
)

// outsideHosts returns the hosts outside, each with its address.
func (s Spec) outsideHosts() []OutsideHost {
	all := slices.Clone(s.Outside)
	for i := range all {
		if all[i].Address.IsValid() {
			continue
		}
		b := netip.MustParseAddr("2001:db8:f00d::2").As16()
		b[7] = byte(i)
		all[i].Address = netip.AddrFrom16(b)
	}
	return all
}

// outsideHost returns the address of a host outside; false if none has this name.
func (s Spec) outsideHost(name string) (netip.Addr, bool) {
	for _, h := range s.outsideHosts() {
		if h.Name == name {
			return h.Address, true
		}
	}
	return netip.Addr{}, false
}

// OutsideNames returns the names of the hosts outside of the cluster.
func (l *Lab) OutsideNames() (all []string) {
	for _, h := range l.state.Spec.Outside {
		all = append(all, h.Name)
	}
	return all
}

// wayFromOutside is WayTo from a host outside, to an address or a node. From.Node is the node that the fabric routes
// the address to, empty if it routes it to none.
func (l *Lab) wayFromOutside(from, to string) (w Way, err error) {
	w.Source, _ = l.state.Spec.outsideHost(from)
	if w.Destination, err = netip.ParseAddr(to); err != nil {
		if !slices.Contains(l.NodeNames(), to) {
			return w, fmt.Errorf("%s is no address and no node: hosts outside of the cluster reach containers by "+
				"exposed ports of services; give the external address, which pilaster service list shows, or a node "+
				"for a node port", to)
		}
		if w.Destination, err = l.Address(to); err != nil {
			return w, err
		}
	}
	w.From.Node, err = l.routedTo(w.Destination)
	return w, err
}

// Probe sends a packet from a host outside.
func (l *Lab) Probe(ctx context.Context, from string, p packet.Probe) (packet.ProbeAnswer, error) {
	ns, err := l.Namespace(from)
	if err != nil {
		return packet.ProbeAnswer{}, err
	}
	defer ns.Close()
	return p.Send(ctx, ns)
}

// plan is the address plan of a region of the lab.
func (s Spec) plan(r Region) address.Plan {
	plan := r.plan()
	plan.Egress = s.EgressPrefix
	return plan
}

// outside checks the hosts outside and the egress prefix.
func (v *validator) outside(s Spec) {
	if s.EgressPrefix != (netip.Prefix{}) && len(s.Regions) > 0 {
		v.fail("$.egressPrefix", "a lab with regions has no egress prefix: its nodes' numbers are of several clusters")
	}
	if s.EgressPrefix != (netip.Prefix{}) {
		plan := s.plan(Region{})
		if err := plan.Validate(); err != nil {
			v.fail("$.egressPrefix", "%v", err)
		}
	}
	const most = 16
	if len(s.Outside) > most {
		v.fail("$.outside", "%d hosts outside: a lab has %d at most", len(s.Outside), most)
	}
	links := map[netip.Prefix]string{}
	for i, h := range s.outsideHosts() {
		at := fmt.Sprintf("$.outside[%d]", i)
		v.name(at, h.Name, maxNodeName) // also the name of the router's link
		v.unique(at, h.Name, "a host outside")
		link, err := h.Address.Prefix(address.NodeBits)
		switch router := routerOf(h.Address); {
		case !h.Address.Is6() || h.Address.Is4In6() || h.Address.Zone() != "" || err != nil:
			v.fail(at, "address %v of %s: write an IPv6 address", h.Address, h.Name)
		case !link.Contains(router) || router == link.Addr():
			v.fail(at, "address %v of %s: the router has the address before it, so the first one is %v", h.Address,
				h.Name, link.Addr().Next().Next())
		case links[link] != "":
			v.fail(at, "%s and %s are both in %v: each has a /64 of its own", links[link], h.Name, link)
		case s.overlapsCluster(link):
			v.fail(at, "address %v of %s is in a prefix of the cluster or of the fabric", h.Address, h.Name)
		default:
			links[link] = h.Name
		}
	}
}

// overlapsCluster reports whether a /64 is of the cluster or the fabric, and so not of a host outside.
func (s Spec) overlapsCluster(link netip.Prefix) bool {
	taken := []netip.Prefix{netip.PrefixFrom(underlay(0).Addr(), 48)}
	for _, r := range s.regions() {
		plan := s.plan(r)
		taken = append(taken, plan.Base, plan.Private)
		if plan.Egress.IsValid() {
			taken = append(taken, plan.Egress)
		}
	}
	return slices.ContainsFunc(taken, link.Overlaps)
}

// egress checks a tenant's egress rules and its setting for nodes. The orchestrator checks the rest.
func (v *validator) egress(at string, s Spec, t Tenant) {
	if len(t.Egress) > 0 && !tenant.NetworkHas(t.Network, tenant.Egress) {
		v.fail(at+".egress", "egress rules are for network %s", tenant.NetworksWith(tenant.Egress))
	}
	if t.Nodes != "" && !tenant.NetworkHas(t.Network, tenant.Egress) {
		v.fail(at+".nodes", "only tenants of network %s reach nodes", tenant.NetworksWith(tenant.Egress))
	}
	for i, r := range t.Egress {
		at := fmt.Sprintf("%s.egress[%d]", at, i)
		if r.Action != AllowEgress && r.Action != DenyEgress {
			v.fail(at+".action", "action %q: use %s or %s", r.Action, AllowEgress, DenyEgress)
		}
		for _, node := range r.Via {
			if !slices.Contains(s.AllNodes(), node) {
				v.fail(at+".via", "no node is called %q", node)
			}
		}
	}
}

// letOut sets the tenants' egress rules and their settings for nodes.
func (l *Lab) letOut(ctx context.Context) error {
	for _, region := range l.state.Spec.regions() {
		for _, t := range l.state.Spec.Tenants {
			for _, rule := range t.Egress {
				if err := setEgress(ctx, l.OperatorOf(region.Name), t.Name, rule); err != nil {
					return err
				}
			}
			if t.Nodes == "" {
				continue
			}
			if err := setNodes(ctx, l.OperatorOf(region.Name), t.Name, t.Nodes); err != nil {
				return err
			}
		}
	}
	return nil
}

// SetEgress sets an egress rule of a tenant, in the first region.
func (l *Lab) SetEgress(ctx context.Context, tenant string, r EgressRule) error {
	return setEgress(ctx, l.Operator(), tenant, r)
}

func setEgress(ctx context.Context, o pilasterv1connect.OperatorServiceClient, tenant string, r EgressRule) error {
	request := &pilasterv1.SetEgressRuleRequest{
		Tenant: tenant, To: []string{r.To.String()}, Allow: r.Action == AllowEgress,
	}
	for _, node := range r.Via {
		request.Gateways = append(request.Gateways, &pilasterv1.EgressGateway{Node: node})
	}
	if _, err := o.SetEgressRule(ctx, connect.NewRequest(request)); err != nil {
		return fmt.Errorf("egress rule of tenant %s to %v: %w", tenant, r.To, err)
	}
	return nil
}

// DeleteEgress deletes a tenant's rule for a prefix, in the first region.
func (l *Lab) DeleteEgress(ctx context.Context, tenant string, to netip.Prefix) error {
	_, err := l.Operator().DeleteEgressRule(ctx, connect.NewRequest(
		&pilasterv1.DeleteEgressRuleRequest{Tenant: tenant, To: []string{to.String()}}))
	if err != nil {
		return fmt.Errorf("delete the egress rule of tenant %s to %v: %w", tenant, to, err)
	}
	return nil
}

// SetNodes sets the nodes that a tenant's containers reach and are reached by, in the first region: allow, deny or
// prefixes, as `pilaster tenant set --nodes`.
func (l *Lab) SetNodes(ctx context.Context, tenant, nodes string) error {
	return setNodes(ctx, l.Operator(), tenant, nodes)
}

func setNodes(ctx context.Context, o pilasterv1connect.OperatorServiceClient, tenant, nodes string) error {
	request := &pilasterv1.SetTenantNodesRequest{Tenant: tenant, All: nodes == "allow"}
	if nodes != "allow" && nodes != "deny" {
		request.Prefixes = strings.Split(nodes, ",")
	}
	if _, err := o.SetTenantNodes(ctx, connect.NewRequest(request)); err != nil {
		return fmt.Errorf("nodes of tenant %s: %w", tenant, err)
	}
	return nil
}
