// Package services_test runs services in labs with the real daemons: connections by processes of the nodes' cgroups,
// and by the packet path.
package services_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

const (
	shop        = "shop"
	servicePort = 80
	backendPort = 8080
	// patience is the limit of what takes milliseconds on an idle machine.
	patience = 30 * time.Second
	// connectTime is the timeout of a single connection.
	connectTime = time.Second
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// bed is a lab with a client, and web servers behind a service.
type bed struct {
	*lab.Lab
	*testing.T
	to netip.AddrPort
}

// web are the names of the web servers: one on the client's node, and two on others.
var web = []string{"w1", "w2", "w3"}

func newBed(t *testing.T) *bed {
	t.Helper()
	return startBed(t, labSpec())
}

func labSpec() lab.Spec {
	spec := lab.Spec{
		Nodes: []string{"n1", "n2", "n3"}, Device: labtest.Device(),
		Tenants: []lab.Tenant{{Name: shop}},
		Containers: []lab.Container{
			{Name: "c1", Node: "n1", Tenant: shop, Labels: map[string]string{"app": "client"}},
		},
	}
	for i, name := range web {
		spec.Containers = append(spec.Containers, lab.Container{
			Name: name, Node: fmt.Sprint("n", i+1), Tenant: shop, Labels: map[string]string{"app": "web"},
		})
	}
	return spec
}

func startBed(t *testing.T, spec lab.Spec, options ...func(*lab.Options)) *bed {
	t.Helper()
	b := &bed{Lab: labtest.New(t, spec, options...), T: t}
	for _, name := range web {
		b.serve(name)
	}
	return b
}

// create makes a service of the web servers.
func (b *bed) create(s *pilasterv1.Service) *pilasterv1.Service {
	b.Helper()
	s.Tenant = shop
	if s.Selector == nil {
		s.Selector = map[string]string{"app": "web"}
	}
	s.Ports = []*pilasterv1.ServicePort{{Protocol: "TCP", Port: servicePort, Target: backendPort}}
	made, err := b.Operator().CreateService(b.Context(),
		connect.NewRequest(&pilasterv1.CreateServiceRequest{Service: s}))
	must(b.T, err)
	at, err := netip.ParseAddr(made.Msg.Service.Address)
	must(b.T, err)
	b.to = netip.AddrPortFrom(at, servicePort)
	return made.Msg.Service
}

// serve runs a server in a container, which answers each connection with the container's name and then echoes.
func (b *bed) serve(container string) {
	b.Helper()
	ns, err := b.Namespace(container)
	must(b.T, err)
	defer ns.Close()
	var l net.Listener
	must(b.T, ns.Do(func() (err error) {
		l, err = net.Listen("tcp6", fmt.Sprintf("[::]:%d", backendPort))
		return err
	}))
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintln(c, container)
				io.Copy(c, c)
			}()
		}
	}()
}

// reach connects from a container and returns the name of the backend. The socket is one of the test's process, which
// is in no cgroup of a node, so packets are translated.
func (b *bed) reach(container string) (name string, c net.Conn, err error) {
	ns, err := b.Namespace(container)
	must(b.T, err)
	defer ns.Close()
	d := net.Dialer{Timeout: connectTime}
	if err := ns.Do(func() (err error) { c, err = d.Dial("tcp6", b.to.String()); return err }); err != nil {
		return "", nil, err
	}
	c.SetDeadline(time.Now().Add(connectTime))
	name, err = bufio.NewReader(c).ReadString('\n')
	if err != nil {
		c.Close()
		return "", nil, err
	}
	return name[:len(name)-1], c, nil
}

// seen connects from a container many times and returns how often each backend answered.
func (b *bed) seen(container string) map[string]int {
	b.Helper()
	all := map[string]int{}
	for range 30 {
		name, c, err := b.reach(container)
		if err != nil {
			all[err.Error()]++
			continue
		}
		all[name]++
		c.Close()
	}
	return all
}

// settles waits until exactly these backends answer a container's connections.
func (b *bed) settles(container string, backends ...string) {
	b.Helper()
	var last map[string]int
	labtest.Until(b.T, patience, fmt.Sprintf("connections of %s reach %v", container, backends), func() bool {
		last = b.seen(container)
		ok := len(last) == len(backends)
		for _, name := range backends {
			ok = ok && last[name] > 0
		}
		return ok
	})
}

const processVar = "PILASTER_TEST_SERVICE"

// TestConnectingProcess is not a test but a process of processes: it connects many times and prints backend and peer.
func TestConnectingProcess(*testing.T) {
	network, to, ok := strings.Cut(os.Getenv(processVar), ",")
	if !ok {
		return
	}
	for range 30 {
		line, err := question(network, to)
		if err != nil {
			line = fmt.Sprintln("failed", err)
		}
		fmt.Print(line)
	}
	os.Exit(0)
}

// question asks a service for the backend's name, and returns a line with the peer and it.
func question(network, to string) (string, error) {
	network, free := strings.CutSuffix(network, " unconnected")
	if free {
		c, err := net.ListenUDP(network, nil)
		if err != nil {
			return "", err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(connectTime))
		if _, err := c.WriteToUDPAddrPort([]byte("?"), netip.MustParseAddrPort(to)); err != nil {
			return "", err
		}
		name := make([]byte, 100)
		n, from, err := c.ReadFromUDPAddrPort(name)
		return fmt.Sprint(from, " ", string(name[:n])), err
	}
	c, err := net.DialTimeout(network, to, connectTime)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(connectTime))
	if network == "udp6" {
		c.Write([]byte("?"))
	}
	name, err := bufio.NewReader(c).ReadString('\n')
	return fmt.Sprint(c.RemoteAddr(), " ", name), err
}

// process runs a process in a container, in the cgroup of its node, that connects to the service many times. It returns
// how often each line was printed.
func (b *bed) process(container string) map[string]int {
	b.Helper()
	return b.processOf(container, "tcp6", b.to)
}

// processOf runs such a process on a node or in a container, for an address and a network.
func (b *bed) processOf(place, network string, to netip.AddrPort) map[string]int {
	b.Helper()
	command := exec.Command("/proc/self/exe", "-test.run=^TestConnectingProcess$")
	command.Env = append(os.Environ(), processVar+"="+network+","+to.String())
	out, err := command.StdoutPipe()
	must(b.T, err)
	must(b.T, b.Launch(place, command))
	all := map[string]int{}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		all[lines.Text()]++
	}
	must(b.T, command.Wait())
	return all
}
