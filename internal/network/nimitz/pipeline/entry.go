package pipeline

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/tenant"
)

// Stage is a stage with entries, in the order of the pipeline. The fifth, encap, has none: the forwarding entry names
// the VTEP.
type Stage uint8

const (
	Decap Stage = iota + 1
	Register
	NAT
	Forwarding
	Sharing // of load: which nodes look up the rules
)

// Stages lists all stages, in order.
var Stages = []Stage{Decap, Register, NAT, Forwarding, Sharing}

func (s Stage) String() string {
	return [...]string{"none", "decap", "register", "nat", "forwarding", "sharing"}[s]
}

// VNI is a VXLAN network identifier, 24 bits: the tenant's id.
type VNI uint32

const (
	Any        VNI = 0 // in a forwarding entry: all VNIs
	GatewayVNI     = VNI(tenant.GatewayID)
	MaxVNI     VNI = 1<<24 - 1
)

// Port is a source and destination of packets: a container, by its endpoint id from 1 to 65535, or one of two others.
type Port uint32

const (
	VXLAN   Port = 1<<16 + iota // other nodes
	Gateway                     // the node's own stack, and through it the underlay
)

func (p Port) String() string {
	switch p {
	case VXLAN:
		return "vxlan"
	case Gateway:
		return "gateway"
	}
	return fmt.Sprintf("container %d", uint32(p))
}

// Entry is an entry of a table. Values of the types below are compared with ==.
type Entry interface {
	Stage() Stage
	// Match is the key of the entry: no table has two entries with the same match.
	Match() any
	String() string
}

// Peer, in Decap, accepts encapsulated packets from all nodes whose /64 lies in the prefix, each from its VTEP address
// (VTEP). One entry covers a region.
type Peer struct{ Nodes netip.Prefix }

// Sender, in Register, allows a container to send from its port with this source address. Its packets get the VNI, and
// carry the identity in VXLAN's group policy field.
type Sender struct {
	Port     Port
	Address  netip.Addr
	VNI      VNI
	Identity uint16
}

// Foreign, in Register, accepts packets of a tenant's containers in another region, from that region's Edge Switch
// (§3.1, cross-region traffic). The Edge Switch sends with the VNI that the tenant has there, and only these sources
// are accepted. The identities in these packets are the other region's, so they mean nothing here.
type Foreign struct {
	Edge   netip.Prefix // the /64 of the other region's Edge Switch, or the IPv4 address of another speaker's VTEP
	Theirs VNI
	Source netip.Prefix
	VNI    VNI // the tenant's VNI here
}

// NorthSouth, in NAT, is a prefix outside a tenant's overlay that is reached by this node's gateway: packets to it, and
// packets from the gateway, are translated. Containers of another tenant may have the same addresses.
type NorthSouth struct {
	VNI VNI
	To  netip.Prefix
}

// DNAT, in NAT, replaces the destination of north-south packets, and sets the VNI of the new destination. In packets
// from a container, it replaces a service's virtual address by the real one. In packets from the gateway, it replaces a
// container's virtual address by the container's own.
type DNAT struct {
	VNI     VNI // GatewayVNI or a tenant's
	Virtual netip.Addr
	RealVNI VNI
	Real    netip.Addr
}

// SNAT, in NAT, replaces the source of north-south packets: the reverse of a DNAT, looked up after it.
type SNAT struct {
	VNI     VNI
	Real    netip.Addr
	Virtual netip.Addr
}

// Forward, in Forwarding, maps a prefix to a port. The longest prefix of the packet's own VNI wins, then the longest of
// Any.
type Forward struct {
	VNI VNI // or Any
	To  netip.Prefix
	// a container's, VXLAN or Gateway; 0 means drop: the prefix is the tenant's, and no container is there
	Port Port
	VTEP netip.Addr // of the node, where the port is VXLAN

	// where the port is VXLAN: the node leads out of the region, or to hosts that are not containers. This node then
	// applies the policies of such packets, because the other node does not
	Outside bool

	// of the container, where the port is one; of the router or host there, where the VTEP is an IPv4 address
	MAC MAC
	// where the VTEP is an IPv4 address: the VNI on the wire, if not the packet's own
	Wire VNI
	// where the VTEP is the backend of an offload: its id. Packets go to a frontend
	Offload uint32
	// where the port is VXLAN: packets from other nodes are forwarded too, because the container has just moved there
	Relays bool
}

// Offload, in Sharing, lists the nodes that look up a tenant's rules for its containers of one node (Nezha §3).
type Offload struct {
	ID      uint32
	VNI     VNI
	Backend netip.Prefix // the /64 of the containers' node
	Epoch   uint32
	Fronts  bool // this node is a frontend
	// Frontends that packets are sent to, 1, 2, 4 or 8; unused ones are invalid.
	To [tenant.MaxActive]netip.Prefix
	// Frontends that messages are accepted from.
	From [tenant.MaxFrontends]netip.Prefix
}

// Backend, in Sharing, says that a tenant's containers here are those of an offload.
type Backend struct {
	VNI     VNI
	Offload uint32
	Asks    bool // this node has no rules: frontends look them up
}

// Fronted, in Sharing, is a container of an offload's backend, at a frontend.
type Fronted struct {
	VNI     VNI
	Address netip.Addr
	Offload uint32
	App     uint16
}

func (Offload) Stage() Stage { return Sharing }
func (Backend) Stage() Stage { return Sharing }
func (Fronted) Stage() Stage { return Sharing }

func (e Offload) Match() any { return Offload{ID: e.ID} }
func (e Backend) Match() any { return Backend{VNI: e.VNI} }
func (e Fronted) Match() any { return Fronted{VNI: e.VNI, Address: e.Address} }

