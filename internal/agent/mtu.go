package agent

import (
	"context"
	"errors"
	"fmt"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
)

// FollowMTU gives every endpoint, and the networks' gateways, the MTU of the packet path. One that cannot be changed
// retained what it has; the packet path tells its container when a packet is too big.
func (c *Core) FollowMTU(ctx context.Context) error {
	mtu, err := c.driver.MTU()
	if err != nil {
		return fmt.Errorf("endpoints keep their MTU: %w", err)
	}
	errs := []error{c.eachGateway(func(n network.GatewayProvider) error { return n.FollowMTU(mtu) })}
	for _, r := range c.store.List() {
		// One that is being made may have asked for the MTU before it changed; its lock is waited for.
		if own := mtu - r.Overhead(); r.State != endpoint.Active || r.Device.MTU != own {
			errs = append(errs, c.setMTU(ctx, r.ContainerID, r.Interface, own))
		}
	}
	return errors.Join(errs...)
}

func (c *Core) setMTU(ctx context.Context, containerID, iface string, mtu int) error {
	unlock, err := c.byKey.lock(ctx, key(containerID, iface))
	if err != nil {
		return err
	}
	defer unlock()
	r, ok := c.store.Find(containerID, iface)
	if !ok || r.State != endpoint.Active || r.Device.MTU == mtu {
		return nil
	}
	return c.changeMTU(&r, mtu)
}

// fitMTU gives an endpoint the MTU that is left beside what its networks put before packets. The caller holds its lock.
func (c *Core) fitMTU(r *endpoint.Record) error {
	mtu, err := c.driver.MTU()
	if err != nil || r.Device.MTU == mtu-r.Overhead() {
		return err
	}
	return c.changeMTU(r, mtu-r.Overhead())
}

func (c *Core) changeMTU(r *endpoint.Record, mtu int) error {
	was := r.Device.MTU
	if err := c.driver.SetMTU(*r, mtu); err != nil {
		return fmt.Errorf("endpoint %d keeps an MTU of %d: %w", r.ID, was, err)
	}
	r.Device.MTU = mtu
	if err := c.store.Put(*r); err != nil {
		return fmt.Errorf("endpoint %d has an MTU of %d and is shown with %d: %w", r.ID, mtu, was, err)
	}
	c.log.Info("endpoint has another MTU", "endpoint", r.ID, "container", r.ContainerID, "was", was, "mtu", mtu)
	return nil
}
