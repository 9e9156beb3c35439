package agent_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// web is a service of tenant blue for containers with app=web.
func web() service.Service {
	prefix, _ := address.DefaultPlan().TenantServices(5)
	return service.Service{
		Tenant: "blue", Name: service.Name{Name: "web"}, Address: prefix.Addr().Next(),
		Selector: map[string]string{"app": "web"}, Ports: []service.Port{{Protocol: service.TCP, Port: 80}},
	}
}

// blueHasServices gives tenant blue a number for services. Its next first container waits for them.
func blueHasServices(b *bed) {
	b.T.Helper()
	blue := b.Orchestrator.Tenants["blue"]
	blue.ServicesNumber = 5
	b.Orchestrator.Tenants["blue"] = blue
	if err := b.Apply(b.T.Context(), []agent.TenantState{{Tenant: blue}}, nil); err != nil {
		b.T.Fatal(err)
	}
}

// runServices keeps the services of a core until the test ends. The stream sends what the node reports.
func runServices(b *bed) {
	b.Reports.Taken = func(s service.Slice) {
		u := services.Update{Tenant: s.Tenant, Slices: []service.Slice{s}}
		if len(s.Endpoints) == 0 {
			u.Slices, u.EndedSlices = nil, []services.SliceName{{Service: s.Service, Name: s.Name}}
		}
		b.ApplyServices(u)
	}
	ctx, cancel := context.WithCancel(b.T.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); b.Run(ctx) }()
	b.T.Cleanup(func() { cancel(); <-ended })
}

// awaitServices waits until these containers are the endpoints that are reported, and those in the packet path.
func awaitServices(b *bed, want ...string) {
	b.T.Helper()
	agenttest.Eventually(b.T, func() error {
		var reported, here []string
		for _, s := range b.Reports.All() {
			if s.Name != "n1.0" || s.Zone != "z1" {
				return fmt.Errorf("slice %+v", s)
			}
			for _, e := range s.Endpoints {
				reported = append(reported, strings.TrimPrefix(e.Name, "default/"))
			}
		}
		for _, f := range b.Driver.Frontends.All() {
			for _, e := range f.Backends {
				r, err := b.Find(e.Plain.String())
				if err != nil || r.On(tenant.Netpila).Attachments[0].Address != e.Seen {
					return fmt.Errorf("backend %+v, %w", e, err)
				}
				here = append(here, r.ContainerID)
			}
		}
		if slices.Sort(here); !slices.Equal(reported, want) || !slices.Equal(here, want) {
			return fmt.Errorf("reported %q, here %q, want %q", reported, here, want)
		}
		return nil
	})
}

// TestEndpointsOfServices: a container is an endpoint of the services that select it from the end of its ADD to the
// beginning of its DEL.
func TestEndpointsOfServices(t *testing.T) {
	b := newBed(t)
	runServices(b)
	b.MustAdd("c1")
	blueHasServices(b)
	b.ApplyServices(services.Update{Tenant: "blue", Whole: true, Services: []service.Service{web()}})
	awaitServices(b, "c1")

	var during []string
	b.Driver.During = func(call string, r endpoint.Record) {
		has := slices.ContainsFunc(b.Created(), func(is endpoint.Record) bool {
			return is.ContainerID == "c2" && is.State == endpoint.Active
		})
		if r.ContainerID == "c2" && has {
			during = append(during, call)
		}
	}
	b.MustAdd("c2")
	awaitServices(b, "c1", "c2")
	if _, err := b.Label(t.Context(), "c1", agent.LabelChange{Set: map[string]string{"app": "db"}}); err != nil {
		t.Fatal(err)
	}
	awaitServices(b, "c2")
	if _, err := b.Label(t.Context(), "c1", agent.LabelChange{Set: map[string]string{"app": "web"}}); err != nil {
		t.Fatal(err)
	}
	awaitServices(b, "c1", "c2")
	no, yes := false, true
	if _, err := b.SetConditions(t.Context(), "c1", agent.ConditionChange{Ready: &no}); err != nil {
		t.Fatal(err)
	}
	agenttest.Eventually(t, func() error {
		s := b.Reports.All()
		for _, f := range b.Driver.Frontends.All() {
			if len(f.Backends) == 1 && len(f.Draining) == 1 && len(s) == 1 &&
				s[0].Endpoints[0].NotReady != s[0].Endpoints[1].NotReady {
				return nil
			}
		}
		return fmt.Errorf("reported %+v, here %+v", s, b.Driver.Frontends.All())
	})
	if r, _ := b.Store.Find("c1", "eth0"); !r.Conditions.NotReady {
		t.Errorf("the record is %+v", r)
	}
	if _, err := b.SetConditions(t.Context(), "c1", agent.ConditionChange{Ready: &yes}); err != nil {
		t.Fatal(err)
	}
	awaitServices(b, "c1", "c2")
	if err := b.Delete(t.Context(), "c2", "eth0"); err != nil {
		t.Fatal(err)
	}
	awaitServices(b, "c1")
	if b.Driver.During = nil; len(during) > 0 {
		t.Errorf("c2 was an endpoint during %q", during)
	}

	b.Driver.Mu.Lock()
	b.Driver.Lost["c1"] = errors.New("its device is gone")
	b.Driver.Mu.Unlock()
	_ = b.MarkLost(t.Context(), func(endpoint.Record) bool { return true })
	awaitServices(b)
}

