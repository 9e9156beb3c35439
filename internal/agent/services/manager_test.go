package services_test

import (
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// TestFrontends: each port of a service becomes a frontend with the endpoints that clients at this place get.
func TestFrontends(t *testing.T) {
	with := func(change func(*service.Service)) service.Service { s := web(); change(&s); return s }
	two := []service.Slice{slice("n1", plain("n1", 1)), slice("n2", plain("n2", 2))}
	marked := func(mark func(*service.Endpoint)) []service.Slice {
		s := slice("n2", plain("n2", 2), plain("n2", 3))
		mark(&s.Endpoints[0])
		return []service.Slice{s}
	}
	fixed := slice("n2", plain("n2", 9))
	fixed.Name, fixed.Node, fixed.Zone = "mine", "", ""
	for name, c := range map[string]struct {
		service service.Service
		slices  []service.Slice
		tenant  func(*tenant.Tenant)
		want    []string
		problem string
	}{
		"endpoints of two nodes": {web(), two[1:], nil, []string{"[fd70:696c:7300:5::1]:80/6 0s: n2/2:8080"}, ""},
		"fixed endpoints": {web(), []service.Slice{fixed, two[1]}, nil, []string{
			"[fd70:696c:7300:5::1]:80/6 0s: n2/2:8080 n2/9:8080"}, ""},
		"no endpoints": {web(), nil, nil, []string{"[fd70:696c:7300:5::1]:80/6 0s:"}, ""},
		"ports": {with(func(s *service.Service) {
			s.Ports = append(s.Ports, service.Port{Protocol: service.UDP, Port: 53})
		}), two[1:], nil, []string{
			"[fd70:696c:7300:5::1]:53/17 0s: n2/2:53", "[fd70:696c:7300:5::1]:80/6 0s: n2/2:8080"}, ""},
		"affinity": {with(func(s *service.Service) { s.Affinity = time.Minute }), two[1:], nil, []string{
			"[fd70:696c:7300:5::1]:80/6 1m0s: n2/2:8080"}, ""},
		"headless": {with(func(s *service.Service) {
			s.Address, s.Ports, s.Headless = netip.Addr{}, nil, true
		}), two, nil, nil, ""},
		"a terminating endpoint keeps its connections": {web(),
			marked(func(e *service.Endpoint) { e.Terminating = true }), nil, []string{
				"[fd70:696c:7300:5::1]:80/6 0s: n2/3:8080 (n2/2:8080)"}, ""},
		"one that is not ready gets no new connections": {web(),
			marked(func(e *service.Endpoint) { e.NotReady = true }), nil, []string{
				"[fd70:696c:7300:5::1]:80/6 0s: n2/3:8080 (n2/2:8080)"}, ""},
		"one on a node that does not answer keeps connections of TCP only": {with(func(s *service.Service) {
			s.Ports = append(s.Ports, service.Port{Protocol: service.UDP, Port: 53})
		}), []service.Slice{dead(two[1]), {Tenant: "blue", Service: web().Name, Name: "n3.0", Node: "n3",
			Endpoints: []service.Endpoint{{Address: plain("n1", 7)}}}}, nil, []string{
			"[fd70:696c:7300:5::1]:53/17 0s: n1/7:53", "[fd70:696c:7300:5::1]:80/6 0s: n1/7:8080 (n2/2:8080)"}, ""},
		"those of the zone first": {with(func(s *service.Service) { s.Distribution = service.PreferSameZone }),
			[]service.Slice{two[1], {Tenant: "blue", Service: web().Name, Name: "n3.0", Node: "n3", Zone: "z1",
				Endpoints: []service.Endpoint{{Address: plain("n1", 7)}}}}, nil, []string{
				"[fd70:696c:7300:5::1]:80/6 0s: n1/7:8080 (n2/2:8080)"}, ""},
		"plaintext addresses": {web(), two[1:], func(t *tenant.Tenant) { t.Addressing = tenant.Clear }, []string{
			"[fd70:696c:7300:5::1]:80/6 0s: n2/2 clear:8080"}, ""},
		"each under its own key": {web(), []service.Slice{slice("n2", plain("n2", 2), under("n2", 4, 3))},
			func(t *tenant.Tenant) { t.IDs = append(t.IDs, tenant.ID{ID: 4, Key: address.Key{9}}) }, []string{
				"[fd70:696c:7300:5::1]:80/6 0s: n2/2:8080 n2/3:8080"}, ""},
		"an id that is not known": {web(), []service.Slice{slice("n2", plain("n2", 2), under("n2", 4, 3))}, nil,
			[]string{"[fd70:696c:7300:5::1]:80/6 0s: n2/2:8080"}, "service web of tenant blue: 1 endpoint under"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(b *bed) {
				b.t = t
				if c.tenant != nil {
					is := blue
					is.IDs = slices.Clone(blue.IDs)
					c.tenant(&is)
					b.set(func() { b.hosted["blue"] = is })
				}
				b.apply(services.Update{Whole: true, Slices: c.slices})
				b.check()
				b.apply(services.Update{Services: []service.Service{c.service}})
				b.check(c.want...)
				if c.problem != "" {
					b.checkProblems(c.problem)
				} else {
					b.checkProblems()
				}
			})
		})
	}
}

