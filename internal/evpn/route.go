package evpn

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// MAC is an Ethernet address.
type MAC [6]byte

func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// MarshalText writes the usual form, such as 02:00:00:00:01:11.
func (m MAC) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// IsUnicast reports whether a frame may have this source address.
func (m MAC) IsUnicast() bool { return m != MAC{} && m[0]&1 == 0 }

// UnmarshalText reads what MarshalText writes.
func (m *MAC) UnmarshalText(text []byte) (err error) {
	*m, err = ParseMAC(string(text))
	return err
}

// ParseMAC reads an Ethernet address of 48 bits.
func ParseMAC(text string) (m MAC, err error) {
	hw, err := net.ParseMAC(text)
	if err != nil || len(hw) != len(m) {
		return m, fmt.Errorf("%.40q is not an Ethernet address such as 02:00:00:00:01:11", text)
	}
	return MAC(hw), nil
}

// RD is a route distinguisher (RFC 4364 §4.2), as on the wire.
type RD [8]byte

// Types of route distinguishers.
const (
	rdASN2 = 0
	rdIPv4 = 1
	rdASN4 = 2
)

// NewRD returns the distinguisher VTEP:number. VTEP is an IPv4 address.
func NewRD(vtep netip.Addr, number uint16) (rd RD) {
	rd[1] = rdIPv4
	a := vtep.As4()
	copy(rd[2:6], a[:])
	binary.BigEndian.PutUint16(rd[6:], number)
	return rd
}

func (rd RD) String() string {
	switch binary.BigEndian.Uint16(rd[:2]) {
	case rdASN2:
		return fmt.Sprintf("%d:%d", binary.BigEndian.Uint16(rd[2:4]), binary.BigEndian.Uint32(rd[4:]))
	case rdIPv4:
		return fmt.Sprintf("%v:%d", netip.AddrFrom4([4]byte(rd[2:6])), binary.BigEndian.Uint16(rd[6:]))
	case rdASN4:
		return fmt.Sprintf("%d:%d", binary.BigEndian.Uint32(rd[2:6]), binary.BigEndian.Uint16(rd[6:]))
	}
	return fmt.Sprintf("%x", rd[:])
}

// Target is a route target (RFC 4360 §4), as on the wire.
type Target [8]byte

const subtypeRouteTarget = 2

// NewTarget returns the target ASN:VNI. Of an ASN of four bytes it has the lower two, as FRR's does: otherwise the VNI
// would not fit.
func NewTarget(asn, vni uint32) (t Target) {
	t[1] = subtypeRouteTarget
	binary.BigEndian.PutUint16(t[2:4], uint16(asn))
	binary.BigEndian.PutUint32(t[4:], vni)
	return t
}

// autoVXLAN is the part of a target's number that says "derived from a VXLAN VNI" (RFC 8365 §5.1.2.1).
const autoVXLAN = 1 << 28

// newAutoTarget returns the target that speakers derive by RFC 8365.
func newAutoTarget(asn, vni uint32) Target { return NewTarget(asn, autoVXLAN|vni) }

func (t Target) String() string { return "rt " + RD(append([]byte{0, t[0]}, t[2:]...)).String() }

// Kind is the type of an EVPN route.
type Kind uint8

// The types of routes that Pilaster announces and imports.
const (
	KindMACIP     Kind = 2 // MAC/IP advertisement (RFC 7432 §7.2)
	KindMulticast Kind = 3 // inclusive multicast Ethernet tag (RFC 7432 §7.3)
	KindPrefix    Kind = 5 // IP prefix (RFC 9136)
)

func (k Kind) String() string {
	switch k {
	case KindMACIP:
		return "mac-ip"
	case KindMulticast:
		return "multicast"
	case KindPrefix:
		return "prefix"
	}
	return fmt.Sprintf("type-%d", uint8(k))
}

// MarshalText writes the name.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (k *Kind) UnmarshalText(text []byte) error {
	for n := range 256 {
		if is := Kind(n); is.String() == string(text) {
			*k = is
			return nil
		}
	}
	return fmt.Errorf("%.40q is no type of EVPN routes", text)
}

// Key has the fields by which BGP distinguishes routes (RFC 7432 §7).
type Key struct {
	Kind Kind
	RD   RD
	Tag  uint32
	MAC  MAC // of KindMACIP
	// The container's address in KindMACIP, or zero; the originating router in KindMulticast; the prefix in KindPrefix.
	Prefix netip.Prefix
}

// OtherKey returns the key of a route of another type, or of a malformed one. It has a digest of what names the route
// in place of the fields.
func OtherKey(kind Kind, name string) Key {
	sum := sha256.Sum256([]byte(name))
	return Key{Kind: kind, Prefix: netip.PrefixFrom(netip.AddrFrom16([16]byte(sum[:16])), 128)}
}

func (k Key) compare(other Key) int {
	return cmp.Or(
		cmp.Compare(k.Kind, other.Kind),
		bytes.Compare(k.RD[:], other.RD[:]),
		cmp.Compare(k.Tag, other.Tag),
		bytes.Compare(k.MAC[:], other.MAC[:]),
		comparePrefixes(k.Prefix, other.Prefix),
	)
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// Encapsulation is a tunnel type (RFC 8365 §11); 0 means that the route names none.
type Encapsulation uint16

// VXLAN is the only encapsulation that Pilaster uses.
const VXLAN Encapsulation = 8

// Route is an EVPN route with the attributes that Pilaster uses.
type Route struct {
	Key
	VNI       uint32     // label 1; in KindMulticast the label of the tunnel attribute
	L3VNI     uint32     // label 2 of KindMACIP; 0 without symmetric IRB (RFC 9135)
	VTEP      netip.Addr // next hop
	Targets   []Target
	Encap     Encapsulation
	RouterMAC MAC    // zero without one (RFC 9135 §8.1)
	Sequence  uint32 // of MAC mobility (RFC 7432 §15)
	Sticky    bool
	// Of KindMulticast: the tunnel's end, if the tunnel type is ingress replication; otherwise invalid.
	Replication netip.Addr
	Fault       Reason // why the route cannot be used whatever the rules are; Accepted if it may be
}

// MarkLoop records that a route came from this AS, unless it has a fault of its form.
func (r *Route) MarkLoop() {
	if r.Fault == Accepted {
		r.Fault = Loop
	}
}

// Equal compares everything.
func (r Route) Equal(other Route) bool {
	return slices.Equal(r.Targets, other.Targets) && r.Key == other.Key && r.VNI == other.VNI &&
		r.L3VNI == other.L3VNI && r.VTEP == other.VTEP &&
		r.Encap == other.Encap && r.RouterMAC == other.RouterMAC && r.Sequence == other.Sequence &&
		r.Sticky == other.Sticky && r.Replication == other.Replication && r.Fault == other.Fault
}
