package api

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
)

func (s *Service) FindEgressAddress(
	_ context.Context,
	req *connect.Request[pilasterv1.FindEgressAddressRequest],
) (*connect.Response[pilasterv1.FindEgressAddressResponse], error) {
	core, err := s.ready()
	if err != nil {
		return nil, err
	}
	a, err := address.ParseAny(req.Msg.Address)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	had, since, err := core.FindEgressAddress(a)
	if err != nil {
		return nil, toConnect(err)
	}
	resp := &pilasterv1.FindEgressAddressResponse{Node: s.config.Node.Name(), Since: timeToProto(since)}
	for _, e := range had {
		if req.Msg.At == nil || e.Had(req.Msg.At.AsTime()) {
			resp.Holders = append(resp.Holders, &pilasterv1.EgressHolder{
				Tenant: e.Tenant, ContainerId: e.Container, Interface: e.Interface, Pod: e.Pod,
				From: timeToProto(e.From), Until: timeToProto(e.Until),
			})
		}
	}
	return connect.NewResponse(resp), nil
}

// timeToProto returns nil for the zero time.
func timeToProto(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
