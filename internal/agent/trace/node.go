package trace

import (
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/tenant"
)

// isContainer reports whether an address is that of a container whose network has plaintext addresses.
func isContainer(e agent.Explanation) bool {
	return e.Plaintext.IsValid() && address.Split(e.Plaintext).Tenant != 0
}

// fromNode adds the stages of a packet from this node's own stack: those of bpf/hooks/node.h if the container is on
// this node. To containers of other nodes the kernel routes it, and only programs of their nodes decide.
func (r *run) fromNode(from, to agent.Explanation) error {
	of, _ := r.Core.TenantOf(address.Split(to.Plaintext).Tenant)
	r.response.Network = of.Network
	r.src, r.dst = from.Plaintext, to.Plaintext
	r.response.Source, r.response.Destination = r.end(r.src, from), r.end(r.dst, to)
	r.response.Source.IsNode = true
	if next := address.Split(to.Plaintext).Node; next != r.Prefix {
		r.step("node", "from this node's own stack", "")
		hop, err := r.Path.NextHop(netip.Addr{}, r.dst)
		if err != nil {
			r.drop("next hop", dropreason.NoRoute, err.Error(), "FIB")
			return nil
		}
		detail := describeHop(hop)
		if hop.Source != r.src {
			detail += fmt.Sprintf(", with source %v: the container's node drops it; add src %v to the route",
				hop.Source, r.src)
		}
		r.src = hop.Source
		r.step("next hop", detail, "FIB")
		r.response.Verdict, r.response.Next = Sent, next.String()
		return nil
	}
	r.dst = r.seenBy(to, r.dst)
	r.response.Destination.Address = r.dst.String()
	its, found, err := r.Path.LookupSource(r.dst)
	if err != nil {
		return err
	}
	if !found {
		r.drop("node", dropreason.NoEndpoint, "this node has no container with the address",
			fmt.Sprintf("no %v in %s", r.dst, r.tables.Sources))
		return nil
	}
	r.step("node", "from this node's own stack, which always reaches its containers",
		fmt.Sprintf("%s: endpoint %d, tenant id %d", r.tables.Sources, its.Endpoint, its.TenantID))
	entry, found, err := r.tenant(its.TenantID)
	if err != nil || !found {
		return err
	}
	r.src = entry.Gateway
	r.step("translate", "the source becomes the address at which the tenant sees this node",
		fmt.Sprintf("%s: tenant id %d", r.tables.Tenants, its.TenantID))
	r.deliver(its.Endpoint, its.Device, r.tables.Sources)
	return nil
}

// nodeSeenBy returns the address at which containers of a tenant id see a node.
func (r *run) nodeSeenBy(id address.TenantID, node netip.Prefix) (netip.Addr, error) {
	entry, found, err := r.Path.LookupTenantID(id)
	t, known := r.Core.TenantOf(id)
	if err != nil || !found || !known || entry.Clear {
		return tenant.NodeAddress(node), err
	}
	alias, err := t.Gateway(r.Plan, node, t.Of(id))
	return alias.Address, err
}

// resolveNode adds the step that turns the alias or the address of a node into NODE::1, if the tenant reaches it.
func (r *run) resolveNode(id address.TenantID, node netip.Prefix, how string) (plain netip.Addr, ok bool, err error) {
	plain = tenant.NodeAddress(node)
	allowed, entry, err := r.access(id, plain)
	if err != nil {
		return plain, false, err
	}
	if !allowed.Allowed {
		detail := allowed.Because
		if node == r.Prefix {
			detail = "the address is this node's; only answers to its own connections pass: " + detail
		}
		r.drop("node", dropreason.ToNode, detail, entry)
		return plain, false, nil
	}
	r.dst = plain
	r.step("node", how+"; "+allowed.Because, entry)
	return plain, true, nil
}
