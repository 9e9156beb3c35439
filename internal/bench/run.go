package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// Options configure a run.
type Options struct {
	Form      string // of the command line
	Scenarios []scenario.Scenario
	LeftOut   []string // scenarios that this kernel does not support, and the reasons
	Metrics   []traffic.Metric
	Gates     []Gate
	TooWide   float64 // width from which an interval gives no verdict, relative to 1 or to its median; 0: never
	Lookups   Lookups // measurement of first packets, at the end
	Rounds    int
	Warmup    time.Duration
	Window    time.Duration
	CPU       int    // CPU of both client and server; -1: any
	Seed      uint64 // of the order of scenarios and of the bootstrap
	Dir       string // folder for namespaces and pins; only one run at a time can use it; the run removes it

	// Generator returns a command that calls Generate.
	Generator func(context.Context) *exec.Cmd
	// Progress is called after each metric of a round.
	Progress func(Step)
	// After is called with each scenario, when everything is measured; nil for none.
	After func(context.Context, scenario.Scenario, *scenario.Wire, scenario.Pair) error
}

// Step is the progress of a run.
type Step struct {
	Round  int // from 1
	Metric string
	Part   float64 // of the whole run
}

// Free as Options.CPU means that the scheduler chooses the CPUs.
const Free = -1

// Smoke takes seconds and shows that everything works; Quick takes two minutes, Full 28 minutes.
func Smoke() Options {
	return Options{
		Form: "smoke", Scenarios: some("native", "oncache", "netpila", "netpila-macvlan", "nimitz-ebpf", "nimitz-ovs"),
		Metrics: traffic.Metrics(), Gates: SmokeGates(),
		Rounds: 4, Warmup: 10 * time.Millisecond, Window: 50 * time.Millisecond,
	}
}

func Quick() Options {
	o := Options{
		Form: "quick", Scenarios: some("native", "route", "vxlan", "oncache", "netpila", "netpila-macvlan"),
		Gates: QuickGates(), TooWide: 0.10,
		Rounds: 24, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	}
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), []string{"TCP_RR", "UDP_RR", "TCP_CRR", "UDP_PPS", "TCP_STREAM"})
	return o
}

func Full() Options {
	return Options{
		Form: "full", Scenarios: slices.DeleteFunc(scenario.Scenarios(),
			func(s scenario.Scenario) bool { return s.Of != "" }), Metrics: traffic.Metrics(), Gates: FullGates(),
		TooWide: 0.10,
		Rounds:  40, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	}
}

// SmokePolicy takes seconds, QuickPolicy three minutes and FullPolicy fifteen. Their reference is a tenant without
// policies.
func SmokePolicy() Options {
	o := policyOptions(
		"smoke",
		nil,
		4,
		Lookups{Rules: []int{0, 1, 100}, Bytes: []int{64, 512}, Packets: 2000, Rounds: 2},
		"TCP_RR",
		"TCP_CRR",
	)
	o.Scenarios = slices.DeleteFunc(
		o.Scenarios,
		func(s scenario.Scenario) bool { return strings.HasSuffix(s.Name, "000") },
	)
	o.Warmup, o.Window, o.TooWide = 10*time.Millisecond, 50*time.Millisecond, 0
	return o
}

func QuickPolicy() Options {
	return policyOptions(
		"quick",
		PolicyGates(ofNoRulesQuick),
		24,
		Lookups{
			Rules:   append([]int{0}, scenario.RuleCounts...),
			Bytes:   []int{64, 512},
			Packets: 50_000,
			Rounds:  9,
			AtMost:  ofOneRule,
		},
		"TCP_RR",
		"UDP_RR",
		"TCP_CRR",
		"TCP_STREAM",
	)
}

