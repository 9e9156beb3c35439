package bpfobj

import (
	"encoding/binary"
	"net/netip"
)

// ToAddr returns an address as the programs hold it: two halves in network byte order.
func ToAddr(a netip.Addr) PilasterAddr {
	b := a.As16()
	return PilasterAddr{Hi: binary.NativeEndian.Uint64(b[:8]), Lo: binary.NativeEndian.Uint64(b[8:])}
}

func (a PilasterAddr) Addr() netip.Addr {
	var b [16]byte
	binary.NativeEndian.PutUint64(b[:8], a.Hi)
	binary.NativeEndian.PutUint64(b[8:], a.Lo)
	return netip.AddrFrom16(b)
}

// ChecksumDiff returns the change of a checksum if one address replaces the other, as bpf_csum_diff computes it (RFC
// 1624).
func ChecksumDiff(from, to netip.Addr) uint32 {
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

func BoolToUint32(is bool) uint32 {
	if is {
		return 1
	}
	return 0
}
