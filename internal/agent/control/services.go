package control

import (
	"context"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/service"
)

// putEndpointsLimit is how long a report of endpoints waits for an answer of the orchestrator.
const putEndpointsLimit = 10 * time.Second

// PutEndpoints implements services.Reporter.
func (l *Link) PutEndpoints(ctx context.Context, all []service.Slice) error {
	client := l.dialled()
	if client == nil {
		return errNoLink
	}
	req := &pilasterv1.PutEndpointsRequest{}
	for _, s := range all {
		req.Slices = append(req.Slices, s.Proto())
	}
	ctx, cancel := context.WithTimeout(ctx, putEndpointsLimit)
	defer cancel()
	_, err := client.PutEndpoints(ctx, connect.NewRequest(req))
	switch connect.CodeOf(err) {
	case connect.CodeResourceExhausted:
		return fmt.Errorf("%w: %w: %w", services.ErrRefused, services.ErrFull, err)
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeNotFound,
		connect.CodePermissionDenied:
		return fmt.Errorf("%w: %w", services.ErrRefused, err)
	}
	return err
}

// servicesFromProto returns the updates of services of an event, by tenant.
func servicesFromProto(event *pilasterv1.FollowResponse) ([]services.Update, error) {
	d := event.GetDelta()
	if s := event.GetSnapshot(); s != nil {
		d = &pilasterv1.Delta{Services: s.Services, Slices: s.Slices, WholeServices: s.WholeServices}
	}
	var all []services.Update
	places := map[string]int{}
	of := func(tenant string) *services.Update {
		i, ok := places[tenant]
		if !ok {
			i = len(all)
			places[tenant], all = i, append(all, services.Update{Tenant: tenant})
		}
		return &all[i]
	}
	for _, name := range d.GetWholeServices() {
		of(name).Whole = true
	}
	for _, m := range d.GetEndedServices() {
		u := of(m.Tenant)
		u.Ended = append(u.Ended, service.Name{Namespace: m.Namespace, Name: m.Name})
	}
	for _, m := range d.GetEndedSlices() {
		u := of(m.Tenant)
		u.EndedSlices = append(u.EndedSlices,
			services.SliceName{Service: service.ParseName(m.Service), Name: m.Name})
	}
	for _, m := range d.GetServices() {
		s, err := service.FromProto(m)
		if err != nil {
			return nil, fmt.Errorf("tenant %s: %w; upgrade the agent", m.Tenant, err)
		}
		u := of(m.Tenant)
		u.Services = append(u.Services, s)
	}
	for _, m := range d.GetSlices() {
		s, err := service.SliceFromProto(m)
		if err != nil {
			return nil, fmt.Errorf("tenant %s: %w; upgrade the agent", m.Tenant, err)
		}
		u := of(m.Tenant)
		u.Slices = append(u.Slices, s)
	}
	return all, nil
}

// hasServices reports whether an event changes services.
func hasServices(d *pilasterv1.Delta) bool {
	return slices.Max([]int{len(d.Services), len(d.EndedServices), len(d.Slices), len(d.EndedSlices),
		len(d.WholeServices)}) > 0
}
