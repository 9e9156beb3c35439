package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
)

// Status and metrics count services, their endpoints, and what clients here do.
func TestServices(t *testing.T) {
	b := newServiceBed(t)
	b.service.Serve(b.Core, nil)
	r := b.MustAdd("c1")
	if s := b.service.status(t.Context()); s.Services != nil {
		t.Errorf("without services: %v", s.Services)
	}
	blue := b.Orchestrator.Tenants["blue"]
	blue.ServicesNumber, blue.Changes = 5, blue.Changes+1
	if err := b.Core.Apply(t.Context(), []agent.TenantState{{Tenant: blue}}, nil); err != nil {
		t.Fatal(err)
	}
	web := service.Service{
		Tenant: "blue", Name: service.Name{Namespace: "shop", Name: "web"},
		Address: netip.MustParseAddr("fd70:696c:7300:5::1"),
		Ports:   []service.Port{{Protocol: service.UDP, Port: 53}},
		// hosts outside reach it, too
		ExternalIPs: []netip.Addr{netip.MustParseAddr("2001:db8:7::9")},
	}
	fixed := service.Slice{Tenant: "blue", Service: web.Name, Name: "fixed", Endpoints: []service.Endpoint{
		{Address: r.Attachments[0].Plaintext}, {Address: r.Attachments[0].Plaintext.Next()},
	}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); b.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	b.ApplyServices(services.Update{
		Tenant: "blue", Whole: true, Services: []service.Service{web}, Slices: []service.Slice{fixed},
	})
	key := dpapi.FrontendKey{Address: netip.MustParseAddrPort("[fd70:696c:7300:5::1]:53"), Protocol: 17}
	agenttest.Eventually(t, func() error {
		if f, ok, err := b.Driver.LookupService(key); !ok || len(f.Backends) != 2 {
			return fmt.Errorf("the packet path has %+v, %w", f, err)
		}
		return nil
	})
	if s := b.service.status(t.Context()).Services; s.GetServices() != 1 || s.Endpoints != 2 || s.Own != 0 {
		t.Errorf("status %v", s)
	}
	b.Driver.Count(key, dpapi.ServiceCounts{Flows: 4, Refused: 2})
	key.Address = netip.MustParseAddrPort("[2001:db8:7::9]:53")
	b.Driver.Count(key, dpapi.ServiceCounts{Flows: 3})
	no, yes := false, true
	for _, step := range []struct {
		set  *pilasterv1.SetEndpointRequest
		want endpoint.Conditions
	}{
		{&pilasterv1.SetEndpointRequest{Ready: &no}, endpoint.Conditions{NotReady: true}},
		{&pilasterv1.SetEndpointRequest{Terminating: &yes}, endpoint.Conditions{NotReady: true, Terminating: true}},
		{&pilasterv1.SetEndpointRequest{Ready: &yes}, endpoint.Conditions{Terminating: true}},
	} {
		step.set.Key = "c1"
		resp, err := b.client.SetEndpoint(t.Context(), connect.NewRequest(step.set))
		if err != nil || resp.Msg.Endpoint.NotReady != step.want.NotReady ||
			resp.Msg.Endpoint.Terminating != step.want.Terminating {
			t.Errorf("%v: %v, %v", step.set, resp, err)
		}
	}
	none := connect.NewRequest(&pilasterv1.SetEndpointRequest{Key: "c9"})
	if _, err := b.client.SetEndpoint(t.Context(), none); err == nil {
		t.Error("conditions of no endpoint were set")
	}
	w := httptest.NewRecorder()
	b.service.ObserveHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	metrics, _ := io.ReadAll(w.Body)
	for _, line := range []string{
		"pilaster_services 1",
		`pilaster_service_endpoints{place="away"} 2`, `pilaster_service_endpoints{place="here"} 0`,
		`pilaster_service_flows_total{port="53",protocol="UDP",service="shop/web",tenant="blue"} 7`,
		`pilaster_service_refused_total{port="53",protocol="UDP",service="shop/web",tenant="blue"} 2`,
	} {
		if !strings.Contains(string(metrics), "\n"+line+"\n") {
			t.Errorf("metrics lack %q", line)
		}
	}
}
