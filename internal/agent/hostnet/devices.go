package hostnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
)

// Endpoints are the endpoints of this node, as far as changes of devices concern them.
type Endpoints interface {
	// FollowMTU sets the MTU of the packet path on every endpoint.
	FollowMTU(context.Context) error
	// MarkLost marks those of the suspected endpoints whose device has gone.
	MarkLost(ctx context.Context, suspected func(endpoint.Record) bool) error
	// GuardInterfaces attaches guards to the changed interface, or to all if it is nil.
	GuardInterfaces(changed netlink.Link) error
}

// scanEvery is the interval of checks for devices that send no netlink events.
const scanEvery = 5 * time.Second

// WatchDevices runs until ctx ends. It keeps the endpoints' MTU equal to the uplinks', attaches guards to the node's
// other interfaces, and detects endpoints whose devices are gone. A netlink subscription ends when its buffer
// overflows; it is then opened again.
func WatchDevices(ctx context.Context, uplinks []string, endpoints Endpoints, log *slog.Logger) error {
	for ctx.Err() == nil {
		if err := watchDevicesOnce(ctx, uplinks, endpoints, log); err != nil {
			return err
		}
	}
	return nil
}

func watchDevicesOnce(ctx context.Context, uplinks []string, endpoints Endpoints, log *slog.Logger) error {
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
		if err := endpoints.FollowMTU(ctx); err != nil && ctx.Err() == nil {
			log.Error("setting the endpoints' MTU failed", "uplinks", uplinks, "error", err)
		}
	}
	guard := func(changed netlink.Link) {
		if err := endpoints.GuardInterfaces(changed); err != nil && ctx.Err() == nil {
			log.Error("attaching the guard to an interface failed", "error", err)
		}
	}
	lose := func(suspected func(endpoint.Record) bool) {
		if err := endpoints.MarkLost(ctx, suspected); err != nil && ctx.Err() == nil {
			log.Error("removing entries of endpoints without a device failed", "error", err)
		}
	}
	follow() // changes before the subscription
	guard(nil)
	lose(func(endpoint.Record) bool { return true })
	known := map[string]int{} // MTUs of uplinks
	tick := time.NewTicker(scanEvery)
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
			lose(OnDevice(u.Attrs().Name))
		}
		switch a := u.Attrs(); {
		case !slices.Contains(uplinks, a.Name):
			guard(u.Link)
		case a.MTU != known[a.Name]:
			known[a.Name] = a.MTU
			follow()
		}
	}
}

func OnDevice(name string) func(endpoint.Record) bool {
	return func(r endpoint.Record) bool { return r.Device.HostName == name }
}

// netnsGone suspects an endpoint whose device sends the node no netlink events, if its namespace path is gone.
func netnsGone(r endpoint.Record) bool {
	if r.Device.HostName != "" {
		return false
	}
	_, err := os.Stat(r.Netns)
	return errors.Is(err, os.ErrNotExist)
}
