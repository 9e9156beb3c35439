package address

import (
	"encoding/binary"
	"net"
	"net/netip"
)

// The first two bytes of the MACs of containers in an Ethernet segment: locally administered, and the family of the
// address that follows.
var (
	segmentMAC4 = [2]byte{0x02, 0x50}
	segmentMAC6 = [2]byte{0x02, 0x51}
)

// SegmentMAC returns the MAC that a container has in its tenant's Ethernet segment (network evpn): the IPv4 address, or
// the last 32 bits of the IPv6 address, which the orchestrator allocates by number. No other container of the tenant
// has it, on whatever node it is.
func SegmentMAC(a netip.Addr) net.HardwareAddr {
	first, last := segmentMAC6, a.AsSlice()
	if a.Is4() {
		first = segmentMAC4
	}
	return append(first[:], last[len(last)-4:]...)
}

// VTEP4 returns the IPv4 tunnel address of the node with a number; false if the pool has none for it. The first and the
// last address of a pool are not used.
func VTEP4(pool netip.Prefix, number uint64) (netip.Addr, bool) {
	if !pool.IsValid() || !pool.Addr().Is4() || number == 0 || number >= 1<<(32-pool.Bits())-1 {
		return netip.Addr{}, false
	}
	a := pool.Masked().Addr().As4()
	binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])+uint32(number))
	return netip.AddrFrom4(a), true
}

// VTEP4Node is the inverse of VTEP4; false if an address is not one of the pool's.
func VTEP4Node(pool netip.Prefix, vtep netip.Addr) (number uint64, ok bool) {
	if !pool.IsValid() || !vtep.Is4() || !pool.Contains(vtep) {
		return 0, false
	}
	first, a := pool.Masked().Addr().As4(), vtep.As4()
	number = uint64(binary.BigEndian.Uint32(a[:]) - binary.BigEndian.Uint32(first[:]))
	_, ok = VTEP4(pool, number)
	return number, ok
}