// TestAddAwaitsServices: the first container of a tenant with services is ready once they are in the packet path.
func TestAddAwaitsServices(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c0") // of a tenant without services: waits for nothing
	if err := b.Delete(t.Context(), "c0", "eth0"); err != nil {
		t.Fatal(err)
	}
	blueHasServices(b)
	runServices(b)
	b.Driver.During = func(call string, r endpoint.Record) {
		if call == "Activate" {
			b.Driver.During = nil
			go b.ApplyServices(services.Update{Tenant: "blue", Whole: true, Services: []service.Service{web()}})
		}
	}
	b.MustAdd("c1")
	if all := b.Driver.Frontends.All(); len(all) != 1 {
		t.Errorf("the packet path has %+v at the end of the ADD", all)
	}
	begin := time.Now()
	b.MustAdd("c2")
	b.Reopen() // with containers: the packet path has their services from before
	b.MustAdd("c3")
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("later ADDs took %v", took)
	}
}

// TestServicesOfAnAddThatFails: what fails after the record was written has been no endpoint.
func TestServicesOfAnAddThatFails(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	b.Driver.Fail["Activate"] = agenttest.ErrFake
	if _, err := b.Add(t.Context(), b.Request("c2")); err == nil {
		t.Fatal("no error")
	}
	delete(b.Driver.Fail, "Activate")
	b.MustAdd("c2")
	if len(b.Created()) != 2 {
		t.Errorf("endpoints %+v", b.Created())
	}
}

// TestServicesOfTenants: a key that rotates is used at once, and services go with the last container of their tenant.
func TestServicesOfTenants(t *testing.T) {
	b := newBed(t)
	runServices(b)
	r := b.MustAdd("c1")
	blueHasServices(b)
	rotated := address.Plain{Node: agenttest.NodePrefix, Tenant: 9, App: 1, Index: 7}.Addr()
	fixed := service.Slice{
		Tenant: "blue", Service: web().Name, Name: "fixed", Endpoints: []service.Endpoint{{Address: rotated}},
	}
	b.ApplyServices(services.Update{
		Tenant: "blue", Whole: true, Services: []service.Service{web()}, Slices: []service.Slice{fixed},
	})
	awaitServices(b, "c1")
	if problems := strings.Join(b.Problems(), "\n"); !strings.Contains(problems, "1 endpoint under tenant ids") {
		t.Errorf("problems %q", problems)
	}
	blue := b.Orchestrator.Tenants["blue"]
	blue.IDs, blue.Changes = append(slices.Clone(blue.IDs), tenant.ID{ID: 9, Key: address.Key{9}}), blue.Changes+1
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: blue}}, nil); err != nil {
		t.Fatal(err)
	}
	agenttest.Eventually(t, func() error {
		for _, f := range b.Driver.Frontends.All() {
			if len(f.Backends) == 2 && f.Backends[0].Plain == r.Attachments[0].Plaintext &&
				f.Backends[1].Seen == address.NewCipher(address.Key{9}).Encrypt(rotated) {
				return nil
			}
		}
		return fmt.Errorf("frontends %+v", b.Driver.Frontends.All())
	})
	if s := b.Services(false); s.Services != 1 || s.Endpoints != 2 || s.Own != 1 || len(b.Problems()) > 0 {
		t.Errorf("status %+v, problems %q", s, b.Problems())
	}
	if err := b.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	if all := b.Driver.Frontends.All(); len(all) > 0 || b.Services(false).Services > 0 {
		t.Errorf("frontends %+v of a tenant without containers", all)
	}
	b.CheckClean()
}

