package services_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// TestOwnEndpoints: the node reports its active containers that a selector selects.
func TestOwnEndpoints(t *testing.T) {
	shop := service.Service{
		Tenant: "blue", Name: service.Name{Namespace: "shop", Name: "cart"}, Headless: true,
		Selector: map[string]string{"app": "web", "tier": "front"},
	}
	fixed := service.Service{Tenant: "blue", Name: service.Name{Name: "fixed"}, Address: vip(3)}
	labels := func(pairs ...string) map[string]string {
		all := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			all[pairs[i]] = pairs[i+1]
		}
		return all
	}
	with := func(r endpoint.Record, change func(*endpoint.Record)) endpoint.Record { change(&r); return r }
	inShop := labels("app", "web", "tier", "front", tenant.NamespaceKey, "shop")
	for name, c := range map[string]struct {
		records []endpoint.Record
		want    []string
	}{
		"none":         {nil, nil},
		"one":          {[]endpoint.Record{container(1, isWeb)}, []string{"web n1.0 z1: 1"}},
		"other labels": {[]endpoint.Record{container(1, labels("app", "db")), container(2, nil)}, nil},
		"in order": {[]endpoint.Record{container(3, isWeb), container(1, labels("app", "web", "x", "y"))},
			[]string{"web n1.0 z1: 1 3"}},
		"by namespace": {[]endpoint.Record{container(1, inShop), container(2, labels("app", "web", "tier", "front",
			tenant.NamespaceKey, "other"))}, []string{"shop/cart n1.0 z1: 1"}},
		"of two services": {[]endpoint.Record{container(1, inShop), container(2, isWeb)},
			[]string{"shop/cart n1.0 z1: 1", "web n1.0 z1: 2"}},
		"not active": {[]endpoint.Record{
			with(container(1, isWeb), func(r *endpoint.Record) { r.State = endpoint.Lost }),
			with(container(2, isWeb), func(r *endpoint.Record) { r.State = endpoint.Deleting }),
			with(container(3, isWeb), func(r *endpoint.Record) { r.State = endpoint.Preparing }),
		}, nil},
		"another tenant's": {[]endpoint.Record{
			with(container(1, isWeb), func(r *endpoint.Record) { r.Tenant = "red" })}, nil},
		"another network's": {[]endpoint.Record{with(container(1, isWeb), func(r *endpoint.Record) {
			r.Attachments = []endpoint.Attachment{{Network: tenant.Nimitz}}
		})}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(b *bed) {
				b.t = t
				b.apply(services.Update{Whole: true, Services: []service.Service{web(), shop, fixed}})
				b.add(c.records...)
				b.checkStored(c.want...)
			})
		})
	}
}

// TestServicesThatCome: services of a tenant arrive after the pass has looked its containers up. The endpoints that the
// node has reported before its restart are not reported as gone.
func TestServicesThatCome(t *testing.T) {
	run(t, func(b *bed) {
		b.add(container(1, isWeb))
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}})
		b.checkStored("web n1.0 z1: 1")
		b.mu.Lock()
		var known []service.Slice
		for _, batch := range b.sent {
			known = append(known, batch...)
		}
		b.sent = nil
		b.mu.Unlock()
		if err := b.Forget(blue); err != nil { // as a new agent, which knows nothing
			t.Fatal(err)
		}
		red := tenant.Tenant{Name: "red", IDs: blue.IDs, ServicesNumber: 6} // whose containers the pass looks up
		b.set(func() {
			b.hosted["red"] = red
			b.during = func() {
				b.Apply(services.Update{Tenant: "blue", Whole: true, Services: []service.Service{web()}, Slices: known})
			}
		})
		b.Apply(services.Update{Tenant: "red", Whole: true})
		synctest.Wait()
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, batch := range b.sent {
			t.Errorf("reported %+v, although nothing has changed", batch)
		}
	})
}

