package control

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/state"
)

// heldPage is the number of addresses and subnets per registration: as many as the orchestrator processes quickly, even
// if its store has lost them. The node registers once per page.
const heldPage = 2048

// Register registers the node, with retries. It returns an error if a retry would not help, or when ctx ends.
func (l *Link) Register(ctx context.Context) error {
	for n := 0; ; n++ {
		_, err := l.register(ctx)
		if err == nil {
			l.lastRegistration, _ = l.registration(l.uplink, map[heldMapping]bool{})
		}
		if err == nil || !retriable(err) {
			return err
		}
		l.markDisconnected(err, n)
		if err := l.config.Wait(ctx, n, 0); err != nil {
			return err
		}
	}
}

func (l *Link) register(ctx context.Context) (pilasterv1connect.NodeServiceClient, error) {
	client, err := l.dial(ctx)
	if err != nil {
		return nil, err
	}
	addrs, err := l.config.UplinkAddresses()
	if err != nil {
		return nil, fmt.Errorf("addresses of the uplink: %w", err)
	}
	sent := map[heldMapping]bool{}
	defer l.freeGone(sent)
	for more := true; more; {
		var req *pilasterv1.RegisterRequest
		before := len(sent)
		req, more = l.registration(addrs, sent)
		resp, err := client.Register(ctx, connect.NewRequest(req))
		if err != nil && before > 0 {
			return nil, fmt.Errorf(
				"registering this node: the cluster accepted %d of its addresses and subnets, but not the next %d: %w",
				before,
				len(sent)-before,
				err,
			)
		}
		if err != nil {
			return nil, fmt.Errorf("registering this node: %w", err)
		}
		if before > 0 {
			continue
		}
		m, err := state.MembershipFromProto(resp.Msg)
		if err != nil {
			return nil, err
		}
		was, joined := l.config.Node.Membership()
		if err := l.config.Node.Join(m); err != nil {
			return nil, err
		}
		if joined && (m.Plan.Identifiers && !was.Plan.Identifiers ||
			m.Plan.Egress.IsValid() && !was.Plan.Egress.IsValid()) {
			l.reserved()
		}
	}
	l.uplink = addrs
	return client, nil
}

// plan is the cluster's plan, which a node has before it receives tenants.
func (l *Link) plan() address.Plan {
	m, _ := l.config.Node.Membership()
	return m.Plan
}

// reserve stores that the cluster reserves the prefix of identifiers.
func (l *Link) reserve() error {
	if m, joined := l.config.Node.Membership(); !joined || m.Plan.Identifiers {
		return nil
	}
	if err := l.config.Node.Reserve(); err != nil {
		return fmt.Errorf("store that a prefix is reserved for containers: %w", err)
	}
	l.reserved()
	return nil
}

func (l *Link) reserved() {
	if l.config.Reserved != nil {
		l.config.Reserved()
	}
}

// registeredClient returns a client for the stream. It registers first, unless Register ran last and the registration
// would be the same.
func (l *Link) registeredClient(ctx context.Context) (pilasterv1connect.NodeServiceClient, error) {
	known := l.lastRegistration
	l.lastRegistration = nil
	if known == nil {
		return l.register(ctx)
	}
	addrs, err := l.config.UplinkAddresses()
	if err != nil {
		return nil, fmt.Errorf("addresses of the uplink: %w", err)
	}
	if now, more := l.registration(addrs, map[heldMapping]bool{}); more || !proto.Equal(now, known) {
		return l.register(ctx)
	}
	return l.dial(ctx)
}

// heldMapping identifies an allocation that this node reported.
type heldMapping struct{ tenant, key, to string }

func heldMappingOf(m *pilasterv1.Mapping) heldMapping { return heldMapping{m.Tenant, m.Key, m.To} }

// registration returns the next registration, with a page of the held mappings that sent does not contain yet. more
// reports that another page follows.
func (l *Link) registration(uplinks []netip.Addr, sent map[heldMapping]bool) (req *pilasterv1.RegisterRequest,
	more bool) {
	has, joined := l.config.Node.Membership()
	held := l.config.Tenants.Held(has.Prefix)
	mappings := append(held.Mappings, heldAddresses(l.config.Endpoints())...)
	mappings = slices.DeleteFunc(mappings, func(m *pilasterv1.Mapping) bool { return sent[heldMappingOf(m)] })
	if len(sent) > 0 {
		held = &pilasterv1.Held{}
	}
	held.Mappings = mappings[:min(len(mappings), heldPage)]
	for _, m := range held.Mappings {
		sent[heldMappingOf(m)] = true
	}
	req = &pilasterv1.RegisterRequest{
		Version: l.config.Version,
		Edge:    l.config.Edge,
		Gateway: l.config.Gateway != nil && l.config.Gateway(),
		Held:    held,

		MtuReserve: uint32(l.config.MTUReserve),
		Rack:       l.config.Rack,
	}
	if l.config.Enforces != nil {
		req.Enforces = l.config.Enforces()
	}
	if l.config.Form != nil {
		req.Form = l.config.Form()
	}
	req.Offloads = l.config.Offloads != nil && l.config.Offloads()
	req.Egress = l.config.Egress != nil && l.config.Egress()
	for _, a := range uplinks {
		req.UplinkAddresses = append(req.UplinkAddresses, a.String())
	}
	if joined {
		req.WantedPrefix, req.ClusterUuid = has.Prefix.String(), has.ClusterUUID
	} else if l.config.WantedPrefix.IsValid() {
		req.WantedPrefix = l.config.WantedPrefix.String()
	}
	return req, len(mappings) > heldPage
}

// freeGone schedules the release of addresses whose endpoint went away during the registration: they may have been
// registered after their release.
func (l *Link) freeGone(sent map[heldMapping]bool) {
	for _, m := range heldAddresses(l.config.Endpoints()) {
		delete(sent, heldMappingOf(m))
	}
	for m := range sent {
		if m.key != "" {
			l.setPendingFree(m.tenant, m.key, true)
		}
	}
}
