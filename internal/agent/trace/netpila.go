package trace

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// seenBy returns an address as containers of its tenant see it: the ciphertext of a plaintext address, except for clear
// tenants.
func (r *run) seenBy(e agent.Explanation, given netip.Addr) netip.Addr {
	if !e.Plaintext.IsValid() || given != e.Plaintext {
		return given
	}
	id := address.Split(e.Plaintext).Tenant
	t, known := r.Core.TenantOf(id)
	if !known || t.Addressing == tenant.Clear {
		return given
	}
	return address.NewCipher(t.Of(id).Key).Encrypt(e.Plaintext)
}

// netpilaSender adds the steps of bpf/hooks/container.h, in its order.
func (r *run) netpilaSender(from, to agent.Explanation) error {
	r.response.Network = tenant.Netpila
	r.src, r.dst = r.seenBy(from, r.src), r.seenBy(to, r.dst)
	if node := address.Split(to.Plaintext).Node; to.Plaintext.IsValid() && to.Plaintext == tenant.NodeAddress(node) {
		alias, err := r.nodeSeenBy(address.Split(from.Plaintext).Tenant, node)
		if err != nil {
			return err
		}
		r.dst = alias
	}
	r.response.Source, r.response.Destination = r.end(r.src, from), r.end(r.dst, to)
	r.passes(from.Plaintext, to.Plaintext)

	source, found, err := r.Path.LookupSource(r.src)
	if err != nil {
		return err
	}
	if device := uint32(from.Endpoint.Device.HostIfindex); !found || source.Device != device {
		r.drop("container", dropreason.SrcNotOwn, "the source is not an address of the endpoint on "+
			r.Path.DeviceName(device), "no such entry in "+r.tables.Sources)
		return nil
	}
	r.step("container", fmt.Sprintf("from %s, the source is its own", r.Path.DeviceName(source.Device)),
		fmt.Sprintf("%s: endpoint %d, tenant id %d", r.tables.Sources, source.Endpoint, source.TenantID))

	own, found, err := r.tenant(source.TenantID)
	if err != nil || !found {
		return err
	}
	if is, err := r.toService(source); is || err != nil {
		return err
	}
	if r.isOutside(r.dst) {
		return r.leaveCluster(source)
	}
	if r.dst == own.Gateway {
		if _, ok, err := r.resolveNode(source.TenantID, r.Prefix, "the destination is this node"); err != nil || !ok {
			return err
		}
		r.step("deliver", "to this node", "")
		r.response.Verdict = Delivered
		return nil
	}
	plain, ok, err := r.resolve(own)
	if err != nil || !ok {
		return err
	}
	if address.Split(plain).Node == r.Prefix {
		return r.deliverHere(plain)
	}
	r.src, r.dst = source.Plaintext, plain
	r.response.Steps[len(r.response.Steps)-1].Source = r.src.String()
	r.response.Steps[len(r.response.Steps)-1].Destination = r.dst.String()
	return r.leave(address.Split(plain).Node)
}

// leave adds the stages of a packet with its final addresses that leaves for another node: route and the sender's
// policies.
func (r *run) leave(next netip.Prefix) error { return r.leaveFor(Sent, next.String()) }

// leaveFor is leave with a verdict and the node with the other part of the way.
func (r *run) leaveFor(verdict, next string) error {
	if !r.nextHop(r.src, r.dst) {
		return nil
	}
	if allowed, err := r.policies(policy.Egress); err != nil || !allowed {
		return err
	}
	r.response.Verdict, r.response.Next = verdict, next
	return nil
}

// nextHop adds the step of the FIB for a packet that leaves with these addresses. It reports false if it drops the
// packet.
func (r *run) nextHop(from, to netip.Addr) bool {
	hop, err := r.Path.NextHop(from, to)
	if err != nil {
		r.drop("next hop", dropreason.NoRoute, err.Error(), "FIB")
		return false
	}
	r.step("next hop", describeHop(hop), "FIB")
	return true
}

// tenant looks up the tenant with an id. Without an entry, it drops the packet.
func (r *run) tenant(id address.TenantID) (e dpapi.TenantEntry, found bool, err error) {
	if e, found, err = r.Path.LookupTenantID(id); err == nil && !found {
		r.drop("translate", dropreason.NoKey, "the node does not have the tenant",
			fmt.Sprintf("no tenant id %d in %s", id, r.tables.Tenants))
	}
	return e, found, err
}

