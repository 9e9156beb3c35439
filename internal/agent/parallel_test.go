package agent_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
)

// Calls for different endpoints run concurrently; calls for one endpoint are serialised. In any order, addresses and
// ids are unique, and nothing is left when all endpoints are deleted.
func TestManyAtOnce(t *testing.T) {
	b := newBed(t)
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for n := range 6 {
				q := b.Request(fmt.Sprintf("c%d", (worker+n)%5))
				q.Tenant = []string{"blue", "red"}[n%2]
				if _, err := b.Add(t.Context(), q); err != nil && !errors.Is(err, refusal.ErrExists) {
					t.Error(err)
				}
				addresses, ids := map[netip.Addr]bool{}, map[endpoint.ID]bool{}
				for _, r := range b.Endpoints() {
					if addresses[r.Attachments[0].Plaintext] || ids[r.ID] {
						t.Errorf("%v or id %d is given twice", r.Attachments[0].Plaintext, r.ID)
					}
					addresses[r.Attachments[0].Plaintext], ids[r.ID] = true, true
				}
				if err := b.Delete(t.Context(), fmt.Sprintf("c%d", (worker+n+1)%5), "eth0"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for n := range 5 {
		if err := b.Delete(t.Context(), fmt.Sprintf("c%d", n), "eth0"); err != nil {
			t.Fatal(err)
		}
	}
	b.CheckClean()
}

// Two endpoints are being made at the same moment: neither waits for the other.
func TestDifferentEndpointsDoNotWait(t *testing.T) {
	b := newBed(t)
	var both sync.WaitGroup
	both.Add(2)
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "CreateDevice" {
			both.Done()
			both.Wait() // deadlocks if the calls are serialised
		}
	}
	var wg sync.WaitGroup
	for _, c := range []string{"c1", "c2"} {
		wg.Go(func() {
			if _, err := b.Add(t.Context(), b.Request(c)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestWaitingForTheSameEndpointEndsWithTheCaller(t *testing.T) {
	b := newBed(t)
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "CreateDevice" {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := b.Delete(ctx, "c1", "eth0"); !errors.Is(err, refusal.ErrUnavailable) {
				t.Errorf("DEL during the ADD: %v", err)
			}
		}
	}
	b.MustAdd("c1")
}

// While the policies of one tenant are being installed, containers of other tenants are added.
func TestPoliciesOfOneTenantDelayNoOther(t *testing.T) {
	b := newBed(t)
	b.MustAdd("c1")
	installing, done := make(chan struct{}), make(chan struct{})
	var once sync.Once
	b.Driver.During = func(call string, _ endpoint.Record) {
		if call == "SetPolicies" {
			once.Do(func() {
				close(installing)
				<-done
			})
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b.MustApplyPolicies(agenttest.AllPolicies("blue", agenttest.Document("deny", agenttest.DenyAll)))
	})
	<-installing
	added := make(chan error, 1)
	go func() {
		q := b.Request("r1")
		q.Tenant = "red"
		_, err := b.Add(t.Context(), q)
		added <- err
	}()
	select {
	case err := <-added:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("an ADD waits for the policies of another tenant")
	}
	close(done)
	wg.Wait()
}
