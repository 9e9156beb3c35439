package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/endpoint"
)

// FollowMTU gives every endpoint the MTU of the packet path. One that cannot be changed keeps what it has;
// the packet path tells its container when a packet is too big.
func (c *Core) FollowMTU(ctx context.Context) error {
	mtu, err := c.driver.MTU()
	if err != nil {
		return fmt.Errorf("endpoints keep their MTU: %w", err)
	}
	var errs []error
	for _, r := range c.store.List() {
		// One that is being made may have asked for the MTU before it changed; its lock is waited for.
		if r.State == endpoint.Active && r.Device.MTU == mtu {
			continue
		}
		errs = append(errs, c.setMTU(ctx, r.ContainerID, r.Interface, mtu))
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
	was := r.Device.MTU
	if err := c.driver.SetMTU(r, mtu); err != nil {
		return fmt.Errorf("endpoint %d keeps an MTU of %d: %w", r.ID, was, err)
	}
	r.Device.MTU = mtu
	if err := c.store.Put(r); err != nil {
		return fmt.Errorf("endpoint %d has an MTU of %d and is shown with %d: %w", r.ID, mtu, was, err)
	}
	c.log.Info("endpoint has another MTU", "endpoint", r.ID, "container", r.ContainerID, "was", was, "mtu", mtu)
	return nil
}

// followUplink keeps the endpoints' MTU that of the uplink until ctx ends. A subscription ends when the
// kernel has more to tell than its buffer holds; then it begins anew.
func followUplink(ctx context.Context, uplink string, core *Core, log *slog.Logger) error {
	for ctx.Err() == nil {
		if err := followUplinkOnce(ctx, uplink, core, log); err != nil {
			return err
		}
	}
	return nil
}

func followUplinkOnce(ctx context.Context, uplink string, core *Core, log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	links := make(chan netlink.LinkUpdate)
	if err := netlink.LinkSubscribe(links, ctx.Done()); err != nil {
		cancel()
		return fmt.Errorf("watching devices: %w", err)
	}
	defer func() {
		cancel()
		for range links { // it ends once it has noticed
		}
	}()
	follow := func() {
		if err := core.FollowMTU(ctx); err != nil && ctx.Err() == nil {
			log.Error("endpoints do not have the uplink's MTU", "uplink", uplink, "error", err)
		}
	}
	follow() // what came before anybody listened
	known := 0
	for u := range links {
		if a := u.Attrs(); a.Name == uplink && a.MTU != known {
			known = a.MTU
			follow()
		}
	}
	return nil
}
