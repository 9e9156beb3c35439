package rpc

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

func (s *OperatorService) CreateUnderlayService(
	ctx context.Context,
	req *connect.Request[pilasterv1.CreateUnderlayServiceRequest],
) (*connect.Response[pilasterv1.CreateUnderlayServiceResponse], error) {
	wanted := req.Msg.GetService()
	services, err := tenant.ParseUnderlayServices([]*pilasterv1.UnderlayService{wanted})
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%w; nothing was changed", err))
	}
	made, err := s.Store.CreateUnderlayService(ctx, wanted.GetTenant(), services[0])
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	made = proto.CloneOf(made)
	made.Tenant = wanted.GetTenant()
	return connect.NewResponse(&pilasterv1.CreateUnderlayServiceResponse{Service: made}), nil
}

func (s *OperatorService) ListUnderlayServices(
	_ context.Context,
	req *connect.Request[pilasterv1.ListUnderlayServicesRequest],
) (*connect.Response[pilasterv1.ListUnderlayServicesResponse], error) {
	var resp pilasterv1.ListUnderlayServicesResponse
	tenants, err := s.tenants(req.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	for _, t := range tenants {
		for _, is := range byName(t.UnderlayServices) {
			is = proto.CloneOf(is)
			is.Tenant = t.Name
			resp.UnderlayServices = append(resp.UnderlayServices, is)
		}
	}
	return connect.NewResponse(&resp), nil
}

func (s *OperatorService) DeleteUnderlayService(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteUnderlayServiceRequest],
) (*connect.Response[pilasterv1.DeleteUnderlayServiceResponse], error) {
	if err := s.Store.DeleteUnderlayService(ctx, req.Msg.Tenant, req.Msg.Name); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteUnderlayServiceResponse{}), nil
}

func (s *OperatorService) CreatePublication(
	ctx context.Context,
	req *connect.Request[pilasterv1.CreatePublicationRequest],
) (*connect.Response[pilasterv1.CreatePublicationResponse], error) {
	wanted := req.Msg.GetPublication()
	container, err := netip.ParseAddr(wanted.GetContainer())
	if err != nil {
		return nil, connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf("%.80q is not the address of a container; nothing was changed", wanted.GetContainer()),
		)
	}
	made, err := s.Store.CreatePublication(ctx, wanted.GetTenant(), wanted.GetName(), container, wanted.GetNode())
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	made = proto.CloneOf(made)
	made.Tenant = wanted.GetTenant()
	return connect.NewResponse(&pilasterv1.CreatePublicationResponse{Publication: made}), nil
}

func (s *OperatorService) ListPublications(
	_ context.Context,
	req *connect.Request[pilasterv1.ListPublicationsRequest],
) (*connect.Response[pilasterv1.ListPublicationsResponse], error) {
	var resp pilasterv1.ListPublicationsResponse
	tenants, err := s.tenants(req.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	for _, t := range tenants {
		for _, p := range byName(t.Publications) {
			p = proto.CloneOf(p)
			p.Tenant = t.Name
			resp.Publications = append(resp.Publications, p)
		}
	}
	return connect.NewResponse(&resp), nil
}

func (s *OperatorService) DeletePublication(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeletePublicationRequest],
) (*connect.Response[pilasterv1.DeletePublicationResponse], error) {
	if err := s.Store.DeletePublication(ctx, req.Msg.Tenant, req.Msg.Name); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeletePublicationResponse{}), nil
}

// tenants returns the named tenant, or all tenants if the name is empty.
func (s *OperatorService) tenants(name string) ([]*pilasterv1.Tenant, error) {
	if name == "" {
		return s.Cache.AllTenants(), nil
	}
	t, _, _, err := s.tenant(name)
	return []*pilasterv1.Tenant{t}, err
}

// byName returns records sorted by name.
func byName[R interface{ GetName() string }](records []R) []R {
	return slices.SortedFunc(slices.Values(records), func(a, b R) int { return cmp.Compare(a.GetName(), b.GetName()) })
}
