package oncache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/packet"
)

func eachWorld(t *testing.T, test func(*testing.T, *bench)) {
	for _, w := range worlds {
		t.Run(w.String(), func(t *testing.T) { test(t, newBench(t, w)) })
	}
}

// forget clears what may differ between the outer headers of the cache and of the overlay.
func (w world) forget(frame []byte) []byte {
	f := bytes.Clone(frame)
	copy(f[w.at("port"):], []byte{0, 0})
	copy(f[w.at("checksum"):], []byte{0, 0})
	if w.outer4 {
		copy(f[w.at("id"):], []byte{0, 0})
		copy(f[w.at("header"):], []byte{0, 0})
	}
	return f
}

// The cache changes packets as the overlay's own devices do; outer headers differ only in source port, UDP checksum and
// IPv4 id.
func TestSameAsTheOverlay(t *testing.T) {
	eachWorld(t, func(t *testing.T, b *bench) {
		b.fill(t)
		for _, payload := range []int{0, 1, 1000} {
			body, answer := said, answered
			body.Payload, answer.Payload = make([]byte, payload), make([]byte, payload)
			for ecn := range uint8(4) {
				verdict, out, mark := b.run(t, step{program: "out", frame: b.sent(body, class(ecn)), mark: others})
				want, port := b.leaving(body, class(ecn)), binary.BigEndian.Uint16(out[b.at("port"):])
				if verdict != redirect || mark != others || port < 0xc000 ||
					!bytes.Equal(b.forget(out), b.forget(want)) {
					t.Errorf("out, ECN %d: verdict %d, mark %#x, port %d\n got % x\nwant % x", ecn, int32(verdict),
						mark, port, out, want)
				}
				if b.outer4 && headerSum(out[14:34]) != 0 {
					t.Errorf("out, ECN %d: wrong header checksum", ecn)
				}
				verdict, out, mark = b.run(t, step{program: "in", frame: b.coming(answer, class(ecn)), mark: others})
				if want := b.received(answer, class(ecn)); verdict != redirect || mark != 0 || !bytes.Equal(out, want) {
					t.Errorf("in, ECN %d: verdict %d, mark %#x\n got % x\nwant % x", ecn, int32(verdict), mark,
						out, want)
				}
			}
		}
	})
}

// Outer UDP checksums that a device has verified are accepted. The cache itself sends none, over IPv4 also if the
// overlay does.
func TestOuterChecksums(t *testing.T) {
	b := newBench(t, world{outer4: true})
	b.fill(t)
	summed := step{program: "in", frame: b.with(b.coming(answered), "checksum", 1, 2), summed: true}
	if verdict, _, _ := b.run(t, summed); verdict != redirect {
		t.Errorf("in: verdict %d", int32(verdict))
	}
	_, err := b.Evict(Selector{All: true})
	must(t, err)
	for range 2 {
		b.run(t, step{program: "learn out", frame: b.with(b.leaving(said), "checksum", 1, 2), mark: b.field(1)})
		b.run(t, step{program: "out", frame: b.sent(said)})
	}
	b.run(t, step{program: "learn in", frame: b.received(answered), mark: b.field(2)})
	verdict, out, _ := b.run(t, step{program: "out", frame: b.sent(said)})
	if sum := out[b.at("checksum"):][:2]; verdict != redirect || !bytes.Equal(sum, []byte{0, 0}) {
		t.Errorf("out: verdict %d, checksum % x", int32(verdict), sum)
	}
}

// IPv4 ids count on by the number of segments, as the kernel gives each segment an id of its own.
func TestIPv4Ids(t *testing.T) {
	b := newBench(t, world{outer4: true})
	b.fill(t)
	var ids []uint16
	for _, segments := range []uint32{0, 5, 1, 0} {
		_, out, _ := b.run(t, step{program: "out", frame: b.sent(said), gsoSegs: segments})
		ids = append(ids, binary.BigEndian.Uint16(out[b.at("id"):]))
	}
	if !slices.Equal(ids, []uint16{ids[0], ids[0] + 1, ids[0] + 6, ids[0] + 7}) {
		t.Errorf("got ids %v", ids)
	}
}

// Full maps evict entries and accept new ones.
func TestTablesAreBounded(t *testing.T) {
	b := newBench(t, world{})
	b.introduce(t)
	for port := range uint16(10_000) {
		b.run(t, step{program: "learn in", frame: b.received(packet.UDP{SourcePort: port, DestinationPort: 53}),
			mark: b.field(2)})
	}
	if s, err := b.Stats(); err != nil || s.Flows < 1024 || // the kernel evicts in batches, on each CPU
		s.Flows > 4096 {
		t.Errorf("%d flows are known: %v", s.Flows, err)
	}
}

// The MAC that a container may be reached by is known when the overlay has accepted a frame from it. A frame that the
// overlay drops changes nothing.
func TestSender(t *testing.T) {
	eachWorld(t, func(t *testing.T, b *bench) {
		forged := b.sent(said)
		forged[11] = 0x77
		known := func(what string, want uint64) {
			t.Helper()
			var mac uint64
			err := b.objects.OnceSender.Lookup(uint32(b.container), &mac)
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) || mac != want {
				t.Errorf("%s: %#x, want %#x (%v)", what, mac, want, err)
			}
		}
		mac := binary.NativeEndian.Uint64(append(slices.Clone(eth0), 0, 0))
		b.run(t, step{program: "learn out", frame: b.leaving(said), mark: b.field(1)}) // the destination is known
		for _, frame := range [][]byte{forged, b.sent(said)} {
			must(t, b.Void())
			b.run(t, step{program: "out", frame: frame})
			known("sent only", 0)
		}
		b.run(t, step{program: "learn out", frame: b.leaving(said), mark: b.field(1)})
		known("accepted", mac)
		other := b.sent(packet.UDP{SourcePort: 4000, DestinationPort: 80})
		other[11] = 0x77
		for _, frame := range [][]byte{forged, other} {
			b.run(t, step{program: "out", frame: frame})
			known("forged", mac)
		}
	})
}

// The sizes of Go's types are those of the maps.
func TestLayouts(t *testing.T) {
	b := newBench(t, world{})
	for m, sizes := range map[*ebpf.Map][2]int{
		b.objects.OnceEgress:  {binary.Size(innerKey{}), binary.Size(egressEntry{})},
		b.objects.OnceVtep:    {16, binary.Size(vtepEntry{})},
		b.objects.OnceIngress: {binary.Size(innerKey{}), binary.Size(ingressEntry{})},
		b.objects.OnceFilter:  {binary.Size(flowKey{}), binary.Size(verdict{})},
	} {
		if got := [2]int{int(m.KeySize()), int(m.ValueSize())}; got != sizes {
			t.Errorf("%s: got sizes %v, want %v", m, got, sizes)
		}
	}
	if n, want := int(b.objects.OnceCounters.MaxEntries()), 3*(2+len(missCauses)+len(notLearnt)); n != want {
		t.Errorf("%d counters, want %d", n, want)
	}
}
