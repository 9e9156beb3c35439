package agent

import (
	"context"
	"errors"
	"fmt"

	"pilaster.io/pilaster/internal/endpoint"
)

// FollowMTU sets the MTU of the packet path on every endpoint and on the networks' gateways. An endpoint that cannot be
// changed keeps its MTU; the packet path sends ICMP Packet Too Big to its container.
func (c *Core) FollowMTU(ctx context.Context) error {
	mtu, err := c.driver.MTU()
	if err != nil {
		return fmt.Errorf("endpoints keep their MTU: %w", err)
	}
	errs := []error{c.networks.FollowMTU(mtu)}
	for _, r := range c.store.List() {
		// An endpoint being created may have read the old MTU; setMTU waits for its lock.
		if own := mtu - r.Overhead(); r.State != endpoint.Active || r.Device.MTU != own {
			errs = append(errs, c.setMTU(ctx, r.ContainerID, r.Interface, own))
		}
	}
	return errors.Join(errs...)
}

func (c *Core) setMTU(ctx context.Context, containerID, iface string, mtu int) error {
	unlock, err := c.byKey.Lock(ctx, EndpointKey(containerID, iface))
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

// fitMTU sets an endpoint's MTU to that of the packet path minus the overhead of its networks. The caller holds its
// lock.
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
		return fmt.Errorf("endpoint %d has MTU %d, but its record still has %d: %w", r.ID, mtu, was, err)
	}
	c.log.Info("MTU of an endpoint changed", "endpoint", r.ID, "container", r.ContainerID, "was", was, "mtu", mtu)
	return nil
}
