package suites

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// FlowDeleteOptions configure the numbers of installed entries, and the batch that is deleted.
type FlowDeleteOptions struct {
	Installed []int // each at least Batch
	Batch     int
	Rounds    int // samples of each figure
	Dir       string
	Seed      uint64
	Progress  func(done, of int)
}

// flowDeleteBatch is the paper's batch size (§4, fig 10).
const flowDeleteBatch = 2000

// QuickFlowDelete takes about a minute.
func QuickFlowDelete() FlowDeleteOptions {
	return FlowDeleteOptions{Installed: []int{2000, 5000, 10_000}, Batch: flowDeleteBatch, Rounds: 5}
}

// FullFlowDelete has the sizes of the paper's figure.
func FullFlowDelete() FlowDeleteOptions {
	return FlowDeleteOptions{Installed: []int{2000, 5000, 10_000, 20_000, 50_000}, Batch: flowDeleteBatch, Rounds: 5}
}

// MaxFlowDelete is the maximum number of installed entries.
const MaxFlowDelete = 200_000

// FlowDelete measures how long Open vSwitch takes to delete a batch of entries, with loose deletions as in NIMITZ (NM8,
// fig 10) and with strict deletions.
func FlowDelete(ctx context.Context, o FlowDeleteOptions) (_ *FlowDeleteReport, err error) {
	started := time.Now()
	release, err := scenario.Claim(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	defer func() { err = scenario.Interrupted(ctx, err) }()
	m := &flowDelete{FlowDeleteOptions: o, random: rand.New(rand.NewPCG(o.Seed, 0)), samples: map[int][2][]float64{}}
	if err := m.run(ctx); err != nil {
		return nil, err
	}
	r := &FlowDeleteReport{
		Batch: o.Batch, Rounds: o.Rounds, Seed: o.Seed, Switch: m.version,
	}
	for _, n := range o.Installed {
		s := m.samples[n]
		r.Results = append(
			r.Results,
			FlowDeleteCost{
				Installed: n,
				Loose:     report.Bootstrap(s[loose], m.random),
				Strict:    report.Bootstrap(s[strict], m.random),
			},
		)
	}
	r.Header = report.NewHeader(started)
	return r, nil
}

// The two ways to delete.
const (
	loose = iota
	strict
)

// flowDelete is one run.
type flowDelete struct {
	FlowDeleteOptions
	random  *rand.Rand
	version string
	ways    [2]*ovs.Switch
	samples map[int][2][]float64 // ms by number of installed entries and way
}

func (m *flowDelete) run(ctx context.Context) (err error) {
	dir := filepath.Join(m.Dir, "flow-delete")
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	ns, err := netns.Create(filepath.Join(dir, "node"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ns.Close(), netns.Remove(ns.Path())) }()
	config := ovs.Config{
		RunDir: filepath.Join(dir, "ovs"), Netns: ns, Uplinks: []string{"lo"},
		Node:   netip.MustParsePrefix("fd70:696c:6100:1::/64"),
		Region: netip.MustParsePrefix("fd70:696c:6100::/40"),
	}
	daemons, err := ovs.Start(ctx, ns, config.RunDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, daemons.Stop()) }()
	if m.version, err = daemons.Version(ctx); err != nil {
		return err
	}
	for way := range m.ways {
		config.LooseDeletes = way == loose
		if m.ways[way], err = ovs.Open(ctx, config); err != nil {
			return err
		}
	}
	return m.rounds(ctx)
}

func (m *flowDelete) rounds(ctx context.Context) error {
	entries := flowDeleteEntries(slices.Max(m.Installed))
	installed, done := 0, 0
	for round := range m.Rounds {
		// Use the sizes alternately in ascending and descending order, so that a size does not always follow the same
		// other size.
		sizes := slices.Sorted(slices.Values(m.Installed))
		if round%2 == 1 {
			slices.Reverse(sizes)
		}
		for i, n := range sizes {
			if err := m.resize(ctx, entries, &installed, n); err != nil {
				return err
			}
			for turn := range 2 {
				way := (round + i + turn) % 2
				if err := m.sample(ctx, entries[:n], way); err != nil {
					return err
				}
				done++
				m.Progress(done, 2*m.Rounds*len(sizes))
			}
		}
	}
	return nil
}

// resize installs or deletes entries until the switch has the first n.
func (m *flowDelete) resize(ctx context.Context, entries []pipeline.Entry, installed *int, n int) error {
	var remove, add []pipeline.Entry
	if n > *installed {
		add = entries[*installed:n]
	} else {
		remove = entries[n:*installed]
	}
	*installed = n
	return m.ways[strict].Apply(ctx, remove, add)
}

// sample deletes a random batch of the entries, and installs it again.
func (m *flowDelete) sample(ctx context.Context, entries []pipeline.Entry, way int) error {
	batch := make([]pipeline.Entry, m.Batch)
	for i, at := range m.random.Perm(len(entries))[:m.Batch] {
		batch[i] = entries[at]
	}
	began := time.Now()
	if err := m.ways[way].Apply(ctx, batch, nil); err != nil {
		return err
	}
	took := float64(time.Since(began)) / float64(time.Millisecond)
	s := m.samples[len(entries)]
	s[way] = append(s[way], took)
	m.samples[len(entries)] = s
	left, err := m.ways[way].Entries(ctx)
	if err != nil {
		return err
	}
	if len(left) != len(entries)-m.Batch {
		return fmt.Errorf("of %d entries, %d remain after deleting %d", len(entries), len(left), m.Batch)
	}
	return m.ways[strict].Apply(ctx, nil, batch)
}

// flowDeleteEntries returns entries of one job without node CIDRs: one mapping for each container, and eight containers
// per node.
func flowDeleteEntries(n int) []pipeline.Entry {
	entries := make([]pipeline.Entry, n)
	for i := range entries {
		container := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		node := netip.AddrFrom16([16]byte{0xfd, 0x70, 0x69, 0x6c, 0x61, byte(i >> 19), byte(i >> 11), byte(i >> 3)})
		entries[i] = pipeline.Forward{
			VNI:  7,
			To:   netip.PrefixFrom(container, 32),
			Port: pipeline.VXLAN,
			VTEP: pipeline.VTEP(netip.PrefixFrom(node, 64)),
		}
	}
	return entries
}
