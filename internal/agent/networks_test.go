package agent_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// TestNetworksSideBySide: an endpoint has entries only in its tenant's network, keeps them over a restart, and leaves
// none when it is deleted.
func TestNetworksSideBySide(t *testing.T) {
	b := newBedOfTwo(t)
	blue := b.MustAdd("c1")
	green, err := b.Add(t.Context(), b.Green("c2"))
	if err != nil {
		t.Fatal(err)
	}
	if a := green.Attachments; len(a) != 1 || a[0].Network != nimitz.Name || a[0].Address.String() != "10.0.3.1" ||
		green.Device.MTU != 1500-pipeline.Overhead {
		t.Errorf("record %+v", green)
	}
	here := b.Explain(netip.MustParseAddr("10.0.3.1")).Overlays
	if len(here) != 1 || here[0].Tenant != "green" || !here[0].CIDR.Contains(green.Attachments[0].Address) ||
		here[0].Endpoint == nil ||
		here[0].Endpoint.ID != green.ID {
		t.Errorf("its address is explained as %+v", here)
	}
	known, _, _ := b.Tenants.Get("green")
	known.Tenant.UnderlayServices = []tenant.UnderlayService{
		{Name: "host", Virtual: netip.MustParseAddr("fd09::7"), Real: netip.MustParseAddr("2001:db8:70::2")},
	}
	got := agent.ExplainUnderlayServices([]agent.TenantState{known}, netip.MustParseAddr("fd09::7"))
	if len(got) != 1 || got[0].Tenant != "green" || got[0].Name != "host" {
		t.Errorf("an underlay service is explained as %+v", got)
	}
	if none := b.Explain(netip.MustParseAddr("192.0.2.1")).Overlays; len(none) > 0 {
		t.Errorf("a foreign address is explained as %+v", none)
	}
	check := func() {
		t.Helper()
		if len(b.Driver.Active) != 1 || len(b.Driver.Tenants) != 1 || b.Driver.Active[blue.ID].ID != blue.ID {
			t.Errorf("netpila has %v and tenants %v", b.Driver.Active, b.Driver.Tenants)
		}
		if fmt.Sprint(b.Nimitz.Ports) != fmt.Sprintf("map[container %d:%s]", green.ID, green.Device.HostName) ||
			len(b.Nimitz.Has) != 4 {
			t.Errorf("nimitz has %v and %v", b.Nimitz.Ports, b.Nimitz.Has)
		}
		for _, q := range []agent.CheckRequest{{ContainerID: "c1"},
			{ContainerID: "c2", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.3.1/32")}}} {
			q.Interface, q.Netns = "eth0", "/run/netns/"+q.ContainerID
			if err := b.Check(t.Context(), q); err != nil {
				t.Error(err)
			}
		}
	}
	check()
	b.Driver.LinkMTU = 1400
	if err := b.FollowMTU(t.Context()); err != nil || b.mtus()["c1"] != 1400 ||
		b.mtus()["c2"] != 1400-pipeline.Overhead {
		t.Errorf("MTUs %v, %v", b.mtus(), err)
	}
	b.Reopen()
	check()
	if r, err := b.Find("10.0.3.1"); err != nil || r.ID != green.ID {
		t.Errorf("found %+v, %v", r, err)
	}
	for _, c := range []string{"c1", "c2"} {
		if err := b.Delete(t.Context(), c, "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	b.CheckClean()
	if len(b.Nimitz.Ports) > 0 || len(b.Nimitz.Has) != 1 {
		t.Errorf("nimitz has %v and %v", b.Nimitz.Ports, b.Nimitz.Has)
	}
}

// TestNetworkThatIsNotHere: a node without a tenant's network refuses the tenant's containers, and does not start if it
// already has some.
func TestNetworkThatIsNotHere(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	with := b.Nimitz
	b.Nimitz = nil
	calls := len(b.Driver.Calls)
	if err := b.TryReopen(); err == nil ||
		!strings.Contains(
			err.Error(),
			"endpoint 1 is on network nimitz, which this node does not have\n  packets flow as before; start the "+
				"agent with --some switch, or",
		) ||
		len(b.Driver.Calls) != calls {
		t.Errorf("started with an endpoint on it: %v, %v", err, b.Driver.Calls[calls:])
	}
	b.Nimitz = with
	b.Reopen()
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.Nimitz = nil
	b.Reopen()
	if _, err := b.Add(t.Context(), b.Green("c2")); !errors.Is(err, refusal.ErrUnavailable) ||
		!strings.Contains(
			err.Error(),
			"tenant green is on network nimitz, which this node does not have\n  nothing was changed; start the "+
				"agent with --some switch, or",
		) {
		t.Errorf("an ADD: %v", err)
	}
	b.CheckClean()
}

// TestSwitchThatRefuses: an ADD that fails in the switch leaves nothing.
func TestSwitchThatRefuses(t *testing.T) {
	b := newBedOfTwo(t)
	b.Nimitz.Fail = agenttest.ErrFake
	if _, err := b.Add(t.Context(), b.Green("c1")); !errors.Is(err, agenttest.ErrFake) {
		t.Errorf("an ADD: %v", err)
	}
	b.CheckClean()
	if len(b.Nimitz.Ports) > 0 {
		t.Errorf("ports are left: %v", b.Nimitz.Ports)
	}
}

// TestEndpointOnTwoNetworks: an endpoint on two networks, as during a migration, has entries in both.
func TestEndpointOnTwoNetworks(t *testing.T) {
	b := newBedOfTwo(t)
	r, err := b.Add(t.Context(), b.Green("c1"))
	if err != nil {
		t.Fatal(err)
	}
	green := b.Orchestrator.Tenants["green"]
	more, err := b.Networks[tenant.Netpila].Prepare(t.Context(), green, r.App, r)
	if err != nil {
		t.Fatal(err)
	}
	r.Attachments = append(r.Attachments, more...)
	if err := b.Store.Put(r); err != nil {
		t.Fatal(err)
	}
	b.Reopen()
	if got := b.Driver.Active[r.ID]; len(got.Attachments) != 1 || got.Attachments[0].Network != tenant.Netpila ||
		len(b.Nimitz.Has) != 4 {
		t.Errorf("netpila has %+v, nimitz %v", got, b.Nimitz.Has)
	}
	if r, _ := b.Store.Get(r.ID); r.Overhead() != pipeline.Overhead || r.State != endpoint.Active {
		t.Errorf("record %+v", r)
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.CheckClean()
}

// TestDropsOfSwitches: each status adds the current drops of a network's switch to the driver's, and lists the switch's
// missing features once.
func TestDropsOfSwitches(t *testing.T) {
	b := newBedOfTwo(t)
	b.Driver.Health.Drops = []dpapi.Drops{{Reason: "src-not-own", Packets: 7}, {Reason: "no-route", Packets: 1}}
	b.Nimitz.Dropped = map[dropreason.Reason]uint64{dropreason.SrcNotOwn: 5}
	for range 2 {
		s, err := b.DatapathStatus(t.Context())
		if err != nil || fmt.Sprint(s.Drops) != "[{src-not-own 12} {no-route 1}]" || len(s.Problems) != 0 ||
			!slices.Equal(s.Without, []string{"traceroute"}) ||
			len(s.Switches) != 1 ||
			s.Switches[nimitz.Name] != "fake" {
			t.Errorf("drops %v, problems %v, without %v, %v", s.Drops, s.Problems, s.Without, err)
		}
	}
	b.Nimitz.Fail = agenttest.ErrFake
	if s, err := b.DatapathStatus(t.Context()); err != nil || len(s.Problems) != 1 ||
		!strings.Contains(s.Problems[0], "reading the drop counters of network nimitz failed") {
		t.Errorf("problems %v, %v", s.Problems, err)
	}
}
