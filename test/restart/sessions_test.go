package restart_test

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

const (
	web         = 80
	silent      = 1000  // first of the ports that do not respond
	perSilent   = 50000 // connections, from different ports, to one of these ports
	connections = 100
)

// isolated is a policy under which the server cannot open connections and can only send replies.
const isolated = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: server}
spec:
  podSelector: {matchLabels: {app: server}}
  policyTypes: [Ingress, Egress]
  ingress:
  - ports: [{port: 80}, {port: 1000, endPort: 1999}]
`

// unconcerned is the format of a policy for a container that is not part of the test. Each update changes it.
const unconcerned = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: other}
spec:
  podSelector: {matchLabels: {app: other}}
  ingress:
  - ports: [{port: %d}]
`

// TestSessions: established connections that policies allow survive three events. The first is a flood of
// PILASTER_RESTART_SYNS half-open connections on both nodes, whose session tables are too small for them. The second
// are policy updates for other containers. The third are kills of agents, which restart with another build.
func TestSessions(t *testing.T) {
	syns := setting(t, "PILASTER_RESTART_SYNS", 100_000)
	builds := newBuilds(t)
	container := func(name, node string) lab.Container {
		return lab.Container{Name: name, Node: node, Tenant: "blue", Labels: map[string]string{"app": name}}
	}
	nodes := []string{"n1", "n2"}
	l := labtest.New(t, lab.Spec{
		Nodes:      nodes,
		Tenants:    []lab.Tenant{{Name: "blue"}},
		Containers: []lab.Container{container("client", "n1"), container("flooder", "n1"), container("server", "n2")},
	}, func(o *lab.Options) { o.Binary, o.AgentArgs = builds.binary, []string{"--max-sessions", "57344"} })
	s := &sessions{T: t, lab: l}
	s.apply(isolated)
	s.connect()
	s.exchange("under policies")

	flooded := s.flood(syns)
	for flooding := true; flooding; {
		s.exchange("under a flood")
		select {
		case err := <-flooded:
			s.must(err)
			flooding = false
		default:
		}
	}
	s.exchange("after the flood")
	for _, node := range nodes {
		got := s.status(node).GetPolicies().GetSessions()
		t.Logf("%s: %v", node, got)
		if got.Evicted < uint64(syns/10) || got.Used-got.HalfOpen < connections {
			t.Errorf("%s: %v: want most of %d half-open connections evicted, and the %d established ones kept",
				node, got, syns, connections)
		}
	}

	for i := range 5 {
		s.apply(fmt.Sprintf(unconcerned, 2000+i))
		s.exchange("with other policies")
	}
	begun := map[string]uint64{}
	for _, node := range nodes {
		begun[node] = s.status(node).GetPolicies().GetSessions().GetBegun()
	}
	builds.choose(t, 1)
	for _, node := range nodes {
		_, err := l.Kill(t.Context(), lab.AgentProcess(node))
		s.must(err)
	}
	s.exchange("with agents of another build")
	// If a table were lost, all sessions would begin again, and the counter would start at 0.
	for _, node := range nodes {
		if now := s.status(node).GetPolicies().GetSessions().GetBegun(); now < begun[node] ||
			now >= begun[node]+connections {
			t.Errorf("%s: got %d new sessions, %d before the agents were killed: want sessions to continue",
				node, now, begun[node])
		}
	}
	s.isolation()
}

// sessions are connections of the client to the server.
type sessions struct {
	*testing.T
	lab              *lab.Lab
	clients, servers []net.Conn
	rounds           uint64
}

func (s *sessions) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *sessions) status(node string) *pilasterv1.StatusResponse {
	s.Helper()
	got, err := s.lab.Agent(node).Status(s.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
	s.must(err)
	return got.Msg
}

// apply returns when both nodes enforce the policy.
func (s *sessions) apply(document string) {
	s.Helper()
	_, err := s.lab.Operator().ApplyPolicies(s.Context(),
		connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: []string{document}}))
	s.must(err)
	list, err := s.lab.Operator().ListPolicies(s.Context(),
		connect.NewRequest(&pilasterv1.ListPoliciesRequest{Tenant: "blue"}))
	s.must(err)
	for _, p := range list.Msg.Policies {
		for _, node := range []string{"n1", "n2"} {
			for s.status(node).GetOrchestrator().GetRevision() < p.Revision {
				time.Sleep(10 * time.Millisecond)
			}
		}
	}
}

