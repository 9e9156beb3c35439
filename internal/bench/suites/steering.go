package suites

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/steering"
)

// SteeringOptions configure `pilaster bench steering`.
type SteeringOptions struct {
	Pairs          []int // numbers of clients and servers, each 1 to MaxSteeringPairs
	Rounds         int
	Warmup, Window time.Duration
	Dir            string // for namespaces; created and removed
	ClientCPU      int    // all clients run on it; servers on any CPU
	Seed           uint64
	Generator      func(context.Context) *exec.Cmd // calls traffic.Generate
	Progress       func(done, of int)
}

// MaxSteeringPairs is the largest number of pairs of a run.
const MaxSteeringPairs = 64

// LeastSteeringWindow is the shortest window in which CPU time, which has a resolution of hundredths of a second, means
// anything.
const LeastSteeringWindow = 200 * time.Millisecond

// QuickSteering takes about three minutes.
func QuickSteering() SteeringOptions {
	return SteeringOptions{
		Pairs: []int{1, 4, 16}, Rounds: 5, Warmup: 200 * time.Millisecond, Window: time.Second,
	}
}

// FullSteering has all numbers of pairs of the claim.
func FullSteering() SteeringOptions {
	return SteeringOptions{
		Pairs: []int{1, 2, 4, 8, 16}, Rounds: 9, Warmup: 500 * time.Millisecond, Window: 3 * time.Second,
	}
}

// SteeringMode is a configuration of the talk (ST1).
type SteeringMode struct {
	Name, About string
	mode        string
	levels      []string
}

// SteeringModes returns the configurations, the baseline first.
func SteeringModes() []SteeringMode {
	two, three := []string{steering.Host, steering.Overlay}, steering.Levels()
	return []SteeringMode{
		{"vxlan", "no steering", steering.Off, three},
		{"rps", "RPS of uplink and VXLAN device, all CPUs", steering.RPS, two},
		{"rps+", "the same, and RPS of the containers' eth0", steering.RPS, three},
		{"rfs", "RFS of uplink and VXLAN device", steering.RFS, two},
		{"rfs+", "the same, and RFS of the containers' eth0", steering.RFS, three},
	}
}

// Steering compares a VXLAN network without steering to the same network with RPS and RFS (ST1, ST2). Each number of
// pairs has a network of its own, on which the modes take turns in random order. Modes that this machine refuses are in
// the report, with the reason.
//
// All clients run on one CPU. A veth device receives on its sender's CPU, so without steering this CPU processes all
// packets, as the one that a network card with one queue interrupts.
func Steering(ctx context.Context, o SteeringOptions) (_ *SteeringReport, err error) {
	started := time.Now()
	release, err := scenario.Claim(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	defer func() { err = scenario.Interrupted(ctx, err) }()
	// A record of its own: that of an agent or operator of this machine stays as it is.
	record := steering.Steering{Dir: filepath.Join(o.Dir, "record")}
	defer func() { err = errors.Join(err, os.RemoveAll(record.Dir)) }()
	m := &steeringMeter{SteeringOptions: o, record: record, random: rand.New(rand.NewPCG(o.Seed, 0))}
	r := &SteeringReport{Rounds: o.Rounds, Window: o.Window.Seconds(), ClientCPU: o.ClientCPU, Seed: o.Seed}
	for _, mode := range SteeringModes() {
		if err := (steering.Request{Mode: mode.mode}).Check(); err != nil {
			reason := err.Error()
			if errors.Is(err, steering.ErrNoTable) {
				reason = fmt.Sprintf("net.core.rps_sock_flow_entries: %v; run the benchmark there", steering.ErrNoTable)
			}
			r.NotRun = append(r.NotRun, ModeNotRun{mode.Name, reason})
			continue
		}
		m.modes = append(m.modes, mode)
	}
	for _, pairs := range o.Pairs {
		results, err := m.measure(ctx, pairs)
		if err != nil {
			return nil, fmt.Errorf("%d pairs: %w", pairs, err)
		}
		r.Results = append(r.Results, results...)
	}
	r.Header = report.NewHeader(started)
	return r, nil
}

type steeringMeter struct {
	SteeringOptions
	record steering.Steering
	modes  []SteeringMode
	random *rand.Rand
	done   int
}

// measure builds a network of the given number of pairs, and measures all modes.
func (m *steeringMeter) measure(ctx context.Context, pairs int) (_ []SteeringResult, err error) {
	bed, err := newSteeringBed(filepath.Join(m.Dir, "steering"), pairs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, bed.Close()) }()
	samples := make([][]steeringSample, len(m.modes))
	for range m.Rounds {
		for _, i := range m.random.Perm(len(m.modes)) {
			s, err := m.sample(ctx, bed, m.modes[i])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", m.modes[i].Name, err)
			}
			samples[i] = append(samples[i], s)
			m.done++
			m.Progress(m.done, m.Rounds*len(m.modes)*len(m.Pairs))
		}
	}
	var results []SteeringResult
	for i, mode := range m.modes {
		results = append(results, summarise(mode.Name, pairs, samples[i], m.random))
	}
	return results, nil
}

