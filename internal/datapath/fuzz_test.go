package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// How shape changes a fuzzed frame so that it passes the first checks: mutation alone would never produce an address.
const (
	fitLength   = 1 << iota // of the IPv6 header
	fitChecksum             // of the transport header
	fitQuote                // of an ICMPv6 error: the packet it should be about
	fitMAC                  // the receiving device's
	asSegments              // a packet the kernel has not cut up yet
	withMark                // that a program of ours leaves
	fromDevice              // came in through a device
)

// fuzzBench is a bench for one program, which is run by one thread inside the node.
type fuzzBench struct {
	*progBench
	model
	program   *ebpf.Program
	addresses []netip.Addr
	jobs      chan func()
	counted   map[string]uint64 // drops up to now
}

func newFuzzBench(f *testing.F) *fuzzBench {
	b := newModelBench(f)
	b.converse(f)
	for _, c := range b.containers {
		// So that the container's kernel sends nothing between our packets.
		must(f, c.ns.Do(func() error {
			h, err := c.ns.Netlink()
			if err != nil {
				return err
			}
			defer h.Close()
			eth0, err := h.LinkByName("eth0")
			if err != nil {
				return err
			}
			return h.LinkSetDown(eth0)
		}))
	}
	b.counted = b.drops(f)
	return b
}

// newModelBench returns a bench with running containers.
func newModelBench(f testing.TB) *fuzzBench {
	b := &fuzzBench{progBench: newProgBench(f), jobs: make(chan func())}
	// Blue's key is being renewed: it has containers of two ids.
	b.model = model{
		b.prefix,
		[]*testContainer{b.b1, b.b2, b.r1, b.add(f, plain, 1), b.add(f, renewed, 1)},
		map[string]tenant.Tenant{},
	}
	for _, of := range []tenant.Tenant{renewed, red, plain} {
		b.tenants[of.Name] = of
	}
	for _, c := range b.containers {
		other := address.Split(c.plain())
		other.Node = b.far.prefix
		reserved, nobody, foreign := other, other, other
		reserved.App, nobody.Node, foreign.Node = firstReserved, b.prefix, netip.MustParsePrefix(
			"fd70:696c:6200:1::/64",
		)
		nobody.Index += 7
		for _, p := range []address.Plain{other, reserved, nobody, foreign, {Node: b.far.prefix, App: 1, Index: 1}} {
			if c.cipher != nil {
				var err error
				p, _, err = c.cipher.Draw(address.DefaultPlan().Private, p)
				must(f, err)
			}
			b.addresses = append(b.addresses, p.Addr())
			if c.cipher != nil {
				b.addresses = append(b.addresses, c.cipher.Encrypt(p.Addr()))
			}
		}
		b.addresses = append(b.addresses, c.plain(), c.seen(), b.gateway(c))
		for _, id := range b.tenants[c.record.Tenant].IDs {
			if c.cipher != nil && id.ID != c.record.TenantID { // an address under the key of another id
				crossed, seen, err := address.NewCipher(id.Key).Draw(address.DefaultPlan().Private, other)
				must(f, err)
				b.addresses = append(b.addresses, crossed.Addr(), seen)
			}
		}
	}
	b.addresses = append(b.addresses, b.underlay, b.far.underlay, b.prefix.Addr().Next(), b.far.prefix.Addr().Next(),
		netip.MustParseAddr("2001:db8:99::1"), netip.MustParseAddr("ff02::1"))

	done := make(chan error)
	go func() {
		done <- b.ns.Do(func() error {
			for job := range b.jobs {
				job()
			}
			return nil
		})
	}()
	f.Cleanup(func() {
		close(b.jobs)
		must(f, <-done)
	})
	return b
}

