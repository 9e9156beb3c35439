package ops_test

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/trace"
)

// webOnly lets nothing but TCP to port 80 reach containers with app=web.
const webOnly = `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "web"},
"spec": {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"ports": [{"protocol": "TCP", "port": 80}]}]}}`

type tracingLab struct {
	*lab.Lab
	binary string
}

// trace runs pilaster lab trace.
func (l tracingLab) trace(ctx context.Context, t *testing.T, args ...string) (trace.Trace, int) {
	t.Helper()
	return l.run(ctx, t, append([]string{"lab", "trace", "--lab", l.Name(), "-o", "json"}, args...)...)
}

func (l tracingLab) run(ctx context.Context, t *testing.T, args ...string) (shown trace.Trace, status int) {
	t.Helper()
	var out, complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, l.binary, args...)
	cmd.Stdout, cmd.Stderr = &out, &complaint
	status, ran := lab.ExitStatus(cmd.Run())
	if err := json.Unmarshal(out.Bytes(), &shown); !ran || err != nil {
		t.Errorf("%v: exit %d, %v\n%s%s", args, status, err, &out, &complaint)
	}
	t.Logf("%v", args)
	for _, s := range shown.Steps {
		at := 0.0
		if s.AtUs != nil {
			at = *s.AtUs
		}
		t.Logf("  %s %-10s %v → %v  %.1f  %s  %s  %s", s.Node, s.Stage, s.Source, s.Destination, at, s.Detail, s.Entry,
			s.Drop)
	}
	return shown, status
}

// stages returns node and stage of the steps.
func stages(t trace.Trace) string {
	var all []string
	for _, s := range t.Steps {
		all = append(all, s.Node+" "+s.Stage)
	}
	return strings.Join(all, ", ")
}

// traces counts the ring buffers of loaded tracing programs, of all nodes of the machine.
func traces(t *testing.T) (n int) {
	t.Helper()
	for id, err := ebpf.MapGetNextID(0); err == nil; id, err = ebpf.MapGetNextID(id) {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			continue // gone meanwhile
		}
		info, err := m.Info()
		if err == nil && info.Name == "pil_trace" {
			n++
		}
		m.Close()
	}
	return n
}

