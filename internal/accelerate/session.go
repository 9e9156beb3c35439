package accelerate

import (
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/accelerate/overlay"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/oncache"
)

// config returns the cache's configuration for what inspect found.
func (d *daemon) config() oncache.Config {
	return oncache.Config{
		Uplink: d.Uplink, Device: d.Overlay, Address: d.device.Local, VNI: d.device.VNI, Port: d.device.Port,
		Bridged: d.device.Bridged, MarkMask: d.MarkMask, TTL: d.ttl, Tracks: d.tracks,
	}
}

// openCache loads the cache for what inspect found, and makes the containers use it.
func (d *daemon) openCache() (err error) {
	d.table = overlay.NewTable(d.uplink, d.device, d.bridge, func(device int) bool {
		_, ok := d.containers[device]
		return ok
	})
	if err := d.loadTable(); err != nil {
		return err
	}
	d.open = d.config()
	if d.tracks {
		if err := change(recordOf(d.Socket), liberal, "1"); err != nil {
			return err
		}
	}
	if d.cache, err = oncache.Open(d.open); err != nil {
		return err
	}
	d.inactive, d.void, d.renewed = false, false, time.Time{}
	if err := d.joinAll(); err != nil {
		return err
	}
	d.settle()
	return nil
}

// loadTable keeps the states of devices, and has the table read the rest.
func (d *daemon) loadTable() error {
	d.states = map[int]string{}
	links, err := netns.List(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		if index := l.Attrs().Index; index == d.uplink || index == d.device.Index || index == d.bridge {
			d.states[index] = stateOf(l)
		}
	}
	return d.table.Load()
}

func (d *daemon) closeCache() error {
	if d.cache == nil {
		return nil
	}
	err := d.cache.Close()
	d.cache = nil
	clear(d.containers)
	return err
}

// reopen replaces the cache, because the overlay, the tracking of connections or the validity has changed. A failure
// leaves the overlay alone until the next check.
func (d *daemon) reopen() {
	err := d.closeCache()
	d.evicted[causeReopen]++
	if err = errors.Join(err, d.openCache()); err != nil {
		d.problem(problemCache, err.Error())
		err = errors.Join(err, d.closeCache())
		d.Log.Error("cannot open the cache; the overlay works without it", "err", err)
		return
	}
	d.problem(problemCache)
	d.Log.Info("the cache was opened again", "overlay", d.device.Name, "vni", d.device.VNI, "local", d.device.Local,
		"tracks", d.tracks, "validity", d.ttl)
}

func (d *daemon) joinAll() error {
	links, err := netns.List(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		d.follow(l)
	}
	return nil
}

// follow makes a device use the cache, or not, as its present state requires.
func (d *daemon) follow(l netlink.Link) {
	index, name := l.Attrs().Index, l.Attrs().Name
	had, joined := d.containers[index]
	_, refused := d.excluded[name]
	switch wanted := d.Containers.Has(l, d.bridge) && !refused; {
	case wanted && !joined:
		d.join(l)
	case !wanted && joined:
		d.leave(index)
	case joined && had.state != stateOf(l):
		d.containers[index] = container{had.name, stateOf(l)}
		d.evict(overlay.Eviction{Device: uint32(index), Cause: overlay.CauseLink})
	}
}

func (d *daemon) join(l netlink.Link) {
	index, name := l.Attrs().Index, l.Attrs().Name
	if err := d.cache.Join(name); err != nil {
		if _, gone := netlink.LinkByIndex(index); gone == nil { // otherwise the container has ended meanwhile
			d.excluded[name] = err.Error()
			d.Log.Error("cannot attach the cache to a container", "device", name, "err", err)
		}
		return
	}
	d.containers[index] = container{name, stateOf(l)}
}

func (d *daemon) leave(index int) {
	name := d.containers[index].name
	delete(d.containers, index)
	if err := d.cache.Leave(name); err != nil {
		d.Log.Warn("cannot detach the cache from a container", "device", name, "err", err)
	}
	d.evicted[overlay.CauseLink]++ // Leave evicts
}

// stateOf returns what cached flows depend on of a device.
func stateOf(l netlink.Link) string {
	a := l.Attrs()
	return fmt.Sprint(a.MTU, a.HardwareAddr, a.Flags&1, a.Name) // 1 is IFF_UP
}

// evict removes what a change concerns. If the kernel refuses, the cache is opened again, empty.
func (d *daemon) evict(change ...overlay.Eviction) {
	if d.cache == nil || len(change) == 0 {
		return
	}
	d.evicted[change[0].Cause]++
	for _, e := range change {
		var err error
		if e.All {
			err = d.cache.Void()
		} else {
			_, err = d.cache.Evict(oncache.Selector{Inner: e.Inner, VTEP: e.VTEP, Device: e.Device})
		}
		if err != nil {
			d.Log.Error("cannot evict; the cache is opened again", "cause", e.Cause, "err", err)
			d.reopen()
			return
		}
	}
}
