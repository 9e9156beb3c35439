package trace

import (
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// identified adds the stages of a network with identifiers, if an end is on this node. An address there identifies a
// container in the whole cluster.
func (r *run) identified(from, to agent.Explanation) error {
	if r.Located == nil {
		return nil
	}
	r.response.Network = tenant.Networks(tenant.Identifiers)[0]
	sender, receiver := endOf(from.Overlays), endOf(to.Overlays)
	r.response.Source, r.response.Destination = r.overlayEnd(sender.Tenant, r.src, sender.Endpoint),
		r.overlayEnd(receiver.Tenant, r.dst, receiver.Endpoint)
	switch {
	case sender.Endpoint != nil:
		return r.identifiedSender(*sender.Endpoint, receiver)
	case receiver.Endpoint != nil:
		return r.identifiedReceiver()
	}
	return nil
}

// endOf returns the tenant with an address, and its endpoint if it is on this node.
func endOf(matches []agent.OverlayMatch) (of agent.OverlayMatch) {
	for _, m := range matches {
		if of.Tenant == "" || m.Endpoint != nil {
			of = m
		}
	}
	return of
}

// identifiedSender adds the stages of bpf/net of a packet from a container here.
func (r *run) identifiedSender(sender endpoint.Record, receiver agent.OverlayMatch) error {
	own, found, err := r.Located.Locate(r.src)
	if err != nil {
		return err
	}
	if device := uint32(sender.Device.HostIfindex); !found || own.Device != device {
		r.drop("container", dropreason.SrcNotOwn, "the source is not an address of the endpoint on "+
			r.Path.DeviceName(device), "no such container in the table")
		return nil
	}
	r.step("container", fmt.Sprintf("from %s, the source is its own", r.Path.DeviceName(own.Device)), own.Entry)
	switch {
	case receiver.Tenant == "" && !r.identifies(r.dst, sender.TenantID):
		r.drop("translate", dropreason.DstNotPrivate, "the destination is no address of the network", "")
		return nil
	case !r.identifies(r.dst, sender.TenantID):
		r.drop("translate", dropreason.TenantMismatch, "the destination is not one of tenant "+sender.Tenant, "")
		return nil
	}
	peer, found, err := r.Located.Locate(r.dst)
	if err != nil {
		return err
	}
	if !found {
		r.drop("translate", dropreason.NoMapping, "this node has no mapping of the destination: no container has it, "+
			"or the cluster has not sent it yet", "")
		return nil
	}
	if peer.Device != 0 {
		return r.identifiedHere(peer)
	}
	r.src, r.dst = r.Located.OnWire(r.src, r.dst, own.Locator, peer.Locator)
	r.step("translate", fmt.Sprintf("the destination is at locator %v", peer.Locator), peer.Entry)
	return r.leave(peer.Node)
}

// identifies reports whether an address belongs to the tenant with an id.
func (r *run) identifies(a netip.Addr, id address.TenantID) bool {
	all, err := tenant.IdentifierRange(r.Plan, id)
	return err == nil && all.CIDR.Contains(a)
}

// identifiedHere adds the stages of a packet between two containers of this node.
func (r *run) identifiedHere(to network.Location) error {
	r.step("endpoint", "the destination is on this node: addresses stay", to.Entry)
	if allowed, err := r.policies(policy.Egress, policy.Ingress); err != nil || !allowed {
		return err
	}
	r.deliverTo(to)
	return nil
}

func (r *run) deliverTo(to network.Location) {
	name, _ := r.Core.NameOf(endpoint.ID(to.Endpoint))
	r.step("deliver", fmt.Sprintf("to %s by %s", name, r.Path.DeviceName(to.Device)), to.Entry)
	r.response.Verdict = Delivered
}

// identifiedReceiver adds the stages of a packet from the fabric to a container here.
func (r *run) identifiedReceiver() error {
	seen := [2]netip.Addr{r.src, r.dst}
	own, foundOwn, err := r.Located.Locate(r.dst)
	if err != nil {
		return err
	}
	peer, found, err := r.Located.Locate(r.src)
	if err != nil {
		return err
	}
	if found {
		r.response.Next = peer.Node.String()
		r.passes(r.src, r.dst)
		r.src, r.dst = r.Located.OnWire(r.src, r.dst, peer.Locator, own.Locator)
	}
	r.step("uplink", "from the fabric, to this node's locator", "")
	switch {
	case !foundOwn || own.Device == 0:
		r.drop("endpoint", dropreason.NoEndpoint, "this node has no container with the address", "")
		return nil
	case !found:
		r.drop("endpoint", dropreason.NoMapping, "this node has no mapping of the source, so it cannot check the "+
			"sender's locator", "")
		return nil
	}
	name, _ := r.Core.NameOf(endpoint.ID(own.Endpoint))
	r.step("endpoint", "the destination is "+name+", the source is at locator "+peer.Locator.String(), own.Entry)
	if allowed, err := r.policies(policy.Ingress); err != nil || !allowed {
		return err
	}
	r.src, r.dst = seen[0], seen[1]
	r.step("translate", "addresses as containers see them", peer.Entry)
	r.deliverTo(own)
	return nil
}
