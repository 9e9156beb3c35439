package nimitz

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Gateway is this node's.
type Gateway interface {
	// Device is its end at the switch.
	Device() pipeline.Device
	// Addresses are its own: the one that services see, and the one that published containers do.
	Addresses() (own, virtual netip.Addr)
	// SetMTU fits it to what may leave by the uplink, in bytes.
	SetMTU(mtu int) error
	// Publish has what is sent to addresses on the underlay go to these virtual ones, and nothing else.
	Publish(ctx context.Context, virtual map[netip.Addr]netip.Addr) error
	// Keep ends all connections but those by what is published, and from virtual addresses that are used.
	Keep(ctx context.Context, published map[netip.Addr]netip.Addr, used map[netip.Addr]bool) error
}

var _ network.GatewayProvider = (*Network)(nil)

// plugGateway makes the gateway a port, or has none.
func (n *Network) plugGateway(ctx context.Context) error {
	if n.config.Gateway == nil {
		return n.config.Switch.Unplug(ctx, pipeline.Gateway)
	}
	if err := n.config.Switch.Plug(ctx, pipeline.Gateway, n.config.Gateway.Device()); err != nil {
		return fmt.Errorf("gateway: %w", err)
	}
	return nil
}

// Gateway is how this node's is.
func (n *Network) Gateway() (g network.Gateway) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, h := range n.tenants {
		g.Services += len(h.services)
		for _, p := range h.published {
			if p.Gateway == n.config.Node {
				g.Publications++
			}
		}
	}
	if n.config.Gateway == nil {
		g.Missing = "this node was given none"
		if n.config.NoGateway != nil {
			g.Missing = n.config.NoGateway.Error()
		}
		return g
	}
	g.Own, g.Virtual = n.config.Gateway.Addresses()
	return g
}

// FollowMTU fits the tunnels and the gateway to what may leave by the uplink.
func (n *Network) FollowMTU(mtu int) error {
	err := n.config.Switch.SetMTU(mtu)
	if n.config.Gateway != nil {
		err = errors.Join(err, n.config.Gateway.SetMTU(mtu))
	}
	return err
}
