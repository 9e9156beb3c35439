package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
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
	return all
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
			var both []dpapi.Frontend
			for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
				both = append(both, dpapi.Frontend{
					FrontendKey: dpapi.FrontendKey{Address: front, Protocol: protocol},
					Backends:    []dpapi.Backend{backend},
				})
			}
			return front, paths[0].PutServices(both)
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