func dead(s service.Slice) service.Slice {
	s.Unreachable = true
	return s
}

// TestChanges: a change writes the frontends that it changes, and no others.
func TestChanges(t *testing.T) {
	run(t, func(b *bed) {
		db := service.Service{
			Tenant: "blue", Name: service.Name{Namespace: "shop", Name: "db"}, Address: vip(2),
			Ports: []service.Port{{Protocol: service.TCP, Port: 5432}},
		}
		ofDB := service.Slice{Tenant: "blue", Service: db.Name, Name: "mine",
			Endpoints: []service.Endpoint{{Address: plain("n2", 5)}}}
		twoPorts := web()
		twoPorts.Ports = append(twoPorts.Ports, service.Port{Protocol: service.TCP, Port: 81})
		isDB, rotated := "[fd70:696c:7300:5::2]:5432/6 0s: n2/5:5432", blue
		rotated.IDs = []tenant.ID{blue.IDs[0], {ID: 4, Key: address.Key{9}}}
		for i, step := range []struct {
			change func()
			writes int
			want   []string
		}{
			{func() {
				b.apply(services.Update{
					Whole: true, Services: []service.Service{db, web()},
					Slices: []service.Slice{ofDB, slice("n2", plain("n2", 2))},
				})
			}, 2, []string{isDB, "[fd70:696c:7300:5::1]:80/6 0s: n2/2:8080"}},
			{func() { b.apply(services.Update{Slices: []service.Slice{slice("n2", plain("n2", 3))}}) }, 1,
				[]string{isDB, "[fd70:696c:7300:5::1]:80/6 0s: n2/3:8080"}},
			{func() { b.apply(services.Update{Slices: []service.Slice{slice("n2", plain("n2", 3))}}) }, 0,
				[]string{isDB, "[fd70:696c:7300:5::1]:80/6 0s: n2/3:8080"}},
			{func() { b.apply(services.Update{Services: []service.Service{twoPorts}}) }, 1, []string{isDB,
				"[fd70:696c:7300:5::1]:80/6 0s: n2/3:8080", "[fd70:696c:7300:5::1]:81/6 0s: n2/3:81"}},
			{func() {
				b.apply(services.Update{
					Services: []service.Service{web()}, Slices: []service.Slice{slice("n2", under("n2", 4, 6))},
				})
			}, 2, []string{isDB, "[fd70:696c:7300:5::1]:80/6 0s:"}},
			{func() {
				b.set(func() { b.hosted["blue"] = rotated })
				b.TenantChanged("blue")
				synctest.Wait()
			}, 1, []string{isDB, "[fd70:696c:7300:5::1]:80/6 0s: n2/6:8080"}},
			{func() {
				b.apply(services.Update{EndedSlices: []services.SliceName{{Service: web().Name, Name: "n2.0"}}})
			}, 1, []string{isDB, "[fd70:696c:7300:5::1]:80/6 0s:"}},
			{func() {
				b.apply(services.Update{
					Whole: true, Services: []service.Service{db}, Slices: []service.Slice{ofDB},
				})
			}, 1, []string{isDB}},
			{func() {
				b.apply(services.Update{
					Ended: []service.Name{db.Name}, Services: []service.Service{db},
				})
			}, 1, []string{"[fd70:696c:7300:5::2]:5432/6 0s:"}},
			{func() { b.apply(services.Update{Ended: []service.Name{db.Name}}) }, 1, nil},
		} {
			before := b.Writes()
			step.change()
			if b.check(step.want...); b.Writes()-before != step.writes || t.Failed() {
				t.Fatalf("step %d: %d frontends were written, want %d", i, b.Writes()-before, step.writes)
			}
		}
	})
}

// earlier fills the packet path as an earlier process has left it: a service of tenant blue that is gone by now, one
// that is not, and one of another tenant.
func earlier(b *bed) (gone, stays, others string) {
	for _, a := range []string{"[fd70:696c:7300:5::9]:80", "[fd70:696c:7300:5::1]:80", "[fd70:696c:7300:6::1]:80"} {
		if err := b.PutServices([]dpapi.Frontend{{
			FrontendKey: dpapi.FrontendKey{Address: netip.MustParseAddrPort(a), Protocol: 6},
		}}); err != nil {
			b.t.Fatal(err)
		}
	}
	return "[fd70:696c:7300:5::9]:80/6 0s:", "[fd70:696c:7300:5::1]:80/6 0s:", "[fd70:696c:7300:6::1]:80/6 0s:"
}

