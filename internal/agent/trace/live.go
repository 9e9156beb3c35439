package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// A trace ends after these times even if its client stays connected: tracing programs are slower, and other clients
// wait for their turn.
const (
	longestFollow = dpapi.LongestTrace
	longestSend   = 10 * time.Second // of one event, to a client that reads nothing
	turnWait      = 2 * time.Second  // for another trace, whose client may have just gone
)

// Follow reports what the programs do with selected packets until ctx ends. It calls send with nil once no later packet
// is missed, then with each event. One Follow runs at a time; another one waits for a moment. It follows packets
// between containers of one tenant; an empty name means all tenants.
func (t *Tracer) Follow(
	ctx context.Context,
	f dpapi.PacketFilter,
	tenant string,
	send func(*pilasterv1.PacketEvent) error,
) error {
	select {
	case t.following <- struct{}{}:
	case <-time.After(turnWait):
		return refusal.New(refusal.ErrExists, "another trace runs on this node; try again when it has ended")
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, longestFollow)
	events, err := t.Path.Follow(ctx, t.withEnds(f, tenant))
	if err != nil {
		cancel()
		<-t.following
		return err
	}
	end := sync.OnceFunc(func() { // waits until the programs are detached
		cancel()
		for range events {
		}
		<-t.following
	})
	defer end()
	// A blocked send returns only when the client reads or disconnects, so it does not keep the programs meanwhile.
	give := func(e *pilasterv1.PacketEvent) error {
		blocked := time.AfterFunc(longestSend, end)
		err := send(e)
		if !blocked.Stop() {
			return refusal.New(refusal.ErrUnavailable, "the trace has ended, because its client read nothing for %v; "+
				"packets flow as before: try again", longestSend)
		}
		return err
	}
	if err := give(nil); err != nil {
		return err
	}
	for e := range events {
		if err := give(t.event(e)); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// withEnds adds the containers of this node that have the filter's addresses; of one tenant, or of all.
func (t *Tracer) withEnds(f dpapi.PacketFilter, tenant string) dpapi.PacketFilter {
	for _, r := range t.Core.Endpoints() {
		if !r.Lives() || tenant != "" && tenant != r.Tenant {
			continue
		}
		if hasAddress(r, f.Sources...) {
			f.Senders = append(f.Senders, r)
		}
		if hasAddress(r, f.Destinations...) {
			f.Receivers = append(f.Receivers, r)
		}
	}
	return f
}

func (t *Tracer) event(e dpapi.PacketEvent) *pilasterv1.PacketEvent {
	p := &pilasterv1.PacketEvent{
		Time: e.Time, Packet: e.Packet, Point: e.Point.String(), Hook: e.Hook,
		Protocol: uint32(e.Protocol), SourcePort: uint32(e.SourcePort), DestinationPort: uint32(e.DestinationPort),
		Length: uint32(e.Length), Cache: e.Cache, Action: e.Action, Drop: e.Reason, Vni: e.VNI, LostEvents: e.Lost,
	}
	if e.Source.IsValid() {
		p.Source, p.Destination = e.Source.String(), e.Destination.String()
	}
	if e.Device != 0 {
		p.Device = t.Path.DeviceName(e.Device)
	}
	if e.Target != 0 {
		p.ToDevice = t.Path.DeviceName(e.Target)
		p.ToEndpoint, _ = t.Core.NameOf(t.Path.EndpointOf(e.Target))
	}
	if e.Hook == "switch" && e.Action == "pass" { // Open vSwitch delivers it by this device
		p.ToDevice = p.Device
		p.ToEndpoint, _ = t.Core.NameOf(t.Path.EndpointOf(e.Device))
	}
	if e.Point == dpapi.PacketChecked {
		p.Allowed, p.EndpointId, p.Direction = e.Reason == "", uint32(e.Endpoint), "ingress"
		if e.Egress {
			p.Direction = "egress"
		}
	}
	if name := t.Core.RuleOf(dpapi.Event{Rule: e.Rule, Endpoint: e.Endpoint}); name != nil {
		p.Rule = &pilasterv1.RuleName{Policy: name.Policy, Rule: name.String(), Audit: name.Audit}
	}
	return p
}

// Probe is a packet to send from a container of this node, or from the node.
type Probe struct {
	Source, Destination netip.Addr // as the sender sees them
	Protocol            uint8      // ICMP, ICMPv6, TCP or UDP
	Port                uint16
	SourcePort          uint16 // 0: any
	Tenant              string // needed if several tenants on this node have the source
}

// longestProbe limits the wait for an answer.
const longestProbe = 10 * time.Second

// SendProbe sends a packet by a socket of the container's namespace, or of the node's, and waits for an answer until
// ctx ends. The kernel chooses the source of a packet from the node, as for its other processes.
func (t *Tracer) SendProbe(ctx context.Context, p Probe) (*pilasterv1.SendProbeResponse, error) {
	path, err := t.namespaceOf(p)
	if err != nil {
		return nil, err
	}
	ns, err := netns.Open(path)
	if err != nil {
		return nil, fmt.Errorf("send a probe from %v: %w", p.Source, err)
	}
	defer ns.Close()
	ctx, cancel := context.WithTimeout(ctx, longestProbe)
	defer cancel()
	source := netip.AddrPortFrom(p.Source, p.SourcePort)
	if t.isNode(p.Source) {
		source = netip.AddrPortFrom(netip.Addr{}, p.SourcePort)
	}
	probe := packet.Probe{Source: source, To: netip.AddrPortFrom(p.Destination, p.Port), Protocol: p.Protocol}
	answer, err := probe.Send(ctx, ns)
	if errors.Is(err, packet.ErrNoProbe) {
		return nil, refusal.New(refusal.ErrInvalid, "%v; nothing was sent; with --wait the command follows a packet "+
			"that you send", err)
	}
	if err != nil {
		return nil, fmt.Errorf("from %v: %w", p.Source, err)
	}
	return &pilasterv1.SendProbeResponse{
		Answered: answer.Kind != "", Answer: answer.Kind, Rtt: uint64(answer.RTT),
	}, nil
}

// ownNamespace is the namespace of this process: the node's.
const ownNamespace = "/proc/self/ns/net"

// isNode reports whether an address is this node's.
func (t *Tracer) isNode(a netip.Addr) bool { return a == tenant.NodeAddress(t.Prefix) }

func (t *Tracer) namespaceOf(p Probe) (string, error) {
	if t.isNode(p.Source) {
		if !isContainer(t.Core.Explain(p.Destination)) {
			return "", refusal.New(refusal.ErrInvalid, "%v is no container: a node's probes go to containers",
				p.Destination)
		}
		return ownNamespace, nil
	}
	for _, r := range t.Core.Endpoints() {
		if r.Lives() && (p.Tenant == "" || p.Tenant == r.Tenant) && hasAddress(r, p.Source) {
			return r.Netns, nil
		}
	}
	return "", refusal.New(refusal.ErrNotFound, "no container on this node has the address %v", p.Source)
}

// hasAddress reports whether a container sees one of these addresses as its own.
func hasAddress(r endpoint.Record, addresses ...netip.Addr) bool {
	return slices.ContainsFunc(r.Attachments, func(a endpoint.Attachment) bool {
		return slices.Contains(addresses, a.Address)
	})
}
