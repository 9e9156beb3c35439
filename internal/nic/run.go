package nic

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"time"
)

// Burst is a period in which a flow sends.
type Burst struct{ From, To time.Duration }

// Flow is a connection, or a group of equal ones.
type Flow struct {
	Handle    Handle
	Container int     // number of the sending container
	Packets   float64 // per second, while it sends
	Bursts    []Burst // in order, without overlap
}

// Traffic is all traffic that a node sends.
type Traffic struct {
	Flows []Flow
	first []int // first flow of a handle, plus 1
	next  []int // next flow of the same handle, plus 1
}

// NewTraffic returns traffic of these flows.
func NewTraffic(flows []Flow) *Traffic {
	t := &Traffic{Flows: flows, next: make([]int, len(flows))}
	for i, f := range flows {
		if n := int(f.Handle) + 1 - len(t.first); n > 0 {
			t.first = append(t.first, make([]int, n)...)
		}
		t.next[i], t.first[f.Handle] = t.first[f.Handle], i+1
	}
	return t
}

// of returns the flows of a megaflow.
func (t *Traffic) of(h Handle) iter.Seq[*Flow] {
	return func(yield func(*Flow) bool) {
		if int(h) >= len(t.first) {
			return
		}
		for i := t.first[h]; i != 0 && yield(&t.Flows[i-1]); i = t.next[i-1] {
		}
	}
}

func (f *Flow) busy(at time.Duration) bool {
	for _, b := range f.Bursts {
		if b.From <= at && at < b.To {
			return true
		}
	}
	return false
}

// Sent returns the packets of a megaflow between two times.
func (t *Traffic) Sent(h Handle, from, to time.Duration) (n uint64) {
	for f := range t.of(h) {
		for _, b := range f.Bursts {
			if d := min(to, b.To) - max(from, b.From); d > 0 {
				n += uint64(f.Packets * d.Seconds())
			}
		}
	}
	return n
}

// Busy reports whether a megaflow has packets at a time.
func (t *Traffic) Busy(at time.Duration, h Handle) bool {
	for f := range t.of(h) {
		if f.busy(at) {
			return true
		}
	}
	return false
}

// Matrix returns the megaflows that had packets, the busiest first.
func (t *Traffic) Matrix(from, to time.Duration) (all []Handle) {
	sent := make([]uint64, len(t.first))
	for h := range sent {
		if sent[h] = t.Sent(Handle(h), from, to); sent[h] > 0 {
			all = append(all, Handle(h))
		}
	}
	slices.SortStableFunc(all, func(a, b Handle) int { return cmp.Compare(sent[b], sent[a]) })
	return all
}

// start is the time of a burst's first packet.
type start struct {
	at     time.Duration
	handle Handle
}

func (t *Traffic) starts() (all []start) {
	for i := range t.Flows {
		for _, b := range t.Flows[i].Bursts {
			all = append(all, start{b.From, t.Flows[i].Handle})
		}
	}
	slices.SortFunc(
		all,
		func(a, b start) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.handle, b.handle)) },
	)
	return all
}

// Run is a simulation of a node.
type Run struct {
	Spec       Spec
	Policy     Policy
	Table      *Table
	Traffic    *Traffic
	Pinned     []Handle // installed at the beginning
	Until      time.Duration
	Every      time.Duration // interval of samples
	Containers []float64     // offered load of each, in Gbit/s

	// Check is called after every step, for tests of invariants.
	Check func(at time.Duration, n *Model, s *Switch)
}

// Sample is the state of a node at one time.
type Sample struct {
	At        time.Duration
	Offloaded int
	Backlog   int
	Removed   int       // so far
	Mistaken  int       // removed entries that were in use
	Rates     []float64 // Gbit/s of each container
}

// Do runs the simulation. A cancelled context ends it early.
func (r Run) Do(ctx context.Context) ([]Sample, error) {
	n := NewModel(r.Spec, r.Traffic.Sent)
	s := NewSwitch(r.Table, n, r.Policy, r.Traffic.Busy)
	s.Pin(r.Pinned)
	starts := r.Traffic.starts()
	var samples []Sample
	for now, sample := time.Duration(0), time.Duration(0); ; {
		at, due := s.Next(now)
		packet := len(starts) > 0 && (!due || starts[0].at <= at)
		if packet {
			at, due = starts[0].at, true
		}
		for ; sample <= r.Until && (!due || sample <= at); sample += r.Every {
			samples = append(samples, Sample{sample, n.Len(), s.Backlog(), s.Removed, s.Mistaken, r.rates(sample, n)})
		}
		if sample > r.Until {
			return samples, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		now = at
		if packet {
			if h := starts[0].handle; !n.Holds(at, h) {
				s.Miss(h)
			}
			starts = starts[1:]
		} else if err := s.Do(at); err != nil {
			return nil, err
		}
		if r.Check != nil {
			r.Check(at, n, s)
		}
	}
}

// rates returns the containers' throughput. A container divides its offered load equally among its flows. An offloaded
// flow gets its share, reduced by Speed if the NIC's lookups are slow. All other flows of the node share the software's
// throughput.
func (r Run) rates(at time.Duration, n *Model) []float64 {
	rates := make([]float64, len(r.Containers))
	if len(rates) == 0 {
		return nil
	}
	busy, held := make([]float64, len(rates)), make([]float64, len(rates))
	for i := range r.Traffic.Flows {
		f := &r.Traffic.Flows[i]
		if f.busy(at) {
			busy[f.Container]++
			if n.Holds(at, f.Handle) {
				held[f.Container]++
			}
		}
	}
	slow := 0.0
	for c, wish := range r.Containers {
		if busy[c] > 0 {
			rates[c] = wish * held[c] / busy[c] * n.Speed()
			slow += wish * (1 - held[c]/busy[c])
		}
	}
	for c, wish := range r.Containers {
		if busy[c] > 0 && slow > 0 {
			rates[c] += wish * (1 - held[c]/busy[c]) * min(1, r.Spec.Software/slow)
		}
	}
	return rates
}