func describeHop(h dpapi.NextHop) string {
	if h.Via.IsValid() {
		return fmt.Sprintf("%v on %s", h.Via, h.Device)
	}
	return "on the link of " + h.Device
}

// resolve adds the step that turns the destination into a plaintext address of the sender's tenant, as
// bpf/net/netpila/resolve.h. It reports false if it drops the packet.
func (r *run) resolve(own dpapi.TenantEntry) (plain netip.Addr, ok bool, err error) {
	const stage = "translate"
	plain = r.dst
	detail, entry := "the tenant is clear: addresses stay", r.tables.Tenants+": clear"
	if own.Clear {
		id := address.Split(plain).Tenant
		switch {
		case !r.Plan.Base.Contains(plain):
			r.drop(stage, dropreason.DstNotPrivate, "the destination is not in "+r.Plan.Base.String(), entry)
			return plain, false, nil
		case id == 0 && plain == tenant.NodeAddress(address.Split(plain).Node):
			return r.resolveNode(own.IDs[0], address.Split(plain).Node, "the destination is a node")
		case id == 0:
			r.drop(stage, dropreason.ToNode, "the destination is a node", entry)
			return plain, false, nil
		case !slices.Contains(own.IDs, id):
			r.drop(stage, dropreason.TenantMismatch, fmt.Sprintf("tenant id %d is another tenant's", id), entry)
			return plain, false, nil
		}
	} else {
		if !r.Plan.Private.Contains(plain) {
			r.drop(stage, dropreason.DstNotPrivate, "the destination is not in "+r.Plan.Private.String(), "")
			return plain, false, nil
		}
		var id address.TenantID
		var why dropreason.Reason
		if plain, id, why, err = r.decrypt(own); err != nil {
			return plain, false, err
		}
		entry = fmt.Sprintf("%s: tenant id %d", r.tables.Keys, id)
		if why != 0 {
			r.drop(stage, why, "no key of the tenant decrypts the destination to an address of the tenant",
				fmt.Sprintf("%s: tenant ids %v", r.tables.Keys, own.IDs))
			return plain, false, nil
		}
		detail = fmt.Sprintf("decrypted under the key of tenant id %d", id)
	}
	if p := address.Split(plain); p.App == address.GatewayApp {
		return r.resolveNode(p.Tenant, p.Node, detail+": the alias of a node")
	}
	if address.Split(plain).App >= address.FirstReservedApp {
		r.drop(stage, dropreason.AppReserved, fmt.Sprintf("app %#x is reserved", address.Split(plain).App), entry)
		return plain, false, nil
	}
	r.step(stage, detail, entry)
	return plain, true, nil
}

// decrypt tries the keys of the ids of a tenant that the kernel has. The kernel does not give keys away, so the agent's
// copy decrypts.
func (r *run) decrypt(own dpapi.TenantEntry) (netip.Addr, address.TenantID, dropreason.Reason, error) {
	for _, id := range own.IDs {
		there, found, err := r.Path.LookupTenantID(id)
		if err != nil {
			return r.dst, id, 0, err
		}
		t, known := r.Core.TenantOf(id)
		if !found || !there.HasKey || !known {
			return r.dst, id, dropreason.NoKey, nil
		}
		plain := address.NewCipher(t.Of(id).Key).Decrypt(r.dst)
		if !r.Plan.Base.Contains(plain) {
			continue
		}
		switch address.Split(plain).Tenant {
		case id:
			return plain, id, 0, nil
		case 0:
			return plain, id, dropreason.ToNode, nil
		}
		return plain, id, dropreason.TenantMismatch, nil
	}
	return r.dst, 0, dropreason.DstUndecryptable, nil
}

