package orchestrator

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/keymutex"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// operatorService serves people on the unix socket. Changes return when this orchestrator's
// cache has them, so that the next question finds them.
type operatorService struct {
	store   *store.Store
	cache   *cache
	token   *tokenFile
	version string
	where   string // the store, in words
	listen  string
	region  string // this one's name
	started time.Time

	applying keymutex.Locks // by tenant: policies are looked at beside those that were applied before
}

// await waits for the revision and not for what changed, which somebody else may have changed back.
func (s *operatorService) await(ctx context.Context) {
	revision := s.store.Revision()
	s.cache.await(ctx, func() bool { return s.cache.revision >= revision })
}

func (s *operatorService) CreateTenant(
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

func (s *operatorService) createTenant(
	ctx context.Context,
	m *pilasterv1.CreateTenantRequest,
) (*pilasterv1.Tenant, error) {
	overlays, err := tenant.ParseOverlays(m.Overlays)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%w; nothing was changed", err))
	}
	return s.store.CreateTenantOn(ctx, cmp.Or(m.Network, tenant.Netpila), m.Name, m.Addressing, overlays)
}

func (s *operatorService) GetTenant(
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
		Tenant: tenant, Apps: apps, Hosting: hosting, MaxApps: uint32(s.store.MaxApps()), RestingApps: uint32(s.cache.quarantined(req.Msg.Name)),
	}), nil
}

// tenant is a tenant that there is.
func (s *operatorService) tenant(name string) (*pilasterv1.Tenant, []*pilasterv1.App, []*pilasterv1.Hosting, error) {
	if err := tenant.CheckName(name); err != nil {
		return nil, nil, nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	t, apps, hosting := s.cache.tenant(name)
	if t == nil {
		return nil, nil, nil, connect.NewError(
			connect.CodeNotFound,
			fmt.Errorf("there is no tenant %q; `pilaster tenant list` shows those there are", name),
		)
	}
	return t, apps, hosting, nil
}

func (s *operatorService) ListTenants(
	context.Context,
	*connect.Request[pilasterv1.ListTenantsRequest],
) (*connect.Response[pilasterv1.ListTenantsResponse], error) {
	var resp pilasterv1.ListTenantsResponse
	for _, t := range s.cache.allTenants() {
		resp.Tenants = append(resp.Tenants, withoutKeys(t))
		if t.Leaving != "" {
			_, _, hosting := s.cache.tenant(t.Name)
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

func (s *operatorService) DeleteTenant(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteTenantRequest],
) (*connect.Response[pilasterv1.DeleteTenantResponse], error) {
	if err := s.store.DeleteTenant(ctx, req.Msg.Name); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteTenantResponse{}), nil
}

func (s *operatorService) RotateKey(
	ctx context.Context,
	req *connect.Request[pilasterv1.RotateKeyRequest],
) (*connect.Response[pilasterv1.RotateKeyResponse], error) {
	change := s.store.RotateKey
	if id := req.Msg.Force; id != 0 {
		change = func(ctx context.Context, name string) (*pilasterv1.Tenant, error) {
			return s.store.ForceKey(ctx, name, id)
		}
	}
	tenant, err := change(ctx, req.Msg.Name)
	if err != nil {
		return nil, err
	}
	s.cache.await(ctx, func() bool {
		now := s.cache.tenants[tenant.Name]
		return now == nil || now.Changes >= tenant.Changes
	})
	return connect.NewResponse(
		&pilasterv1.RotateKeyResponse{Tenant: withoutKeys(tenant), Id: tenant.Ids[len(tenant.Ids)-1].Id},
	), nil
}

func (s *operatorService) MigrateTenant(
	ctx context.Context,
	req *connect.Request[pilasterv1.MigrateTenantRequest],
) (*connect.Response[pilasterv1.MigrateTenantResponse], error) {
	var moved *pilasterv1.Tenant
	var err error
	if req.Msg.Finish {
		moved, err = s.store.FinishMigration(ctx, req.Msg.Name, req.Msg.Force)
	} else {
		moved, err = s.store.Migrate(ctx, req.Msg.Name, req.Msg.To, req.Msg.Addressing)
	}
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.MigrateTenantResponse{Tenant: withoutKeys(moved)}), nil
}

func (s *operatorService) GetNode(
	_ context.Context,
	req *connect.Request[pilasterv1.GetNodeRequest],
) (*connect.Response[pilasterv1.GetNodeResponse], error) {
	node := s.cache.node(req.Msg.Name)
	if node == nil {
		return nil, connect.NewError(
			connect.CodeNotFound,
			fmt.Errorf("there is no node %q; `pilaster node list` shows those there are", req.Msg.Name),
		)
	}
	return connect.NewResponse(&pilasterv1.GetNodeResponse{Node: node, Tenants: s.cache.tenantsOf(node.Name)}), nil
}

func (s *operatorService) ListNodes(
	context.Context,
	*connect.Request[pilasterv1.ListNodesRequest],
) (*connect.Response[pilasterv1.ListNodesResponse], error) {
	return connect.NewResponse(&pilasterv1.ListNodesResponse{Nodes: s.cache.allNodes()}), nil
}

func (s *operatorService) DeleteNode(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteNodeRequest],
) (*connect.Response[pilasterv1.DeleteNodeResponse], error) {
	name := req.Msg.Name
	if node := s.cache.node(name); !req.Msg.Force && node != nil &&
		!node.Connected { // the end of its stream may not be noted yet
		s.cache.awaitSession(ctx, name, store.Session.None)
	}
	if err := s.store.DeleteNode(ctx, name, req.Msg.Force); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteNodeResponse{}), nil
}

func (s *operatorService) ClusterStatus(
	context.Context,
	*connect.Request[pilasterv1.ClusterStatusRequest],
) (*connect.Response[pilasterv1.ClusterStatusResponse], error) {
	size := s.cache.size()
	return connect.NewResponse(&pilasterv1.ClusterStatusResponse{
		ClusterUuid:    s.store.Cluster().UUID,
		Plan:           plan(s.store.Cluster().Plan),
		Version:        s.version,
		Revision:       size.revision,
		Nodes:          uint32(size.nodes),
		NodesConnected: uint32(size.connected),
		Tenants:        uint32(size.tenants),
		Started:        timestamppb.New(s.started),
		Store:          s.where,
		Listen:         s.listen,
	}), nil
}

func (s *operatorService) GetToken(
	ctx context.Context,
	_ *connect.Request[pilasterv1.GetTokenRequest],
) (*connect.Response[pilasterv1.GetTokenResponse], error) {
	token, err := s.store.Token(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.GetTokenResponse{Token: token.String()}), nil
}

func (s *operatorService) RotateToken(
	ctx context.Context,
	_ *connect.Request[pilasterv1.RotateTokenRequest],
) (*connect.Response[pilasterv1.RotateTokenResponse], error) {
	token, err := s.token.rotate(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.RotateTokenResponse{Token: token.String()}), nil
}
