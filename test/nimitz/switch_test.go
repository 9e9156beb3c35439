package nimitz_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// TestSwitchNetworks moves a tenant with running containers from network nimitz to evpn and back while agents and the
// orchestrator are killed and containers are added. Addresses and connections stay, no datagram is lost, and tenants
// with the same addresses stay isolated, also while one node still sends by the network that another one has left.
func TestSwitchNetworks(t *testing.T) {
	t.Parallel() // most of the time it waits
	spec := overlapping(tenant.Nimitz)
	spec.Name, spec.Nimitz, spec.EVPN = fmt.Sprintf("tswitch-%d", os.Getpid()), lab.EBPF, "10.71.0.0/16"
	spec.Tenants = slices.DeleteFunc(spec.Tenants, func(t lab.Tenant) bool { return t.Name == "blue" })
	spec.Containers = slices.DeleteFunc(spec.Containers, func(c lab.Container) bool {
		return c.Tenant == "blue" || c.Name == "gold2" || c.Name == "grey2"
	})
	l := labtest.New(t, spec)
	m := &migration{Lab: l, T: t, ctx: labtest.Context(t), known: map[string]*pilasterv1.Endpoint{}}
	var talks []*talk
	var flows []*flow
	for _, of := range moving {
		for which := range 2 {
			talks = append(talks, m.talk(of+"1", of+"3", tenant.Nimitz, which))
			flows = append(flows, m.flow(of+"1", of+"3", which), m.flow(of+"3", of+"1", which))
		}
	}
	flows = append(flows, m.flow("green1", "green2", 0))
	m.switches(tenant.Nimitz, tenant.EVPN, talks)
	m.switches(tenant.EVPN, tenant.Nimitz, talks)
	for _, f := range flows {
		if sent, lost := f.end(); lost > 0 || sent < 1000 {
			t.Errorf("%s: %d of %d datagrams are lost", f.name, lost, sent)
		}
	}
	for _, node := range []string{"n1", "n2"} {
		if e := (bed{l, t}).entries(node); e["evpn-register"]+e["evpn-forwarding"]+e["evpn-foreign"] > 0 {
			t.Errorf("%s has entries of network evpn: %v", node, e)
		}
	}
}

// moving are tenants with subnets of the nodes, and with single addresses. Container 1 of each is on n1, 3 on n2.
var moving = []string{"green", "grey"}

// switches moves the tenants between two networks.
func (m *migration) switches(from, to string, talks []*talk) {
	m.Helper()
	n2 := lab.AgentProcess("n2")
	step := func(to string) { // "": the second step
		m.Helper()
		for _, of := range moving {
			m.step(&pilasterv1.MigrateTenantRequest{Name: of, To: to, Finish: to == ""})
		}
	}
	is := func(when, on string) {
		m.Helper()
		m.mustTalk(talks...)
		for _, of := range moving {
			if got := m.carriedBy(of+"1", of+"3"); got != on {
				m.Fatalf("%s to %s, %s: packets of %s are on network %s, want %s", from, to, when, of, got, on)
			}
		}
	}
	is("at first", from)
	step(to)
	m.kill(lab.Orchestrator, lab.AgentProcess("n1"), n2)
	m.reported(from, to)
	is("all receive by both", from)
	must(m.T, m.AddContainer(m.ctx, lab.Container{Name: "grey-" + to, Node: "n2", Tenant: "grey"}))
	m.reported(from, to)
	m.check()

	must(m.T, m.Stop(m.ctx, n2))
	step(to)
	m.reported(to, from, "n2")
	is("n1 sends by the new network, and n2 by the old one", to)
	eastWest(m.T, m.Lab)
	if _, err := m.Operator().MigrateTenant(m.ctx, connect.NewRequest(
		&pilasterv1.MigrateTenantRequest{Name: moving[0], Finish: true})); err == nil {
		m.Fatalf("%s can leave network %s, by which n2 sends", moving[0], from)
	}
	must(m.T, m.Start(m.ctx, n2))
	m.kill(lab.AgentProcess("n1"))
	m.reported(to, from)
	is("all send by the new network", to)
	m.check()

	must(m.T, m.Stop(m.ctx, n2))
	step("")
	m.reported(to, "", "n2")
	is("n2 still receives by both", to)
	must(m.T, m.Start(m.ctx, n2))
	m.reported(to, "")
	must(m.T, m.RemoveContainer(m.ctx, "grey-"+to))
	is("finally", to)
	m.check()
}

