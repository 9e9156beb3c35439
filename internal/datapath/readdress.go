package datapath

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// Readdress gives a running container what one record has more than another, and takes from it what that has more. The
// device stays.
func (d *Datapath) Readdress(ctx context.Context, was, is endpoint.Record) error {
	if err := d.readdress(ctx, was, is); err != nil {
		return fmt.Errorf("endpoint %d: %w", is.ID, err)
	}
	return nil
}

// CanReaddress looks for what the container has that Readdress would cut off.
func (d *Datapath) CanReaddress(was, is endpoint.Record) error {
	in, _, err := d.openForReaddress(was, is)
	if err != nil {
		return fmt.Errorf("endpoint %d: %w", is.ID, err)
	}
	in.Close()
	return nil
}

// openForReaddress opens the inside of a container that may have what one record has more than another.
func (d *Datapath) openForReaddress(was, is endpoint.Record) (*containerNS, netlink.Link, error) {
	in, err := openContainerNS(is.Netns)
	if err != nil {
		return nil, nil, err
	}
	container, err := d.driver(is).containerLink(is, in)
	if err == nil {
		err = in.routesAreFree(attachmentsNotIn(is, was), container)
	}
	if err != nil {
		in.Close()
		return nil, nil, err
	}
	return in, container, nil
}

func (d *Datapath) readdress(ctx context.Context, was, is endpoint.Record) error {
	in, container, err := d.openForReaddress(was, is)
	if err != nil {
		return err
	}
	defer in.Close()
	more, less := is, was
	more.Attachments, less.Attachments = attachmentsNotIn(is, was), attachmentsNotIn(was, is)
	if err := d.withDeviceLock(func() error {
		return in.replaceAttachments(more.Attachments, less.Attachments, is.Attachments, container)
	}); err != nil {
		return fmt.Errorf("container side: %w", err)
	}
	if err := d.addNodeRoutes(more); err != nil {
		return err
	}
	for _, dst := range routesTo(less) {
		if err := d.deleteNodeRoute(dst); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, carrierTimeout)
	defer cancel()
	return in.waitForAddresses(ctx, more)
}

// attachmentsNotIn is the attachments of the one that the other does not have.
func attachmentsNotIn(r, other endpoint.Record) []endpoint.Attachment {
	has := func(a endpoint.Attachment) bool {
		return slices.ContainsFunc(
			other.Attachments,
			func(o endpoint.Attachment) bool { return o.Network == a.Network && o.Address == a.Address },
		)
	}
	return slices.DeleteFunc(slices.Clone(r.Attachments), has)
}

func (in *containerNS) replaceAttachments(more, less, stay []endpoint.Attachment, container netlink.Link) error {
	for _, step := range in.attach(more, container) {
		if err := netns.Retry(step); err != nil {
			return err
		}
	}
	var errs []error
	for _, step := range in.detach(less, stay, container) {
		if err := ignoreGone(netns.Retry(step)); !errors.Is(err, unix.ENOENT) { // who lives there may have been faster
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