// await waits until a condition holds.
func await(ctx context.Context, t *testing.T, what string, is func() bool) {
	t.Helper()
	for !is() {
		select {
		case <-ctx.Done():
			t.Fatalf("not %s", what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// onUplink returns the programs that receive packets from the fabric, by node.
func (l tracingLab) onUplink(t *testing.T) map[string]ebpf.ProgramID {
	t.Helper()
	all := map[string]ebpf.ProgramID{}
	for _, node := range []string{"n1", "n2"} {
		pinned, err := link.LoadPinnedLink(filepath.Join(l.BPF(node), "links", "uplink_in"), nil)
		must(t, err)
		info, err := pinned.Info()
		must(t, err)
		all[node] = info.Program
		must(t, pinned.Close())
	}
	return all
}

// awaitTraced waits until both nodes have other programs than these.
func (l tracingLab) awaitTraced(ctx context.Context, t *testing.T, before map[string]ebpf.ProgramID) {
	t.Helper()
	await(ctx, t, "traced", func() bool {
		now := l.onUplink(t)
		return now["n1"] != before["n1"] && now["n2"] != before["n2"]
	})
}

// TestTrace: on every network a trace shows the stages, addresses and verdict of a packet. A dry run and a live trace
// agree.
func TestTrace(t *testing.T) {
	overlay := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	l := tracingLab{labtest.New(t, lab.Spec{
		Nodes: []string{"n1", "n2"}, Device: endpoint.Veth, // macvlans do not support network nimitz
		Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}, {Name: "clear", Addressing: "clear"},
			{Name: "green", Network: "nimitz", CIDRs: overlay}, {Name: "lime", Network: "nimitz", CIDRs: overlay},
			{Name: "silver", Network: "ila"}, {Name: "plum", Network: "evpn", CIDRs: overlay}},
		Containers: []lab.Container{
			{Name: "b1", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "front"}},
			{Name: "b2", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "web"}},
			{Name: "b3", Node: "n2", Tenant: "blue", Labels: map[string]string{"app": "web"}},
			{Name: "r1", Node: "n2", Tenant: "red"},
			{Name: "c1", Node: "n1", Tenant: "clear"}, {Name: "c2", Node: "n2", Tenant: "clear"},
			{Name: "g1", Node: "n1", Tenant: "green", Labels: map[string]string{"app": "front"}},
			{Name: "g2", Node: "n2", Tenant: "green", Labels: map[string]string{"app": "web"}},
			{Name: "g3", Node: "n1", Tenant: "green", Labels: map[string]string{"app": "db"}},
			// with the addresses of g1 and g2
			{Name: "l1", Node: "n1", Tenant: "lime"}, {Name: "l2", Node: "n2", Tenant: "lime"},
			{Name: "s1", Node: "n1", Tenant: "silver", Labels: map[string]string{"app": "front"}},
			{Name: "s2", Node: "n2", Tenant: "silver", Labels: map[string]string{"app": "web"}},
			{Name: "s3", Node: "n1", Tenant: "silver", Labels: map[string]string{"app": "web"}},
			// with the addresses of g1 and g2
			{Name: "p1", Node: "n1", Tenant: "plum", Labels: map[string]string{"app": "front"}},
			{Name: "p2", Node: "n2", Tenant: "plum", Labels: map[string]string{"app": "web"}},
			{Name: "p3", Node: "n1", Tenant: "plum", Labels: map[string]string{"app": "db"}},
		},
	}), labtest.Binary(t)}
	ctx := labtest.Context(t)
	for _, name := range []string{"blue", "green", "silver", "plum"} {
		_, err := l.Operator().ApplyPolicies(ctx, connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: name,
			Documents: []string{webOnly}}))
		must(t, err)
	}
	for _, pair := range [][2]string{{"b1", "b3"}, {"g1", "g2"}, {"s1", "s2"}, {"p1", "p2"}} {
		// Then neighbours are known, and policies are in force.
		for {
			echo, err := l.Ping(ctx, pair[0], pair[1], packet.PingOptions{Timeout: 100 * time.Millisecond})
			if must(t, err); !echo.Reached() {
				break
			}
		}
	}
	for _, c := range []struct {
		from, to, protocol string
		verdict, drop      string
		dry, live          string // stages
		answer             string
	}{
		{"b1", "b3", "tcp/80", trace.Delivered, "",
			"n1 container, n1 translate, n1 next hop, n1 policy, " +
				"n2 uplink, n2 endpoint, n2 policy, n2 translate, n2 deliver",
			"n1 container, n1 policy, n1 translate, n1 uplink, n2 uplink, n2 policy, n2 deliver", "refused"},
		{"b1", "b3", "tcp/81", trace.Dropped, "policy-denied",
			"n1 container, n1 translate, n1 next hop, n1 policy, n2 uplink, n2 endpoint, n2 policy",
			"n1 container, n1 policy, n1 translate, n1 uplink, n2 uplink, n2 policy", ""},
		{"b1", "b2", "tcp/80", trace.Delivered, "",
			"n1 container, n1 translate, n1 endpoint, n1 policy, n1 policy, n1 deliver",
			"n1 container, n1 policy, n1 policy, n1 deliver", "refused"},
		{"b1", "b2", "udp/80", trace.Dropped, "policy-denied",
			"n1 container, n1 translate, n1 endpoint, n1 policy, n1 policy",
			"n1 container, n1 policy, n1 policy", ""},
		{"b3", "b1", "icmpv6", trace.Delivered, "",
			"n2 container, n2 translate, n2 next hop, n2 policy, " +
				"n1 uplink, n1 endpoint, n1 policy, n1 translate, n1 deliver",
			"n2 container, n2 policy, n2 translate, n2 uplink, n1 uplink, n1 policy, n1 deliver", "echo reply"},
		{"b1", "r1", "udp/53", trace.Dropped, "dst-undecryptable", "n1 container, n1 translate",
			"n1 container, n1 drop", ""},
		{"c1", "c2", "udp/53", trace.Delivered, "",
			"n1 container, n1 translate, n1 next hop, n1 policy, " +
				"n2 uplink, n2 endpoint, n2 policy, n2 translate, n2 deliver",
			"n1 container, n1 translate, n1 uplink, n2 uplink, n2 deliver", "refused"},
		{"g1", "g2", "tcp/80", trace.Delivered, "",
			"n1 container, n1 register, n1 forwarding, n1 policy, n1 encap, " +
				"n2 decap, n2 forwarding, n2 policy, n2 policy, n2 deliver",
			"n1 container, n1 policy, n1 forwarding, n1 encap, n2 decap, n2 policy, n2 forwarding, n2 deliver",
			"refused"},
		{"g1", "g2", "tcp/81", trace.Dropped, "policy-denied",
			"n1 container, n1 register, n1 forwarding, n1 policy, n1 encap, " +
				"n2 decap, n2 forwarding, n2 policy, n2 policy",
			"n1 container, n1 policy, n1 forwarding, n1 encap, n2 decap, n2 policy", ""},
		{"l1", "l2", "tcp/81", trace.Delivered, "",
			"n1 container, n1 register, n1 forwarding, n1 policy, n1 encap, " +
				"n2 decap, n2 forwarding, n2 policy, n2 policy, n2 deliver",
			"n1 container, n1 forwarding, n1 encap, n2 decap, n2 forwarding, n2 deliver", "refused"},
		{"g1", "g3", "icmp", trace.Delivered, "",
			"n1 container, n1 register, n1 forwarding, n1 policy, n1 policy, n1 deliver",
			"n1 container, n1 policy, n1 policy, n1 forwarding, n1 deliver", "echo reply"},
		{"s1", "s2", "tcp/80", trace.Delivered, "",
			"n1 container, n1 translate, n1 next hop, n1 policy, " +
				"n2 uplink, n2 endpoint, n2 policy, n2 translate, n2 deliver",
			"n1 container, n1 policy, n1 translate, n1 uplink, n2 uplink, n2 policy, n2 deliver", "refused"},
		{"s1", "s2", "tcp/81", trace.Dropped, "policy-denied",
			"n1 container, n1 translate, n1 next hop, n1 policy, n2 uplink, n2 endpoint, n2 policy",
			"n1 container, n1 policy, n1 translate, n1 uplink, n2 uplink, n2 policy", ""},
		{"s1", "s3", "tcp/80", trace.Delivered, "",
			"n1 container, n1 endpoint, n1 policy, n1 policy, n1 deliver",
			"n1 container, n1 policy, n1 policy, n1 deliver", "refused"},
		{"p1", "p2", "tcp/80", trace.Delivered, "",
			"n1 container, n1 register, n1 forwarding, n1 policy, n1 encap, " +
				"n2 decap, n2 forwarding, n2 policy, n2 policy, n2 deliver",
			"n1 container, n1 policy, n1 forwarding, n1 encap, n2 decap, n2 policy, n2 forwarding, n2 deliver",
			"refused"},
		{"p1", "p2", "tcp/81", trace.Dropped, "policy-denied",
			"n1 container, n1 register, n1 forwarding, n1 policy, n1 encap, " +
				"n2 decap, n2 forwarding, n2 policy, n2 policy",
			"n1 container, n1 policy, n1 forwarding, n1 encap, n2 decap, n2 policy", ""},
		{"p1", "p3", "icmp", trace.Delivered, "",
			"n1 container, n1 register, n1 forwarding, n1 policy, n1 policy, n1 deliver",
			"n1 container, n1 policy, n1 policy, n1 forwarding, n1 deliver", "echo reply"},
	} {
		dry, dryStatus := l.trace(ctx, t, c.from, c.to, c.protocol, "--dry-run")
		live, liveStatus := l.trace(ctx, t, c.from, c.to, c.protocol)
		want := 0
		if c.verdict != trace.Delivered {
			want = 1
		}
		name := c.from + " → " + c.to + " " + c.protocol
		if dry.Verdict != c.verdict || dry.Drop != c.drop || dryStatus != want || stages(dry) != c.dry {
			t.Errorf("%s, dry run: %s %s, exit %d; want %s %s\n%s\nwant\n%s", name, dry.Verdict, dry.Drop, dryStatus,
				c.verdict, c.drop, stages(dry), c.dry)
		}
		if live.Verdict != c.verdict || live.Drop != c.drop || liveStatus != want || stages(live) != c.live {
			t.Errorf("%s, live: %s %s, exit %d; want %s %s\n%s\nwant\n%s", name, live.Verdict, live.Drop, liveStatus,
				c.verdict, c.drop, stages(live), c.live)
		}
		if live.Answer == nil || live.Answer.Kind != c.answer {
			t.Errorf("%s: answer %+v, want %q", name, live.Answer, c.answer)
		}
		if len(dry.Steps) == 0 || len(live.Steps) == 0 {
			continue
		}
		l.sameAddresses(t, name, dry, live)
	}
	to, err := l.Address("s2")
	must(t, err)
	absent := to.As16()
	absent[12] ^= 0xee
	for _, flags := range [][]string{{"--dry-run"}, {}} {
		args := append([]string{"s1", netip.AddrFrom16(absent).String(), "udp/53"}, flags...)
		shown, status := l.trace(ctx, t, args...)
		if shown.Drop != "no-mapping" || status != 1 {
			t.Errorf("to no container %v: %s, exit %d; want no-mapping", flags, shown.Drop, status)
		}
	}
}

