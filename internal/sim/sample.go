package sim

import (
	"context"
	"runtime/metrics"
	"time"
)

// Sample is how things stand while an event happens. What is counted is counted from the event's beginning.
type Sample struct {
	At         float64 `json:"seconds"`
	Streams    int64   `json:"streams"`
	Calls      int64   `json:"calls"`      // of nodes, streams too
	Missed     int64   `json:"missed"`     // those of them that found no orchestrator
	Registered int64   `json:"registered"` // answers
	Snapshots  int64   `json:"snapshots"`
	Waiting    int64   `json:"changesWaiting"` // for the store
	Heap       int64   `json:"heapBytes"`      // live or garbage
}

// sampleEvery is how often, where that is little beside all the rest.
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
		now, _ := w.live.read() // of none there is nothing to read
		said := now.counts.since(first.counts)
		heap := []metrics.Sample{{Name: heapObjects}}
		metrics.Read(heap)
		return Sample{
			At: seconds(
				time.Since(began),
			), Streams: now.streams, Waiting: now.waiting, Heap: int64(heap[0].Value.Uint64()),
			Calls: w.fabric.calls.Load() - calls, Missed: w.fabric.missed.Load() - missed,
			Registered: said[registered].Messages, Snapshots: said[snapshots].Messages,
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
