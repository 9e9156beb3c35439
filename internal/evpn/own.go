package evpn

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
)

// MaxVNI is the highest VXLAN network identifier.
const MaxVNI = 1<<24 - 1

// Tenant is a tenant of network evpn.
type Tenant struct {
	Name   string
	Number uint16 // in its route distinguishers VTEP:number; one tenant's alone, not 0
	VNI    uint32 // of its Ethernet segment
	L3VNI  uint32 // of its routed traffic between nodes (symmetric IRB, RFC 9135 §5)
	CIDRs  []netip.Prefix
	Allow  []netip.Prefix // prefixes outside of CIDRs that may be imported
}

// Node is a node as the outside sees it.
type Node struct {
	VTEP      netip.Addr // IPv4
	RouterMAC MAC
}

// Container is what a node announces for a container.
type Container struct {
	Node     Node
	MAC      MAC
	Addrs    []netip.Addr
	Sequence uint32 // higher than that of any earlier place of this MAC
}

// Subnet is a prefix of a tenant that is wholly on one node.
type Subnet struct {
	Node   Node
	Prefix netip.Prefix
}

// Own is what a cluster announces for one tenant.
type Own struct {
	Tenant     Tenant
	Nodes      []Node // that host the tenant
	Containers []Container
	Subnets    []Subnet
}

// Check refuses numbers that do not fit into routes.
func (t Tenant) Check() error {
	switch {
	case t.Number == 0:
		return fmt.Errorf("tenant %s has number 0, and a route distinguisher needs 1 to 65535", t.Name)
	case t.VNI == 0 || t.VNI > MaxVNI || t.L3VNI == 0 || t.L3VNI > MaxVNI || t.VNI == t.L3VNI:
		return fmt.Errorf(
			"tenant %s has VNIs %d and %d, which must be two of 1 to %d", t.Name, t.VNI, t.L3VNI, MaxVNI)
	}
	return nil
}

// Routes returns the routes that a cluster with this ASN announces, in order: of each node that hosts a tenant its part
// in replication (type 3), of each container its addresses (type 2), of each node's subnet the prefix (type 5).
func Routes(asn uint32, own []Own) []Route {
	var routes []Route
	for _, o := range own {
		for _, n := range o.Nodes {
			routes = append(routes, o.Tenant.multicast(asn, n))
		}
		for _, c := range o.Containers {
			routes = append(routes, o.Tenant.container(asn, c)...)
		}
		for _, s := range o.Subnets {
			routes = append(routes, o.Tenant.subnet(asn, s))
		}
	}
	slices.SortFunc(routes, func(a, b Route) int { return a.Key.compare(b.Key) })
	return routes
}

func (t Tenant) multicast(asn uint32, n Node) Route {
	return Route{
		Key: Key{
			Kind:   KindMulticast,
			RD:     NewRD(n.VTEP, t.Number),
			Prefix: HostPrefix(n.VTEP),
		},
		VNI: t.VNI, VTEP: n.VTEP, Encap: VXLAN, Replication: n.VTEP,
		Targets: []Target{NewTarget(asn, t.VNI)},
	}
}

// container returns a route for each address. Each has the targets of both VNIs, so that other speakers can switch
// frames and route packets to the container.
func (t Tenant) container(asn uint32, c Container) []Route {
	var routes []Route
	for _, a := range c.Addrs {
		routes = append(routes, Route{
			Key: Key{
				Kind:   KindMACIP,
				RD:     NewRD(c.Node.VTEP, t.Number),
				MAC:    c.MAC,
				Prefix: HostPrefix(a),
			},
			VNI: t.VNI, L3VNI: t.L3VNI, VTEP: c.Node.VTEP, Encap: VXLAN,
			RouterMAC: c.Node.RouterMAC, Sequence: c.Sequence,
			Targets: []Target{NewTarget(asn, t.VNI), NewTarget(asn, t.L3VNI)},
		})
	}
	return routes
}

func (t Tenant) subnet(asn uint32, s Subnet) Route {
	return Route{
		Key: Key{
			Kind:   KindPrefix,
			RD:     NewRD(s.Node.VTEP, t.Number),
			Prefix: s.Prefix.Masked(),
		},
		VNI: t.L3VNI, VTEP: s.Node.VTEP, Encap: VXLAN, RouterMAC: s.Node.RouterMAC,
		Targets: []Target{NewTarget(asn, t.L3VNI)},
	}
}

// HostPrefix returns the prefix with one address.
func HostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// macOfRouter is the second byte of routers' MACs. Those of containers (address.SegmentMAC) have others.
const macOfRouter = 0x52

// segment is added to a tenant's id in the VNI of its Ethernet segment. The id itself is the L3 VNI, as the VNI is on
// network nimitz.
const segment = 1 << 23

// SegmentVNI returns the VNI of the Ethernet segment of a tenant with this L3 VNI.
func SegmentVNI(l3 uint32) uint32 { return segment | l3 }

// ContainerMAC returns the MAC of the container with an address, or with an IPv4 and an IPv6 address of which this is
// the IPv4 one. No other container of the tenant has it, and no table is needed.
func ContainerMAC(a netip.Addr) MAC { return MAC(address.SegmentMAC(a)) }

// RouterMAC returns the MAC to which other speakers send packets that they route to a VTEP.
func RouterMAC(vtep netip.Addr) MAC {
	a := vtep.As4()
	return MAC{2, macOfRouter, a[0], a[1], a[2], a[3]}
}

// VTEP returns the VTEP address of the node with a number; false if the pool has none for it. The first and the last
// address of a pool are not used.
func VTEP(pool netip.Prefix, number uint64) (netip.Addr, bool) {
	return address.VTEP4(pool, number)
}
