package openflow

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// Classes of fields.
const (
	classNXM0  uint16 = 0x0000
	classNXM1  uint16 = 0x0001
	classBasic uint16 = 0x8000
)

// Field is a header field, or a register, that flows match and set.
type Field struct {
	class  uint16
	number uint8
	size   uint8 // bytes
}

// The fields in use.
var (
	InPort     = Field{classBasic, 0, 4}
	EthDst     = Field{classBasic, 3, 6}
	EthSrc     = Field{classBasic, 4, 6}
	EthType    = Field{classBasic, 5, 2}
	IPProto    = Field{classBasic, 10, 1}
	IPv4Src    = Field{classBasic, 11, 4}
	IPv4Dst    = Field{classBasic, 12, 4}
	UDPSrc     = Field{classBasic, 15, 2}
	ICMPv4Type = Field{classBasic, 19, 1}
	UDPDst     = Field{classBasic, 16, 2}
	IPv6Src    = Field{classBasic, 26, 16}
	IPv6Dst    = Field{classBasic, 27, 16}
	ICMPv6Type = Field{classBasic, 29, 1}
	TunnelID   = Field{classBasic, 38, 8}
	Fragment   = Field{classNXM1, 26, 1}
	TTL        = Field{classNXM1, 29, 1}
	TunnelSrc6 = Field{classNXM1, 109, 16}
	TunnelDst6 = Field{classNXM1, 110, 16}
	TunnelGBP  = Field{classNXM1, 38, 2}
	PacketMark = Field{classNXM1, 33, 4}
	// inPort16 is the form of InPort that actions write. After an action has written 0, Open vSwitch may send the
	// packet to its ingress port.
	inPort16 = Field{classNXM0, 0, 2}
)

var fieldNames = map[Field]string{
	InPort: "in_port", EthDst: "eth_dst", EthSrc: "eth_src", EthType: "eth_type", IPProto: "ip_proto",
	IPv4Src: "ip_src", IPv4Dst: "ip_dst",
	UDPSrc: "udp_src", UDPDst: "udp_dst", IPv6Src: "ipv6_src", IPv6Dst: "ipv6_dst", ICMPv4Type: "icmpv4_type",
	ICMPv6Type: "icmpv6_type", TunnelID: "tun_id", TTL: "nw_ttl", Fragment: "ip_frag",
	TunnelSrc6: "tun_ipv6_src", TunnelDst6: "tun_ipv6_dst", TunnelGBP: "tun_gbp_id", PacketMark: "pkt_mark",
	inPort16: "in_port",
}

// LaterFragment is the value of Fragment for fragments without a transport header.
const LaterFragment = 3

// Register is one of Open vSwitch's 32-bit registers, 0 to 15. They are zero when a packet enters the switch.
func Register(n uint8) Field { return Field{classNXM1, n, 4} }

func (f Field) String() string {
	if name, ok := fieldNames[f]; ok {
		return name
	}
	if f.class == classNXM1 && f.number < 16 {
		return fmt.Sprintf("reg%d", f.number)
	}
	return fmt.Sprintf("field %#x/%d", f.class, f.number)
}

// Value is a value for a field. In a match, only the bits of the mask count; a nil mask means all bits.
type Value struct {
	Field       Field
	Bytes, Mask []byte
}

// Number returns the field with a number as its value.
func (f Field) Number(n uint64) Value {
	b := binary.BigEndian.AppendUint64(nil, n)
	if f.size > 8 {
		b = append(make([]byte, f.size-8), b...)
	}
	return Value{Field: f, Bytes: b[len(b)-int(f.size):]}
}

// Address returns the field with an address of its family as its value.
func (f Field) Address(a netip.Addr) Value { return Value{Field: f, Bytes: a.AsSlice()} }

// MAC returns the field with a MAC as its value.
func (f Field) MAC(a net.HardwareAddr) Value { return Value{Field: f, Bytes: a} }

// Masked returns the value with a mask.
func (v Value) Masked(mask []byte) Value {
	v.Mask, v.Bytes = mask, slices.Clone(v.Bytes)
	for i := range v.Bytes {
		v.Bytes[i] &= mask[i]
	}
	return v
}

// Prefix matches addresses in a prefix. Its length must not be 0: omit the field then.
func (f Field) Prefix(p netip.Prefix) Value {
	v := f.Address(p.Masked().Addr())
	if p.IsSingleIP() {
		return v
	}
	v.Mask = make([]byte, f.size)
	for bit := range p.Bits() {
		v.Mask[bit/8] |= 0x80 >> (bit % 8)
	}
	return v
}

// Uint returns the value's last 64 bits.
func (v Value) Uint() (n uint64) {
	for _, b := range v.Bytes {
		n = n<<8 | uint64(b)
	}
	return n
}

// AsAddress returns the value as an address. The result is invalid if the field has no address.
func (v Value) AsAddress() netip.Addr {
	a, _ := netip.AddrFromSlice(v.Bytes)
	return a
}

// AsPrefix returns the value as a prefix. The result is invalid if the field has no address, or if the mask is not the
// mask of a prefix.
func (v Value) AsPrefix() netip.Prefix {
	a := v.AsAddress()
	if v.Mask == nil {
		return netip.PrefixFrom(a, a.BitLen())
	}
	bits := 0
	for bits < len(v.Mask)*8 && v.Mask[bits/8]&(0x80>>(bits%8)) != 0 {
		bits++
	}
	p := netip.PrefixFrom(a, bits)
	if !p.IsValid() || !slices.Equal(v.Field.Prefix(p).Mask, v.Mask) {
		return netip.Prefix{}
	}
	return p
}

func (v Value) String() string {
	show := func(b []byte) string {
		switch len(b) {
		case 4, 16:
			if a, ok := netip.AddrFromSlice(b); ok && (v.Field.class == classBasic || v.Field.size == 16) &&
				v.Field != InPort {
				return a.String()
			}
		case 6:
			return net.HardwareAddr(b).String()
		}
		return fmt.Sprintf("%#x", Value{Bytes: b}.Uint())
	}
	if v.Mask != nil {
		return fmt.Sprintf("%v=%s/%s", v.Field, show(v.Bytes), show(v.Mask))
	}
	return fmt.Sprintf("%v=%s", v.Field, show(v.Bytes))
}

// header returns the field's OXM header.
func (f Field) header(masked bool) uint32 {
	h := uint32(f.class)<<16 | uint32(f.number)<<9 | uint32(f.size)
	if masked {
		h = h&^0xff | 1<<8 | 2*uint32(f.size)
	}
	return h
}

func (v Value) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, v.Field.header(v.Mask != nil))
	b = append(b, v.Bytes...)
	return append(b, v.Mask...)
}

// readValue reads one value and returns the rest.
func readValue(b []byte) (v Value, rest []byte, err error) {
	if len(b) < 4 {
		return v, nil, cut("field", b)
	}
	h := binary.BigEndian.Uint32(b)
	size, masked := int(h&0xff), h&0x100 != 0
	if b = b[4:]; len(b) < size || masked && size%2 != 0 {
		return v, nil, cut("field", b)
	}
	v = Value{Field: Field{uint16(h >> 16), uint8(h >> 9 & 0x7f), uint8(size)}, Bytes: b[:size:size]}
	if masked {
		v.Field.size /= 2
		v.Bytes, v.Mask = b[:size/2:size/2], b[size/2:size:size]
	}
	return v, b[size:], nil
}