func FullPolicy() Options {
	return policyOptions(
		"full",
		PolicyGates(ofNoRules),
		60,
		Lookups{
			Rules:   []int{0, 1, 8, 64, 100, 1000, 10_000},
			Bytes:   []int{64, 128, 256, 512},
			Packets: 100_000,
			Rounds:  15,
			AtMost:  ofOneRule,
		},
		"TCP_RR",
		"UDP_RR",
		"TCP_CRR",
		"UDP_PPS",
		"TCP_STREAM",
		"TCP_STREAM4",
		"PROGRAM_OUT",
		"PROGRAM_IN",
	)
}

func policyOptions(form string, gates []Gate, rounds int, lookups Lookups, metrics ...string) Options {
	o := Options{
		Form: form, Scenarios: slices.Concat(some("netpila"), some("route"), scenario.RuleScenarios()), Gates: gates,
		TooWide: 0.20, // required for a gate on the median, so that no gate passes because of noise
		Lookups: lookups, Rounds: rounds, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	}
	o.Metrics, _ = scenario.Pick(traffic.Metrics(), metrics)
	return o
}

func some(names ...string) []scenario.Scenario {
	picked, _ := scenario.Pick(scenario.Scenarios(), names)
	return picked
}

// run is the state of a run in progress.
type run struct {
	Options
	random *rand.Rand
	pairs  []scenario.Pair
	wires  []*scenario.Wire
	taken  [][]taken // by scenario and metric
	idle   *unusedMap

	profiles     []*profile             // by scenario; nil if it is not sampled
	programs     []map[string][]float64 // by scenario: ns by program and round
	emptyProgram float64
	looked       []LookupCost
	steps, done  int
}

// taken has the samples of one metric of one scenario.
type taken struct {
	values    []float64 // by round
	cpu       []float64 // by round: µs of CPU time of an operation; empty if the metric counts none
	ops, busy float64   // sums over all rounds
	lost      int
}

// ErrNoFigures reports that the chosen scenarios have none of the chosen metrics.
var ErrNoFigures = errors.New("these scenarios have none of these metrics; nothing was measured")

// Run builds every scenario and measures them in turn.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	started := time.Now()
	release, err := scenario.Claim(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	r := &run{Options: o, random: rand.New(rand.NewPCG(o.Seed, 0))}
	defer func() { err = errors.Join(err, r.close()) }()
	defer func() { err = scenario.Interrupted(ctx, err) }()
	if r.idle, err = newUnusedMap(); err != nil {
		return nil, err
	}
	for _, s := range o.Scenarios {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err := r.build(s); err != nil {
			return nil, fmt.Errorf("scenario %s: %w", s.Name, err)
		}
	}
	return r.measure(ctx, started)
}

func (r *run) build(s scenario.Scenario) error {
	w, err := scenario.NewWire(filepath.Join(r.Dir, s.Name))
	if err != nil {
		return err
	}
	r.wires = append(r.wires, w)
	pair, err := s.Build(w)
	if err == nil {
		err = r.share(pair.Processes)
	}
	if pair.Fresh == nil {
		pair.Fresh = r.idle.write
	}
	r.pairs = append(r.pairs, pair)
	r.taken = append(r.taken, make([]taken, len(r.Metrics)))
	r.programs = append(r.programs, map[string][]float64{})
	return err
}

func (r *run) close() error {
	errs := []error{r.idle.Close()}
	for _, w := range r.wires {
		errs = append(errs, w.Close())
	}
	return errors.Join(errs...)
}

