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

// indivisible is how many nodes' calls wait for the store together.
const atOnce = 512

// BenchmarkNodes is what the store does for each node that comes: with `-benchtime 100000x` for as many nodes, on a
// disk that is told to keep what is written.
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
	var keeping sync.WaitGroup
	keeping.Go(func() { s.KeepSessions(ctx, func() { b.Error("the store forgot the sessions") }) })
	defer keeping.Wait()
	defer cancel()
	if _, err := s.CreateTenant(ctx, "blue", 0); err != nil {
		b.Fatal(err)
	}
	var done sync.Map // how many nodes each step has been taken for
	for _, step := range []struct {
		name string
		take func(ctx context.Context, n int) error
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
			_, err := s.RecordHosting(ctx, node(n), 2, []*pilasterv1.Hosting{{Tenant: "blue", Accepts: []uint32{1}, Holds: []uint32{1}}}, nil)
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
			for range atOnce {
				work.Go(func() {
					for {
						n := last.(*atomic.Int64).Add(1)
						if n > end {
							return
						}
						if err := step.take(ctx, int(n)); err != nil {
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
