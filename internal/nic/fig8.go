package nic

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	peakBegin = 15 * time.Second // after the end of preheating
	peakEnd   = 23 * time.Second
)

// peakTraffic returns traffic that begins to send to demand new destinations per second, until the peak ends or all
// destinations are in use, and continues to send to all of them.
func peakTraffic(to []Handle, demand float64, seed uint64) *Traffic {
	rng := rand.New(rand.NewPCG(seed, 8))
	var flows []Flow
	at := peakBegin
	for _, h := range to {
		if at += seconds(rng.ExpFloat64() / demand); at >= peakEnd {
			break
		}
		flows = append(flows, Flow{Handle: h, Packets: packetRate, Bursts: []Burst{{at, time.Hour}}})
	}
	return NewTraffic(flows)
}

// peakNodes suffice for any demand of the figure.
const peakNodes = 12_000

// peakJob has the destinations of a container, in the order of its first packets.
type peakJob struct {
	table *Table
	to    []Handle
}

func ownJob() peakJob {
	t := NewTable(remote(tenantA, 10, peakNodes))
	return peakJob{t, t.All()}
}

// recordedJob returns a job that sends to the destinations of a recorded matrix, in an order that the seed determines.
// Its table also has the preheated destinations.
func recordedJob(job, preheated Matrix, seed uint64) peakJob {
	seen := map[Megaflow]bool{}
	var all Matrix
	for _, d := range slices.Concat(job.Destinations, preheated.Destinations) {
		if !seen[d.Megaflow] {
			all.Destinations = append(all.Destinations, d)
		}
		seen[d.Megaflow] = true
	}
	t := NewTable(all.entries())
	to := t.Pins(job)
	rand.New(rand.NewPCG(seed, 9)).Shuffle(len(to), func(i, j int) { to[i], to[j] = to[j], to[i] })
	return peakJob{t, to}
}

// run returns a simulation of one container whose traffic needs demand new entries per second.
func (j peakJob) run(demand float64, seed uint64) Run {
	return Run{
		Spec: Production(), Policy: ProductionPolicy(), Table: j.table, Traffic: peakTraffic(j.to, demand, seed),
		Until: 32 * time.Second, Every: 100 * time.Millisecond, Containers: []float64{Production().Line},
	}
}

// rehearsed returns the matrix recorded in a rehearsal with another seed.
func (j peakJob) rehearsed(demand float64, seed uint64) Matrix {
	traffic := peakTraffic(j.to, demand, seed+1)
	m := j.table.record(traffic, traffic.Matrix(peakBegin, peakEnd))
	m.Source = fmt.Sprintf("the model of figure 8, %.0f/s, seed %d", demand, seed+1)
	return m
}

// ends returns the time of the first packet to the last destination. This is before the end of the peak if the job has
// too few destinations.
func (j peakJob) ends(demand float64, seed uint64) time.Duration {
	begun := peakTraffic(j.to, demand, seed).Flows
	if len(begun) < len(j.to) {
		return peakEnd
	}
	return begun[len(begun)-1].Bursts[0].From
}

// peak is the result of a run.
type peak struct {
	backlog int
	drained time.Duration // time after the peak's end until the queue is empty
	lowest  float64       // Gbit/s
}

func peakOf(samples []Sample, end time.Duration) peak {
	p := peak{lowest: Production().Line}
	for _, s := range samples {
		if s.At <= peakBegin || len(s.Rates) == 0 {
			continue
		}
		p.backlog = max(p.backlog, s.Backlog)
		if s.Backlog > 0 {
			p.drained = max(p.drained, s.At-end)
		}
		if s.Rates[0] > 0 { // after the container's first packet
			p.lowest = min(p.lowest, s.Rates[0])
		}
	}
	return p
}
