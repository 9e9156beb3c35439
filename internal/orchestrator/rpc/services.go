package rpc

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/service"
)

// maxPutSlices is the maximum number of slices in one call of a node.
const maxPutSlices = 256

func (s *OperatorService) CreateService(
	ctx context.Context,
	req *connect.Request[pilasterv1.CreateServiceRequest],
) (*connect.Response[pilasterv1.CreateServiceResponse], error) {
	wanted := req.Msg.GetService()
	var fixed []*pilasterv1.EndpointSlice
	if len(req.Msg.GetEndpoints().GetEndpoints()) > 0 {
		fixed = append(fixed, req.Msg.Endpoints)
	}
	applied, err := s.applyServices(ctx, wanted.GetTenant(), []*pilasterv1.Service{wanted}, fixed,
		store.ApplyingServices{New: true})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.CreateServiceResponse{Service: applied[0].Service}), nil
}

func (s *OperatorService) ApplyServices(
	ctx context.Context,
	req *connect.Request[pilasterv1.ApplyServicesRequest],
) (*connect.Response[pilasterv1.ApplyServicesResponse], error) {
	applied, err := s.applyServices(ctx, req.Msg.Tenant, req.Msg.Services, req.Msg.Slices,
		store.ApplyingServices{DryRun: req.Msg.DryRun})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.ApplyServicesResponse{Services: applied}), nil
}

func (s *OperatorService) applyServices(
	ctx context.Context,
	tenant string,
	services []*pilasterv1.Service,
	fixed []*pilasterv1.EndpointSlice,
	how store.ApplyingServices,
) ([]*pilasterv1.AppliedService, error) {
	var all []service.Service
	var names []service.Name
	for _, m := range services {
		is, err := service.FromProto(m)
		if err != nil {
			return nil, invalid(err)
		}
		all, names = append(all, is), append(names, is.Name)
	}
	slices, err := slicesOf(fixed)
	if err != nil {
		return nil, err
	}
	for i := range slices {
		slices[i].Tenant = tenant
	}
	how.Occupied = s.Occupied()
	release, err := s.Cache.ReserveServices(tenant, names, slices)
	if err != nil {
		return nil, err
	}
	applied, err := s.Store.ApplyServices(ctx, tenant, all, slices, how)
	if err != nil || how.DryRun {
		release(0)
		return applied, err
	}
	release(s.Store.Revision())
	s.await(ctx)
	return applied, nil
}

func invalid(err error) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%w; nothing was changed", err))
}

func slicesOf(all []*pilasterv1.EndpointSlice) (slices []service.Slice, err error) {
	for _, m := range all {
		is, err := service.SliceFromProto(m)
		if err != nil {
			return nil, invalid(err)
		}
		slices = append(slices, is)
	}
	return slices, nil
}

func (s *OperatorService) ListServices(
	_ context.Context,
	req *connect.Request[pilasterv1.ListServicesRequest],
) (*connect.Response[pilasterv1.ListServicesResponse], error) {
	tenants, err := s.tenants(req.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	var resp pilasterv1.ListServicesResponse
	for _, t := range tenants {
		of := s.Cache.SlicesOf(t.Name)
		for _, m := range s.Cache.ServicesOf(t.Name) {
			is, err := service.FromProto(m)
			if err != nil {
				return nil, err
			}
			slices, err := slicesOf(of[is.Name])
			if err != nil {
				return nil, err
			}
			ready, endpoints := service.Ready(is, slices)
			resp.Services = append(resp.Services, &pilasterv1.ServiceSummary{
				Service: m, Ready: uint32(ready), Endpoints: uint32(endpoints),
			})
		}
	}
	return connect.NewResponse(&resp), nil
}

func (s *OperatorService) GetService(
	_ context.Context,
	req *connect.Request[pilasterv1.GetServiceRequest],
) (*connect.Response[pilasterv1.GetServiceResponse], error) {
	_, _, hosting, err := s.tenant(req.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	name := service.ParseName(req.Msg.Name)
	for _, is := range s.Cache.ServicesOf(req.Msg.Tenant) {
		if is.Namespace != name.Namespace || is.Name != name.Name {
			continue
		}
		resp := &pilasterv1.GetServiceResponse{Service: is, Slices: s.Cache.SlicesOf(req.Msg.Tenant)[name]}
		for _, h := range hosting {
			resp.Nodes = append(resp.Nodes, h.Node)
		}
		return connect.NewResponse(resp), nil
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf(
		"tenant %s has no service %.300s; `pilaster service list --tenant %s` lists its services", req.Msg.Tenant, name,
		req.Msg.Tenant))
}

func (s *OperatorService) DeleteService(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteServiceRequest],
) (*connect.Response[pilasterv1.DeleteServiceResponse], error) {
	if err := s.Store.DeleteService(ctx, req.Msg.Tenant, service.ParseName(req.Msg.Name)); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteServiceResponse{}), nil
}

func (s *OperatorService) ChangeServicePools(
	ctx context.Context,
	req *connect.Request[pilasterv1.ChangeServicePoolsRequest],
) (*connect.Response[pilasterv1.ChangeServicePoolsResponse], error) {
	add, err := prefixes(req.Msg.Add)
	if err != nil {
		return nil, err
	}
	remove, err := prefixes(req.Msg.Remove)
	if err != nil {
		return nil, err
	}
	pools, err := s.Store.ChangeServicePools(ctx, add, remove, s.Occupied())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.ChangeServicePoolsResponse{Pools: pools}), nil
}

// ListServicePools reads the store: pools are needed only where services change.
func (s *OperatorService) ListServicePools(
	ctx context.Context,
	_ *connect.Request[pilasterv1.ListServicePoolsRequest],
) (*connect.Response[pilasterv1.ListServicePoolsResponse], error) {
	pools, err := s.Store.ChangeServicePools(ctx, nil, nil, nil)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pilasterv1.ListServicePoolsResponse{Pools: pools}), nil
}

// PutEndpoints does not wait for the cache: the node receives the change on its stream.
func (s *NodeService) PutEndpoints(
	ctx context.Context,
	req *connect.Request[pilasterv1.PutEndpointsRequest],
) (*connect.Response[pilasterv1.PutEndpointsResponse], error) {
	if n := len(req.Msg.Slices); n > maxPutSlices {
		return nil, invalid(fmt.Errorf("the node sends %d slices of endpoints at once, and the maximum is %d", n,
			maxPutSlices))
	}
	all, err := slicesOf(req.Msg.Slices)
	if err != nil {
		return nil, err
	}
	node, err := s.acting(ctx)
	if err != nil {
		return nil, err
	}
	release, err := s.Cache.ReserveServices("", nil, all)
	if err != nil {
		return nil, err
	}
	if err := s.Store.PutEndpoints(ctx, node, all); err != nil {
		release(0)
		return nil, err
	}
	release(s.Store.Revision())
	return connect.NewResponse(&pilasterv1.PutEndpointsResponse{}), nil
}
