package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// slotBytes is the size of a slot of a cache. A slot begins with the two addresses of its packets.
const slotBytes = 128

// ways is the number of slots of a set.
const ways = 4

// fresh is how long a flow and a verdict are valid at least: 100 jiffies. Then the next packet asks again, so it is no
// loss if the cache does not have them.
const fresh = 90 * time.Millisecond

// Where a slot says until when it is valid.
const (
	flowExpires    = int(unsafe.Offsetof(bpfobj.PilasterFlow{}.Expires))
	verdictExpires = int(unsafe.Offsetof(bpfobj.PilasterVerdict{}.Until))
)

// life is when a slot of a flow became valid.
type life struct {
	until uint64
	since time.Time
}

func (l *life) isFresh() bool { return time.Since(l.since) < fresh }

// note reads a slot that a packet has just used.
func (l *life) note(m *ebpf.Memory, slot, expires int) error {
	if slot < 0 {
		return errors.New("a packet that was sent has no slot")
	}
	var until [8]byte
	if _, err := m.ReadAt(until[:], int64(slot*slotBytes+expires)); err != nil {
		return err
	}
	if is := binary.NativeEndian.Uint64(until[:]); is != l.until {
		l.until, l.since = is, time.Now()
	}
	return nil
}

// A scan in these tests has as many packets for each packet of a neighbour.
const scansPerPacket = 100

// scanBench has the caches of packets from and to hosts outside.
type scanBench struct {
	*egressBench
	flows, verdicts, hops *ebpf.Memory
}

// scanned runs a part of a test on one CPU, whose slots all packets then share.
func scanned(t *testing.T, run func(b *scanBench) error) {
	t.Helper()
	b := &scanBench{egressBench: newEgressBench(t)}
	for m, memory := range map[*ebpf.Map]**ebpf.Memory{
		b.datapath.Objects.PilOflows:    &b.flows,
		b.datapath.Objects.PilOverdicts: &b.verdicts,
		b.datapath.Objects.PilOhops:     &b.hops,
	} {
		if m.ValueSize() != ways*slotBytes {
			t.Fatalf("%v has sets of %d bytes", m, m.ValueSize())
		}
		var err error
		*memory, err = m.Memory()
		must(t, err)
	}
	b.knowsTheRouter(t)
	must(t, b.ns.Do(func() error {
		if err := onFirstCPU(); err != nil {
			return err
		}
		return run(b)
	}))
}

// knowsTheRouter adds the neighbour of the node's routes: only flows with a known next hop are in a cache.
func (b *egressBench) knowsTheRouter(t *testing.T) {
	t.Helper()
	must(t, b.datapath.Netlink.NeighSet(&netlink.Neigh{
		LinkIndex: int(b.uplinkIfindex()), IP: b.far.underlay.AsSlice(), HardwareAddr: host.ContainerMAC,
		State: netlink.NUD_PERMANENT,
	}))
}

// content returns a copy of a cache, as far as the first CPU uses it.
func content(m *ebpf.Memory) ([]byte, error) {
	all := make([]byte, int(m.Size())/ebpf.MustPossibleCPU())
	_, err := m.ReadAt(all, 0)
	return all, err
}

// slotOf returns the slot with the given addresses; -1 if the cache has none.
func slotOf(m *ebpf.Memory, first, second netip.Addr) (int, error) {
	a, b := first.As16(), second.As16()
	key := append(a[:], b[:]...)
	all, err := content(m)
	for at := 0; at+slotBytes <= len(all); at += slotBytes {
		if bytes.Equal(all[at:at+len(key)], key) {
			return at / slotBytes, err
		}
	}
	return -1, err
}

// hopSlots returns where the next hop from a gateway's address to ownHost, and that of the tunnel, are in the cache.
func (b *scanBench) hopSlots(gateway netip.Addr) (all [2]int, err error) {
	var errs [2]error
	all[0], errs[0] = slotOf(b.hops, gateway, ownHost)
	all[1], errs[1] = slotOf(b.hops, tenant.EgressTunnel(b.prefix), tenant.EgressTunnel(b.far.prefix))
	return all, errors.Join(errs[:]...)
}

