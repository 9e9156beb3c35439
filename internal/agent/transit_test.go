package agent_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// published is green with a container on another node that this one's gateway publishes, made at a time.
func (b *bed) published(changes uint64, made time.Time) agent.TenantState {
	green := b.Orchestrator.Tenants["green"]
	green.Overlays = append(
		slices.Clone(green.Overlays[:1]),
		tenant.Overlay{CIDR: netip.MustParsePrefix("fd12:1::/48"), NodeBits: 64},
	)
	green.Changes, green.Created = changes, made
	green.Publications = []tenant.Publication{{
		Name: "web", Container: netip.MustParseAddr("fd12:1::9"), Gateway: agenttest.NodePrefix,
		Underlay: tenant.UnderlayAddress(agenttest.NodePrefix, 2),
	}}
	green.UnderlayServices = []tenant.UnderlayService{
		{Name: "storage", Virtual: netip.MustParseAddr("fd09::7"), Real: netip.MustParseAddr("2001:db8::9")},
	}
	return agent.TenantState{Tenant: green, Whole: true}
}

func (b *bed) report(first bool) *pilasterv1.FollowRequest {
	var r pilasterv1.FollowRequest
	b.Tenants.Report(&r, first)
	return &r
}

// TestCarried: a tenant without an endpoint is known while the node's record lists it as a transit tenant, also after a
// restart without the orchestrator; it is not hosted, and its first endpoint sends a request like that of any tenant.
func TestCarried(t *testing.T) {
	b := newBedOfTwo(t)
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	made := time.Unix(5, 0).UTC()
	must(b.Apply(ctx, []agent.TenantState{b.published(1, made)}, nil))
	b.CheckClean() // neither hosted nor carried
	must(b.SetTransit(ctx, []string{"green", "unknown"}))
	must(b.Apply(ctx, []agent.TenantState{b.published(1, made)}, nil))
	n := b.Networks["nimitz"].(interface {
		network.MappingSink
		network.GatewayProvider
	})
	must(
		n.Replace(
			ctx,
			"green",
			[]network.Mapping{
				{
					Tenant: "green",
					To:     netip.MustParsePrefix("fd12:1::/64"),
					Node:   netip.MustParsePrefix("fd70:696c:6100:9::/64"),
				},
			},
		),
	)
	leads := func(when, want string) {
		t.Helper()
		if got := b.Nimitz.Remote(3); got != want {
			t.Errorf("%s: the switch leads to %q, want %q", when, got, want)
		}
	}
	there := "fd12:1::/64 fd70:696c:6100:9::2"
	leads("carried", there)
	if g := n.Gateway(); g.Publications != 1 || g.UnderlayServices != 1 {
		t.Errorf("%+v", g)
	}
	b.Reopen()
	leads("after a start", there)
	if known, _, _ := b.Tenants.Get("green"); !known.Tenant.Equal(b.published(1, made).Tenant) {
		t.Errorf("after a start green is %+v", known.Tenant)
	}
	if r := b.report(true); len(r.HostedTenants)+len(r.Hosting)+len(r.CarriedTenants) > 0 ||
		!slices.Equal(r.IncompleteTenants, []string{"green"}) {
		t.Errorf("it says %v", r)
	}
	must(b.Apply(ctx, []agent.TenantState{b.published(1, made)}, nil))
	if r := b.report(true); len(r.HostedTenants) > 0 || !slices.Equal(r.CarriedTenants, []string{"green"}) {
		t.Errorf("it says %v", r)
	}
	held := b.Tenants.Held(agenttest.NodePrefix)
	if len(held.Tenants) != 1 || len(held.Tenants[0].Ids) > 0 || held.Tenants[0].Created != nil || held.Published != 2 {
		t.Errorf("it holds %v", held)
	}

	// The first endpoint asks, the last one leaves the tenant carried and nothing of its subnets.
	b.Orchestrator.Tenants["green"] = b.published(1, made).Tenant
	b.Nimitz.Subnets = []netip.Prefix{netip.MustParsePrefix("10.0.3.0/24"), netip.MustParsePrefix("fd12:1:0:3::/64")}
	asked := b.Orchestrator.Calls
	_, err := b.Add(ctx, b.Green("c1"))
	must(err)
	if b.Orchestrator.Calls != asked+1 {
		t.Error("no request was sent")
	}
	must(b.Tenants.SetSubnets("green", b.Nimitz.Subnets))
	if r := b.report(false); !slices.Equal(r.HostedTenants, []string{"green"}) {
		t.Errorf("it says %v", r)
	}
	must(b.SetTransit(ctx, nil))
	must(b.SetTransit(ctx, []string{"green"}))
	must(b.Delete(ctx, "c1", "eth0"))
	leads("without the endpoint", there)
	if got := b.Tenants.Subnets("green"); got != nil || len(b.report(false).HostedTenants) > 0 {
		t.Errorf("it has %v", got)
	}

	// One of the same name, made later, is another tenant, and nothing of the old one stands in its way.
	must(b.Apply(ctx, []agent.TenantState{b.published(0, made.Add(time.Hour))}, nil))
	if known, _, _ := b.Tenants.Get("green"); known.Tenant.Changes != 0 {
		t.Errorf("it knows %+v", known.Tenant)
	}
	leads("made anew", "")

	b.Nimitz = nil
	b.Reopen()
	if problems := b.TransitProblems(); len(problems) != 1 ||
		!strings.Contains(problems[0], "green is published at this node, which does not have network nimitz") {
		t.Errorf("problems %q", problems)
	}
	must(b.SetTransit(ctx, nil))
	b.CheckClean()
	if fmt.Sprint(b.TransitProblems()) != "[]" {
		t.Errorf("problems %q", b.TransitProblems())
	}
}

// TestCarriedNoMore: a failed removal is repeated with the next update of the node's record.
func TestCarriedNoMore(t *testing.T) {
	b := newBedOfTwo(t)
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(b.SetTransit(ctx, []string{"green"}))
	must(b.Apply(ctx, []agent.TenantState{b.published(1, time.Unix(5, 0).UTC())}, nil))
	b.Driver.Fail["DeleteTenant"] = agenttest.ErrFake
	if err := b.SetTransit(ctx, nil); !errors.Is(err, agenttest.ErrFake) {
		t.Errorf("a tenant that stays: %v", err)
	}
	delete(b.Driver.Fail, "DeleteTenant")
	must(b.SetTransit(ctx, nil))
	b.CheckClean()
}
