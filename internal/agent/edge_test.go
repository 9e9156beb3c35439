package agent_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// TestEdgeSwitch: an Edge Switch refuses containers and forwards transit tenants to other regions, also after a start
// without the orchestrator. A node that is no Edge Switch any more does not.
func TestEdgeSwitch(t *testing.T) {
	b := newBedOfTwo(t)
	b.Edge = true
	b.Reopen()
	ctx := t.Context()
	if _, err := b.Add(ctx, b.Green("c1")); !errors.Is(err, refusal.ErrNever) ||
		!strings.Contains(err.Error(), "Edge Switch") ||
		!strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("a container was taken: %v", err)
	}
	b.CheckClean()

	peer := netip.MustParsePrefix("fd71:696c:6100:5::/64")
	green := agent.TenantState{Tenant: b.Orchestrator.Tenants["green"], Whole: true}
	green.Tenant.Regions = []tenant.Region{
		{
			Name:     "east",
			CIDRs:    []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")},
			Edge:     agenttest.NodePrefix,
			PeerEdge: peer,
			PeerVNI:  12,
		},
	}
	for _, step := range []func() error{
		func() error { return b.SetTransit(ctx, []string{"green"}) },
		func() error { return b.Apply(ctx, []agent.TenantState{green}, nil) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	leads := func(when, to string, taken bool) {
		t.Helper()
		if got := b.Nimitz.Remote(3); got != to {
			t.Errorf("%s: it leads to %q, want %q", when, got, to)
		}
		foreign := pipeline.Foreign{Edge: peer, Theirs: 12, Source: netip.MustParsePrefix("10.1.0.0/16"), VNI: 3}
		if got := b.Nimitz.Has[foreign.Match()] != nil; got != taken {
			t.Errorf("%s: what comes from the other region is taken: %v", when, got)
		}
	}
	there := "10.1.0.0/16 fd71:696c:6100:5::2"
	leads("carried", there, true)
	b.Reopen()
	leads("after a start", there, true)
	if known, _, _ := b.Tenants.Get("green"); !known.Tenant.Equal(green.Tenant) {
		t.Errorf("after a start green is %+v", known.Tenant)
	}
	b.Edge = false
	b.Reopen()
	leads("without --edge", "", false)
}

// TestRegionsBesideResolve: a late reply to Resolve does not change the regions that the stream has sent. For a tenant
// that is new on the node, the reply adds them.
func TestRegionsBesideResolve(t *testing.T) {
	b := newBedOfTwo(t)
	ctx := t.Context()
	east := tenant.Region{
		Name:     "east",
		CIDRs:    []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")},
		Edge:     agenttest.NodePrefix,
		PeerEdge: netip.MustParsePrefix("fd71:696c:6100:5::/64"),
		PeerVNI:  12,
	}
	moved := east
	moved.PeerVNI = 13
	of := func(regions ...tenant.Region) tenant.Tenant {
		green := b.Orchestrator.Tenants["green"]
		green.Regions = regions
		return green
	}
	for i, step := range []struct{ streamed, answered, want []tenant.Region }{
		{nil, []tenant.Region{east}, []tenant.Region{east}},
		{[]tenant.Region{moved}, []tenant.Region{east}, []tenant.Region{moved}},
		{[]tenant.Region{}, []tenant.Region{moved}, nil},
		{[]tenant.Region{east}, nil, []tenant.Region{east}},
	} {
		if step.streamed != nil {
			if err := b.Apply(ctx, []agent.TenantState{{Tenant: of(step.streamed...), Whole: true}}, nil); err != nil {
				t.Fatal(err)
			}
		}
		b.Orchestrator.Tenants["green"] = of(step.answered...)
		request := b.Green(fmt.Sprint("c", i))
		request.Labels = map[string]string{"app": request.ContainerID}
		asked := b.Orchestrator.Calls
		if _, err := b.Add(ctx, request); err != nil {
			t.Fatal(err)
		}
		if b.Orchestrator.Calls == asked {
			t.Error("no request was sent")
		}
		if known, _, _ := b.Tenants.Get("green"); !known.Tenant.Equal(of(step.want...)) {
			t.Errorf("step %d: regions %v, want %v", i, known.Tenant.Regions, step.want)
		}
	}
}
