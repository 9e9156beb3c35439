package sharing

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/datapath"
)

// Options configure `pilaster bench offload`.
type Options struct {
	Labels, Blocks, Wide int // sizes of the rule sets
	Clients              int // addresses that connections come from
	Transactions         int // per sample
	Rounds               int // samples of each figure
	AnswerRules          []int
	AnswerBytes          []int // of the packets that the backend asks about, from their Ethernet header
	Answers              int   // per sample
	CPU                  int
	Dir                  string // for namespaces; created and removed
	Seed                 uint64
	Progress             func(done, of int)
}

// Smoke takes seconds.
func Smoke() Options {
	return Options{
		Labels: 10, Blocks: 20, Wide: 500, Clients: 64, Transactions: 100, Rounds: 2,
		AnswerRules: []int{0, 10}, AnswerBytes: []int{64, 1500}, Answers: 2000,
	}
}

// Quick takes three minutes.
func Quick() Options {
	o := Full()
	o.Transactions, o.Rounds, o.Answers = 2000, 7, 50_000
	return o
}

// Full takes about fifteen minutes.
func Full() Options {
	return Options{
		Labels: 1000, Blocks: 10_000, Wide: 1 << 18, Clients: 1 << 14, Transactions: 4000, Rounds: 21,
		AnswerRules: []int{0, 1, 8, 10, 64, 100, 1000, 10_000}, AnswerBytes: []int{64, 128, 256, 512, 1500},
		Answers: 200_000,
	}
}

// run is a run of the benchmark.
type run struct {
	Options
	bed    *bed
	random *rand.Rand
	report *Report
	steps  int
	pace   []float64 // speeds with run-time statistics relative to those without
}

// Run measures the cost of transactions with and without frontends, and computes the gain.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	started := time.Now()
	release, err := scenario.Claim(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	defer func() { err = scenario.Interrupted(ctx, err) }()
	r := &run{Options: o, random: rand.New(rand.NewPCG(o.Seed, 0)), report: &Report{
		Nature: nature, Transactions: o.Transactions, Rounds: o.Rounds, Clients: o.Clients, CPU: o.CPU, Seed: o.Seed,
		Answered: o.Answers,
	}}
	// The largest table has the CIDRs of three sets, and a tenant may use half of the room.
	room := max(datapath.DefaultMaxRules, 8*o.Wide)
	if r.bed, err = newBed(ctx, filepath.Join(o.Dir, "offload"), o.Clients, room, r.random); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.bed.Close()) }()
	if err := r.measure(ctx); err != nil {
		return nil, err
	}
	r.report.Header = report.NewHeader(started)
	return r.report, r.report.complete(o)
}

func (r *run) step() {
	r.steps++
	r.Progress(r.steps, 4*(1+r.Rounds)+len(r.AnswerRules))
}

func (r *run) measure(ctx context.Context) error {
	containers := append([]netip.Addr{r.bed.server}, r.bed.clients...)
	empty, err := r.bed.ruleBytes()
	if err != nil {
		return err
	}
	for _, s := range []ruleSet{
		byBlocks("one", 1),
		byLabels(fmt.Sprint("labels-", r.Labels), r.Labels),
		byBlocks(fmt.Sprint("blocks-", r.Blocks), r.Blocks),
		wide("wide", max(r.Wide, len(containers)), containers, r.random),
	} {
		if err := r.measureSet(ctx, s, empty); err != nil {
			return fmt.Errorf("rule set %s: %w", s.name, err)
		}
	}
	for i := range r.report.Sets {
		s := &r.report.Sets[i]
		s.Costs.Lookup = s.Costs.lookupOnTheWay(r.report.base(), s.Lookup.Median)
	}
	r.report.Slowdown = report.Bootstrap(r.pace, r.random)
	if r.report.SessionBytes, err = r.bed.sessionBytes(); err != nil {
		return err
	}
	if err := r.measureAnswers(ctx); err != nil {
		return fmt.Errorf("answers of frontends: %w", err)
	}
	return nil
}

// measureSet measures one rule set.
func (r *run) measureSet(ctx context.Context, s ruleSet, empty uint64) error {
	tables, err := s.compile()
	if err != nil {
		return err
	}
	if err := r.bed.setRules(tables); err != nil {
		return err
	}
	set := Set{Name: s.name, Rules: s.rules}
	bytes, err := r.bed.ruleBytes()
	if err != nil {
		return err
	}
	set.Bytes = int64(bytes) - int64(empty)
	for _, e := range r.bed.nodes[frontend].path.PolicyEntries() {
		set.Entries = max(set.Entries, e.Used)
	}
	lookups, err := r.lookups(ctx)
	if err != nil {
		return fmt.Errorf("lookups: %w", err)
	}
	set.Lookup = report.Bootstrap(lookups, r.random)
	r.step()
	taken := newSamples()
	for range r.Rounds {
		for _, i := range r.random.Perm(2) {
			if err := r.sample(ctx, i == 1, taken); err != nil {
				return err
			}
		}
		r.step()
	}
	taken.summarise(&set, r.random)
	r.report.Sets = append(r.report.Sets, set)
	return nil
}

