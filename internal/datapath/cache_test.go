package datapath

import (
	"math"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// TestCacheAnswersOnlyItsKey puts one flow's entry into every slot, so that the lookup of every packet finds it. Only a
// packet of that flow may use the entry, and only while the entry is valid.
func TestCacheAnswersOnlyItsKey(t *testing.T) {
	b := newProgBench(t)
	far, decoy := b.b3.Addr(), b.b3.Addr().Next()
	cached := func() bpfobj.PilasterFlow { return b.cached(t, decoy, 1500) }
	frame := b.frame(b.sent(sees(far), gram))
	across := func(to netip.Addr) packet.Packet {
		return packet.Packet{Source: b.b1.plain(), Destination: to, HopLimit: 63, Body: gram}
	}
	labelled := func(p packet.Packet) packet.Packet {
		p.FlowLabel = 0x12341
		return p
	}
	for _, c := range []struct {
		change func(*bpfobj.PilasterFlow)
		device uint32
		progCase
	}{
		{nil, b.b1.ifindex(), progCase{name: "the same packet", frame: frame, out: across(decoy)}},
		{nil, b.b1.ifindex(), progCase{name: "another destination",
			frame: b.frame(b.sent(netip.MustParseAddr("fc12::1"), gram)), reason: "dst-undecryptable"}},
		{nil, b.b1.ifindex(), progCase{name: "another source", frame: b.frame(packet.Packet{Source: b.b2.seen(),
			Destination: sees(far), Body: gram}), reason: "src-not-own"}},
		{nil, b.b2.ifindex(), progCase{name: "another device", frame: frame, reason: "src-not-own"}},
		{nil, b.b1.ifindex(), progCase{name: "another path", frame: b.frame(labelled(b.sent(sees(far), gram))),
			out: labelled(across(far))}},
		{func(f *bpfobj.PilasterFlow) { f.Key.Generation-- }, b.b1.ifindex(), progCase{name: "from before a change",
			frame: frame, out: across(far)}},
		{func(f *bpfobj.PilasterFlow) { f.Expires = 0 }, b.b1.ifindex(), progCase{name: "a next hop that is too " +
			"old", frame: frame, out: across(far)}},
		{func(f *bpfobj.PilasterFlow) { f.Egress = 0 }, b.b1.ifindex(), progCase{name: "an entry that was not " +
			"finished", frame: frame, out: across(far)}},
	} {
		f := cached()
		if c.change != nil {
			c.change(&f)
		}
		b.fillCache(t, f)
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: c.device}, c.progCase)
	}

	// A packet without a route writes no entry into the slot. With one run more than there are CPUs, one slot is used
	// twice.
	b.fillCache(t, cached())
	nowhere := b.b3
	nowhere.Node = netip.MustParsePrefix("fd70:696c:6100:99::/64")
	for range ebpf.MustPossibleCPU() + 1 {
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, progCase{
			name: "a node without a route, again", frame: b.frame(b.sent(sees(allocated(nowhere).Addr()), gram)),
			reason: "no-route",
		})
	}

	// A change by the agent takes effect at once, whatever was cached.
	dropped := func(name, reason string) {
		b.check(
			t,
			b.datapath.Objects.PilContainer,
			skb{Ifindex: b.b1.ifindex()},
			progCase{name: name, frame: frame, reason: reason},
		)
	}
	b.fillCache(t, cached())
	must(t, b.datapath.deactivate(b.b1.record))
	dropped("from a container that was removed", "src-not-own")
	must(t, b.datapath.activate(b.b1.record))
	b.fillCache(t, cached())
	must(t, b.datapath.deleteTenant(blue))
	dropped("from a tenant that was removed", "no-key")
	must(t, b.datapath.putTenant(blue))
	must(t, b.datapath.Objects.PilKeysV1.Delete(uint32(blue.Current().ID)))
	b.fillCache(t, bpfobj.PilasterFlow{})
	dropped("without a key", "no-key")
	b.check(t, b.datapath.Objects.PilUplinkIn, skb{Ifindex: b.uplinkIfindex()}, progCase{
		name: "from the fabric without a key", reason: "no-key",
		frame: packet.Packet{Source: far, Destination: b.b1.plain(), Body: gram}.Frame(b.uplinkMAC, host.ContainerMAC),
	})
	must(
		t,
		b.datapath.Objects.PilKeysV1.Put(
			uint32(blue.Current().ID),
			make([]byte, b.datapath.Objects.PilKeysV1.ValueSize()),
		),
	)
	dropped("with a place for a key and none in it", "no-key")
}

