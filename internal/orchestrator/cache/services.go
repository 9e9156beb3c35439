package cache

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/service"
)

// services are the services of tenants, and the slices of their endpoints. Only nodes that host the tenant receive
// them.
type services struct {
	of        map[string]map[service.Name]*pilasterv1.Service    // by tenant
	slices    map[string]map[sliceName]*pilasterv1.EndpointSlice // by tenant
	byNode    map[string]map[nodeSlice]bool                      // the slices that a node has written
	count     int                                                // of all services
	endpoints int                                                // in all slices
	// unreachable are nodes that do not answer. Their slices say so.
	unreachable map[string]bool
}

// nodeSlice names a slice among those of its node.
type nodeSlice struct {
	tenant string
	sliceName
}

// sliceName is the name of a slice in a tenant.
type sliceName struct {
	of   service.Name
	name string
}

func newServices() services {
	return services{
		of:     map[string]map[service.Name]*pilasterv1.Service{},
		slices: map[string]map[sliceName]*pilasterv1.EndpointSlice{},
		byNode: map[string]map[nodeSlice]bool{}, unreachable: map[string]bool{},
	}
}

func nameOf(is *pilasterv1.Service) service.Name {
	return service.Name{Namespace: is.Namespace, Name: is.Name}
}

func sliceNameOf(is *pilasterv1.EndpointSlice) sliceName {
	return sliceName{service.ParseName(is.Service), is.Name}
}

func (s *services) add(is *pilasterv1.Service) {
	s.remove(is)
	put(s.of, is.Tenant, nameOf(is), is)
	s.count++
}

func (s *services) remove(was *pilasterv1.Service) {
	if s.of[was.Tenant][nameOf(was)] != nil {
		drop(s.of, was.Tenant, nameOf(was))
		s.count--
	}
}

func (s *services) addSlice(is *pilasterv1.EndpointSlice) {
	s.removeSlice(is)
	put(s.slices, is.Tenant, sliceNameOf(is), is)
	if is.Node != "" {
		add(s.byNode, is.Node, nodeSlice{is.Tenant, sliceNameOf(is)})
	}
	s.endpoints += len(is.Endpoints)
}

// markSlices returns events whose slices say whether their nodes answer, which those of the store do not. It adds the
// slices of nodes that answer again, or no longer.
func (s *services) markSlices(events []store.Event) (all []store.Event) {
	marked := func(is *pilasterv1.EndpointSlice) *pilasterv1.EndpointSlice {
		if is.Unreachable == s.unreachable[is.Node] {
			return is
		}
		is = proto.CloneOf(is)
		is.Unreachable = s.unreachable[is.Node]
		return is
	}
	for _, e := range events {
		if e.Unreachable == nil {
			continue
		}
		if delete(s.unreachable, e.Unreachable.Node); e.Unreachable.Unreachable {
			s.unreachable[e.Unreachable.Node] = true
		}
		for name := range s.byNode[e.Unreachable.Node] {
			all = append(all, store.Event{Slice: marked(s.slices[name.tenant][name.sliceName])})
		}
	}
	for _, e := range events { // last, because they may replace those above
		if e.Slice != nil {
			e.Slice = marked(e.Slice)
		}
		all = append(all, e)
	}
	return all
}

func (s *services) removeSlice(was *pilasterv1.EndpointSlice) {
	if had := s.slices[was.Tenant][sliceNameOf(was)]; had != nil {
		drop(s.slices, was.Tenant, sliceNameOf(was))
		remove(s.byNode, had.Node, nodeSlice{had.Tenant, sliceNameOf(had)})
		s.endpoints -= len(had.Endpoints)
	}
}

func put[K, N comparable, R any](index map[K]map[N]R, k K, n N, r R) {
	if index[k] == nil {
		index[k] = map[N]R{}
	}
	index[k][n] = r
}

func drop[K, N comparable, R any](index map[K]map[N]R, k K, n N) {
	if delete(index[k], n); len(index[k]) == 0 {
		delete(index, k)
	}
}

// add and remove maintain an index of sets.
func add[K, V comparable](index map[K]map[V]bool, k K, v V) {
	if index[k] == nil {
		index[k] = map[V]bool{}
	}
	index[k][v] = true
}

func remove[K, V comparable](index map[K]map[V]bool, k K, v V) {
	if delete(index[k], v); len(index[k]) == 0 {
		delete(index, k)
	}
}

// removeAll removes what a deleted tenant had. The store deletes all of it in one transaction.
func (s *services) removeAll(tenant string) {
	for _, is := range s.of[tenant] {
		s.remove(is)
	}
	for _, is := range s.slices[tenant] {
		s.removeSlice(is)
	}
}

