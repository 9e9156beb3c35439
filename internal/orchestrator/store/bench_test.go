package store_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// concurrency is the number of concurrent calls.
const concurrency = 512

// BenchmarkNodes measures the calls of each new node: 100,000 nodes with `-benchtime 100000x`. The store syncs its
// writes to disk.
func BenchmarkNodes(b *testing.B) {
	log := slog.New(slog.DiscardHandler)
	e, err := store.Embed(b.Context(), b.TempDir(), log)
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	s, err := store.Open(b.Context(), e.Client, address.Plan{}, log)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var sessions sync.WaitGroup
	sessions.Go(func() { s.KeepSessions(ctx, func() { b.Error("the store lost the sessions") }) })
	defer sessions.Wait()
	defer cancel()
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		b.Fatal(err)
	}
	var done sync.Map // number of nodes for which a step has run, by its name
	for _, step := range []struct {
		name string
		call func(ctx context.Context, n int) error
	}{
		{"register", func(ctx context.Context, n int) error {
			_, err := s.Register(ctx, store.Registration{Node: node(n), Version: "v1"})
			return err
		}},
		{"resolve", func(ctx context.Context, n int) error {
			_, _, err := s.Resolve(ctx, node(n), 1, "blue", map[string]string{"app": "web"})
			return err
		}},
		{"connect", func(ctx context.Context, n int) error { return s.Connect(ctx, node(n), session(n)) }},
		{"report", func(ctx context.Context, n int) error {
			report := &pilasterv1.Hosting{Tenant: "blue", Accepts: []uint32{1}, Holds: []uint32{1}}
			_, err := s.RecordHosting(ctx, node(n), 2, []*pilasterv1.Hosting{report}, nil)
			return err
		}},
		{"register again", func(ctx context.Context, n int) error {
			_, err := s.Register(ctx, store.Registration{Node: node(n), Version: "v1", Instance: fmt.Sprint("i", n)})
			return err
		}},
	} {
		b.Run(step.name, func(b *testing.B) {
			last, _ := done.LoadOrStore(step.name, new(atomic.Int64))
			var work sync.WaitGroup
			end := last.(*atomic.Int64).Load() + int64(b.N)
			for range concurrency {
				work.Go(func() {
					for {
						n := last.(*atomic.Int64).Add(1)
						if n > end {
							return
						}
						if err := step.call(ctx, int(n)); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			work.Wait()
			last.(*atomic.Int64).Store(end)
		})
	}
}
