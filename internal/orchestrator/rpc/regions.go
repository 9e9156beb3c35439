package rpc

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

func (s *OperatorService) ownRegion() *pilasterv1.Region {
	return s.Cache.Region(s.RegionName, s.Store.Cluster().Plan.Base.String())
}

// checkNamed refuses if this region has no name, by which other regions would refer to it.
func (s *OperatorService) checkNamed() error {
	if s.RegionName == "" {
		return connect.NewError(
			connect.CodeFailedPrecondition,
			fmt.Errorf("this orchestrator's region has no name; nothing was changed: start it with --region NAME"),
		)
	}
	return nil
}

func (s *OperatorService) ExportRegion(
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
				"region %s has no Edge Switch, through which others would reach it; start an agent with --edge, then "+
					"export",
				s.RegionName,
			),
		)
	}
	return connect.NewResponse(&pilasterv1.ExportRegionResponse{Region: own}), nil
}

func (s *OperatorService) ImportRegion(
	ctx context.Context,
	req *connect.Request[pilasterv1.ImportRegionRequest],
) (*connect.Response[pilasterv1.ImportRegionResponse], error) {
	if err := s.checkNamed(); err != nil {
		return nil, err
	}
	kept, err := s.Store.ImportRegion(ctx, s.RegionName, req.Msg.Region, req.Msg.Tenants, req.Msg.All)
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.ImportRegionResponse{Region: kept}), nil
}

func (s *OperatorService) ListRegions(
	context.Context,
	*connect.Request[pilasterv1.ListRegionsRequest],
) (*connect.Response[pilasterv1.ListRegionsResponse], error) {
	return connect.NewResponse(
		&pilasterv1.ListRegionsResponse{Own: s.ownRegion(), Regions: s.Cache.OtherRegions()},
	), nil
}

func (s *OperatorService) DeleteRegion(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeleteRegionRequest],
) (*connect.Response[pilasterv1.DeleteRegionResponse], error) {
	if err := s.Store.DeleteRegion(ctx, req.Msg.Name); err != nil {
		return nil, err
	}
	s.await(ctx)
	return connect.NewResponse(&pilasterv1.DeleteRegionResponse{}), nil
}
