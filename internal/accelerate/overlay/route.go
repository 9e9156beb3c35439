package overlay

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// Route is what a cached flow depends on of a route.
type Route struct {
	Destination netip.Prefix
	Gateway     netip.Addr // zero without one, or with several next hops
	Device      int        // 0 with several next hops
	Table       uint32
	Priority    uint32
	TOS, Type   uint8
	Metrics     string // as in the message: MTU and others
}

type routeKey struct {
	destination     netip.Prefix
	table, priority uint32
	tos             uint8
}

func (r Route) key() routeKey { return routeKey{r.Destination, r.Table, r.Priority, r.TOS} }

// ParseRoute reads a message about a route. ok is false for a destination that no flow of the overlay has.
func ParseRoute(m []byte) (r Route, ok bool, err error) {
	if len(m) < unix.SizeofRtMsg {
		return r, false, fmt.Errorf("a route message of %d bytes", len(m))
	}
	header := nl.DeserializeRtMsg(m)
	a, err := nl.ParseRouteAttrAsMap(m[unix.SizeofRtMsg:])
	if err != nil {
		return r, false, fmt.Errorf("a route message: %w", err)
	}
	number := func(key uint16) uint32 {
		if v := a[key].Value; len(v) == 4 {
			return nl.NativeEndian().Uint32(v)
		}
		return 0
	}
	r.Table, r.Priority, r.TOS = uint32(header.Table), number(unix.RTA_PRIORITY), header.Tos
	r.Type, r.Metrics = header.Type, string(a[unix.RTA_METRICS].Value)
	if table := number(unix.RTA_TABLE); table != 0 {
		r.Table = table
	}
	destination := netip.IPv4Unspecified()
	if header.Family == unix.AF_INET6 {
		destination = netip.IPv6Unspecified()
	}
	if v := a[unix.RTA_DST].Value; v != nil {
		destination = address(v)
	}
	r.Destination = netip.PrefixFrom(destination, int(header.Dst_len)).Masked()
	r.Gateway, r.Device = address(a[unix.RTA_GATEWAY].Value), int(number(unix.RTA_OIF))
	family := header.Family == unix.AF_INET || header.Family == unix.AF_INET6
	return r, family && r.Destination.IsValid() && !destination.IsMulticast() && !destination.IsLinkLocalUnicast() &&
		header.Flags&unix.RTM_F_CLONED == 0, nil
}

// Route records a new, changed or deleted route.
func (t *Table) Route(r Route, deleted bool) []Eviction {
	old, known := t.routes[r.key()]
	if known && !deleted && old == r {
		return nil
	}
	all := t.concerned(r)
	delete(t.routes, r.key()) // a route of another device may replace one that is kept
	if !deleted && t.keeps(r) {
		t.routes[r.key()] = r
	}
	if r.Type == unix.RTN_UNICAST && r.Device == 0 {
		t.manyGateways = true
	}
	return all
}

// keeps reports whether the table needs the route: one through the overlay or to containers, or one of the underlay
// through a router.
func (t *Table) keeps(r Route) bool {
	return r.Type == unix.RTN_UNICAST &&
		(r.Device == t.overlay || t.local(r.Device) || r.Device == t.uplink && r.Gateway.IsValid())
}

// concerned returns which cached flows depend on a route that changes. A route does not concern destinations for which
// its table has a longer prefix.
func (t *Table) concerned(changed Route) (all []Eviction) {
	prefix := changed.Destination
	if prefix.IsSingleIP() && prefix.Addr() == t.vtep {
		return []Eviction{{All: true, Cause: CauseRoute}} // the address was removed from this node
	}
	if prefix.IsSingleIP() {
		all = append(all, Eviction{Inner: prefix.Addr(), Cause: CauseRoute})
		if t.isVTEP(prefix.Addr()) {
			all = append(all, Eviction{VTEP: prefix.Addr(), Cause: CauseRoute})
		}
		return all
	}
	vteps := map[netip.Addr]bool{}
	for _, vtep := range t.vteps { // a route of the underlay
		if prefix.Contains(vtep) {
			vteps[vtep] = true
		}
	}
	for _, r := range t.routes {
		if r.Device == t.uplink || !r.Destination.Overlaps(prefix) ||
			r.Table == changed.Table && r.Destination.Bits() > prefix.Bits() {
			continue
		}
		vtep, ok := t.vteps[t.neighbours[neighbour{r.Device, r.Gateway}]]
		if r.Device != t.overlay || !ok {
			return []Eviction{{All: true, Cause: CauseRoute}} // containers here, or an overlay without gateways
		}
		vteps[vtep] = true
	}
	for vtep := range vteps {
		all = append(all, Eviction{VTEP: vtep, Cause: CauseRoute})
	}
	return all
}

// Load reads the present neighbours, forwarding entries and routes of the network namespace of the calling thread.
func (t *Table) Load() error {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6, unix.AF_BRIDGE} {
		all, err := netns.List(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, family) })
		if err != nil {
			return fmt.Errorf("list neighbours: %w", err)
		}
		for _, n := range all {
			t.Neighbour(&n, false)
		}
	}
	all, err := netns.List(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_UNSPEC}})
		return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	})
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	for _, m := range all {
		r, ok, err := ParseRoute(m)
		if err != nil {
			return err
		}
		if ok {
			t.Route(r, false)
		}
	}
	return nil
}
