package control

import (
	"cmp"
	"fmt"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/tenant"
)

func retiringFromProto(r *pilasterv1.RetiringApps) agent.Retiring {
	if r == nil {
		return agent.Retiring{}
	}
	out := agent.Retiring{Round: r.Round, Forgotten: r.Forgotten}
	for _, app := range r.Apps {
		out.Apps = append(out.Apps, address.AppID(app))
	}
	return out
}

func appFromProto(a *pilasterv1.App) (agent.App, error) {
	if a.GetId() == 0 || a.GetId() >= uint32(address.FirstReservedApp) {
		return agent.App{}, fmt.Errorf("app %#x of tenant %s is not in the range of containers' apps", a.GetId(),
			a.GetTenant())
	}
	return agent.App{ID: address.AppID(a.GetId()), Labels: a.GetLabels()}, nil
}

func tenantFromProto(t *pilasterv1.Tenant, plan address.Plan) (tenant.Tenant, error) {
	out := tenant.Tenant{
		Name:    t.GetName(),
		Network: cmp.Or(t.GetNetwork(), tenant.DefaultNetwork),
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
	if out.UnderlayServices, err = tenant.ParseUnderlayServices(t.GetUnderlayServices()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	if out.Publications, err = tenant.ParsePublications(t.GetPublications()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	if out.Offloads, err = tenant.ParseOffloads(t.GetOffloads()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	if out.Regions, err = tenant.ParseRegions(t.GetRegions()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	if out.Egress, err = tenant.ParseEgress(t.GetEgress()); err != nil {
		return out, fmt.Errorf("tenant %s: %w", t.GetName(), err)
	}
	if out.Nodes, err = tenant.ParsePrefixes(t.GetNodePrefixes()); err != nil {
		return out, fmt.Errorf("tenant %s: nodes: %w", t.GetName(), err)
	}
	if out.Protected, err = tenant.ParsePrefixes(t.GetProtected()); err != nil {
		return out, fmt.Errorf("tenant %s: protected prefixes: %w", t.GetName(), err)
	}
	if out.ServicesNumber = t.GetServicesNumber(); out.ServicesNumber > address.MaxServicesNumber {
		return out, fmt.Errorf("tenant %s: number %d for services is beyond %d", t.GetName(), out.ServicesNumber,
			address.MaxServicesNumber)
	}
	out.Exposed = t.GetExposed()
	if err := out.CheckEgress(plan); err != nil {
		return out, fmt.Errorf("tenant %s: %w; upgrade the agent", t.GetName(), err)
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
	plan address.Plan,
) ([]agent.TenantState, error) {
	byName := map[string]int{}
	var list []agent.TenantState
	for _, t := range tenants {
		converted, err := tenantFromProto(t, plan)
		if err != nil {
			return nil, err
		}
		byName[converted.Name] = len(list)
		list = append(
			list,
			agent.TenantState{
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
			list = append(list, agent.TenantState{Tenant: tenant.Tenant{Name: a.Tenant}})
		}
		list[i].Apps = append(list[i].Apps, app)
	}
	return list, nil
}