// steeringSample is one measurement of a mode.
type steeringSample struct {
	gigabits float64 // sum of all pairs
	packets  map[string][]uint64
	cpus     []traffic.CPUShare
}

// sample steers the servers' node as the mode says, measures, and restores the node's settings.
func (m *steeringMeter) sample(
	ctx context.Context,
	bed *steeringBed,
	mode SteeringMode,
) (s steeringSample, err error) {
	devices, err := bed.devices(mode.levels)
	if err != nil {
		return s, err
	}
	if err := m.record.Apply(steering.Request{Mode: mode.mode}, devices); err != nil {
		return s, err
	}
	defer func() {
		_, failed := m.record.Reset(devices...)
		err = errors.Join(err, failed)
	}()
	return m.run(ctx, bed)
}

// run lets all pairs send at the same time.
func (m *steeringMeter) run(ctx context.Context, bed *steeringBed) (s steeringSample, err error) {
	ctx, cancel := context.WithTimeout(ctx, m.Warmup+m.Window+4*traffic.DialTimeout)
	defer cancel()
	var servers, clients []*traffic.Process
	defer func() {
		for _, p := range append(servers, clients...) {
			p.Kill()
		}
	}()
	metric, _ := traffic.MetricByName("TCP_STREAM")
	for _, p := range bed.pairs {
		server, err := m.start(ctx, p.Server, anyCPU, traffic.Job{
			Metric: metric.Name, Serve: true, Target: netip.AddrPortFrom(p.Target, 0), CPU: anyCPU,
		})
		if err != nil {
			return s, fmt.Errorf("server: %w", err)
		}
		servers = append(servers, server)
		listening, err := server.Answer()
		if err != nil {
			return s, fmt.Errorf("server: %w", err)
		}
		client, err := m.start(ctx, p.Client, m.ClientCPU, traffic.Job{
			Metric: metric.Name, Target: netip.AddrPortFrom(p.Target, listening.Port), Warmup: m.Warmup,
			Window: m.Window, CPU: anyCPU,
		})
		if err != nil {
			return s, fmt.Errorf("client: %w", err)
		}
		clients = append(clients, client)
	}
	return s, m.collect(&s, bed, metric, clients, servers)
}

// anyCPU lets the scheduler choose the CPU of a generator.
const anyCPU = -1

// collect counts packets and CPU time while the clients send, and adds their figures.
func (m *steeringMeter) collect(
	s *steeringSample,
	bed *steeringBed,
	metric traffic.Metric,
	clients, servers []*traffic.Process,
) error {
	time.Sleep(m.Warmup)
	if err := bed.clear(); err != nil {
		return err
	}
	before, err := traffic.ReadCPUTimes()
	if err != nil {
		return err
	}
	time.Sleep(m.Window * 3 / 4) // ends before the first client does
	after, err := traffic.ReadCPUTimes()
	if err != nil {
		return err
	}
	if s.packets, err = bed.packets(); err != nil {
		return err
	}
	s.cpus = after.Since(before)
	for _, c := range clients {
		a, err := c.Answer()
		if err != nil {
			return fmt.Errorf("client: %w", err)
		}
		s.gigabits += metric.Value(a)
	}
	for _, p := range append(clients, servers...) {
		if err := p.Wait(); err != nil {
			return err
		}
	}
	return nil
}