// passes runs a packet, which must be sent.
func passes(p *ebpf.Program, ifindex uint32, frame []byte) error {
	verdict, err := p.Run(&ebpf.RunOptions{Data: frame, Context: skb{Ifindex: ifindex}})
	if err == nil && verdict != verdictRedirect {
		err = fmt.Errorf("verdict %d", verdict)
	}
	return err
}

// outsideFlow is a flow of r1, a container of another tenant than the one that scans, with a host outside.
type outsideFlow struct {
	host    netip.Addr
	out, in []byte
}

// send sends one packet in both directions.
func (b *scanBench) send(f outsideFlow) error {
	return errors.Join(passes(b.datapath.Objects.PilContainer, b.r1.ifindex(), f.out),
		passes(b.datapath.Objects.PilUplinkIn, b.uplinkIfindex(), f.in))
}

// slots returns where a flow's packets and its verdict are in the caches.
func (b *scanBench) slots(f outsideFlow) (all [3]int, err error) {
	var errs [3]error
	all[0], errs[0] = slotOf(b.flows, b.r1.seen(), f.host)
	all[1], errs[1] = slotOf(b.flows, f.host, b.r1.egress())
	all[2], errs[2] = slotOf(b.verdicts, b.r1.plain(), f.host)
	return all, errors.Join(errs[:]...)
}

// begin begins flows, and returns pairs that share a set of a cache in each direction, and one whose verdicts do. A
// tenant that shares the sets with another one has half of each, so none has more than two of them.
func (b *scanBench) begin() (flows []outsideFlow, err error) {
	const candidates, most = 128, 2
	type set struct{ cache, number int }
	var all [candidates]outsideFlow
	var sets [candidates][3]set
	for i := range all {
		f := outsideFlow{host: netip.MustParseAddr(fmt.Sprintf("2001:db8:1:%d::1", i+1))}
		f.out = b.frame(between(b.r1.seen(), f.host, question))
		f.in = b.onWire(between(f.host, b.r1.egress(), answers))
		if err := b.send(f); err != nil {
			return nil, fmt.Errorf("begin flow %d: %w", i, err)
		}
		slots, err := b.slots(f)
		if err != nil {
			return nil, err
		}
		all[i] = f
		for kind, slot := range slots {
			sets[i][kind] = set{kind / 2, slot / ways}
		}
	}
	used := map[set]int{}
	add := func(i, by int) (fits bool) {
		fits = true
		for _, s := range sets[i] {
			used[s] += by
			fits = fits && used[s] <= most
		}
		return fits
	}
	pair := func(kind int) bool {
		for i := range all {
			for j := range i {
				if sets[i][kind] != sets[j][kind] {
					continue
				}
				if one, two := add(i, 1), add(j, 1); one && two {
					flows = append(flows, all[i], all[j])
					return true
				}
				add(i, -1)
				add(j, -1)
			}
		}
		return false
	}
	for kind := range 3 {
		if !pair(kind) {
			return nil, fmt.Errorf("no two of %d flows share a set of kind %d", candidates, kind)
		}
	}
	return flows, nil
}

// scan has b1 send to another host outside, which answers.
func (b *scanBench) scan(out, in []byte, k uint32) error {
	binary.BigEndian.PutUint32(out[14+24+12:], k*0x9e3779b1)
	binary.BigEndian.PutUint32(in[14+8+12:], k*0x9e3779b1)
	return errors.Join(passes(b.datapath.Objects.PilContainer, b.b1.ifindex(), out),
		passes(b.datapath.Objects.PilUplinkIn, b.uplinkIfindex(), in))
}

// untilScanned scans until the caches have nothing of the flows, which have had no packets for a while.
func (b *scanBench) untilScanned(flows []outsideFlow, scan func() error) error {
	for range 10_000 {
		if err := scan(); err != nil {
			return err
		}
		left := false
		for _, f := range flows {
			slots, err := b.slots(f)
			if err != nil {
				return err
			}
			left = left || slots != [3]int{-1, -1, -1}
		}
		if !left {
			return nil
		}
	}
	return errors.New("flows without packets stay in the caches")
}

