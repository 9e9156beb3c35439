package overlay

import (
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Causes of evictions.
const (
	CauseNeighbour  = "neighbour"
	CauseForwarding = "fdb"
	CauseRoute      = "route"
	CauseLink       = "link"
)

// Eviction says which entries of the cache a change concerns: all of them, or those with this inner address, this
// remote VTEP, this container device, or this MAC of a container on another node.
type Eviction struct {
	All         bool
	Inner, VTEP netip.Addr
	Device      uint32
	MAC         [6]byte
	Cause       string
}

// Table keeps the values of neighbours, forwarding entries and routes that cached flows depend on. Its methods return
// what a change of a value concerns. A change of an entry's state, such as its age, concerns nothing.
type Table struct {
	uplink, overlay, bridge int
	vtep                    netip.Addr            // of this node
	bridged                 bool                  // the overlay's device is a port of the bridge
	neighbours              map[neighbour]string  // MACs
	vteps                   map[string]netip.Addr // by inner MAC: forwarding entries of the overlay's device
	ports                   map[string]int        // by MAC: forwarding entries of the bridge
	routes                  map[routeKey]Route    // those through the overlay or to containers
	manyGateways            bool                  // there is a route with several next hops, which are not kept
	local                   func(device int) bool // whether a device leads to containers
}

type neighbour struct {
	device  int
	address netip.Addr
}

// NewTable returns a table for an overlay and devices with these indexes; without a bridge, bridge is 0. container
// reports whether a device is a container's.
func NewTable(uplink int, overlay Device, bridge int, container func(device int) bool) *Table {
	return &Table{
		uplink: uplink, overlay: overlay.Index, bridge: bridge, vtep: overlay.Local, bridged: overlay.Bridged,
		neighbours: map[neighbour]string{}, vteps: map[string]netip.Addr{},
		ports: map[string]int{}, routes: map[routeKey]Route{},
		local: func(device int) bool { return bridge != 0 && device == bridge || container(device) },
	}
}

// noMAC is the MAC of entries for unknown destinations. A device may have several.
const noMAC = "00:00:00:00:00:00"

// Neighbour records a new, changed or deleted neighbour or forwarding entry.
func (t *Table) Neighbour(n *netlink.Neigh, deleted bool) []Eviction {
	mac := n.HardwareAddr.String()
	switch {
	case n.Family == unix.AF_BRIDGE && n.LinkIndex == t.overlay && n.MasterIndex == 0:
		return t.forwarding(mac, address(n.IP), deleted)
	case n.Family == unix.AF_BRIDGE && n.MasterIndex == t.bridge && t.bridge != 0:
		return t.port(mac, n.LinkIndex, deleted)
	case n.Family == unix.AF_BRIDGE:
		return nil
	}
	key := neighbour{n.LinkIndex, address(n.IP)}
	old, known := t.neighbours[key]
	switch {
	case deleted:
		delete(t.neighbours, key)
	case mac == "" || mac == old: // not resolved at the moment, or a change of state
		return nil
	default:
		t.neighbours[key] = mac
	}
	if !known {
		return nil
	}
	return t.changed(key, old)
}

// changed returns what depends on a neighbour that had this MAC.
func (t *Table) changed(n neighbour, old string) []Eviction {
	var all []Eviction
	switch {
	case n.device == t.overlay:
		// The neighbour is a gateway, as Flannel's and Calico's are, or the container itself.
		if vtep, ok := t.vteps[old]; ok {
			all = append(all, Eviction{VTEP: vtep, Cause: CauseNeighbour})
		}
		return append(all, Eviction{Inner: n.address, Cause: CauseNeighbour})
	case t.local(n.device):
		return []Eviction{{Inner: n.address, Cause: CauseNeighbour}}
	case n.device == t.uplink && t.isVTEP(n.address):
		return []Eviction{{VTEP: n.address, Cause: CauseNeighbour}}
	case n.device == t.uplink && t.isGateway(n.address):
		return []Eviction{{All: true, Cause: CauseNeighbour}} // the router to any VTEP
	}
	return nil
}

func (t *Table) isGateway(a netip.Addr) bool {
	if t.manyGateways {
		return true
	}
	for _, r := range t.routes {
		if r.Device == t.uplink && r.Gateway == a {
			return true
		}
	}
	return false
}

func (t *Table) forwarding(mac string, vtep netip.Addr, deleted bool) []Eviction {
	old, known := t.vteps[mac]
	switch {
	case mac == noMAC && !deleted:
		return nil
	case mac == noMAC:
		old, known = vtep, true
	case deleted:
		delete(t.vteps, mac)
	case old == vtep:
		return nil
	default:
		t.vteps[mac] = vtep
	}
	switch {
	case t.bridged && mac != noMAC: // before a new entry, frames went to all nodes, of which the cache has learnt one
		return []Eviction{{MAC: bytesOf(mac), Cause: CauseForwarding}}
	case !known:
		return nil
	}
	return []Eviction{{VTEP: old, Cause: CauseForwarding}}
}

// port needs no eviction for a new MAC: the bridge has sent the frames to it to all ports, but the cache has learnt
// only from those to the container that sends from this MAC.
func (t *Table) port(mac string, port int, deleted bool) []Eviction {
	old, known := t.ports[mac]
	switch {
	case deleted && old == port:
		delete(t.ports, mac)
	case deleted || old == port:
		return nil
	default:
		t.ports[mac] = port
	}
	switch {
	case !known:
		return nil
	case old == t.overlay: // a container of another node
		return []Eviction{{MAC: bytesOf(mac), Cause: CauseForwarding}}
	}
	return []Eviction{{Device: uint32(old), Cause: CauseForwarding}}
}

// bytesOf returns zeros for what is no MAC of six bytes.
func bytesOf(mac string) (b [6]byte) {
	parsed, _ := net.ParseMAC(mac)
	copy(b[:], parsed)
	return b
}

func (t *Table) isVTEP(a netip.Addr) bool {
	for _, vtep := range t.vteps {
		if vtep == a {
			return true
		}
	}
	return false
}

// VTEPs returns the addresses of the remote VTEPs.
func (t *Table) VTEPs() []netip.Addr {
	var all []netip.Addr
	for _, vtep := range t.vteps {
		all = append(all, vtep)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// address returns the zero Addr for an address of another length.
func address(ip []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}
