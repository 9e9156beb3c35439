package cache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// Only events of a node wake a goroutine that waits for that node.
func TestOnlyEventsOfTheNodeWake(t *testing.T) {
	m, _ := newTestCache()
	var checks [3]int
	ctx, cancel := context.WithCancel(t.Context())
	var waits sync.WaitGroup
	wait := func(i int, ctx context.Context, node string, until int64, want error) {
		before := m.waiting()
		waits.Go(func() {
			err := m.AwaitNode(ctx, node, func() bool { checks[i]++; return m.Revision >= until })
			if err != want {
				t.Errorf("waiter %d: error %v, want %v", i, err, want)
			}
		})
		for m.waiting() == before {
		}
	}
	wait(0, t.Context(), "n1", 20, nil)
	wait(1, t.Context(), anything, 12, nil)
	wait(2, ctx, "n2", 99, context.Canceled)
	app(m, 11, "blue")
	for m.waiting() < 3 { // until the second waits again
	}
	app(m, 12, "blue")
	for m.waiting() > 2 {
	}
	m.Apply(store.Batch{Revision: 20, Events: []store.Event{{Session: &store.NodeSession{Node: "n1"}}}})
	for m.waiting() > 1 {
	}
	cancel()
	waits.Wait()
	// Each goroutine checks its condition twice before it waits: with the read lock, then with the write lock.
	if want := [3]int{3, 5, 2}; checks != want {
		t.Errorf("the conditions ran %v times, want %v", checks, want)
	}
	if m.waiting() != 0 || len(m.waiters) != 0 {
		t.Errorf("%d goroutines still wait, want 0", m.waiting())
	}
	for name, e := range map[string]store.Event{
		"record":        {Node: &pilasterv1.Node{Name: "n1"}},
		"deleted":       {DeletedNode: "n1"},
		"hosting":       {Hosting: &pilasterv1.Hosting{Tenant: "red", Node: "n1"}},
		"ended hosting": {EndedHosting: &pilasterv1.Hosting{Tenant: "red", Node: "n1"}},
		"transit": {Tenant: &pilasterv1.Tenant{
			Name: "red", Publications: []*pilasterv1.Publication{{Node: "n1"}},
		}},
	} {
		until := m.Revision + 1
		wait(0, t.Context(), "n1", until, nil)
		m.Apply(store.Batch{Revision: until, Events: []store.Event{e}})
		waits.Wait()
		if m.waiting() != 0 {
			t.Errorf("%s: the goroutine still waits", name)
		}
	}
}

// waiting counts the goroutines that wait.
func (m *Cache) waiting() (n int) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for _, w := range m.waiters {
		n += w.count
	}
	return n
}

// Streams, tenants and transit tenants start, change and end in random order. Exactly the streams that have a tenant
// receive its events.
func TestStreamsReceiveEventsOfTheirTenants(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	m := New("self", func(string) {})
	tenants, revision := []string{"blue", "red", "green"}, int64(10)
	var events []store.Event
	for n := range 3 {
		events = append(events, store.Event{Node: &pilasterv1.Node{Name: testNode(n).Name, Uuid: testNode(n).UUID}})
	}
	m.Apply(store.Batch{Revision: revision, Whole: true, Events: events})
	some := func() (names []string) {
		for _, name := range tenants {
			if r.IntN(2) == 0 {
				names = append(names, name)
			}
		}
		return names
	}
	var all []*Subscriber // also streams that have ended
	received := 0
	for range 3000 {
		node, name := testNode(r.IntN(3)), tenants[r.IntN(3)]
		e := store.Event{DeletedTenant: name}
		switch r.IntN(7) {
		case 0:
			all = append(
				all,
				m.Subscribe(
					node,
					store.Session{},
					&pilasterv1.FollowRequest{
						HostedTenants:  some(),
						CarriedTenants: some(),
						ResumeRevision: revision - int64(r.IntN(5)),
					},
					func(error) {},
				),
			)
		case 1:
			if len(all) > 0 {
				m.Rehost(all[r.IntN(len(all))], &pilasterv1.FollowRequest{HostedTenants: some()})
			}
		case 2:
			if len(all) > 0 {
				m.Unsubscribe(all[r.IntN(len(all))])
			}
		case 3:
			e = store.Event{App: &pilasterv1.App{Tenant: name, Id: 1}}
		case 4, 5:
			e = store.Event{Tenant: &pilasterv1.Tenant{Name: name}}
			if r.IntN(2) == 0 {
				e.Tenant.Publications = []*pilasterv1.Publication{{Name: "p", Node: node.Name}}
			}
		}
		if e.DeletedTenant == "" || r.IntN(4) == 0 {
			for _, f := range all {
				for f.Queue.Next() != nil { // a full queue would end the stream
				}
			}
			receives := map[*Subscriber]bool{}
			for _, f := range m.Subscribers {
				receives[f] = f.has(tenantOf(e)) || m.TransitTenants(f.Node.Name)[name]
			}
			revision++
			m.Apply(store.Batch{Revision: revision, Events: []store.Event{e}})
			for _, f := range all {
				want := 0
				// This event may make the tenant a transit tenant of the node.
				if receives[f] || m.Subscribers[f.Node.Name] == f && m.TransitTenants(f.Node.Name)[name] {
					want = 1
				}
				if f.Queue.Len() != want {
					t.Fatalf("%+v: a stream received %d messages, want %d", e, f.Queue.Len(), want)
				}
				received += f.Queue.Len()
			}
		}
		want := map[string]map[*Subscriber]bool{}
		for _, f := range m.Subscribers {
			for _, name := range tenants {
				if f.has(name) {
					add(want, name, f)
				}
			}
		}
		if fmt.Sprint(want) != fmt.Sprint(m.byTenant) {
			t.Fatalf("streams by tenant are %v, want %v", m.byTenant, want)
		}
	}
	if received == 0 {
		t.Error("no stream received a message, so the test checked nothing")
	}
}