// deliverHere adds the steps to a container of the sender's node. All containers of a tenant see the same addresses, so
// the packet keeps them.
func (r *run) deliverHere(plain netip.Addr) error {
	local, found, err := r.Path.LookupLocal(plain)
	if err != nil {
		return err
	}
	if !found {
		r.drop("endpoint", dropreason.NoEndpoint, "this node has no container with the address", fmt.Sprintf(
			"no %v in %s", plain, r.tables.Locals))
		return nil
	}
	r.step("endpoint", "the destination is on this node: addresses stay", fmt.Sprintf("%s: endpoint %d",
		r.tables.Locals, local.Endpoint))
	if allowed, err := r.policies(policy.Egress, policy.Ingress); err != nil || !allowed {
		return err
	}
	r.deliver(local.Endpoint, local.Device, r.tables.Locals)
	return nil
}

// deliver adds the step to a container of this node, which a table names.
func (r *run) deliver(to endpoint.ID, device uint32, table string) {
	name, _ := r.Core.NameOf(to)
	r.step("deliver", fmt.Sprintf("to %s by %s", name, r.Path.DeviceName(device)),
		fmt.Sprintf("%s: endpoint %d", table, to))
	r.response.Verdict = Delivered
}

// netpilaReceiver adds the steps of bpf/hooks/uplink.h, if the destination is on this node.
func (r *run) netpilaReceiver(from, to agent.Explanation) error {
	r.response.Network = tenant.Netpila
	r.response.Source = r.end(r.seenBy(from, r.src), from)
	r.response.Destination = r.end(r.seenBy(to, r.dst), to)
	source, destination := address.Split(from.Plaintext), address.Split(to.Plaintext)
	r.response.Next = source.Node.String()
	if destination.Node != r.Prefix || source.Node == r.Prefix {
		return nil
	}
	r.passes(r.seenBy(from, r.src), r.seenBy(to, r.dst))
	r.src, r.dst = from.Plaintext, to.Plaintext
	r.step("uplink", "from the fabric, to this node's "+r.Prefix.String(), "")
	if to.Plaintext == tenant.NodeAddress(r.Prefix) {
		r.step("deliver", "to this node", "")
		r.response.Verdict = Delivered
		return nil
	}
	if destination.App >= address.FirstReservedApp {
		r.drop("endpoint", dropreason.AppReserved, fmt.Sprintf("app %#x is reserved", destination.App), "")
		return nil
	}
	local, found, err := r.Path.LookupLocal(to.Plaintext)
	if err != nil {
		return err
	}
	if !found {
		r.drop("endpoint", dropreason.NoEndpoint, "this node has no container with the address",
			fmt.Sprintf("no %v in %s", to.Plaintext, r.tables.Locals))
		return nil
	}
	name, _ := r.Core.NameOf(local.Endpoint)
	r.step("endpoint", "the destination is "+name,
		fmt.Sprintf("%s: endpoint %d", r.tables.Locals, local.Endpoint))
	its, found, err := r.Path.LookupTenantID(destination.Tenant)
	if err != nil {
		return err
	}
	isNode := from.Plaintext == tenant.NodeAddress(source.Node)
	if isNode && found {
		reaches, entry, err := r.access(destination.Tenant, from.Plaintext)
		if err != nil {
			return err
		}
		if !reaches.Allowed {
			r.drop("node", dropreason.TenantMismatch, reaches.Because, entry)
			return nil
		}
		r.step("node", reaches.Because, entry)
	} else if !found || !slices.Contains(its.IDs, source.Tenant) {
		r.drop("endpoint", dropreason.TenantMismatch,
			fmt.Sprintf("tenant id %d of the source is not one of tenant %s", source.Tenant, to.Tenant),
			r.tables.Tenants)
		return nil
	}
	if allowed, err := r.policies(policy.Ingress); err != nil || !allowed {
		return err
	}
	if its.Clear {
		r.step("translate", "the tenant is clear: addresses stay", r.tables.Tenants+": clear")
	} else {
		r.src, r.dst = r.seenBy(from, from.Plaintext), local.Address
		if isNode {
			if r.src, err = r.nodeSeenBy(destination.Tenant, source.Node); err != nil {
				return err
			}
			source.Tenant = destination.Tenant
		}
		r.step("translate", fmt.Sprintf("source encrypted under the key of tenant id %d", source.Tenant),
			fmt.Sprintf("%s: tenant id %d; %s", r.tables.Keys, source.Tenant, r.tables.Locals))
	}
	r.deliver(local.Endpoint, local.Device, r.tables.Locals)
	return nil
}