// reported waits until the tenants are on these networks, and all nodes have reported that, except some.
func (m *migration) reported(network, other string, except ...string) {
	m.Helper()
	for _, of := range moving {
		for !m.hasReported(of, network, other, except) {
			pause(m.ctx, m.T)
		}
	}
	m.known = map[string]*pilasterv1.Endpoint{}
}

func (m *migration) hasReported(of, network, other string, except []string) bool {
	m.Helper()
	got, err := m.Operator().GetTenant(m.ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: of}))
	must(m.T, err)
	is := got.Msg.Tenant
	hosting := slices.DeleteFunc(got.Msg.Hosting, func(h *pilasterv1.Hosting) bool {
		return slices.Contains(except, h.Node)
	})
	if is.Network != network || is.Leaving != other {
		return false
	}
	if other == "" {
		return !slices.ContainsFunc(hosting, func(h *pilasterv1.Hosting) bool { return h.Moving != nil })
	}
	return len(store.Unmoved(is, hosting)) == 0
}

// carriedBy returns the network whose tunnel a packet between containers of two nodes is in.
func (m *migration) carriedBy(from, to string) string {
	m.Helper()
	router, err := m.Namespace(lab.Router)
	must(m.T, err)
	defer router.Close()
	capture, err := packet.NewCapture(router, "n2")
	must(m.T, err)
	defer capture.Close()
	c, err := m.Container(to)
	must(m.T, err)
	s, answered := echo(m.ctx, m.T, m.Lab, from, c.Address, 5*time.Second)
	if !answered {
		m.Fatalf("%s does not reach %s", from, to)
	}
	for {
		frame, err := capture.Next(m.ctx)
		must(m.T, err)
		if s.In(frame) { // the request, which came first
			return map[uint16]string{0x0800: tenant.EVPN, 0x86dd: tenant.Nimitz}[binary.BigEndian.Uint16(
				frame.Frame[12:])]
		}
	}
}

// flow is a stream of numbered datagrams to a container.
type flow struct {
	name string
	end  func() (sent, lost int)
}

const (
	flowEvery = 5 * time.Millisecond
	flowEnd   = 5 * time.Second // after the last datagram was sent
)

// flow sends datagrams to one of a container's addresses until its end is called.
func (m *migration) flow(from, to string, which int) *flow {
	m.Helper()
	c, err := m.Container(to)
	must(m.T, err)
	at := netip.AddrPortFrom(c.Addresses()[which], 0)
	var receiver *net.UDPConn
	m.inside(to, func() (err error) {
		receiver, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	})
	var sender net.Conn
	m.inside(from, func() (err error) { sender, err = net.Dial("udp", receiver.LocalAddr().String()); return err })
	stop, seen, sent := make(chan struct{}), map[uint64]bool{}, uint64(0)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for tick := time.NewTicker(flowEvery); ; {
			select {
			case <-tick.C:
				if _, err := sender.Write(binary.BigEndian.AppendUint64(nil, sent)); err != nil {
					m.Errorf("%s to %s: %v", from, to, err)
				}
				sent++
			case <-stop:
				tick.Stop()
				receiver.SetReadDeadline(time.Now().Add(flowEnd))
				return
			}
		}
	})
	tasks.Go(func() {
		for b := make([]byte, 9); ; {
			n, err := receiver.Read(b)
			if n == 8 {
				seen[binary.BigEndian.Uint64(b)] = true
			}
			if err != nil {
				return
			}
		}
	})
	end := sync.OnceValues(func() (int, int) {
		close(stop)
		tasks.Wait()
		sender.Close()
		receiver.Close()
		return int(sent), int(sent) - len(seen)
	})
	m.Cleanup(func() { end() })
	return &flow{fmt.Sprint(from, " to ", receiver.LocalAddr(), " of ", to), end}
}