// shape puts the n-th addresses (0: as they are) into a frame and makes it fit.
func (b *fuzzBench) shape(frame []byte, source, destination, how byte) []byte {
	frame = bytes.Clone(frame[:min(len(frame), 2000)])
	if len(frame) < ipv6At+40 {
		return frame
	}
	p := frame[ipv6At:]
	for at, n := range map[int]byte{8: source, 24: destination} {
		if n > 0 {
			a := b.addresses[int(n-1)%len(b.addresses)].As16()
			copy(p[at:], a[:])
		}
	}
	if how&fitLength != 0 {
		binary.BigEndian.PutUint16(p[4:], uint16(len(p)-40))
	}
	if how&fitMAC != 0 {
		copy(frame, b.uplinkMAC)
	}
	a, whole := dissect(frame, how&asSegments != 0)
	if !whole || a.later {
		return frame
	}
	if _, _, ok := a.quoted(frame); ok && how&fitQuote != 0 && a.isError(frame) {
		put(p[a.upper+8+8:], a.destination, a.source)
	}
	if at := checksumAt(a.protocol); how&fitChecksum != 0 && at >= 0 && a.upper+at+2 <= a.end {
		field := p[a.upper+at : a.upper+at+2]
		clear(field)
		binary.BigEndian.PutUint16(field, packet.Checksum(a.source, a.destination, a.protocol, p[a.upper:a.end]))
	}
	return frame
}

// answered stands for the verdict on a packet that the program dropped and turned into an ICMP error for its sender.
const answered = verdictRedirect + 1<<16

// send runs the program on a frame, and checks what must hold for every packet and every program.
func (b *fuzzBench) send(t *testing.T, frame []byte, ctx *skb) (verdict uint32, out []byte) {
	t.Helper()
	options := &ebpf.RunOptions{
		Data:       frame,
		DataOut:    make([]byte, len(frame)+answerLength),
		Context:    *ctx,
		ContextOut: ctx,
	}
	answer := make(chan error)
	b.jobs <- func() {
		var err error
		verdict, err = b.program.Run(options)
		answer <- err
	}
	err := <-answer
	if errors.Is(err, unix.EINVAL) && len(frame) < ipv6At+40 {
		t.Skip("the kernel does not run programs on that")
	}
	must(t, err)
	now, sum := b.drops(t), uint64(0)
	for r, n := range now {
		sum += n - b.counted[r]
	}
	told := now["hop-limit"] + now["too-big"] - b.counted["hop-limit"] - b.counted["too-big"]
	b.counted = now
	switch {
	case verdict == verdictRedirect && sum == 1 && told == 1:
		verdict = answered
	case verdict == verdictDrop && sum == 1, verdict == verdictRedirect && sum == 0:
	case verdict == verdictNext && sum == 0:
		if !bytes.Equal(options.DataOut, frame) {
			t.Fatalf("left alone, and changed:\n%x, was\n%x", options.DataOut, frame)
		}
	default:
		t.Fatalf("verdict %d, and %d drops counted, for\n%x", verdict, sum, frame)
	}
	return verdict, options.DataOut
}

// seed adds each frame as it is and in the most useful shapes.
func seed(f *testing.F, frames ...[]byte) {
	for _, frame := range frames {
		f.Add(frame, byte(0), byte(0), byte(0), byte(0))
		f.Add(frame, byte(0), byte(0), byte(0), byte(fitLength|fitChecksum|fitMAC))
	}
}

func frames(cases []progCase) (all [][]byte) {
	for _, c := range cases {
		all = append(all, c.frame)
	}
	return all
}

