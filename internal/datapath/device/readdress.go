package device

import (
	"context"
	"errors"
	"fmt"
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

// openForReaddress opens the namespace of a container that has room for the new attachments.
func (d *Devices) openForReaddress(was, is endpoint.Record) (*ContainerNS, netlink.Link, error) {
	in, err := OpenContainerNS(is.Netns)
	if err != nil {
		return nil, nil, err
	}
	container, err := d.Driver(is).containerLink(is, in)
	if err == nil {
		err = in.routesAreFree(attachmentsNotIn(is, was), container)
	}
	if err != nil {
		in.Close()
		return nil, nil, err
	}
	return in, container, nil
}

// readdress adds the attachments that a running container's new record has in addition, and removes those that it no
// longer has. The device stays, its entry program may change.
func (d *Devices) readdress(ctx context.Context, was, is endpoint.Record) error {
	in, container, err := d.openForReaddress(was, is)
	if err != nil {
		return err
	}
	defer in.Close()
	more, less := is, was
	more.Attachments, less.Attachments = attachmentsNotIn(is, was), attachmentsNotIn(was, is)
	if err := d.WithDeviceLock(func() error {
		return in.replaceAttachments(more.Attachments, less.Attachments, is.Attachments, container)
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
	has := func(a endpoint.Attachment) bool {
		return slices.ContainsFunc(
			other.Attachments,
			func(o endpoint.Attachment) bool {
				return o.Address == a.Address && (o.Network == a.Network || o.Network == a.Also || o.Also == a.Network)
			},
		)
	}
	return slices.DeleteFunc(slices.Clone(r.Attachments), has)
}

func (in *ContainerNS) replaceAttachments(more, less, stay []endpoint.Attachment, container netlink.Link) error {
	for _, step := range in.attach(more, container) {
		if err := netns.Retry(step); err != nil {
			return err
		}
	}
	var errs []error
	for _, step := range in.detach(less, stay, container) {
		if err := host.IgnoreGone(netns.Retry(step)); !errors.Is(
			err,
			unix.ENOENT,
		) { // the container may have removed it
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
