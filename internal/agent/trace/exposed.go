package trace

import (
	"fmt"
	"net/netip"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// exposed returns the exposed port that a packet from the fabric goes to; false if this node exposes nothing at its
// destination. Containers and processes of this node do not send by the fabric to it.
func (r *run) exposed(from agent.Explanation) (e agent.Exposed, is bool, err error) {
	if from.Endpoint != nil || isContainer(from) || r.isNode(from.Plaintext) {
		return e, false, nil
	}
	e, is, err = r.Core.Exposed(r.of)
	if e.ToNode() && from.Plaintext.IsValid() {
		is = false // between nodes
	}
	return e, is, err
}

// atIngress adds the stages of the program exposed_in.
func (r *run) atIngress(e agent.Exposed) error {
	if in := r.way.Ingress; in.IsValid() && in != r.Prefix {
		return refusal.New(refusal.ErrInvalid, "from ingress node %v packets come with the address and port of an "+
			"endpoint, and %v has exposed ports: give the endpoint's, or run the command on the ingress node", in,
			r.dst)
	}
	r.response.Network = e.Tenant.Network
	r.outsideEnds()
	r.step("uplink", "from outside, to an address with exposed ports",
		fmt.Sprintf("%s: %v", r.tables.Exposed, r.dst))
	entry := fmt.Sprintf("%s: %v", r.tables.Services, e.Address)
	switch {
	case e.ToNode():
		r.toStack(e.Because+": the packet goes to the node's own stack", "no "+entry)
		return nil
	case e.Drop == dropreason.ExposedSource:
		r.drop("source", e.Drop, e.Because, "")
		return nil
	case e.Drop == dropreason.NoService:
		r.drop("service", e.Drop, e.Because, fmt.Sprintf("no %v in %s", e.Address, r.tables.Services))
		return nil
	case e.Drop == dropreason.ServiceProtocol:
		r.drop("service", e.Drop, e.Because, "")
		return nil
	case e.Drop != 0:
		r.drop("service", e.Drop, e.Because, entry)
		return nil
	}
	r.step("service", e.Because, entry)
	to, entry, err := r.chosen(e)
	if err != nil {
		return err
	}
	r.dst, r.of.Destination, r.of.Port = to.Plain, to.Plain, to.Port
	r.response.Destination = r.end(to.Seen, r.Core.Explain(to.Plain))
	r.step("maglev", fmt.Sprintf("this way leads to %v", netip.AddrPortFrom(to.Seen, to.Port)), entry)
	node := address.Split(to.Plain).Node
	if node == r.Prefix {
		if err := r.toTarget(r.Prefix); err != nil {
			return err
		}
	} else if r.tunnel(node) {
		r.response.Verdict, r.response.Next = Sent, node.String()
	}
	r.answerTo(e)
	return nil
}

// chosen returns the endpoint that the trace goes on to, and what decides: the one that was asked for, or that of the
// connection, or if the client's port decides and is not known the first one.
func (r *run) chosen(e agent.Exposed) (to dpapi.Backend, entry string, err error) {
	all := slices.Clone(e.Backends)
	switch c := e.Choice; {
	case r.way.Backend.IsValid():
		all = append(all, e.Draining...) // connections that exist may have one
		i := slices.IndexFunc(all, func(b dpapi.Backend) bool {
			return b.Seen == r.way.Backend || b.Plain == r.way.Backend
		})
		if i < 0 {
			return to, "", refusal.New(refusal.ErrInvalid, "%v is no endpoint of the service for hosts outside by "+
				"this node: choose one that pilaster service describe shows as ready, or none", r.way.Backend)
		}
		all, entry = slices.Concat(all[i:i+1], all[:i], all[i+1:]), r.tables.Maglev
	case c != nil && c.Connected:
		all, entry = []dpapi.Backend{c.Backend}, fmt.Sprintf("%s: %v", r.tables.Connections, e.Client)
	case c != nil:
		all, entry = []dpapi.Backend{c.Backend}, fmt.Sprintf("%s: slot %d", r.tables.Maglev, c.Slot)
	default:
		entry = r.tables.Maglev
	}
	for _, b := range all[:min(len(all), listedBackends)] {
		r.response.Backends = append(r.response.Backends, &pilasterv1.TraceBackend{
			Address: b.Seen.String(), Plaintext: b.Plain.String(), Port: uint32(b.Port),
		})
	}
	return all[0], entry, nil
}

// tunnel adds the step to another node. It reports false if it drops the packet.
func (r *run) tunnel(node netip.Prefix) bool {
	hop, err := r.Path.NextHop(tenant.ExposedTunnel(r.Prefix), tenant.ExposedTunnel(node))
	if err != nil {
		r.drop("tunnel", dropreason.NoRoute, err.Error(), "FIB")
		return false
	}
	r.step("tunnel", fmt.Sprintf("to node %v, by %s", node, describeHop(hop)), "FIB")
	return true
}

// outsideEnds sets the ends of a packet from a host outside whose receiver is not known yet.
func (r *run) outsideEnds() {
	r.response.Source = r.end(r.src, agent.Explanation{})
	r.response.Destination = r.end(r.dst, agent.Explanation{})
}

// toStack adds the last step of a packet of a host outside that no program takes.
func (r *run) toStack(detail, entry string) {
	r.step("node", detail, entry)
	r.response.Verdict = Passed
}

// notExposed adds the steps of a packet of a host outside to an address at which this node has nothing.
func (r *run) notExposed() {
	r.outsideEnds()
	r.step("uplink", "from outside, to an address without exposed ports", fmt.Sprintf("no %v in %s", r.dst,
		r.tables.Exposed))
	why := "no service of a tenant on this node has the address: the packet goes to the node's own stack; route an " +
		"address of a service to nodes that host its tenant"
	if r.isOwn(r.dst) {
		why = "no service of a tenant on this node has node ports, and no container here has host ports: the packet " +
			"goes to the node's own stack"
	}
	r.toStack(why, "")
}

// mayBeExposed reports whether an address could be one of exposed ports: that of no container, service or gateway.
func (r *run) mayBeExposed(a netip.Addr, e agent.Explanation) bool {
	return (r.isOutside(a) && !r.Plan.Gateway6.Contains(a) && e.Outside == nil && e.Gateway == "") || r.isOwn(a)
}

// isOwn reports whether an address is one of this node.
func (r *run) isOwn(a netip.Addr) bool { return r.isNode(a) || r.Core.IsOwn(a) }

// fromIngress adds the stages of a packet that comes in the tunnel from its ingress node.
func (r *run) fromIngress(to agent.Explanation) error {
	of, _ := r.Core.TenantOf(address.Split(to.Plaintext).Tenant)
	r.response.Network, r.response.Next = of.Network, r.way.Ingress.String()
	r.response.Source = r.end(r.src, agent.Explanation{})
	r.response.Destination = r.end(r.seenBy(to, r.dst), to)
	r.dst, r.of.Destination = to.Plaintext, to.Plaintext
	r.step("uplink", "from the fabric, in the tunnel from ingress node "+r.way.Ingress.String(), "")
	if why, err := r.Core.NoClient(r.src); err != nil {
		return err
	} else if why != "" {
		r.drop("source", dropreason.ExposedSource, why, "")
		return nil
	}
	r.step("source", "the client is outside of the cluster", "")
	return r.toTarget(r.way.Ingress)
}

// toTarget adds the stages of exposed_deliver, after its check of the source, and the answer's way to the ingress node.
func (r *run) toTarget(ingress netip.Prefix) error {
	local, found, err := r.Path.LookupLocal(r.dst)
	if err != nil {
		return err
	}
	if !found {
		r.drop("endpoint", dropreason.NoEndpoint, "this node has no container with the address", fmt.Sprintf(
			"no %v in %s", r.dst, r.tables.Locals))
		return nil
	}
	name, _ := r.Core.NameOf(local.Endpoint)
	r.step("endpoint", "the destination is "+name, fmt.Sprintf("%s: endpoint %d", r.tables.Locals, local.Endpoint))
	port, what := netip.AddrPortFrom(local.Address, r.of.Port), fmt.Sprintf("port %d/%v of the container", r.of.Port,
		service.Protocol(r.of.Protocol))
	is, err := r.Core.IsExposed(r.dst, r.of)
	if err != nil {
		return err
	}
	if !is {
		r.drop("target", dropreason.NoService, "no service or host port exposes "+what+" on this node: exposed ports "+
			"may have changed", fmt.Sprintf("no %v in %s", port, r.tables.Targets))
		return nil
	}
	r.step("target", "a service or host port exposes "+what, fmt.Sprintf("%s: %v", r.tables.Targets, port))
	if allowed, err := r.policies(policy.Ingress); err != nil || !allowed {
		return err
	}
	r.step("session", fmt.Sprintf("it keeps the ingress node %v for answers", ingress), "")
	plain := r.dst
	if r.dst = local.Address; r.dst != plain {
		r.step("translate", "the destination as the container sees it", fmt.Sprintf("%s: endpoint %d", r.tables.Locals,
			local.Endpoint))
	}
	r.deliver(local.Endpoint, local.Device, r.tables.Locals)
	if ingress != r.Prefix {
		hop, err := r.Path.NextHop(tenant.ExposedTunnel(r.Prefix), tenant.ExposedTunnel(ingress))
		r.answer(plain, fmt.Sprintf("by its session, without an egress rule, in a tunnel to ingress node %v, ",
			ingress), hop, err)
	}
	return nil
}

// answerTo adds the answer at its ingress node, if the packet is delivered, or may be by another node.
func (r *run) answerTo(e agent.Exposed) {
	if r.response.Verdict != Sent && r.response.Verdict != Delivered {
		return
	}
	hop, err := r.Path.NextHop(e.Address.Addr(), r.src)
	r.answer(e.Address.Addr(), "its source becomes the exposed address; ", hop, err)
}

// answer adds a step of the answer, after which it has a source. Without a next hop, it is dropped.
func (r *run) answer(source netip.Addr, detail string, hop dpapi.NextHop, err error) {
	s := &pilasterv1.TraceStep{
		Stage: "answer", Source: source.String(), Destination: r.src.String(), Entry: "FIB",
		Detail: detail + describeHop(hop),
	}
	if err != nil {
		s.Detail, s.Drop = detail+err.Error(), dropreason.NoRoute.String()
	}
	r.response.Answer = append(r.response.Answer, s)
}