// FuzzFromContainer: whatever a container sends, only its own packets to its own tenant leave it. Tags, checksums left
// to a device and true segments do not fit into a run of a program: TestAnyFrameOfAContainer sends those.
func FuzzFromContainer(f *testing.F) {
	b := newFuzzBench(f)
	b.program = b.datapath.Objects.PilContainer
	mark := b.mark(f)
	seed(f, frames(b.fromContainer())...)
	seed(f, b.frame(b.sent(sees(b.b3.Addr()), long(1501))))
	seed(f, b.toNode()...)
	f.Fuzz(func(t *testing.T, frame []byte, device, source, destination, how byte) {
		if len(frame) < ipv6At+1 {
			t.Skip("shorter than any frame")
		}
		frame = b.shape(frame, source, destination, how)
		var from *testContainer
		ctx := skb{Ifindex: b.uplinkIfindex(), Mark: uint32(how), Timestamp: uint64(how)}
		if n := int(device) % (len(b.containers) + 1); n < len(b.containers) {
			from = b.containers[n]
			ctx.Ifindex, ctx.IngressIfindex = from.ifindex(), from.ifindex()
		}
		if how&asSegments != 0 {
			ctx.Segments = 2
		}
		verdict, out := b.send(t, frame, &ctx)
		switch verdict {
		case verdictNext:
			t.Fatalf("no container can have it, and it was passed on:\n%x", frame)
		case answered:
			if err := b.model.checkICMPError(from, frame, out); err != nil || ctx.Mark != 0 || ctx.Timestamp != 0 {
				t.Fatalf("%v; it was answered with\n%x, mark %#x and time %d", err, out, ctx.Mark, ctx.Timestamp)
			}
		case verdictRedirect:
			local, err := b.outward(from, frame, out, how&asSegments != 0)
			if err != nil {
				t.Fatalf("%v\n%x", err, frame)
			}
			if local && (ctx.Mark != 0 || ctx.Timestamp != 0) || !local && ctx.Mark != mark {
				t.Fatalf("it left with mark %#x and time %d:\n%x", ctx.Mark, ctx.Timestamp, frame)
			}
		}
	})
}

// FuzzFromFabric: whatever the fabric delivers, a container receives only packets from its tenant's containers on other
// nodes, and packets that are not for containers pass unchanged.
func FuzzFromFabric(f *testing.F) {
	b := newFuzzBench(f)
	b.program = b.datapath.Objects.PilUplinkIn
	seed(f, frames(b.fromFabric())...)
	seed(f, frames(b.fabricErrors())...)
	f.Fuzz(func(t *testing.T, frame []byte, _, source, destination, how byte) {
		if len(frame) < ipv6At+1 {
			t.Skip("shorter than any frame")
		}
		frame = b.shape(frame, source, destination, how)
		ctx := skb{Ifindex: b.uplinkIfindex()}
		if how&asSegments != 0 {
			ctx.Segments = 2
		}
		verdict, out := b.send(t, frame, &ctx)
		if verdict == answered {
			t.Fatalf("the fabric was answered:\n%x", out)
		}
		if want := b.isForUs(frame); want != (verdict != verdictNext) {
			t.Fatalf("verdict %d; ours to judge: %v\n%x", verdict, want, frame)
		}
		if verdict == verdictRedirect {
			if err := b.inward(frame, out, how&asSegments != 0); err != nil {
				t.Fatalf("%v\n%x", err, frame)
			}
		}
	})
}

// isForUs reports whether a frame from the fabric concerns containers: its destination is a container or the gateway;
// its source is a container of this node; its source is any container and its destination is none; it has an address
// that only containers see; or a tag hides its type.
func (b *fuzzBench) isForUs(frame []byte) bool {
	if len(frame) < ipv6At+40 || !toStation(frame, b.uplinkMAC) {
		return false
	}
	if hidesInTag(frame) {
		return true
	}
	if frame[12] != 0x86 || frame[13] != 0xdd {
		return false
	}
	source, destination := netip.AddrFrom16([16]byte(frame[ipv6At+8:])), netip.AddrFrom16([16]byte(frame[ipv6At+24:]))
	if b.node.Contains(source) || onlyInside(destination) {
		return true
	}
	// a container, or the gateway
	if to := address.Split(destination); b.node.Contains(destination) &&
		(to.Tenant != 0 || to.App == address.GatewayApp || to.App == address.EgressApp) {
		return true
	}
	if address.DefaultPlan().Base.Contains(source) && destination == nodeAddressOf(destination) {
		return onlyInside(source)
	}
	return onlyInside(source) || claimsTenant(source) && !claimsTenant(destination)
}

// hidesInTag reports whether a tag of VLAN 0 stands before IPv6, or before another tag.
func hidesInTag(frame []byte) bool {
	word := func(at int) uint16 { return binary.BigEndian.Uint16(frame[at:]) }
	isTag := func(kind uint16) bool { return kind == 0x8100 || kind == 0x88a8 }
	return isTag(word(12)) && word(14)&0xfff == 0 && (word(16) == 0x86dd || isTag(word(16)))
}

// toStation reports whether a network card without promiscuity would take a frame.
func toStation(frame, mac []byte) bool { return frame[0]&1 != 0 || bytes.Equal(frame[:6], mac) }

