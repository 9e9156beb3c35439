package steering

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Follow applies the request to the uplink and to all VXLAN devices, if the selection has their levels, and to each
// such device that is created later, until ctx ends. The settings stay when it ends.
func (s Steering) Follow(ctx context.Context, q Request, of Selection, log *slog.Logger) error {
	known := map[string]int{}
	for ctx.Err() == nil {
		if err := s.followOnce(ctx, q, of, known, log); err != nil {
			return err
		}
	}
	return nil
}

// followOnce returns when the subscription ends, which it does when its buffer overflows.
func (s Steering) followOnce(ctx context.Context, q Request, of Selection, known map[string]int,
	log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	links := make(chan netlink.LinkUpdate)
	ns, err := open(of.Netns)
	if err == nil {
		err = ns.Do(func() error {
			return netlink.LinkSubscribeWithOptions(links, ctx.Done(), netlink.LinkSubscribeOptions{ListExisting: true})
		})
		err = errors.Join(err, ns.Close())
	}
	if err != nil {
		cancel()
		return fmt.Errorf("watching devices: %w", err)
	}
	defer func() {
		cancel()
		for range links { // drains until the subscription closes the channel
		}
	}()
	for u := range links {
		d, ok := of.deviceOf(u.Link)
		index := u.Attrs().Index
		if !ok || u.Header.Type == unix.RTM_DELLINK || known[d.Name] == index {
			continue
		}
		if err := s.Apply(q, []Device{d}); err != nil {
			log.Error("setting the steering of a device failed", "device", d.Name, "mode", q.Mode, "error", err)
			continue
		}
		known[d.Name] = index
		log.Info("steering of a device is set", "device", d.Name, "level", d.Level, "mode", q.Mode)
	}
	return nil
}

// deviceOf returns the device if the selection has it.
func (s Selection) deviceOf(l netlink.Link) (Device, bool) {
	name := l.Attrs().Name
	switch {
	case slices.Contains(s.Levels, Host) && slices.Contains(s.Uplinks, name):
		return Device{Host, name, s.Netns}, true
	case slices.Contains(s.Levels, Overlay) && isVXLAN(l):
		return Device{Overlay, name, s.Netns}, true
	}
	return Device{}, false
}
