package ovs

import (
	"fmt"
	"hash/fnv"
	"net/netip"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/openflow"
)

// The tables are the pipeline's stages in order. NAT has three tables, because a packet may match an entry of each of
// its kinds.
const (
	tableDecap uint8 = iota
	tableRegister
	tableDNAT
	tableNorthSouth
	tableSNAT
	tableForwarding
	tableEncap
	tableDrops // one flow for each reason, as a counter
)

// Registers. All are zero when a packet enters the switch.
var (
	regVNI      = openflow.Register(0)
	regIdentity = openflow.Register(1)
	regFrom     = openflow.Register(2) // the ingress port, if it is VXLAN or the gateway
	regTo       = openflow.Register(3) // the egress port
	regReason   = openflow.Register(4) // the drop reason
	regNAT      = openflow.Register(5) // 1: an address was translated
	regSource   = openflow.Register(6) // 1: the source was translated
	regAbroad   = openflow.Register(7) // 1: to another region
	regOutside  = openflow.Register(8) // 1: to a destination that is no container of the region; not used yet
	regMAC      = openflow.Register(9) // 1: the destination MAC is written
)

// Priorities. The longer prefix wins; of two prefixes of the same length, the one with the packet's own VNI wins.
const (
	priorityLast   = 0
	priorityFamily = 1
	priorityEntry  = 100
	priorityOwnVNI = 1000
	priorityFirst  = 2000
)

// Ports of Open vSwitch are numbered up to 65279.
const (
	ofportVXLAN   = 65278
	ofportGateway = 65279
	lastContainer = pipeline.Port(ofportVXLAN - 1)
)

// fromAbroad in regFrom means VXLAN's port and another region.
const fromAbroad = 1 << 16

func ofport(p pipeline.Port) (uint32, error) {
	switch {
	case p == pipeline.VXLAN:
		return ofportVXLAN, nil
	case p == pipeline.Gateway:
		return ofportGateway, nil
	case p >= 1 && p <= lastContainer:
		return uint32(p), nil
	}
	return 0, fmt.Errorf("%v: Open vSwitch has ports 1 to %d for containers", p, lastContainer)
}

func portOf(of uint64) pipeline.Port {
	switch of {
	case ofportVXLAN:
		return pipeline.VXLAN
	case ofportGateway:
		return pipeline.Gateway
	}
	return pipeline.Port(of)
}

// kind is the type of an entry, as encoded in its flow's cookie.
type kind uint8

const (
	constant kind = iota
	peer
	sender
	northSouth
	dnat
	snat
	forward
	foreign
)

// A cookie consists of 16 constant bits, 8 bits of kind, and a hash of the entry's match. The lowest bit is zero.
const (
	cookieOurs uint64 = 0x7069 << 48
	cookieMask uint64 = 0xffff << 48
	cookieKind        = 40
	// With a mask of all bits Open vSwitch finds the flow by its cookie; with this mask it searches all flows.
	cookieLoose = ^uint64(1)
)

func cookie(k kind, match any) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%v", match)
	return cookieOurs | uint64(k)<<cookieKind | h.Sum64()&(1<<cookieKind-2)
}

func kindOf(cookie uint64) kind { return kind(cookie >> cookieKind) }

// family has the fields of IPv4 or IPv6.
type family struct {
	etherType uint64
	src, dst  openflow.Field
	icmp      uint64 // its protocol
	icmpType  openflow.Field
}

var (
	ip4      = family{0x0800, openflow.IPv4Src, openflow.IPv4Dst, unix.IPPROTO_ICMP, openflow.ICMPv4Type}
	ip6      = family{0x86dd, openflow.IPv6Src, openflow.IPv6Dst, unix.IPPROTO_ICMPV6, openflow.ICMPv6Type}
	families = []family{ip4, ip6}
)

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return ip4
	}
	return ip6
}

func (f family) is() openflow.Value { return openflow.EthType.Number(f.etherType) }

func set(v openflow.Value) openflow.Action { return openflow.Set{Value: v} }

// sends matches an ICMP type.
func (f family) sends(icmpType uint64) []openflow.Value {
	return []openflow.Value{f.is(), openflow.IPProto.Number(f.icmp), f.icmpType.Number(icmpType)}
}

// to matches packets to a prefix.
func (f family) to(p netip.Prefix) []openflow.Value {
	if p.Bits() == 0 {
		return []openflow.Value{f.is()}
	}
	return []openflow.Value{f.is(), f.dst.Prefix(p)}
}

// from matches packets from a prefix.
func (f family) from(p netip.Prefix) []openflow.Value {
	if p.Bits() == 0 {
		return []openflow.Value{f.is()}
	}
	return []openflow.Value{f.is(), f.src.Prefix(p)}
}

