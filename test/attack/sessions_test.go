package attack_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
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
	liveFlows  = 20   // of a bystander of the attackers' tenant
	batch      = 10   // of new flows
	floodTime  = 3 * time.Second
	echoPort   = 7
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

// allowConnections lets in no datagrams but those to the echo server: its answers need the session of the question.
const allowConnections = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: connections, namespace: default}
spec:
  podSelector: {}
  policyTypes: [Ingress]
  ingress: [{ports: [{protocol: TCP}, {protocol: UDP, port: 7}]}]
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
			{Name: "calm1", Node: "n1", Tenant: "blue"}, {Name: "calm2", Node: "n1", Tenant: "blue"},
		},
	}
	for i := range attackers {
		s.Containers = append(s.Containers, lab.Container{Name: fmt.Sprintf("b%d", i), Node: "n1", Tenant: "blue"})
	}
	b := &bed{Lab: labtest.New(t, s), spec: s, ctx: labtest.Context(t), inject: map[string]*packet.Injector{}}
	for tenant, policy := range map[string]string{"blue": allowConnections, "red": allowAll} {
		b.apply(t, tenant, policy)
		b.untilReceived(t, "n1", tenant)
	}
	server, _ := b.echoServer(t, "r2")
	quiet, push := b.echoServer(t, "calm2")
	live := b.dial(t, "calm1", quiet, liveFlows)
	defer func() {
		for _, c := range live {
			c.Close()
		}
	}()
	if n := exchange(live, nil); n != liveFlows {
		t.Fatalf("%d of %d flows of the bystander were answered before the attack", n, liveFlows)
	}
	if n := b.answered(t, "r1", server); n != newFlows {
		t.Fatalf("%d of %d new flows were answered before the attack", n, newFlows)
	}

	attackers := b.attackers(t)
	if err := b.forge(attackers, 80, handshakes); err != nil {
		t.Fatal(err)
	}
	full := b.sessions(t)
	if full.Used < full.Capacity*95/100 {
		t.Fatalf("the attack left the table with %d of %d sessions", full.Used, full.Capacity)
	}
	if n := b.answered(t, "r1", server); n < newFlows*99/100 {
		t.Errorf("%d of %d new flows of another tenant were answered after the table was filled", n, newFlows)
	}
	flooded := make(chan error, 1)
	until := time.Now().Add(floodTime)
	go func() { flooded <- b.flood(attackers, until) }()
	asked, answered := 0, 0
	for time.Now().Before(until) {
		asked, answered = asked+batch, answered+b.ask(t, "r1", server)
	}
	if err := <-flooded; err != nil {
		t.Fatal(err)
	}
	if answered < asked*99/100 || asked < newFlows/3 {
		t.Errorf("%d of %d new flows of another tenant were answered during the flood", answered, asked)
	}
	// The server sends first, so that a lost session does not begin anew.
	if n := exchange(live, push); n != liveFlows {
		t.Errorf("%d of %d sessions of a bystander are left after the flood", n, liveFlows)
	}

	for i := range attackers {
		if err := b.RemoveContainer(b.ctx, fmt.Sprintf("b%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	// Flows of the other tenant have two sessions each.
	if left := b.sessions(t); int(left.Used) > 3*(asked+3*newFlows) {
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

// attackers returns the containers that attack. Their kernels take no part: the addresses are removed from their
// devices.
func (b *bed) attackers(t *testing.T) (all []lab.ContainerStatus) {
	t.Helper()
	for _, c := range b.Containers() {
		if !strings.HasPrefix(c.Name, "b") {
			continue
		}
		all = append(all, c)
		b.open(t, c.Name, c.Name, lab.Interface, false)
		b.removeAddress(t, c)
	}
	return all
}

// forge has each attacker open connections to a port of the next one, and complete their handshakes.
func (b *bed) forge(attackers []lab.ContainerStatus, port uint16, connections int) error {
	for i, c := range attackers {
		peer := attackers[(i+1)%len(attackers)]
		burst := func(from, to lab.ContainerStatus, reply bool, flags packet.TCPFlags) error {
			return b.inject[from.Name].Burst(connections, func(k int) []byte {
				p := packet.TCP{SourcePort: uint16(10000 + k), DestinationPort: port, Flags: flags}
				if reply {
					p.SourcePort, p.DestinationPort = p.DestinationPort, p.SourcePort
				}
				return toGateway(packet.Packet{Source: from.Address, Destination: to.Address, Body: p}.Marshal())
			})
		}
		if err := errors.Join(
			burst(c, peer, false, packet.SYN),
			burst(peer, c, true, packet.SYN|packet.ACK),
			burst(c, peer, false, packet.ACK),
		); err != nil {
			return err
		}
	}
	return nil
}

// flood forges connections to other ports until a time.
func (b *bed) flood(attackers []lab.ContainerStatus, until time.Time) error {
	for port := uint16(81); time.Now().Before(until); port++ {
		if err := b.forge(attackers[:4], port, handshakes/10); err != nil {
			return err
		}
	}
	return nil
}

func (b *bed) removeAddress(t *testing.T, c lab.ContainerStatus) {
	t.Helper()
	h := b.netlink(t, c.Name)
	link, err := h.LinkByName(lab.Interface)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.AddrDel(link, &netlink.Addr{IPNet: netlink.NewIPNet(net.IP(c.Address.AsSlice()))}); err != nil {
		t.Fatal(err)
	}
}

// echoServer answers datagrams in a container; push sends one to a client without a question.
func (b *bed) echoServer(t *testing.T, name string) (at netip.AddrPort, push func(client netip.AddrPort) error) {
	t.Helper()
	var server *net.UDPConn
	b.in(t, name, func() (err error) {
		server, err = net.ListenUDP("udp6", &net.UDPAddr{IP: net.IPv6unspecified, Port: echoPort})
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
	return netip.AddrPortFrom(b.container(t, name).Address, echoPort), func(client netip.AddrPort) error {
		_, err := server.WriteToUDPAddrPort([]byte("hello"), client)
		return err
	}
}

// dial opens flows from a container to a server.
func (b *bed) dial(t *testing.T, from string, server netip.AddrPort, n int) (flows []*net.UDPConn) {
	t.Helper()
	b.in(t, from, func() error {
		for range n {
			c, err := net.DialUDP("udp6", nil, net.UDPAddrFromAddrPort(server))
			if err != nil {
				return err
			}
			flows = append(flows, c)
		}
		return nil
	})
	return flows
}

// ask opens a batch of flows, and returns how many get an answer.
func (b *bed) ask(t *testing.T, from string, server netip.AddrPort) (answered int) {
	t.Helper()
	flows := b.dial(t, from, server, batch)
	answered = exchange(flows, nil)
	for _, c := range flows {
		c.Close()
	}
	return answered
}

// exchange sends a datagram on each flow, or has push do so from the other end, and returns how many flows receive one.
// It sends three times, because full queues of a device lose packets too.
func exchange(flows []*net.UDPConn, push func(client netip.AddrPort) error) (answered int) {
	for _, c := range flows {
		for range 3 {
			var err error
			if push != nil {
				err = push(c.LocalAddr().(*net.UDPAddr).AddrPort())
			} else {
				_, err = c.Write([]byte("hello"))
			}
			c.SetDeadline(time.Now().Add(time.Second / 2)) //nolint:errcheck // a read that fails counts
			if err == nil {
				_, err = c.Read(make([]byte, 64))
			}
			if err == nil {
				answered++
				break
			}
		}
	}
	return answered
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

// answered opens new flows from a container to a server, and returns how many get an answer. It gives up when too many
// get none.
func (b *bed) answered(t *testing.T, from string, server netip.AddrPort) (n int) {
	t.Helper()
	for asked := batch; asked <= newFlows; asked += batch {
		n += b.ask(t, from, server)
		if asked-n > newFlows/20 {
			break
		}
	}
	return n
}
