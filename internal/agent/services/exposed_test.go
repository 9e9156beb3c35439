package services_test

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
)

// outside is service web, which hosts outside reach at an external address and at a node port.
func outside(policy service.TrafficPolicy) service.Service {
	s := web()
	s.ExternalIPs = []netip.Addr{netip.MustParseAddr("2001:db8:7::9")}
	s.NodePorts, s.Ports[0].NodePort, s.TrafficPolicy = true, 30080, policy
	s.Affinity, s.Distribution = time.Minute, service.PreferSameNode
	return s
}

// TestExposed: a service has a frontend for each port at its own address, at its external addresses and, with its node
// port, at those of the node. Clients outside get endpoints by the traffic policy, whatever the distribution is.
func TestExposed(t *testing.T) {
	const own, external, node = "[fd70:696c:7300:5::1]:80/6 1m0s: ", "[2001:db8:7::9]:80/6 1m0s outside 5:",
		"[fd70:696c:6100:1::1]:30080/6 1m0s node 5:"
	for name, c := range map[string]struct {
		policy     service.TrafficPolicy
		here       int // containers
		inside, to string
		ends       bool // the container here
	}{
		"Cluster":         {service.Cluster, 1, "n1/1:8080 (n2/2:8080)", " n1/1:8080 n2/2:8080", false},
		"Local":           {service.Local, 1, "n1/1:8080 (n2/2:8080)", " n1/1:8080", false},
		"Local, none":     {service.Local, 0, "n2/2:8080", "", false},
		"Local, drained":  {service.Local, 1, "n2/2:8080 (n1/1:8080)", " n1/1:8080", true},
		"Cluster, drains": {service.Cluster, 1, "n2/2:8080 (n1/1:8080)", " n2/2:8080 (n1/1:8080)", true},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(b *bed) {
				b.t = t
				for range c.here {
					r := container(1, isWeb)
					r.Conditions.Terminating = c.ends
					b.add(r)
				}
				b.apply(services.Update{
					Whole: true, Services: []service.Service{outside(c.policy)},
					Slices: []service.Slice{slice("n2", plain("n2", 2))},
				})
				b.check(own+c.inside, external+c.to, node+c.to)
			})
		})
	}
}

// TestExposedChanges: what is exposed follows the service and the addresses of the node.
func TestExposedChanges(t *testing.T) {
	const own, external = "[fd70:696c:7300:5::1]:80/6 1m0s: n2/2:8080", "[2001:db8:7::9]:80/6 1m0s outside 5: n2/2:8080"
	node := func(a string) string { return "[" + a + "]:30080/6 1m0s node 5: n2/2:8080" }
	run(t, func(b *bed) {
		b.apply(services.Update{
			Whole: true, Services: []service.Service{outside(service.Cluster)},
			Slices: []service.Slice{slice("n2", plain("n2", 2))},
		})
		b.check(own, external, node("fd70:696c:6100:1::1"))
		before := b.Writes()
		first, second := netip.MustParseAddr("fd70:696c:6100:1::1"), netip.MustParseAddr("2001:db8:1::1")
		b.SetAddresses(services.Addresses{Ports: []netip.Addr{first, second}})
		synctest.Wait()
		b.check(own, external, node("fd70:696c:6100:1::1"), node("2001:db8:1::1"))
		if n := b.Writes() - before; n != 1 {
			t.Errorf("a new address wrote %d frontends, want 1", n)
		}
		taken := services.Addresses{Own: []netip.Addr{netip.MustParseAddr("2001:db8:7::9")}, Ports: []netip.Addr{first}}
		b.SetAddresses(taken)
		synctest.Wait()
		b.check(own, node("fd70:696c:6100:1::1")) // the external address has become one of the node
		b.SetAddresses(services.Addresses{Ports: []netip.Addr{first}})
		synctest.Wait()
		b.check(own, external, node("fd70:696c:6100:1::1"))
		s := outside(service.Cluster)
		s.NodePorts, s.Ports[0].NodePort = false, 0
		b.apply(services.Update{Services: []service.Service{s}})
		b.check(own, external)
		s.ExternalIPs = nil
		b.apply(services.Update{Services: []service.Service{s}})
		b.check(own)
	})
}

