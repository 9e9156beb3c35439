package nimitz_test

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// TestMigrate moves a tenant with running containers to netpila while agents and the orchestrator are killed and
// containers are added and removed. Connections on the old addresses continue until the migration is finished; then all
// containers have only the new addresses. Tenants stay isolated throughout.
func TestMigrate(t *testing.T) {
	for _, on := range []string{lab.EBPF, lab.OVS} {
		t.Run(on, func(t *testing.T) {
			t.Parallel() // most of the time it waits
			spec := overlapping(tenant.Nimitz)
			spec.Name, spec.Nimitz = fmt.Sprintf("tm%s-%d", on, os.Getpid()), on
			spec.Tenants = slices.DeleteFunc(spec.Tenants, func(t lab.Tenant) bool { return t.Name == "grey" })
			spec.Containers = slices.DeleteFunc(spec.Containers,
				func(c lab.Container) bool { return c.Tenant == "grey" })
			spec.Containers = append(spec.Containers, lab.Container{Name: "green5", Node: "n1", Tenant: "green"})
			spec.Tenants[0].NoNodeCIDRs = on == lab.OVS
			m := &migration{Lab: labtest.New(t, spec), T: t, ctx: labtest.Context(t),
				known: map[string]*pilasterv1.Endpoint{}}
			m.run()
		})
	}
}

type migration struct {
	*lab.Lab
	*testing.T
	ctx   context.Context
	known map[string]*pilasterv1.Endpoint // containers' last known endpoints
}

func (m *migration) run() {
	old := m.talk("green1", "green3", tenant.Nimitz, 0)
	old6 := m.talk("green2", "green3", tenant.Nimitz, 1)
	m.mustTalk(old, old6)
	before := m.dropped()

	unblock := m.block("green2")
	m.step(&pilasterv1.MigrateTenantRequest{Name: "green", To: tenant.Netpila})
	m.kill(lab.Orchestrator)
	for _, when := range []string{"begun", "agents were killed in the middle of it"} {
		m.await(when, map[string][2]uint32{"n1": {2, 3}, "n2": {1, 1}})
		for name, want := range map[string][]string{"green1": {tenant.Netpila, tenant.Nimitz},
			"green2": {tenant.Nimitz}, "green3": {tenant.Netpila, tenant.Nimitz}} {
			if got := m.networks(name); !slices.Equal(got, want) {
				m.Errorf("%s: %s is on %v, want %v", when, name, got, want)
			}
		}
		m.mustTalk(old, old6)
		m.kill(lab.AgentProcess("n1"), lab.AgentProcess("n2"))
	}
	must(m.T, m.AddContainer(m.ctx, lab.Container{Name: "green4", Node: "n2", Tenant: "green"}))
	unblock()
	must(m.T, m.RemoveContainer(m.ctx, "green5")) // so that n1 reconciles
	m.await("all have moved", map[string][2]uint32{"n1": {2, 2}, "n2": {1, 1}})
	m.mustTalk(old, old6)
	m.reach("when all have moved")
	m.undropped(before)
	m.shown("while it moves", "green1", "green3")
	for name, want := range map[string][]string{"green1": {tenant.Netpila, tenant.Nimitz}, "green4": {tenant.Netpila},
		"gold1": {tenant.Nimitz}, "blue1": {tenant.Netpila}} {
		if got := m.networks(name); !slices.Equal(got, want) {
			m.Errorf("%s is on %v, want %v", name, got, want)
		}
	}
	if a, b := m.mtu("green1"), m.mtu("green4"); a != b-70 {
		m.Errorf("green1 has an MTU of %d beside addresses of nimitz, and green4 %d", a, b)
	}
	m.isolated("while it moves")
	// The migration continues without an orchestrator.
	must(m.T, m.Stop(m.ctx, lab.Orchestrator))
	m.kill(lab.AgentProcess("n1"), lab.AgentProcess("n2"))
	m.mustTalk(old, old6)
	m.reach("after agents were killed, without an orchestrator")
	must(m.T, m.Start(m.ctx, lab.Orchestrator))
	m.mustTalk(m.talk("green1", "green3", tenant.Netpila, 0), m.talk("green4", "green2", tenant.Netpila, 0), old, old6)
	m.check()

	must(m.T, m.Stop(m.ctx, lab.AgentProcess("n2")))
	m.step(&pilasterv1.MigrateTenantRequest{Name: "green", Finish: true})
	m.await("n1 has left, and n2 has not been notified", map[string][2]uint32{"n1": {}, "n2": {1, 1}})
	m.kill(lab.Orchestrator, lab.AgentProcess("n1"))
	must(m.T, m.Start(m.ctx, lab.AgentProcess("n2")))
	m.await("all have left", map[string][2]uint32{"n1": {}, "n2": {}})
	for _, c := range []*talk{old, old6} {
		if c.goesOn(time.Second) {
			m.Errorf("connection %v still works", c)
		}
	}
	for _, name := range []string{"green1", "green2", "green3", "green4"} {
		if got := m.networks(name); !slices.Equal(got, []string{tenant.Netpila}) {
			m.Errorf("finally %s is on %v", name, got)
		}
	}
	if a, b := m.mtu("green1"), m.mtu("green4"); a != b {
		m.Errorf("finally green1 has an MTU of %d, and green4 %d", a, b)
	}
	m.isolated("finally")
	m.shown("finally", "green1", "green3")
	m.check()
	for _, c := range m.Containers() {
		must(m.T, m.RemoveContainer(m.ctx, c.Name))
	}
	for _, node := range []string{"n1", "n2"} {
		if e := (bed{m.Lab, m.T}).entries(node); e["register"]+e["forwarding"]+e["locals"]+e["tenants"] > 0 {
			m.Errorf("%s without containers has %v", node, e)
		}
	}
}

