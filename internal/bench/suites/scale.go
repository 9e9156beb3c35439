package suites

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/humanize"
)

// ScaleOptions configure `pilaster bench scale`.
type ScaleOptions struct {
	Endpoints []int // numbers of endpoints of a node, each 1 to 65,535
	Peers     []int // each 1 to 2^20
	Keys      []int // numbers of pairs of a valid address and a path that a sprayer uses; powers of two
	Rounds    int   // samples of each figure
	Packets   int   // per sample
	CPU       int
	Dir       string // for namespaces; created and removed
	Seed      uint64
	Progress  func(done, of int)
}

// endpointsATenant is the number of endpoints per tenant.
const endpointsATenant = 10

// flowSlots is the size of the flow cache of one CPU: FLOW_SLOTS of bpf/net/netpila/flow.h.
const flowSlots = 4096

// QuickScale takes about half a minute.
func QuickScale() ScaleOptions {
	return ScaleOptions{
		Endpoints: []int{1, 1000}, Peers: []int{10, 1000, 10_000, 100_000}, Keys: []int{8, 512, 32_768},
		Rounds: 9, Packets: 50_000,
	}
}

// FullScale has all sizes of the claim.
func FullScale() ScaleOptions {
	return ScaleOptions{
		Endpoints: []int{
			1,
			100,
			1000,
		}, Peers: []int{10, 100, 1000, 4000, 10_000, 100_000, 1_000_000}, Keys: []int{8, 64, 512, 4096, 32_768},
		Rounds: 31, Packets: 500_000,
	}
}

// Scale measures the cost of a packet by the number of endpoints and peers. It also measures how much slower the flows
// of a container become while another container sprays packets over many addresses.
func Scale(ctx context.Context, o ScaleOptions) (_ *ScaleReport, err error) {
	started := time.Now()
	release, err := scenario.Claim(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	defer func() { err = scenario.Interrupted(ctx, err) }()
	m := &scaleMeter{
		ScaleOptions: o,
		Meter:        &progrun.Meter{Count: o.Rounds, Context: ctx, Random: rand.New(rand.NewPCG(o.Seed, 0))},
	}
	steps := len(o.Endpoints) * (2*(1+len(o.Peers)) + len(o.Keys) + 1)
	m.step = func() { m.done++; o.Progress(m.done, steps) }
	r := &ScaleReport{
		Rounds: o.Rounds, Packets: o.Packets, CPU: o.CPU, Seed: o.Seed, Slots: flowSlots,
	}
	for _, endpoints := range o.Endpoints {
		if err := m.measure(endpoints, r); err != nil {
			return nil, fmt.Errorf("%s: %w", humanize.Of(endpoints, "endpoint", "endpoints"), err)
		}
	}
	r.Header = report.NewHeader(started)
	return r, nil
}

type scaleMeter struct {
	ScaleOptions
	*progrun.Meter
	done int
	step func()
}

// measure creates a node with the given number of endpoints and takes all its figures.
func (m *scaleMeter) measure(endpoints int, r *ScaleReport) (err error) {
	tenants := (endpoints + endpointsATenant - 1) / endpointsATenant
	if m.Bed, err = progrun.NewBed(filepath.Join(m.Dir, "scale"), endpoints, tenants, 0); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Bed.Close()) }()
	return m.Bed.Node.NS.Do(func() error {
		var set unix.CPUSet
		set.Set(m.CPU)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("pin to CPU %d: %w", m.CPU, err)
		}
		for i := range m.Bed.Hooks {
			h := &m.Bed.Hooks[i]
			cost := HookCost{Hook: h.Name, Endpoints: endpoints, Tenants: tenants}
			if err := m.byPeers(h, &cost); err != nil {
				return fmt.Errorf("%s: %w", h.Name, err)
			}
			r.Hooks = append(r.Hooks, cost)
		}
		sprays, err := m.sprays(endpoints)
		r.Sprays = append(r.Sprays, sprays...)
		return err
	})
}

// byPeers takes the figures of one hook.
func (m *scaleMeter) byPeers(h *progrun.Hook, cost *HookCost) error {
	for _, peers := range append([]int{0}, m.Peers...) {
		never := peers == 0 // every packet misses the cache
		all, err := m.Bed.Peers(max(peers, 1), m.Bed.Endpoints, m.Random)
		if err != nil {
			return err
		}
		f, err := m.conversation(h, all, never)
		if err != nil {
			return err
		}
		ns, err := m.Samples(func() (float64, error) { return f.Time(m.Packets, progrun.Forwarded) })
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("%s: %w", humanize.Of(peers, "peer", "peers"), err)
		}
		if never {
			cost.Miss = ns
		} else {
			cost.Peers = append(cost.Peers, PeersCost{Peers: peers, Missed: missed(peers), Nanoseconds: ns})
		}
		m.step()
	}
	return nil
}

// missed returns the expected share of cache misses if each packet belongs to a random peer. Of the flows that share a
// slot, only the last one is cached.
func missed(peers int) float64 {
	p := float64(peers)
	return 1 - flowSlots/p*(1-math.Pow(1-1.0/flowSlots, p))
}

// Limits for the number of packets that a run repeats. There are enough packets to choose each peer, unless there are
// so many peers that almost every packet misses the cache anyway.
const (
	fewestPackets = 1 << 10
	mostPackets   = 1 << 20
)

// conversation returns packets of peers in random order.
func (m *scaleMeter) conversation(h *progrun.Hook, peers []progrun.Peer, never bool) (*progrun.Frames, error) {
	n := fewestPackets
	for n < 4*len(peers) && n < mostPackets {
		n *= 2
	}
	all := make([]progrun.Frame, n)
	for i := range all {
		all[i] = h.Frame(peers[m.Random.IntN(len(peers))], 0)
	}
	if never {
		return progrun.NewFrames(h, all, m.Bed.Generation)
	}
	return progrun.NewFrames(h, all)
}
