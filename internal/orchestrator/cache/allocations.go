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

// Allocations is what nodes have of tenants' overlays.
type allocations struct {
	byTenant map[string]*tenantMappings // by tenant
	ByNode   map[string]int
}

// tenantMappings is what is given of one tenant's.
type tenantMappings struct {
	mappings map[string]*pilasterv1.Mapping // by prefix
	changed  int64                          // at this revision, the last time
	listing  *store.Listing                 // Of since then; nil until somebody asks
}

// MaxMappings is how many addresses and subnets of tenants a node may have: two of each tenant or endpoint.
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

// find is what is known of a prefix, nil where nobody has it.
func (g allocations) find(m *pilasterv1.Mapping) *pilasterv1.Mapping {
	if of := g.byTenant[m.Tenant]; of != nil {
		return of.mappings[m.To]
	}
	return nil
}

// Page is a page after the first, as long as nothing of the tenant's has changed since that; false where it has to be
// read from the store. Many nodes list at a time, and the store would decode each page for each of them.
func (m *Cache) Page(tenant, token string) (store.Page, bool) {
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
// Revision.
func (m *Cache) listed(tenant string, revision int64) (*store.Listing, bool) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	of := m.Allocations.byTenant[tenant]
	if of == nil || of.changed > revision || m.Revision < revision {
		return nil, false
	}
	return of.listing, true
}

// list makes it, sorted, while the model does other things: nil where it has changed meanwhile.
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

// CheckRoom refuses a node that would have more than it can have endpoints for.
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
			"node %s has %d addresses and subnets of tenants, and its endpoints can use %d; nothing more was given or taken in: remove containers from it, or see what it runs",
			node,
			has,
			MaxMappings,
		),
	)
}

// Claims is how much of what a node says that it holds would be new.
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

// ChangedMappings is what of a tenant's mappings is another since a revision, or false when that is not remembered. Of each
// prefix the last counts.
func (m *Cache) ChangedMappings(node, tenant string, after int64) (*pilasterv1.ListMappingsResponse, bool) {
	m.Mu.RLock()
	past, revision, ok := m.since(after)
	m.Mu.RUnlock()
	if !ok {
		return nil, false
	}
	resp := &pilasterv1.ListMappingsResponse{Revision: revision}
	told := map[string]bool{}
	for _, b := range slices.Backward(past) {
		for _, e := range slices.Backward(b.Events) {
			of := cmp.Or(e.Mapping, e.EndedMapping)
			if of == nil || of.Tenant != tenant || told[of.To] {
				continue
			}
			told[of.To] = true
			if e.Mapping != nil {
				resp.Mappings = append(resp.Mappings, Visible(of, node))
			} else {
				resp.EndedMappings = append(resp.EndedMappings, of)
			}
		}
	}
	return resp, true
}

// Visible is a mapping as a node is told of it: whose container another node's is, is not its concern.
func Visible(m *pilasterv1.Mapping, to string) *pilasterv1.Mapping {
	if m.Name == to || m.Key == "" {
		return m
	}
	return &pilasterv1.Mapping{Tenant: m.Tenant, To: m.To, Node: m.Node, Name: m.Name}
}
