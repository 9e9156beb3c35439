package agent_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// publishing is an ADD with host port 8080.
func (b *bed) publishing(container string) agent.AddRequest {
	q := b.Request(container)
	q.HostPorts = []endpoint.HostPort{{Host: 8080, Container: 80, Protocol: "TCP"}}
	return q
}

// frontends are the ports of this node in the packet path, and the ports of the containers behind them.
func (b *bed) frontends() (all []string) {
	for key, f := range b.Driver.Frontends.All() {
		all = append(all, strings.TrimSpace(key.Address.String()+" "+f.Backends[0].Seen.String()))
	}
	slices.Sort(all)
	return all
}

const hostPort8080 = "[fd70:696c:6100:1::1]:8080 "

// TestHostPorts: a container with a host port makes its tenant get a number for services, has a default route, and its
// port is in the packet path while it lives, also for the next agent.
func TestHostPorts(t *testing.T) {
	b, ctx := newBed(t), t.Context()
	b.MustAdd("c0")
	r, err := b.Add(ctx, b.publishing("c1"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{hostPort8080 + r.Attachments[0].Address.String()}
	if known, _, _ := b.Tenants.Get("blue"); known.Tenant.ServicesNumber == 0 || !slices.Equal(b.frontends(), want) {
		t.Errorf("number %d, frontends %v, want a number and %v", known.Tenant.ServicesNumber, b.frontends(), want)
	}
	if other, _ := b.Store.Find("c0", "eth0"); !slices.Contains(r.Attachments[0].Routes, endpoint.DefaultRoute) ||
		slices.Contains(other.Attachments[0].Routes, endpoint.DefaultRoute) {
		t.Errorf("routes %v, and %v without host ports", r.Attachments[0].Routes, other.Attachments[0].Routes)
	}
	calls := b.Orchestrator.Calls
	b.Reopen()
	if again, _ := b.Store.Find("c1", "eth0"); !slices.Equal(again.HostPorts, r.HostPorts) {
		t.Errorf("the next agent knows host ports %v", again.HostPorts)
	}
	if _, err := b.Add(ctx, b.publishing("c2")); !errors.Is(err, refusal.ErrExhausted) ||
		!strings.Contains(err.Error(), "container default/c1 (endpoint 2)") || b.Orchestrator.Calls != calls {
		t.Errorf("a host port that is taken: %v; %d calls of the orchestrator", err, b.Orchestrator.Calls-calls)
	}
	if err := b.Delete(ctx, "c1", "eth0"); err != nil || len(b.frontends()) > 0 {
		t.Errorf("after DEL: %v, %v", err, b.frontends())
	}
	if r, err = b.Add(ctx, b.publishing("c2")); err != nil {
		t.Fatal(err)
	}
	if err := b.Delete(ctx, "c0", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.Driver.Mu.Lock()
	b.Driver.Lost["c2"] = errors.New("its device is gone")
	b.Driver.Mu.Unlock()
	if err := b.MarkLost(ctx, func(endpoint.Record) bool { return true }); err != nil || len(b.frontends()) > 0 {
		t.Errorf("without its device: %v, %v", err, b.frontends())
	}
	if err := b.Delete(ctx, "c2", "eth0"); err != nil {
		t.Fatal(err)
	}
	b.CheckClean()
}

// TestHostPortsRefused: an ADD whose host port is not possible leaves nothing.
func TestHostPortsRefused(t *testing.T) {
	b, ctx := newBedOfTwo(t), t.Context()
	refuses := func(q agent.AddRequest, kind error, words string) {
		t.Helper()
		if _, err := b.Add(ctx, q); !errors.Is(err, kind) || !strings.Contains(err.Error(), words) {
			t.Errorf("got %v, want %v with %q", err, kind, words)
		}
		b.CheckClean()
	}
	green := b.publishing("c1")
	green.Tenant = "green"
	refuses(green, refusal.ErrInvalid, "tenant green is on network nimitz, which has none")
	twice := b.publishing("c1")
	twice.HostPorts = append(twice.HostPorts, endpoint.HostPort{Host: 8080, Container: 81, Protocol: "TCP"})
	refuses(twice, refusal.ErrInvalid, "exclude each other")
	b.Orchestrator.Older = true
	refuses(b.publishing("c1"), refusal.ErrUnavailable, "upgrade the orchestrator")
	b.Orchestrator.Older = false
	b.MustAdd("c0")
	b.Driver.Frontends.Limit(1)
	if _, err := b.Add(ctx, b.publishing("c1")); err != nil {
		t.Fatal(err)
	}
	other := b.publishing("c2")
	other.HostPorts[0].Host = 8081
	if _, err := b.Add(ctx, other); !errors.Is(err, agenttest.ErrTableFull) || len(b.frontends()) != 1 {
		t.Errorf("without room: %v, %v", err, b.frontends())
	}
}

// TestCheckHostPorts: CHECK compares the host ports that the runtime passes, and the packet path.
func TestCheckHostPorts(t *testing.T) {
	b, ctx := newBed(t), t.Context()
	b.MustAdd("c0")
	q := b.publishing("c1")
	if _, err := b.Add(ctx, q); err != nil {
		t.Fatal(err)
	}
	check := func(ports *[]endpoint.HostPort) error {
		return b.Check(ctx, agent.CheckRequest{
			ContainerID: q.ContainerID, Interface: q.Interface, Netns: q.Netns, HostPorts: ports,
		})
	}
	if err := errors.Join(check(nil), check(&q.HostPorts)); err != nil {
		t.Error(err)
	}
	for _, other := range [][]endpoint.HostPort{nil, {{Host: 8080, Container: 81, Protocol: "TCP"}}} {
		if err := check(&other); !errors.Is(err, refusal.ErrCheck) || !strings.Contains(err.Error(), "host ports") {
			t.Errorf("%v: %v", other, err)
		}
	}
	for key := range b.Driver.Frontends.All() {
		if err := b.Driver.Frontends.DeleteServices([]dpapi.FrontendKey{key}); err != nil {
			t.Fatal(err)
		}
	}
	if err := check(nil); !errors.Is(err, refusal.ErrCheck) || !strings.Contains(err.Error(), "is missing") {
		t.Errorf("without its entry: %v", err)
	}
}
