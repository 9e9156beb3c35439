package nic

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	peakBegin = 15 * time.Second // so that preheating has ended
	peakEnd   = 23 * time.Second
)

// peakTraffic starts to send to a new one of these that many times a second, as long as there are any, and continues
// with all.
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

// peakNodes are enough for any demand of the figure.
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

// recordedJob sends to the destinations of a matrix, in an order by the seed; the table also has the preheated ones.
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

// rehearsed is what a rehearsal with another seed has recorded.
func (j peakJob) rehearsed(demand float64, seed uint64) Matrix {
	traffic := peakTraffic(j.to, demand, seed+1)
	m := j.table.record(traffic, traffic.Matrix(peakBegin, peakEnd))
	m.Source = fmt.Sprintf("the model of figure 8, %.0f/s, seed %d", demand, seed+1)
	return m
}

// ends is the time of the first packet to the last destination: before the peak's end if the job runs out of
// destinations.
func (j peakJob) ends(demand float64, seed uint64) time.Duration {
	begun := peakTraffic(j.to, demand, seed).Flows
	if len(begun) < len(j.to) {
		return peakEnd
	}
	return begun[len(begun)-1].Bursts[0].From
}

// peak is what a run of it shows.
type peak struct {
	backlog int
	drained time.Duration // after its end
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
		if s.Rates[0] > 0 { // it has begun
			p.lowest = min(p.lowest, s.Rates[0])
		}
	}
	return p
}
