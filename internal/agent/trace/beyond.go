package trace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// isOutside reports whether containers see no container, service or node at an address.
func (t *Tracer) isOutside(a netip.Addr) bool {
	services, _ := t.Plan.ServicePrefix()
	return a.Is6() && !t.Plan.Private.Contains(a) && !t.Plan.Base.Contains(a) && !services.Contains(a)
}

// access looks up what a tenant reaches, and describes the entry.
func (r *run) access(id address.TenantID, peer netip.Addr) (a agent.Access, entry string, err error) {
	a, err = r.Core.Access(id, peer)
	if entry = "no entry in " + r.tables.Access; a.To.IsValid() {
		entry = fmt.Sprintf("%s: %v", r.tables.Access, a.To)
	}
	return a, entry, err
}

// fromOutside adds the drop of a packet that does not come from a node: hosts outside know only egress addresses, and
// answer.
func (r *run) fromOutside(to agent.Explanation) {
	of, _ := r.Core.TenantOf(address.Split(to.Plaintext).Tenant)
	r.response.Network = of.Network
	r.response.Source = r.end(r.src, agent.Explanation{})
	r.response.Destination = r.end(r.seenBy(to, r.dst), to)
	why := dropreason.TenantMismatch
	if tenant.IsEgressAddress(r.of.Destination) {
		why = dropreason.NoSession
	}
	r.drop("uplink", why, "the source is outside of the cluster: it only answers what a container sent", "")
}

// leaveCluster adds the stages of the program egress_from_container.
func (r *run) leaveCluster(source dpapi.SourceEntry) error {
	rule, entry, err := r.access(source.TenantID, r.dst)
	if err != nil {
		return err
	}
	if !rule.Allowed {
		r.drop("rule", rule.Drop, rule.Because, entry)
		return nil
	}
	r.step("rule", rule.Because+" allows it", entry)
	if rule.Action == dpapi.AccessGateway {
		r.src = source.Plaintext
		return r.toGateway(source.TenantID, rule.Gateways)
	}
	seen, found, err := r.Path.LookupEgress(source.Endpoint)
	if err != nil {
		return err
	}
	if !found {
		r.drop("egress address", dropreason.NoEgressAddress, "the container has no egress address",
			fmt.Sprintf("no endpoint %d in %s", source.Endpoint, r.tables.Egress))
		return nil
	}
	r.src = seen
	r.step("egress address", "hosts outside see the container at it",
		fmt.Sprintf("%s: endpoint %d", r.tables.Egress, source.Endpoint))
	return r.leaveFor(Left, "")
}

// translatable are the protocols that gateways translate.
var translatable = map[uint8]bool{
	packet.ProtocolTCP: true, packet.ProtocolUDP: true, packet.ProtocolICMPv6: true,
}

// toGateway adds the stages of a packet that leaves by a gateway: policy, gateway, and the way to it. Of two gateways
// that answer, the one of a connection depends on a hash of its ports. The trace goes on with this node if it is one,
// so that it has the address of a packet that leaves here, and else with the first.
func (r *run) toGateway(id address.TenantID, all []dpapi.GatewayEntry) error {
	if !translatable[r.of.Protocol] {
		r.drop("gateway", dropreason.GatewayProtocol, fmt.Sprintf("gateways do not translate protocol %d",
			r.of.Protocol), "")
		return nil
	}
	if allowed, err := r.policies(policy.Egress); err != nil || !allowed {
		return err
	}
	answering, names := all[:0:0], []string{}
	for _, g := range all {
		if !g.Silent {
			answering = append(answering, g)
		}
	}
	if len(answering) == 0 {
		answering = all
	}
	for _, g := range answering {
		if names = append(names, g.Node.String()); g.Node != r.Prefix {
			r.response.Gateways = append(r.response.Gateways, g.Node.String())
		}
	}
	detail := "in a tunnel to gateway " + names[0]
	if len(names) > 1 {
		detail = "in a tunnel to one of gateways " + strings.Join(names, ", ")
	} else if len(all) > 1 {
		detail += ", because the other one does not answer"
	}
	next := answering[0].Node
	if slices.ContainsFunc(answering, func(g dpapi.GatewayEntry) bool { return g.Node == r.Prefix }) {
		detail = "this node is the gateway"
		if len(answering) > 1 {
			detail = "this node is one of two gateways"
		}
		r.step("gateway", detail, r.tables.Access)
		return r.asGateway(id)
	}
	r.step("gateway", detail, r.tables.Access)
	if r.nextHop(tenant.EgressTunnel(r.Prefix), tenant.EgressTunnel(next)) {
		r.response.Verdict, r.response.Next = Sent, next.String()
	}
	return nil
}

// atGateway adds the stages of the program at_egress_gateway of a container's packet, if this node is a gateway of its
// rule.
func (r *run) atGateway(from agent.Explanation) error {
	source := address.Split(from.Plaintext)
	rule, entry, err := r.access(source.Tenant, r.dst)
	if err != nil {
		return err
	}
	here := false
	for _, g := range rule.Gateways {
		here = here || g.Node == r.Prefix
	}
	if _, found, err := r.Path.LookupGateway(source.Tenant); err != nil || !found && !here {
		return err
	}
	of, _ := r.Core.TenantOf(source.Tenant)
	r.response.Network, r.response.Next = of.Network, source.Node.String()
	r.response.Source = r.end(r.seenBy(from, from.Plaintext), from)
	r.response.Destination = r.end(r.dst, agent.Explanation{})
	r.src = from.Plaintext
	r.step("uplink", "from the fabric, in the tunnel from "+source.Node.String(), "")
	if !here {
		r.drop("rule", dropreason.GatewayDenied, "no egress rule of the tenant has this node as its gateway", entry)
		return nil
	}
	r.step("rule", rule.Because, entry)
	return r.asGateway(source.Tenant)
}

// asGateway adds the stages of this node as the gateway of a packet.
func (r *run) asGateway(id address.TenantID) error {
	own, found, err := r.Path.LookupGateway(id)
	if err != nil {
		return err
	}
	if !found {
		r.drop("gateway", dropreason.GatewayDenied, "this node is not a gateway of the tenant",
			fmt.Sprintf("no tenant id %d in %s", id, r.tables.Gateways))
		return nil
	}
	r.src = own
	r.step("gateway", "source address and port become the gateway's",
		fmt.Sprintf("%s: tenant id %d", r.tables.Gateways, id))
	if r.nextHop(r.src, r.dst) {
		r.response.Verdict = Left
	}
	return nil
}