// TestTraceBeyond: a trace shows the rule, and the egress address or the gateway, of a packet to a host outside of the
// cluster, and the way to a node. A dry run and a live trace agree.
func TestTraceBeyond(t *testing.T) {
	l := tracingLab{labtest.New(t, lab.Spec{
		Nodes: []string{"n1", "n2"}, Outside: []lab.OutsideHost{{Name: "internet"}},
		Tenants:    []lab.Tenant{{Name: "blue", Nodes: "deny"}},
		Containers: []lab.Container{{Name: "b1", Node: "n1", Tenant: "blue"}},
	}), labtest.Binary(t)}
	ctx := labtest.Context(t)
	allow := func(via ...string) {
		t.Helper()
		rule := lab.EgressRule{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress, Via: via}
		must(t, l.SetEgress(ctx, "blue", rule))
	}
	for _, c := range []struct {
		before        func()
		from, to      string
		protocol      string
		verdict, drop string
		dry, live     string // stages; no live trace without them
		answer        string
	}{
		{func() {}, "b1", "internet", "tcp/80", trace.Dropped, "dst-not-private", "n1 container, n1 rule", "", ""},
		{func() {}, "b1", "n2", "tcp/9", trace.Dropped, "to-node", "n1 container, n1 node",
			"n1 container, n1 drop", ""},
		{func() { must(t, l.SetNodes(ctx, "blue", "allow")) }, "b1", "n2", "tcp/9", trace.Delivered, "",
			"n1 container, n1 node, n1 next hop, n1 policy, n2 uplink, n2 deliver",
			"n1 container, n1 translate, n1 uplink, n2 uplink, n2 deliver", "refused"},
		{func() {}, "b1", "n1", "tcp/9", trace.Delivered, "", "n1 container, n1 node, n1 deliver",
			"n1 container, n1 translate", "refused"},
		{func() { allow() }, "b1", "internet", "tcp/80", trace.Left, "",
			"n1 container, n1 rule, n1 egress address, n1 next hop, n1 policy",
			"n1 container, n1 policy, n1 egress address, n1 uplink", "refused"},
		{func() { allow("n2") }, "b1", "internet", "udp/53", trace.Left, "",
			"n1 container, n1 rule, n1 policy, n1 gateway, n1 next hop, n2 uplink, n2 rule, n2 gateway, n2 next hop",
			"n1 container, n1 policy, n1 gateway, n1 uplink, n2 uplink, n2 gateway, n2 uplink", "refused"},
		{func() {}, "n1", "b1", "tcp/9", trace.Delivered, "", "n1 node, n1 translate, n1 deliver",
			"n1 node, n1 deliver", "refused"},
		{func() {}, "n2", "b1", "tcp/9", trace.Delivered, "",
			"n2 node, n2 next hop, n1 uplink, n1 endpoint, n1 node, n1 policy, n1 translate, n1 deliver",
			"n2 uplink, n1 uplink, n1 deliver", "refused"},
		{func() { must(t, l.SetNodes(ctx, "blue", "deny")) }, "n2", "b1", "tcp/9", trace.Dropped, "tenant-mismatch",
			"n2 node, n2 next hop, n1 uplink, n1 endpoint, n1 node", "n2 uplink, n1 uplink, n1 drop", ""},
		{func() { // the kernel chooses the address of the uplink, at which no container knows the node
			must(t, l.SetNodes(ctx, "blue", "allow"))
			ns, err := l.Namespace("n2")
			must(t, err)
			defer ns.Close()
			say(ctx, t, ns, "ip -6 route del fd70:696c:6100::/40")
		}, "n2", "b1", "tcp/9", trace.Dropped, "tenant-mismatch", "n2 node, n2 next hop, n1 uplink",
			"n2 uplink, n1 uplink, n1 drop", ""},
	} {
		c.before()
		name := c.from + " to " + c.to + " " + c.protocol
		var dry trace.Trace
		status := 0
		await(ctx, t, name+": by "+c.dry, func() bool { // the rule is on all nodes
			dry, status = l.trace(ctx, t, c.from, c.to, c.protocol, "--dry-run")
			return stages(dry) == c.dry && dry.Verdict == c.verdict && dry.Drop == c.drop
		})
		want := 0
		if c.verdict == trace.Dropped {
			want = 1
		}
		if status != want {
			t.Errorf("%s, dry run: exit %d, want %d", name, status, want)
		}
		if c.live == "" {
			continue
		}
		var live trace.Trace
		await(ctx, t, name+", live: by "+c.live, func() bool { // and neighbours are known
			live, status = l.trace(ctx, t, c.from, c.to, c.protocol)
			return stages(live) == c.live
		})
		if live.Verdict != c.verdict || live.Drop != c.drop || status != want || live.Answer == nil ||
			live.Answer.Kind != c.answer {
			t.Errorf("%s, live: %s %s, exit %d, answer %+v; want %s %s, exit %d, %q", name, live.Verdict, live.Drop,
				status, live.Answer, c.verdict, c.drop, want, c.answer)
		}
	}
}

