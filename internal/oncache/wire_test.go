package oncache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// onWire is a packet of a stream on the wire.
type onWire struct {
	outer   []byte // headers up to VXLAN, without what may differ between packets
	id      uint16 // of the outer IPv4 header
	payload int    // bytes of TCP data
}

// cut reads a frame of the overlay with a TCP segment over IPv4; ok is false for other frames. It fails if a header or
// a checksum is wrong.
func cut(t *testing.T, w world, frame []byte) (s onWire, ok bool) {
	t.Helper()
	at := w.at("inner")
	if len(frame) < at+40 || binary.BigEndian.Uint16(frame[w.at("target"):]) != overlayPort ||
		binary.BigEndian.Uint16(frame[at-2:]) != 0x0800 || frame[at+9] != packet.ProtocolTCP {
		return s, false
	}
	if len(frame) > 14+1500 {
		t.Fatalf("a frame of %d bytes", len(frame))
	}
	inner := frame[at:]
	source, destination := netip.AddrFrom4([4]byte(inner[12:])), netip.AddrFrom4([4]byte(inner[16:]))
	if int(binary.BigEndian.Uint16(inner[2:])) != len(inner) || headerSum(inner[:20]) != 0 ||
		packet.Checksum(source, destination, packet.ProtocolTCP, inner[20:]) != 0 {
		t.Fatalf("wrong length or checksum of the inner packet: % x", inner[:40])
	}
	outer := bytes.Clone(frame[:at-14])
	if w.outer4 {
		s.id = binary.BigEndian.Uint16(outer[w.at("id"):])
		if headerSum(outer[14:34]) != 0 || int(binary.BigEndian.Uint16(outer[16:])) != len(frame)-14 {
			t.Fatalf("outer header: % x", outer)
		}
		copy(outer[16:], []byte{0, 0})
	} else {
		copy(outer[18:], []byte{0, 0})
	}
	if int(binary.BigEndian.Uint16(outer[w.at("length"):])) != len(frame)-w.at("port") {
		t.Fatalf("outer length: % x", outer)
	}
	copy(outer[w.at("length"):], []byte{0, 0})
	s.outer, s.payload = w.forget(outer), len(inner)-20-int(inner[20+12]>>4)*4
	return s, true
}

// stream echoes data and returns its segments on the way to the server.
func stream(t *testing.T, w world, tap *packet.Capture, c net.Conn, data []byte) (all []onWire) {
	t.Helper()
	echo(t, c, data)
	left := len(data)
	_, err := tap.Until(t.Context(), func(c packet.Captured) bool {
		if s, ok := cut(t, w, c.Frame); ok {
			all = append(all, s)
			left -= s.payload
		}
		return left <= 0
	})
	must(t, err)
	return all
}

// Segments of a stream have the overlay's outer headers, and IPv4 ids of their own.
func TestSegmentsOnTheWire(t *testing.T) {
	for _, w := range []world{{inner4: true}, {inner4: true, outer4: true}} {
		l := newLab(t, w.outer4)
		must(t, l.a.ns.Do(func() error {
			var errs []error
			for _, off := range []uint32{unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO, unix.ETHTOOL_STXCSUM} {
				_, err := netns.Ethtool("eth0", off, 0)
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		}))
		l.b.serve(t)
		c := l.a.dial(t, 4000, "10.1.2.1:7000")
		tap, err := packet.NewCapture(l.b.ns, "eth0", packet.IncomingOnly)
		must(t, err)
		defer tap.Close()
		for _, n := range []*node{l.a, l.b} {
			must(t, n.objects.OnceLease.Set(uint64(0)))
		}
		want := stream(t, w, tap, c, make([]byte, 100_000))
		if out, _ := l.a.hits(t); out != 0 {
			t.Fatalf("%d hits without a lease", out)
		}
		must(t, errors.Join(l.a.Renew(), l.b.Renew()))
		l.renewed(t)
		echo(t, c, make([]byte, 10))
		echo(t, c, make([]byte, 10))
		stream(t, w, tap, c, make([]byte, 1000)) // what the capture has from before
		before, _ := l.a.hits(t)
		got := stream(t, w, tap, c, make([]byte, 1_000_000))
		if out, _ := l.a.hits(t); out-before < 10 || len(got) < 100 {
			t.Errorf("%v: %d hits, %d segments", w, out-before, len(got))
		}
		var ids []uint16
		for _, s := range got {
			if !bytes.Equal(s.outer, want[0].outer) {
				t.Fatalf("%v: got outer headers\n% x\nwant\n% x", w, s.outer, want[0].outer)
			}
			ids = append(ids, s.id)
		}
		slices.Sort(ids)
		if distinct := len(slices.Compact(ids)); w.outer4 && distinct != len(got) {
			t.Errorf("%d segments have %d ids", len(got), distinct)
		}
	}
}