func serviceTenantOf(e store.Event) string {
	return cmp.Or(e.Service.GetTenant(), e.EndedService.GetTenant(), e.Slice.GetTenant(), e.EndedSlice.GetTenant())
}

// addWhole adds all services and slices of a tenant.
func (s *services) addWhole(d *pilasterv1.Delta, tenant string) {
	d.Services = slices.AppendSeq(d.Services, maps.Values(s.of[tenant]))
	d.Slices = slices.AppendSeq(d.Slices, maps.Values(s.slices[tenant]))
	d.WholeServices = append(d.WholeServices, tenant)
}

// service adds an event of a service or a slice to a delta. It returns false if the node does not receive the event.
func (f *Subscriber) service(d *pilasterv1.Delta, e store.Event) bool {
	if !f.hosted[serviceTenantOf(e)] {
		return false
	}
	switch {
	case e.Service != nil:
		d.Services = append(d.Services, e.Service)
	case e.EndedService != nil:
		d.EndedServices = append(d.EndedServices, e.EndedService)
	case e.Slice != nil:
		d.Slices = append(d.Slices, e.Slice)
	case e.EndedSlice != nil:
		d.EndedSlices = append(d.EndedSlices, e.EndedSlice)
	}
	return true
}

// reservations are what changes of services may add to the cluster that the cache does not have yet.
type reservations struct {
	services, endpoints int // sums
	pending             map[*reservation]bool
}

type reservation struct {
	services, endpoints int
	revision            int64 // of the change; 0 while it is not committed
}

func (s *reservations) add(r *reservation) {
	s.pending[r] = true
	s.services += r.services
	s.endpoints += r.endpoints
}

func (s *reservations) remove(r *reservation) {
	delete(s.pending, r)
	s.services -= r.services
	s.endpoints -= r.endpoints
}

// releaseUntil removes those of changes that the cache has at a revision.
func (s *reservations) releaseUntil(revision int64) {
	for r := range s.pending {
		if r.revision != 0 && r.revision <= revision {
			s.remove(r)
		}
	}
}

// ReserveServices refuses new services of a tenant and new slices if the cluster has no room for them. The caller
// calls release with the revision of its change, or with 0 if nothing was changed. Several orchestrators together may
// exceed the capacity by what they change at the same moment.
func (m *Cache) ReserveServices(
	tenant string,
	names []service.Name,
	all []service.Slice,
) (release func(revision int64), err error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	r := new(reservation)
	for _, n := range names {
		if m.Services.of[tenant][n] == nil {
			r.services++
		}
	}
	for _, s := range all {
		r.endpoints += len(s.Endpoints) - len(m.Services.slices[s.Tenant][sliceName{s.Service, s.Name}].GetEndpoints())
	}
	r.endpoints = max(r.endpoints, 0)
	if err := room("services", m.Services.count+m.reserved.services, r.services, service.MaxServices); err != nil {
		return nil, err
	}
	has := m.Services.endpoints + m.reserved.endpoints
	if err := room("endpoints of services", has, r.endpoints, service.MaxEndpoints); err != nil {
		return nil, err
	}
	m.reserved.add(r)
	return func(revision int64) {
		m.Mu.Lock()
		defer m.Mu.Unlock()
		if r.revision = revision; revision <= m.Revision {
			m.reserved.remove(r)
		}
	}, nil
}

func room(what string, has, more, most int) error {
	if more == 0 || has+more <= most {
		return nil
	}
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf(
		"the cluster has %d %s, %d more are new, and the maximum is %d; nothing was changed: delete some first", has,
		what, more, most))
}

// ServicesOf returns the services of a tenant, sorted by namespace and name.
func (m *Cache) ServicesOf(tenant string) (all []*pilasterv1.Service) {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	all = slices.Collect(maps.Values(m.Services.of[tenant]))
	slices.SortFunc(all, func(a, b *pilasterv1.Service) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return all
}

// SlicesOf returns the slices of a tenant by service, sorted by name.
func (m *Cache) SlicesOf(tenant string) map[service.Name][]*pilasterv1.EndpointSlice {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	of := map[service.Name][]*pilasterv1.EndpointSlice{}
	for name, is := range m.Services.slices[tenant] {
		of[name.of] = append(of[name.of], is)
	}
	for _, all := range of {
		slices.SortFunc(all, func(a, b *pilasterv1.EndpointSlice) int { return cmp.Compare(a.Name, b.Name) })
	}
	return of
}
