package device

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// Readdress changes a running container from the attachments of record was to those of record is. The device stays.
func (d *Devices) Readdress(ctx context.Context, was, is endpoint.Record) error {
	if err := d.readdress(ctx, was, is); err != nil {
		return fmt.Errorf("endpoint %d: %w", is.ID, err)
	}
	return nil
}

// CanReaddress returns an error if Readdress would take a route of another device of the container.
func (d *Devices) CanReaddress(was, is endpoint.Record) error {
	in, _, err := d.openForReaddress(was, is)
	if err != nil {
		return fmt.Errorf("endpoint %d: %w", is.ID, err)
	}
	in.Close()
	return nil
}

// openForReaddress opens the namespace of a container that has room for the new attachments and routes.
func (d *Devices) openForReaddress(was, is endpoint.Record) (*ContainerNS, netlink.Link, error) {
	in, err := OpenContainerNS(is.Netns)
	if err != nil {
		return nil, nil, err
	}
	container, err := d.Driver(is).containerLink(is, in)
	if err == nil {
		err = in.routesAreFree(slices.Concat(attachmentsNotIn(is, was), routesNotIn(is, was)), container)
	}
	if err != nil {
		in.Close()
		return nil, nil, err
	}
	return in, container, nil
}

// readdress adds the attachments and routes that a running container's new record has in addition, and removes those
// that it no longer has. The device stays, its entry program may change.
func (d *Devices) readdress(ctx context.Context, was, is endpoint.Record) error {
	in, container, err := d.openForReaddress(was, is)
	if err != nil {
		return err
	}
	defer in.Close()
	more, less := is, was
	more.Attachments, less.Attachments = attachmentsNotIn(is, was), attachmentsNotIn(was, is)
	if err := d.WithDeviceLock(func() error {
		add := append(in.attach(more.Attachments, container), in.addRoutes(routesNotIn(is, was), container)...)
		remove := append(in.deleteRoutes(routesNotIn(was, is), container),
			in.detach(less.Attachments, is.Attachments, container)...)
		return replaceAttachments(add, remove)
	}); err != nil {
		return fmt.Errorf("container side: %w", err)
	}
	if err := d.AddNodeRoutes(more); err != nil {
		return err
	}
	for _, dst := range hook.RoutesTo(less) {
		if err := d.DeleteNodeRoute(dst); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, host.CarrierTimeout)
	defer cancel()
	if err := in.WaitForAddresses(ctx, more); err != nil {
		return err
	}
	// The entry program depends on the networks. Both process the packets of all attachments that have entries now.
	return d.Driver(is).AttachProgram(is)
}

// attachmentsNotIn returns the attachments of r that other does not have. One that goes to its second network stays in
// the container as it is.
func attachmentsNotIn(r, other endpoint.Record) []endpoint.Attachment {
	return slices.DeleteFunc(slices.Clone(r.Attachments), func(a endpoint.Attachment) bool {
		return indexIn(other, a) >= 0
	})
}

// indexIn finds an attachment in a record, there perhaps with other routes; -1: the record does not have it.
func indexIn(r endpoint.Record, a endpoint.Attachment) int {
	return slices.IndexFunc(r.Attachments, func(o endpoint.Attachment) bool {
		return o.Address == a.Address && (o.Network == a.Network || o.Network == a.Also || o.Also == a.Network)
	})
}

// routesNotIn returns the attachments that both records have, each with the routes that it has in r only.
func routesNotIn(r, other endpoint.Record) (changed []endpoint.Attachment) {
	for _, a := range r.Attachments {
		if i := indexIn(other, a); i >= 0 {
			a.Routes = slices.DeleteFunc(slices.Clone(a.Routes), func(p netip.Prefix) bool {
				return slices.Contains(other.Attachments[i].Routes, p)
			})
			changed = append(changed, a)
		}
	}
	return changed
}

// replaceAttachments runs the steps that add, then those that remove what the container may have removed itself.
func replaceAttachments(add, remove []func() error) error {
	for _, step := range add {
		if err := netns.Retry(step); err != nil {
			return err
		}
	}
	var errs []error
	for _, step := range remove {
		if err := host.IgnoreGone(netns.Retry(step)); !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
