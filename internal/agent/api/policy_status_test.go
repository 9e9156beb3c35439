package api

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/dpapi"
)

// Events and counts have the name of the rule that denied, and metrics the name of its policy.
func TestRulesAreNamed(t *testing.T) {
	b := newServiceBed(t)
	b.service.Serve(b.Core, nil)
	b.MustAdd("c1")
	if s := b.service.status(t.Context()); s.Policies != nil {
		t.Errorf("a node without policies says %v", s.Policies)
	}
	audited := strings.Replace(
		strings.Replace(agenttest.DenyAll,
			`"name":"deny"`, `"name":"tried","annotations":{"pilaster.io/audit":"true"}`, 1),
		"Ingress",
		"Egress",
		1,
	)
	b.MustApplyPolicies(
		agenttest.AllPolicies("blue",
			agenttest.Document("web", agenttest.WebFromDB), agenttest.Document("tried", audited)),
	)
	b.Driver.Hits = map[uint32]uint64{}
	var isolation uint32
	for number, name := range b.Driver.Policies["blue"].Tables.Names {
		if strings.Contains(name.String(), "isolates") {
			b.Driver.Hits[number] = 3
			if name.Audit {
				b.Driver.Hits[number] = 5
			} else {
				isolation = number
			}
		}
	}
	b.Driver.Hits[12345] = 9 // a rule that no longer exists
	b.Driver.SessionTable = dpapi.Sessions{
		Capacity: 700,
		Used:     10,
		HalfOpen: 4,
		Begun:    20,
		Evicted:  2,
		Refused:  1,
		Largest:  1,
		Most:     8,

		LargestTenant: uint32(b.Driver.Policies["blue"].IDs[0]),
		MostOfTenant:  9,
	}

	const rule = "NetworkPolicy default/web isolates in ingress, and no rule accepts"
	for _, e := range []dpapi.Event{{Endpoint: 1, Rule: isolation}, {Rule: isolation}} {
		if m := eventToProto(b.Core, e); m.Rule.GetRule() != rule || m.Rule.GetPolicy() != "NetworkPolicy default/web" {
			t.Errorf("%+v is by %v", e, m.Rule)
		}
	}
	if m := eventToProto(b.Core, dpapi.Event{Endpoint: 1, Rule: 12345}); m.Rule != nil {
		t.Errorf("a rule that is not known is %v", m.Rule)
	}

	resp, err := b.client.ListRuleHits(t.Context(), connect.NewRequest(&pilasterv1.ListRuleHitsRequest{Tenant: "blue"}))
	if err != nil {
		t.Fatal(err)
	}
	if h := resp.Msg.Hits; len(h) != 2 || h[0].Rule.Policy != "NetworkPolicy default/tried" || !h[0].Rule.Audit ||
		h[0].Packets != 5 ||
		h[1].Rule.Rule != rule ||
		h[1].Packets != 3 {
		t.Errorf("hits %v", h)
	}
	if resp, err = b.client.ListRuleHits(t.Context(),
		connect.NewRequest(&pilasterv1.ListRuleHitsRequest{Tenant: "red"})); err != nil ||
		len(resp.Msg.Hits) != 0 {
		t.Errorf("of another tenant %v, %v", resp, err)
	}

	p := b.service.status(t.Context()).Policies
	if p.GetTenants() != 1 || p.Rules < 2 || len(p.Entries) == 0 || len(p.Hits) != 2 ||
		p.Sessions.GetLargest() != "default/c1" || p.Sessions.GetLargestTenant() != "blue" ||
		p.Sessions.HalfOpen != 4 {
		t.Errorf("status %v", p)
	}
	w := httptest.NewRecorder()
	b.service.ObserveHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	metrics, _ := io.ReadAll(w.Body)
	for _, line := range []string{
		`pilaster_policy_tenants 1`, `pilaster_table_entries{table="policy-ports"} 7`,
		`pilaster_table_capacity{table="policy-ports"} 100`,
		`pilaster_policy_denied_packets_total{mode="enforce",policy="NetworkPolicy default/web",tenant="blue"} 3`,
		`pilaster_policy_denied_packets_total{mode="audit",policy="NetworkPolicy default/tried",tenant="blue"} 5`,
		`pilaster_sessions{state="half-open"} 4`, `pilaster_sessions{state="established"} 6`,
		`pilaster_sessions_capacity 700`,
		`pilaster_sessions_largest_endpoint{endpoint="1",name="default/c1"} 8`,
		`pilaster_sessions_largest_tenant{tenant="blue"} 9`,
		`pilaster_sessions_total{event="evicted"} 2`,
		`pilaster_policy_compile_duration_seconds_count 1`,
	} {
		if !strings.Contains(string(metrics), line+"\n") {
			t.Errorf("no %s", line)
		}
	}
}
