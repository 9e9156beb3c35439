package api

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/trace"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
)

// ServeTraces makes calls of Trace, FollowPackets and SendProbe reach a tracer.
func (s *Service) ServeTraces(t *trace.Tracer) { s.tracer.Store(t) }

func (s *Service) readyToTrace() (*trace.Tracer, error) {
	if _, err := s.ready(); err != nil {
		return nil, err
	}
	if t := s.tracer.Load(); t != nil {
		return t, nil
	}
	return nil, connect.NewError(connect.CodeUnimplemented, errors.New("this agent's packet path cannot be traced"))
}

func (s *Service) Trace(
	ctx context.Context,
	req *connect.Request[pilasterv1.TraceRequest],
) (*connect.Response[pilasterv1.TraceResponse], error) {
	t, err := s.readyToTrace()
	if err != nil {
		return nil, err
	}
	ends, err := parseAddresses(req.Msg.Source, req.Msg.Destination)
	if err == nil {
		err = checkPort(req.Msg.Protocol, req.Msg.Port, req.Msg.SourcePort)
	}
	if err == nil && req.Msg.PeerApp >= uint32(address.FirstReservedApp) {
		err = connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("app %d: choose 1 to %d", req.Msg.PeerApp, address.FirstReservedApp-1))
	}
	var ingress netip.Prefix
	if err == nil && req.Msg.Ingress != "" {
		if ingress, err = netip.ParsePrefix(req.Msg.Ingress); err != nil {
			err = connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("ingress node: %w", err))
		}
	}
	var backend netip.Addr
	if err == nil && req.Msg.Backend != "" {
		var one []netip.Addr
		if one, err = parseAddresses(req.Msg.Backend); err == nil {
			backend = one[0]
		}
	}
	if err != nil {
		return nil, err
	}
	response, err := t.Trace(ctx, agent.Connection{
		Source: ends[0], Destination: ends[1], Protocol: uint8(req.Msg.Protocol), Port: uint16(req.Msg.Port),
		Tenant: req.Msg.Tenant, PeerApp: address.AppID(req.Msg.PeerApp), SourcePort: uint16(req.Msg.SourcePort),
	}, trace.Way{Backend: backend, Ingress: ingress, Pre: req.Msg.Pre})
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(response), nil
}

func (s *Service) FollowPackets(
	ctx context.Context,
	req *connect.Request[pilasterv1.FollowPacketsRequest],
	stream *connect.ServerStream[pilasterv1.FollowPacketsResponse],
) error {
	t, err := s.readyToTrace()
	if err != nil {
		return err
	}
	f := dpapi.PacketFilter{Protocol: uint8(req.Msg.Protocol), Port: uint16(req.Msg.Port), VNI: req.Msg.Vni}
	if f.Sources, err = parseAddresses(req.Msg.Sources...); err == nil {
		f.Destinations, err = parseAddresses(req.Msg.Destinations...)
	}
	if err == nil {
		err = checkPort(req.Msg.Protocol, req.Msg.Port)
	}
	if n := max(len(f.Sources), len(f.Destinations)); err == nil && n > dpapi.MaxTraced {
		err = connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("%d addresses: give at most %d", n, dpapi.MaxTraced))
	}
	if err != nil {
		return err
	}
	err = t.Follow(ctx, f, req.Msg.Tenant, func(e *pilasterv1.PacketEvent) error {
		response := &pilasterv1.FollowPacketsResponse{Event: e}
		if e == nil {
			now, err := host.Monotonic()
			if err != nil {
				return err
			}
			response.Time = now
		}
		return stream.Send(response)
	})
	if errors.Is(err, context.Canceled) {
		return connect.NewError(connect.CodeUnavailable, errors.New("the agent is stopping")) // or the client has gone
	}
	return toConnect(err)
}

func (s *Service) SendProbe(
	ctx context.Context,
	req *connect.Request[pilasterv1.SendProbeRequest],
) (*connect.Response[pilasterv1.SendProbeResponse], error) {
	t, err := s.readyToTrace()
	if err != nil {
		return nil, err
	}
	ends, err := parseAddresses(req.Msg.Source, req.Msg.Destination)
	if err == nil {
		err = checkPort(req.Msg.Protocol, req.Msg.Port, req.Msg.SourcePort)
	}
	if err != nil {
		return nil, err
	}
	response, err := t.SendProbe(ctx, trace.Probe{
		Source: ends[0], Destination: ends[1], Protocol: uint8(req.Msg.Protocol), Port: uint16(req.Msg.Port),
		SourcePort: uint16(req.Msg.SourcePort), Tenant: req.Msg.Tenant,
	})
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(response), nil
}

func parseAddresses(texts ...string) (all []netip.Addr, err error) {
	for _, text := range texts {
		a, err := address.ParseAny(text)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		all = append(all, a)
	}
	return all, nil
}

func checkPort(protocol uint32, ports ...uint32) error {
	if protocol > math.MaxUint8 || slices.Max(ports) > math.MaxUint16 {
		return connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("protocol %d, ports %v: out of range", protocol, ports))
	}
	return nil
}