// render turns an entry of a switch in a region into a flow.
func render(region netip.Prefix, e pipeline.Entry) (openflow.Flow, error) {
	f := openflow.Flow{Priority: priorityEntry}
	k := constant
	switch e := e.(type) {
	case pipeline.Peer:
		if e.Nodes.Bits() > 64 || !e.Nodes.Addr().Is6() {
			return f, fmt.Errorf("%v: nodes are IPv6 prefixes of 64 bits or less", e)
		}
		k, f.Table, f.Goto = peer, tableDecap, tableRegister
		f.Match = []openflow.Value{inPort(ofportVXLAN), vteps(e.Nodes)}
	case pipeline.Sender:
		port, err := ofport(e.Port)
		if err != nil {
			return f, err
		}
		own := familyOf(e.Address)
		k, f.Table, f.Goto = sender, tableRegister, tableDNAT
		f.Match = []openflow.Value{inPort(port), own.is(), own.src.Address(e.Address)}
		f.Actions = []openflow.Action{set(regVNI.Number(uint64(e.VNI))), set(regIdentity.Number(uint64(e.Identity)))}
	case pipeline.Foreign:
		if e.Edge.Bits() != address.NodeBits || !e.Edge.Addr().Is6() {
			return f, fmt.Errorf("%v: not a node's prefix", e)
		}
		k, f.Table, f.Goto = foreign, tableRegister, tableDNAT
		f.Match = append([]openflow.Value{inPort(ofportVXLAN), vteps(e.Edge),
			openflow.TunnelID.Number(uint64(e.Theirs))}, familyOf(e.Source.Addr()).from(e.Source)...)
		f.Actions = []openflow.Action{set(regVNI.Number(uint64(e.VNI))), set(regFrom.Number(fromAbroad))}
	case pipeline.DNAT:
		if e.Virtual.Is4() != e.Real.Is4() {
			return f, fmt.Errorf("%v: the addresses are of two families", e)
		}
		own := familyOf(e.Virtual)
		k, f.Table, f.Goto = dnat, tableDNAT, tableNorthSouth
		f.Match = []openflow.Value{regVNI.Number(uint64(e.VNI)), own.is(), own.dst.Address(e.Virtual)}
		f.Actions = []openflow.Action{set(regVNI.Number(uint64(e.RealVNI))), set(own.dst.Address(e.Real)),
			set(regNAT.Number(1))}
	case pipeline.NorthSouth:
		k, f.Table, f.Goto = northSouth, tableNorthSouth, tableSNAT
		f.Match = append([]openflow.Value{regVNI.Number(uint64(e.VNI))}, familyOf(e.To.Addr()).to(e.To)...)
	case pipeline.SNAT:
		if e.Virtual.Is4() != e.Real.Is4() {
			return f, fmt.Errorf("%v: the addresses are of two families", e)
		}
		own := familyOf(e.Real)
		k, f.Table, f.Goto = snat, tableSNAT, tableForwarding
		f.Match = []openflow.Value{regVNI.Number(uint64(e.VNI)), own.is(), own.src.Address(e.Real)}
		f.Actions = []openflow.Action{set(own.src.Address(e.Virtual)), set(regNAT.Number(1)), set(regSource.Number(1))}
	case pipeline.Forward:
		k = forward
		if err := renderForward(&f, region, e); err != nil {
			return f, err
		}
	default:
		return f, fmt.Errorf("%v: not an entry that Open vSwitch has a table for", e)
	}
	f.Cookie = cookie(k, e.Match())
	return f, nil
}

func renderForward(f *openflow.Flow, region netip.Prefix, e pipeline.Forward) error {
	f.Table, f.Goto, f.Match = tableForwarding, tableEncap, familyOf(e.To.Addr()).to(e.To)
	f.Priority = uint16(priorityEntry + e.To.Bits())
	if e.VNI != pipeline.Any {
		f.Priority = uint16(priorityOwnVNI + e.To.Bits())
		f.Match = append([]openflow.Value{regVNI.Number(uint64(e.VNI))}, f.Match...)
	}
	if e.Port == 0 {
		*f = dropped(*f, noEndpoint)
		return nil
	}
	port, err := ofport(e.Port)
	if err != nil {
		return err
	}
	f.Actions = []openflow.Action{set(regTo.Number(uint64(port)))}
	if e.MAC != (pipeline.MAC{}) {
		f.Actions = append(f.Actions, set(openflow.EthDst.MAC(e.MAC.Addr())), set(regMAC.Number(1)))
	}
	if e.Port == pipeline.VXLAN {
		if !pipeline.IsVTEP(e.VTEP) {
			return fmt.Errorf("%v: not the address of a node's VTEP", e)
		}
		f.Actions = append(f.Actions, set(openflow.TunnelDst6.Address(e.VTEP)))
		if !region.Contains(e.VTEP) {
			f.Actions = append(f.Actions, set(regAbroad.Number(1)))
		}
		if e.Outside {
			f.Actions = append(f.Actions, set(regOutside.Number(1)))
		}
	}
	return nil
}

