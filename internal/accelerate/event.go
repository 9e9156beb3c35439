package accelerate

import (
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate/overlay"
)

// routeEvents processes notifications of devices, neighbours, routes and qdiscs, in their order.
func (d *daemon) routeEvents(b batch) {
	if b.lost {
		d.Log.Warn("notifications were lost; the cache is opened again")
		d.evicted[causeLost]++
		d.recheck()
		d.reopen()
		return
	}
	for _, m := range b.messages {
		if err := d.routeEvent(m); err != nil {
			d.Log.Warn("a notification could not be read; all entries are void", "err", err)
			d.evict(overlay.Eviction{All: true, Cause: causeLost})
		}
	}
}

func (d *daemon) routeEvent(m syscall.NetlinkMessage) error {
	deleted := false
	switch kind := m.Header.Type; kind {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return d.linkEvent(m)
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC, unix.RTM_NEWTFILTER, unix.RTM_DELTFILTER:
		d.changed[int(nl.DeserializeTcMsg(m.Data).Ifindex)] = true
	case unix.RTM_NEWRULE, unix.RTM_DELRULE, unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP:
		d.rulesChanged = true // a rule may compare marks
		d.evict(overlay.Eviction{All: true, Cause: causeRule})
	case unix.RTM_DELNEIGH:
		deleted = true
		fallthrough
	case unix.RTM_NEWNEIGH:
		n, err := netlink.NeighDeserialize(m.Data)
		if err != nil || d.cache == nil {
			return err
		}
		d.evict(d.table.Neighbour(n, deleted)...)
	case unix.RTM_DELROUTE:
		deleted = true
		fallthrough
	case unix.RTM_NEWROUTE:
		r, ok, err := overlay.ParseRoute(m.Data)
		if err != nil || !ok || d.cache == nil {
			return err
		}
		d.evict(d.table.Route(r, deleted)...)
	}
	return nil
}

// linkEvent looks at a device as the notification describes it: to ask the kernel could take long while others change
// devices.
func (d *daemon) linkEvent(m syscall.NetlinkMessage) error {
	header := nl.DeserializeIfInfomsg(m.Data)
	index := int(header.Index)
	switch {
	case header.Family == unix.AF_BRIDGE:
		d.portEvent(index)
		return nil
	case m.Header.Type == unix.RTM_DELLINK:
		return d.linkGone(index)
	}
	l, err := netlink.LinkDeserialize(&unix.NlMsghdr{Len: m.Header.Len, Type: m.Header.Type}, m.Data)
	if err != nil {
		return err
	}
	name := l.Attrs().Name
	if name == d.Overlay || name == d.Uplink || name == d.Containers.Bridge {
		return d.pathEvent(l)
	}
	if d.cache == nil {
		return nil
	}
	if _, known := d.containers[index]; known {
		d.follow(l)
	} else if d.Containers.Has(l, d.bridge) {
		d.changed[index] = true // its qdiscs and filters decide whether it may use the cache
	}
	return nil
}

// portEvent is about what a bridge does at a port, such as its VLANs or isolation.
func (d *daemon) portEvent(index int) {
	switch _, container := d.containers[index]; {
	case container:
		d.evict(overlay.Eviction{Device: uint32(index), Cause: overlay.CauseLink})
	case index == d.bridge || index == d.device.Index:
		d.evict(overlay.Eviction{All: true, Cause: overlay.CauseLink})
	}
}

func (d *daemon) linkGone(index int) error {
	delete(d.programs, index)
	if _, known := d.containers[index]; known {
		d.leave(index)
	}
	if _, ours := d.states[index]; ours && d.cache != nil {
		d.Log.Warn("a device of the overlay's path was deleted; the overlay works without the cache", "index", index)
		err := d.closeCache()
		d.recheck()
		return err
	}
	return nil
}

// pathEvent looks at the uplink, the overlay's device or the bridge.
func (d *daemon) pathEvent(l netlink.Link) error {
	before, known := d.states[l.Attrs().Index]
	if known && d.cache != nil && before == stateOf(l) && !d.moved(l) {
		return nil
	}
	if known && d.cache != nil && !d.moved(l) {
		d.states[l.Attrs().Index] = stateOf(l)
		d.evict(overlay.Eviction{All: true, Cause: overlay.CauseLink})
		return nil
	}
	err := d.closeCache()
	d.recheck()
	return err
}

// moved reports whether the overlay's device has other parameters than when the cache was opened.
func (d *daemon) moved(l netlink.Link) bool {
	if l.Attrs().Name != d.Overlay {
		return false
	}
	now, err := overlay.Describe(l)
	return err != nil || now.Index != d.opened.Index || now.VNI != d.opened.VNI || now.Port != d.opened.Port ||
		now.Local != d.opened.Local || now.MAC != d.opened.MAC || now.Bridged != d.opened.Bridged
}
