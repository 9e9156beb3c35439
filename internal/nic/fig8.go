package nic

import (
	"math/rand/v2"
	"time"
)

const (
	peakBegin = 15 * time.Second // so that preheating has ended
	peakEnd   = 23 * time.Second
)

// peakTraffic speaks with a new node so many times a second, and goes on speaking with all.
func peakTraffic(t *Table, demand float64, seed uint64) *Traffic {
	rng := rand.New(rand.NewPCG(seed, 8))
	var flows []Flow
	at := peakBegin
	for node := 0; ; node++ {
		if at += seconds(rng.ExpFloat64() / demand); at >= peakEnd {
			return NewTraffic(flows)
		}
		flows = append(flows, t.flow(tenantA, 10, node, 0, Burst{at, time.Hour}))
	}
}

// peakRun is a container whose traffic demands so many new entries a second; preheated, with what a rehearsal with another seed has recorded.
func peakRun(demand float64, preheated bool, seed uint64) Run {
	t := NewTable(remote(tenantA, 10, 12_000))
	r := Run{
		Spec: Production(), Policy: ProductionPolicy(), Table: t, Traffic: peakTraffic(t, demand, seed),
		Until: 32 * time.Second, Every: 100 * time.Millisecond, Containers: []float64{Production().Line},
	}
	if preheated {
		r.Pinned = peakTraffic(t, demand, seed+1).Matrix(peakBegin, peakEnd)
	}
	return r
}

// peak is what a run of it shows.
type peak struct {
	backlog int
	drained time.Duration // after its end
	lowest  float64       // Gbit/s
}

func peakOf(samples []Sample) peak {
	p := peak{lowest: Production().Line}
	for _, s := range samples {
		if s.At <= peakBegin || len(s.Rates) == 0 {
			continue
		}
		p.backlog = max(p.backlog, s.Backlog)
		if s.Backlog > 0 {
			p.drained = max(p.drained, s.At-peakEnd)
		}
		if s.Rates[0] > 0 { // it has begun
			p.lowest = min(p.lowest, s.Rates[0])
		}
	}
	return p
}
