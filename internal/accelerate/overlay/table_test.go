package overlay

import (
	"net"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Indexes of devices in the tests.
const (
	uplink = iota + 1
	vxlan
	bridge
	veth
	other
)

var (
	macA, macB   = "02:00:00:00:00:0a", "02:00:00:00:00:0b"
	vtepA, vtepB = netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("192.0.2.11")
	gatewayA     = netip.MustParseAddr("10.244.10.0")
	gatewayB     = netip.MustParseAddr("10.244.11.0")
	router       = netip.MustParseAddr("192.0.2.254")
	container    = netip.MustParseAddr("10.244.1.7")
)

var device = Device{Index: vxlan, Local: netip.MustParseAddr("192.0.2.1")}

// event is a notification of a neighbour, forwarding entry or route.
type event func(t *Table) []Eviction

func neighbourEvent(deleted bool, device int, a netip.Addr, mac string) event {
	hardware, _ := net.ParseMAC(mac)
	n := &netlink.Neigh{LinkIndex: device, Family: unix.AF_INET, IP: a.AsSlice(), HardwareAddr: hardware}
	return func(t *Table) []Eviction { return t.Neighbour(n, deleted) }
}

func arp(device int, a netip.Addr, mac string) event { return neighbourEvent(false, device, a, mac) }

func noARP(device int, a netip.Addr, mac string) event { return neighbourEvent(true, device, a, mac) }

func fdbEvent(deleted bool, device, master int, mac string, vtep netip.Addr) event {
	hardware, _ := net.ParseMAC(mac)
	n := &netlink.Neigh{
		LinkIndex: device, MasterIndex: master, Family: unix.AF_BRIDGE, IP: vtep.AsSlice(), HardwareAddr: hardware,
	}
	return func(t *Table) []Eviction { return t.Neighbour(n, deleted) }
}

func fdb(mac string, vtep netip.Addr) event   { return fdbEvent(false, vxlan, 0, mac, vtep) }
func noFDB(mac string, vtep netip.Addr) event { return fdbEvent(true, vxlan, 0, mac, vtep) }
func port(mac string, device int) event       { return fdbEvent(false, device, bridge, mac, netip.Addr{}) }
func noPort(mac string, device int) event     { return fdbEvent(true, device, bridge, mac, netip.Addr{}) }
func route(r Route) event                     { return func(t *Table) []Eviction { return t.Route(r, false) } }
func noRoute(r Route) event                   { return func(t *Table) []Eviction { return t.Route(r, true) } }
func through(prefix string, device int, gateway netip.Addr) Route {
	return Route{
		Destination: netip.MustParsePrefix(prefix), Device: device, Gateway: gateway, Table: unix.RT_TABLE_MAIN,
		Type: unix.RTN_UNICAST,
	}
}

func all(cause string) []Eviction                { return []Eviction{{All: true, Cause: cause}} }
func vtep(a netip.Addr, cause string) []Eviction { return []Eviction{{VTEP: a, Cause: cause}} }
func inner(a netip.Addr, cause string) []Eviction {
	return []Eviction{{Inner: a, Cause: cause}}
}

// then returns the evictions of the second event.
func then(first, second event) event {
	return func(t *Table) []Eviction {
		first(t)
		return second(t)
	}
}

// node is Flannel's arrangement with two other nodes, of which B is behind the router.
var node = []event{
	fdb(macA, vtepA), fdb(macB, vtepB), arp(vxlan, gatewayA, macA), arp(vxlan, gatewayB, macB),
	arp(uplink, vtepA, macA), arp(uplink, router, macB), arp(bridge, container, macA), port(macA, veth),
	route(through("10.244.1.0/24", bridge, netip.Addr{})),
	route(through("10.244.10.0/24", vxlan, gatewayA)), route(through("10.244.11.0/24", vxlan, gatewayB)),
	route(through("0.0.0.0/0", uplink, router)), route(through("192.0.2.0/24", uplink, netip.Addr{})),
}

func TestTable(t *testing.T) {
	otherTable := through("10.244.0.0/16", uplink, router)
	otherTable.Table = 99
	gatewayAChanged := append(vtep(vtepA, CauseNeighbour), inner(gatewayA, CauseNeighbour)...)
	changedMTU := through("10.244.10.0/24", vxlan, gatewayA)
	changedMTU.Metrics = "mtu 1400"
	for name, c := range map[string]struct {
		event event
		want  []Eviction
	}{
		"neighbour as before":     {arp(vxlan, gatewayA, macA), nil},
		"neighbour without a MAC": {arp(vxlan, gatewayA, ""), nil},
		"new neighbour":           {arp(vxlan, netip.MustParseAddr("10.244.12.0"), macA), nil},
		"gateway's MAC":           {arp(vxlan, gatewayA, macB), gatewayAChanged},
		"gateway deleted":         {noARP(vxlan, gatewayA, macA), gatewayAChanged},
		"container's MAC":         {arp(bridge, container, macB), inner(container, CauseNeighbour)},
		"VTEP's MAC":              {arp(uplink, vtepA, macB), vtep(vtepA, CauseNeighbour)},
		"router's MAC":            {arp(uplink, router, macA), all(CauseNeighbour)},
		"forwarding as before":    {fdb(macA, vtepA), nil},
		"VTEP moved":              {fdb(macA, vtepB), vtep(vtepA, CauseForwarding)},
		"forwarding deleted":      {noFDB(macA, vtepA), vtep(vtepA, CauseForwarding)},
		"new VTEP":                {fdb("02:00:00:00:00:0c", router), nil},
		"new flood entry":         {fdb(noMAC, vtepA), nil},
		"flood entry deleted":     {noFDB(noMAC, vtepA), vtep(vtepA, CauseForwarding)},
		"port as before":          {port(macA, veth), nil},
		"port learnt again":       {then(noPort(macA, veth), port(macA, veth)), nil},
		"port of an unknown MAC":  {port("02:00:00:00:00:0c", veth), nil},
		"port changed":            {port(macA, other), []Eviction{{Device: veth, Cause: CauseForwarding}}},
		"port deleted":            {noPort(macA, veth), []Eviction{{Device: veth, Cause: CauseForwarding}}},
		"former port deleted":     {noPort(macA, other), nil},
		"entry of another bridge": {fdbEvent(false, veth, other, macA, netip.Addr{}), nil},
		"route as before":         {route(through("10.244.10.0/24", vxlan, gatewayA)), nil},
		"another gateway":         {route(through("10.244.10.0/24", vxlan, gatewayB)), vtep(vtepA, CauseRoute)},
		"another MTU":             {route(changedMTU), vtep(vtepA, CauseRoute)},
		"another device":          {route(through("10.244.10.0/24", uplink, router)), vtep(vtepA, CauseRoute)},
		"route deleted": {
			noRoute(through("10.244.10.0/24", vxlan, gatewayA)), vtep(vtepA, CauseRoute),
		},
		"longer prefix":                   {route(through("10.244.10.64/26", uplink, router)), vtep(vtepA, CauseRoute)},
		"shorter prefix":                  {route(through("10.244.0.0/16", uplink, router)), nil},
		"shorter prefix in another table": {route(otherTable), all(CauseRoute)},
		"other prefix":                    {route(through("10.99.0.0/16", uplink, router)), nil},
		"one container here": {
			route(through("10.244.1.7/32", veth, netip.Addr{})), inner(container, CauseRoute),
		},
		"part of the containers here": {route(through("10.244.1.0/25", other, netip.Addr{})), all(CauseRoute)},
		"own address": {noRoute(Route{
			Destination: netip.MustParsePrefix("192.0.2.1/32"), Device: uplink, Table: unix.RT_TABLE_LOCAL,
			Type: unix.RTN_LOCAL,
		}), all(CauseRoute)},
		"one VTEP": {route(through("192.0.2.10/32", uplink, router)), append(inner(vtepA, CauseRoute),
			vtep(vtepA, CauseRoute)...)},
		"part of the underlay": {route(through("192.0.2.10/31", uplink, router)), append(vtep(vtepA, CauseRoute),
			vtep(vtepB, CauseRoute)...)},
	} {
		t.Run(name, func(t *testing.T) {
			table := NewTable(uplink, device, bridge, func(device int) bool { return device == veth })
			for _, e := range node {
				e(table)
			}
			got := c.event(table)
			slices.SortFunc(got, func(a, b Eviction) int { return -a.VTEP.Compare(b.VTEP) })
			slices.SortFunc(c.want, func(a, b Eviction) int { return -a.VTEP.Compare(b.VTEP) })
			if len(got)+len(c.want) > 0 && !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
			repeats := name == "flood entry deleted"
			if again := c.event(table); !repeats && len(again) > 0 && !isRoute(again) {
				t.Errorf("the same event again: got %+v, want nothing", again)
			}
		})
	}
}

// isRoute reports whether evictions are of a route. The table keeps only routes of the overlay, so that it does not
// know others again.
func isRoute(all []Eviction) bool { return all[0].Cause == CauseRoute }

// In a bridged overlay, containers of other nodes have ports and forwarding entries. Changes of one container concern
// no other.
func TestBridged(t *testing.T) {
	table := NewTable(uplink, Device{Index: vxlan, Bridged: true}, bridge, func(int) bool { return false })
	of := func(mac string) []Eviction { return []Eviction{{MAC: bytesOf(mac), Cause: CauseForwarding}} }
	for _, step := range []struct {
		what  string
		event event
		want  []Eviction
	}{
		{"a container of another node", port(macA, vxlan), nil},
		{"its VTEP", fdb(macA, vtepA), of(macA)},
		{"another VTEP", fdb(macA, vtepB), of(macA)},
		{"a container of this node", port(macB, veth), nil},
		{"it moves to another node", port(macB, vxlan), []Eviction{{Device: veth, Cause: CauseForwarding}}},
		{"it comes back", port(macB, veth), of(macB)},
		{"the VTEP of the other is gone", noFDB(macA, vtepB), of(macA)},
		{"its port too", noPort(macA, vxlan), of(macA)},
		{"another node to flood to", fdb(noMAC, vtepA), nil},
		{"it is gone", noFDB(noMAC, vtepA), vtep(vtepA, CauseForwarding)},
	} {
		if got := step.event(table); !reflect.DeepEqual(got, step.want) {
			t.Errorf("%s: got %+v, want %+v", step.what, got, step.want)
		}
	}
}

// With a route of several next hops, each neighbour of the uplink may be a router.
func TestManyGateways(t *testing.T) {
	table := NewTable(uplink, device, bridge, func(int) bool { return false })
	host := netip.MustParseAddr("192.0.2.77")
	arp(uplink, host, macA)(table)
	if got := arp(uplink, host, macB)(table); got != nil {
		t.Errorf("another host: got %+v, want nothing", got)
	}
	route(through("0.0.0.0/0", 0, netip.Addr{}))(table)
	if got := arp(uplink, host, macA)(table); !reflect.DeepEqual(got, all(CauseNeighbour)) {
		t.Errorf("a possible router: got %+v, want all", got)
	}
}

func TestParseContainers(t *testing.T) {
	for s, want := range map[string]Containers{
		"bridge:cni0": {Bridge: "cni0"}, "veth:cali*": {Pattern: "cali*"},
	} {
		if c, err := ParseContainers(s); err != nil || c != want || c.String() != s {
			t.Errorf("%s: got %+v, %v", s, c, err)
		}
	}
	for _, s := range []string{"", "cni0", "bridge:", "veth:", "veth:[", "bond:x"} {
		if c, err := ParseContainers(s); err == nil {
			t.Errorf("%s: got %+v, want an error", s, c)
		}
	}
}

func TestParseRoute(t *testing.T) {
	for _, short := range [][]byte{nil, make([]byte, unix.SizeofRtMsg-1)} {
		if _, ok, err := ParseRoute(short); ok || err == nil {
			t.Errorf("%d bytes: no error", len(short))
		}
	}
}
