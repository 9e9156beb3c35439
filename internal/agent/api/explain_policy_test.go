package api

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/policy"
)

// TestWhyOfStrangers: two tenants never connect, whatever their policies are, and the error names an address that
// cannot be resolved.
func TestWhyOfStrangers(t *testing.T) {
	b := agenttest.New(t)
	own := b.MustAdd("c1").Attachments[0].Plaintext
	other := address.Split(own)
	other.Tenant++
	for _, c := range []agent.Connection{
		{Source: own, Destination: other.Addr()}, {Source: other.Addr(), Destination: own},
	} {
		reasons, err := b.Why(c)
		if err != nil || len(reasons) != 1 || reasons[0].Allowed || !reasons[0].CrossTenant {
			t.Errorf("%v to %v: %+v, %v", c.Source, c.Destination, reasons, err)
		}
	}
	same := address.Split(own)
	same.Node = netip.MustParsePrefix("fd70:696c:6100:77::/64")
	if reasons, err := b.Why(agent.Connection{Source: same.Addr(), Destination: own}); err != nil ||
		len(reasons) != 1 ||
		!reasons[0].Allowed ||
		reasons[0].CrossTenant {
		t.Errorf("of one tenant: %+v, %v", reasons, err)
	}
	noise := netip.MustParseAddr("fc00::1") // no key decrypts it
	for _, c := range []agent.Connection{{Source: own, Destination: noise}, {Source: noise, Destination: own}} {
		if _, err := b.Why(c); !errors.Is(err, refusal.ErrNever) ||
			!strings.Contains(err.Error(), "cannot resolve fc00::1 to a container") {
			t.Errorf("%v to %v: %v", c.Source, c.Destination, err)
		}
	}
}

// TestWhyOnNimitz: addresses contain neither tenant nor app there, so the request names them; the answer has both
// directions.
func TestWhyOnNimitz(t *testing.T) {
	b := agenttest.NewWithTwoNetworks(t)
	if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
		t.Fatal(err)
	}
	own, other, outside := netip.MustParseAddr(
		"10.0.3.1",
	), netip.MustParseAddr(
		"10.0.9.9",
	), netip.MustParseAddr(
		"192.0.2.1",
	)
	apps := []agent.App{
		{ID: 2, Labels: map[string]string{"app": "db"}}, {ID: 3, Labels: map[string]string{"app": "cache"}},
	}
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: b.Orchestrator.Tenants["green"], Apps: apps}},
		nil); err != nil {
		t.Fatal(err)
	}
	b.MustApplyPolicies(agenttest.AllPolicies("green", agenttest.Document("db", agenttest.MutedDB)))
	ask := func(q agent.Connection) string {
		q.Protocol, q.Port = policy.TCP, 80
		reasons, err := b.Why(q)
		if err != nil {
			kind := refusal.ErrNever
			if q.PeerApp == 0 {
				kind = refusal.ErrInvalid // the command line lacks --peer-app
			}
			if !errors.Is(err, kind) {
				t.Error(err)
			}
			return err.Error()
		}
		var said []string
		for _, r := range reasons {
			said = append(
				said,
				fmt.Sprint(r.Direction, " ", r.Endpoint != nil, " ", r.Own, "-", r.Far, " ", r.Allowed, " ", r.By),
			)
		}
		return strings.Join(said, "; ")
	}
	db := "NetworkPolicy default/db isolates in egress, and no rule accepts"
	for name, c := range map[string]struct {
		of   agent.Connection
		want string
	}{
		"to one that is not here": {agent.Connection{Source: own, Destination: other, PeerApp: 2},
			"egress true 1-2 true <nil>; ingress false 2-1 true <nil>"},
		"from one that is not here": {agent.Connection{Source: other, Destination: own, PeerApp: 2},
			"egress false 2-1 false " + db + "; ingress true 1-2 true <nil>"},
		"from one that may": {agent.Connection{Source: other, Destination: own, PeerApp: 3, Tenant: "green"},
			"egress false 3-1 true <nil>; ingress true 1-3 true <nil>"},
		"to the outside":    {agent.Connection{Source: own, Destination: outside}, "egress true 1-0 true <nil>"},
		"of another tenant": {agent.Connection{Source: own, Destination: outside, Tenant: "blue"}, ""},
		"neither is here":   {agent.Connection{Source: other, Destination: outside}, ""},
		"an app that is not said": {agent.Connection{Source: own, Destination: other},
			"10.0.9.9 is not on this node, and addresses of network nimitz or evpn do not contain the app; set " +
				"--peer-app"},
		"an app that there is not": {agent.Connection{Source: own, Destination: other, PeerApp: 77},
			"tenant green has no app 77"},
		"an address of either network": {agent.Connection{Source: own,
			Destination: netip.MustParseAddr("fd70:696c:6100:2:0:100:100:7")}, "egress true 1-0 true <nil>"},
	} {
		if got := ask(c.of); got != c.want && !(strings.HasPrefix(got, c.want) && c.want != "") {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}