// sameAddresses checks that a dry run and a live trace of one packet begin and end with the same addresses, and have
// those of the ends.
func (l tracingLab) sameAddresses(t *testing.T, name string, dry, live trace.Trace) {
	t.Helper()
	for _, pair := range [][2]trace.Step{
		{dry.Steps[0], live.Steps[0]}, {dry.Steps[len(dry.Steps)-1], live.Steps[len(live.Steps)-1]},
	} {
		if pair[0].Source != pair[1].Source || pair[0].Destination != pair[1].Destination {
			t.Errorf("%s: dry run %v → %v, live %v → %v", name, pair[0].Source, pair[0].Destination, pair[1].Source,
				pair[1].Destination)
		}
	}
	crosses := func(t trace.Trace) bool {
		return slices.ContainsFunc(t.Steps, func(s trace.Step) bool {
			return s.Source.String() == dry.Source.Plaintext && s.Destination.String() == dry.Destination.Plaintext
		})
	}
	if nodes := dry.Source.Node != dry.Destination.Node; nodes && dry.Network == "netpila" && dry.Drop == "" &&
		!(crosses(dry) && crosses(live)) {
		t.Errorf("%s: no step has the plaintext addresses", name)
	}
}

// TestTraceOVS: a live trace shows where Open vSwitch takes a packet, and where it delivers it. A dry run shows its
// flows.
func TestTraceOVS(t *testing.T) {
	l := tracingLab{labtest.New(t, lab.Spec{
		Nodes: []string{"n1", "n2"}, Device: endpoint.Veth, LabKeys: labtest.Switch("ovs", nil),
		Tenants: []lab.Tenant{{Name: "green", Network: "nimitz", CIDRs: []netip.Prefix{
			netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd12:3456::/48"),
		}}},
		Containers: []lab.Container{
			{Name: "g1", Node: "n1", Tenant: "green"}, {Name: "g2", Node: "n2", Tenant: "green"},
			{Name: "g3", Node: "n1", Tenant: "green"},
		},
	}), labtest.Binary(t)}
	ctx := labtest.Context(t)
	for _, c := range []struct{ to, protocol, dry, live string }{
		{"g2", "icmp", "n1 container, n1 register, n1 forwarding, n1 policy, n1 encap, " +
			"n2 decap, n2 forwarding, n2 policy, n2 policy, n2 deliver",
			"n1 container, n1 switch, n2 switch, n2 deliver"},
		{"g3", "icmpv6", "n1 container, n1 register, n1 forwarding, n1 policy, n1 policy, n1 deliver",
			"n1 container, n1 switch, n1 switch, n1 deliver"},
	} {
		dry, _ := l.trace(ctx, t, "g1", c.to, c.protocol, "--dry-run")
		live, status := l.trace(ctx, t, "g1", c.to, c.protocol)
		if dry.Verdict != trace.Delivered || stages(dry) != c.dry {
			t.Errorf("to %s, dry run: %s, %s; want %s", c.to, dry.Verdict, stages(dry), c.dry)
		}
		if live.Verdict != trace.Delivered || status != 0 || stages(live) != c.live {
			t.Errorf("to %s, live: %s, exit %d, %s; want %s", c.to, live.Verdict, status, stages(live), c.live)
		}
		l.sameAddresses(t, "to "+c.to, dry, live)
	}
}

