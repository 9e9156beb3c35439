package daemon

import (
	"context"

	"golang.org/x/sync/errgroup"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/gateways"
	"pilaster.io/pilaster/internal/agent/hostnet"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/egress"
)

// openEgress reads which container has which egress address, and keeps the node's own addresses in the packet path,
// whose changes own receives.
func (d *daemon) openEgress(ctx context.Context, g *errgroup.Group, m state.Membership, own <-chan struct{}) error {
	path, ok := d.driver.(dpapi.EgressPath)
	if ok {
		g.Go(func() error { hostnet.FollowOwnAddresses(ctx, own, path.SetOwnAddresses, d.Log); return nil })
	}
	d.leaves = ok
	var err error
	d.egress, err = egress.Open(egress.Config{
		Dir: d.StateDir, Plan: m.Plan, Node: m.Prefix, Records: d.store.List(), Log: d.Log,
	})
	return err
}

// probeGateways probes the egress gateways of tenants here.
func (d *daemon) probeGateways(ctx context.Context, g *errgroup.Group, core *agent.Core) {
	path, ok := d.driver.(dpapi.EgressPath)
	if !ok {
		return
	}
	m, _ := d.node.Membership()
	prober := gateways.New(core, path, m.Prefix, d.Log)
	d.service.ServeGateways(prober)
	g.Go(func() error { prober.Run(ctx); return nil })
}
