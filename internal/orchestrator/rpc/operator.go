package rpc

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/keymutex"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// OperatorService serves operators on the unix socket. A change returns when the cache of this orchestrator has it, so
// that the next query sees it.
type OperatorService struct {
	Store      *store.Store
	Cache      *cache.Cache
	Token      *admission.TokenFile
	Version    string
	Where      string // description of the store
	Listen     string
	RegionName string // name of this region
	Started    time.Time
	Offloads   Offloads
	Occupied   func() map[netip.Addr]string // addresses that no service may have, and what has them

	applying keymutex.Locks // by tenant: the capacity check must see all policies of earlier calls
}

// await waits for the revision of the last change, not for its content: another client may have reverted the change.
func (s *OperatorService) await(ctx context.Context) {
	revision := s.Store.Revision()
	s.Cache.Await(ctx, func() bool { return s.Cache.Revision >= revision })
}

func (s *OperatorService) CreateTenant(
	ctx context.Context,
	req *connect.Request[pilasterv1.CreateTenantRequest],
) (*connect.Response[pilasterv1.CreateTenantResponse], error) {
	made, err := s.createTenant(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.CreateTenantResponse{Tenant: withoutKeys(made)}), nil
}

func (s *OperatorService) createTenant(
	ctx context.Context,
	m *pilasterv1.CreateTenantRequest,
) (*pilasterv1.Tenant, error) {
	overlays, err := tenant.ParseOverlays(m.Overlays)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%w; nothing was changed", err))
	}
	return s.Store.CreateTenantOn(ctx, cmp.Or(m.Network, tenant.DefaultNetwork), m.Name, m.Addressing, overlays)
}

func (s *OperatorService) GetTenant(
	_ context.Context,
	req *connect.Request[pilasterv1.GetTenantRequest],
) (*connect.Response[pilasterv1.GetTenantResponse], error) {
	tenant, apps, hosting, err := s.tenant(req.Msg.Name)
	if err != nil {
		return nil, err
	}
	if !req.Msg.ShowKey {
		tenant = withoutKeys(tenant)
	}
	return connect.NewResponse(&pilasterv1.GetTenantResponse{
		Tenant: tenant, Apps: apps, Hosting: hosting,
		MaxApps: uint32(s.Store.MaxApps()), RestingApps: uint32(s.Cache.Quarantined(req.Msg.Name)),
	}), nil
}

// tenant returns an existing tenant.
func (s *OperatorService) tenant(name string) (*pilasterv1.Tenant, []*pilasterv1.App, []*pilasterv1.Hosting, error) {
	if err := tenant.CheckName(name); err != nil {
		return nil, nil, nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	t, apps, hosting := s.Cache.Tenant(name)
	if t == nil {
		return nil, nil, nil, connect.NewError(
			connect.CodeNotFound,
			fmt.Errorf("there is no tenant %q; `pilaster tenant list` lists the tenants", name),
		)
	}
	return t, apps, hosting, nil
}

func (s *OperatorService) ListTenants(
	context.Context,
	*connect.Request[pilasterv1.ListTenantsRequest],
) (*connect.Response[pilasterv1.ListTenantsResponse], error) {
	var resp pilasterv1.ListTenantsResponse
	for _, t := range s.Cache.AllTenants() {
		resp.Tenants = append(resp.Tenants, withoutKeys(t))
		if t.Leaving != "" {
			_, _, hosting := s.Cache.Tenant(t.Name)
			resp.Hosting = append(resp.Hosting, hosting...)
		}
	}
	return connect.NewResponse(&resp), nil
}

func withoutKeys(t *pilasterv1.Tenant) *pilasterv1.Tenant {
	t = proto.CloneOf(t)
	for _, id := range t.Ids {
		id.Key = nil
	}
	return t
}

func (s *OperatorService) DeleteTenant(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteTenantRequest],
) (*connect.Response[pilasterv1.DeleteTenantResponse], error) {
	if err := s.Store.DeleteTenant(ctx, req.Msg.Name); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteTenantResponse{}), nil
}

