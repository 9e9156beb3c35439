package tunnel

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// judge says what parse must make of a frame, written from the RFCs and drafts and not from the program.
func judge(frame []byte, s settings) result {
	be := binary.BigEndian
	var udp []byte
	var outerECN byte
	switch ip := frame[14:]; be.Uint16(frame[12:]) {
	case 0x0800:
		if len(ip) < 36 {
			return other
		}
		switch header := int(ip[0]&15) * 4; {
		case ip[0]>>4 != 4 || header < 20:
			return malformed
		case ip[9] != 17:
			return other
		case header > 20 || be.Uint16(ip[6:])&0x3fff != 0:
			return options
		case be.Uint16(ip[22:]) != s.port():
			return other
		}
		good := append([]byte{}, ip[:20]...)
		if resum4(good); be.Uint16(good[10:])%0xffff != be.Uint16(ip[10:])%0xffff || int(be.Uint16(ip[2:])) != len(ip) {
			return malformed
		}
		udp, outerECN = ip[20:], ip[1]&3
	case 0x86dd:
		if len(ip) < 56 {
			return other
		}
		switch {
		case ip[0]>>4 != 6:
			return malformed
		case ip[6] == 0 || ip[6] == 43 || ip[6] == 44 || ip[6] == 51 || ip[6] == 60:
			return options
		case ip[6] != 17 || be.Uint16(ip[42:]) != s.port():
			return other
		case int(be.Uint16(ip[4:])) != len(ip)-40:
			return malformed
		}
		udp, outerECN = ip[40:], ip[1]>>4&3
	default:
		return other
	}
	if int(be.Uint16(udp[4:])) != len(udp) {
		return malformed
	}
	vxlan, inside := udp[8:16], udp[16:]
	next := byte(nextEthernet)
	allowed := [4]byte{0x08}
	switch {
	case s.flags&hasGPE != 0 && vxlan[0]&4 != 0:
		next, allowed = vxlan[3], [4]byte{0x0c, 0, 0, 0xff}
		if next < 1 || next > 4 || next == 4 && s.flags&hasNSH == 0 {
			return badFlags
		}
	case s.flags&hasGroup != 0 && vxlan[0]&0x80 != 0:
		allowed = [4]byte{0x88, 0x48, 0xff, 0xff}
	}
	for i := range 4 {
		if vxlan[i]&^allowed[i] != 0 {
			return badFlags
		}
	}
	if vxlan[0]&8 == 0 || vxlan[7] != 0 {
		return badFlags
	}
	if s.ends[0].Is6() {
		for _, at := range []int{22, 38} {
			if netip.AddrFrom16([16]byte(frame[at : at+16])).Is4In6() {
				return malformed
			}
		}
	}
	if next == 4 {
		if len(inside) < 8 {
			return badNSH
		}
		length, kind, ttl := int(inside[1]&63)*4, inside[2]&15, be.Uint16(inside)>>6&63
		next = inside[3]
		if inside[0]&0xe0 != 0 || ttl == 0 || length > len(inside) || length < 8 || kind != 1 && kind != 2 ||
			kind == 1 && length != 24 || next < 1 || next > 3 {
			return badNSH
		}
		inside = inside[length:]
	}
	version := map[byte]int{nextIP4: 4, nextIP6: 6}[next]
	if next == nextEthernet {
		if len(inside) < 14 {
			return malformed
		}
		version = map[uint16]int{0x0800: 4, 0x86dd: 6}[be.Uint16(inside[12:])]
		inside = inside[14:]
	}
	switch {
	case version == 0:
		return leftToKernel
	case version == 4 && len(inside) < 20 || version == 6 && len(inside) < 40 || int(inside[0]>>4) != version:
		return malformed
	}
	innerECN := inside[1] & 3
	if version == 6 {
		innerECN = inside[1] >> 4 & 3
	}
	if outerECN == 3 && innerECN == 0 {
		return congested
	}
	return ok
}

// telling are bytes that mean something in one of the headers.
var telling = []byte{0, 1, 2, 3, 4, 5, 6, 8, 0x0c, 17, 44, 0x45, 0x46, 0x60, 0x88, 0xff}

// TestRandomPackets: damaged at random, packets have the results that judge says.
func TestRandomPackets(t *testing.T) {
	n := newNode(t)
	random := rand.New(rand.NewPCG(1, 2))
	seen := map[result]int{}
	inner := [][]byte{innerFrame(inner4, 0, segment), innerFrame(inner6, 2, segment)}
	for _, l := range layouts {
		for _, ends := range [][2]netip.Addr{v4, v6} {
			s := l.settings
			s.ends = ends
			n.set(t, s)
			for range 4000 {
				frame := s.wrapped(inner[random.IntN(2)], uint8(random.IntN(4)), 50_000)
				end := min(len(frame), s.udpAt()+16+len(s.context)+8+16)
				for range random.IntN(3) {
					if at := 12 + random.IntN(end-12); random.IntN(2) == 0 {
						frame[at] ^= 1 << random.IntN(8)
					} else {
						frame[at] = telling[random.IntN(len(telling))]
					}
				}
				if random.IntN(8) == 0 {
					frame = cut(frame[:s.udpAt()+random.IntN(len(frame)-s.udpAt()+1)], s)
				}
				if random.IntN(2) == 0 && ends[0].Is4() {
					resum4(frame[14:])
				}
				n.forget(t)
				n.run(t, n.TunPull, frame)
				want, r := judge(frame, s), n.results(t)
				if r.Pull[want] != 1 {
					t.Fatalf("%s, %v: results %v, want number %d\n% x", l.name, ends, r.Pull, want, frame)
				}
				seen[want]++
			}
		}
	}
	t.Logf("packets by result: %v", seen)
	for r := ok; r <= leftToKernel; r++ {
		if seen[r] < 20 {
			t.Errorf("only %d packets have result %d", seen[r], r)
		}
	}
}
