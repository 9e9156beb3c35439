package demo

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// attacker is the container that sends the attacks, with raw sockets.
const attacker = "r1"

// attack is a number of packets, and the drop reason that must count them.
type attack struct {
	name   string
	n      int
	reason string
	frame  func(k int) []byte
}

// attacks sends packets that must be dropped. Each drop counter must rise by exactly the number of its packets, and no
// packet may arrive. After the attacks, each capture must see a sentinel, which proves that the capture works.
func (p *proof) attacks(ctx context.Context) error {
	ns, err := p.lab.Namespace(attacker)
	if err != nil {
		return err
	}
	defer ns.Close()
	inject, err := packet.NewInjector(ns, lab.Interface)
	if err != nil {
		return err
	}
	defer inject.Close()
	marker := packet.NewSentinel()
	tried, err := p.craft(ctx, inject, marker)
	if err != nil {
		return err
	}
	watched, err := p.watch()
	if err != nil {
		return err
	}
	defer func() {
		for _, w := range watched {
			w.capture.Close()
			w.sender.Close()
		}
	}()
	before, err := p.drops(ctx)
	if err != nil {
		return err
	}

	node := p.node(attacker)
	title := "5  Attacks, from inside " + attacker
	sum := map[string]uint64{}
	for _, a := range tried {
		if err := inject.Burst(a.n, a.frame); err != nil {
			return err
		}
		start := sum[a.reason]
		sum[a.reason] += uint64(a.n)
		rise, err := p.dropsSince(ctx, before, total(sum))
		if err != nil {
			return err
		}
		got := rise[node][a.reason] - start
		p.check(got == uint64(a.n) && maps.Equal(rise[node], sum),
			"5: %s: sent %d, %s rose by %d; all of %s: %v, want %v", a.name, a.n, a.reason, got, node, rise[node], sum)
		p.print("%-46s%-42sdropped %-10s%s", title, a.name, humanize.Grouped(got), a.reason)
		title = ""
	}

	arrived, err := p.arrivals(ctx, watched, marker)
	if err != nil {
		return err
	}
	// Read the counters again: the sentinels have arrived, so no earlier packet is in transit.
	rise, err := p.dropsSince(ctx, before, total(sum))
	if err != nil {
		return err
	}
	for _, n := range spec.Nodes {
		want := sum
		if n != node {
			want = map[string]uint64{}
		}
		p.check(maps.Equal(rise[n], want), "5: after all attacks, drops on %s rose by %v, want %v", n, rise[n], want)
	}
	if p.check(arrived == 0, "5: %d attack packets arrived, want none", arrived) {
		p.print("%-46sno packet arrived (%d captures, each saw its sentinel)", "", len(watched))
	}
	return nil
}

func (p *proof) node(container string) string {
	i := slices.IndexFunc(spec.Containers, func(c lab.Container) bool { return c.Name == container })
	return spec.Containers[i].Node
}

func total(drops map[string]uint64) (sum uint64) {
	for _, n := range drops {
		sum += n
	}
	return sum
}

