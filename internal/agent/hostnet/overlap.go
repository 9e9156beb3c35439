package hostnet

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/netns"
)

// localPrefix is a prefix of this node's addresses or routes, with its device.
type localPrefix struct {
	prefix netip.Prefix
	device string
}

// checkOverlap refuses a private prefix that the node uses for something else: containers could not reach it, and the
// node would treat its addresses as containers. A default route overlaps everything and is ignored.
func checkOverlap(private netip.Prefix, present []localPrefix) error {
	for _, f := range present {
		if f.prefix.Bits() > 0 && f.prefix.Overlaps(private) {
			return fmt.Errorf(
				"private prefix %v overlaps %v on %s\n  nothing was changed; remove that from this node, or set up "+
					"the cluster with another --private-prefix, for example fc80::/9",
				private,
				f.prefix,
				f.device,
			)
		}
	}
	return nil
}

// localPrefixes lists the IPv6 prefixes of the node's addresses and routes in every table, except unreachable,
// blackhole and prohibit routes and routes to its containers.
func localPrefixes() ([]localPrefix, error) {
	links, err := netns.List(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("devices: %w", err)
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	addrs, err := netns.List(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V6) })
	if err != nil {
		return nil, fmt.Errorf("addresses: %w", err)
	}
	routes, err := netns.List(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(
			netlink.FAMILY_V6,
			&netlink.Route{Table: unix.RT_TABLE_UNSPEC},
			netlink.RT_FILTER_TABLE,
		)
	})
	if err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	var all []localPrefix
	for _, a := range addrs {
		if p := prefixOf(a.IPNet); p.IsValid() {
			all = append(all, localPrefix{p, names[a.LinkIndex]})
		}
	}
	for _, r := range routes {
		refuses := r.Type == unix.RTN_UNREACHABLE || r.Type == unix.RTN_BLACKHOLE || r.Type == unix.RTN_PROHIBIT
		if p := prefixOf(r.Dst); p.IsValid() && !refuses && names[r.LinkIndex] != dpapi.NodeDevice {
			all = append(all, localPrefix{p, names[r.LinkIndex]})
		}
	}
	return all, nil
}

// OverlapWatch repeats the check after the start, because devices can appear later.
type OverlapWatch struct {
	private netip.Prefix
	changed []chan<- struct{} // buffered, size 1: each receives a value when addresses have changed
	mu      sync.Mutex
	err     error
}

// NewOverlapWatch returns a watch for prefixes that overlap private, which also tells all changes of addresses.
func NewOverlapWatch(private netip.Prefix, changed ...chan<- struct{}) *OverlapWatch {
	return &OverlapWatch{private: private, changed: changed}
}

func (w *OverlapWatch) Problem() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

func (w *OverlapWatch) Check() error {
	all, err := localPrefixes()
	if err != nil {
		return fmt.Errorf("reading the prefixes of this node: %w", err)
	}
	err = checkOverlap(w.private, all)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
	return err
}

// Run checks again after each change of an address or a route until ctx ends. A netlink subscription ends when its
// buffer overflows; it is then opened again.
func (w *OverlapWatch) Run(ctx context.Context, log *slog.Logger) error {
	for {
		if err := w.watch(ctx, log); err != nil || ctx.Err() != nil {
			return err
		}
		log.Debug("netlink subscription overflowed; all addresses and routes are read again")
	}
}

// watch runs one subscription.
func (w *OverlapWatch) watch(ctx context.Context, log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	addrs, routes := make(chan netlink.AddrUpdate), make(chan netlink.RouteUpdate)
	if err := netlink.AddrSubscribe(addrs, ctx.Done()); err != nil {
		cancel()
		return fmt.Errorf("watching addresses: %w", err)
	}
	if err := netlink.RouteSubscribe(routes, ctx.Done()); err != nil {
		cancel()
		return fmt.Errorf("watching routes: %w", err)
	}
	defer func() {
		cancel()
		for range addrs { // both are drained until the subscriptions close them
		}
		for range routes {
		}
	}()
	w.recheck(log) // changes before the subscription
	w.signal()
	own := 0 // index of NodeDevice once seen: the kernel does not reuse indexes
	for {
		var dst *net.IPNet
		device := 0
		select {
		case u, ok := <-addrs:
			if !ok {
				return nil
			}
			dst = &u.LinkAddress
			w.signal()
		case u, ok := <-routes:
			if !ok {
				return nil
			}
			dst, device = u.Dst, u.LinkIndex
		}
		// A busy node changes routes all the time; few of them matter here.
		if p := prefixOf(dst); !p.IsValid() || !p.Overlaps(w.private) || device != 0 && device == own {
			continue
		}
		if l, err := netlink.LinkByIndex(device); err == nil && l.Attrs().Name == dpapi.NodeDevice {
			own = device
			continue
		}
		w.recheck(log)
	}
}

// signal does not block: one pending value covers all changes.
func (w *OverlapWatch) signal() {
	for _, changed := range w.changed {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}

func (w *OverlapWatch) recheck(log *slog.Logger) {
	before := w.Problem()
	if err := w.Check(); err != nil && before == nil {
		log.Error("a prefix of this node overlaps the private prefix; no endpoint is added", "error", err)
	} else if err == nil && before != nil {
		log.Info("the overlap with the private prefix is gone; endpoints are added again")
	}
}

// prefixOf returns the zero Prefix for a default route and for IPv4.
func prefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	ip, ok := netip.AddrFromSlice(n.IP)
	if !ok || !ip.Is6() {
		return netip.Prefix{}
	}
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(ip, ones).Masked()
}
