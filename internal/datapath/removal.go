package datapath

import (
	"errors"
	"fmt"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// dyingGroup is the link group that devices of ours are put into to be removed together: the kernel
// waits for its readers once a removal, however many devices go with it. It is not to be in use by
// anybody else, hence no small number.
const dyingGroup = 0x70696c

// removals are devices that wait to be removed by whoever gets at the devices first.
type removals struct {
	mu      sync.Mutex
	waiting []removal
}

type removal struct {
	device netlink.Link
	done   chan error // buffered
}

// add lines a device up.
func (q *removals) add(device netlink.Link) removal {
	r := removal{device, make(chan error, 1)}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, r)
	return r
}

// take returns all that wait, which now are the caller's to remove.
func (q *removals) take() []removal {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.waiting
	q.waiting = nil
	return all
}

// deleteDevice removes a device of ours, together with those whose removal was asked for meanwhile.
func (d *Datapath) deleteDevice(name string) error {
	device, err := d.netlink.LinkByName(name)
	if err == nil {
		mine := d.removals.add(device)
		_ = d.alone(func() error { d.removeAll(d.removals.take()); return nil })
		err = <-mine.done
	}
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) || errors.Is(err, unix.ENODEV) {
		return nil // gone with the container's namespace
	}
	if err != nil {
		return fmt.Errorf("remove device %s: %w", name, err)
	}
	return nil
}

// removeAll is called by one at a time.
func (d *Datapath) removeAll(all []removal) {
	if len(all) == 1 {
		all[0].done <- netns.Retry(func() error { return d.netlink.LinkDel(all[0].device) })
		return
	}
	var marked []removal
	for _, r := range all {
		if err := netns.Retry(func() error { return d.netlink.LinkSetGroup(r.device, dyingGroup) }); err != nil {
			r.done <- err
			continue
		}
		marked = append(marked, r)
	}
	if len(marked) == 0 {
		return
	}
	err := netns.Retry(d.deleteGroup)
	for _, r := range marked {
		r.done <- err
	}
}

// deleteGroup removes what is in dyingGroup.
func (d *Datapath) deleteGroup() error {
	return d.node.Do(func() error {
		request := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
		request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		request.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(dyingGroup)))
		_, err := request.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}
