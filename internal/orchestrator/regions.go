package orchestrator

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// region is another one, as it was imported.
type region struct {
	*pilasterv1.Region
	tenants map[string]*pilasterv1.Region_Tenant // by name
}

func newRegion(r *pilasterv1.Region) region {
	tenants := map[string]*pilasterv1.Region_Tenant{}
	for _, t := range r.Tenants {
		tenants[t.Name] = t
	}
	return region{r, tenants}
}

// deriveRegions completes events with what follows from others: where else tenants are. It may change for all of them with a
// region, or where the Edge Switch is another.
func (m *cache) deriveRegions(events []store.Event, all bool) []store.Event {
	at := map[string]int{} // of tenants in events
	for i, e := range events {
		if e.Tenant != nil {
			at[e.Tenant.Name] = i
		}
		if e.Tenant != nil || e.DeletedTenant != "" {
			m.changedNodes[m.edge] = true
		}
		all = all || e.Region != nil || e.DeletedRegion != ""
	}
	touched := slices.Sorted(maps.Keys(at))
	if all {
		touched = slices.Sorted(maps.Keys(m.tenants))
	}
	for _, name := range touched {
		t := m.tenants[name]
		regions := m.regionsOf(t)
		if t == nil ||
			slices.EqualFunc(
				t.Regions,
				regions,
				func(a, b *pilasterv1.TenantRegion) bool { return proto.Equal(a, b) },
			) {
			continue
		}
		m.changedNodes[m.edge] = true
		t = proto.CloneOf(t)
		t.Regions = regions
		m.tenants[name] = t
		if i, changed := at[name]; changed {
			events[i].Tenant = t
		} else {
			events = append(events, store.Event{Tenant: t})
		}
	}
	return events
}

// regionsOf is what a tenant's nodes must know of other regions: nothing while there is no Edge Switch.
func (m *cache) regionsOf(t *pilasterv1.Tenant) (regions []*pilasterv1.TenantRegion) {
	edge := m.nodes[m.edge]
	if edge == nil || !hasOverlays(t) {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(m.regions)) {
		r := m.regions[name]
		if there := r.tenants[t.Name]; there != nil &&
			(there.Joined == nil || there.Joined.AsTime().Equal(t.Created.AsTime())) {
			regions = append(
				regions,
				&pilasterv1.TenantRegion{
					Name:     name,
					Cidrs:    there.Cidrs,
					Edge:     edge.Prefix,
					PeerEdge: r.Edge,
					PeerVni:  there.Vni,
				},
			)
		}
	}
	return regions
}

// hasOverlays tells whether a tenant has addresses of its own, which other regions may know: also while it leaves network
// nimitz.
func hasOverlays(t *pilasterv1.Tenant) bool { return len(t.GetOverlays()) > 0 }

// withRegions is a tenant, read from the store, as nodes are told of it.
func (m *cache) withRegions(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	m.mu.RLock()
	defer m.mu.RUnlock()
	t.Regions = m.regionsOf(t)
	return t
}

// region is this one: with an edge where there is an Edge Switch.
func (m *cache) region(name string, base string) *pilasterv1.Region {
	m.mu.RLock()
	defer m.mu.RUnlock()
	r := &pilasterv1.Region{Name: name, BasePrefix: base, Edge: m.nodes[m.edge].GetPrefix()}
	for _, name := range slices.Sorted(maps.Keys(m.tenants)) {
		t := m.tenants[name]
		if !hasOverlays(t) {
			continue
		}
		there := &pilasterv1.Region_Tenant{Name: name, Vni: t.Ids[0].Id, Created: t.Created}
		for _, o := range t.Overlays {
			there.Cidrs = append(there.Cidrs, o.Cidr)
		}
		r.Tenants = append(r.Tenants, there)
	}
	return r
}

// otherRegions is sorted by name.
func (m *cache) otherRegions() (all []*pilasterv1.Region) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(m.regions)) {
		all = append(all, m.regions[name].Region)
	}
	return all
}

func (s *operatorService) ownRegion() *pilasterv1.Region {
	return s.cache.region(s.region, s.store.Cluster().Plan.Base.String())
}

// checkNamed refuses where this region has no name: others would not know what to call it.
func (s *operatorService) checkNamed() error {
	if s.region == "" {
		return connect.NewError(
			connect.CodeFailedPrecondition,
			fmt.Errorf("this orchestrator has no name among regions; nothing was changed: start it with --region NAME"),
		)
	}
	return nil
}

func (s *operatorService) ExportRegion(
	context.Context,
	*connect.Request[pilasterv1.ExportRegionRequest],
) (*connect.Response[pilasterv1.ExportRegionResponse], error) {
	if err := s.checkNamed(); err != nil {
		return nil, err
	}
	own := s.ownRegion()
	if own.Edge == "" {
		return nil, connect.NewError(
			connect.CodeFailedPrecondition,
			fmt.Errorf(
				"region %s has no Edge Switch, by which others would reach it; start an agent with --edge, and export then",
				s.region,
			),
		)
	}
	return connect.NewResponse(&pilasterv1.ExportRegionResponse{Region: own}), nil
}

func (s *operatorService) ImportRegion(
	ctx context.Context,
	req *connect.Request[pilasterv1.ImportRegionRequest],
) (*connect.Response[pilasterv1.ImportRegionResponse], error) {
	if err := s.checkNamed(); err != nil {
		return nil, err
	}
	kept, err := s.store.ImportRegion(ctx, s.region, req.Msg.Region, req.Msg.Tenants, req.Msg.All)
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.ImportRegionResponse{Region: kept}), nil
}

func (s *operatorService) ListRegions(
	context.Context,
	*connect.Request[pilasterv1.ListRegionsRequest],
) (*connect.Response[pilasterv1.ListRegionsResponse], error) {
	return connect.NewResponse(&pilasterv1.ListRegionsResponse{Own: s.ownRegion(), Regions: s.cache.otherRegions()}), nil
}

func (s *operatorService) DeleteRegion(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteRegionRequest],
) (*connect.Response[pilasterv1.DeleteRegionResponse], error) {
	if err := s.store.DeleteRegion(ctx, req.Msg.Name); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteRegionResponse{}), nil
}
