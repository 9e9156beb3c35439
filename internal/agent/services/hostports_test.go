package services_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
)

var (
	own1, own2 = netip.MustParseAddr("fd70:696c:6100:1::1"), netip.MustParseAddr("2001:db8:1::1")
	loopback   = netip.MustParseAddr("2001:db8:9::9") // of the node, without node ports
	ports      = []netip.Addr{own1, own2}
)

// publishing is a container of tenant blue with host ports, given as operators do.
func publishing(t *testing.T, id int, hostPorts ...string) endpoint.Record {
	t.Helper()
	r := container(id, nil)
	for _, text := range hostPorts {
		p, err := endpoint.ParseHostPort(text)
		if err != nil {
			t.Fatal(err)
		}
		r.HostPorts = append(r.HostPorts, p)
	}
	a := &r.Attachments[0]
	a.Address = address.NewCipher(blueKey).Encrypt(a.Plaintext)
	return r
}

// publish claims the host ports of a container and writes them.
func (b *bed) publish(r endpoint.Record) {
	b.t.Helper()
	if err := errors.Join(b.ClaimHostPorts(r), b.PublishHostPorts(r)); err != nil {
		b.t.Fatal(err)
	}
}

// TestHostPorts: a container has a frontend for each host port at each address of the node, or at its own one. They
// follow the addresses of the node, no update of services removes them, and they go with the container.
func TestHostPorts(t *testing.T) {
	const all = "[fd70:696c:6100:1::1]:8080/6 0s node 5: n1/1:80"
	const udp = "[fd70:696c:6100:1::1]:53/17 0s node 5: n1/1:5353"
	const one = "[2001:db8:9::9]:8081/6 0s node 5: n1/2:80"
	run(t, func(b *bed) {
		b.SetAddresses(services.Addresses{Own: []netip.Addr{loopback}, Ports: []netip.Addr{own1}})
		first := publishing(t, 1, "8080:80", "53:5353/udp")
		b.publish(first)
		b.publish(publishing(t, 2, "[2001:db8:9::9]:8081:80"))
		b.check(all, udp, one)
		b.apply(services.Update{Whole: true, Services: []service.Service{outside(service.Cluster)}})
		b.apply(services.Update{Whole: true})
		b.check(all, udp, one)
		b.SetAddresses(services.Addresses{Ports: ports})
		synctest.Wait()
		at2 := func(text string) string { return strings.Replace(text, own1.String(), own2.String(), 1) }
		b.check(all, at2(all), udp, at2(udp))
		b.checkProblems("host ports of container c2 (endpoint 2) are not as they should be: " +
			"host port [2001:db8:9::9]:8081/TCP: this node does not have the address")
		for id := 1; id <= 2; id++ {
			if err := b.ReleaseHostPorts(publishing(t, id, "1:1")); err != nil {
				t.Fatal(err)
			}
		}
		b.check()
		b.checkProblems()
	})
}

// TestHostPortConflicts: a host port that another container, or a service as its node port, has is refused with who has
// it, and so is an address that is not the node's.
func TestHostPortConflicts(t *testing.T) {
	run(t, func(b *bed) {
		b.SetAddresses(services.Addresses{Own: []netip.Addr{loopback}, Ports: ports})
		pod := publishing(t, 1, "8080:80", "[2001:db8:1::1]:8081:81")
		pod.Pod = "shop/web"
		b.publish(pod)
		b.apply(services.Update{Whole: true, Services: []service.Service{outside(service.Cluster)}})
		before := b.Writes()
		for hostPort, want := range map[string]string{
			"8080:1":                   "host port 8080/TCP of this node is that of container shop/web (endpoint 1)",
			"[2001:db8:1::1]:8080:80":  "of container shop/web",
			"8081:80":                  "of container shop/web",
			"30080:80":                 "host port 30080/TCP of this node is that of service web of tenant blue, as",
			"[2001:db8:1::1]:30080:80": "of service web of tenant blue",
			"[2001:db8:5::5]:8080:80":  "host port [2001:db8:5::5]:8080/TCP: this node does not have the address",
			"8080:80/udp":              "", "[fd70:696c:6100:1::1]:8081:80": "", "30080:80/udp": "",
			"[2001:db8:9::9]:30080:80": "", // an address without node ports
		} {
			r := publishing(t, 2, "1:1", hostPort)
			err := b.ClaimHostPorts(r)
			switch {
			case want == "" && err == nil:
				if err := b.ReleaseHostPorts(r); err != nil {
					t.Error(err)
				}
			case want == "" || err == nil || !strings.Contains(err.Error(), want):
				t.Errorf("%s: got %v, want %q", hostPort, err, want)
			case want != "" && strings.Contains(want, "that of ") && !errors.Is(err, refusal.ErrExhausted):
				t.Errorf("%s: %v is of the wrong kind", hostPort, err)
			}
		}
		if n := b.Writes() - before; n != 0 {
			t.Errorf("refusals wrote %d frontends", n)
		}
	})
}