// Kinds of messages: enum offload_kind of the programs.
const (
	kindPre    = 1
	kindAsk    = 3
	kindAnswer = 4
)

// sample measures transactions with or without a frontend, with the kernel's run-time statistics and without them.
func (r *run) sample(ctx context.Context, split bool, to *samples) error {
	if err := r.bed.split(ctx, split); err != nil {
		return err
	}
	if _, err := r.bed.transactions(ctx, max(1, r.Transactions/10), r.CPU, r.random); err != nil {
		return fmt.Errorf("split %v, warm-up: %w", split, err)
	}
	var speeds [2]float64
	for _, i := range r.random.Perm(2) {
		var err error
		if i == 0 {
			speeds[0], err = r.speed(ctx)
		} else {
			speeds[1], err = r.counted(ctx, split, to)
		}
		if err != nil {
			return fmt.Errorf("split %v: %w", split, err)
		}
	}
	to.speeds[split] = append(to.speeds[split], speeds[0])
	r.pace = append(r.pace, speeds[1]/speeds[0])
	return nil
}

// speed returns the transactions in a second.
func (r *run) speed(ctx context.Context) (float64, error) {
	took, err := r.bed.transactions(ctx, r.Transactions, r.CPU, r.random)
	if err != nil {
		return 0, err
	}
	return float64(r.Transactions) / took.Seconds(), nil
}

// counted is speed with run-time statistics, which it adds to the samples. It fails if packets took another way.
func (r *run) counted(ctx context.Context, split bool, to *samples) (speed float64, err error) {
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return 0, fmt.Errorf("turn on the kernel's BPF statistics: %w", err)
	}
	defer func() { err = errors.Join(err, stats.Close()) }()
	empty, err := progrun.EmptyProgram()
	if err != nil {
		return 0, err
	}
	r.report.EmptyProgram = empty
	pre, asks, err := r.bed.messages()
	if err != nil {
		return 0, err
	}
	var before, after [nodes]datapath.ProgStats
	for i, n := range r.bed.nodes {
		if before[i], err = n.path.ProgramStats(); err != nil {
			return 0, err
		}
	}
	if speed, err = r.speed(ctx); err != nil {
		return 0, err
	}
	for i, n := range r.bed.nodes {
		if after[i], err = n.path.ProgramStats(); err != nil {
			return 0, err
		}
		to.add(split, i, after[i].Since(before[i]), r.Transactions, empty)
	}
	to.end(split)
	pre2, asks2, err := r.bed.messages()
	if err == nil && (pre2-pre >= uint64(r.Transactions)) != split || asks2 != asks {
		err = fmt.Errorf("%d packets passed a frontend and %d were asked about, in %d transactions",
			pre2-pre, asks2-asks, r.Transactions)
	}
	return speed, err
}

// messages returns how many packets the frontend has sent to the backend, and how many the backend has asked about.
func (b *bed) messages() (pre, asks uint64, err error) {
	if pre, err = b.nodes[frontend].sent(kindPre); err == nil {
		asks, err = b.nodes[backend].sent(kindAsk)
	}
	return pre, asks, err
}

// ruleBytes returns the memory of the frontend's rule tables, as the kernel accounts it.
func (b *bed) ruleBytes() (sum uint64, err error) {
	o := &b.nodes[frontend].path.Objects
	for _, m := range []*ebpf.Map{
		o.PolSubjectsV1, o.PolAppsV1, o.PolBlocksV1, o.PolPortsV1, o.PolRangesV1, o.PolHitsV1,
	} {
		n, err := memory(m)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func memory(m *ebpf.Map) (uint64, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	n, _ := info.Memlock() // nothing for an empty trie
	return n, nil
}

// sessionBytes returns the memory of one session of the backend, with its share of a bucket.
func (b *bed) sessionBytes() (float64, error) {
	path := b.nodes[backend].path
	n, err := memory(path.Objects.PilSessionsV1)
	if err != nil {
		return 0, err
	}
	return float64(n) / float64(datapath.DefaultMaxSessions), nil
}