func (r *run) measure(ctx context.Context, started time.Time) (*Report, error) {
	ofPrograms := slices.ContainsFunc(r.Metrics, func(m traffic.Metric) bool { return m.Programs != 0 })
	programs := ofPrograms && slices.ContainsFunc(r.pairs, func(p scenario.Pair) bool { return p.Runs != nil })
	profiles := ofPrograms && r.CPU != Free && slices.ContainsFunc(r.pairs, profiled)
	for m := range r.Metrics {
		if r.leads(m) {
			r.steps += r.Rounds
		}
	}
	for _, phase := range []bool{profiles, programs} {
		if phase {
			r.steps += r.Rounds
		}
	}
	r.steps += r.Lookups.rows() * r.stepsOfRow()
	for round := range r.Rounds {
		for m, metric := range r.Metrics {
			if !r.leads(m) {
				continue
			}
			if err := r.round(ctx, m); err != nil {
				return nil, fmt.Errorf("round %d, %s of %w", round+1, metric.Name, err)
			}
			r.step(round, metric.Name, 1)
		}
	}
	if profiles {
		if err := r.measureProfile(ctx); err != nil {
			return nil, err
		}
	}
	if programs {
		if err := r.measurePrograms(ctx); err != nil {
			return nil, err
		}
	}
	if err := r.measureLookups(ctx); err != nil {
		return nil, err
	}
	if !profiles && !slices.ContainsFunc(slices.Concat(r.taken...), func(t taken) bool { return len(t.values) > 0 }) {
		return nil, ErrNoFigures
	}
	for i, s := range r.Scenarios {
		if r.After == nil {
			break
		}
		if err := r.After(ctx, s, r.wires[i], r.pairs[i]); err != nil {
			return nil, fmt.Errorf("scenario %s: %w", s.Name, err)
		}
	}
	return r.report(started), nil
}

// round measures one metric of every scenario.
func (r *run) round(ctx context.Context, m int) (err error) {
	metric := r.Metrics[m]
	if metric.Cut {
		for i, w := range r.wires {
			restore, err := w.DisableOffloads()
			if err != nil {
				return fmt.Errorf("%s: %w", r.Scenarios[i].Name, err)
			}
			defer func() { err = errors.Join(err, restore()) }()
		}
	}
	got, err := r.samples(ctx, m)
	if err != nil {
		return err
	}
	for s, a := range got {
		r.taken[s][m].lost += a.Lost
		for _, each := range r.together(m) {
			if err := r.taken[s][each].add(r.Metrics[each], a); err != nil {
				return fmt.Errorf("%s: %w", r.Scenarios[s].Name, err)
			}
		}
	}
	return nil
}

// add adds an answer. Without an operation in the window, there is neither a ratio nor a CPU time of an operation.
func (t *taken) add(m traffic.Metric, a traffic.Answer) error {
	if m.Counted != "" {
		if a.Ops <= 0 {
			return fmt.Errorf("no %s in %.3f s, so there is no figure; do packets pass in both directions?",
				m.Counted, a.Seconds)
		}
		// The idle time that Busy is computed from has a resolution of hundredths of a second.
		t.cpu = append(t.cpu, max(a.Busy, 0)/a.Ops*1e6)
	}
	t.values = append(t.values, m.Value(a))
	t.ops, t.busy = t.ops+a.Ops, t.busy+a.Busy
	return nil
}

// samples takes one sample of every scenario.
func (r *run) samples(ctx context.Context, m int) ([]traffic.Answer, error) {
	metric := r.Metrics[m]
	if metric.Trials {
		return r.inTurns(ctx, metric, len(r.together(m)))
	}
	all := make([]traffic.Answer, len(r.pairs))
	for _, s := range r.random.Perm(len(r.pairs)) {
		got, err := r.sample(ctx, r.pairs[s], metric)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.Scenarios[s].Name, err)
		}
		all[s] = got
	}
	return all, nil
}

// together returns the metrics that are measured with the same traffic as m.
func (r *run) together(m int) []int {
	if !r.Metrics[m].Trials {
		return []int{m}
	}
	var all []int
	for i, other := range r.Metrics {
		if other.Trials {
			all = append(all, i)
		}
	}
	return all
}

// leads reports whether a metric is measured alone, or is the first of those that are measured together.
func (r *run) leads(m int) bool {
	return r.Metrics[m].Programs == 0 && r.together(m)[0] == m
}

// step reports the progress, in rounds of one metric.
func (r *run) step(round int, metric string, many int) {
	r.done += many
	r.Progress(Step{Round: round + 1, Metric: metric, Part: float64(r.done) / float64(r.steps)})
}
