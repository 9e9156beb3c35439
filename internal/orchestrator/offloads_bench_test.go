package orchestrator

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// BenchmarkOffloadStep measures a step of the controller with 10,000 nodes and 50 offloads: of tenants that all nodes
// host, or of tenants of 20 nodes each. All nodes have reported loads, and 50 of them are hot: no offload of theirs can
// begin, because all other nodes are at their limit.
func BenchmarkOffloadStep(b *testing.B) {
	for name, hosts := range map[string]int{"hosted everywhere": 10_000, "hosted by 20 nodes": 20} {
		b.Run(name, func(b *testing.B) { benchmarkOffloadStep(b, hosts) })
	}
}

func benchmarkOffloadStep(b *testing.B, hosts int) {
	const nodes, offloads = 10_000, 50
	c := cache.New("o", func(string) {})
	auto := true
	batch := store.Batch{Revision: 1, Whole: true, Events: []store.Event{{OffloadAuto: &auto}}}
	for n := range nodes {
		name := testNode(n).Name
		load := &pilasterv1.NodeLoad{
			Node: name, Measured: true, Budget: 1, Own: 0.31, Rules: 10, RulesCapacity: 1000,
		}
		if hot := n - nodes/2; hot >= 0 && hot < offloads {
			load.Own = 0.9
			load.Tenants = []*pilasterv1.TenantLoad{{Tenant: fmt.Sprint("hot", hot), Load: 0.8, Rules: 10}}
		}
		batch.Events = append(batch.Events,
			store.Event{Node: &pilasterv1.Node{
				Name: name, Prefix: fmt.Sprintf("fd00:0:0:%x::/64", n), Offloads: true,
				Enforces:   []string{tenant.Nimitz},
				MtuReserve: tenant.OffloadOverhead,
			}},
			store.Event{Session: &store.NodeSession{Node: name, Session: store.Session{Orchestrator: "other"}}},
			store.Event{Load: load})
	}
	for i := range offloads {
		name, prefix := fmt.Sprint("t", i), func(n int) string { return fmt.Sprintf("fd00:0:0:%x::/64", n) }
		of := &pilasterv1.Offload{
			Id: 1, Node: testNode(i * 100).Name, Prefix: prefix(i * 100), Epoch: 1, Since: 5, Wanted: 4,
			Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE,
		}
		for f := range 4 {
			of.Frontends = append(of.Frontends,
				&pilasterv1.Frontend{Node: testNode(i*100 + 1 + f).Name, Prefix: prefix(i*100 + 1 + f)})
		}
		batch.Events = append(batch.Events, store.Event{Tenant: &pilasterv1.Tenant{
			Name: name, Changes: 5, Offloads: []*pilasterv1.Offload{of},
		}})
		for h := range hosts {
			node := testNode((i*100 + h) % nodes).Name
			batch.Events = append(batch.Events,
				store.Event{Hosting: &pilasterv1.Hosting{Tenant: name, Node: node, AppliedChanges: 5}})
		}
	}
	c.Apply(batch)
	o := newOffloads(new(store.Store), c, offload.DefaultLimits(), slog.New(slog.DiscardHandler), func(offload.Kind) {})
	now := time.Now()
	for b.Loop() {
		now = now.Add(time.Second) // hot nodes are tried every three steps
		in, _ := o.input(now, "")
		if changes := o.controller.Step(now, in).Changes; len(changes) > 0 {
			b.Fatal(changes)
		}
	}
}
