package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/packet"
)

// A raw socket can send packets that BPF_PROG_TEST_RUN cannot make: with a VLAN tag beside the frame, with a checksum
// that is left to a device (CHECKSUM_PARTIAL), or as segments. So here the model of the fuzz targets checks such frames
// on the wire and in other containers of the node.

const (
	randomFrames = 2000
	goodFrames   = 12 // the first of fromContainer; half of the random ones are made of them
)

// place is where frames of b1 may come out.
type place struct {
	capture *packet.Capture
	address netip.Addr // as b1 sees it
	local   bool
}

func TestAnyFrameOfAContainer(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	b := newModelBench(t)
	clear, other := b.containers[3], b.containers[4]
	places := []place{
		{capture(t, b.far.ns), sees(b.b3.Addr()), false},
		{capture(t, b.b2.ns), b.b2.seen(), true},
		{capture(t, other.ns), other.seen(), true},
	}
	strangers := map[*testContainer]*packet.Capture{b.r1: capture(t, b.r1.ns), clear: capture(t, clear.ns)}
	keepOrder(t)

	socket, base, came := newOffloadSocket(t, b.b1), frames(b.fromContainer()), map[string]int{}
	for range randomFrames {
		frame, o, kind := b.randomFrame(r, base)
		sent := frame
		if kind == "tagged" {
			sent = tag(frame)
		}
		if err := socket.sendOffloaded(sent, o); errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE) {
			came[kind+", refused by the kernel"]++
			continue
		} else if !errors.Is(err, unix.ENOBUFS) {
			must(t, err)
		}
		for _, p := range places {
			for _, out := range b.outputs(t, p, socket) {
				if kind == "tagged" {
					t.Fatalf("out came a frame that was tagged:\n%x", out)
				}
				local, err := b.offloaded(frame, out, o)
				if err != nil || local != p.local {
					t.Fatalf("%v; to a container here: %v\n%+v\n%x\nbecame\n%x", err, p.local, o, frame, out)
				}
				came[kind]++
			}
		}
	}
	for c, capture := range strangers {
		if seen := drain(t, capture, c); len(seen) > 1 {
			t.Errorf("a container of another tenant got %d frames, the first\n%x", len(seen)-1, seen[0].Frame)
		}
	}
	t.Log(came)
	for _, kind := range []string{"as it is", "left to a device", "TCP segments", "UDP segments"} {
		if came[kind] == 0 {
			t.Errorf(
				"none came through that were %s: of those nothing was shown (%v)",
				kind,
				slices.Sorted(maps.Keys(came)),
			)
		}
	}
}

// keepOrder keeps the test's thread, which ends with the test, on one CPU: its frames stay in order.
func keepOrder(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	var cpu unix.CPUSet
	cpu.Set(0)
	must(t, unix.SchedSetaffinity(0, &cpu))
}

// randomFrame returns a frame like those of the cases, mostly with other addresses, and often with work left to a
// device.
func (b *fuzzBench) randomFrame(r *rand.Rand, base [][]byte) (frame []byte, o offload, kind string) {
	frame = bytes.Clone(base[r.IntN(len(base))])
	if r.IntN(2) == 0 {
		frame = bytes.Clone(base[r.IntN(goodFrames)])
	}
	if r.IntN(3) == 0 && len(frame) > ipv6At {
		frame[12+r.IntN(len(frame)-12)] ^= 1 << r.IntN(8)
	}
	var source, destination byte
	if r.IntN(8) == 0 {
		source = byte(1 + r.IntN(len(b.addresses)))
	}
	if r.IntN(2) == 0 {
		destination = byte(1 + r.IntN(len(b.addresses)))
	}
	switch choice := r.IntN(10); choice {
	case 0:
		kind = "tagged"
	case 1, 2, 3:
		kind, o = "left to a device", offload{sum: true}
	case 4:
		kind, o = "left to a device somewhere", offload{sum: true, start: r.IntN(len(frame)), offset: r.IntN(20)}
	case 5, 6:
		kind, o = "TCP segments", offload{sum: true, kind: gsoTCP, size: 100 + r.IntN(1300)}
		frame = b.frame(b.sent(sees(b.b3.Addr()), packet.TCP{SourcePort: 1000, Payload: make([]byte, 1+r.IntN(5000))}))
	case 7:
		kind, o = "UDP segments", offload{sum: true, kind: gsoUDP, size: 100 + r.IntN(1300)}
		frame = b.frame(b.sent(sees(b.b3.Addr()), packet.UDP{SourcePort: 1000, Payload: make([]byte, 1+r.IntN(5000))}))
	default:
		kind = "as it is"
	}
	frame = b.shape(frame, source, destination, fitLength|fitChecksum)
	a, whole := dissect(frame, false)
	if at := checksumAt(a.protocol); o.sum && o.start == 0 && whole && !a.later && at >= 0 {
		o.start, o.offset = ipv6At+a.upper, at
	}
	return frame, o, kind
}

// outputs returns the frames that came to a place, except the node's own, until a packet of b1 arrives that is sent
// last and always passes.
func (b *fuzzBench) outputs(t *testing.T, p place, socket offloadSocket) (all [][]byte) {
	t.Helper()
	seen := sentinelAfter(t, p.capture, func(s packet.Sentinel) {
		must(t, socket.sendOffloaded(b.frame(b.sent(p.address, packet.Raw{Proto: 253, Data: s[:]})), offload{}))
	})
	for _, c := range seen[:len(seen)-1] {
		source, _ := netip.AddrFromSlice(c.Frame[min(len(c.Frame), ipv6At+8):min(len(c.Frame), ipv6At+24)])
		if source != b.underlay && !source.IsLinkLocalUnicast() && !source.IsUnspecified() {
			all = append(all, c.Frame)
		}
	}
	return all
}

// offloaded is outward for a frame that leaves work to a device: the device must not write to bytes that were checked.
func (b *fuzzBench) offloaded(in, out []byte, o offload) (local bool, err error) {
	if a, whole := dissect(in, o.kind != 0); o.sum && whole {
		switch upper := ipv6At + a.upper; {
		case a.later || o.start < upper || o.start == upper && o.offset != checksumAt(a.protocol) || o.start > upper &&
			o.start < upper+8:
			return false, fmt.Errorf(
				"a device would write to %d, of a packet whose upper layer is at %d",
				o.start+o.offset,
				upper,
			)
		case o.start == upper:
			in, out = o.finish(in), o.finish(out)
		}
	}
	return b.outward(b.b1, in, out, o.kind != 0)
}

// finish does a device's work on a frame.
func (o offload) finish(frame []byte) []byte {
	at := o.start + o.offset
	if !o.sum || at+2 > len(frame) {
		return frame
	}
	frame = bytes.Clone(frame)
	sum := uint32(0)
	for rest := frame[o.start:]; len(rest) > 0; rest = rest[min(2, len(rest)):] {
		pair := [2]byte{}
		copy(pair[:], rest)
		sum += uint32(binary.BigEndian.Uint16(pair[:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(frame[at:], ^uint16(sum))
	return frame
}