// in calls f in a container's network namespace.
func (s *sessions) in(name string, f func() error) {
	s.Helper()
	ns, err := s.lab.Namespace(name)
	s.must(err)
	defer ns.Close()
	s.must(ns.Do(f))
}

func (s *sessions) address(name string) netip.Addr {
	s.Helper()
	a, err := s.lab.Address(name)
	s.must(err)
	return a
}

func (s *sessions) connect() {
	s.Helper()
	at := netip.AddrPortFrom(s.address("server"), web)
	var listener *net.TCPListener
	s.in("server", func() (err error) {
		listener, err = net.ListenTCP("tcp6", net.TCPAddrFromAddrPort(at))
		return err
	})
	s.Cleanup(func() { listener.Close() })
	for range connections {
		s.in("client", func() error {
			c, err := net.DialTimeout("tcp6", at.String(), 10*time.Second)
			if err != nil {
				return err
			}
			s.Cleanup(func() { c.Close() })
			s.clients = append(s.clients, c)
			return nil
		})
		c, err := listener.Accept()
		s.must(err)
		s.Cleanup(func() { c.Close() })
		s.servers = append(s.servers, c)
	}
}

// exchange makes the server send on each connection, and the client reply.
func (s *sessions) exchange(when string) {
	s.Helper()
	s.rounds++
	said := binary.BigEndian.AppendUint64(nil, s.rounds)
	deadline := time.Now().Add(10 * time.Second)
	pass := func(from, to net.Conn) error {
		got := make([]byte, len(said))
		_, err := from.Write(said)
		if err == nil {
			err = to.SetReadDeadline(deadline)
		}
		if err == nil {
			_, err = io.ReadFull(to, got)
		}
		if err == nil && string(got) != string(said) {
			err = fmt.Errorf("sent %x, received %x", said, got)
		}
		return err
	}
	for i := range s.servers {
		if err := pass(s.servers[i], s.clients[i]); err != nil {
			s.Fatalf("%s, connection %d: server to client: %v", when, i, err)
		}
		if err := pass(s.clients[i], s.servers[i]); err != nil {
			s.Fatalf("%s, connection %d: client to server: %v", when, i, err)
		}
	}
}

// flood makes the flooder open connections to ports that do not respond.
func (s *sessions) flood(syns int) <-chan error {
	s.Helper()
	from, err := s.lab.Container("flooder")
	s.must(err)
	to := s.address("server")
	for port := silent; port <= silent+syns/perSilent; port++ {
		s.listenInSilence(netip.AddrPortFrom(to, uint16(port)))
	}
	gateway, err := s.lab.Gateway("flooder")
	s.must(err)
	ns, err := s.lab.Namespace("flooder")
	s.must(err)
	defer ns.Close()
	out, err := packet.NewInjector(ns, lab.Interface)
	s.must(err)
	done := make(chan error, 1)
	s.Cleanup(func() { <-done; out.Close() })
	go func() {
		defer close(done)
		done <- out.Burst(syns, func(k int) []byte {
			return packet.Packet{Source: from.Address, Destination: to, HopLimit: 64, Body: packet.TCP{
				SourcePort: uint16(10000 + k%perSilent), DestinationPort: uint16(silent + k/perSilent),
				Flags: packet.SYN, Window: 1000,
			}}.Frame(gateway, out.MAC())
		})
	}()
	return done
}

// listenInSilence listens with a full accept queue, so that the kernel responds to no further connections.
func (s *sessions) listenInSilence(at netip.AddrPort) {
	s.Helper()
	s.in("server", func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		s.Cleanup(func() { unix.Close(fd) })
		if err := unix.Bind(fd, &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}); err != nil {
			return err
		}
		return unix.Listen(fd, 0)
	})
	s.in("client", func() error {
		c, err := net.DialTimeout("tcp6", at.String(), 10*time.Second)
		if err == nil {
			s.Cleanup(func() { c.Close() })
		}
		return err
	})
}

// isolation checks that the policy isolated is in force: the server cannot open a connection.
func (s *sessions) isolation() {
	s.Helper()
	s.in("server", func() error {
		c, err := net.DialTimeout("tcp6", netip.AddrPortFrom(s.address("client"), web).String(), 500*time.Millisecond)
		if err == nil {
			c.Close()
		}
		if e, is := err.(net.Error); !is || !e.Timeout() {
			s.Errorf("the server initiates a connection: got %v; want a timeout", err)
		}
		return nil
	})
}