// TestOwnChanges: each change is reported and in force here at once, and nothing is reported twice.
func TestOwnChanges(t *testing.T) {
	run(t, func(b *bed) {
		b.add(container(1, isWeb))
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}})
		for i, step := range []struct {
			change   func()
			reported []string
			here     string
			reports  int
		}{
			{func() {}, []string{"web n1.0 z1: 1"}, " n1/1:8080", 0},
			{func() { b.add(container(2, isWeb)) }, []string{"web n1.0 z1: 1 2"}, " n1/1:8080 n1/2:8080", 1},
			{func() {
				b.change(1, func(r *endpoint.Record) bool { r.Labels = map[string]string{"app": "db"}; return true })
			}, []string{"web n1.0 z1: 2"}, " n1/2:8080", 1},
			{func() {
				b.change(1, func(r *endpoint.Record) bool { r.Labels = isWeb; return true })
			}, []string{"web n1.0 z1: 1 2"}, " n1/1:8080 n1/2:8080", 1},
			{func() { b.EndpointsChanged("blue"); synctest.Wait() }, []string{"web n1.0 z1: 1 2"},
				" n1/1:8080 n1/2:8080", 0},
			{func() {
				b.apply(services.Update{Ended: []service.Name{web().Name}})
				b.set(func() { b.sent = nil })
				b.apply(services.Update{Services: []service.Service{web()}})
			}, []string{"web n1.0 z1: 1 2"}, " n1/1:8080 n1/2:8080", 1},
			{func() { b.change(1, func(*endpoint.Record) bool { return false }) }, []string{"web n1.0 z1: 2"},
				" n1/2:8080", 1},
			{func() {
				b.change(2, func(r *endpoint.Record) bool { r.State = endpoint.Deleting; return true })
			}, nil, "", 1},
			{func() { time.Sleep(time.Hour); synctest.Wait() }, nil, "", 0},
		} {
			b.set(func() { b.calls = 0 })
			step.change()
			b.checkStored(step.reported...)
			b.check("[fd70:696c:7300:5::1]:80/6 0s:" + step.here)
			if n := b.calls; n != step.reports || t.Failed() {
				t.Fatalf("step %d: %d reports, want %d", i, n, step.reports)
			}
		}
	})
}

// TestStartReconciles: what the orchestrator has of this node from before is compared with its containers.
func TestStartReconciles(t *testing.T) {
	run(t, func(b *bed) {
		b.add(container(2, isWeb))
		old := slice("n1", plain("n1", 1))
		more := slice("n1", plain("n1", 3))
		more.Name = "n1.1"
		moved := slice("n1", plain("n1", 2))
		moved.Zone = "z9"
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}, Slices: []service.Slice{old, more}})
		b.checkStored("web n1.0 z1: 2")
		if len(b.sent) != 1 || len(b.sent[0]) != 2 {
			t.Errorf("reports %v", b.sent)
		}
		b.check("[fd70:696c:7300:5::1]:80/6 0s: n1/2:8080") // without the endpoints that are gone
		// A stream that has an older state for some time, as after a restore of the orchestrator's store.
		time.Sleep(time.Minute)
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}, Slices: []service.Slice{moved}})
		b.checkStored("web n1.0 z1: 2")
		if n := b.reports(); n != 2 {
			t.Errorf("%d reports, want 2", n)
		}
	})
}

// TestManyEndpoints are in slices of at most 1,000.
func TestManyEndpoints(t *testing.T) {
	run(t, func(b *bed) {
		var many []endpoint.Record
		for i := range 2*service.MaxSliceEndpoints + 1 {
			many = append(many, container(i+1, isWeb))
		}
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}})
		b.add(many...)
		sizes := map[string]int{}
		for _, s := range b.sent[0] {
			sizes[s.Name] = len(s.Endpoints)
		}
		if fmt.Sprint(sizes) != "map[n1.0:1000 n1.1:1000 n1.2:1]" {
			t.Errorf("slices %v", sizes)
		}
		key := netip.AddrPortFrom(vip(1), 80)
		for of, f := range b.All() {
			if of.Address != key || len(f.Backends) != len(many) {
				t.Errorf("%v has %d backends", of, len(f.Backends))
			}
		}
	})
}

// TestReportsAreRetried: without the orchestrator the endpoints here are in force on this node; other nodes get them
// once it answers, at once with a new stream.
func TestReportsAreRetried(t *testing.T) {
	run(t, func(b *bed) {
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}})
		away := errors.New("no leader")
		b.set(func() { b.answer = func([]service.Slice) error { return away } })
		b.add(container(1, isWeb))
		time.Sleep(time.Minute)
		if n := b.reports(); n < 6 || n > 12 {
			t.Errorf("%d reports in a minute", n)
		}
		b.check("[fd70:696c:7300:5::1]:80/6 0s: n1/1:8080")
		b.change(1, func(*endpoint.Record) bool { return false })
		b.check("[fd70:696c:7300:5::1]:80/6 0s:")
		b.add(container(2, isWeb))
		b.set(func() { b.answer, b.sent = nil, nil })
		b.Linked()
		synctest.Wait()
		b.checkStored("web n1.0 z1: 2")

		// A report that was taken, of which the stream shows nothing, is repeated.
		b.set(func() { b.silent, b.sent = true, nil })
		b.add(container(3, isWeb))
		time.Sleep(4 * time.Second)
		if b.checkStored("web n1.0 z1: 2 3"); b.reports() != 1 {
			t.Errorf("%d reports, want 1", b.reports())
		}
		time.Sleep(2 * time.Second)
		if synctest.Wait(); b.reports() != 2 {
			t.Errorf("%d reports, want 2", b.reports())
		}
	})
}

