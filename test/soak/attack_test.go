package soak_test

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/address"
	speaker "pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

const forgeries = 20 // frames of each attack

// attack sends packets that no container may send. The node must count each frame for its drop reason.
func (s *soak) attack() {
	everyone := s.names(func(*container) bool { return true })
	if len(everyone) == 0 {
		return
	}
	victim := s.up[s.pick(everyone)]
	switch {
	case onILA:
		s.attackILA(victim)
		return
	case onEVPN:
		s.attackEVPN(victim)
		return
	}
	p := packet.Packet{Source: victim.Plaintext, Destination: victim.Plaintext,
		Body: packet.UDP{SourcePort: 7, DestinationPort: 7, Payload: []byte("forged")}}
	elsewhere := netip.MustParsePrefix(s.prefix(s.pick(slices.DeleteFunc(slices.Clone(nodes),
		func(n string) bool { return n == victim.Node }))))
	from := func(tenant uint32) netip.Addr {
		return address.Plain{Node: elsewhere, Tenant: address.TenantID(tenant), App: 1, Index: 1}.Addr()
	}
	others := slices.DeleteFunc(slices.Clone(tenants), func(t string) bool { return t == victim.Tenant })
	graves := slices.DeleteFunc(slices.Sorted(maps.Keys(s.gone)), func(name string) bool {
		g := s.gone[name]
		return !netip.MustParsePrefix(s.prefix(g.node)).Contains(g.plaintext)
	})
	switch s.random.IntN(5) {
	case 0:
		p.Source = from(s.current[s.pick(others)])
		s.forge("another tenant", "tenant-mismatch", victim.Node, p)
	case 1:
		retired := s.retired[victim.Tenant]
		if len(retired) == 0 {
			return
		}
		p.Source = from(retired[s.random.IntN(len(retired))])
		s.forge("retired id", "tenant-mismatch", victim.Node, p)
	case 2:
		s.forge("own prefix", "own-source", victim.Node, p)
	case 3:
		if len(graves) == 0 {
			return
		}
		g := s.gone[s.pick(graves)]
		p.Source, p.Destination = from(s.current[g.tenant]), g.plaintext
		if netip.MustParsePrefix(s.prefix(g.node)).Contains(p.Source) {
			return // the source is of the same node
		}
		s.forge("released address", "no-endpoint", g.node, p)
	case 4:
		s.steal(victim, p)
	}
}

// attackILA is attack on network ila.
func (s *soak) attackILA(victim *container) {
	here := s.locator(s.prefix(victim.Node))
	elsewhere := s.pick(slices.DeleteFunc(slices.Clone(nodes), func(n string) bool { return n == victim.Node }))
	p := packet.Packet{Source: ila.ToWire(victim.Address, here), Destination: ila.ToWire(victim.Address, here),
		Body: packet.UDP{SourcePort: 7, DestinationPort: 7, Payload: []byte("forged")}}
	// of returns the address of a container that need not exist.
	of := func(tenant string) netip.Addr {
		b := ila.Range(address.TenantID(s.current[tenant])).Addr().As16()
		b[12], b[15] = 0xee, 1
		return netip.AddrFrom16(b)
	}
	others := slices.DeleteFunc(slices.Clone(tenants), func(t string) bool { return t == victim.Tenant })
	switch s.random.IntN(5) {
	case 0:
		p.Source = ila.ToWire(of(s.pick(others)), s.locator(s.prefix(elsewhere)))
		s.forge("another tenant", "tenant-mismatch", victim.Node, p)
	case 1:
		peers := s.names(func(c *container) bool { return c.Tenant == victim.Tenant && c.Node != victim.Node })
		if len(peers) == 0 {
			return
		}
		peer := s.up[s.pick(peers)]
		third := slices.DeleteFunc(slices.Clone(nodes), func(n string) bool {
			return n == victim.Node || n == peer.Node
		})
		p.Source = ila.ToWire(peer.Address, s.locator(s.prefix(third[0])))
		s.forge("another locator", "locator-mismatch", victim.Node, p)
	case 2:
		s.forge("own prefix", "own-source", victim.Node, p)
	case 3:
		graves := slices.Sorted(maps.Keys(s.gone))
		if len(graves) == 0 {
			return
		}
		g := s.gone[s.pick(graves)]
		elsewhere = s.pick(slices.DeleteFunc(slices.Clone(nodes), func(n string) bool { return n == g.node }))
		p.Source = ila.ToWire(of(g.tenant), s.locator(s.prefix(elsewhere)))
		p.Destination = ila.ToWire(g.plaintext, s.locator(s.prefix(g.node)))
		s.forge("released address", "no-endpoint", g.node, p)
	case 4:
		s.steal(victim, p)
	}
}

