package nimitz

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// Gateway is this node's gateway.
type Gateway interface {
	// Device returns the gateway's device at the switch.
	Device() pipeline.Device
	// Addresses returns the gateway's addresses: the source that services see, and that which published containers see.
	Addresses() (own, virtual netip.Addr)
	// SetMTU sets the MTUs of the gateway's devices after the uplink's MTU, in bytes, changed.
	SetMTU(mtu int) error
	// Publish makes the gateway translate exactly these destinations: each underlay address to its virtual address.
	Publish(ctx context.Context, virtual map[netip.Addr]netip.Addr) error
	// Keep ends all connections except those to published addresses and those from virtual addresses in use.
	Keep(ctx context.Context, published map[netip.Addr]netip.Addr, used map[netip.Addr]bool) error
}

var _ network.GatewayProvider = (*Network)(nil)

// plugGateway makes the gateway a port, if there is one.
func (n *Network) plugGateway(ctx context.Context) error {
	if n.config.Gateway == nil {
		return nil
	}
	if err := n.config.Switch.Plug(ctx, pipeline.Gateway, n.config.Gateway.Device()); err != nil {
		return fmt.Errorf("gateway: %w", err)
	}
	return nil
}

// Gateway describes this node's gateway.
func (n *Network) Gateway() (g network.Gateway) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, h := range n.tenants {
		g.UnderlayServices += len(h.services)
		for _, p := range h.published {
			if p.Gateway == n.config.Node {
				g.Publications++
			}
		}
	}
	if n.config.Gateway == nil {
		g.Missing = "this node has no gateway"
		if n.config.NoGateway != nil {
			g.Missing = n.config.NoGateway.Error()
		}
		return g
	}
	g.Own, g.Virtual = n.config.Gateway.Addresses()
	return g
}

// FollowMTU sets the MTUs of the tunnels and the gateway after the uplink's MTU, in bytes, changed.
func (n *Network) FollowMTU(mtu int) error {
	err := n.config.Switch.SetMTU(mtu)
	if n.config.Gateway != nil {
		err = errors.Join(err, n.config.Gateway.SetMTU(mtu))
	}
	return err
}
