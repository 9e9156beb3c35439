package cache

import (
	"fmt"
	"net/netip"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/network"
)

// A stream may have only the mappings of some networks that its node subscribes to: the node asks for a mapping at a
// cache miss, and then receives its changes.

// MaxSubscriptions is the maximum of one node: those at cache misses, and those to its own containers.
const MaxSubscriptions = network.MaxSubscriptions + MaxMappings

// subscription is one to the mapping of an address.
type subscription struct{ tenant, to string }

// followMappings decides whether a stream receives all mappings of a tenant, or those that the node subscribes to. A
// tenant that moves has two networks, and receives all if one of them needs all.
func (m *Cache) followMappings(f *Subscriber, tenant string) {
	delete(f.pulled, tenant)
	of := m.Tenants[tenant]
	switch {
	case f.pullsMappings:
	case f.pulls[of.GetNetwork()] && (of.GetLeaving() == "" || f.pulls[of.GetLeaving()]):
		f.pulled[tenant] = true
		remove(m.byMappings, tenant, f)
	default:
		add(m.byMappings, tenant, f)
	}
}

// networkChanged applies followMappings to all streams of a tenant whose networks are others, or were not known yet.
func (m *Cache) networkChanged(tenant string) {
	for f := range m.byTenant[tenant] {
		m.followMappings(f, tenant)
	}
}

// receives reports whether the stream has a mapping.
func (f *Subscriber) receives(m *pilasterv1.Mapping) bool {
	return f.has(m.Tenant) && !f.pullsMappings &&
		(!f.pulled[m.Tenant] || f.subscribed[subscription{m.Tenant, m.To}])
}

// dropSubscriptions ends those of tenants that the node no longer hosts.
func (m *Cache) dropSubscriptions(f *Subscriber) {
	for s := range f.subscribed {
		if !f.hosted[s.tenant] {
			m.unsubscribe(f, s)
		}
	}
}

func (m *Cache) unsubscribe(f *Subscriber, s subscription) {
	delete(f.subscribed, s)
	remove(m.bySubscription, s, f)
}

// ChangeSubscriptions begins and ends subscriptions of a node, and queues the answers. It ignores tenants that the node
// does not host.
func (m *Cache) ChangeSubscriptions(f *Subscriber, req *pilasterv1.FollowRequest) error {
	begin, err := subscriptionsOf(req.Subscribe)
	if err != nil {
		return err
	}
	end, err := subscriptionsOf(req.Unsubscribe)
	if err != nil {
		return err
	}
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Subscribers[f.Node.Name] != f {
		return nil // the stream has ended
	}
	for _, s := range end {
		m.unsubscribe(f, s)
	}
	var d pilasterv1.Delta
	for _, s := range begin {
		if !f.hosted[s.tenant] {
			continue
		}
		if f.subscribed[s] = true; len(f.subscribed) > MaxSubscriptions {
			return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf(
				"node %s subscribes to more than %d mappings, which is the maximum", f.Node.Name, MaxSubscriptions))
		}
		add(m.bySubscription, s, f)
		of := &pilasterv1.Mapping{Tenant: s.tenant, To: s.to}
		if is := m.Allocations.find(of); is != nil {
			d.Mappings = append(d.Mappings, Visible(is, f.Node.Name))
		} else {
			d.EndedMappings = append(d.EndedMappings, of)
		}
	}
	if len(d.Mappings)+len(d.EndedMappings) > 0 {
		m.enqueue(f, response(m.Revision, &d))
	}
	return nil
}

func subscriptionsOf(all []*pilasterv1.Subscriptions) (some []subscription, err error) {
	for _, of := range all {
		for _, b := range of.Addresses {
			a, ok := netip.AddrFromSlice(b)
			if !ok {
				return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(
					"a subscription of tenant %s to an address of %d bytes", of.Tenant, len(b)))
			}
			some = append(some, subscription{of.Tenant, netip.PrefixFrom(a, a.BitLen()).String()})
		}
	}
	return some, nil
}

// OwnMappings returns a node's allocations of a tenant.
func (m *Cache) OwnMappings(node, tenant string) *pilasterv1.ListMappingsResponse {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	resp := &pilasterv1.ListMappingsResponse{Revision: m.Revision}
	if of := m.Allocations.byTenant[tenant]; of != nil {
		for _, is := range of.mappings {
			if is.Name == node {
				resp.Mappings = append(resp.Mappings, is)
			}
		}
	}
	return resp
}
