package trace_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/trace"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// tables are a fake packet path.
type tables struct {
	sources map[netip.Addr]dpapi.SourceEntry
	locals  map[netip.Addr]dpapi.LocalEntry
	tenants map[address.TenantID]dpapi.TenantEntry
	egress  map[endpoint.ID]netip.Addr
	gateway netip.Addr // of this node for tenants; zero: it is none
	noRoute error
	hop     string // asked for
	filter  dpapi.PacketFilter
	events  []dpapi.PacketEvent
}

func (p *tables) TableNames() dpapi.TableNames {
	return dpapi.TableNames{Sources: "sources", Locals: "locals", Tenants: "tenants", Keys: "keys", Access: "access",
		Egress: "egress", Gateways: "gateways", Services: "services", Backends: "backends",
		Exposed: "exposed", Maglev: "maglev", Connections: "connections", Targets: "targets"}
}

func (p *tables) LookupSource(a netip.Addr) (dpapi.SourceEntry, bool, error) {
	e, found := p.sources[a]
	return e, found, nil
}

func (p *tables) LookupLocal(a netip.Addr) (dpapi.LocalEntry, bool, error) {
	e, found := p.locals[a]
	return e, found, nil
}

func (p *tables) LookupTenantID(id address.TenantID) (dpapi.TenantEntry, bool, error) {
	e, found := p.tenants[id]
	return e, found, nil
}

func (p *tables) LookupEgress(id endpoint.ID) (netip.Addr, bool, error) {
	a, found := p.egress[id]
	return a, found, nil
}

func (p *tables) LookupGateway(address.TenantID) (netip.Addr, bool, error) {
	return p.gateway, p.gateway.IsValid(), nil
}

func (p *tables) NextHop(from, to netip.Addr) (dpapi.NextHop, error) {
	p.hop = fmt.Sprintf("%v → %v", from, to)
	return dpapi.NextHop{Device: "eth0", Via: netip.MustParseAddr("fe80::1")}, p.noRoute
}

func (p *tables) DeviceName(number uint32) string      { return fmt.Sprint("pil", number) }
func (p *tables) EndpointOf(number uint32) endpoint.ID { return endpoint.ID(number) }
func (p *tables) fill(r endpoint.Record, clear, key bool) {
	a := r.Attachments[0]
	device := uint32(r.Device.HostIfindex)
	p.sources[a.Address] = dpapi.SourceEntry{
		Plaintext: a.Plaintext, Device: device, Endpoint: r.ID, TenantID: r.TenantID,
	}
	p.locals[a.Plaintext] = dpapi.LocalEntry{Address: a.Address, Device: device, Endpoint: r.ID}
	p.tenants[r.TenantID] = dpapi.TenantEntry{
		IDs: []address.TenantID{r.TenantID}, Clear: clear, HasKey: key, Gateway: netip.MustParseAddr("fc00::99"),
	}
}

func (p *tables) Follow(ctx context.Context, f dpapi.PacketFilter) (<-chan dpapi.PacketEvent, error) {
	p.filter = f
	events := make(chan dpapi.PacketEvent)
	go func() {
		defer close(events)
		for _, e := range p.events {
			select {
			case events <- e:
			case <-ctx.Done():
				return
			}
		}
		<-ctx.Done()
	}()
	return events, nil
}

// bed is a node with two containers of tenant blue.
type bed struct {
	*agenttest.Bed
	path   *tables
	c1, c2 endpoint.Record
}

func newBed(t *testing.T) (bed, *trace.Tracer) {
	b := bed{Bed: agenttest.New(t), path: &tables{
		sources: map[netip.Addr]dpapi.SourceEntry{}, locals: map[netip.Addr]dpapi.LocalEntry{},
		tenants: map[address.TenantID]dpapi.TenantEntry{},
	}}
	b.c1, b.c2 = b.MustAdd("c1"), b.MustAdd("c2")
	b.path.fill(b.c1, false, true)
	b.path.fill(b.c2, false, true)
	return b, trace.New(trace.Config{
		Core: b.Core, Path: b.path, Plan: address.DefaultPlan(), Prefix: agenttest.NodePrefix, Node: "n1",
	})
}