func inPort(of uint32) openflow.Value { return openflow.InPort.Number(uint64(of)) }

// vteps matches packets that a node of a prefix has encapsulated: its /64, and the last half of the address except the
// bits of the identity.
func vteps(nodes netip.Prefix) openflow.Value {
	mask := make([]byte, 16)
	for bit := range nodes.Bits() {
		mask[bit/8] |= 0x80 >> (bit % 8)
	}
	for i := range mask[8:] {
		mask[8+i] = 0xff
	}
	mask[identityByte], mask[identityByte+1] = 0, 0
	return openflow.TunnelSrc6.Address(pipeline.VTEP(nodes)).Masked(mask)
}

// parse is the inverse of render.
func parse(f openflow.Flow) (pipeline.Entry, error) {
	get := values(f)
	switch kindOf(f.Cookie) {
	case peer:
		bits := 0
		for mask := get[openflow.TunnelSrc6].Mask; bits < 64 && len(mask) == 16 &&
			mask[bits/8]&(0x80>>(bits%8)) != 0; bits++ {
		}
		if nodes, err := get[openflow.TunnelSrc6].AsAddress().Prefix(bits); err == nil {
			return pipeline.Peer{Nodes: nodes}, nil
		}
	case sender:
		return pipeline.Sender{
			Port: portOf(
				get[openflow.InPort].Uint(),
			), Address: either(get, openflow.IPv4Src, openflow.IPv6Src).AsAddress(),
			VNI: pipeline.VNI(written(f, regVNI).Uint()), Identity: uint16(written(f, regIdentity).Uint()),
		}, nil
	case dnat:
		return pipeline.DNAT{
			VNI: pipeline.VNI(get[regVNI].Uint()), Virtual: either(get, openflow.IPv4Dst, openflow.IPv6Dst).AsAddress(),
			RealVNI: pipeline.VNI(
				written(f, regVNI).Uint(),
			), Real: written(f, openflow.IPv4Dst, openflow.IPv6Dst).AsAddress(),
		}, nil
	case snat:
		return pipeline.SNAT{
			VNI: pipeline.VNI(get[regVNI].Uint()), Real: either(get, openflow.IPv4Src, openflow.IPv6Src).AsAddress(),
			Virtual: written(f, openflow.IPv4Src, openflow.IPv6Src).AsAddress(),
		}, nil
	case foreign:
		edge, err := get[openflow.TunnelSrc6].AsAddress().Prefix(address.NodeBits)
		if err == nil {
			return pipeline.Foreign{
				Edge: edge, Theirs: pipeline.VNI(get[openflow.TunnelID].Uint()),
				Source: prefixIn(get, openflow.IPv4Src, openflow.IPv6Src),
				VNI:    pipeline.VNI(written(f, regVNI).Uint()),
			}, nil
		}
	case northSouth:
		if to := destination(get); to.IsValid() {
			return pipeline.NorthSouth{VNI: pipeline.VNI(get[regVNI].Uint()), To: to}, nil
		}
	case forward:
		if to := destination(get); to.IsValid() {
			return pipeline.Forward{
				VNI: pipeline.VNI(
					get[regVNI].Uint(),
				), To: to, Port: portOf(written(f, regTo).Uint()), VTEP: written(f, openflow.TunnelDst6).AsAddress(),
				Outside: written(f, regOutside).Uint() == 1, MAC: pipeline.NewMAC(written(f, openflow.EthDst).Bytes),
			}, nil
		}
	}
	return nil, fmt.Errorf("a flow has our cookie but is not an entry: %v", f)
}

func values(f openflow.Flow) map[openflow.Field]openflow.Value {
	m := make(map[openflow.Field]openflow.Value, len(f.Match))
	for _, v := range f.Match {
		m[v.Field] = v
	}
	return m
}

func either(m map[openflow.Field]openflow.Value, a, b openflow.Field) openflow.Value {
	if v, ok := m[a]; ok {
		return v
	}
	return m[b]
}

// written returns the value that a flow writes to the first of fields that it sets.
func written(f openflow.Flow, fields ...openflow.Field) openflow.Value {
	for _, a := range f.Actions {
		if s, ok := a.(openflow.Set); ok {
			for _, field := range fields {
				if s.Field == field {
					return s.Value
				}
			}
		}
	}
	return openflow.Value{}
}

func destination(m map[openflow.Field]openflow.Value) netip.Prefix {
	return prefixIn(m, openflow.IPv4Dst, openflow.IPv6Dst)
}

func prefixIn(m map[openflow.Field]openflow.Value, field4, field6 openflow.Field) netip.Prefix {
	if v := either(m, field4, field6); v.Bytes != nil {
		return v.AsPrefix()
	}
	if m[openflow.EthType].Uint() == ip4.etherType {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}
