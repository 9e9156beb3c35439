package trace_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/trace"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// TestBeyond: a trace shows which rule lets a packet leave the cluster or reach a node, and the address or gateway that
// it uses.
func TestBeyond(t *testing.T) {
	host, plan := netip.MustParseAddr("2001:db8:9::1"), address.DefaultPlan()
	far := netip.MustParsePrefix("fd70:696c:6100:77::/64")
	seen := tenant.EgressAddress(agenttest.NodePrefix, tenant.FirstEgressIndex)
	gateway := tenant.EgressAddress(agenttest.NodePrefix, tenant.FirstGatewayIndex)
	by := func(all ...dpapi.GatewayEntry) dpapi.AccessEntry {
		return dpapi.AccessEntry{To: endpoint.DefaultRoute, Action: dpapi.AccessGateway, Gateways: all}
	}
	outside := dpapi.AccessEntry{To: endpoint.DefaultRoute, Action: dpapi.AccessOutside}
	nodes := dpapi.AccessEntry{To: plan.Base, Action: dpapi.AccessNode}
	for name, c := range map[string]struct {
		rule, protected dpapi.AccessEntry
		change          func(b *bed, of *agent.Connection)
		want            string
		source, next    string // after the last step
	}{
		"by its egress address": {rule: outside, want: "container, rule, egress address, next hop, policy: left",
			source: seen.String()},
		"denied": {rule: dpapi.AccessEntry{To: endpoint.DefaultRoute, Action: dpapi.AccessDeny},
			want: "container, rule: dropped egress-denied"},
		"protected": {rule: outside, protected: dpapi.AccessEntry{To: netip.PrefixFrom(host, 128),
			Action: dpapi.AccessDeny}, want: "container, rule: dropped egress-denied"},
		"without an egress address": {rule: outside, change: func(b *bed, _ *agent.Connection) { b.path.egress = nil },
			want: "container, rule, egress address: dropped no-egress-address"},
		"by a gateway": {rule: by(dpapi.GatewayEntry{Node: far}),
			want: "container, rule, policy, gateway, next hop: sent", next: far.String()},
		"by the gateway that answers": {rule: by(dpapi.GatewayEntry{Node: agenttest.NodePrefix, Silent: true},
			dpapi.GatewayEntry{Node: far}), next: far.String(),
			want: "container, rule, policy, gateway, next hop: sent"},
		"by the own node as a gateway": {rule: by(dpapi.GatewayEntry{Node: agenttest.NodePrefix}),
			want: "container, rule, policy, gateway, gateway, next hop: left", source: gateway.String()},
		"a protocol that gateways do not translate": {rule: by(dpapi.GatewayEntry{Node: far}),
			change: func(_ *bed, of *agent.Connection) { of.Protocol = policy.SCTP },
			want:   "container, rule, gateway: dropped gateway-protocol"},
		"at the gateway": {rule: by(dpapi.GatewayEntry{Node: agenttest.NodePrefix}),
			change: func(b *bed, of *agent.Connection) { of.Source = b.far(far) },
			want:   "uplink, rule, gateway, next hop: left", source: gateway.String(), next: far.String()},
		"at a node that is not its gateway": {rule: by(dpapi.GatewayEntry{Node: far}),
			change: func(b *bed, of *agent.Connection) { of.Source = b.far(far) },
			want:   "uplink, rule: dropped gateway-denied", next: far.String()},
		"at a node that is no gateway": {rule: outside, change: func(b *bed, of *agent.Connection) {
			of.Source, b.path.gateway = b.far(far), netip.Addr{}
		}, want: ":"},
		"to another node": {rule: nodes, change: func(_ *bed, of *agent.Connection) {
			of.Destination = tenant.NodeAddress(far)
		}, want: "container, node, next hop, policy: sent", next: far.String()},
		"to another node, denied": {change: func(_ *bed, of *agent.Connection) {
			of.Destination = tenant.NodeAddress(far)
		}, want: "container, node: dropped to-node"},
		"from another node": {rule: nodes, change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = tenant.NodeAddress(far), b.c2.Attachments[0].Plaintext
		}, want: "uplink, endpoint, node, policy, translate, deliver: delivered", next: far.String()},
		"from another node, denied": {change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = tenant.NodeAddress(far), b.c2.Attachments[0].Plaintext
		}, want: "uplink, endpoint, node: dropped tenant-mismatch", next: far.String()},
		"from a host outside": {change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = host, b.c2.Attachments[0].Address
		}, want: "uplink: dropped tenant-mismatch"},
		"from this node": {change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = tenant.NodeAddress(agenttest.NodePrefix), b.c2.Attachments[0].Address
		}, want: "node, translate, deliver: delivered", source: "fc00::99"},
		"from this node, to a container that has gone": {change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = tenant.NodeAddress(agenttest.NodePrefix), b.c2.Attachments[0].Plaintext
			delete(b.path.sources, b.c2.Attachments[0].Address)
		}, want: "node: dropped no-endpoint"},
		"from this node, to an unknown tenant": {change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = tenant.NodeAddress(agenttest.NodePrefix), b.c2.Attachments[0].Plaintext
			delete(b.path.tenants, b.c2.TenantID)
		}, want: "node, translate: dropped no-key"},
		"from this node to another node's container": {change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = tenant.NodeAddress(agenttest.NodePrefix), b.far(far)
		}, want: "node, next hop: sent", next: far.String()},
		"from this node, without a route": {change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = tenant.NodeAddress(agenttest.NodePrefix), b.far(far)
			b.path.noRoute = errors.New("no route")
		}, want: "node, next hop: dropped no-route"},
		"from a container to this node": {change: func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = b.far(far), tenant.NodeAddress(agenttest.NodePrefix)
		}, want: "uplink, deliver: delivered", next: far.String()},
	} {
		b, tracer := newBed(t)
		b.path.egress, b.path.gateway = map[endpoint.ID]netip.Addr{b.c1.ID: seen}, gateway
		b.Driver.Access = map[address.TenantID][]dpapi.AccessEntry{}
		if c.rule.To.IsValid() {
			b.Driver.Access[b.c1.TenantID] = []dpapi.AccessEntry{c.rule}
		}
		if c.protected.To.IsValid() {
			b.Driver.Access[0] = []dpapi.AccessEntry{c.protected}
		}
		of := agent.Connection{Source: b.c1.Attachments[0].Address, Destination: host, Protocol: policy.TCP, Port: 80}
		if c.change != nil {
			c.change(&b, &of)
		}
		got, err := tracer.Trace(t.Context(), of, trace.Way{})
		if err != nil || summary(got) != c.want || got.Next != c.next {
			t.Errorf("%s: %s, next %q, %v; want %s, %q", name, summary(got), got.GetNext(), err, c.want, c.next)
			continue
		}
		if c.source != "" && !slices.Contains(got.Sources, c.source) {
			t.Errorf("%s: sources %v, want %s", name, got.Sources, c.source)
		}
	}
}
