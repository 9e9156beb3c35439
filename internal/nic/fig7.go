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

// What §3.3 says of the job of fig 7.
const (
	jobNodes   = 8076
	jobEntries = 11_830
	jobMean    = 1200
	jobP95     = 3300
)

// logNormal is the distribution with this mean and 95th percentile.
func logNormal(mean, p95 float64) (mu, sigma float64) {
	const z = 1.6448536 // of the 95th percentile
	sigma = z - math.Sqrt(z*z-2*math.Log(p95/mean))
	return math.Log(mean) - sigma*sigma/2, sigma
}

// jobTable has one entry for each other node; the rest, of which the paper says nothing, are services'.
func jobTable() *Table {
	entries := remote(tenantA, 10, jobNodes-1)
	for i := 0; len(entries) < jobEntries; i++ {
		virtual, real := netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)}), netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)})
		entries = append(entries, pipeline.DNAT{VNI: tenantA, Virtual: virtual, RealVNI: tenantA, Real: real})
		if len(entries) < jobEntries {
			entries = append(entries, pipeline.SNAT{VNI: tenantA, Real: real, Virtual: virtual})
		}
	}
	return NewTable(entries)
}

// jobRun is one node of it. With how many others it speaks is long-tailed; with each it does so on and off, with pauses that are seldom longer than
// what ageing allows.
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
	return Run{Spec: Production(), Policy: ProductionPolicy(), Table: t, Traffic: NewTraffic(flows), Until: end, Every: end}
}

// offloadedCounts is how many entries are offloaded on every step-th node, ascending.
func offloadedCounts(ctx context.Context, seed uint64, step int) ([]int, error) {
	t := jobTable()
	var counts []int
	for n := 0; n < jobNodes; n += step {
		samples, err := jobRun(t, rand.New(rand.NewPCG(seed, uint64(n)))).Do(ctx)
		if err != nil {
			return nil, fmt.Errorf("node %d: %w", n, err)
		}
		counts = append(counts, samples[len(samples)-1].Offloaded)
	}
	slices.Sort(counts)
	return counts, nil
}
