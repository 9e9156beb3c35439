package sharing

import (
	"maps"
	"math/rand/v2"
	"slices"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/datapath"
)

// place is a program on a node, with or without a frontend.
type place struct {
	split   bool
	node    int
	program string
}

// samples are the samples of a rule set, one a round.
type samples struct {
	runs, ns, each map[place][]float64 // runs of a transaction, ns of a run, ns of a transaction
	totals         map[bool][nodes][]float64
	speeds         map[bool][]float64 // transactions in a second, without run-time statistics
	now            [nodes]float64     // of this round
}

func newSamples() *samples {
	return &samples{
		runs: map[place][]float64{}, ns: map[place][]float64{}, each: map[place][]float64{},
		totals: map[bool][nodes][]float64{}, speeds: map[bool][]float64{},
	}
}

// add adds the statistics of a node's programs. empty is what the statistics report for an empty program, in ns.
func (s *samples) add(split bool, node int, stats datapath.ProgStats, transactions int, empty float64) {
	s.now[node] = 0
	for name, p := range stats {
		if p.Count == 0 {
			continue
		}
		at := place{split, node, name}
		runs := float64(p.Count) / float64(transactions)
		ns := float64(p.Time.Nanoseconds())/float64(p.Count) - empty
		s.runs[at] = append(s.runs[at], runs)
		s.ns[at] = append(s.ns[at], ns)
		s.each[at] = append(s.each[at], runs*ns)
		s.now[node] += runs * ns
	}
}

// end ends a round.
func (s *samples) end(split bool) {
	t := s.totals[split]
	for i := range t {
		t[i] = append(t[i], s.now[i])
	}
	s.totals[split] = t
}

// rare is the number of runs of a transaction below which a program has no part in it: neighbour discovery runs some.
const rare = 0.05

// summarise computes the figures of a set.
func (s *samples) summarise(set *Set, random *rand.Rand) {
	interval := func(all []float64) report.Interval { return report.Bootstrap(all, random) }
	order := func(a, b place) int {
		switch {
		case a.split != b.split:
			return map[bool]int{false: -1, true: 1}[a.split]
		case a.node != b.node:
			return a.node - b.node
		case a.program < b.program:
			return -1
		}
		return 1
	}
	for _, at := range slices.SortedFunc(maps.Keys(s.runs), order) {
		if runs := report.Median(s.runs[at]); runs >= rare {
			set.Programs = append(set.Programs, Program{
				Split: at.split, Node: nodeNames[at.node], Program: at.program, Runs: runs, Ns: interval(s.ns[at]),
				Transaction: interval(s.each[at]),
			})
		}
	}
	for _, split := range []bool{false, true} {
		for node, name := range nodeNames {
			set.Nodes = append(set.Nodes, NodeCost{
				Split: split, Node: name, Transaction: interval(s.totals[split][node]),
			})
		}
		set.Speeds = append(set.Speeds, interval(s.speeds[split]))
	}
	set.Costs = Costs{
		Unsplit: set.cost(false, backend), Backend: set.cost(true, backend), Frontend: set.cost(true, frontend),
		Lookup: set.Lookup.Median,
	}
	for _, n := range Frontends {
		var gains []float64
		for i := range s.totals[false][backend] {
			of := Costs{
				Unsplit: s.totals[false][backend][i], Backend: s.totals[true][backend][i],
				Frontend: s.totals[true][frontend][i],
			}
			gains = append(gains, of.Gain(n))
		}
		set.Gains = append(set.Gains, Gain{Frontends: n, Gain: interval(gains)})
	}
}