func (s *OperatorService) RotateKey(
	ctx context.Context,
	req *connect.Request[pilasterv1.RotateKeyRequest],
) (*connect.Response[pilasterv1.RotateKeyResponse], error) {
	change := s.Store.RotateKey
	if id := req.Msg.Force; id != 0 {
		change = func(ctx context.Context, name string) (*pilasterv1.Tenant, error) {
			return s.Store.ForceKey(ctx, name, id)
		}
	}
	tenant, err := change(ctx, req.Msg.Name)
	if err != nil {
		return nil, err
	}
	s.Cache.Await(ctx, func() bool {
		now := s.Cache.Tenants[tenant.Name]
		return now == nil || now.Changes >= tenant.Changes
	})
	return connect.NewResponse(
		&pilasterv1.RotateKeyResponse{Tenant: withoutKeys(tenant), Id: tenant.Ids[len(tenant.Ids)-1].Id},
	), nil
}

func (s *OperatorService) MigrateTenant(
	ctx context.Context,
	req *connect.Request[pilasterv1.MigrateTenantRequest],
) (*connect.Response[pilasterv1.MigrateTenantResponse], error) {
	var moved *pilasterv1.Tenant
	var err error
	if req.Msg.Finish {
		moved, err = s.Store.FinishMigration(ctx, req.Msg.Name, req.Msg.Force)
	} else {
		moved, err = s.Store.Migrate(ctx, req.Msg.Name, req.Msg.To, req.Msg.Addressing)
	}
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.MigrateTenantResponse{Tenant: withoutKeys(moved)}), nil
}

func (s *OperatorService) GetNode(
	_ context.Context,
	req *connect.Request[pilasterv1.GetNodeRequest],
) (*connect.Response[pilasterv1.GetNodeResponse], error) {
	node := s.Cache.Node(req.Msg.Name)
	if node == nil {
		return nil, connect.NewError(
			connect.CodeNotFound,
			fmt.Errorf("there is no node %q; `pilaster node list` lists the nodes", req.Msg.Name),
		)
	}
	return connect.NewResponse(&pilasterv1.GetNodeResponse{Node: node, Tenants: s.Cache.TenantsOf(node.Name)}), nil
}

func (s *OperatorService) ListNodes(
	context.Context,
	*connect.Request[pilasterv1.ListNodesRequest],
) (*connect.Response[pilasterv1.ListNodesResponse], error) {
	return connect.NewResponse(&pilasterv1.ListNodesResponse{Nodes: s.Cache.AllNodes()}), nil
}

func (s *OperatorService) DeleteNode(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteNodeRequest],
) (*connect.Response[pilasterv1.DeleteNodeResponse], error) {
	name := req.Msg.Name
	if node := s.Cache.Node(name); !req.Msg.Force && node != nil &&
		!node.Connected { // the store may not have the end of its stream yet
		s.Cache.AwaitSession(ctx, name, store.Session.None)
	}
	if err := s.Store.DeleteNode(ctx, name, req.Msg.Force); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteNodeResponse{}), nil
}

func (s *OperatorService) ClusterStatus(
	context.Context,
	*connect.Request[pilasterv1.ClusterStatusRequest],
) (*connect.Response[pilasterv1.ClusterStatusResponse], error) {
	size := s.Cache.Size()
	return connect.NewResponse(&pilasterv1.ClusterStatusResponse{
		ClusterUuid:    s.Store.Cluster().UUID,
		Plan:           plan(withReservations(s.Store.Cluster().Plan, s.Cache)),
		Version:        s.Version,
		Revision:       size.Revision,
		Nodes:          uint32(size.Nodes),
		NodesConnected: uint32(size.Connected),
		Tenants:        uint32(size.Tenants),
		Started:        timestamppb.New(s.Started),
		Store:          s.Where,
		Listen:         s.Listen,
	}), nil
}

func (s *OperatorService) GetToken(
	ctx context.Context,
	_ *connect.Request[pilasterv1.GetTokenRequest],
) (*connect.Response[pilasterv1.GetTokenResponse], error) {
	token, err := s.Store.Token(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.GetTokenResponse{Token: token.String()}), nil
}

func (s *OperatorService) RotateToken(
	ctx context.Context,
	_ *connect.Request[pilasterv1.RotateTokenRequest],
) (*connect.Response[pilasterv1.RotateTokenResponse], error) {
	token, err := s.Token.Rotate(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.RotateTokenResponse{Token: token.String()}), nil
}
