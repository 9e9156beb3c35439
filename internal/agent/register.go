package agent

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// heldPage is how many addresses and subnets this node says at a time that it holds: as many as the orchestrator takes
// in within a moment, also when its store has forgotten them. It registers once for each page.
const heldPage = 2048

// Register makes the node known to the orchestrator, trying until it answers. It returns an
// error when trying again would not help, or when ctx ends.
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
	said := map[heldMapping]bool{}
	defer l.freeGone(said)
	for more := true; more; {
		var req *pilasterv1.RegisterRequest
		before := len(said)
		req, more = l.registration(addrs, said)
		resp, err := client.Register(ctx, connect.NewRequest(req))
		if err != nil && before > 0 {
			return nil, fmt.Errorf(
				"registering this node, of whose addresses and subnets the cluster has taken in %d and not the next %d: %w",
				before,
				len(said)-before,
				err,
			)
		}
		if err != nil {
			return nil, fmt.Errorf("registering this node: %w", err)
		}
		if before > 0 {
			continue
		}
		m, err := membershipFromProto(resp.Msg)
		if err != nil {
			return nil, err
		}
		if err := l.config.Node.Join(m); err != nil {
			return nil, err
		}
	}
	l.uplink = addrs
	return client, nil
}

// registeredClient gives a client to follow with. The stream begins with a registration, unless Register was the last that was
// report and this node would say the same again.
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

// heldMapping is what the cluster gave, as this node said it.
type heldMapping struct{ tenant, key, to string }

func heldMappingOf(m *pilasterv1.Mapping) heldMapping { return heldMapping{m.Tenant, m.Key, m.To} }

// registration is what this node says of itself, with a page of what it holds now and has not said: it registers until
// there is no more.
func (l *Link) registration(uplinks []netip.Addr, said map[heldMapping]bool) (req *pilasterv1.RegisterRequest, more bool) {
	has, joined := l.config.Node.Membership()
	held := l.config.Tenants.held(has.Prefix)
	mappings := append(held.Mappings, heldAddresses(l.config.Endpoints())...)
	mappings = slices.DeleteFunc(mappings, func(m *pilasterv1.Mapping) bool { return said[heldMappingOf(m)] })
	if len(said) > 0 {
		held = &pilasterv1.Held{}
	}
	held.Mappings = mappings[:min(len(mappings), heldPage)]
	for _, m := range held.Mappings {
		said[heldMappingOf(m)] = true
	}
	req = &pilasterv1.RegisterRequest{
		Version: l.config.Version,
		Edge:    l.config.Edge,
		Gateway: l.config.Gateway != nil && l.config.Gateway(),
		Held:    held,
	}
	if l.config.Enforces != nil {
		req.Enforces = l.config.Enforces()
	}
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

// freeGone gives back what endpoints had that went while it was said: it may have been said after they had given it
// back.
func (l *Link) freeGone(said map[heldMapping]bool) {
	for _, m := range heldAddresses(l.config.Endpoints()) {
		delete(said, heldMappingOf(m))
	}
	for m := range said {
		if m.key != "" {
			l.setPendingFree(m.tenant, m.key, true)
		}
	}
}
