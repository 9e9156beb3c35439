package datapath

import (
	"encoding/binary"
	"net"
	"net/netip"
)

// toAddr is an address as the programs hold it: two halves in network byte order.
func toAddr(a netip.Addr) pilasterAddr {
	b := a.As16()
	return pilasterAddr{Hi: binary.NativeEndian.Uint64(b[:8]), Lo: binary.NativeEndian.Uint64(b[8:])}
}

func (a pilasterAddr) netip() netip.Addr {
	var b [16]byte
	binary.NativeEndian.PutUint64(b[:8], a.Hi)
	binary.NativeEndian.PutUint64(b[8:], a.Lo)
	return netip.AddrFrom16(b)
}

// checksumDiff is what a checksum over from must change by to become one over to, as
// bpf_csum_diff computes it (RFC 1624).
func checksumDiff(from, to netip.Addr) uint32 {
	var sum uint64
	f, t := from.As16(), to.As16()
	for i := 0; i < 16; i += 4 {
		sum += uint64(^binary.NativeEndian.Uint32(f[i:])) + uint64(binary.NativeEndian.Uint32(t[i:]))
	}
	for sum>>32 != 0 {
		sum = sum&0xffffffff + sum>>32
	}
	return uint32(sum)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func hostNet(a netip.Addr) *net.IPNet { return ipNet(netip.PrefixFrom(a, a.BitLen())) }

// prefixOf undoes ipNet; it is the zero Prefix for nil, which a default route has.
func prefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	a, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a, ones)
}
