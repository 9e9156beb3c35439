package nic

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// The job of fig 7, from §3.3.
const (
	jobNodes   = 8076
	jobEntries = 11_830
	jobMean    = 1200
	jobP95     = 3300
)

// logNormal returns the parameters of the distribution with this mean and 95th percentile.
func logNormal(mean, p95 float64) (mu, sigma float64) {
	const z = 1.6448536 // of the 95th percentile
	sigma = z - math.Sqrt(z*z-2*math.Log(p95/mean))
	return math.Log(mean) - sigma*sigma/2, sigma
}

// jobTable has one entry for each other node. The paper does not describe the other entries; the model assumes that
// they are entries of services.
func jobTable() *Table {
	entries := remote(tenantA, 10, jobNodes-1)
	for i := 0; len(entries) < jobEntries; i++ {
		virtual, real := netip.AddrFrom4(
			[4]byte{100, 64, byte(i >> 8), byte(i)},
		), netip.AddrFrom4(
			[4]byte{192, 168, byte(i >> 8), byte(i)},
		)
		entries = append(entries, pipeline.DNAT{VNI: tenantA, Virtual: virtual, RealVNI: tenantA, Real: real})
		if len(entries) < jobEntries {
			entries = append(entries, pipeline.SNAT{VNI: tenantA, Real: real, Virtual: virtual})
		}
	}
	return NewTable(entries)
}

// jobRun simulates one node of the job. The number of its peers is from a long-tailed distribution. The node sends to
// each peer with pauses that are rarely longer than the idle timeout.
func jobRun(t *Table, rng *rand.Rand) Run {
	const burst, pause, end = 4 * time.Second, 2 * time.Second, 20 * time.Second
	mu, sigma := logNormal(jobMean, jobP95)
	peers := min(jobNodes-1, int(math.Exp(mu+sigma*rng.NormFloat64())))
	first := rng.IntN(jobNodes - 1)
	var flows []Flow
	for i := range peers {
		f := t.flow(tenantA, 10, (first+i)%(jobNodes-1), 0)
		for at := seconds(rng.Float64() * burst.Seconds()); at < end; {
			f.Bursts = append(f.Bursts, Burst{at, at + burst})
			at += burst + seconds(rng.ExpFloat64()*pause.Seconds())
		}
		flows = append(flows, f)
	}
	return Run{
		Spec:    Production(),
		Policy:  ProductionPolicy(),
		Table:   t,
		Traffic: NewTraffic(flows),
		Until:   end,
		Every:   end,
	}
}

// Offloads counts the offloaded entries on nodes of fig 7's job.
type Offloads struct {
	Nodes, Entries  int   // nodes of the job; entries of each node's switch
	Counts          []int // ascending, one for each simulated node
	Mean, P95, Peak float64
}

// RunJob simulates every step-th node of the job.
func RunJob(ctx context.Context, seed uint64, step int) (Offloads, error) {
	t := jobTable()
	o := Offloads{Nodes: jobNodes, Entries: t.Entries}
	for n := 0; n < jobNodes; n += step {
		samples, err := jobRun(t, rand.New(rand.NewPCG(seed, uint64(n)))).Do(ctx)
		if err != nil {
			return o, fmt.Errorf("node %d: %w", n, err)
		}
		o.Counts = append(o.Counts, samples[len(samples)-1].Offloaded)
	}
	slices.Sort(o.Counts)
	for _, n := range o.Counts {
		o.Mean += float64(n) / float64(len(o.Counts))
	}
	o.P95, o.Peak = float64(o.Counts[len(o.Counts)*95/100]), float64(o.Counts[len(o.Counts)-1])
	return o, nil
}

// Curve returns at most about 400 points: x is the percentage of nodes that have at most y entries.
func (o Offloads) Curve() (points [][2]float64) {
	for i := 0; i < len(o.Counts); i += max(len(o.Counts)/400, 1) {
		points = append(points, [2]float64{100 * float64(i) / float64(len(o.Counts)), float64(o.Counts[i])})
	}
	return append(points, [2]float64{100, o.Peak})
}