func (m *migration) step(req *pilasterv1.MigrateTenantRequest) {
	m.Helper()
	_, err := m.Operator().MigrateTenant(m.ctx, connect.NewRequest(req))
	must(m.T, err)
}

func (m *migration) kill(processes ...string) {
	m.Helper()
	for _, p := range processes {
		_, err := m.Kill(m.ctx, p)
		must(m.T, err)
	}
}

// block prevents the move of a container: it adds a route to netpila addresses in the container, which conflicts with
// the agent's route.
func (m *migration) block(name string) (undo func()) {
	m.Helper()
	route := func(do string) {
		_, err := m.Output(m.ctx, name, "ip", "-6", "route", do, "fc00::/8", "dev", "lo")
		must(m.T, err)
	}
	route("add")
	return func() { route("del") }
}

// await waits until both nodes report these numbers: green's containers that have moved, and all of green's containers.
// {0, 0} means that the node has left the old network.
func (m *migration) await(what string, far map[string][2]uint32) {
	m.Helper()
	for {
		got, err := m.Operator().GetTenant(m.ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "green"}))
		if err != nil {
			m.Fatalf("%s: %v", what, err)
		}
		said := map[string][2]uint32{}
		for _, h := range got.Msg.Hosting {
			if h.Connected || h.Moving.GetEndpoints() > 0 {
				said[h.Node] = [2]uint32{h.Moving.GetMoved(), h.Moving.GetEndpoints()}
			}
		}
		if maps.Equal(said, far) {
			m.known = map[string]*pilasterv1.Endpoint{}
			return
		}
		pause(m.ctx, m.T)
	}
}

func (m *migration) endpoint(name string) *pilasterv1.Endpoint {
	m.Helper()
	c, err := m.Container(name)
	must(m.T, err)
	got, err := m.Agent(c.Node).GetEndpoint(m.ctx,
		connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: m.ContainerID(name)}))
	must(m.T, err)
	return got.Msg.Endpoint
}