// craft builds the attacks. All packets contain the marker, so that arrivals recognizes them.
func (p *proof) craft(ctx context.Context, inject *packet.Injector, marker packet.Sentinel) ([]attack, error) {
	me, err1 := p.lab.Container(attacker)
	mate, err2 := p.lab.Container("r2")
	victim, err3 := p.lab.Container("b3")
	gateway, err4 := p.lab.Gateway(attacker)
	key, err5 := p.key(ctx, me.Tenant)
	for _, err := range []error{err1, err2, err3, err4, err5} {
		if err != nil {
			return nil, err
		}
	}
	// A ciphertext in the private prefix that decrypts under red's key to an address of blue on b3's node.
	_, forged, err := address.NewCipher(key).Draw(address.DefaultPlan().Private, address.Split(victim.Plaintext))
	if err != nil {
		return nil, err
	}
	frame := func(change func(*packet.Packet)) func(int) []byte {
		pkt := packet.Packet{Source: me.Address, Destination: mate.Address,
			Body: packet.UDP{SourcePort: 1, DestinationPort: 9, Payload: marker[:]}}
		change(&pkt)
		b := pkt.Frame(gateway, inject.MAC())
		return func(int) []byte { return b }
	}
	to := func(a netip.Addr) func(*packet.Packet) { return func(p *packet.Packet) { p.Destination = a } }
	random := func(int) []byte {
		return packet.Packet{Source: me.Address, Destination: randomPrivate(),
			Body: packet.UDP{SourcePort: 1, DestinationPort: 9, Payload: marker[:]}}.Frame(gateway, inject.MAC())
	}
	ipv4 := packet.Frame(gateway, inject.MAC(), packet.EtherTypeIPv4, append([]byte{0x45, 0, 0, 36}, marker[:]...))
	return []attack{
		{"100,000 random addresses", 100_000, undecryptable, random},
		{"blue's b3 at its encrypted address", 1, undecryptable, frame(to(victim.Address))},
		{"blue's b3 at its plaintext address", 1, "dst-not-private", frame(to(victim.Plaintext))},
		{"an address of blue under red's own key", 1, "tenant-mismatch", frame(to(forged))},
		{
			"another container's address as source",
			1,
			"src-not-own",
			frame(func(p *packet.Packet) { p.Source = mate.Address }),
		},
		{"a routing header", 1, "routing-header", frame(func(p *packet.Packet) {
			p.Extensions = []packet.Extension{{Type: packet.Routing, Data: make([]byte, 6)}}
		})},
		{"a neighbour advertisement", 1, "nd-forbidden", frame(func(p *packet.Packet) {
			p.HopLimit, p.Body = 255, packet.ICMP{Type: packet.NeighborAdvertisement, Payload: marker[:]}
		})},
		{"IPv4", 1, "not-ip6", func(int) []byte { return ipv4 }},
	}, nil
}

func randomPrivate() netip.Addr {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], rand.Uint64())
	binary.BigEndian.PutUint64(b[8:], rand.Uint64())
	b[0] = 0xfc
	return netip.AddrFrom16(b)
}

// watcher is a capture, with the sender and the destination of the sentinel that the capture must see.
type watcher struct {
	capture *packet.Capture
	sender  *netns.Namespace
	to      netip.Addr
}

// watch starts captures in all other containers, and on the fabric at the attacker's node.
func (p *proof) watch() ([]watcher, error) {
	var all []watcher
	for _, w := range []struct{ namespace, device, from, to string }{
		{"b1", lab.Interface, "b2", "b1"},
		{"b2", lab.Interface, "b1", "b2"},
		{"b3", lab.Interface, "b1", "b3"},
		{"r2", lab.Interface, attacker, "r2"},
		{"r3", lab.Interface, attacker, "r3"},
		{lab.Router, p.node(attacker), attacker, "r2"},
	} {
		capture, err := p.capture(w.namespace, w.device, packet.IncomingOnly)
		if err != nil {
			return all, err
		}
		to, err := p.lab.Address(w.to)
		if err != nil {
			return all, err
		}
		sender, err := p.lab.Namespace(w.from)
		if err != nil {
			return all, err
		}
		all = append(all, watcher{capture, sender, to})
	}
	return all, nil
}

// arrivals sends a sentinel to each capture, and counts the attack packets that the capture saw before it.
func (p *proof) arrivals(ctx context.Context, watched []watcher, marker packet.Sentinel) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, waitTime)
	defer cancel()
	arrived := 0
	for _, w := range watched {
		sentinel := packet.NewSentinel()
		r, err := packet.Ping(ctx, w.sender, w.to, packet.PingOptions{Payload: sentinel[:]})
		if err != nil {
			return arrived, err
		}
		if r.Received != 1 {
			return arrived, fmt.Errorf("no answer from %v, want one", w.to)
		}
		seen, err := w.capture.Until(ctx, sentinel.In)
		if err != nil {
			return arrived, err
		}
		for _, frame := range seen {
			if marker.In(frame) {
				arrived++
			}
		}
	}
	return arrived, nil
}
