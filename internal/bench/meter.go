package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
)

// meter takes samples of programs on a bed.
type meter struct {
	bed    *scaleBed
	count  int // of samples
	ctx    context.Context
	random *rand.Rand // for the bootstrap and the choice of peers
}

// samples takes count samples after one that fills the cache. It fails if a packet was dropped.
func (m *meter) samples(take func() (float64, error)) (Interval, error) {
	before, err := m.drops()
	if err != nil {
		return Interval{}, err
	}
	all := make([]float64, 0, m.count)
	for i := range m.count + 1 {
		if err := m.ctx.Err(); err != nil {
			return Interval{}, err
		}
		ns, err := take()
		if err != nil {
			return Interval{}, err
		}
		if i > 0 {
			all = append(all, ns)
		}
	}
	after, err := m.drops()
	if err == nil && after != before {
		err = fmt.Errorf("%d packets were dropped that should have gone on", after-before)
	}
	return bootstrap(all, m.random), err
}

// drops is the number of packets dropped so far.
func (m *meter) drops() (n uint64, err error) {
	s, err := m.bed.datapath.Status()
	for _, d := range s.Drops {
		n += d.Packets
	}
	return n, err
}
