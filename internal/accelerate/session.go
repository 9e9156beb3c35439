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
	d.open, d.opened = d.config(), d.device
	if d.tracks {
		if err := change(recordOf(d.Socket), liberal, "1"); err != nil {
			return err
		}
	}
	if d.cache, err = oncache.Open(d.open); err != nil {
		return err
	}
	d.voider.set(d.cache)
	d.attacher = startAttacher(d.cache)
	clear(d.detaching)
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
	// From now on the overlay does all the work, so that changes need not wait for the programs' end.
	err := errors.Join(d.cache.Pause(), d.cache.Void())
	if d.attacher != nil {
		d.attacher.stop()
	}
	d.voider.set(nil)
	err = errors.Join(err, d.cache.Close())
	d.cache, d.attacher = nil, nil
	clear(d.containers)
	clear(d.detaching)
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

// joinAll attaches the programs to all present containers. Nothing is cached before it ends.
func (d *daemon) joinAll() error {
	links, err := netns.List(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		d.follow(l)
	}
	for d.attaching() {
		d.attachedDevice(<-d.attacher.results)
	}
	return nil
}

func (d *daemon) attaching() bool {
	for _, c := range d.containers {
		if !c.attached {
			return true
		}
	}
	return false
}

// follow makes a device use the cache, or not, as its state requires.
func (d *daemon) follow(l netlink.Link) {
	if d.cache == nil {
		return // an eviction failed and the cache could not be opened again
	}
	index, name := l.Attrs().Index, l.Attrs().Name
	had, known := d.containers[index]
	_, refused := d.excluded[name]
	switch wanted := d.Containers.Has(l, d.bridge) && !refused; {
	case wanted && !known:
		d.join(l)
	case known && !wanted && !refused && d.isContainer(index): // l describes a state that has passed
		d.evict(overlay.Eviction{Device: uint32(index), Cause: overlay.CauseLink})
	case known && !wanted:
		d.detaching[d.leave(index)] = true
	case known && had.name != name:
		d.leave(index)
		d.follow(l)
	case known && had.state != stateOf(l):
		had.state = stateOf(l)
		d.containers[index] = had
		d.evict(overlay.Eviction{Device: uint32(index), Cause: overlay.CauseLink})
	}
}

// isContainer reports whether a device is a container's at this moment.
func (d *daemon) isContainer(index int) bool {
	now, err := netlink.LinkByIndex(index)
	return err == nil && d.Containers.Has(now, d.bridge)
}

func (d *daemon) join(l netlink.Link) {
	d.attachments++
	a := attachment{d.attachments, l.Attrs().Index, l.Attrs().Name}
	d.containers[a.index] = container{attachment: a, state: stateOf(l)}
	d.attacher.join(a)
}

// leave makes a container not use the cache any more. It returns the number of the request.
func (d *daemon) leave(index int) uint64 {
	a := d.containers[index].attachment
	delete(d.containers, index)
	d.evict(overlay.Eviction{Device: uint32(index), Cause: overlay.CauseLink})
	d.attachments++
	a.number = d.attachments
	if d.attacher != nil { // evict could open the cache again
		d.attacher.leave(a)
	}
	return a.number
}

// attachedDevices returns the channel of the attacher's results.
func (d *daemon) attachedDevices() <-chan attached {
	if d.attacher == nil {
		return nil
	}
	return d.attacher.results
}

func (d *daemon) attachedDevice(r attached) {
	excluded := d.detaching[r.number]
	delete(d.detaching, r.number)
	c, known := d.containers[r.index]
	joins := known && c.number == r.number
	switch {
	case joins && r.err == nil:
		c.attached = true
		d.containers[r.index] = c
	case joins:
		delete(d.containers, r.index)
		if _, gone := netlink.LinkByIndex(r.index); gone == nil { // otherwise the container has ended meanwhile
			d.excluded[r.name] = r.err.Error()
			d.Log.Error("cannot attach the cache to a container", "device", r.name, "err", r.err)
		}
	case r.err != nil:
		d.Log.Warn("cannot detach the cache from a container", "device", r.name, "err", r.err)
		if excluded { // programs at its device would go on learning
			d.reopen()
		}
	}
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
			_, err = d.cache.Evict(oncache.Selector{Inner: e.Inner, VTEP: e.VTEP, Device: e.Device, MAC: e.MAC})
		}
		if err != nil {
			d.evictionFailed(e.Cause, err)
			return
		}
	}
}

func (d *daemon) evictionFailed(cause string, err error) {
	d.Log.Error("cannot evict; the cache is opened again", "cause", cause, "err", err)
	d.reopen()
}
