package orchestrator

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// allocations is what nodes have of tenants' overlays.
type allocations struct {
	byTenant map[string]*tenantMappings // by tenant
	byNode   map[string]int
}

// tenantMappings is what is given of one tenant's.
type tenantMappings struct {
	mappings map[string]*pilasterv1.Mapping // by prefix
	changed  int64                          // at this revision, the last time
	listing  *store.Listing                 // of since then; nil until somebody asks
}

func newAllocations() allocations {
	return allocations{byTenant: map[string]*tenantMappings{}, byNode: map[string]int{}}
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
	g.byNode[m.Name]++
}

func (g allocations) remove(m *pilasterv1.Mapping, revision int64) {
	of := g.byTenant[m.Tenant]
	if of == nil || of.mappings[m.To] == nil {
		return
	}
	decrement(g.byNode, of.mappings[m.To].Name)
	of.changed, of.listing = revision, nil
	if delete(of.mappings, m.To); len(of.mappings) == 0 {
		delete(g.byTenant, m.Tenant)
	}
}

// find is what is known of a prefix, nil where nobody has it.
func (g allocations) find(m *pilasterv1.Mapping) *pilasterv1.Mapping {
	if of := g.byTenant[m.Tenant]; of != nil {
		return of.mappings[m.To]
	}
	return nil
}

// page is a page after the first, as long as nothing of the tenant's has changed since that; false where it has to be
// read from the store. Many nodes list at a time, and the store would decode each page for each of them.
func (m *cache) page(tenant, token string) (store.Page, bool) {
	after, err := store.ParsePageToken(token)
	if err != nil {
		return store.Page{}, false
	}
	listing, ok := m.listed(tenant, after.Revision)
	if ok && listing == nil {
		m.listing.Lock() // one makes it, and the others find it then
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

// listed is all that is given of a tenant's, nil where nobody has made it yet; or false where it was given after a
// revision.
func (m *cache) listed(tenant string, revision int64) (*store.Listing, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	of := m.allocations.byTenant[tenant]
	if of == nil || of.changed > revision || m.revision < revision {
		return nil, false
	}
	return of.listing, true
}

// list makes it, sorted, while the model does other things: nil where it has changed meanwhile.
func (m *cache) list(tenant string) *store.Listing {
	m.mu.RLock()
	of := m.allocations.byTenant[tenant]
	if of == nil {
		m.mu.RUnlock()
		return nil
	}
	all, changed := slices.Collect(maps.Values(of.mappings)), of.changed
	m.mu.RUnlock()
	listing := store.NewListing(all)
	m.mu.Lock()
	defer m.mu.Unlock()
	if of.changed != changed {
		return nil
	}
	of.listing = listing
	return listing
}

// room refuses a node that would have more than it can have endpoints for.
func (m *cache) room(node string, more int) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	has := m.allocations.byNode[node]
	if has+more <= maxMappings {
		return nil
	}
	return connect.NewError(
		connect.CodeResourceExhausted,
		fmt.Errorf(
			"node %s has %d addresses and subnets of tenants, and its endpoints can use %d; nothing more was given or taken in: remove containers from it, or see what it runs",
			node,
			has,
			maxMappings,
		),
	)
}

// claims is how much of what a node says that it holds would be new.
func (m *cache) claims(node string, held []*pilasterv1.Mapping) (n int) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, h := range held {
		if m.allocations.find(h).GetName() != node {
			n++
		}
	}
	return n
}

// counted is a tenant with how much of its overlays is given; one without overlays as it is.
func (g allocations) counted(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	if t == nil || len(t.Overlays) == 0 {
		return t
	}
	t = proto.CloneOf(t)
	of := g.byTenant[t.Name]
	if of == nil {
		return t
	}
	for to := range of.mappings {
		prefix, err := netip.ParsePrefix(to)
		for _, o := range t.Overlays {
			if cidr, wrong := netip.ParsePrefix(o.Cidr); err == nil && wrong == nil && cidr.Contains(prefix.Addr()) {
				o.Given++
			}
		}
	}
	return t
}