// attackEVPN is attack on network evpn.
func (s *soak) attackEVPN(victim *container) {
	elsewhere := s.pick(slices.DeleteFunc(slices.Clone(nodes), func(n string) bool { return n == victim.Node }))
	others := slices.DeleteFunc(slices.Clone(tenants), func(t string) bool { return t == victim.Tenant })
	inner := packet.Packet{Source: victim.Address.Next(), Destination: victim.Address,
		Body: packet.UDP{SourcePort: 7, DestinationPort: 7, Payload: []byte("forged")}}
	forge := func(kind, reason, node string, from netip.Addr, tenant string, inner packet.Packet) {
		to := s.vtep(s.prefix(node))
		router := speaker.RouterMAC(to)
		frame := inner.Frame(router[:], router[:])
		s.forge(kind, reason, node, packet.Packet{Source: from, Destination: to, Body: packet.UDP{
			SourcePort: 7, DestinationPort: pipeline.UDPPort, Payload: packet.VXLAN(s.current[tenant], 1, frame),
		}})
	}
	far := s.vtep(s.prefix(elsewhere))
	switch s.random.IntN(5) {
	case 0:
		forge("another tenant", "no-route", victim.Node, far, s.pick(others), inner)
	case 1:
		forge("stranger", "foreign-unknown", victim.Node, netip.MustParseAddr("192.0.2.9"), victim.Tenant, inner)
	case 2:
		forge("own prefix", "own-source", victim.Node, s.vtep(s.prefix(victim.Node)), victim.Tenant, inner)
	case 3:
		graves := slices.DeleteFunc(slices.Sorted(maps.Keys(s.gone)), func(name string) bool {
			g := s.gone[name]
			hosts := s.names(func(c *container) bool { return c.Tenant == g.tenant && c.Node == g.node })
			reused := s.names(func(c *container) bool { return c.Address == g.plaintext })
			return len(hosts) == 0 || len(reused) > 0
		})
		if len(graves) == 0 {
			return
		}
		g := s.gone[s.pick(graves)]
		elsewhere = s.pick(slices.DeleteFunc(slices.Clone(nodes), func(n string) bool { return n == g.node }))
		inner.Destination = g.plaintext
		forge("released address", "no-endpoint", g.node, s.vtep(s.prefix(elsewhere)), g.tenant, inner)
	case 4:
		s.steal(victim, inner)
	}
}

// forge sends from the fabric's port to a node, where the fabric does not check sources.
func (s *soak) forge(kind, reason, node string, p packet.Packet) {
	s.did("attack: "+kind, "%v to %v on %s", p.Source, p.Destination, node)
	s.inject(lab.Router, node, node, lab.Uplink, reason, node, p)
}

// steal sends a packet with a wrong source from a container.
func (s *soak) steal(thief *container, p packet.Packet) {
	p.Source, p.Destination = netip.MustParseAddr("fc00::1"), thief.Address
	s.did("attack: stolen source", "%s on %s", thief.Name, thief.Node)
	gateway, err := s.lab.Gateway(thief.Name)
	s.must(err)
	ns, err := s.lab.Namespace(thief.Name)
	s.must(err)
	defer ns.Close()
	out, err := packet.NewInjector(ns, lab.Interface)
	s.must(err)
	defer out.Close()
	s.counted("src-not-own", thief.Node, out, p.Frame(gateway, out.MAC()))
}

// inject sends frames through a device to the device at the other end of the link.
func (s *soak) inject(in, device, receiver, receiving, reason, at string, p packet.Packet) {
	ns, err := s.lab.Namespace(in)
	s.must(err)
	defer ns.Close()
	out, err := packet.NewInjector(ns, device)
	s.must(err)
	defer out.Close()
	far, err := s.lab.Namespace(receiver)
	s.must(err)
	defer far.Close()
	to, err := packet.NewInjector(far, receiving)
	s.must(err)
	defer to.Close()
	s.counted(reason, at, out, p.Frame(to.MAC(), out.MAC()))
}

// counted checks that a drop counter increases by the number of sent frames.
func (s *soak) counted(reason, node string, out *packet.Injector, frame []byte) {
	drops := func() uint64 {
		all, err := s.lab.Drops(s.Context(), node)
		s.must(err)
		return all[reason]
	}
	before := drops()
	s.must(out.Burst(forgeries, func(int) []byte { return frame }))
	for end := time.Now().Add(5 * time.Second); drops() < before+forgeries && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
	s.answered("drops of an attack", drops()-before, forgeries, "%s on %s", reason, node)
}
