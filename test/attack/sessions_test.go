package attack_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/vishvananda/netlink"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

const (
	attackers  = 40
	handshakes = 3000 // of each attacker: two sessions each, more in total than the table has room for
	newFlows   = 300  // of another tenant
)

const allowAll = `
apiVersion: policy.networking.k8s.io/v1alpha2
kind: ClusterNetworkPolicy
metadata: {name: allow}
spec:
  tier: Admin
  priority: 0
  subject: {namespaces: {}}
  ingress: [{action: Accept, from: [{namespaces: {}}]}]
`

// TestSessionTableIsShared: the containers of one tenant fill a node's session table with forged TCP handshakes. New
// flows of another tenant still get sessions. As soon as the attackers are deleted, the table is free again.
func TestSessionTableIsShared(t *testing.T) {
	t.Parallel()
	s := lab.Spec{
		Nodes:   []string{"n1"},
		Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}},
		Containers: []lab.Container{
			{Name: "r1", Node: "n1", Tenant: "red"}, {Name: "r2", Node: "n1", Tenant: "red"},
		},
	}
	for i := range attackers {
		s.Containers = append(s.Containers, lab.Container{Name: fmt.Sprintf("b%d", i), Node: "n1", Tenant: "blue"})
	}
	b := &bed{Lab: labtest.New(t, s), spec: s, ctx: labtest.Context(t), inject: map[string]*packet.Injector{}}
	for _, tenant := range []string{"blue", "red"} {
		b.apply(t, tenant, allowAll)
		b.untilReceived(t, "n1", tenant)
	}
	server := b.echoServer(t, "r2")
	if n := b.answered(t, "r1", server); n != newFlows {
		t.Fatalf("%d of %d new flows were answered before the attack", n, newFlows)
	}

	b.fillSessions(t)
	full := b.sessions(t)
	if full.Used < full.Capacity*95/100 {
		t.Fatalf("the attack left the table with %d of %d sessions", full.Used, full.Capacity)
	}
	if n := b.answered(t, "r1", server); n < newFlows*99/100 {
		t.Errorf("%d of %d new flows of another tenant were answered during the attack", n, newFlows)
	}

	for i := range attackers {
		if err := b.RemoveContainer(b.ctx, fmt.Sprintf("b%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	if left := b.sessions(t); left.Used > 10*newFlows {
		t.Errorf("%d sessions are left of %d after their containers were deleted", left.Used, full.Used)
	}
	if n := b.answered(t, "r1", server); n < newFlows*99/100 {
		t.Errorf("%d of %d new flows were answered after the attackers were deleted", n, newFlows)
	}
}

func (b *bed) apply(t *testing.T, tenant string, documents ...string) {
	t.Helper()
	if _, err := b.Operator().ApplyPolicies(b.ctx,
		connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: tenant, Documents: documents})); err != nil {
		t.Fatal(err)
	}
}

func (b *bed) sessions(t *testing.T) *pilasterv1.Sessions {
	t.Helper()
	status, err := b.Agent("n1").Status(b.ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	return status.Msg.GetPolicies().GetSessions()
}

// fillSessions makes each attacker open connections to the next attacker. It removes the addresses from the attackers'
// devices, so that their kernels do not respond.
func (b *bed) fillSessions(t *testing.T) {
	t.Helper()
	var all []lab.ContainerStatus
	for _, c := range b.Containers() {
		if c.Tenant != "blue" {
			continue
		}
		all = append(all, c)
		b.open(t, c.Name, c.Name, lab.Interface, false)
		b.removeAddress(t, c)
	}
	for i, c := range all {
		peer := all[(i+1)%len(all)]
		burst := func(from, to lab.ContainerStatus, reply bool, flags packet.TCPFlags) {
			if err := b.inject[from.Name].Burst(handshakes, func(k int) []byte {
				p := packet.TCP{SourcePort: uint16(10000 + k), DestinationPort: 80, Flags: flags}
				if reply {
					p.SourcePort, p.DestinationPort = p.DestinationPort, p.SourcePort
				}
				return toGateway(packet.Packet{Source: from.Address, Destination: to.Address, Body: p}.Marshal())
			}); err != nil {
				t.Fatal(err)
			}
		}
		burst(c, peer, false, packet.SYN)
		burst(peer, c, true, packet.SYN|packet.ACK)
		burst(c, peer, false, packet.ACK)
	}
}

func (b *bed) removeAddress(t *testing.T, c lab.ContainerStatus) {
	t.Helper()
	ns, err := b.Namespace(c.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	link, err := h.LinkByName(lab.Interface)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.AddrDel(link, &netlink.Addr{IPNet: netlink.NewIPNet(net.IP(c.Address.AsSlice()))}); err != nil {
		t.Fatal(err)
	}
}

// echoServer answers datagrams in a container.
func (b *bed) echoServer(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	var server *net.UDPConn
	b.in(t, name, func() (err error) {
		server, err = net.ListenUDP("udp6", &net.UDPAddr{IP: net.IPv6unspecified})
		return err
	})
	t.Cleanup(func() { server.Close() })
	go func() {
		packet := make([]byte, 64)
		for {
			n, from, err := server.ReadFromUDPAddrPort(packet)
			if err != nil {
				return
			}
			server.WriteToUDPAddrPort(packet[:n], from) //nolint:errcheck // the client counts responses
		}
	}()
	return netip.AddrPortFrom(b.container(t, name).Address, server.LocalAddr().(*net.UDPAddr).AddrPort().Port())
}

func (b *bed) in(t *testing.T, name string, do func() error) {
	t.Helper()
	ns, err := b.Namespace(name)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if err := ns.Do(do); err != nil {
		t.Fatal(err)
	}
}

// answered opens new flows from a container to a server, one after the other, and returns how many get a response. It
// stops early if more than 5 % get no response.
func (b *bed) answered(t *testing.T, from string, server netip.AddrPort) (n int) {
	t.Helper()
	b.in(t, from, func() error {
		for i := range newFlows {
			if i-n > newFlows/20 {
				break
			}
			c, err := net.DialUDP("udp6", nil, net.UDPAddrFromAddrPort(server))
			if err != nil {
				return err
			}
			answer := make([]byte, 64)
			c.SetDeadline(time.Now().Add(time.Second)) //nolint:errcheck // a failed read counts as no response
			_, err = c.Write([]byte("hello"))
			if err == nil {
				_, err = c.Read(answer)
			}
			if err == nil {
				n++
			}
			c.Close()
		}
		return nil
	})
	return n
}