// TestTraceEnds: the tracing programs are there during a trace only, also if its client or the agent is killed
// meanwhile, and packets flow all the time. A trace can wait for a packet, and on a single node it shows that node's
// part.
func TestTraceEnds(t *testing.T) {
	for _, c := range []struct {
		tenant    lab.Tenant
		arguments []string // of the agents
	}{
		{tenant: lab.Tenant{Network: tenant.DefaultNetwork}},
		{lab.Tenant{Network: "ila"}, []string{"--ila-mappings", "pull"}},
		{tenant: lab.Tenant{Network: "evpn", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}},
	} {
		t.Run(c.tenant.Network, func(t *testing.T) {
			c.tenant.Name = "blue"
			testTraceEnds(t, c.tenant, c.arguments)
		})
	}
}

func testTraceEnds(t *testing.T, blue lab.Tenant, arguments []string) {
	l := tracingLab{labtest.New(t, lab.Spec{
		Nodes: []string{"n1", "n2"}, Device: endpoint.Veth, Tenants: []lab.Tenant{blue},
		Containers: []lab.Container{{Name: "b1", Node: "n1", Tenant: "blue"}, {Name: "b2", Node: "n2", Tenant: "blue"}},
	}, func(o *lab.Options) { o.AgentArgs = arguments }), labtest.Binary(t)}
	ctx := labtest.Context(t)
	await(ctx, t, "reachable", func() bool { // with pulled mappings, the first packets are lost
		echo, err := l.Ping(ctx, "b1", "b2", packet.PingOptions{Timeout: time.Second})
		return err == nil && echo.Reached()
	})
	ping := func(when string) {
		t.Helper()
		echo, err := l.Ping(ctx, "b1", "b2", packet.PingOptions{Timeout: time.Second})
		if err != nil || !echo.Reached() {
			t.Fatalf("%s: %+v, %v", when, echo, err)
		}
	}
	ping("before")

	own, seen := l.onUplink(t), make(chan trace.Trace, 1)
	go func() {
		shown, _ := l.trace(ctx, t, "b1", "b2", "--wait", "30s")
		seen <- shown
	}()
	l.awaitTraced(ctx, t, own)
	for len(seen) == 0 { // the containers' devices come last
		ping("followed")
	}
	if shown := <-seen; shown.Verdict != trace.Delivered || shown.Answer != nil {
		t.Errorf("of an own packet: %s, answer %+v", shown.Verdict, shown.Answer)
	}
	await(ctx, t, "as before", func() bool { return traces(t) == 0 && maps.Equal(l.onUplink(t), own) })

	to, err := l.Address("b2")
	must(t, err)
	from, err := l.Address("b1")
	must(t, err)
	part, status := l.run(ctx, t, "trace", "--agent-socket", l.AgentSocket("n1"), "-o", "json", from.String(),
		to.String())
	if part.Verdict != trace.Sent || status != 0 || part.Elsewhere == "" || !part.Answer.Answered {
		t.Errorf("on the sender's node: exit %d, %+v", status, part)
	}

	await(ctx, t, "as before", func() bool { return traces(t) == 0 && maps.Equal(l.onUplink(t), own) })
	killed := exec.CommandContext(ctx, l.binary, "lab", "trace", "--lab", l.Name(), "b2", "b1", "udp/9", "--wait",
		"60s")
	must(t, killed.Start())
	l.awaitTraced(ctx, t, own)
	must(t, killed.Process.Kill())
	_ = killed.Wait()
	await(ctx, t, "as before", func() bool { return traces(t) == 0 && maps.Equal(l.onUplink(t), own) })
	ping("the client was killed")

	ended := make(chan int, 1)
	var said bytes.Buffer
	go func() {
		cmd := exec.CommandContext(ctx, l.binary, "lab", "trace", "--lab", l.Name(), "b2", "b1", "udp/9", "--wait",
			"60s")
		cmd.Stdout, cmd.Stderr = &said, &said
		status, _ := lab.ExitStatus(cmd.Run())
		ended <- status
	}()
	l.awaitTraced(ctx, t, own)
	ping("traced")
	for _, node := range []string{"n1", "n2"} {
		_, err := l.Kill(ctx, lab.AgentProcess(node))
		must(t, err)
		ping("an agent was killed")
	}
	if status := <-ended; status != 3 {
		t.Errorf("a trace whose agents were killed ends with %d, want 3:\n%s", status, &said)
	}
	await(ctx, t, "without tracing programs", func() bool { return traces(t) == 0 })
	ping("after")
}

