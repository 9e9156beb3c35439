package oncache

import (
	"bytes"
	"encoding/binary"
	"testing"

	"pilaster.io/pilaster/internal/packet"
)

// cacheable says what the cache may do with the inner packet of a frame of fill's connection: the rules of
// bpf/oncache/inner.h in other words.
func (w world) cacheable(frame []byte, out bool) bool {
	ip := frame[14:]
	var src, dst, l4 []byte
	var hops, protocol byte
	switch kind := binary.BigEndian.Uint16(frame[12:]); {
	case kind == 0x0800 && len(ip) >= 40 && ip[0] == 0x45:
		if int(binary.BigEndian.Uint16(ip[2:])) != len(ip) || binary.BigEndian.Uint16(ip[6:])&0x3fff != 0 ||
			headerSum(ip[:20]) != 0 {
			return false
		}
		src, dst, l4, hops, protocol = ip[12:16], ip[16:20], ip[20:], ip[8], ip[9]
	case kind == 0x86dd && len(ip) >= 60 && ip[0]>>4 == 6:
		if 40+int(binary.BigEndian.Uint16(ip[4:])) != len(ip) {
			return false
		}
		src, dst, l4, hops, protocol = ip[8:24], ip[24:40], ip[40:], ip[7], ip[6]
	default:
		return false
	}
	here, there, _, _ := w.ends()
	mac, source, from, to, sport, dport := vtep, frame[6:12], here, there, uint16(4000), uint16(80)
	switch {
	case out && w.bridged:
		mac, source = eth0Far, eth0
	case out:
		mac, source = gateway, eth0
	case w.bridged:
		mac = eth0
	}
	if !out {
		from, to, sport, dport = there, here, 80, 4000
	}
	return bytes.Equal(frame[:6], mac) && bytes.Equal(frame[6:12], source) && bytes.Equal(src, from.AsSlice()) &&
		bytes.Equal(dst, to.AsSlice()) && protocol == packet.ProtocolTCP && hops >= 2 && len(ip) <= 1430 &&
		binary.BigEndian.Uint16(l4) == sport && binary.BigEndian.Uint16(l4[2:]) == dport &&
		packet.TCPFlags(l4[13])&(packet.SYN|packet.FIN|packet.RST|packet.ACK) == packet.ACK
}

// forwarded is the frame behind a router that has these MACs, or behind a bridge.
func (w world) forwarded(frame []byte, macs ...byte) []byte {
	f := bytes.Clone(frame)
	if w.bridged {
		return f
	}
	copy(f, macs)
	if f[12] == 8 {
		f[14+8]--
		return sumInner(f, 14)
	}
	f[14+7]--
	return f
}

// FuzzCache: the cache delivers exactly the packets of its connection that need no decision, as the overlay does, and
// leaves all others unchanged.
func FuzzCache(f *testing.F) {
	var benches []*bench
	for i, w := range worlds {
		benches = append(benches, newBench(f, w))
		f.Add(byte(i), true, w.sent(said))
		f.Add(byte(i), false, w.coming(answered)[w.at("inner")-14:])
	}
	f.Fuzz(func(t *testing.T, i byte, out bool, frame []byte) {
		b := benches[int(i)%len(benches)]
		if len(frame) < 14+40 || len(frame) > 1500 {
			return
		}
		if v, _ := b.verdict(t); !b.current(t, v) {
			b.fill(t)
		}
		s, want := step{program: "out", frame: frame, mark: others}, []byte(nil)
		_, _, node, peer := b.ends()
		class := frame[15]
		if frame[12] == 0x86 {
			class = frame[14]<<4 | frame[15]>>4
		}
		if out {
			want = b.forget(b.tunnelled(node, peer, far, own, class, b.forwarded(frame, append(vtepFar, vtep...)...)))
		} else {
			s.program, s.frame = "in", b.tunnelled(peer, node, own, far, class, frame)
			want = b.forwarded(frame, append(eth0, gateway...)...)
		}
		verdict, got, mark := b.run(t, s)
		cacheable := b.cacheable(frame, out)
		if verdict == redirect && out {
			got = b.forget(got)
		}
		switch {
		case cacheable != (verdict == redirect):
			t.Errorf("%v, out %v: verdict %d, want a delivery: %v", b.world, out, int32(verdict), cacheable)
		case cacheable && !bytes.Equal(got, want):
			t.Errorf("%v, out %v: got\n% x\nwant\n% x", b.world, out, got, want)
		case !cacheable && (verdict != next || !bytes.Equal(got, s.frame) || mark&^DefaultMarkMask != others):
			t.Errorf("%v, out %v: verdict %d, mark %#x", b.world, out, int32(verdict), mark)
		}
	})
}

// current tells whether both directions of fill's connection stay valid for a while.
func (b *bench) current(t *testing.T, v verdict) bool {
	t.Helper()
	now, err := monotonic()
	must(t, err)
	soon := now + uint64(b.config.TTL/2)
	return v.Generation == b.filter && v.Out > soon && v.In > soon
}