// summary describes a part of a trace.
func summary(r *pilasterv1.TraceResponse) string {
	var stages []string
	for _, s := range r.Steps {
		stages = append(stages, s.Stage)
	}
	return strings.TrimSpace(strings.Join(stages, ", ") + ": " + r.Verdict + " " + r.Drop)
}

// TestTrace: each place where bpf/hooks/container.h and bpf/hooks/uplink.h drop a packet ends a trace with that reason.
func TestTrace(t *testing.T) {
	elsewhere := netip.MustParsePrefix("fd70:696c:6100:77::/64")
	for name, c := range map[string]struct {
		change func(b *bed, of *agent.Connection)
		want   string
	}{
		"to the same node": {func(*bed, *agent.Connection) {},
			"container, translate, endpoint, policy, policy, deliver: delivered"},
		"to another node": {func(b *bed, of *agent.Connection) {
			p := address.Split(b.c2.Attachments[0].Plaintext)
			p.Node = elsewhere
			of.Destination = ciphertext(t, p)
		}, "container, translate, next hop, policy: sent"},
		"by its plaintext address": {func(b *bed, of *agent.Connection) {
			of.Source = b.c1.Attachments[0].Plaintext
			of.Destination = b.c2.Attachments[0].Plaintext
		}, "container, translate, endpoint, policy, policy, deliver: delivered"},
		"without an entry": {func(b *bed, of *agent.Connection) { delete(b.path.sources, of.Source) },
			"container: dropped src-not-own"},
		"from another device": {func(b *bed, of *agent.Connection) {
			e := b.path.sources[of.Source]
			e.Device++
			b.path.sources[of.Source] = e
		}, "container: dropped src-not-own"},
		"of an unknown tenant": {func(b *bed, _ *agent.Connection) { delete(b.path.tenants, b.c1.TenantID) },
			"container, translate: dropped no-key"},
		"without the key": {func(b *bed, _ *agent.Connection) { b.path.fill(b.c1, false, false) },
			"container, translate: dropped no-key"},
		"to the node": {func(_ *bed, of *agent.Connection) { of.Destination = netip.MustParseAddr("fc00::99") },
			"container, node: dropped to-node"},
		"outside": {func(_ *bed, of *agent.Connection) { of.Destination = netip.MustParseAddr("2001:db8::1") },
			"container, rule: dropped dst-not-private"},
		"to an address that was made up": {func(_ *bed, of *agent.Connection) {
			of.Destination = netip.MustParseAddr("fc12::1")
		}, "container, translate: dropped dst-undecryptable"},
		"to another tenant under the own key": {func(b *bed, of *agent.Connection) {
			p := address.Split(b.c2.Attachments[0].Plaintext)
			p.Tenant += 5
			of.Destination = ciphertext(t, p)
		}, "container, translate: dropped tenant-mismatch"},
		"to a node under the own key": {func(b *bed, of *agent.Connection) {
			p := address.Split(b.c2.Attachments[0].Plaintext)
			p.Tenant = 0
			of.Destination = ciphertext(t, p)
		}, "container, translate: dropped to-node"},
		"to a reserved app": {func(b *bed, of *agent.Connection) {
			p := address.Split(b.c2.Attachments[0].Plaintext)
			p.App = address.EgressApp
			of.Destination = ciphertext(t, p)
		}, "container, translate: dropped app-reserved"},
		"to the alias of a node": {func(b *bed, of *agent.Connection) {
			p := address.Split(b.c2.Attachments[0].Plaintext)
			p.App, p.Node = address.GatewayApp, elsewhere
			of.Destination = ciphertext(t, p)
		}, "container, node: dropped to-node"},
		"to a container that has gone": {func(b *bed, _ *agent.Connection) {
			delete(b.path.locals, b.c2.Attachments[0].Plaintext)
		}, "container, translate, endpoint: dropped no-endpoint"},
		"without a route": {func(b *bed, of *agent.Connection) {
			p := address.Split(b.c2.Attachments[0].Plaintext)
			p.Node = elsewhere
			of.Destination, b.path.noRoute = ciphertext(t, p), errors.New("no route")
		}, "container, translate, next hop: dropped no-route"},
		"clear, to a private address": {func(b *bed, of *agent.Connection) {
			b.path.fill(b.c1, true, false)
			of.Destination = netip.MustParseAddr("fc12::1")
		}, "container, translate: dropped dst-not-private"},
		"clear, to a node": {func(b *bed, of *agent.Connection) {
			b.path.fill(b.c1, true, false)
			of.Destination = netip.MustParseAddr("fd70:696c:6100:1::1")
		}, "container, node: dropped to-node"},
		"clear, to another tenant": {func(b *bed, of *agent.Connection) {
			b.path.fill(b.c1, true, false)
			of.Destination = netip.MustParseAddr("fd70:696c:6100:77:0:700:100:1")
		}, "container, translate: dropped tenant-mismatch"},
		"from the fabric": {func(b *bed, of *agent.Connection) { of.Source = b.far(elsewhere) },
			"uplink, endpoint, policy, translate, deliver: delivered"},
		"from the fabric, to a container that has gone": {func(b *bed, of *agent.Connection) {
			of.Source = b.far(elsewhere)
			delete(b.path.locals, b.c2.Attachments[0].Plaintext)
		}, "uplink, endpoint: dropped no-endpoint"},
		"from the fabric, of another tenant": {func(b *bed, of *agent.Connection) {
			p := address.Split(b.far(elsewhere))
			p.Tenant += 5
			of.Source = p.Addr()
		}, "uplink, endpoint, endpoint: dropped tenant-mismatch"},
		"from the fabric, to a reserved app": {func(b *bed, of *agent.Connection) {
			of.Source = b.far(elsewhere)
			p := address.Split(b.c2.Attachments[0].Plaintext)
			p.App = address.FirstReservedApp
			of.Destination = p.Addr()
		}, "uplink, endpoint: dropped app-reserved"},
		"between other nodes": {func(b *bed, of *agent.Connection) {
			of.Source, of.Destination = b.far(elsewhere), b.far(netip.MustParsePrefix("fd70:696c:6100:78::/64"))
		}, ":"},
	} {
		b, tracer := newBed(t)
		of := agent.Connection{Source: b.c1.Attachments[0].Address, Destination: b.c2.Attachments[0].Address,
			Protocol: policy.TCP, Port: 80}
		c.change(&b, &of)
		got, err := tracer.Trace(t.Context(), of, trace.Way{})
		if err != nil || summary(got) != c.want {
			t.Errorf("%s: %s, %v; want %s", name, summary(got), err, c.want)
		}
	}
}