// TestNodePortOfLaterService: a container keeps its host port when a service gets the same node port. Status names both
// until the container is gone; then hosts outside reach the service.
func TestNodePortOfLaterService(t *testing.T) {
	const own, external = "[fd70:696c:7300:5::1]:80/6 1m0s:", "[2001:db8:7::9]:80/6 1m0s outside 5:"
	run(t, func(b *bed) {
		r := publishing(t, 1, "30080:80")
		b.publish(r)
		b.apply(services.Update{Whole: true, Services: []service.Service{outside(service.Cluster)}})
		b.check(own, external, "[fd70:696c:6100:1::1]:30080/6 0s node 5: n1/1:80")
		if at, all := b.At(own1), b.Publishers(own1); len(at) > 0 || len(all) != 1 || all[0].ID != r.ID {
			t.Errorf("at the address are services %v and host ports of %v", at, all)
		}
		b.checkProblems("service web of tenant blue: hosts outside do not reach its node port by this node: " +
			"[fd70:696c:6100:1::1]:30080/TCP is a host port of container c1 (endpoint 1)")
		if err := b.ReleaseHostPorts(r); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		b.check(own, external, "[fd70:696c:6100:1::1]:30080/6 1m0s node 5:")
		b.checkProblems()
		if at, all := b.At(own1), b.Publishers(own1); len(at) != 1 || len(all) > 0 {
			t.Errorf("at the address are services %v and host ports of %v", at, all)
		}
	})
}

// TestFreedNodePort: a container gets the host port that a service has just given up, whether or not the packet path
// still has it, and the service does not delete it.
func TestFreedNodePort(t *testing.T) {
	run(t, func(b *bed) {
		b.apply(services.Update{Whole: true, Services: []service.Service{outside(service.Cluster)}})
		s := outside(service.Cluster)
		s.ExternalIPs, s.NodePorts, s.Ports[0].NodePort = nil, false, 0
		b.Apply(services.Update{Tenant: "blue", Services: []service.Service{s}}) // not written yet
		b.publish(publishing(t, 1, "30080:80"))
		synctest.Wait()
		b.check("[fd70:696c:7300:5::1]:80/6 1m0s:", "[fd70:696c:6100:1::1]:30080/6 0s node 5: n1/1:80")
	})
}

// TestHostPortRestart: the next agent has the host ports of its records, also if the packet path lost them, and removes
// those of a container that is gone. Until it knows the services, their node ports stay taken.
func TestHostPortRestart(t *testing.T) {
	live, dying, lost := publishing(t, 1, "8080:80"), publishing(t, 2, "8081:80"), publishing(t, 3, "8080:80")
	dying.State, lost.State = endpoint.Deleting, endpoint.Lost
	const front = "[fd70:696c:6100:1::1]:8080/6 0s node 5: n1/1:80"
	runWith(t, []endpoint.Record{lost, dying, live}, func(b *bed) {
		synctest.Wait()
		b.check(front)
		if err := b.ReleaseHostPorts(lost); err != nil { // its DEL leaves the new owner's alone
			t.Fatal(err)
		}
		b.check(front)
		b.RestoreHostPorts(lost)
		synctest.Wait()
		b.checkProblems("host ports of container c3 (endpoint 3) are not as they should be: " +
			"host port 8080/TCP is that of container c1 (endpoint 1)")
		if err := b.ReleaseHostPorts(live); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		b.check(strings.Replace(front, "n1/1", "n1/3", 1))
		b.checkProblems()
	})
	runWith(t, []endpoint.Record{live}, func(b *bed) { // the keys of its tenant were lost
		unnumbered := blue
		unnumbered.ServicesNumber = 0
		b.set(func() { b.hosted["blue"] = unnumbered })
		b.TenantChanged("blue")
		synctest.Wait()
		before := b.Writes()
		b.SetAddresses(services.Addresses{Ports: ports})
		synctest.Wait()
		b.checkProblems("the number for services of its tenant is not known; what the packet path has stays")
		if b.Writes() != before {
			t.Error("the packet path was written without the number")
		}
		b.set(func() { b.hosted["blue"] = blue })
		b.TenantChanged("blue")
		synctest.Wait()
		b.check(front, strings.Replace(front, own1.String(), own2.String(), 1))
		b.checkProblems()
	})
	run(t, func(b *bed) {
		if err := b.PutServices([]dpapi.Frontend{{
			FrontendKey: dpapi.FrontendKey{Address: netip.AddrPortFrom(own1, 30080), Protocol: 6},
			Exposed:     dpapi.Exposed{Services: 5, Node: true},
		}}); err != nil {
			t.Fatal(err)
		}
		r := publishing(t, 1, "30080:80")
		if err := b.ClaimHostPorts(r); !errors.Is(err, refusal.ErrExhausted) ||
			!strings.Contains(err.Error(), "a service that the agent knew before it started") {
			t.Errorf("a node port of an earlier process: %v", err)
		}
		b.apply(services.Update{Whole: true})
		b.publish(r)
	})
}

