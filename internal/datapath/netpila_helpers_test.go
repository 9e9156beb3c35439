package datapath

import (
	"context"
	"errors"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// What the agent does with the driver and network netpila together.

func (d *Datapath) putTenant(t tenant.Tenant) error {
	return d.Netpila().PutTenant(context.Background(), t)
}

func (d *Datapath) deleteTenant(t tenant.Tenant) error {
	return d.Netpila().DeleteTenant(context.Background(), t)
}

func (d *Datapath) activate(r endpoint.Record) error {
	if err := d.Attach(r); err != nil {
		return err
	}
	return d.Netpila().Activate(context.Background(), r)
}

func (d *Datapath) deactivate(r endpoint.Record) error {
	return errors.Join(d.Netpila().Deactivate(context.Background(), r), d.RemoveRoutes(r))
}

func (d *Datapath) removeEndpoint(ctx context.Context, r endpoint.Record) error {
	if err := d.Netpila().Deactivate(ctx, r); err != nil {
		return err
	}
	return d.RemoveDevice(ctx, r)
}

func (d *Datapath) checkEndpoint(ctx context.Context, r endpoint.Record) error {
	if err := d.Check(ctx, r); err != nil {
		return err
	}
	return d.Netpila().Check(ctx, r)
}

func (d *Datapath) restoreAll(ctx context.Context, keep []endpoint.Record) (map[endpoint.ID]error, error) {
	return d.Restore(ctx, keep, func(found []endpoint.Record) error { return d.Netpila().Repair(ctx, keep, found) })
}
