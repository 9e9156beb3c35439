package attack_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

var egressSpec = lab.Spec{
	Nodes:   []string{"n1", "n2"},
	Outside: []lab.OutsideHost{{Name: "internet"}},
	Tenants: []lab.Tenant{
		{Name: "blue", Egress: []lab.EgressRule{{To: netip.MustParsePrefix("::/0"), Action: lab.AllowEgress}}},
		{Name: "red"},
	},
	Containers: []lab.Container{
		{Name: "mallory", Node: "n1", Tenant: "blue"}, {Name: "b1", Node: "n1", Tenant: "blue"},
		{Name: "b2", Node: "n2", Tenant: "blue"}, {Name: "r1", Node: "n1", Tenant: "red"},
		{Name: "r2", Node: "n2", Tenant: "red"},
	},
}

// TestEgressAttacks attacks egress: by egress addresses that are not the sender's, from outside without a session or
// with an address like a container's, and by destinations that no rule can allow.
func TestEgressAttacks(t *testing.T) {
	t.Parallel()
	b := newBed(t, egressSpec, [][2]string{{"mallory", "b1"}, {"mallory", "b2"}, {"r2", "r1"}, {"r1", "r2"}})
	seen := map[string]netip.Addr{}
	for _, c := range []string{"mallory", "b1", "b2"} {
		seen[c] = b.seenOutside(t, c)
	}
	b.openAgain(t)
	for _, a := range b.egress(t, seen) {
		t.Run(a.name, func(t *testing.T) { b.try(t, a) })
	}
}

// openAgain opens the captures anew, without the packets so far.
func (b *bed) openAgain(t *testing.T) {
	t.Helper()
	for name := range b.captures {
		place, device := name, lab.Interface
		if node, is := strings.CutPrefix(name, onRouter); is {
			place, device = lab.Router, node
		}
		b.open(t, name, place, device, true)
	}
}

// routed is an attack of packets that the fabric sends to a node.
func (b *bed) routed(node, name string, why dropreason.Reason, packets ...packet.Packet) attack {
	a := attack{name: name, from: onRouter + node, why: why, at: node, ports: 1}
	a.frames = frames(b.inject[onNode+node], b.inject[onRouter+node], packets)
	return a
}

// hosted is an attack of packets that a process of a node sends.
func (b *bed) hosted(node, name string, why dropreason.Reason, packets ...packet.Packet) attack {
	a := attack{name: name, from: onNode + node, why: why, at: node}
	a.frames = frames(b.inject[onRouter+node], b.inject[onNode+node], packets)
	return a
}

// frames repeats packets from one device to another.
func frames(to, from *packet.Injector, packets []packet.Packet) (all [][]byte) {
	for _, p := range packets {
		for range many {
			all = append(all, packet.Frame(to.MAC(), from.MAC(), packet.EtherTypeIPv6, p.Marshal()))
		}
	}
	return all
}

// seenOutside returns the address at which a host outside sees a container.
func (b *bed) seenOutside(t *testing.T, container string) netip.Addr {
	t.Helper()
	outside, err := b.Namespace("internet")
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	capture, err := packet.NewCapture(outside, lab.Uplink, packet.IncomingOnly)
	if err != nil {
		t.Fatal(err)
	}
	defer capture.Close()
	sentinel := packet.NewSentinel()
	for {
		e, err := b.Ping(b.ctx, container, "internet", packet.PingOptions{Payload: sentinel[:]})
		if err != nil {
			t.Fatal(err)
		}
		if e.Reached() {
			break
		}
		time.Sleep(tryAgain)
	}
	all, err := capture.Until(b.ctx, sentinel.In)
	if err != nil {
		t.Fatal(err)
	}
	p, err := all[len(all)-1].Packet()
	if err != nil {
		t.Fatal(err)
	}
	return p.Source
}

// egress returns the attacks. seen are the egress addresses of containers.
func (b *bed) egress(t *testing.T, seen map[string]netip.Addr) []attack {
	mallory, b1, r2 := b.container(t, "mallory"), b.container(t, "b1"), b.container(t, "r2")
	n1, n2 := b.prefix(t, "n1"), b.prefix(t, "n2")
	internet, err := b.Address("internet")
	if err != nil {
		t.Fatal(err)
	}
	own := mallory.Address
	// A host outside whose address is like one of blue, except for its prefix.
	outside := netip.MustParsePrefix("2001:db8:f00d::/64")
	likeBlue := address.Plain{Node: outside, Tenant: b.tenants["blue"].id, App: address.AppID(b1.App), Index: 1}.Addr()
	var protected, local []packet.Packet
	for _, to := range []string{
		"::1", "fd00:ec2::254", "64:ff9b::a00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1",
	} {
		protected = append(protected, datagram(own, netip.MustParseAddr(to)))
	}
	protected = append(protected, datagram(own, netip.MustParseAddr("2001:db8:70:1::2"))) // n1's uplink
	for _, to := range []netip.Addr{
		n1.Addr().Next(), n2.Addr().Next(), r2.Plaintext, seen["b1"], seen["b2"], tenant.EgressTunnel(n2),
	} {
		local = append(local, datagram(own, to))
	}
	return []attack{
		from("egress addresses as source", "mallory", dropreason.SrcNotOwn, "n1", 0,
			datagram(seen["mallory"], internet), datagram(seen["b1"], internet), datagram(seen["b2"], internet)),
		from("protected", "mallory", dropreason.EgressDenied, "n1", 0, protected...),
		from("local", "mallory", dropreason.DstNotPrivate, "n1", 0, local...),
		from("a tenant without a rule", "r1", dropreason.DstNotPrivate, "n1", 0,
			datagram(b.container(t, "r1").Address, internet)),
		b.routed("n1", "inbound without a session", dropreason.NoSession,
			datagram(internet, seen["mallory"]), datagram(internet, seen["b1"])),
		b.routed("n1", "inbound to a plaintext address", dropreason.TenantMismatch, datagram(internet, b1.Plaintext)),
		b.routed("n1", "identity from outside", dropreason.TenantMismatch, datagram(likeBlue, b1.Plaintext)),
		b.routed("n1", "identity from outside to an egress address", dropreason.NoSession,
			datagram(likeBlue, seen["b1"])),
		b.hosted("n1", "a host process", dropreason.HostClaimsTenant,
			datagram(seen["mallory"], internet), datagram(seen["mallory"], r2.Plaintext)),
		b.hosted("n2", "another node's process", dropreason.HostClaimsTenant, datagram(seen["b2"], b1.Plaintext)),
		b.routed("n1", "an egress address of another node as source", dropreason.TenantMismatch,
			datagram(seen["b2"], b1.Plaintext)),
	}
}
