package datapath

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/packettest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// traced describes events without what differs between runs.
func traced(events []dpapi.PacketEvent) string {
	var lines []string
	for _, e := range events {
		line := fmt.Sprint(e.Point, " ", e.Hook)
		for _, part := range []string{e.Cache, e.Action, e.Reason} {
			if part != "" {
				line += " " + part
			}
		}
		if e.Source.IsValid() {
			line += fmt.Sprintf(" %v→%v", e.Source, e.Destination)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// drainTrace returns the events until none comes for a while.
func drainTrace(events <-chan dpapi.PacketEvent) (all []dpapi.PacketEvent) {
	for {
		select {
		case e := <-events:
			all = append(all, e)
		case <-time.After(200 * time.Millisecond):
			return all
		}
	}
}

// TestFollow: the tracing programs report each packet that matches at each place, and no other. They are at the hooks
// during a trace; after it the programs of before are.
func TestFollow(t *testing.T) {
	b := newProgBench(t)
	far := sees(b.b3.Addr())
	before := b.attached(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := b.datapath.Follow(ctx, dpapi.PacketFilter{
		Sources: []netip.Addr{b.b1.seen()}, Destinations: slices.Repeat([]netip.Addr{far}, dpapi.MaxTraced+1),
	}); err == nil {
		t.Fatal("more addresses than a filter has are accepted")
	}
	events, err := b.datapath.Follow(ctx, dpapi.PacketFilter{
		Sources:      []netip.Addr{b.b1.seen(), b.b1.plain(), b.b3.Addr()},
		Destinations: []netip.Addr{far, b.b3.Addr(), b.b2.seen(), b.b1.plain()},
		Protocol:     packet.ProtocolUDP,
		Port:         53,
		Senders:      []endpoint.Record{b.b1.record},
	})
	must(t, err)
	during := b.attached(t)
	for at, id := range during {
		if id == before[at] {
			t.Errorf("the program at %s is not replaced", at)
		}
	}
	must(t, b.datapath.checkEndpoint(t.Context(), b.b1.record))
	if s, err := b.datapath.Status(); err != nil || len(s.Problems) > 0 {
		t.Errorf("status during a trace: %v, %v", s.Problems, err)
	}
	programs := []*ebpf.Program{b.program(t, during["b1"]), b.program(t, during["uplink_in"])}
	way := func(from, to netip.Addr) string { return fmt.Sprintf(" %v→%v", from, to) }
	fromFar := packet.Packet{Source: b.b3.Addr(), Destination: b.b1.plain(), Body: gram}.Frame(b.uplinkMAC, b.uplinkMAC)
	last := packet.Packet{Source: b.b1.seen(), Destination: far, HopLimit: 1, Body: gram}
	forged := packet.Packet{Source: b.b3.Addr(), Destination: far, Body: gram}
	own, uplink := skb{Ifindex: b.b1.ifindex()}, skb{Ifindex: b.uplinkIfindex()}
	for _, c := range []struct {
		name    string
		program *ebpf.Program
		frame   []byte
		ctx     skb
		want    []string
	}{
		{"to another port", programs[0], b.frame(b.sent(far, udp(1000, 54))), own, nil},
		{"of another protocol", programs[0], b.frame(b.sent(far, tcp(1000, 53, packet.SYN))), own, nil},
		{"to another container", programs[0], b.frame(b.sent(b.r1.seen(), gram)), own, nil},
		{"to the same node", programs[0], b.frame(b.sent(b.b2.seen(), gram)), own, []string{
			"enter container miss" + way(b.b1.seen(), b.b2.seen()),
			"leave container redirect" + way(b.b1.seen(), b.b2.seen()),
		}},
		{"to the same node again", programs[0], b.frame(b.sent(b.b2.seen(), gram)), own, []string{
			"enter container hit" + way(b.b1.seen(), b.b2.seen()),
			"leave container redirect" + way(b.b1.seen(), b.b2.seen()),
		}},
		{"across", programs[0], b.frame(b.sent(far, gram)), own, []string{
			"enter container miss" + way(b.b1.seen(), far),
			"leave container redirect" + way(b.b1.plain(), b.b3.Addr()),
		}},
		{"at its last hop", programs[0], b.frame(last), own, []string{
			"enter container miss" + way(b.b1.seen(), far),
			"drop container hop-limit" + way(b.b1.seen(), far),
			"leave container redirect",
		}},
		{"from a forged source", programs[0], b.frame(forged), own, []string{
			"enter container miss" + way(b.b3.Addr(), far),
			"drop container src-not-own" + way(b.b3.Addr(), far),
			"leave container drop" + way(b.b3.Addr(), far),
		}},
		{"from another container", programs[0], b.frame(b.sent(far, gram)), skb{Ifindex: b.b2.ifindex()}, nil},
		{"from the fabric", programs[1], fromFar, uplink, []string{
			"enter uplink-in miss" + way(b.b3.Addr(), b.b1.plain()),
			"leave uplink-in redirect" + way(far, b.b1.seen()),
		}},
		{"from the fabric again", programs[1], fromFar, uplink, []string{
			"enter uplink-in hit" + way(b.b3.Addr(), b.b1.plain()),
			"leave uplink-in redirect" + way(far, b.b1.seen()),
		}},
	} {
		b.runOnCPU(t, c.program, c.frame, c.ctx)
		got := drainTrace(events)
		if lines := strings.Split(traced(got), "\n"); len(lines) < len(c.want) || len(c.want) == 0 && len(got) > 0 ||
			!slices.EqualFunc(lines[:len(c.want)], c.want, strings.HasPrefix) ||
			len(c.want) > 0 && len(lines) > len(c.want) {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, traced(got), strings.Join(c.want, "\n"))
		}
		for i := range got {
			if got[i].Packet != got[0].Packet || got[i].Time < got[0].Time || got[i].Lost != 0 {
				t.Errorf("%s: event %d is %+v after %+v", c.name, i, got[i], got[0])
			}
			if got[i].Point == dpapi.PacketLeaves && c.program == programs[1] &&
				b.datapath.EndpointOf(got[i].Target) != b.b1.record.ID {
				t.Errorf("%s: it goes to device %d", c.name, got[i].Target)
			}
		}
	}
	cancel()
	for range events {
	}
	if after := b.attached(t); !maps.Equal(after, before) {
		t.Errorf("attached after a trace: %v, before %v", after, before)
	}
	must(t, b.datapath.checkEndpoint(t.Context(), b.b1.record))
}

// attached returns the ids of the programs at the hooks where packets are traced.
func (b *progBench) attached(t *testing.T) map[string]ebpf.ProgramID {
	t.Helper()
	l, err := b.datapath.Netlink.LinkByName(b.b1.record.Device.HostName)
	must(t, err)
	id, err := b.datapath.ProgramOn(l, netlink.HANDLE_MIN_INGRESS)
	must(t, err)
	ids := map[string]ebpf.ProgramID{"b1": id}
	for _, h := range b.datapath.UplinkHooks() {
		pinned, err := link.LoadPinnedLink(filepath.Join(b.datapath.LinksDir(), h.Name), nil)
		must(t, err)
		info, err := pinned.Info()
		must(t, err)
		ids[h.Name] = info.Program
		must(t, pinned.Close())
	}
	return ids
}

func (b *progBench) program(t *testing.T, id ebpf.ProgramID) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgramFromID(id)
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

// TestFollowPolicy: what policy decides is reported, with the rule, and so is whether the verdict cache decided.
func TestFollowPolicy(t *testing.T) {
	b := newProgBench(t)
	b.says(t, 10, 1, denies|ruleNothing, 80, accepts|ruleWeb) // in: TCP to 80 alone
	b.says(t, 20, 1, accepts|ruleWeb, 25, denies|ruleNothing) // out: all but TCP to 25
	policed(t, b, bpfobj.PilasterPolTarget{Sets: [2]uint64{20, 10}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events, err := b.datapath.Follow(ctx, dpapi.PacketFilter{
		Sources:      []netip.Addr{b.b1.seen(), b.b3.Addr()},
		Destinations: []netip.Addr{sees(b.b3.Addr()), b.b1.plain()}, Protocol: packet.ProtocolTCP,
		Senders: []endpoint.Record{b.b1.record},
	})
	must(t, err)
	during := b.attached(t)
	programs := map[bool]*ebpf.Program{true: b.program(t, during["uplink_in"]), false: b.program(t, during["b1"])}
	for _, c := range []struct {
		name string
		in   bool
		body packet.Body
		want string // at PacketChecked
	}{
		{"begins a session", true, tcp(7, 80, packet.SYN), "ingress 1 miss  rule 1"},
		{"its answer", false, tcp(80, 7, synAck), "egress 1 miss  rule 1"},
		{"the answer's answer", true, tcp(7, 80, packet.ACK), "ingress 1 miss  rule 1"},
		{"established", true, tcp(7, 80, packet.ACK), "ingress 1 hit  rule 0"},
		{"denied", true, tcp(7, 81, packet.SYN), "ingress 1 miss policy-denied rule 2"},
		{"denied at its sender", false, tcp(7, 25, packet.SYN), "egress 1 miss policy-denied rule 2"},
	} {
		_, own, frame := b.fromEither(c.in, c.body)
		b.runOnCPU(t, programs[c.in], frame, own)
		var got []string
		for _, e := range drainTrace(events) {
			if e.Point == dpapi.PacketChecked {
				direction := "ingress"
				if e.Egress {
					direction = "egress"
				}
				got = append(got, fmt.Sprintf("%s %d %s %s rule %d", direction, e.Endpoint, e.Cache, e.Reason, e.Rule))
			}
		}
		if len(got) != 1 || got[0] != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// runOnCPU runs a program on a packet, always on one CPU: caches are per CPU.
func (b *progBench) runOnCPU(t *testing.T, p *ebpf.Program, frame []byte, ctx skb) {
	t.Helper()
	must(t, b.ns.Do(func() error {
		if err := onFirstCPU(); err != nil {
			return err
		}
		_, err := p.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+answerLength), Context: ctx})
		return err
	}))
}

// TestFollowLosesNothing: packets flow while tracing programs come and go on both nodes, and each trace reports some.
func TestFollowLosesNothing(t *testing.T) {
	w := newWire(t)
	a, b := w.nodes[0].add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	mustReach(t, a, b, "before")
	losesNothing(t, [][2]*testContainer{{a, b}, {b, a}}, time.Millisecond, func() {
		for range 5 {
			ctx, cancel := context.WithCancel(t.Context())
			var traces []<-chan dpapi.PacketEvent
			for _, end := range []*testContainer{a, b} {
				events, err := end.node.datapath.Follow(ctx, dpapi.PacketFilter{
					Sources:      []netip.Addr{a.seen(), a.plain()},
					Destinations: []netip.Addr{b.seen(), b.plain()},
					Protocol:     packet.ProtocolICMPv6,
					Senders:      []endpoint.Record{end.record},
				})
				must(t, err)
				if e := <-events; e.Point != dpapi.PacketEnters || !e.Source.IsValid() {
					t.Errorf("the first event is %+v", e)
				}
				traces = append(traces, events)
			}
			cancel()
			for _, events := range traces {
				for range events {
				}
			}
		}
	})
	for _, c := range []*testContainer{a, b} {
		if err := c.node.datapath.checkEndpoint(t.Context(), c.record); err != nil {
			t.Errorf("after the traces: %v", err)
		}
	}
}

// TestFollowDuringMigration: a container that joins a network during a trace keeps its new entry program afterwards.
func TestFollowDuringMigration(t *testing.T) {
	b := newNimitzBench(t)
	both, own := b.records[0], b.records[0]
	own.Attachments = slices.Clone(both.Attachments)
	own.Attachments[0].Network = nimitz.Name
	both.Attachments = append(slices.Clone(both.Attachments), own.Attachments...)
	must(t, b.datapath.Attach(own))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events, err := b.datapath.Follow(ctx, dpapi.PacketFilter{
		Sources: []netip.Addr{own4}, Destinations: []netip.Addr{far4}, Senders: []endpoint.Record{own},
	})
	must(t, err)
	l, err := b.datapath.Netlink.LinkByName(own.Device.HostName)
	must(t, err)
	if err := b.datapath.CheckProgram(l, netlink.HANDLE_MIN_INGRESS, b.datapath.Objects.PilNimitz, ""); err != nil {
		t.Errorf("during the trace, CHECK says %v", err)
	}
	must(t, b.datapath.Attach(both))
	cancel()
	for range events {
	}
	there, err := b.datapath.ProgramOn(l, netlink.HANDLE_MIN_INGRESS)
	must(t, err)
	if there != idOf(t, b.datapath.Objects.PilContainer) {
		t.Errorf("after the trace program %d is attached, want pil_container", there)
	}
}

// TestFollowOneTenant: a trace of a container does not show packets of another tenant's container that has the same
// address. Both containers' packets reach network nimitz by the program for all networks.
func TestFollowOneTenant(t *testing.T) {
	b := newNimitzBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events, err := b.datapath.Follow(ctx, dpapi.PacketFilter{
		Sources: []netip.Addr{own4}, Destinations: []netip.Addr{far4}, Protocol: packet.ProtocolUDP, VNI: 7,
		Senders: b.records[:1],
	})
	must(t, err)
	send := func(port pipeline.Port) []dpapi.PacketEvent {
		from := b.inject[port]
		sent := packet.Packet{Source: own4, Destination: far4, Body: gram}
		must(t, from.Send(sent.Frame(host.GatewayMAC, from.MAC())))
		return drainTrace(events)
	}
	if got := send(packettest.Ports[1]); len(got) > 0 {
		t.Errorf("a packet of another tenant's container:\n%s\nwant no event", traced(got))
	}
	if got := send(packettest.Ports[0]); len(got) == 0 || got[0].Hook != "container" {
		t.Errorf("a packet of the container:\n%s\nwant its way from the container on", traced(got))
	}
}

func idOf(t *testing.T, p *ebpf.Program) ebpf.ProgramID {
	t.Helper()
	info, err := p.Info()
	must(t, err)
	id, _ := info.ID()
	return id
}
