package api

import (
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/networks"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
)

// codes maps the kinds of refusals to status codes.
var codes = []struct {
	kind error
	code connect.Code
}{
	{refusal.ErrInvalid, connect.CodeInvalidArgument},
	{refusal.ErrNotFound, connect.CodeNotFound},
	{refusal.ErrExists, connect.CodeAlreadyExists},
	{refusal.ErrExhausted, connect.CodeResourceExhausted},
	{refusal.ErrUnavailable, connect.CodeUnavailable},
	{refusal.ErrNever, connect.CodeFailedPrecondition},
	{refusal.ErrCheck, connect.CodeFailedPrecondition},
}

func toConnect(err error) error {
	if err == nil {
		return nil
	}
	for _, c := range codes {
		if errors.Is(err, c.kind) {
			return connect.NewError(c.code, err)
		}
	}
	return connect.NewError(connect.CodeInternal, err)
}

func endpointToProto(of *networks.Set, r endpoint.Record) *pilasterv1.Endpoint {
	e := &pilasterv1.Endpoint{
		Id: uint32(r.ID), ContainerId: r.ContainerID, Interface: r.Interface, Netns: r.Netns,
		Tenant: r.Tenant, TenantId: uint32(r.TenantID), App: uint32(r.App), AppNow: uint32(r.AppNow), Labels: r.Labels,
		Pod: r.Pod, State: string(r.State), DeviceKind: r.Device.Kind, HostDevice: r.Device.HostName,
		ContainerMac: r.Device.ContainerMAC.String(), Mtu: uint32(r.Device.MTU),
		Created: timestamppb.New(r.Created), CniNetwork: r.CNINetwork, AddressKey: r.AddressKey,
		NotReady: r.Conditions.NotReady, Terminating: r.Conditions.Terminating,
	}
	if e.HostDevice != "" { // otherwise the index is internal to the packet path
		e.HostIfindex = uint32(r.Device.HostIfindex)
	}
	for _, p := range r.HostPorts {
		h := &pilasterv1.HostPort{Host: uint32(p.Host), Container: uint32(p.Container), Protocol: p.Protocol}
		if p.Address.IsValid() {
			h.Address = p.Address.String()
		}
		e.HostPorts = append(e.HostPorts, h)
	}
	for _, a := range r.Attachments {
		p := &pilasterv1.Attachment{Network: a.Network, Address: a.Address.String(), Gateway: a.Gateway.String()}
		if a.Plaintext.IsValid() {
			p.Plaintext = a.Plaintext.String()
		}
		if onFabric := of.OnFabric(a); onFabric.IsValid() {
			p.OnFabric = onFabric.String()
		}
		if a.Egress.IsValid() {
			p.Egress = a.Egress.String()
		}
		for _, route := range a.Routes {
			p.Routes = append(p.Routes, route.String())
		}
		e.Attachments = append(e.Attachments, p)
	}
	return e
}

func hostPortsFromProto(all []*pilasterv1.HostPort) (ports []endpoint.HostPort, err error) {
	for _, p := range all {
		port, err := endpoint.NewHostPort(int(p.Host), int(p.Container), p.Protocol, p.Address)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		ports = append(ports, port)
	}
	return ports, nil
}

func endpointsToProto(of *networks.Set, records []endpoint.Record) []*pilasterv1.Endpoint {
	list := make([]*pilasterv1.Endpoint, len(records))
	for i, r := range records {
		list[i] = endpointToProto(of, r)
	}
	return list
}
