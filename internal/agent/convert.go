package agent

import (
	"cmp"
	"errors"
	"fmt"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
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

func endpointToProto(r endpoint.Record) *pilasterv1.Endpoint {
	e := &pilasterv1.Endpoint{
		Id: uint32(r.ID), ContainerId: r.ContainerID, Interface: r.Interface, Netns: r.Netns,
		Tenant: r.Tenant, TenantId: uint32(r.TenantID), App: uint32(r.App), AppNow: uint32(r.AppNow), Labels: r.Labels,
		Pod: r.Pod, State: string(r.State), DeviceKind: r.Device.Kind, HostDevice: r.Device.HostName,
		ContainerMac: r.Device.ContainerMAC.String(), Mtu: uint32(r.Device.MTU),
		Created: timestamppb.New(r.Created), CniNetwork: r.CNINetwork,
	}
	if e.HostDevice != "" { // otherwise the index is internal to the packet path
		e.HostIfindex = uint32(r.Device.HostIfindex)
	}
	for _, a := range r.Attachments {
		p := &pilasterv1.Attachment{Network: a.Network, Address: a.Address.String(), Gateway: a.Gateway.String()}
		if a.Plaintext.IsValid() {
			p.Plaintext = a.Plaintext.String()
		}
		for _, route := range a.Routes {
			p.Routes = append(p.Routes, route.String())
		}
		e.Attachments = append(e.Attachments, p)
	}
	return e
}

func endpointsToProto(records []endpoint.Record) []*pilasterv1.Endpoint {
	list := make([]*pilasterv1.Endpoint, len(records))
	for i, r := range records {
		list[i] = endpointToProto(r)
	}
	return list
}

func appToProto(tenant string, a App) *pilasterv1.App {
	return &pilasterv1.App{Tenant: tenant, Id: uint32(a.ID), Labels: a.Labels}
}

func appFromProto(a *pilasterv1.App) (App, error) {
	if a.GetId() == 0 || a.GetId() >= uint32(address.FirstReservedApp) {
		return App{}, fmt.Errorf("app %#x of tenant %s is not in the range of containers' apps", a.GetId(),
			a.GetTenant())
	}
	return App{address.AppID(a.GetId()), a.GetLabels()}, nil
}

func tenantFromProto(t *pilasterv1.Tenant) (tenant.Tenant, error) {
	out := tenant.Tenant{
		Name:    t.GetName(),
		Network: cmp.Or(t.GetNetwork(), tenant.Netpila),
		Leaving: t.GetLeaving(),
		Changes: t.GetChanges(),
	}
	if t.GetCreated() != nil {
		out.Created = t.Created.AsTime()
	}
	switch a := t.GetAddressing(); a {
	case pilasterv1.Addressing_ADDRESSING_UNSPECIFIED, pilasterv1.Addressing_ADDRESSING_ENCRYPTED:
		out.Addressing = tenant.Encrypted
	case pilasterv1.Addressing_ADDRESSING_CLEAR:
		out.Addressing = tenant.Clear
	case pilasterv1.Addressing_ADDRESSING_OWN:
		out.Addressing = tenant.Own
	default:
		return out, fmt.Errorf(
			"tenant %s has addressing %d, which this build does not support; upgrade the agent",
			t.GetName(),
			a,
		)
	}
	var err error
	if out.Overlays, err = tenant.ParseOverlays(t.GetOverlays()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	if err := out.CheckNetwork(); err != nil {
		return out, fmt.Errorf("tenant %s %w; upgrade the agent", t.GetName(), err)
	}
	if out.Services, err = tenant.ParseServices(t.GetServices()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	if out.Publications, err = tenant.ParsePublications(t.GetPublications()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	if out.Regions, err = tenant.ParseRegions(t.GetRegions()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	for _, id := range t.GetIds() {
		if id.Id < 1 || id.Id > uint32(address.MaxTenantID) || len(id.Key) != len(address.Key{}) {
			return out, fmt.Errorf(
				"tenant %s: id %d with a key of %d bytes is invalid",
				t.GetName(),
				id.Id,
				len(id.Key),
			)
		}
		if out.Has(address.TenantID(id.Id)) {
			return out, fmt.Errorf("tenant %s has id %d twice", t.GetName(), id.Id)
		}
		out.IDs = append(
			out.IDs,
			tenant.ID{ID: address.TenantID(id.Id), Key: address.Key(id.Key), OnlyAccepted: id.OnlyAccepted},
		)
	}
	if out.Current().ID == 0 {
		return out, fmt.Errorf("tenant %s has no current id", t.GetName())
	}
	return out, nil
}

// statesFromProto groups tenants and apps by tenant. Apps may arrive without their tenant.
func statesFromProto(
	tenants []*pilasterv1.Tenant,
	apps []*pilasterv1.App,
	whole func(tenant string) bool,
) ([]TenantState, error) {
	byName := map[string]int{}
	var list []TenantState
	for _, t := range tenants {
		converted, err := tenantFromProto(t)
		if err != nil {
			return nil, err
		}
		byName[converted.Name] = len(list)
		list = append(
			list,
			TenantState{
				Tenant:   converted,
				Whole:    whole(converted.Name),
				Retiring: retiringFromProto(t.GetRetiringApps()),
			},
		)
	}
	for _, a := range apps {
		app, err := appFromProto(a)
		if err != nil {
			return nil, err
		}
		i, ok := byName[a.Tenant]
		if !ok {
			i = len(list)
			byName[a.Tenant] = i
			list = append(list, TenantState{Tenant: tenant.Tenant{Name: a.Tenant}})
		}
		list[i].Apps = append(list[i].Apps, app)
	}
	return list, nil
}

// tenantToProto converts a tenant without its ids.
func tenantToProto(t tenant.Tenant) *pilasterv1.Tenant {
	out := &pilasterv1.Tenant{
		Name:       t.Name,
		Addressing: pilasterv1.Addressing_ADDRESSING_ENCRYPTED,
		Changes:    t.Changes,
		Network:    t.Network,
		Leaving:    t.Leaving,
	}
	if !t.Created.IsZero() {
		out.Created = timestamppb.New(t.Created)
	}
	switch t.Addressing {
	case tenant.Clear:
		out.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
	case tenant.Own:
		out.Addressing = pilasterv1.Addressing_ADDRESSING_OWN
	}
	for _, o := range t.Overlays {
		out.Overlays = append(out.Overlays, &pilasterv1.Overlay{Cidr: o.CIDR.String(), NodeBits: uint32(o.NodeBits)})
	}
	return out
}