// TestNoCache: with NoCache, programs ignore a cache entry, even if it matches the packet.
func TestNoCache(t *testing.T) {
	b := newProgBench(t)
	config := b.datapath.config
	config.NoCache = true
	b.reopen(t, config)
	b.restore(t, b.b1, b.b2, b.r1)
	b.fillCache(t, b.cached(t, b.b3.Addr().Next(), 1500))
	b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, progCase{
		name: "the same packet without a cache", frame: b.frame(b.sent(sees(b.b3.Addr()), gram)),
		out: packet.Packet{Source: b.b1.plain(), Destination: b.b3.Addr(), HopLimit: 63, Body: gram},
	})
}

// The deletion of a tenant invalidates cached flows, unless the tenant is on another network and had no ids here.
func TestTenantsThatLeave(t *testing.T) {
	b := newProgBench(t)
	decoy := b.b3.Addr().Next()
	leaving := tenant.Tenant{Name: "green", Addressing: tenant.Encrypted, IDs: []tenant.ID{{ID: 77}}}
	across := func(name string, to netip.Addr) {
		t.Helper()
		b.check(t, b.datapath.Objects.PilContainer, skb{Ifindex: b.b1.ifindex()}, progCase{
			name: name, frame: b.frame(b.sent(sees(b.b3.Addr()), gram)), out: packet.Packet{Source: b.b1.plain(),
				Destination: to, HopLimit: 63, Body: gram},
		})
	}
	b.fillCache(t, b.cached(t, decoy, 1500))
	must(t, b.datapath.deleteTenant(leaving))
	across("another network's tenant has left", decoy)
	must(t, b.datapath.putTenant(leaving))
	b.fillCache(t, b.cached(t, decoy, 1500))
	must(t, b.datapath.deleteTenant(leaving))
	across("a tenant has left", b.b3.Addr())
}

func (b *progBench) cached(t *testing.T, to netip.Addr, mtu uint16) bpfobj.PilasterFlow {
	t.Helper()
	const wayUplink = 2
	var generation uint32
	must(t, b.datapath.Objects.PilGenerationV1.Lookup(uint32(0), &generation))
	seen := sees(b.b3.Addr())
	f := bpfobj.PilasterFlow{
		Src: bpfobj.ToAddr(
			b.b1.plain(),
		), Dst: bpfobj.ToAddr(to), Expires: math.MaxInt64, Ifindex: b.uplinkIfindex(), Egress: wayUplink, Translate: 1,
		Mtu:      mtu,
		Checksum: bpfobj.ChecksumDiff(seen, to),
	}
	f.Key.Src, f.Key.Dst, f.Key.Device, f.Key.Generation = bpfobj.ToAddr(
		b.b1.seen(),
	), bpfobj.ToAddr(
		seen,
	), b.b1.ifindex(), generation
	sum := uint64(f.Checksum) + uint64(bpfobj.ChecksumDiff(b.b1.seen(), b.b1.plain()))
	f.Checksum = uint32(sum + sum>>32)
	return f
}

func (b *progBench) fillCache(t *testing.T, f bpfobj.PilasterFlow) {
	t.Helper()
	for slot := range b.datapath.Objects.PilFlows.MaxEntries() {
		must(t, b.datapath.Objects.PilFlows.Put(slot, f))
	}
}

func (c *testContainer) ifindex() uint32 { return uint32(c.record.Device.HostIfindex) }