// TestOutsideScanOfANeighbour: a container that exchanges packets with many hosts outside evicts no flow, no verdict
// and no session of another tenant with hosts outside.
func TestOutsideScanOfANeighbour(t *testing.T) {
	const packets, few = 500, 6
	scanned(t, func(b *scanBench) error {
		if err := b.datapath.putTenant(leaving(red, everywhere)); err != nil {
			return err
		}
		b.leaves(t, b.r1)
		flows, err := b.begin()
		if err != nil {
			return err
		}
		out := b.frame(b.sent(outsideHost, question))
		in := b.onWire(between(outsideHost, b.b1.egress(), answers))
		checked, misses := 0, [3]int{}
		lives := [few][3]life{}
		scanned := uint32(0)
		scan := func() error {
			for range scansPerPacket {
				scanned++
				if err := b.scan(out, in, scanned); err != nil {
					return fmt.Errorf("scan: %w", err)
				}
			}
			return nil
		}
		if err := b.untilScanned(flows, scan); err != nil {
			return err
		}
		for n := range packets {
			if err := scan(); err != nil {
				return err
			}
			f := flows[n%few]
			slots, err := b.slots(f)
			if err != nil {
				return err
			}
			for kind, slot := range slots {
				if !lives[n%few][kind].isFresh() {
					continue
				}
				checked++
				if slot < 0 {
					misses[kind]++
				}
			}
			if err := b.send(f); err != nil {
				return fmt.Errorf("a packet of the neighbour: %w", err)
			}
			if slots, err = b.slots(f); err != nil {
				return err
			}
			for kind, slot := range slots {
				cache := []*ebpf.Memory{b.flows, b.flows, b.verdicts}[kind]
				if err := lives[n%few][kind].note(cache, slot,
					[]int{flowExpires, flowExpires, verdictExpires}[kind]); err != nil {
					return err
				}
			}
		}
		for kind, name := range []string{"flows to hosts outside", "flows from hosts outside", "verdicts"} {
			if misses[kind] > 0 {
				t.Errorf("%s: %d misses in %d packets; want none", name, misses[kind], checked/3)
			}
		}
		if checked < packets/20 {
			t.Errorf("the machine was slow: only %d of %d lookups were checked", checked, 3*packets)
		}
		return nil
	})
}

// TestGatewayScanOfANeighbour: containers that send to many hosts by a gateway evict no next hop of another tenant, and
// none of the tunnels.
func TestGatewayScanOfANeighbour(t *testing.T) {
	const packets = 200
	scanned(t, func(b *scanBench) error {
		rule := b.via(ownHost, 48, b.prefix)
		rule.Via[0].Address = tenant.EgressAddress(b.prefix, tenant.FirstGatewayIndex+1)
		if err := b.datapath.putTenant(leaving(red, rule)); err != nil {
			return err
		}
		arrive := func(frame []byte) error {
			return passes(b.datapath.Objects.PilUplinkIn, b.uplinkIfindex(), frame)
		}
		neighbour := changed(b.b3.Addr(), func(p *address.Plain) { p.Tenant = 2 })
		from := func(source netip.Addr, to netip.Addr) []byte {
			return b.onWire(tunnelled(b.far.prefix, b.prefix, between(source, to, question)))
		}
		sent, scan := from(neighbour, ownHost), from(b.b3.Addr(), ownHost)
		back := b.onWire(between(ownHost, rule.Via[0].Address, answers))
		checked, misses, lives := 0, [2]int{}, [2]life{}
		for n := range packets {
			for k := range scansPerPacket {
				binary.BigEndian.PutUint32(scan[14+40+24+12:], uint32(n*scansPerPacket+k)*0x9e3779b1)
				if err := arrive(scan); err != nil {
					return fmt.Errorf("scan: %w", err)
				}
			}
			slots, err := b.hopSlots(rule.Via[0].Address)
			if err != nil {
				return err
			}
			for i, slot := range slots {
				if !lives[i].isFresh() {
					continue
				}
				checked++
				if slot < 0 {
					misses[i]++
				}
			}
			if err := errors.Join(arrive(sent), arrive(back)); err != nil {
				return fmt.Errorf("packets of the neighbour: %w", err)
			}
			if slots, err = b.hopSlots(rule.Via[0].Address); err != nil {
				return err
			}
			for i, slot := range slots {
				if err := lives[i].note(b.hops, slot, flowExpires); err != nil {
					return err
				}
			}
		}
		for i, name := range []string{"next hops to hosts outside", "next hops of tunnels"} {
			if misses[i] > 0 {
				t.Errorf("%s: %d misses in %d packets; want none", name, misses[i], checked/2)
			}
		}
		if checked < packets/20 {
			t.Errorf("the machine was slow: only %d of %d lookups were checked", checked, 2*packets)
		}
		return nil
	})
}

