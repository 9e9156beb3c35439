package agent

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
)

// watchDevices runs until ctx ends. It keeps the endpoints' MTU equal to the uplink's, attaches guards to the node's
// other interfaces, and detects endpoints whose devices are gone. A netlink subscription ends when its buffer
// overflows; it is then opened again.
func watchDevices(ctx context.Context, uplink string, core *Core, log *slog.Logger) error {
	for ctx.Err() == nil {
		if err := watchDevicesOnce(ctx, uplink, core, log); err != nil {
			return err
		}
	}
	return nil
}

func watchDevicesOnce(ctx context.Context, uplink string, core *Core, log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	links := make(chan netlink.LinkUpdate)
	if err := netlink.LinkSubscribe(links, ctx.Done()); err != nil {
		cancel()
		return fmt.Errorf("watching devices: %w", err)
	}
	defer func() {
		cancel()
		for range links { // drains until the subscription closes the channel
		}
	}()
	follow := func() {
		if err := core.FollowMTU(ctx); err != nil && ctx.Err() == nil {
			log.Error("setting the endpoints' MTU failed", "uplink", uplink, "error", err)
		}
	}
	guard := func(changed netlink.Link) {
		if err := core.driver.GuardInterfaces(changed); err != nil && ctx.Err() == nil {
			log.Error("attaching the guard to an interface failed", "error", err)
		}
	}
	lose := func(suspected func(endpoint.Record) bool) {
		if err := core.markLost(ctx, suspected); err != nil && ctx.Err() == nil {
			log.Error("removing entries of endpoints without a device failed", "error", err)
		}
	}
	follow() // changes before the subscription
	guard(nil)
	lose(func(endpoint.Record) bool { return true })
	known := 0
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		var u netlink.LinkUpdate
		open := true
		select {
		case <-tick.C:
			lose(netnsGone)
			continue
		case u, open = <-links:
		}
		if !open {
			return nil
		}
		if u.Header.Type == unix.RTM_DELLINK {
			lose(onDevice(u.Attrs().Name))
		}
		switch a := u.Attrs(); {
		case a.Name != uplink:
			guard(u.Link)
		case a.MTU != known:
			known = a.MTU
			follow()
		}
	}
}