// TestOrchestratorsAddress: no service is exposed at an address at which the agent calls the orchestrator, also after
// addresses of the node have changed.
func TestOrchestratorsAddress(t *testing.T) {
	run(t, func(b *bed) {
		s := outside(service.Cluster)
		s.ExternalIPs = append(s.ExternalIPs, netip.MustParseAddr("2001:db8:7::a"))
		s.NodePorts, s.Ports[0].NodePort = false, 0
		b.apply(services.Update{Whole: true, Services: []service.Service{s}})
		const own, kept = "[fd70:696c:7300:5::1]:80/6 1m0s:", "[2001:db8:7::a]:80/6 1m0s outside 5:"
		b.check(own, "[2001:db8:7::9]:80/6 1m0s outside 5:", kept)
		b.OrchestratorAt(s.ExternalIPs[0])
		synctest.Wait()
		b.check(own, kept)
		b.SetAddresses(services.Addresses{Ports: []netip.Addr{own1}})
		b.apply(services.Update{Whole: true, Services: []service.Service{s}})
		b.check(own, kept)
	})
}

// TestLoadBalancer: the load-balancer address is like an external one, and counts once if it is also one.
func TestLoadBalancer(t *testing.T) {
	const own, external = "[fd70:696c:7300:5::1]:80/6 1m0s: n2/2:8080", "[2001:db8:7::9]:80/6 1m0s outside 5: n2/2:8080"
	run(t, func(b *bed) {
		s := outside(service.Cluster)
		s.NodePorts, s.Ports[0].NodePort = false, 0
		s.LoadBalancer, s.LoadBalancerIP = true, netip.MustParseAddr("2001:db8:8::7")
		b.apply(services.Update{
			Whole: true, Services: []service.Service{s}, Slices: []service.Slice{slice("n2", plain("n2", 2))},
		})
		b.check(own, external, "[2001:db8:8::7]:80/6 1m0s outside 5: n2/2:8080")
		s.LoadBalancerIP = s.ExternalIPs[0]
		b.apply(services.Update{Services: []service.Service{s}})
		b.check(own, external)
		s.ExternalIPs = nil
		b.apply(services.Update{Services: []service.Service{s}})
		b.check(own, external)
	})
}

// TestExposedRestart: exposed frontends of an earlier process stay until all services of the tenant are known, and
// those of other tenants then, too.
func TestExposedRestart(t *testing.T) {
	run(t, func(b *bed) {
		for a, is := range map[string]dpapi.Exposed{
			"[2001:db8:7::8]:80": {Services: 5}, "[2001:db8:7::9]:80": {Services: 5},
			"[fd70:696c:6100:1::1]:30081": {Services: 5, Node: true}, "[2001:db8:7::6]:80": {Services: 6},
		} {
			if err := b.PutServices([]dpapi.Frontend{{
				FrontendKey: dpapi.FrontendKey{Address: netip.MustParseAddrPort(a), Protocol: 6}, Exposed: is,
			}}); err != nil {
				t.Fatal(err)
			}
		}
		const others = "[2001:db8:7::6]:80/6 0s outside 6:"
		b.apply(services.Update{Services: []service.Service{outside(service.Cluster)}})
		b.check("[2001:db8:7::8]:80/6 0s outside 5:", "[2001:db8:7::9]:80/6 0s outside 5:",
			"[fd70:696c:6100:1::1]:30081/6 0s node 5:", others)
		b.apply(services.Update{Whole: true, Services: []service.Service{outside(service.Cluster)}})
		b.check("[fd70:696c:7300:5::1]:80/6 1m0s:", "[2001:db8:7::9]:80/6 1m0s outside 5:",
			"[fd70:696c:6100:1::1]:30080/6 1m0s node 5:", others)
		b.set(func() { delete(b.hosted, "blue") })
		if err := b.Forget(blue); err != nil {
			t.Fatal(err)
		}
		b.check(others)
	})
}

// TestExposedPasses: a tenant that gives an external address up does not delete the frontend of the one that has it
// now, whichever of the two is written first.
func TestExposedPasses(t *testing.T) {
	for _, to := range []string{"amber", "green"} { // written before blue, and after it
		run(t, func(b *bed) {
			b.t = t
			other := blue
			other.Name, other.ServicesNumber = to, 6
			b.set(func() { b.hosted[to] = other })
			b.apply(services.Update{Whole: true, Services: []service.Service{outside(service.Cluster)}})
			given := outside(service.Cluster)
			given.ExternalIPs, given.NodePorts, given.Ports[0].NodePort = nil, false, 0
			taken := outside(service.Cluster)
			taken.Tenant, taken.Address = to, netip.MustParseAddr("fd70:696c:7300:6::1")
			b.Apply(services.Update{Tenant: "blue", Services: []service.Service{given}})
			b.Apply(services.Update{Tenant: to, Whole: true, Services: []service.Service{taken}})
			synctest.Wait()
			b.check("[fd70:696c:7300:5::1]:80/6 1m0s:", "[fd70:696c:7300:6::1]:80/6 1m0s:",
				"[2001:db8:7::9]:80/6 1m0s outside 6:", "[fd70:696c:6100:1::1]:30080/6 1m0s node 6:")
		})
	}
}