// TestTracePulled: on nodes that pull mappings, the probes of traces cause what other packets cause: each is dropped
// where a mapping is missing, the node asks for it, and a later one arrives. The receiver's node sees a sender that it
// has no mapping of.
func TestTracePulled(t *testing.T) {
	spec := lab.Spec{
		Nodes: []string{"n1", "n2"}, Device: endpoint.Veth, Tenants: []lab.Tenant{{Name: "silver", Network: "ila"}},
		Containers: []lab.Container{
			{Name: "s1", Node: "n1", Tenant: "silver"}, {Name: "s2", Node: "n2", Tenant: "silver"},
		},
	}
	spec.Learning = "pull"
	l := tracingLab{labtest.New(t, spec), labtest.Binary(t)}
	ctx := labtest.Context(t)
	seen := map[string]bool{}
	await(ctx, t, "delivered", func() bool {
		shown, _ := l.trace(ctx, t, "s1", "s2", "udp/53")
		if shown.Verdict != trace.Delivered && shown.Drop != "no-mapping" {
			t.Fatalf("%s %s", shown.Verdict, shown.Drop)
		}
		seen[stages(shown)] = true
		return shown.Verdict == trace.Delivered
	})
	for _, want := range []string{
		"n1 container, n1 drop", "n1 container, n1 translate, n1 uplink, n2 uplink, n2 drop",
		"n1 container, n1 translate, n1 uplink, n2 uplink, n2 deliver",
	} {
		if !seen[want] {
			t.Errorf("no trace shows %q; they show %v", want, slices.Collect(maps.Keys(seen)))
		}
	}
}
