package device

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// removalGroup is the link group of devices that are removed together: the kernel waits for its RCU readers once per
// removal, however many devices it removes. Nothing else may use this group, so it is no small number.
const removalGroup = 0x70696c

// removal is a device of ours, and the node's routes through it.
type removal struct {
	device string
	routes []*net.IPNet
}

// removeHostDevice removes a device in one batch with the devices that are to be removed at the same time. Each removal
// alone would wait for the kernel's lock for devices.
func (d *Devices) removeHostDevice(device string, routes ...*net.IPNet) error {
	return d.Removals.Do(removal{device, routes})
}

// removeBatch is called by one goroutine at a time, with the lock for devices held. A device that is gone is no error:
// it was removed with its container's namespace.
func (d *Devices) removeBatch(all []removal) []error {
	errs := make([]error, len(all))
	var found []int
	var links []netlink.Link
	for i, r := range all {
		var link netlink.Link
		if link, errs[i] = d.prepareRemoval(r); link != nil {
			found, links = append(found, i), append(links, link)
		}
	}
	for n, err := range d.removeLinks(links) {
		if err != nil && !errors.Is(err, unix.ENODEV) {
			errs[found[n]] = fmt.Errorf("remove device %s: %w", all[found[n]].device, err)
		}
	}
	return errs
}

// prepareRemoval removes the routes and finds the device; it returns nil if there is none.
func (d *Devices) prepareRemoval(r removal) (netlink.Link, error) {
	for _, dst := range r.routes {
		if err := d.DeleteNodeRoute(dst); err != nil {
			return nil, err
		}
	}
	link, err := d.Netlink.LinkByName(r.device)
	var notFound netlink.LinkNotFoundError
	if errors.As(err, &notFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find device %s: %w", r.device, err)
	}
	return link, nil
}

func (d *Devices) removeLinks(links []netlink.Link) []error {
	errs := make([]error, len(links))
	if len(links) == 1 {
		errs[0] = netns.Retry(func() error { return d.Netlink.LinkDel(links[0]) })
		return errs
	}
	marked := 0
	for i, link := range links {
		if errs[i] = netns.Retry(func() error { return d.Netlink.LinkSetGroup(link, removalGroup) }); errs[i] == nil {
			marked++
		}
	}
	if marked == 0 {
		return errs
	}
	if err := netns.Retry(d.deleteGroup); err != nil {
		for i := range errs {
			if errs[i] == nil {
				errs[i] = err
			}
		}
	}
	return errs
}

// deleteGroup removes the devices in removalGroup.
func (d *Devices) deleteGroup() error {
	return d.Node.Do(func() error {
		request := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
		request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		request.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(removalGroup)))
		_, err := request.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}

func devices(records []endpoint.Record) map[string]bool {
	names := map[string]bool{}
	for _, r := range records {
		names[host.DeviceName(r.ID)] = true
	}
	return names
}

func (d *Devices) SweepDevices(keep []endpoint.Record) error {
	links, err := netns.List(d.Netlink.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	known := devices(keep)
	var errs []error
	for _, l := range links {
		name := l.Attrs().Name
		if _, ours := host.DeviceID(l); ours && !known[name] {
			d.Log.Warn("removing a device of no endpoint", "device", name)
			errs = append(errs, d.removeHostDevice(name))
		}
	}
	return errors.Join(errs...)
}