// ciphertext returns the ciphertext of an address under blue's key, with the first index that makes it private.
func ciphertext(t *testing.T, p address.Plain) netip.Addr {
	t.Helper()
	_, a, err := address.NewCipher(agenttest.BlueKey).Draw(address.DefaultPlan().Private, p)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// far returns the plaintext address of a blue container on another node.
func (b bed) far(node netip.Prefix) netip.Addr {
	p := address.Split(b.c1.Attachments[0].Plaintext)
	p.Node = node
	return p.Addr()
}

// TestTraceNimitz: a trace has the entries of the switch that the packet meets.
func TestTraceNimitz(t *testing.T) {
	b := agenttest.NewWithTwoNetworks(t)
	c1, err := b.Add(t.Context(), b.Green("c1"))
	if err != nil {
		t.Fatal(err)
	}
	entries := []pipeline.Entry{
		pipeline.Peer{Nodes: address.DefaultPlan().Base},
		pipeline.Sender{Port: pipeline.Port(c1.ID), Address: c1.Attachments[0].Address, VNI: 3, Identity: 1},
		pipeline.Forward{VNI: 3, To: netip.MustParsePrefix("10.0.3.1/32"), Port: pipeline.Port(c1.ID)},
		pipeline.Forward{VNI: 3, To: netip.MustParsePrefix("10.0.9.0/24"), Port: pipeline.VXLAN,
			VTEP: netip.MustParseAddr("fd70:696c:6100:9::2")},
		pipeline.Forward{VNI: 3, To: netip.MustParsePrefix("10.0.0.0/16")},
		pipeline.NorthSouth{VNI: 3, To: netip.MustParsePrefix("10.7.0.0/16")},
		pipeline.SNAT{VNI: 3, Real: c1.Attachments[0].Address, Virtual: netip.MustParseAddr("100.64.0.1")},
		pipeline.Forward{VNI: 3, To: netip.MustParsePrefix("10.7.0.0/16"), Port: pipeline.Gateway},
	}
	tracer := trace.New(trace.Config{
		Core: b.Core, Path: &tables{}, Plan: address.DefaultPlan(), Prefix: agenttest.NodePrefix, Node: "n1",
		Pipelines: map[string]trace.Pipeline{tenant.Nimitz: {
			Entries: func(context.Context) ([]pipeline.Entry, error) { return entries, nil },
		}},
	})
	own := c1.Attachments[0].Address
	for name, c := range map[string]struct {
		from, to string
		want     string
	}{
		"to another node": {own.String(), "10.0.9.4", "container, register, forwarding, policy, encap: sent"},
		"to a subnet that no node has": {own.String(), "10.0.5.4",
			"container, register, forwarding, forwarding: dropped no-endpoint"},
		"outside": {own.String(), "10.7.0.1",
			"container, register, nat, nat, forwarding, policy, deliver: delivered"},
		"nowhere": {own.String(), "192.0.2.1", "container, register, forwarding: dropped no-route"},
		"from other nodes": {"10.0.9.4", own.String(),
			"decap, forwarding, policy, policy, deliver: delivered"},
		"from a node that is unknown": {"192.0.2.1", own.String(), "decap: dropped peer-unknown"},
		"between others":              {"10.0.9.4", "10.0.5.4", ":"},
	} {
		of := agent.Connection{Source: netip.MustParseAddr(c.from), Destination: netip.MustParseAddr(c.to),
			Protocol: policy.TCP, Port: 80, PeerApp: 1}
		got, err := tracer.Trace(t.Context(), of, trace.Way{})
		if err != nil || summary(got) != c.want {
			t.Errorf("%s: %s, %v; want %s", name, summary(got), err, c.want)
		}
	}
}

// TestTraceTunnels4: with tunnels over IPv4, a trace has the entries of the network's own tables. It names the other
// node by its prefix, and no node if another speaker has the other end.
func TestTraceTunnels4(t *testing.T) {
	b := agenttest.NewWithTwoNetworks(t)
	c1, err := b.Add(t.Context(), b.Green("c1"))
	if err != nil {
		t.Fatal(err)
	}
	own, segment := c1.Attachments[0].Address, pipeline.VNI(0x800003)
	speaker := netip.MustParseAddr("192.0.2.7")
	from := func(p string, theirs pipeline.VNI) pipeline.Entry {
		return pipeline.Foreign{
			Edge: netip.PrefixFrom(speaker, 32), Theirs: theirs, Source: netip.MustParsePrefix(p), VNI: 3,
		}
	}
	entries := []pipeline.Entry{
		pipeline.Sender{Port: pipeline.Port(c1.ID), Address: own, VNI: 3, Identity: 1},
		pipeline.Forward{VNI: 3, To: netip.PrefixFrom(own, 32), Port: pipeline.Port(c1.ID)},
		pipeline.Forward{VNI: 3, To: netip.MustParsePrefix("10.0.9.0/24"), Port: pipeline.VXLAN,
			VTEP: netip.MustParseAddr("10.71.0.9")},
		pipeline.Forward{VNI: 3, To: netip.MustParsePrefix("10.0.9.7/32"), Port: pipeline.VXLAN, VTEP: speaker,
			Wire: segment, Outside: true},
		pipeline.Forward{VNI: 3, To: netip.MustParsePrefix("10.8.0.0/16"), Port: pipeline.VXLAN, VTEP: speaker,
			Outside: true},
		from("10.0.9.7/32", segment), from("10.8.0.0/16", 3),
	}
	path := &tables{}
	tracer := trace.New(trace.Config{
		Core: b.Core, Path: path, Plan: address.DefaultPlan(), Prefix: agenttest.NodePrefix, Node: "n1",
		Pipelines: map[string]trace.Pipeline{tenant.Nimitz: {
			Entries: func(context.Context) ([]pipeline.Entry, error) { return entries, nil },
			Pool:    netip.MustParsePrefix("10.71.0.0/16"),
		}},
	})
	const node = "fd70:696c:6100:9::/64"
	for name, c := range map[string]struct {
		from, to, want, next, hop string
	}{
		"to another node": {own.String(), "10.0.9.4", "container, register, forwarding, policy, encap: sent", node,
			"10.71.0.1 → 10.71.0.9"},
		"to a host in the segment": {own.String(), "10.0.9.7",
			"container, register, forwarding, policy, encap: sent", "", "10.71.0.1 → 192.0.2.7"},
		"from another node": {"10.0.9.4", own.String(),
			"decap, forwarding, policy, policy, deliver: delivered", node, ""},
		"from a host in the segment": {"10.0.9.7", own.String(),
			"decap, register, forwarding, policy, policy, deliver: delivered", "", ""},
		"from behind another router": {"10.8.0.4", own.String(),
			"decap, register, forwarding, policy, deliver: delivered", "", ""},
		"from no host": {"10.0.5.4", own.String(), "decap, register: dropped foreign-unknown", "", ""},
	} {
		of := agent.Connection{Source: netip.MustParseAddr(c.from), Destination: netip.MustParseAddr(c.to),
			Protocol: policy.TCP, Port: 80, PeerApp: 1}
		path.hop = ""
		got, err := tracer.Trace(t.Context(), of, trace.Way{})
		if err != nil || summary(got) != c.want || got.Next != c.next || path.hop != c.hop {
			t.Errorf("%s: %s, next node %q, next hop for %q, %v; want %s, %q, %q", name, summary(got), got.GetNext(),
				path.hop, err, c.want, c.next, c.hop)
		}
		for _, s := range got.GetSteps() {
			if s.Stage == "forwarding" && s.Entry != "nimitz_forward_v1" {
				t.Errorf("%s: the entry is in %q", name, s.Entry)
			}
		}
	}
}

// TestFollow: events have names, the senders of this node are followed, and a second trace is refused meanwhile.
func TestFollow(t *testing.T) {
	b, tracer := newBed(t)
	synctest.Test(t, func(t *testing.T) { b.follow(t, trace.New(tracer.Config)) })
}

func (b *bed) follow(t *testing.T, tracer *trace.Tracer) {
	seen := []netip.Addr{b.c1.Attachments[0].Address}
	b.path.events = []dpapi.PacketEvent{
		{Point: dpapi.PacketEnters, Hook: "container", Device: 7, Source: seen[0], Destination: seen[0]},
		{Point: dpapi.PacketLeaves, Action: "redirect", Target: uint32(b.c2.ID)},
		{Point: dpapi.PacketChecked, Egress: true, Endpoint: b.c1.ID},
	}
	ctx, cancel := context.WithCancel(t.Context())
	var got []*pilasterv1.PacketEvent
	filter := dpapi.PacketFilter{Sources: seen, Destinations: seen, Protocol: packet.ProtocolTCP}
	err := tracer.Follow(ctx, filter, "", func(e *pilasterv1.PacketEvent) error {
		if err := tracer.Follow(ctx, filter, "", nil); !errors.Is(err, refusal.ErrExists) {
			t.Errorf("a second trace: %v", err)
		}
		if got = append(got, e); len(got) == 4 {
			cancel()
		}
		return nil
	})
	if !errors.Is(err, context.Canceled) || len(got) != 4 || got[0] != nil {
		t.Fatalf("%d events, %v", len(got), err)
	}
	if got[1].Device != "pil7" || got[2].ToEndpoint != "default/c2" || got[3].Direction != "egress" || !got[3].Allowed {
		t.Errorf("events: %v", got[1:])
	}
	for _, ends := range [][]endpoint.Record{b.path.filter.Senders, b.path.filter.Receivers} {
		if len(ends) != 1 || ends[0].ID != b.c1.ID {
			t.Errorf("senders or receivers: %v", ends)
		}
	}
	ctx, cancel = context.WithCancel(t.Context())
	end := func(*pilasterv1.PacketEvent) error { cancel(); return nil }
	if err := tracer.Follow(ctx, filter, "red", end); err == nil ||
		len(b.path.filter.Senders)+len(b.path.filter.Receivers) != 0 {
		t.Errorf("of another tenant: %v, %v, %v", b.path.filter.Senders, b.path.filter.Receivers, err)
	}
}

// TestFollowBlocked: a client that does not read loses its turn after a while, also if its call does not end.
func TestFollowBlocked(t *testing.T) {
	b, tracer := newBed(t)
	seen := []netip.Addr{b.c1.Attachments[0].Address}
	filter := dpapi.PacketFilter{Sources: seen, Destinations: seen, Protocol: packet.ProtocolTCP}
	synctest.Test(t, func(t *testing.T) {
		tracer := trace.New(tracer.Config)
		reads, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			ended <- tracer.Follow(t.Context(), filter, "", func(*pilasterv1.PacketEvent) error { <-reads; return nil })
		}()
		synctest.Wait()
		next := func() error {
			return tracer.Follow(t.Context(), filter, "", func(*pilasterv1.PacketEvent) error { return io.EOF })
		}
		if err := next(); !errors.Is(err, refusal.ErrExists) {
			t.Errorf("a trace while another one is blocked: %v", err)
		}
		time.Sleep(7 * time.Second)
		if err := next(); !errors.Is(err, io.EOF) {
			t.Errorf("a trace shortly before another one ends: %v", err)
		}
		synctest.Wait()
		if err := next(); !errors.Is(err, io.EOF) {
			t.Errorf("a trace after another one was blocked: %v", err)
		}
		close(reads)
		if err := <-ended; !errors.Is(err, refusal.ErrUnavailable) {
			t.Errorf("the blocked trace: %v", err)
		}
	})
}

// TestSendProbe: a probe that no container sends, or of a protocol without probes, is refused.
func TestSendProbe(t *testing.T) {
	b, tracer := newBed(t)
	own := b.c1.Attachments[0].Address
	for _, c := range []struct {
		probe trace.Probe
		want  error
	}{
		{trace.Probe{Source: netip.MustParseAddr("fc00::5"), Destination: own, Protocol: policy.TCP, Port: 80},
			refusal.ErrNotFound},
		{trace.Probe{Source: own, Destination: own, Protocol: policy.TCP, Port: 80, Tenant: "red"},
			refusal.ErrNotFound},
	} {
		if _, err := tracer.SendProbe(t.Context(), c.probe); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.probe, err, c.want)
		}
	}
	if slices.ContainsFunc(b.Driver.Calls, func(call string) bool { return strings.HasPrefix(call, "Send") }) {
		t.Error("something was sent")
	}
}