// TestRestart: what an earlier process wrote stays until all services of the tenant are known.
func TestRestart(t *testing.T) {
	run(t, func(b *bed) {
		gone, stays, others := earlier(b)
		b.apply(services.Update{Services: []service.Service{web()}})
		b.add(container(1, isWeb))
		if b.check(gone, stays, others); b.reports() > 0 || b.synced["blue"] {
			t.Error("endpoints were reported before the services were known")
		}
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}})
		if b.check("[fd70:696c:7300:5::1]:80/6 0s: n1/1:8080", others); !b.synced["blue"] {
			t.Error("the tenant still counts as incomplete")
		}
	})
}

// TestForget: a tenant that the node does not host any more leaves nothing, and nothing that arrives late is kept.
func TestForget(t *testing.T) {
	run(t, func(b *bed) {
		_, _, others := earlier(b)
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}})
		b.set(func() { delete(b.hosted, "blue") })
		if err := b.Forget(blue); err != nil {
			t.Fatal(err)
		}
		b.apply(services.Update{Services: []service.Service{web()}})
		if b.check(others); b.synced["blue"] || b.Status(false).Services > 0 {
			t.Errorf("afterwards %+v", b.Status(false))
		}
		none := blue
		none.ServicesNumber = 0
		b.SetFail(agenttest.ErrFake)
		if err := b.Forget(none); err != nil {
			t.Errorf("a tenant that has had no service: %v", err)
		}
		if err := b.Forget(blue); err == nil {
			t.Error("no error")
		}
	})
}

// TestFullTables: what does not fit is shown and retried, and does not keep other services of the tenant from changing.
func TestFullTables(t *testing.T) {
	run(t, func(b *bed) {
		var many []netip.Addr
		for i := range 10 {
			many = append(many, plain("n2", i+1))
		}
		small := web()
		small.Name, small.Address = service.Name{Name: "small"}, vip(2)
		ofSmall := slice("n2", plain("n2", 20))
		ofSmall.Service = small.Name
		b.Limit(5)
		b.apply(services.Update{
			Whole: true, Services: []service.Service{web(), small},
			Slices: []service.Slice{slice("n2", many...), ofSmall},
		})
		b.check("[fd70:696c:7300:5::2]:80/6 0s: n2/20:8080")
		b.checkProblems("services of tenant blue are not in the packet path as they should be: table pil_backends_v1")
		time.Sleep(time.Minute)
		b.checkProblems("table pil_backends_v1")
		b.apply(services.Update{Slices: []service.Slice{slice("n2", many[0])}})
		b.check("[fd70:696c:7300:5::1]:80/6 0s: n2/1:8080", "[fd70:696c:7300:5::2]:80/6 0s: n2/20:8080")
		b.checkProblems()
		b.apply(services.Update{Slices: []service.Slice{slice("n2", many[:5]...)}})
		b.checkProblems("table pil_backends_v1")
		b.Limit(0)
		time.Sleep(16 * time.Second)
		synctest.Wait()
		b.checkProblems()
		b.check("[fd70:696c:7300:5::1]:80/6 0s: n2/1:8080 n2/2:8080 n2/3:8080 n2/4:8080 n2/5:8080",
			"[fd70:696c:7300:5::2]:80/6 0s: n2/20:8080")
	})
}

// TestStatus counts services, endpoints, and what clients do.
func TestStatus(t *testing.T) {
	run(t, func(b *bed) {
		b.add(container(1, isWeb))
		b.apply(services.Update{
			Whole: true, Services: []service.Service{web()}, Slices: []service.Slice{slice("n2", plain("n2", 2))},
		})
		key := dpapi.FrontendKey{Address: netip.AddrPortFrom(vip(1), 80), Protocol: 6}
		b.Count(key, dpapi.ServiceCounts{Flows: 7, Refused: 2})
		b.Count(dpapi.FrontendKey{Address: netip.AddrPortFrom(vip(9), 80), Protocol: 6}, dpapi.ServiceCounts{Flows: 1})
		s := b.Status(true)
		want := []services.Count{{"blue", web().Name, key, dpapi.ServiceCounts{Flows: 7, Refused: 2}}}
		if s.Services != 1 || s.Endpoints != 2 || s.Own != 1 || !slices.Equal(s.Counts, want) {
			t.Errorf("status %+v", s)
		}
		b.SetFail(agenttest.ErrFake)
		if s := b.Status(true); len(s.Problems) != 1 {
			t.Errorf("problems %q", s.Problems)
		}
	})
}
