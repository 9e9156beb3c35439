package accelerate_test

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/netns"
)

// dial opens a connection to an address that rules translate, and accepts it at another one.
func dial(
	t *testing.T,
	from *netns.Namespace,
	to netip.AddrPort,
	server *netns.Namespace,
	at netip.AddrPort,
) conversation {
	t.Helper()
	l := inside(t, server, func() (net.Listener, error) { return net.Listen("tcp", at.String()) })
	defer l.Close()
	var c conversation
	c.client = inside(t, from, func() (net.Conn, error) {
		return net.DialTimeout("tcp", to.String(), 10*time.Second)
	})
	var err error
	c.server, err = l.Accept()
	must(t, err)
	t.Cleanup(func() { c.client.Close(); c.server.Close() })
	return c
}

// With rules as kube-proxy's, connections to a service take the overlay's way, and direct ones the cache, also to the
// same container and port. Rules in the container, such as those of a sidecar, work with the cache.
func TestServices(t *testing.T) {
	both := flannel(t)
	n, client, server := both[0], both[0].only(), both[1].only()
	for _, rule := range []string{
		"-N KUBE-FORWARD", "-A FORWARD -m comment --comment kubernetes_forwarding -j KUBE-FORWARD",
		"-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP",
		"-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT",
		"-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-t nat -N KUBE-SERVICES", "-t nat -N KUBE-SEP", "-t nat -N KUBE-POSTROUTING", "-t nat -N KUBE-MARK-MASQ",
		"-t nat -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000",
		"-t nat -A PREROUTING -j KUBE-SERVICES", "-t nat -A POSTROUTING -j KUBE-POSTROUTING",
		"-t nat -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN",
		"-t nat -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000",
		"-t nat -A KUBE-POSTROUTING -j MASQUERADE --random-fully",
		"-t nat -A KUBE-SERVICES -d 10.96.0.7 -p tcp -m statistic --mode random --probability 1 -j KUBE-SEP",
		"-t nat -A KUBE-SEP -p tcp -j DNAT --to-destination " + address(t, server).String() + ":7000",
	} {
		ip(t, n.ns, "! iptables-nft -w %s", rule)
	}
	d := n.accelerate(t)
	backend := netip.AddrPortFrom(address(t, server), 7000)
	service := dial(t, client, netip.MustParseAddrPort("10.96.0.7:80"), server, backend)
	must(t, service.echo(50))
	s := d.until(t, "packets that are not learnt", func(s accelerate.Status) bool {
		return s.Egress.NotLearnt["nat"] > 40
	})
	if s.Egress.Hits != 0 || s.Entries.Flows != 0 {
		t.Errorf("the connection to the service is cached: %+v, %+v", s.Entries, s.Egress)
	}
	direct := dial(t, client, backend, server, backend)
	must(t, direct.echo(50))
	d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > 40 && s.Ingress.Hits > 40 })
	must(t, service.echo(50))

	// The sidecar's container redirects what comes in.
	ip(t, client, "! iptables-nft -w -t nat -A PREROUTING -p tcp --dport 8080 -j REDIRECT --to-ports 15006")
	inbound := netip.AddrPortFrom(address(t, client), 8080)
	before, err := d.Status(t.Context())
	must(t, err)
	sidecar := dial(t, server, inbound, client, netip.AddrPortFrom(address(t, client), 15006))
	must(t, sidecar.echo(50))
	d.until(t, "hits", func(s accelerate.Status) bool { return s.Ingress.Hits > before.Ingress.Hits+40 })
}

// Packets that conntrack asks NAT rules for have no bits of the cache in their marks, so these rules may compare whole
// marks, as those of Flannel do. SYN packets never have a mark, datagrams might.
func TestMarksInNATRules(t *testing.T) {
	both := flannel(t)
	n, client, server := both[0], both[0].only(), both[1].only()
	for _, rule := range []string{
		"POSTROUTING -o flannel.1 -m mark ! --mark 0 -j SNAT --to-source 10.244.1.77",
		"PREROUTING -i flannel.1 -p udp -m mark ! --mark 0 -j REDIRECT --to-ports 9",
	} {
		ip(t, n.ns, "! iptables-nft -w -t nat -A %s", rule)
	}
	d := n.accelerate(t)
	for _, ends := range [][2]*netns.Namespace{{client, server}, {server, client}} {
		at := net.UDPAddrFromAddrPort(netip.AddrPortFrom(address(t, ends[1]), 7002))
		receiver := inside(t, ends[1], func() (*net.UDPConn, error) { return net.ListenUDP("udp", at) })
		sender := inside(t, ends[0], func() (*net.UDPConn, error) { return net.DialUDP("udp", nil, at) })
		before, err := d.Status(t.Context())
		must(t, err)
		for range 50 {
			_, err := sender.Write([]byte("datagram"))
			must(t, err)
			must(t, receiver.SetDeadline(time.Now().Add(10*time.Second)))
			b := make([]byte, 9)
			_, from, err := receiver.ReadFromUDPAddrPort(b)
			must(t, err)
			if want := address(t, ends[0]); from.Addr().Unmap() != want {
				t.Fatalf("a datagram comes from %v, want %v", from, want)
			}
			_, err = receiver.WriteToUDPAddrPort(b, from)
			must(t, err)
			must(t, sender.SetDeadline(time.Now().Add(10*time.Second)))
			_, err = sender.Read(b)
			must(t, err)
		}
		d.until(t, "hits", func(s accelerate.Status) bool {
			return s.Egress.Hits > before.Egress.Hits+40 && s.Ingress.Hits > before.Ingress.Hits+40
		})
		receiver.Close()
		sender.Close()
	}
}

// A bridge that does not know the port of a container floods the frames to it, to the oldest port last. Only the
// container itself gets them, by the cache too.
func TestFlooding(t *testing.T) {
	both := flannel(t)
	n := both[0]
	c7 := n.add(t, "veth7", 7)
	ip(t, n.ns, `
		link set veth7 down
		! bridge link set dev veth7 learning off
		link set veth7 up`) // so it forgets the MAC
	d := n.accelerate(t)
	c := talk(t, c7, both[1].only())
	must(t, c.echo(200))
	s := d.until(t, "hits", func(s accelerate.Status) bool { return s.Egress.Hits > 150 && s.Ingress.Hits > 150 })
	if s.Ingress.NotLearnt["flooded"] == 0 {
		t.Errorf("no frame was flooded: %+v", s.Ingress)
	}
}