// TestEndpointsThatMigrate: containers are endpoints from when they join network netpila.
func TestEndpointsThatMigrate(t *testing.T) {
	b := newBedThatMoves(t)
	for _, c := range []string{"c1", "c2"} {
		if _, err := b.Label(t.Context(), c, agent.LabelChange{Set: map[string]string{"app": "web"}}); err != nil {
			t.Fatal(err)
		}
	}
	runServices(b)
	green := b.Orchestrator.Tenants["green"]
	green.ServicesNumber = 5
	b.Orchestrator.Tenants["green"] = green
	b.step(1)
	of := web()
	of.Tenant = "green"
	b.ApplyServices(services.Update{Tenant: "green", Whole: true, Services: []service.Service{of}})
	agenttest.Eventually(t, func() error {
		if len(b.Driver.Frontends.All()) == 0 {
			return errors.New("the service is not in the packet path")
		}
		return nil
	})
	b.movesAll() // Run may have done so already
	awaitServices(b, "c1", "c2")
	b.step(2)
	b.movesAll()
	awaitServices(b, "c1", "c2")
}

// TestServicesOfADeletedTenant: they stay as long as its containers.
func TestServicesOfADeletedTenant(t *testing.T) {
	b := newBed(t)
	runServices(b)
	b.MustAdd("c1")
	blueHasServices(b)
	b.ApplyServices(services.Update{Tenant: "blue", Whole: true, Services: []service.Service{web()}})
	if err := b.Apply(t.Context(), nil, []string{"blue"}); err != nil {
		t.Fatal(err)
	}
	b.ApplyServices(services.Update{Tenant: "blue", Whole: true})
	awaitServices(b, "c1")
}

// TestWhyOfService: the verdicts for a service are those for its endpoints, of at most ten, and say so first.
func TestWhyOfService(t *testing.T) {
	b := newBed(t)
	blueHasServices(b)
	c1, c2 := b.MustAdd("c1"), b.MustAdd("c2")
	here := func(r endpoint.Record) dpapi.Backend {
		return dpapi.Backend{Plain: r.Attachments[0].Plaintext, Seen: r.Attachments[0].Address, Port: 8080}
	}
	far := address.Split(c1.Attachments[0].Plaintext)
	far.Node = netip.MustParsePrefix("fd70:696c:6100:77::/64")
	many := []dpapi.Backend{here(c2), here(c1)}
	for range 12 {
		far.Index++
		many = append(many, dpapi.Backend{Plain: far.Addr(), Seen: netip.MustParseAddr("fc00::7"), Port: 8080})
	}
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("web", `{"apiVersion":"networking.k8s.io/v1",
		"kind":"NetworkPolicy","metadata":{"name":"web"},"spec":{"podSelector":{},"ingress":[{"ports":[{"port":8080}]}]}}`)))
	of := agent.Connection{
		Source: c1.Attachments[0].Address, Destination: web().Address, Protocol: uint8(service.TCP), Port: 80,
	}
	for _, c := range []struct {
		backends []dpapi.Backend
		allowed  bool
		says     string
		want     int
	}{
		{nil, false, "the service has no endpoint for clients on this node", 1},
		{many[:1], true, "the service has 1 endpoint, of which a connection gets one at random; policies see", 3},
		{many, true, "14 endpoints, of which a connection gets one at random; policies see the endpoint and its " +
			"port; these are the verdicts for 10", 1 + 2 + 1 + 8},
	} {
		key := dpapi.FrontendKey{Address: netip.AddrPortFrom(of.Destination, of.Port), Protocol: of.Protocol}
		if err := b.Driver.PutServices([]dpapi.Frontend{{FrontendKey: key, Backends: c.backends}}); err != nil {
			t.Fatal(err)
		}
		got, err := b.Why(of)
		if err != nil || len(got) != c.want || got[0].Allowed != c.allowed || !strings.HasPrefix(got[0].Access, "the "+
			"service has ") || !strings.Contains(got[0].Access, c.says) || got[0].Backend.IsValid() {
			t.Fatalf("%d backends: %d reasons %+v, %v; want %d, first %v %s", len(c.backends), len(got), got, err,
				c.want, c.allowed, c.says)
		}
		for i, r := range got[1:] {
			if want := netip.AddrPortFrom(c.backends[max(0, i-1)].Seen, 8080); r.Backend != want || !r.Allowed ||
				r.Direction == policy.Egress && r.Endpoint.ID != c1.ID ||
				r.Direction == policy.Ingress && (r.By == nil || r.Endpoint.ID != c2.ID ||
					r.Peer != c1.Attachments[0].Plaintext) {
				t.Errorf("reason %d of %d backends: %+v, want backend %v", i+1, len(c.backends), r, want)
			}
		}
	}
	of.Port = 81
	if got, err := b.Why(of); err != nil || len(got) != 1 || got[0].Allowed ||
		!strings.Contains(got[0].Access, "tenant blue has no service with this address and port 81/TCP") {
		t.Errorf("another port: %+v, %v", got, err)
	}
}