// TestHostPortFails: an ADD whose host port cannot be written fails, and what is left is removed. Later failures are
// repeated, and named meanwhile.
func TestHostPortFails(t *testing.T) {
	run(t, func(b *bed) {
		r := publishing(t, 1, "8080:80")
		full := errors.New("full")
		if err := b.ClaimHostPorts(r); err != nil {
			t.Fatal(err)
		}
		b.SetFail(full)
		if err := b.PublishHostPorts(r); !errors.Is(err, full) {
			t.Errorf("got %v, want %v", err, full)
		}
		if err := b.ReleaseHostPorts(r); !errors.Is(err, full) {
			t.Errorf("got %v, want %v", err, full)
		}
		if err := b.ClaimHostPorts(publishing(t, 2, "8080:80")); err == nil {
			t.Error("a port that may be in the packet path is free")
		}
		b.checkProblems("host ports of container c1 (endpoint 1) are not as they should be: full")
		b.SetFail(nil)
		if err := b.ReleaseHostPorts(r); err != nil {
			t.Error(err)
		}
		b.check()
		b.publish(r)
		time.Sleep(time.Minute) // until the failures are forgotten
		b.SetFail(full)
		b.SetAddresses(services.Addresses{Ports: ports})
		synctest.Wait()
		b.checkProblems("host ports of container c1 (endpoint 1) are not as they should be: full")
		b.SetFail(nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		b.check("[fd70:696c:6100:1::1]:8080/6 0s node 5: n1/1:80", "[2001:db8:1::1]:8080/6 0s node 5: n1/1:80")
		b.checkProblems()
	})
}

// TestReleaseFails: the host ports of a lost container that could not be deleted go later, without another call, and
// are free then. A container that is back meanwhile keeps them.
func TestReleaseFails(t *testing.T) {
	run(t, func(b *bed) {
		r := publishing(t, 1, "8080:80")
		b.publish(r)
		failing := func() {
			t.Helper()
			b.SetFail(errors.New("full"))
			if err := b.ReleaseHostPorts(r); err == nil {
				t.Error("released without the packet path")
			}
			synctest.Wait()
			b.checkProblems("host ports of container c1 (endpoint 1) are not as they should be: full")
		}
		later := func() {
			b.SetFail(nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			b.checkProblems()
		}
		failing()
		b.RestoreHostPorts(r)
		later()
		b.check("[fd70:696c:6100:1::1]:8080/6 0s node 5: n1/1:80")
		failing()
		later()
		b.check()
		b.publish(publishing(t, 2, "8080:80"))
	})
}

// TestCheckHostPorts: CHECK names a host port that the packet path lacks or has for another container.
func TestCheckHostPorts(t *testing.T) {
	run(t, func(b *bed) {
		r := publishing(t, 1, "8080:80")
		b.publish(r)
		if err := b.CheckHostPorts(r); err != nil {
			t.Error(err)
		}
		for key, f := range b.All() {
			if err := b.DeleteServices([]dpapi.FrontendKey{key}); err != nil {
				t.Fatal(err)
			}
			if err := b.CheckHostPorts(r); err == nil || !strings.Contains(err.Error(), key.Address.String()) {
				t.Errorf("a missing frontend: %v", err)
			}
			f.Backends = nil
			if err := b.PutServices([]dpapi.Frontend{f}); err != nil {
				t.Fatal(err)
			}
			if err := b.CheckHostPorts(r); err == nil || !strings.Contains(err.Error(), key.Address.String()) {
				t.Errorf("another frontend: %v", err)
			}
		}
	})
}
