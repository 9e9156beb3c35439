package progrun

import (
	"context"
	"fmt"
	"math/rand/v2"

	"pilaster.io/pilaster/internal/bench/report"
)

// Meter measures the run time of programs on a Bed, in ns. It repeats a measurement Count times.
type Meter struct {
	Bed     *Bed
	Count   int // number of samples
	Context context.Context
	Random  *rand.Rand // for the bootstrap and the choice of peers
}

// Samples takes Count samples, after a first sample that fills the cache and does not count. It fails if a packet was
// dropped.
func (m *Meter) Samples(take func() (float64, error)) (report.Interval, error) {
	before, err := m.Drops()
	if err != nil {
		return report.Interval{}, err
	}
	all := make([]float64, 0, m.Count)
	for i := range m.Count + 1 {
		if err := m.Context.Err(); err != nil {
			return report.Interval{}, err
		}
		ns, err := take()
		if err != nil {
			return report.Interval{}, err
		}
		if i > 0 {
			all = append(all, ns)
		}
	}
	after, err := m.Drops()
	if err == nil && after != before {
		err = fmt.Errorf("%d packets were dropped, want none", after-before)
	}
	return report.Bootstrap(all, m.Random), err
}

// Drops returns the number of packets dropped so far.
func (m *Meter) Drops() (n uint64, err error) {
	s, err := m.Bed.Datapath.Status()
	for _, d := range s.Drops {
		n += d.Packets
	}
	return n, err
}
