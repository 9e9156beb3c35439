package cache

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// allocations are the addresses and subnets of tenants' overlays that are allocated to nodes.
type allocations struct {
	byTenant map[string]*tenantMappings // by name of the tenant
	ByNode   map[string]int             // how many each node has
}

// tenantMappings are the allocations of one tenant.
type tenantMappings struct {
	mappings map[string]*pilasterv1.Mapping // by prefix
	changed  int64                          // revision of the last change
	listing  *store.Listing                 // sorted; nil until the first query after a change
}

// MaxMappings is the maximum number of addresses and subnets that a node may have: two per tenant or endpoint.
const MaxMappings = 2 * 65_535

func newAllocations() allocations {
	return allocations{byTenant: map[string]*tenantMappings{}, ByNode: map[string]int{}}
}

func (g allocations) add(m *pilasterv1.Mapping, revision int64) {
	g.remove(m, revision)
	of := g.byTenant[m.Tenant]
	if of == nil {
		of = &tenantMappings{mappings: map[string]*pilasterv1.Mapping{}}
		g.byTenant[m.Tenant] = of
	}
	of.mappings[m.To] = m
	of.changed, of.listing = revision, nil
	g.ByNode[m.Name]++
}

func (g allocations) remove(m *pilasterv1.Mapping, revision int64) {
	of := g.byTenant[m.Tenant]
	if of == nil || of.mappings[m.To] == nil {
		return
	}
	decrement(g.ByNode, of.mappings[m.To].Name)
	of.changed, of.listing = revision, nil
	if delete(of.mappings, m.To); len(of.mappings) == 0 {
		delete(g.byTenant, m.Tenant)
	}
}

// find returns the mapping of a prefix, nil if the prefix is free.
func (g allocations) find(m *pilasterv1.Mapping) *pilasterv1.Mapping {
	if of := g.byTenant[m.Tenant]; of != nil {
		return of.mappings[m.To]
	}
	return nil
}

// Page returns a page after the first from memory if no mapping of the tenant has changed since the first page.
// Otherwise it returns false, and the caller reads the store. Many nodes list at the same time, and the store would
// decode each page for each of them.
func (m *Cache) Page(tenant, token string) (store.Page, bool) {
	after, err := store.ParsePageToken(token)
	if err != nil {
		return store.Page{}, false
	}
	listing, ok := m.listed(tenant, after.Revision)
	if ok && listing == nil {
		m.listing.Lock() // the first goroutine builds the list, the others wait and use it
		defer m.listing.Unlock()
		if listing, ok = m.listed(tenant, after.Revision); ok && listing == nil {
			listing = m.list(tenant)
		}
	}
	if !ok || listing == nil {
		return store.Page{}, false
	}
	return listing.Page(after), true
}

// listed returns the list of a tenant's mappings, nil if it is not built yet. It returns false if a mapping changed
// after the revision, or if the cache has not reached the revision.
func (m *Cache) listed(tenant string, revision int64) (*store.Listing, bool) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	of := m.Allocations.byTenant[tenant]
	if of == nil || of.changed > revision || m.Revision < revision {
		return nil, false
	}
	return of.listing, true
}

// list builds the sorted list without holding the lock. It returns nil if a mapping changes meanwhile.
func (m *Cache) list(tenant string) *store.Listing {
	m.Mu.RLock()
	of := m.Allocations.byTenant[tenant]
	if of == nil {
		m.Mu.RUnlock()
		return nil
	}
	all, changed := slices.Collect(maps.Values(of.mappings)), of.changed
	m.Mu.RUnlock()
	listing := store.NewListing(all)
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if of.changed != changed {
		return nil
	}
	of.listing = listing
	return listing
}

// CheckRoom returns an error if a node would have more addresses and subnets than its endpoints can use.
func (m *Cache) CheckRoom(node string, more int) error {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	has := m.Allocations.ByNode[node]
	if has+more <= MaxMappings {
		return nil
	}
	return connect.NewError(
		connect.CodeResourceExhausted,
		fmt.Errorf(
			"node %s has %d addresses and subnets of tenants, and its endpoints can use %d; nothing more was "+
				"allocated or accepted: remove containers from it, or find out what it runs",
			node,
			has,
			MaxMappings,
		),
	)
}

// Claims counts the mappings that a node reports but that the cache does not have for that node.
func (m *Cache) Claims(node string, held []*pilasterv1.Mapping) (n int) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	for _, h := range held {
		if m.Allocations.find(h).GetName() != node {
			n++
		}
	}
	return n
}

// counted returns a copy of a tenant with the number of allocations per overlay, or the tenant if it has no overlays.
func (g allocations) counted(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	if t == nil || len(t.Overlays) == 0 {
		return t
	}
	t = proto.CloneOf(t)
	of := g.byTenant[t.Name]
	if of == nil {
		return t
	}
	for to, is := range of.mappings {
		if is.Origin != "" { // not the cluster's
			continue
		}
		prefix, err := netip.ParsePrefix(to)
		for _, o := range t.Overlays {
			if cidr, wrong := netip.ParsePrefix(o.Cidr); err == nil && wrong == nil && cidr.Contains(prefix.Addr()) {
				o.Given++
			}
		}
	}
	return t
}

// ChangedMappings returns the mappings of a tenant that changed after a revision, or false if the history no longer
// has all of them. For each prefix only the last change counts.
func (m *Cache) ChangedMappings(node, tenant string, after int64) (*pilasterv1.ListMappingsResponse, bool) {
	m.Mu.RLock()
	past, revision, ok := m.since(after)
	m.Mu.RUnlock()
	if !ok {
		return nil, false
	}
	resp := &pilasterv1.ListMappingsResponse{Revision: revision}
	seen := map[string]bool{}
	for _, b := range slices.Backward(past) {
		for _, e := range slices.Backward(b.Events) {
			of := cmp.Or(e.Mapping, e.EndedMapping)
			if of == nil || of.Tenant != tenant || seen[of.To] {
				continue
			}
			seen[of.To] = true
			if e.Mapping != nil {
				resp.Mappings = append(resp.Mappings, Visible(of, node))
			} else {
				resp.EndedMappings = append(resp.EndedMappings, of)
			}
		}
	}
	return resp, true
}

// Visible returns a mapping as a node receives it: without the endpoint's key unless the mapping is the node's own.
func Visible(m *pilasterv1.Mapping, to string) *pilasterv1.Mapping {
	if m.Name == to || m.Key == "" {
		return m
	}
	return &pilasterv1.Mapping{
		Tenant: m.Tenant, To: m.To, Node: m.Node, Name: m.Name, NextHops: m.NextHops, Locator: m.Locator, Mac: m.Mac,
		App: m.App, Sequence: m.Sequence, Origin: m.Origin,
	}
}
