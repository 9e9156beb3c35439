package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/humanize"
)

// ServiceCounts are the numbers of services for the measurement of services.
var ServiceCounts = []int{1, 10_000}

// betweenContainers is the scenario without services.
var betweenContainers = blue().Network

// ServiceScenarios have a client that talks to a service with one backend on the other node: the backend is chosen when
// the socket connects, or on the packet path.
func ServiceScenarios() (all []Scenario) {
	for _, kind := range []struct {
		name, about string
		connect     bool
	}{
		{"service-connect", "containers on our datapath by a service, whose backend sockets get at connect", true},
		{"service-packet", "the same, whose backend the node writes into each packet", false},
	} {
		for _, n := range ServiceCounts {
			name, about := kind.name, kind.about
			if n > 1 {
				name, about = fmt.Sprint(name, "-", n), about+"; one of "+humanize.Grouped(n)+" services"
			}
			all = append(all, Scenario{
				Name: name, Of: betweenContainers, About: about, Build: throughService(n, kind.connect),
			})
		}
	}
	return append(all, Scenario{
		Name: "node-port", Of: betweenContainers, Build: nodePort,
		About: "a host outside to a node port, by a node without a backend, and a container on the other node",
	})
}

// nodePort has a client on a host outside, which connects to a port of the first node. The backend is on the second.
func nodePort(w *Wire) (Pair, error) {
	outside, err := w.addOutside()
	if err != nil {
		return Pair{}, err
	}
	t := blue()
	t.ServicesNumber, t.Exposed = 1, true
	var paths []*datapath.Datapath
	for _, n := range w.Nodes {
		d, err := n.startFor(t, Variant{})
		if err != nil {
			return Pair{}, err
		}
		paths = append(paths, d)
	}
	c, server, err := w.Nodes[1].addContainer(paths[1], t, 1)
	if err != nil {
		return Pair{}, err
	}
	p := Pair{Client: outside.NS, Server: c, Target: server.Address}.on(paths)
	p.Expose = func(port uint16) (netip.AddrPort, error) {
		const at = 30080
		for i, n := range w.Nodes {
			if err := paths[i].PutServices(bothProtocols(dpapi.Frontend{
				FrontendKey: dpapi.FrontendKey{Address: netip.AddrPortFrom(n.Underlay, at)},
				Exposed:     dpapi.Exposed{Services: t.ServicesNumber, Node: true},
				Backends:    []dpapi.Backend{{Plain: server.Plaintext, Seen: server.Address, Port: port}},
			})); err != nil {
				return netip.AddrPort{}, err
			}
		}
		return netip.AddrPortFrom(w.Nodes[0].Underlay, at), nil
	}
	return p, nil
}

// bothProtocols returns a frontend for TCP, and the same for UDP.
func bothProtocols(f dpapi.Frontend) (both []dpapi.Frontend) {
	for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		f.Protocol = protocol
		both = append(both, f)
	}
	return both
}

// throughService gives the client a service with the server as its backend, beside others.
func throughService(n int, connect bool) func(*Wire) (Pair, error) {
	return func(w *Wire) (Pair, error) {
		var v Variant
		if connect {
			var err error
			if v.cgroup, err = w.cgroup(); err != nil {
				return Pair{}, err
			}
		}
		t := blue()
		t.ServicesNumber = 1
		prefix, err := address.DefaultPlan().TenantServices(t.ServicesNumber)
		if err != nil {
			return Pair{}, err
		}
		p, paths, last, err := w.pairOf(t, v)
		if err != nil {
			return p, err
		}
		server := dpapi.Backend{Plain: last[1].Plaintext, Seen: last[1].Address}
		at := func(i, port int) netip.AddrPort {
			a, _ := endpoint.AddressIn(prefix, address.Index(i))
			return netip.AddrPortFrom(a, uint16(port))
		}
		var others []dpapi.Frontend
		for i := range n - 1 {
			others = append(others, dpapi.Frontend{
				FrontendKey: dpapi.FrontendKey{Address: at(i+2, 80), Protocol: unix.IPPROTO_TCP},
				Backends:    []dpapi.Backend{{Plain: server.Plain, Seen: server.Seen, Port: 80}},
			})
		}
		if err := paths[0].PutServices(others); err != nil {
			return p, err
		}
		p.Expose = func(port uint16) (netip.AddrPort, error) {
			front := at(1, 80)
			backend := server
			backend.Port = port
			return front, paths[0].PutServices(bothProtocols(dpapi.Frontend{
				FrontendKey: dpapi.FrontendKey{Address: front}, Backends: []dpapi.Backend{backend},
			}))
		}
		return p, nil
	}
}

// cgroup returns the root of the cgroups of version 2, in which all processes of the benchmark are. A cgroup of its own
// would cost the client's process time at each switch of tasks, which other scenarios do not have.
func (w *Wire) cgroup() (string, error) {
	mount := filepath.Join(w.Dir, "cgroup2")
	if err := errors.Join(os.Mkdir(mount, 0o700), unix.Mount("none", mount, "cgroup2", 0, "")); err != nil {
		return "", fmt.Errorf("mount cgroup2: %w; the kernel needs CONFIG_CGROUP_BPF", err)
	}
	w.OnClose(func() error { return Unmount(mount) })
	return mount, nil
}
