package netns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Netlink opens a route netlink handle in the namespace. The handle stays in the namespace, whatever thread uses it.
// The caller must close it.
func (n *Namespace) Netlink() (*netlink.Handle, error) {
	var h *netlink.Handle
	err := n.Do(func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("netlink in %s: %w", n.path, err)
	}
	return h, nil
}

// retries bounds how often an interrupted call is repeated. The kernel interrupts a dump if the listed objects change
// meanwhile. On a busy machine this can happen several times in a row.
const retries = 100

// Retry repeats a netlink call that modifies state, as long as a signal interrupts the call.
func Retry(call func() error) error {
	err := call()
	for i := 0; i < retries && errors.Is(err, unix.EINTR); i++ {
		err = call()
	}
	return err
}

// List repeats a netlink dump until no change of the listed objects interrupts it. So the result is complete, or List
// returns an error.
func List[T any](dump func() (T, error)) (T, error) {
	list, err := dump()
	// ErrDumpInterrupted wraps EINTR.
	for i := 0; i < retries && errors.Is(err, unix.EINTR); i++ {
		list, err = dump()
	}
	return list, err
}

// PutRoute adds an IPv6 route to the main table, or replaces a route to the same destination that differs. If the route
// exists as requested, PutRoute writes nothing: the kernel would notify listeners even if nothing changed, and Open
// vSwitch would then briefly remove all routes of its tunnels.
func PutRoute(h *netlink.Handle, route *netlink.Route) error {
	there, err := List(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(unix.AF_INET6, &netlink.Route{Dst: route.Dst}, netlink.RT_FILTER_DST)
	})
	if err != nil {
		return fmt.Errorf("list the routes to %v: %w", route.Dst, err)
	}
	const usualMetric = 1024
	same := func(r netlink.Route) bool {
		return r.Type == cmp.Or(route.Type, unix.RTN_UNICAST) && r.Priority == cmp.Or(route.Priority, usualMetric) &&
			r.Protocol == cmp.Or(route.Protocol, unix.RTPROT_BOOT) &&
			(route.LinkIndex == 0 || r.LinkIndex == route.LinkIndex) &&
			r.Gw.Equal(route.Gw) &&
			r.Src.Equal(route.Src) &&
			r.MTU == route.MTU &&
			len(r.MultiPath) == 0
	}
	if slices.ContainsFunc(there, same) {
		return nil
	}
	return Retry(func() error { return h.RouteReplace(route) })
}

// deleteAttempts is how often the kernel must report that a route does not exist.
const deleteAttempts = 3

// DeleteRoute deletes a route. It returns ESRCH if the kernel repeatedly reports that the route does not exist. A
// single report is not enough: the kernel's lookup takes no lock, and misses a route while a change of another route
// moves its node of the tree.
func DeleteRoute(h *netlink.Handle, route *netlink.Route) error {
	return retryDelete(func() error { return h.RouteDel(route) })
}

func retryDelete(remove func() error) (err error) {
	for range deleteAttempts {
		if err = Retry(remove); !errors.Is(err, unix.ESRCH) {
			break
		}
	}
	return err
}

func setLoopbackUp() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	return h.LinkSetUp(lo)
}

// WaitUp waits until a device of the namespace is operational. A link that was just set up drops packets until the
// kernel's link watch has noticed the carrier, which takes up to a second.
func (n *Namespace) WaitUp(ctx context.Context, device string) error {
	updates, done := make(chan netlink.LinkUpdate), make(chan struct{})
	err := n.Do(func() error {
		return netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{ListExisting: true})
	})
	if err != nil {
		return fmt.Errorf("links of %s: %w", n.path, err)
	}
	defer func() {
		close(done)
		for range updates { // the subscription closes updates after done
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s in %s is not up: %w", device, n.path, context.Cause(ctx))
		case update, open := <-updates:
			if !open {
				return fmt.Errorf("links of %s: subscription ended", n.path)
			}
			if a := update.Attrs(); a.Name == device && a.OperState == netlink.OperUp {
				return nil
			}
		}
	}
}
