package orchestrator

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

const benchWorkers = 32 // half of the concurrent joins that one source may have

// BenchmarkStreams measures the memory that a node's stream and connection take in an orchestrator. `-benchtime 1000x`
// is for 1000 nodes, which host no tenants. The orchestrator is a process of its own, with a low GOGC. The nodes share
// its processors, so an orchestrator alone would serve more calls a second.
func BenchmarkStreams(b *testing.B) {
	b.Setenv("GOGC", "10") // for the orchestrator's process
	p := startProcess(b, store.External{}, admission.Limits{Joins: 1 << 20})
	token, err := os.ReadFile(filepath.Join(p.DataDir, "join-token"))
	if err != nil {
		b.Fatal(err)
	}
	before := p.costs(b)

	nodes := make([]*join.Client, b.N)
	joins := eachNode(b, func(n int) (err error) {
		id := testNode(n)
		nodes[n], err = join.Dial(b.Context(), join.Config{
			URL: p.url, Token: string(token), StateDir: b.TempDir(),
			NodeName: id.Name, NodeUUID: id.UUID, Log: slog.New(slog.DiscardHandler),
		})
		return err
	})
	registrations := eachNode(b, func(n int) error {
		_, err := nodes[n].Register(b.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "bench"}))
		return err
	})
	streams := eachNode(b, func(n int) error {
		s := nodes[n].Follow(b.Context())
		if err := s.Send(hosting()); err != nil {
			return err
		}
		for {
			if r, err := s.Receive(); err != nil || r.GetSnapshot() != nil {
				return err
			}
		}
	})
	if connected := metric(b, p.RunDir, "pilaster_orchestrator_nodes_connected"); connected != b.N {
		b.Fatalf("%d nodes are connected, want %d", connected, b.N)
	}
	for unit, after := range p.costs(b) {
		b.ReportMetric((after-before[unit])/float64(b.N), unit)
	}
	b.ReportMetric(joins, "joins/s")
	b.ReportMetric(registrations, "registrations/s")
	b.ReportMetric(streams, "streams/s")
	b.ReportMetric(0, "ns/op") // hides a value that would include the start of the process
}

// eachNode performs a step for every node and returns the number of steps per second.
func eachNode(b *testing.B, step func(n int) error) float64 {
	b.Helper()
	began := time.Now()
	numbers := make(chan int)
	var work sync.WaitGroup
	for range benchWorkers {
		work.Go(func() {
			for n := range numbers {
				if err := step(n); err != nil {
					b.Errorf("node %d: %v", n, err)
				}
			}
		})
	}
	for n := range b.N {
		numbers <- n
	}
	close(numbers)
	work.Wait()
	if b.Failed() {
		b.FailNow()
	}
	return float64(b.N) / time.Since(began).Seconds()
}

// costs returns what the process uses now, by the unit of the benchmark's result.
func (p *process) costs(b *testing.B) map[string]float64 {
	b.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	var resident float64 // kB
	_, line, _ := strings.Cut(string(status), "VmRSS:")
	if _, err := fmt.Sscan(line, &resident); err != nil {
		b.Fatal(err)
	}
	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + filepath.Join(p.DataDir, "etcd.sock")}})
	if err != nil {
		b.Fatal(err)
	}
	defer etcd.Close()
	file, err := etcd.Status(b.Context(), etcd.Endpoints()[0])
	if err != nil {
		b.Fatal(err)
	}
	return map[string]float64{
		"B-resident/stream": resident * 1024,
		"B-heap/stream":     float64(metric(b, p.RunDir, "go_memstats_heap_inuse_bytes")),
		"B-stack/stream":    float64(metric(b, p.RunDir, "go_memstats_stack_inuse_bytes")),
		"goroutines/stream": float64(metric(b, p.RunDir, "go_goroutines")),
		"B-etcd/node":       float64(file.DbSizeInUse),
	}
}