// TestRefusedReports: a slice that the orchestrator refuses is shown, and keeps no other from being reported.
func TestRefusedReports(t *testing.T) {
	run(t, func(b *bed) {
		other := web()
		other.Name, other.Address = service.Name{Name: "other"}, vip(2)
		full := fmt.Errorf("%w: the cluster has 100,000 endpoints", services.ErrRefused)
		taken := map[string]bool{}
		b.set(func() {
			b.answer = func(batch []service.Slice) error {
				for _, s := range batch {
					if s.Service == web().Name {
						return full
					}
				}
				taken[batch[0].Service.String()] = true
				return nil
			}
		})
		b.apply(services.Update{Whole: true, Services: []service.Service{web(), other}})
		b.add(container(1, isWeb))
		if !taken["other"] || taken["web"] {
			t.Errorf("taken: %v", taken)
		}
		b.checkProblems("the endpoints of service web of tenant blue on this node are not known to other nodes: the " +
			"orchestrator refused")
		before := b.reports()
		time.Sleep(time.Minute)
		if n := b.reports() - before; n < 3 || n > 12 {
			t.Errorf("%d more reports in a minute", n)
		}
		b.set(func() { b.answer = nil })
		time.Sleep(16 * time.Second)
		synctest.Wait()
		b.checkProblems()
		b.checkStored("other n1.0 z1: 1", "web n1.0 z1: 1")
		b.set(func() { b.answer = func([]service.Slice) error { return full } })
		b.add(container(2, isWeb))
		b.checkProblems("service other", "service web")
		b.apply(services.Update{Ended: []service.Name{web().Name, other.Name}})
		b.checkProblems()
	})
}

// TestManyRefused: reports are halved until the orchestrator takes them, and they pause while it has no room.
func TestManyRefused(t *testing.T) {
	const many = 200
	full := fmt.Errorf("%w: %w", services.ErrRefused, services.ErrFull)
	for name, c := range map[string]struct {
		takes       int // slices at once
		bad         bool
		least, most int // reports in a minute
	}{
		"one is refused":   {256, true, 8, 40},
		"smaller reports":  {10, false, 20, 80},
		"there is no room": {0, false, 5, 12},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(b *bed) {
				b.t = t
				largest := 0
				b.set(func() {
					b.answer = func(batch []service.Slice) error {
						largest = max(largest, len(batch))
						for _, s := range batch {
							if c.bad && s.Service.Name == "s7" {
								return services.ErrRefused
							}
						}
						if len(batch) > c.takes {
							return full
						}
						return nil
					}
				})
				var all []service.Service
				for i := range many {
					s := web()
					s.Name.Name, s.Address = fmt.Sprint("s", i), vip(i+1)
					all = append(all, s)
				}
				b.apply(services.Update{Whole: true, Services: all})
				b.add(container(1, isWeb))
				time.Sleep(time.Minute)
				synctest.Wait()
				if n := b.reports(); n < c.least || n > c.most || largest > 32 {
					t.Errorf("%d reports of at most %d slices, want %d to %d of 32", n, largest, c.least, c.most)
				}
				if c.takes > 0 {
					own := 0
					for _, s := range b.Status(true).Problems {
						if strings.Contains(s, "not known to other nodes") {
							own++
						}
					}
					if want := map[bool]int{true: 1}[c.bad]; own != want || len(b.stored()) != many {
						t.Errorf("%d problems, want %d; %d slices were reported", own, want, len(b.stored()))
					}
				}
			})
		})
	}
}

// TestSeenUnderItsOwnID: containers of an earlier tenant id are endpoints, too.
func TestSeenUnderItsOwnID(t *testing.T) {
	run(t, func(b *bed) {
		is := blue
		is.IDs = []tenant.ID{blue.IDs[0], {ID: 4, Key: address.Key{9}}}
		b.set(func() { b.hosted["blue"] = is })
		second := container(2, isWeb)
		second.Attachments = []endpoint.Attachment{{Network: tenant.Netpila, Plaintext: under("n1", 4, 2)}}
		b.add(container(1, isWeb), second)
		b.apply(services.Update{Whole: true, Services: []service.Service{web()}})
		b.checkStored("web n1.0 z1: 1 2")
		b.check("[fd70:696c:7300:5::1]:80/6 0s: n1/1:8080 n1/2:8080")
	})
}
