package api

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/gateways"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// Status says that processes of the node do not reach containers of other nodes by the routes that it has.
func TestSourceOfNode(t *testing.T) {
	own, uplink := tenant.NodeAddress(agenttest.NodePrefix), netip.MustParseAddr("2001:db8:70::2")
	base := address.DefaultPlan().Base
	for _, c := range []struct {
		nodes  []netip.Prefix
		source netip.Addr
		want   bool
	}{
		{nil, uplink, false},
		{[]netip.Prefix{address.DefaultPlan().Node(255)}, uplink, false},
		{[]netip.Prefix{base}, own, false},
		{[]netip.Prefix{base}, uplink, true},
	} {
		b := newServiceBed(t)
		b.service.Serve(b.Core, nil)
		b.service.config.SourceTo = func(to netip.Addr) (netip.Addr, error) {
			if agenttest.NodePrefix.Contains(to) || !base.Contains(to) {
				t.Errorf("asked for the route to %v, which is no other node", to)
			}
			return c.source, nil
		}
		red := b.Orchestrator.Tenants["red"]
		red.Nodes = c.nodes
		b.Orchestrator.Tenants["red"] = red
		q := b.Request("one")
		q.Tenant = "red"
		if _, err := b.Add(t.Context(), q); err != nil {
			t.Fatal(err)
		}
		said := strings.Join(b.service.status(t.Context()).Problems, "\n")
		if strings.Contains(said, "route add "+base.String()+" via ROUTER src "+own.String()) != c.want {
			t.Errorf("nodes %v, source %v: said %q", c.nodes, c.source, said)
		}
	}
}

// Status, metrics and the record of addresses say how packets of this node's containers leave the cluster.
func TestEgress(t *testing.T) {
	b := newServiceBed(t)
	b.service.Serve(b.Core, nil)
	b.MustAdd("inside")
	if s := b.service.status(t.Context()); s.Egress != nil {
		t.Errorf("a node whose containers do not leave says %v", s.Egress)
	}
	red := b.Orchestrator.Tenants["red"]
	via := tenant.EgressRule{To: netip.MustParsePrefix("2001:db8::/32"), Allow: true}
	for _, n := range []string{"7", "8"} {
		node := netip.MustParsePrefix("fd70:696c:6100:" + n + "::/64")
		via.Via = append(via.Via, tenant.EgressGateway{
			Node: "n" + n, Prefix: node, Address: tenant.EgressAddress(node, tenant.FirstGatewayIndex),
		})
	}
	own := via
	own.To, own.Via = netip.MustParsePrefix("2001:db9::/32"), []tenant.EgressGateway{{
		Node: "n1", Prefix: agenttest.NodePrefix,
		Address: tenant.EgressAddress(agenttest.NodePrefix, tenant.FirstGatewayIndex),
	}}
	again := own
	again.To = netip.MustParsePrefix("2001:db9:1::/48")
	red.Egress = []tenant.EgressRule{{To: endpoint.DefaultRoute, Allow: true}, via, own, again}
	b.Orchestrator.Tenants["red"] = red
	q := b.Request("leaves")
	q.Tenant = "red"
	r, err := b.Add(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	addr := r.Attachments[0].Egress
	prober := gateways.New(b.Core, b.Driver, agenttest.NodePrefix, slog.New(slog.DiscardHandler))
	b.service.ServeGateways(prober)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	b.Driver.Outside.Silent[via.Via[1].Prefix] = true
	go func() { defer close(ended); prober.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	agenttest.Eventually(t, func() error {
		s := b.service.status(t.Context())
		g := s.Egress.GetGateways()
		if s.Egress.GetAddresses() != 1 || len(g) != 2 || g[0].Node != "n7" || !g[0].Alive || !g[0].Answered ||
			g[1].Alive || g[1].Answered ||
			!strings.Contains(strings.Join(s.Problems, "\n"), "gateway n8 does not answer") {
			return fmt.Errorf("status %v, problems %q", s.Egress, s.Problems)
		}
		return nil
	})
	if roles := b.service.status(t.Context()).Egress.GetRoles(); len(roles) != 1 || roles[0].Tenant != "red" ||
		roles[0].Address != own.Via[0].Address.String() {
		t.Errorf("this node is a gateway of %v", roles)
	}
	w := httptest.NewRecorder()
	b.service.ObserveHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	metrics, _ := io.ReadAll(w.Body)
	for _, line := range []string{
		"\npilaster_egress_addresses 1\n", `pilaster_egress_gateway_used{gateway="n7"} 1` + "\n",
		`pilaster_egress_gateway_used{gateway="n8"} 0` + "\n", `pilaster_egress_probe_age_seconds{gateway="n7"} `,
	} {
		if !strings.Contains(string(metrics), line) {
			t.Errorf("metrics lack %q", line)
		}
	}
	find := func(addr netip.Addr, at *timestamppb.Timestamp) (*pilasterv1.FindEgressAddressResponse, error) {
		resp, err := b.client.FindEgressAddress(t.Context(), connect.NewRequest(&pilasterv1.FindEgressAddressRequest{
			Address: addr.String(), At: at,
		}))
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	}
	got, err := find(addr, nil)
	if err != nil || got.Node != "n1" || len(got.Holders) != 1 || got.Holders[0].Pod != "default/leaves" ||
		got.Holders[0].Tenant != "red" || !got.Holders[0].From.AsTime().Equal(b.Now) || got.Holders[0].Until != nil ||
		!got.Since.AsTime().Equal(b.Now) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err = find(addr, timestamppb.New(b.Now.Add(-time.Second))); err != nil || len(got.Holders) != 0 {
		t.Errorf("before it was allocated: %v, %v", got, err)
	}
	if _, err := find(via.Via[0].Address.Next(), nil); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("the address of a gateway: %v", err)
	}
	other := tenant.EgressAddress(via.Via[0].Prefix, tenant.FirstEgressIndex)
	if _, err := find(other, nil); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("the address of another node: %v", err)
	}
	key := &pilasterv1.GetEndpointRequest{Key: "default/leaves"}
	e, err := b.client.GetEndpoint(t.Context(), connect.NewRequest(key))
	if err != nil || e.Msg.Endpoint.Attachments[0].Egress != addr.String() {
		t.Errorf("%v, %v", e, err)
	}
}
