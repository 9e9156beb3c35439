package bench

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/bench/cpuprofile"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
)

// Profile is the sampled CPU time of a scenario's UDP_RR transactions, by place.
type Profile struct {
	Scenario string          `json:"scenario"`
	Total    report.Interval `json:"ns"` // per transaction
	Places   []Spent         `json:"places"`
	Most     []Function      `json:"functions"` // functions with the largest excess over netpila, if the run has netpila
	// Work is Open vSwitch's work per transaction, if the scenario uses it.
	Work *WorkEach `json:"openVSwitch,omitempty"`
}

// Spent is the time spent in a place.
type Spent struct {
	Place string          `json:"place"`
	Ns    report.Interval `json:"ns"` // per transaction
}

// Function is a function of the kernel or of a program, or a whole process.
type Function struct {
	Name  string  `json:"name"`
	Place string  `json:"place"`
	Ns    float64 `json:"ns"`             // per transaction
	More  float64 `json:"more,omitempty"` // excess over netpila
}

// WorkEach is the work per packet that Open vSwitch received, on both nodes.
type WorkEach struct {
	Passes   float64 `json:"passes"` // lookups in its caches
	Exact    float64 `json:"exact"`
	Megaflow float64 `json:"megaflow"`
	Upcalls  float64 `json:"upcalls"` // packets that the tables had to classify
}

// profile collects the samples of one scenario.
type profile struct {
	total     []float64            // ns per transaction, by round
	places    map[string][]float64 // the same
	functions map[spot]float64     // total ns
	ops       float64
	work      ovs.Work
}

// spot is a function in a place.
type spot struct{ place, function string }

// profiled reports whether a scenario is sampled: this is the case if our programs or a process forward its packets.
func profiled(p scenario.Pair) bool { return p.Runs != nil || len(p.Processes) > 0 }

// measureProfile samples the CPU of client and server, in a separate phase.
func (r *run) measureProfile(ctx context.Context) (err error) {
	s, err := cpuprofile.NewSampler(r.CPU)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, s.Close()) }()
	names, err := cpuprofile.ReadSymbols()
	if err != nil {
		return err
	}
	all, err := cpuprofile.ReadWorkers(r.CPU)
	if err != nil {
		return err
	}
	traffic, _ := traffic.MetricByName("UDP_RR")
	r.profiles = make([]*profile, len(r.pairs))
	for round := range r.Rounds {
		for _, i := range r.random.Perm(len(r.pairs)) {
			if !profiled(r.pairs[i]) {
				continue
			}
			if err := r.profile(ctx, s, names, all, i, traffic); err != nil {
				return fmt.Errorf("round %d, profile of %s: %w", round+1, r.Scenarios[i].Name, err)
			}
		}
		r.step(round, "PROFILE", 1)
	}
	return nil
}

func (r *run) profile(
	ctx context.Context,
	sampled *cpuprofile.Sampler,
	names cpuprofile.Symbols,
	all cpuprofile.Workers,
	scenario int,
	m traffic.Metric,
) error {
	pair := r.pairs[scenario]
	before, err := worked(ctx, pair)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, r.Warmup+r.Window+4*traffic.DialTimeout)
	defer cancel()
	// Start sampling before the client starts, because the client does not wait for this process.
	if err := sampled.Start(); err != nil {
		return err
	}
	s, err := r.begin(ctx, pair, m)
	if err != nil {
		return err
	}
	defer s.kill()
	got, err := s.end()
	samples, err2 := sampled.Stop()
	if err := cmp.Or(err, err2); err != nil {
		return err
	}
	after, err := worked(ctx, pair)
	if err != nil {
		return err
	}
	if r.profiles[scenario] == nil {
		r.profiles[scenario] = &profile{places: map[string][]float64{}, functions: map[spot]float64{}}
	}
	w := maps.Clone(all)
	for _, pid := range []int{s.client.ID(), s.server.ID()} {
		w[uint32(pid)] = cpuprofile.ByGenerator
	}
	for _, pid := range pair.Processes {
		w[uint32(pid)] = cpuprofile.BySwitch
	}
	p := r.profiles[scenario]
	p.work = p.work.Plus(after.Since(before))
	p.count(samples, got, w, names)
	return nil
}

// count adds the samples of a client's window.
func (p *profile) count(
	samples []cpuprofile.Sample,
	got traffic.Answer,
	w cpuprofile.Workers,
	names cpuprofile.Symbols,
) {
	each := float64(cpuprofile.Period.Nanoseconds()) / got.Ops
	round := map[string]float64{}
	var total float64
	for _, i := range samples {
		if i.At < got.From || i.At > got.To {
			continue
		}
		place, function := w.PlaceOf(i, names)
		round[place] += each
		p.functions[spot{place, function}] += float64(cpuprofile.Period.Nanoseconds())
		if place != cpuprofile.ByOthers {
			total += each
		}
	}
	for _, name := range cpuprofile.PlaceNames() {
		p.places[name] = append(p.places[name], round[name])
	}
	p.total, p.ops = append(p.total, total), p.ops+got.Ops
}

// worked returns the total work of the pair's Open vSwitches so far.
func worked(ctx context.Context, p scenario.Pair) (sum ovs.Work, err error) {
	if p.Work == nil {
		return sum, nil
	}
	return p.Work(ctx)
}

// mostFunctions is the number of functions reported for each scenario.
const mostFunctions = 12

// profilesOf returns the profiles for the report.
func (r *run) profilesOf(s Settings) (all []Profile) {
	base := map[spot]float64{}
	for i, p := range r.profiles {
		if p != nil && r.Scenarios[i].Name == "netpila" {
			base = p.each()
		}
	}
	for i, p := range r.profiles {
		if p == nil {
			continue
		}
		is := Profile{Scenario: r.Scenarios[i].Name, Total: s.interval(p.total)}
		for _, name := range cpuprofile.PlaceNames() {
			is.Places = append(is.Places, Spent{name, s.interval(p.places[name])})
		}
		each := p.each()
		for of, ns := range each {
			if of.place != cpuprofile.ByOthers {
				f := Function{Name: of.function, Place: of.place, Ns: ns}
				if len(base) > 0 {
					f.More = ns - base[of]
				}
				is.Most = append(is.Most, f)
			}
		}
		slices.SortFunc(is.Most, func(a, b Function) int {
			return cmp.Or(cmp.Compare(b.More, a.More), cmp.Compare(b.Ns, a.Ns), cmp.Compare(a.Name, b.Name))
		})
		is.Most = slices.Clip(is.Most[:min(mostFunctions, len(is.Most))])
		if p.work.Packets > 0 {
			by := func(n uint64) float64 { return float64(n) / float64(p.work.Packets) }
			is.Work = &WorkEach{by(p.work.Passes), by(p.work.Exact), by(p.work.Megaflow), by(p.work.Upcalls)}
		}
		all = append(all, is)
	}
	return all
}

// each returns the ns per transaction of every function.
func (p *profile) each() map[spot]float64 {
	all := maps.Clone(p.functions)
	for of := range all {
		all[of] /= p.ops
	}
	return all
}
