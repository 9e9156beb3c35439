package nic

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/plot"
)

// The server of fig 12. Container 1's job has run for a long time with the same nodes. Container 2 runs two jobs of its
// tenant. The entries of the first job have aged when the second job begins. The second job continuously sends to new
// nodes.
const (
	oldJobEnds     = 20 * time.Second
	newJobBegins   = 30 * time.Second
	judgedFrom     = 40 * time.Second // after the new job's first packets
	fluctuationEnd = 120 * time.Second

	steadyPeers  = 5000
	oldJobPeers  = 4000
	newJobNodes  = 12_000 // §4.2
	newJobPeers  = 6000
	turn         = 60 * time.Second // container 2 sends to the same node again after this time
	turnBusy     = 20 * time.Second
	containerMax = 200 // Gbit/s of each container
)

func serverTable() *Table {
	return NewTable(
		slices.Concat(
			remote(tenantA, 10, steadyPeers),
			remote(tenantB, 11, oldJobPeers),
			remote(tenantB, 12, newJobNodes),
		),
	)
}

func serverTraffic(t *Table, seed uint64) *Traffic {
	rng := rand.New(rand.NewPCG(seed, 12))
	var flows []Flow
	for n := range steadyPeers {
		flows = append(flows, t.flow(tenantA, 10, n, 0, Burst{0, time.Hour}))
	}
	for n := range oldJobPeers {
		flows = append(flows, t.flow(tenantB, 11, n, 1, Burst{0, oldJobEnds}))
	}
	for n := range newJobPeers {
		f := t.flow(tenantB, 12, n, 1)
		for at := newJobBegins - seconds(rng.Float64()*turn.Seconds()); at < fluctuationEnd; at += turn {
			if from, to := max(at, newJobBegins), at+turnBusy; from < to {
				f.Bursts = append(f.Bursts, Burst{from, to})
			}
		}
		flows = append(flows, f)
	}
	return NewTraffic(flows)
}

// serverRun returns the server as in §4.2.
func serverRun(seed uint64) Run {
	t := serverTable()
	return Run{
		Spec: Production(), Policy: ProductionPolicy(), Table: t, Traffic: serverTraffic(t, seed),
		Until: fluctuationEnd, Every: 100 * time.Millisecond, Containers: []float64{containerMax, containerMax},
	}
}

// change is a modification of a run.
type change struct {
	Name string
	make func(r *Run, seed uint64)
}

// cures returns changes of the run. Each removes one cause of the fluctuation.
func cures() []change {
	return []change{
		{"counters without delay", func(r *Run, _ uint64) { r.Spec.CounterDelay = 0 }},
		{"threshold raised to 10 s", func(r *Run, _ uint64) { r.Policy.Threshold = 10 * time.Second }},
		{"preheated", func(r *Run, seed uint64) { // from a rehearsal of the new job with another seed
			r.Pinned = serverTraffic(r.Table, seed+1).Matrix(newJobBegins, fluctuationEnd)
		}},
		{"static offload", func(r *Run, _ uint64) { r.Pinned, r.Policy.Period = r.Table.All(), 0 }},
	}
}

// free is a change that no real NIC allows. It shows that the switch takes the duration of removals for a sign of too
// many entries.
var free = change{"removals that take no time", func(r *Run, _ uint64) { r.Spec.RemoveEntry = 0 }}

// Fluctuation describes a container's throughput after the new job has begun.
type Fluctuation struct {
	Below    float64 // seconds below 90 % of its offered load
	Lowest   float64 // Gbit/s
	Removed  int     // removed entries of the node in this time
	Mistaken int     // removed entries that were in use
}

func judge(r Run, samples []Sample, container int) Fluctuation {
	f := Fluctuation{Lowest: r.Containers[container]}
	var low int
	var before Sample
	for _, s := range samples {
		if s.At <= judgedFrom {
			before = s
			continue
		}
		if s.Rates[container] < 0.9*r.Containers[container] {
			low++
		}
		f.Lowest = min(f.Lowest, s.Rates[container])
		f.Removed, f.Mistaken = s.Removed-before.Removed, s.Mistaken-before.Mistaken
	}
	f.Below = float64(low) * r.Every.Seconds()
	return f
}

// Server is the result for the server of fig 12.
type Server struct {
	Most       float64 // offered load of each container, Gbit/s
	Lines      [2]plot.Line
	Containers [2]Fluctuation
}

// RunServer simulates the server with this delay of the NIC's counters; everything else is as in §4.2.
func RunServer(ctx context.Context, seed uint64, delay time.Duration) (s Server, err error) {
	r := serverRun(seed)
	r.Spec.CounterDelay = delay
	samples, err := r.Do(ctx)
	if err != nil {
		return s, err
	}
	s.Most = containerMax
	for c := range s.Lines {
		s.Lines[c] = line(
			fmt.Sprintf("container %d", c+1),
			samples,
			newJobBegins,
			func(s Sample) float64 { return s.Rates[c] },
		)
		s.Containers[c] = judge(r, samples, c)
	}
	return s, nil
}