func (e Offload) String() string {
	valid := func(all []netip.Prefix) (some []netip.Prefix) {
		return slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return !p.IsValid() })
	}
	return fmt.Sprintf("sharing: offload %d in VNI %d of backend %v, epoch %d: to frontends %v, from %v",
		e.ID, e.VNI, e.Backend, e.Epoch, valid(e.To[:]), valid(e.From[:]))
}

func (e Backend) String() string {
	where := "here and at frontends"
	if e.Asks {
		where = "at frontends"
	}
	return fmt.Sprintf("sharing: containers here in VNI %d: offload %d, rules %s", e.VNI, e.Offload, where)
}

func (e Fronted) String() string {
	return fmt.Sprintf("sharing: %v in VNI %d: app %d, a container of offload %d", e.Address, e.VNI, e.App, e.Offload)
}

// MaxReplicas is the maximum number of VTEPs to which a frame is replicated.
const MaxReplicas = 64

// Replication, in Forwarding, lists the VTEPs of other speakers that get frames about unknown hosts of a tenant's
// Ethernet segment.
type Replication struct {
	VNI   VNI                     // the tenant's
	VTEPs [MaxReplicas]netip.Addr // IPv4 addresses in order; unused ones are zero
}

// NewReplication returns an entry without those VTEPs that exceed MaxReplicas.
func NewReplication(vni VNI, vteps []netip.Addr) Replication {
	r := Replication{VNI: vni}
	copy(r.VTEPs[:], vteps)
	return r
}

// Used returns the VTEPs.
func (e Replication) Used() (all []netip.Addr) {
	for _, a := range e.VTEPs {
		if a.IsValid() {
			all = append(all, a)
		}
	}
	return all
}

func (Peer) Stage() Stage       { return Decap }
func (Sender) Stage() Stage     { return Register }
func (Foreign) Stage() Stage    { return Register }
func (NorthSouth) Stage() Stage { return NAT }
func (DNAT) Stage() Stage       { return NAT }
func (SNAT) Stage() Stage       { return NAT }
func (Forward) Stage() Stage    { return Forwarding }

func (Replication) Stage() Stage { return Forwarding }

func (e Peer) Match() any       { return e }
func (e Sender) Match() any     { return Sender{Port: e.Port, Address: e.Address} }
func (e Foreign) Match() any    { return Foreign{Edge: e.Edge, Theirs: e.Theirs, Source: e.Source} }
func (e NorthSouth) Match() any { return e }
func (e DNAT) Match() any       { return DNAT{VNI: e.VNI, Virtual: e.Virtual} }
func (e SNAT) Match() any       { return SNAT{VNI: e.VNI, Real: e.Real} }
func (e Forward) Match() any    { return Forward{VNI: e.VNI, To: e.To} }

func (e Replication) Match() any { return Replication{VNI: e.VNI} }

func (e Peer) String() string { return fmt.Sprintf("decap: from nodes in %v", e.Nodes) }
func (e Sender) String() string {
	return fmt.Sprintf("register: %v from %v: VNI %d, identity %d", e.Port, e.Address, e.VNI, e.Identity)
}
func (e Foreign) String() string {
	return fmt.Sprintf("register: from %v in VNI %d of the region behind %v: VNI %d", e.Source, e.Theirs, e.Edge, e.VNI)
}
func (e NorthSouth) String() string { return fmt.Sprintf("nat: %v in VNI %d is outside", e.To, e.VNI) }
func (e DNAT) String() string {
	return fmt.Sprintf("nat: to %v in VNI %d: to %v in VNI %d", e.Virtual, e.VNI, e.Real, e.RealVNI)
}
func (e SNAT) String() string {
	return fmt.Sprintf("nat: from %v in VNI %d: from %v", e.Real, e.VNI, e.Virtual)
}

func (e Replication) String() string {
	return fmt.Sprintf("forwarding: frames about unknown hosts in VNI %d: to VTEPs %v", e.VNI, e.Used())
}

func (e Forward) String() string {
	to := e.Port.String()
	switch e.Port {
	case 0:
		to = "no port"
	case VXLAN:
		to = fmt.Sprintf("node at %v", e.VTEP)
		if e.VTEP.Is4() {
			to = fmt.Sprintf("VTEP %v with MAC %v", e.VTEP, e.MAC)
		}
		if e.Wire != 0 {
			to += fmt.Sprintf(" in VNI %d", e.Wire)
		}
		if e.Offload != 0 {
			to += fmt.Sprintf(", by a frontend of offload %d", e.Offload)
		}
		if e.Relays {
			to += ", also from other nodes"
		}
		if e.Outside {
			to = "outside, by the " + to
		}
	}
	vni := fmt.Sprintf("in VNI %d", e.VNI)
	if e.VNI == Any {
		vni = "in any VNI"
	}
	return fmt.Sprintf("forwarding: %v %s: %s", e.To, vni, to)
}

// VTEP returns the address at which a node receives VXLAN, or of a shorter prefix the one of the first node in it.
func VTEP(node netip.Prefix) netip.Addr { return tenant.TunnelAddress(node) }

// IsVTEP reports whether an address is a node's VTEP address.
func IsVTEP(a netip.Addr) bool { return a.Is6() && a == VTEP(netip.PrefixFrom(a, 64)) }

// Count returns the number of entries of each stage.
func Count(entries []Entry) map[Stage]int {
	n := map[Stage]int{}
	for _, e := range entries {
		n[e.Stage()]++
	}
	return n
}
