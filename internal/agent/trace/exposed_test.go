package trace_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/agent/trace"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	client  = netip.MustParseAddr("2001:db8:f00d::2")
	outside = netip.MustParseAddrPort("[2001:db8:7::9]:80")
	another = netip.MustParsePrefix("fd70:696c:6100:77::/64")
)

// exposedBed is a bed with blue's service web, which has an external address and a node port.
type exposedBed struct {
	bed
	*trace.Tracer
	local, far, draining dpapi.Backend
	node                 netip.AddrPort // node port
}

func newExposedBed(t *testing.T) *exposedBed {
	t.Helper()
	b := &exposedBed{}
	b.bed, b.Tracer = newBed(t)
	blue := b.Orchestrator.Tenants["blue"]
	blue.ServicesNumber, blue.Changes = 5, blue.Changes+1
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: blue}}, nil); err != nil {
		t.Fatal(err)
	}
	b.local = dpapi.Backend{Plain: b.c2.Attachments[0].Plaintext, Seen: b.c2.Attachments[0].Address, Port: 8080}
	b.far = dpapi.Backend{Plain: b.bed.far(another), Seen: netip.MustParseAddr("fc00::77"), Port: 8080}
	b.draining = dpapi.Backend{Plain: b.c1.Attachments[0].Plaintext, Seen: b.c1.Attachments[0].Address, Port: 8080}
	b.node = netip.AddrPortFrom(netip.MustParseAddr("2001:db8:70::1"), 30080)
	b.bed.Core.SetAddresses(services.Addresses{Ports: []netip.Addr{b.node.Addr()}})
	b.Driver.Access = map[address.TenantID][]dpapi.AccessEntry{
		0: {{To: netip.MustParsePrefix("2001:db8:70::/64"), Action: dpapi.AccessDeny}},
	}
	return b
}

