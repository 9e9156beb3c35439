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

// given is what nodes have of tenants' overlays.
type given struct {
	to     map[string]*mapped // by tenant
	byNode map[string]int
}

// mapped is what is given of one tenant's.
type mapped struct {
	mappings map[string]*pilasterv1.Mapping // by prefix
	changed  int64                          // at this revision, the last time
	listing  *store.Listing                 // of since then; nil until somebody asks
}

func newGiven() given { return given{to: map[string]*mapped{}, byNode: map[string]int{}} }

func (g given) add(m *pilasterv1.Mapping, revision int64) {
	g.remove(m, revision)
	of := g.to[m.Tenant]
	if of == nil {
		of = &mapped{mappings: map[string]*pilasterv1.Mapping{}}
		g.to[m.Tenant] = of
	}
	of.mappings[m.To] = m
	of.changed, of.listing = revision, nil
	g.byNode[m.Name]++
}

func (g given) remove(m *pilasterv1.Mapping, revision int64) {
	of := g.to[m.Tenant]
	if of == nil || of.mappings[m.To] == nil {
		return
	}
	less(g.byNode, of.mappings[m.To].Name)
	of.changed, of.listing = revision, nil
	if delete(of.mappings, m.To); len(of.mappings) == 0 {
		delete(g.to, m.Tenant)
	}
}

// nodeOf is the name of the node that has something, empty where nobody has.
func (g given) nodeOf(m *pilasterv1.Mapping) string {
	if of := g.to[m.Tenant]; of != nil {
		return of.mappings[m.To].GetName()
	}
	return ""
}

// page is a page after the first, as long as nothing of the tenant's has changed since that; false where it has to be read from the store. Many nodes
// list at a time, and the store would decode each page for each of them.
func (m *model) page(tenant, token string) (store.Page, bool) {
	after, err := store.ParsePageToken(token)
	if err != nil {
		return store.Page{}, false
	}
	m.mu.Lock()
	of := m.given.to[tenant]
	if of == nil || of.changed > after.Revision || m.revision < after.Revision {
		m.mu.Unlock()
		return store.Page{}, false
	}
	if of.listing == nil {
		of.listing = store.NewListing(slices.Collect(maps.Values(of.mappings)))
	}
	listing := of.listing
	m.mu.Unlock()
	return listing.Page(after), true
}

// room refuses a node that would have more than it can have endpoints for.
func (m *model) room(node string, more int) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	has := m.given.byNode[node]
	if has+more <= maxMappings {
		return nil
	}
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("node %s has %d addresses and subnets of tenants, and its endpoints can use %d; nothing more was given or taken in: remove containers from it, or see what it runs", node, has, maxMappings))
}

// claims is how much of what a node says that it holds would be new.
func (m *model) claims(node string, held []*pilasterv1.Mapping) (n int) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, h := range held {
		if m.given.nodeOf(h) != node {
			n++
		}
	}
	return n
}

// counted is a tenant with how much of its overlays is given; one without overlays as it is.
func (g given) counted(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	if t == nil || len(t.Overlays) == 0 {
		return t
	}
	t = proto.CloneOf(t)
	of := g.to[t.Name]
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