// networks returns the networks on which a container has addresses, sorted.
func (m *migration) networks(name string) (all []string) {
	for _, a := range m.endpoint(name).Attachments {
		all = append(all, a.Network)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func (m *migration) mtu(name string) uint32 { return m.endpoint(name).Mtu }

// addresses returns a container's addresses of one network.
func (m *migration) addresses(name, network string) (all []netip.Addr) {
	m.Helper()
	e := m.known[name]
	if e == nil {
		e = m.endpoint(name)
		m.known[name] = e
	}
	for _, a := range e.Attachments {
		if a.Network == network {
			all = append(all, netip.MustParseAddr(a.Address))
		}
	}
	return all
}

// check runs CNI CHECK for all containers.
func (m *migration) check() {
	m.Helper()
	for _, c := range m.Containers() {
		if err := m.CheckContainer(m.ctx, c.Name); err != nil {
			m.Error(err)
		}
	}
}

func (m *migration) pings(from string, to netip.Addr, timeout time.Duration) bool {
	m.Helper()
	_, answered := echo(m.ctx, m.T, m.Lab, from, to, timeout)
	return answered
}

// reach checks that all containers of green reach each other by netpila addresses.
func (m *migration) reach(when string) {
	m.Helper()
	for _, from := range m.Containers() {
		for _, to := range m.Containers() {
			if from.Tenant != "green" || to.Tenant != "green" || from.Name == to.Name {
				continue
			}
			for _, a := range m.addresses(to.Name, tenant.Netpila) {
				if !m.pings(from.Name, a, 5*time.Second) {
					m.Errorf("%s: %s cannot reach %s at %v", when, from.Name, to.Name, a)
				}
			}
		}
	}
}

// isolated checks that containers of green and containers of other tenants do not reach each other, with their own
// source addresses or with forged ones, and that containers of green reach each other.
func (m *migration) isolated(when string) {
	m.Helper()
	m.reach(when)
	var captures []*packet.Capture
	var watched []string
	for _, c := range m.Containers() {
		ns, err := m.Namespace(c.Name)
		must(m.T, err)
		defer ns.Close()
		capture, err := packet.NewCapture(ns, lab.Interface, packet.IncomingOnly)
		must(m.T, err)
		defer capture.Close()
		captures, watched = append(captures, capture), append(watched, c.Name)
	}
	before := m.dropped()
	sent := map[packet.Sentinel]string{}
	for _, from := range m.Containers() {
		for _, to := range m.Containers() {
			if from.Tenant == to.Tenant || from.Tenant != "green" && to.Tenant != "green" {
				continue
			}
			for _, a := range m.addresses(to.Name, tenant.Netpila) {
				s, answered := echo(m.ctx, m.T, m.Lab, from.Name, a, 50*time.Millisecond)
				if sent[s] = fmt.Sprint(from.Name, " to ", a, " of ", to.Name); answered {
					m.Errorf("%s: %s received a reply", when, sent[s])
				}
				s = m.forge(from.Name, m.peer(to), a)
				sent[s] = fmt.Sprint(from.Name, " as ", m.peer(to), " to ", a, " of ", to.Name)
			}
		}
	}
	if m.dropped()["src-not-own"] == before["src-not-own"] {
		m.Errorf("%s: no node counts packets with forged sources", when)
	}
	for i, name := range watched {
		last, _ := echo(m.ctx, m.T, m.Lab, m.mate(name), m.some(name), 5*time.Second)
		for _, frame := range until(m.ctx, m.T, captures[i], last) {
			for s, what := range sent {
				if s.In(frame) {
					m.Errorf("%s: %s received %s", when, name, what)
				}
			}
		}
	}
}

// some returns an address at which the container's peers reach it.
func (m *migration) some(name string) netip.Addr {
	if a := m.addresses(name, tenant.Netpila); len(a) > 0 {
		return a[0]
	}
	return m.addresses(name, tenant.Nimitz)[0]
}

func (m *migration) mate(name string) string {
	c, err := m.Container(name)
	must(m.T, err)
	return mate(m.Lab, c)
}

// peer returns a netpila address of a container's peer.
func (m *migration) peer(c lab.ContainerStatus) netip.Addr { return m.some(m.mate(c.Name)) }

// forge sends a datagram from a container with another source.
func (m *migration) forge(from string, as, to netip.Addr) packet.Sentinel {
	m.Helper()
	ns, err := m.Namespace(from)
	must(m.T, err)
	defer ns.Close()
	in, err := packet.NewInjector(ns, lab.Interface)
	must(m.T, err)
	defer in.Close()
	gateway, err := m.Gateway(from)
	must(m.T, err)
	s := packet.NewSentinel()
	must(m.T, in.Send(packet.Packet{Source: as, Destination: to, HopLimit: 64,
		Body: packet.UDP{SourcePort: 7, DestinationPort: 7, Payload: s[:]}}.Frame(gateway, in.MAC())))
	return s
}

// dropped returns the number of packets that both nodes' programs have dropped, by reason.
func (m *migration) dropped() map[string]uint64 {
	all := map[string]uint64{}
	for _, node := range []string{"n1", "n2"} {
		drops, err := m.Drops(m.ctx, node)
		must(m.T, err)
		for why, n := range drops {
			all[why] += n
		}
	}
	return all
}

// undropped fails if any packets were dropped, except neighbour and multicast packets of the containers' kernels.
func (m *migration) undropped(before map[string]uint64) {
	m.Helper()
	for why, n := range m.dropped() {
		if why != "multicast" && why != "mld-ignored" && n > before[why] {
			m.Errorf("the nodes' programs dropped %d packets of reason %s", n-before[why], why)
		}
	}
}

// shown checks that the command line shows the containers' current addresses, and that one container reaches the other
// at all its addresses.
func (m *migration) shown(when, from, to string) {
	m.Helper()
	pilaster := func(into any, args ...string) {
		m.Helper()
		out, err := exec.CommandContext(m.ctx, labtest.Binary(m.T),
			append(args, "--lab", m.Name(), "-o", "json")...).Output()
		if err == nil {
			err = json.Unmarshal(out, into)
		}
		if err != nil {
			m.Fatalf("%s: %v: %v\n%s", when, args, err, out)
		}
	}
	var s lab.Status
	pilaster(&s, "lab", "status")
	for _, c := range s.Containers {
		var has []netip.Addr
		plain := ""
		for _, a := range m.endpoint(c.Name).Attachments {
			has, plain = append(has, netip.MustParseAddr(a.Address)), cmp.Or(plain, a.Plaintext)
		}
		if !slices.Equal(c.Addresses, has) || c.Plaintext != plain {
			m.Errorf("%s: lab status shows %v and %q for %s, want %v and %q", when, c.Addresses, c.Plaintext, c.Name,
				has, plain)
		}
	}
	var echoes []lab.Echo
	pilaster(&echoes, "lab", "ping", from, to)
	if len(echoes) != len(m.networks(to)) {
		m.Errorf("%s: %s is on %v; lab ping: %+v", when, to, m.networks(to), echoes)
	}
	for _, e := range echoes {
		if !slices.Contains(m.addresses(to, tenant.Netpila), e.Address) &&
			!slices.Contains(m.addresses(to, tenant.Nimitz), e.Address) || !e.Reached() {
			m.Errorf("%s: lab ping: %+v", when, e)
		}
	}
	// By name: /etc/hosts must be current too.
	out, err := exec.CommandContext(m.ctx, labtest.Binary(m.T), "lab", "exec", "--lab", m.Name(), from, "--", "getent",
		"ahostsv6", to).CombinedOutput()
	if want := m.addresses(to, tenant.Netpila)[0].String(); err != nil || !strings.Contains(string(out), want) {
		m.Errorf("%s: on %s, %s resolves to %s: %v; want %s", when, from, to, out, err, want)
	}
}

// talk is a connection whose server echoes consecutive numbers.
type talk struct {
	what    string
	answers atomic.Uint64
	end     atomic.Pointer[error]
}

func (c *talk) String() string { return c.what }

// goesOn reports whether ten more echoes arrive in time.
func (c *talk) goesOn(within time.Duration) bool {
	from := c.answers.Load()
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if c.answers.Load() >= from+10 {
			return true
		}
	}
	return false
}

func (m *migration) mustTalk(all ...*talk) {
	m.Helper()
	for _, c := range all {
		if !c.goesOn(20 * time.Second) {
			m.Fatalf("connection %v has stopped: %v", c, c.end.Load())
		}
	}
}

// talk opens a connection to one of a container's addresses of a network. It ends with the test.
func (m *migration) talk(from, to, network string, which int) *talk {
	m.Helper()
	at := net.TCPAddrFromAddrPort(netip.AddrPortFrom(m.addresses(to, network)[which], 0))
	var listener *net.TCPListener
	m.inside(to, func() (err error) { listener, err = net.ListenTCP("tcp", at); return err })
	var asks net.Conn
	m.inside(from, func() (err error) {
		asks, err = net.DialTimeout("tcp", listener.Addr().String(), 10*time.Second)
		return err
	})
	answers, err := listener.Accept()
	must(m.T, err)
	m.Cleanup(func() { listener.Close(); asks.Close(); answers.Close() })
	go io.Copy(answers, answers)
	c := &talk{what: fmt.Sprint(from, " to ", listener.Addr(), " of ", to)}
	go func() {
		err := c.ask(asks)
		c.end.Store(&err)
	}()
	return c
}

func (c *talk) ask(conn net.Conn) error {
	question, answer := make([]byte, 4096), make([]byte, 4096)
	for n := uint64(1); ; n++ {
		binary.BigEndian.PutUint64(question[n%4000:], n)
		if _, err := conn.Write(question); err != nil {
			return err
		}
		if _, err := io.ReadFull(conn, answer); err != nil {
			return err
		}
		if !slices.Equal(question, answer) {
			return errors.New("unexpected echo")
		}
		c.answers.Add(1)
		time.Sleep(time.Millisecond) // leave processor time to other connections
	}
}

// inside calls do in a container's namespace.
func (m *migration) inside(name string, do func() error) {
	m.Helper()
	ns, err := m.Namespace(name)
	must(m.T, err)
	defer ns.Close()
	must(m.T, ns.Do(do))
}