// expose makes blue's service web, with a traffic policy and some endpoints.
func (b *exposedBed) expose(t *testing.T, local service.TrafficPolicy, affinity time.Duration, to ...dpapi.Backend) {
	t.Helper()
	b.bed.Core.ApplyServices(services.Update{Tenant: "blue", Whole: true, Services: []service.Service{{
		Tenant: "blue", Name: service.Name{Namespace: "shop", Name: "web"}, NodePorts: true, TrafficPolicy: local,
		ExternalIPs: []netip.Addr{outside.Addr()},
		Ports:       []service.Port{{Protocol: service.TCP, Port: 80, Target: 8080, NodePort: 30080}},
	}}})
	for _, at := range []netip.AddrPort{outside, b.node} {
		err := b.Driver.PutServices([]dpapi.Frontend{{
			FrontendKey: dpapi.FrontendKey{Address: at, Protocol: packet.ProtocolTCP},
			Exposed:     dpapi.Exposed{Services: 5, Node: at == b.node}, Affinity: affinity, Backends: to,
			Draining: []dpapi.Backend{b.draining},
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// answers describes the stages of the answer.
func answers(r *pilasterv1.TraceResponse) string {
	var all []string
	for _, s := range r.Answer {
		all = append(all, strings.TrimSpace(s.Source+" "+s.Drop))
	}
	return strings.Join(all, ", ")
}

// TestExposed: at the ingress node a trace of a packet from outside shows the exposed port and the endpoint that its
// connection gets, or why it gets none and what to do.
func TestExposed(t *testing.T) {
	near := "uplink, service, maglev, endpoint, target, session, translate, deliver: delivered"
	near = strings.Replace(near, "target, ", "target, policy, ", 1)
	const away = "uplink, service, maglev, tunnel: sent"
	for name, c := range map[string]struct {
		to       string // endpoints: near, far, both, none
		policy   service.TrafficPolicy
		affinity time.Duration
		change   func(b *exposedBed, of *agent.Connection, way *trace.Way)
		want     string
		says     string // of the step that decides
		answer   string
	}{
		"to an endpoint here": {to: "near", want: near, answer: outside.Addr().String(),
			says: "service shop/web of tenant blue has 1 endpoint"},
		"to one elsewhere":                       {to: "far", want: away, answer: outside.Addr().String()},
		"of which the client's port chooses one": {to: "both", want: near, says: "--source-port names it"},
		"that the client's port chooses": {to: "both", want: away, says: "the client's address and port choose one",
			change: func(_ *exposedBed, of *agent.Connection, _ *trace.Way) { of.SourcePort = 20_001 }},
		"that the client's address chooses": {to: "both", affinity: time.Hour, want: near,
			says: "with affinity, the client's address chooses one"},
		"that was asked for": {to: "both", want: away,
			change: func(b *exposedBed, _ *agent.Connection, way *trace.Way) { way.Backend = b.far.Seen }},
		"that drains": {to: "far", want: near,
			change: func(b *exposedBed, _ *agent.Connection, way *trace.Way) { way.Backend = b.draining.Plain }},
		"at a node port": {to: "far", want: away, says: "service shop/web of tenant blue", answer: "2001:db8:70::1",
			change: func(b *exposedBed, of *agent.Connection, _ *trace.Way) {
				of.Destination, of.Port = b.node.Addr(), b.node.Port()
			}},
		"at a host port with the number of a node port": {to: "near", want: near, answer: "2001:db8:70::1",
			says: "host port 30080/TCP of container default/c3 (endpoint 3) of tenant blue has 1 endpoint",
			change: func(b *exposedBed, of *agent.Connection, _ *trace.Way) {
				b.hostPort(t, b.node.Port())
				of.Destination, of.Port = b.node.Addr(), b.node.Port()
			}},
		"at an external address with the number of a host port": {to: "near", want: near,
			says:   "service shop/web of tenant blue has 1 endpoint",
			change: func(b *exposedBed, _ *agent.Connection, _ *trace.Way) { b.hostPort(t, 80) }},
		"without an endpoint": {to: "none", want: "uplink, service: dropped no-backend",
			says: "has no endpoint that can serve: pilaster service describe shows why"},
		"without an endpoint on this node": {to: "none", policy: service.Local,
			want: "uplink, service: dropped no-backend", says: "traffic policy local, and no endpoint on this node"},
		"to another port": {to: "near", want: "uplink, service: dropped no-service", says: "does not have port 81/TCP",
			change: func(_ *exposedBed, of *agent.Connection, _ *trace.Way) { of.Port = 81 }},
		"to another port of the node": {to: "near", want: "uplink, node: passed",
			says: "no service of a tenant on this node has node port 22/TCP",
			change: func(b *exposedBed, of *agent.Connection, _ *trace.Way) {
				of.Destination, of.Port = b.node.Addr(), 22
			}},
		"by ping": {to: "near", want: "uplink, service: dropped service-protocol",
			change: func(_ *exposedBed, of *agent.Connection, _ *trace.Way) {
				of.Protocol, of.Port = packet.ProtocolICMPv6, 0
			}},
		"to another address": {to: "near", want: "uplink, node: passed", says: "route an address of a service to nodes",
			change: func(_ *exposedBed, of *agent.Connection, _ *trace.Way) {
				of.Destination = outside.Addr().Next()
			}},
		"from another node": {to: "near", want: "uplink, source: dropped exposed-source",
			says: "processes of nodes reach exposed ports of their own node only",
			change: func(_ *exposedBed, of *agent.Connection, _ *trace.Way) {
				of.Source = tenant.NodeAddress(another)
			}},
		"from a protected address": {to: "near", want: "uplink, source: dropped exposed-source",
			says: "2001:db8:70::/64, which is no prefix of hosts outside",
			change: func(_ *exposedBed, of *agent.Connection, _ *trace.Way) {
				of.Source = netip.MustParseAddr("2001:db8:70::2")
			}},
		"from a container of the tenant": {to: "near", want: "container, rule: dropped dst-not-private",
			says: "; it is an external address of service shop/web: containers use fd70:696c:7300:5::1",
			change: func(b *exposedBed, of *agent.Connection, _ *trace.Way) {
				of.Source = b.c1.Attachments[0].Address
				b.bed.Core.ApplyServices(services.Update{Tenant: "blue", Whole: true, Services: []service.Service{{
					Tenant: "blue", Name: service.Name{Namespace: "shop", Name: "web"},
					Address: netip.MustParseAddr("fd70:696c:7300:5::1"), ExternalIPs: []netip.Addr{outside.Addr()},
				}}})
			}},
		"denied": {to: "near", want: "uplink, service, maglev, endpoint, target, policy: dropped policy-denied",
			change: func(b *exposedBed, _ *agent.Connection, _ *trace.Way) { b.deny() }},
		"without a route": {to: "far", want: "uplink, service, maglev, tunnel: dropped no-route",
			change: func(b *exposedBed, _ *agent.Connection, _ *trace.Way) { b.path.noRoute = errors.New("none") }},
		"without a route for the answer": {to: "near", want: near, answer: outside.Addr().String() + " no-route",
			change: func(b *exposedBed, _ *agent.Connection, _ *trace.Way) { b.path.noRoute = errors.New("none") }},
	} {
		b := newExposedBed(t)
		to := map[string][]dpapi.Backend{"near": {b.local}, "far": {b.far}, "both": {b.local, b.far}}[c.to]
		b.expose(t, c.policy, c.affinity, to...)
		way := trace.Way{}
		of := agent.Connection{
			Source: client, Destination: outside.Addr(), Protocol: packet.ProtocolTCP, Port: outside.Port(),
		}
		if c.change != nil {
			c.change(b, &of, &way)
		}
		got, err := b.Trace(t.Context(), of, way)
		if err != nil || summary(got) != c.want {
			t.Errorf("%s: %s, %v; want %s", name, summary(got), err, c.want)
			continue
		}
		if s := got.Steps[1]; !strings.Contains(s.Detail, c.says) {
			t.Errorf("%s: %s; want %s", name, s.Detail, c.says)
		}
		if is := answers(got); c.answer != "" && is != c.answer {
			t.Errorf("%s: answer from %s, want %s", name, is, c.answer)
		}
		if (got.Next == another.String()) != (got.Verdict == "sent") {
			t.Errorf("%s: next node %q", name, got.Next)
		}
	}
}

// TestFromIngress: at the endpoint's node, a packet from an ingress node passes the checks of source, target and
// policies, and the answer goes back by that node.
func TestFromIngress(t *testing.T) {
	for name, c := range map[string]struct {
		change func(b *exposedBed, of *agent.Connection)
		want   string
	}{
		"delivered": {nil, "uplink, source, endpoint, target, policy, session, translate, deliver: delivered"},
		"from a node": {func(_ *exposedBed, of *agent.Connection) { of.Source = tenant.NodeAddress(another) },
			"uplink, source: dropped exposed-source"},
		"to a container that has gone": {func(b *exposedBed, _ *agent.Connection) {
			delete(b.path.locals, b.local.Plain)
		}, "uplink, source, endpoint: dropped no-endpoint"},
		"to a port that is not exposed": {func(_ *exposedBed, of *agent.Connection) { of.Port = 22 },
			"uplink, source, endpoint, target: dropped no-service"},
		"denied": {func(b *exposedBed, _ *agent.Connection) { b.deny() },
			"uplink, source, endpoint, target, policy: dropped policy-denied"},
	} {
		b := newExposedBed(t)
		b.expose(t, service.Cluster, 0, b.local)
		of := agent.Connection{Source: client, Destination: b.local.Seen, Protocol: packet.ProtocolTCP, Port: 8080}
		if c.change != nil {
			c.change(b, &of)
		}
		got, err := b.Trace(t.Context(), of, trace.Way{Ingress: another})
		if err != nil || summary(got) != c.want || got.Next != another.String() {
			t.Errorf("%s: %s, next %s, %v; want %s", name, summary(got), got.GetNext(), err, c.want)
			continue
		}
		want := ""
		if got.Verdict == "delivered" {
			want = b.local.Plain.String()
		}
		if is := answers(got); is != want {
			t.Errorf("%s: answer from %q, want %q", name, is, want)
		}
		if of.Destination = outside.Addr(); c.change == nil {
			_, err := b.Trace(t.Context(), of, trace.Way{Ingress: another})
			if !errors.Is(err, refusal.ErrInvalid) {
				t.Errorf("to the exposed address in the tunnel: %v", err)
			}
		}
	}
}

// TestWhyExposed: the verdict for an exposed port says which endpoint a connection gets, and the policies' verdicts are
// those for the client's address at each endpoint of this node.
func TestWhyExposed(t *testing.T) {
	b := newExposedBed(t)
	b.expose(t, service.Cluster, 0, b.local, b.far)
	of := agent.Connection{
		Source: client, Destination: outside.Addr(), Protocol: packet.ProtocolTCP, Port: 80, SourcePort: 20_000,
	}
	why := func() []agent.Reason {
		t.Helper()
		all, err := b.bed.Core.Why(of)
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	at := netip.AddrPortFrom(b.local.Seen, b.local.Port)
	all := why()
	if len(all) != 2 || !all[0].Allowed || all[0].Backend != at || all[0].Tenant != "blue" ||
		!strings.Contains(all[0].Access, "1 endpoint on other nodes") ||
		all[1].Backend != at || all[1].Peer != client || !all[1].Allowed || all[1].Access != "" {
		t.Errorf("%+v", all)
	}
	b.deny()
	if all = why(); len(all) != 2 || !all[0].Allowed || all[1].Allowed {
		t.Errorf("denied by the policies: %+v", all)
	}
	of.Port = 81
	if all = why(); len(all) != 1 || all[0].Allowed {
		t.Errorf("at another port: %+v", all)
	}
	b.hostPort(t, b.node.Port())
	of.Destination, of.Port = b.node.Addr(), b.node.Port()
	if all = why(); !strings.Contains(all[0].Access, "host port 30080/TCP of container default/c3 (endpoint 3)") {
		t.Errorf("at a host port: %+v", all)
	}
	of.Destination, of.Port = b.local.Seen, 8080
	if all = why(); len(all) != 2 || !all[0].Allowed || all[1].Allowed {
		t.Errorf("at the endpoint: %+v", all)
	}
	of.Port = 22
	if all = why(); len(all) != 1 || all[0].Allowed {
		t.Errorf("at another port of the endpoint: %+v", all)
	}
}

// hostPort makes a port of the node a host port of the new container c3, not the node port of a service.
func (b *exposedBed) hostPort(t *testing.T, port uint16) {
	t.Helper()
	at := dpapi.FrontendKey{Address: b.node, Protocol: packet.ProtocolTCP}
	if err := b.Driver.DeleteServices([]dpapi.FrontendKey{at}); err != nil {
		t.Fatal(err)
	}
	q := b.Request("c3")
	q.HostPorts = []endpoint.HostPort{{Host: port, Container: 8080, Protocol: "TCP"}}
	r, err := b.bed.Core.Add(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	b.path.fill(r, false, true)
}

// deny applies a policy that lets no host outside reach blue's containers.
func (b *exposedBed) deny() {
	b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
}
