package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// TestEdgeSwitch: an Edge Switch refuses containers and forwards transit tenants to other regions, also after a start
// without the orchestrator. A node that is no Edge Switch any more does not.
func TestEdgeSwitch(t *testing.T) {
	b := newBedOfTwo(t)
	b.edge = true
	b.reopen()
	ctx := t.Context()
	if _, err := b.Add(ctx, b.green("c1")); !errors.Is(err, refusal.ErrNever) ||
		!strings.Contains(err.Error(), "Edge Switch") ||
		!strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("a container was taken: %v", err)
	}
	b.clean()

	peer := netip.MustParsePrefix("fd71:696c:6100:5::/64")
	green := TenantState{Tenant: b.orchestrator.tenants["green"], Whole: true}
	green.Tenant.Regions = []tenant.Region{
		{
			Name:     "east",
			CIDRs:    []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")},
			Edge:     nodePrefix,
			PeerEdge: peer,
			PeerVNI:  12,
		},
	}
	for _, step := range []func() error{
		func() error { return b.SetTransit(ctx, []string{"green"}) },
		func() error { return b.Apply(ctx, []TenantState{green}, nil) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	leads := func(when, to string, taken bool) {
		t.Helper()
		if got := b.nimitz.remote(3); got != to {
			t.Errorf("%s: it leads to %q, want %q", when, got, to)
		}
		foreign := pipeline.Foreign{Edge: peer, Theirs: 12, Source: netip.MustParsePrefix("10.1.0.0/16"), VNI: 3}
		if got := b.nimitz.entries[foreign.Match()] != nil; got != taken {
			t.Errorf("%s: what comes from the other region is taken: %v", when, got)
		}
	}
	there := "10.1.0.0/16 fd71:696c:6100:5::2"
	leads("carried", there, true)
	b.reopen()
	leads("after a start", there, true)
	if known, _, _ := b.tenants.get("green"); !known.Tenant.Equal(green.Tenant) {
		t.Errorf("after a start green is %+v", known.Tenant)
	}
	b.edge = false
	b.reopen()
	leads("without --edge", "", false)
}

// TestRegionsBesideResolve: an answer to what a first container of an app asks leaves regions alone that the stream has
// told, however late it is; of a tenant that is new here it brings them.
func TestRegionsBesideResolve(t *testing.T) {
	b := newBedOfTwo(t)
	ctx := t.Context()
	east := tenant.Region{
		Name:     "east",
		CIDRs:    []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")},
		Edge:     nodePrefix,
		PeerEdge: netip.MustParsePrefix("fd71:696c:6100:5::/64"),
		PeerVNI:  12,
	}
	moved := east
	moved.PeerVNI = 13
	of := func(regions ...tenant.Region) tenant.Tenant {
		green := b.orchestrator.tenants["green"]
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
			if err := b.Apply(ctx, []TenantState{{Tenant: of(step.streamed...), Whole: true}}, nil); err != nil {
				t.Fatal(err)
			}
		}
		b.orchestrator.tenants["green"] = of(step.answered...)
		request := b.green(fmt.Sprint("c", i))
		request.Labels = map[string]string{"app": request.ContainerID}
		asked := b.orchestrator.calls
		if _, err := b.Add(ctx, request); err != nil {
			t.Fatal(err)
		}
		if b.orchestrator.calls == asked {
			t.Error("no request was sent")
		}
		if known, _, _ := b.tenants.get("green"); !known.Tenant.Equal(of(step.want...)) {
			t.Errorf("step %d: regions %v, want %v", i, known.Tenant.Regions, step.want)
		}
	}
}

// TestRegionsOfMessages: what no orchestrator can have said is not believed.
func TestRegionsOfMessages(t *testing.T) {
	said := func() *pilasterv1.Tenant {
		return &pilasterv1.Tenant{
			Name: "green", Network: tenant.Nimitz, Addressing: pilasterv1.Addressing_ADDRESSING_OWN,
			Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16"}},
			Ids:      []*pilasterv1.TenantId{{Id: 3, Key: make([]byte, 16)}},
			Regions: []*pilasterv1.TenantRegion{
				{
					Name:     "east",
					Cidrs:    []string{"10.1.0.0/16"},
					Edge:     nodePrefix.String(),
					PeerEdge: "fd71:696c:6100:5::/64",
					PeerVni:  12,
				},
			},
		}
	}
	got, err := tenantFromProto(said())
	if err != nil || len(got.Regions) != 1 || got.Regions[0].PeerVNI != 12 ||
		got.Regions[0].PeerEdge.String() != "fd71:696c:6100:5::/64" {
		t.Errorf("%+v, %v", got.Regions, err)
	}
	for what, change := range map[string]func(*pilasterv1.TenantRegion){
		"CIDR":  func(r *pilasterv1.TenantRegion) { r.Cidrs = []string{"10.1.0.1/16"} },
		"edge":  func(r *pilasterv1.TenantRegion) { r.PeerEdge = "fd71:696c:6100:5::/63" },
		"VNI 0": func(r *pilasterv1.TenantRegion) { r.PeerVni = 0 },
	} {
		wrong := said()
		change(wrong.Regions[0])
		if _, err := tenantFromProto(wrong); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want an error with %q", err, what)
		}
	}
}
