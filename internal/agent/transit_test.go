package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// published is green with a container on another node that this one's gateway publishes, made at a time.
func (b *bed) published(changes uint64, made time.Time) TenantState {
	green := b.orchestrator.tenants["green"]
	green.Overlays = append(
		slices.Clone(green.Overlays[:1]),
		tenant.Overlay{CIDR: netip.MustParsePrefix("fd12:1::/48"), NodeBits: 64},
	)
	green.Changes, green.Created = changes, made
	green.Publications = []tenant.Publication{{
		Name: "web", Container: netip.MustParseAddr("fd12:1::9"), Gateway: nodePrefix,
		Underlay: tenant.UnderlayAddress(nodePrefix, 2),
	}}
	green.Services = []tenant.Service{
		{Name: "storage", Virtual: netip.MustParseAddr("fd09::7"), Real: netip.MustParseAddr("2001:db8::9")},
	}
	return TenantState{Tenant: green, Whole: true}
}

func (b *bed) report(first bool) *pilasterv1.FollowRequest {
	var r pilasterv1.FollowRequest
	b.tenants.Report(&r, first)
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
	must(b.Apply(ctx, []TenantState{b.published(1, made)}, nil))
	b.clean() // neither hosted nor carried
	must(b.SetTransit(ctx, []string{"green", "unknown"}))
	must(b.Apply(ctx, []TenantState{b.published(1, made)}, nil))
	n := b.networks["nimitz"].(interface {
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
		if got := b.nimitz.remote(3); got != want {
			t.Errorf("%s: the switch leads to %q, want %q", when, got, want)
		}
	}
	there := "fd12:1::/64 fd70:696c:6100:9::2"
	leads("carried", there)
	if g := n.Gateway(); g.Publications != 1 || g.Services != 1 {
		t.Errorf("%+v", g)
	}
	b.reopen()
	leads("after a start", there)
	if known, _, _ := b.tenants.get("green"); !known.Tenant.Equal(b.published(1, made).Tenant) {
		t.Errorf("after a start green is %+v", known.Tenant)
	}
	if r := b.report(true); len(r.HostedTenants)+len(r.Hosting)+len(r.CarriedTenants) > 0 ||
		!slices.Equal(r.IncompleteTenants, []string{"green"}) {
		t.Errorf("it says %v", r)
	}
	must(b.Apply(ctx, []TenantState{b.published(1, made)}, nil))
	if r := b.report(true); len(r.HostedTenants) > 0 || !slices.Equal(r.CarriedTenants, []string{"green"}) {
		t.Errorf("it says %v", r)
	}
	held := b.tenants.held(nodePrefix)
	if len(held.Tenants) != 1 || len(held.Tenants[0].Ids) > 0 || held.Tenants[0].Created != nil || held.Published != 2 {
		t.Errorf("it holds %v", held)
	}

	// The first endpoint asks, the last one leaves the tenant carried and nothing of its subnets.
	b.orchestrator.tenants["green"] = b.published(1, made).Tenant
	b.nimitz.subnets = []netip.Prefix{netip.MustParsePrefix("10.0.3.0/24"), netip.MustParsePrefix("fd12:1:0:3::/64")}
	asked := b.orchestrator.calls
	_, err := b.Add(ctx, b.green("c1"))
	must(err)
	if b.orchestrator.calls != asked+1 {
		t.Error("no request was sent")
	}
	must(b.tenants.setSubnets("green", b.nimitz.subnets))
	if r := b.report(false); !slices.Equal(r.HostedTenants, []string{"green"}) {
		t.Errorf("it says %v", r)
	}
	must(b.SetTransit(ctx, nil))
	must(b.SetTransit(ctx, []string{"green"}))
	must(b.Delete(ctx, "c1", "eth0"))
	leads("without the endpoint", there)
	if got := b.tenants.subnets("green"); got != nil || len(b.report(false).HostedTenants) > 0 {
		t.Errorf("it has %v", got)
	}

	// One of the same name, made later, is another tenant, and nothing of the old one stands in its way.
	must(b.Apply(ctx, []TenantState{b.published(0, made.Add(time.Hour))}, nil))
	if known, _, _ := b.tenants.get("green"); known.Tenant.Changes != 0 {
		t.Errorf("it knows %+v", known.Tenant)
	}
	leads("made anew", "")

	b.nimitz = nil
	b.reopen()
	if problems := b.transitProblems(); len(problems) != 1 ||
		!strings.Contains(problems[0], "green is published at this node, which does not have network nimitz") {
		t.Errorf("problems %q", problems)
	}
	must(b.SetTransit(ctx, nil))
	b.clean()
	if fmt.Sprint(b.transitProblems()) != "[]" {
		t.Errorf("problems %q", b.transitProblems())
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
	must(b.Apply(ctx, []TenantState{b.published(1, time.Unix(5, 0).UTC())}, nil))
	b.driver.fail["DeleteTenant"] = errFake
	if err := b.SetTransit(ctx, nil); !errors.Is(err, errFake) {
		t.Errorf("a tenant that stays: %v", err)
	}
	delete(b.driver.fail, "DeleteTenant")
	must(b.SetTransit(ctx, nil))
	b.clean()
}