// TestNoSessionTakesNoSlot: packets from outside without a session, and packets that egress rules deny, take no slot of
// a cache. Packets that hosts outside do not answer take none of the cache of verdicts.
func TestNoSessionTakesNoSlot(t *testing.T) {
	const (
		packets    = 10_000
		halfOpen   = "SYNs to many hosts that do not answer"
		unanswered = "datagrams to many hosts that do not answer"
	)
	scanned(t, func(b *scanBench) error {
		caches := []*ebpf.Memory{b.flows, b.verdicts, b.hops}
		before := make([][]byte, len(caches))
		for i, m := range caches {
			var err error
			if before[i], err = content(m); err != nil {
				return err
			}
		}
		o := &b.datapath.Objects
		for _, scan := range []struct {
			name    string
			program *ebpf.Program
			ifindex uint32
			at      int // of three bytes that are others in each packet
			frame   []byte
		}{
			{"from many hosts to an egress address", o.PilUplinkIn, b.uplinkIfindex(), 14 + 8 + 12,
				b.onWire(between(outsideHost, b.b1.egress(), answers))},
			{"to many ports of an egress address", o.PilUplinkIn, b.uplinkIfindex(), 14 + 40,
				b.onWire(between(outsideHost, b.b1.egress(), answers))},
			{"to many egress addresses", o.PilUplinkIn, b.uplinkIfindex(), 14 + 24 + 13,
				b.onWire(between(outsideHost, b.b1.egress(), answers))},
			{"to many ports of a gateway", o.PilUplinkIn, b.uplinkIfindex(), 14 + 40,
				b.onWire(between(ownHost, b.gateway, answers))},
			{"to many hosts that rules deny", o.PilContainer, b.b1.ifindex(), 14 + 24 + 12,
				b.frame(b.sent(deniedHost, question))},
			{halfOpen, o.PilContainer, b.b1.ifindex(), 14 + 24 + 12,
				b.frame(b.sent(outsideHost, tcp(5000, 80, packet.SYN)))},
			{unanswered, o.PilContainer, b.b1.ifindex(), 14 + 24 + 12, b.frame(b.sent(outsideHost, question))},
			{"in the tunnel, to many ports", o.PilUplinkIn, b.uplinkIfindex(), 14 + 40 + 40,
				b.onWire(tunnelled(b.far.prefix, b.prefix, between(farHost, b.b1.plain(), answers)))},
		} {
			for k := range uint32(packets) {
				copy(scan.frame[scan.at:], []byte{byte(k >> 8), byte(k), byte(k * 7)})
				verdict, err := scan.program.Run(
					&ebpf.RunOptions{Data: scan.frame, Context: skb{Ifindex: scan.ifindex}})
				if err != nil {
					return err
				}
				// An error goes to the container as its own packet, which is redirected.
				if verdict != verdictDrop && scan.program != o.PilContainer {
					return fmt.Errorf("%s: verdict %d", scan.name, verdict)
				}
			}
			for i, m := range caches {
				now, err := content(m)
				if err != nil {
					return err
				}
				mayTake := m == b.flows && (scan.name == halfOpen || scan.name == unanswered)
				if !bytes.Equal(now, before[i]) && !mayTake {
					t.Errorf("%s: cache %d has changed", scan.name, i)
				}
				before[i] = now
			}
		}
		if n := b.drops(t)["malformed"]; n > 0 {
			t.Errorf("%d packets were malformed", n)
		}
		return nil
	})
}
