package orchestrator

import (
	"fmt"
	"log/slog"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// BenchmarkOffloadStep measures a step of the controller with 10,000 nodes that host a tenant with one offload.
func BenchmarkOffloadStep(b *testing.B) {
	c := cache.New("o", func(string) {})
	batch := store.Batch{Revision: 1, Whole: true}
	for n := range 10_000 {
		name := testNode(n).Name
		batch.Events = append(batch.Events,
			store.Event{Node: &pilasterv1.Node{
				Name: name, Prefix: fmt.Sprintf("fd00:0:0:%x::/64", n), Offloads: true,
				Enforces: []string{tenant.Nimitz},
			}},
			store.Event{Session: &store.NodeSession{Node: name, Session: store.Session{Orchestrator: "other"}}},
			store.Event{Hosting: &pilasterv1.Hosting{Tenant: "red", Node: name, AppliedChanges: 5}})
	}
	batch.Events = append(batch.Events, store.Event{Tenant: &pilasterv1.Tenant{
		Name: "red", Changes: 5, Offloads: []*pilasterv1.Offload{{
			Id: 1, Node: "n1", Prefix: "fd00:0:0:1::/64", Epoch: 1, Since: 5, Wanted: 1,
			Phase:     pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE,
			Frontends: []*pilasterv1.Frontend{{Node: "n2", Prefix: "fd00:0:0:2::/64"}},
		}},
	}})
	c.Apply(batch)
	o := newOffloads(nil, c, offload.DefaultLimits(), slog.New(slog.DiscardHandler), func(offload.Kind) {})
	for b.Loop() {
		if o.step(b.Context()); len(o.result.Changes) > 0 {
			b.Fatal(o.result.Changes)
		}
	}
}