// FuzzToFabric: the host's stack sends no packet to the fabric from or to a container's address. Others pass.
func FuzzToFabric(f *testing.F) {
	b := newFuzzBench(f)
	b.program = b.datapath.Objects.PilUplinkOut
	mark := b.mark(f)
	for _, source := range []netip.Addr{b.prefix.Addr().Next(), b.underlay, b.b1.plain(), b.b3.Addr(), b.b1.seen()} {
		frame := packet.Packet{
			Source:      source,
			Destination: b.b3.Addr(),
			Body:        echo,
		}.Frame(
			host.ContainerMAC,
			b.uplinkMAC,
		)
		for _, how := range []byte{0, withMark, fromDevice, withMark | fromDevice} {
			f.Add(frame, byte(0), byte(0), byte(0), how)
		}
	}
	f.Fuzz(func(t *testing.T, frame []byte, other, source, destination, how byte) {
		if len(frame) < ipv6At+1 {
			t.Skip("shorter than any frame")
		}
		frame = b.shape(frame, source, destination, how)
		ctx := skb{Ifindex: b.uplinkIfindex(), Mark: uint32(other)}
		if how&withMark != 0 {
			ctx.Mark = mark
		}
		if how&fromDevice != 0 {
			ctx.IngressIfindex = b.b1.ifindex()
		}
		ours := ctx.Mark == mark && ctx.IngressIfindex != 0
		verdict, _ := b.send(t, frame, &ctx)
		whole := !ours && len(frame) >= ipv6At+40
		forged := whole && hidesInTag(frame)
		if whole && frame[12] == 0x86 && frame[13] == 0xdd {
			source, destination := netip.AddrFrom16(
				[16]byte(frame[ipv6At+8:]),
			), netip.AddrFrom16(
				[16]byte(frame[ipv6At+24:]),
			)
			forged = claimsTenant(source) || isEgress(source) || onlyInside(source) || onlyInside(destination)
		}
		if want := map[bool]uint32{true: verdictDrop, false: verdictNext}[forged]; verdict != want {
			t.Fatalf("verdict %d, not %d: marked and forwarded %v\n%x", verdict, want, ours, frame)
		}
		if ours && ctx.Mark != 0 {
			t.Fatalf("it leaves with mark %#x", ctx.Mark)
		}
	})
}

// FuzzDecodeEvent: a sample of the ring decodes to an event with all its fields, or to an error.
func FuzzDecodeEvent(f *testing.F) {
	sample := make([]byte, 88)
	for i := range sample {
		sample[i] = byte(i)
	}
	f.Add(sample)
	f.Add(sample[:87])
	f.Add(append(sample, 0))
	f.Add(make([]byte, 88))
	d := newFuzzBench(f).datapath
	f.Fuzz(func(t *testing.T, sample []byte) {
		e, err := d.decodeEvent(sample)
		if (err == nil) != (len(sample) >= 88) {
			t.Fatalf("%d bytes: %+v, %v", len(sample), e, err)
		}
		if err != nil {
			return
		}
		word, port := binary.NativeEndian.Uint32, binary.BigEndian.Uint16
		source, destination := netip.AddrFrom16([16]byte(sample[24:])), netip.AddrFrom16([16]byte(sample[40:]))
		switch sample[77] {
		case 4:
			source, destination = source.Unmap(), destination.Unmap()
		case 6:
		default:
			source, destination = netip.Addr{}, netip.Addr{}
		}
		if e.Count != binary.NativeEndian.Uint64(sample[8:]) || e.Lost != binary.NativeEndian.Uint64(sample[16:]) ||
			e.Source != source || e.Destination != destination ||
			e.Reason != dropreason.Reason(word(sample[56:])).
				String() ||
			e.Ifindex != int(word(sample[64:])) || e.Length != int(word(sample[68:])) ||
			e.SourcePort != port(
				sample[72:],
			) || e.DestinationPort != port(sample[74:]) || e.Protocol != sample[76] || e.Rule != word(sample[80:]) {
			t.Fatalf("%x became %+v", sample, e)
		}
	})
}
