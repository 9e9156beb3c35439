package sim

import (
	"context"
	"runtime/metrics"
	"time"
)

// Sample is the state of the cluster at a time during an event. Counts start at the event's beginning.
type Sample struct {
	At         float64 `json:"seconds"`
	Streams    int64   `json:"streams"`
	Calls      int64   `json:"calls"`      // of nodes, including streams
	Missed     int64   `json:"missed"`     // calls while no orchestrator ran
	Registered int64   `json:"registered"` // answered registrations
	Snapshots  int64   `json:"snapshots"`
	Waiting    int64   `json:"changesWaiting"` // queued for the store
	Heap       int64   `json:"heapBytes"`      // live or garbage
}

// sampleEvery is the default interval of samples.
const sampleEvery = 500 * time.Millisecond

const heapObjects = "/memory/classes/heap/objects:bytes"

// sample starts sampling; the returned function ends it and returns the samples.
func (w *world) sample(ctx context.Context) (end func() []Sample) {
	ctx, stop := context.WithCancel(ctx)
	noted := make(chan []Sample)
	began := time.Now()
	first, _ := w.live.read()
	calls, missed := w.fabric.calls.Load(), w.fabric.missed.Load()
	look := func() Sample {
		now, _ := w.live.read() // while no orchestrator runs, the metrics are empty
		counts := now.counts.since(first.counts)
		heap := []metrics.Sample{{Name: heapObjects}}
		metrics.Read(heap)
		return Sample{
			At: seconds(
				time.Since(began),
			), Streams: now.streams, Waiting: now.waiting, Heap: int64(heap[0].Value.Uint64()),
			Calls: w.fabric.calls.Load() - calls, Missed: w.fabric.missed.Load() - missed,
			Registered: counts[registered].Messages, Snapshots: counts[snapshots].Messages,
		}
	}
	all := []Sample{look()}
	go func() {
		for pause(ctx, sampleEvery) == nil {
			all = append(all, look())
		}
		noted <- append(all, look())
	}()
	return func() []Sample { stop(); return <-noted }
}
