package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/netns"
)

// sample runs one server and one client until they end.
func (o Options) sample(ctx context.Context, p scenario.Pair, m traffic.Metric) (traffic.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Warmup+o.Window+4*traffic.DialTimeout)
	defer cancel()
	s, err := o.begin(ctx, p, m)
	if err != nil {
		return traffic.Answer{}, err
	}
	defer s.kill()
	return s.end()
}

// inTurns starts a server and a client of every scenario. In each turn, every scenario does one trial, in random order.
// So a disturbance of the machine that is longer than a turn affects all scenarios.
func (r *run) inTurns(ctx context.Context, m traffic.Metric, windows int) ([]traffic.Answer, error) {
	warmup, window := time.Duration(windows*len(r.pairs))*r.Warmup, time.Duration(windows*len(r.pairs))*r.Window
	ctx, cancel := context.WithTimeout(ctx, warmup+window+time.Duration(len(r.pairs))*4*traffic.DialTimeout)
	defer cancel()
	sessions, all := make([]*session, len(r.pairs)), make([]traffic.Answer, len(r.pairs))
	each := func(do func(i int) error) error {
		for _, i := range r.random.Perm(len(r.pairs)) {
			if err := do(i); err != nil {
				return fmt.Errorf("%s: %w", r.Scenarios[i].Name, err)
			}
		}
		return nil
	}
	defer func() {
		for _, s := range sessions {
			if s != nil {
				s.kill()
			}
		}
	}()
	err := each(func(i int) (err error) {
		sessions[i], err = r.begin(ctx, r.pairs[i], m)
		return err
	})
	if err != nil {
		return nil, err
	}
	turn := func() (float64, error) {
		return 1, each(func(i int) error { return sessions[i].trial(&all[i]) })
	}
	if _, _, err := traffic.Repeat(turn, warmup); err != nil {
		return nil, err
	}
	clear(all)
	if _, _, err := traffic.Repeat(turn, window); err != nil {
		return nil, err
	}
	return all, each(func(i int) error {
		if len(all[i].First) == 0 {
			return errors.New("no echo at all")
		}
		return sessions[i].endTrials()
	})
}

// session is a running server and its client.
type session struct {
	pair           scenario.Pair
	server, client *traffic.Process
}

func (o Options) begin(ctx context.Context, p scenario.Pair, m traffic.Metric) (*session, error) {
	server, err := o.start(
		ctx,
		p.Server,
		traffic.Job{Metric: m.Name, Serve: true, Target: netip.AddrPortFrom(p.Target, p.Port)},
	)
	if err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	listening, err := server.Answer()
	if err != nil {
		server.Kill()
		return nil, fmt.Errorf("server: %w", err)
	}
	target := netip.AddrPortFrom(p.Target, listening.Port)
	if p.Expose != nil {
		if target, err = p.Expose(listening.Port); err != nil {
			server.Kill()
			return nil, fmt.Errorf("expose the server: %w", err)
		}
	}
	client, err := o.start(ctx, p.Client, traffic.Job{
		Metric: m.Name, Target: target, Warmup: o.Warmup, Window: o.Window,
		CPU: o.CPU,
	})
	if err != nil {
		server.Kill()
		return nil, fmt.Errorf("client: %w", err)
	}
	return &session{pair: p, server: server, client: client}, nil
}

// trial lets the client do one trial with empty caches, and adds its result.
func (s *session) trial(to *traffic.Answer) error {
	if s.pair.Fresh != nil {
		if err := s.pair.Fresh(); err != nil {
			return fmt.Errorf("invalidate the cache: %w", err)
		}
	}
	if err := s.client.Send(true); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	got, err := s.client.Answer()
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	to.First, to.Next, to.Lost = append(to.First, got.First...), append(to.Next, got.Next...), to.Lost+got.Lost
	return nil
}

// endTrials ends a session of trials.
func (s *session) endTrials() error {
	if err := s.client.Send(false); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	_, err := s.end()
	return err
}

// end waits until both are done.
func (s *session) end() (traffic.Answer, error) {
	got, err := s.client.Answer()
	if err != nil {
		return got, fmt.Errorf("client: %w", err)
	}
	arrived, err := s.server.Answer()
	if err != nil {
		return got, fmt.Errorf("server: %w", err)
	}
	if arrived.Ops > 0 { // only received datagrams count
		got.Ops = arrived.Ops
	}
	return got, errors.Join(s.client.Wait(), s.server.Wait())
}

func (s *session) kill() {
	s.client.Kill()
	s.server.Kill()
}

// start starts a generator on the CPU and in the namespace, and sends it its job.
func (o Options) start(ctx context.Context, ns *netns.Namespace, j traffic.Job) (*traffic.Process, error) {
	return traffic.Start(o.Generator(ctx), func(c *exec.Cmd) error {
		return ns.Do(func() error { return o.launch(c) })
	}, j)
}

// share pins all threads of processes to the CPU of client and server.
func (o Options) share(pids []int) error {
	for _, pid := range pids {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		for _, thread := range threads {
			id, wrong := strconv.Atoi(filepath.Base(thread))
			err = errors.Join(err, wrong, o.pin(id))
		}
		if err != nil {
			return fmt.Errorf("process %d: %w", pid, err)
		}
	}
	return nil
}

// pin pins a thread and its later children.
func (o Options) pin(thread int) error {
	if o.CPU == Free {
		return nil
	}
	var set unix.CPUSet
	set.Set(o.CPU)
	if err := unix.SchedSetaffinity(thread, &set); err != nil {
		return fmt.Errorf("pin to CPU %d: %w", o.CPU, err)
	}
	return nil
}

// launch starts a command, which inherits the thread's CPU. Ctrl-C at a terminal does not reach the command: only the
// benchmark gets the signal, and ends the command.
func (o Options) launch(c *exec.Cmd) error {
	if err := o.pin(0); err != nil {
		return err
	}
	c.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	return c.Start()
}

// unusedMap is a map that no program reads. Before a first packet of a scenario with a flow cache, the run writes
// its generations. In a scenario without one it writes this map instead, so that it disturbs all compared scenarios
// equally.
type unusedMap struct{ *ebpf.Map }

func newUnusedMap() (*unusedMap, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("create the unused map: %w", err)
	}
	return &unusedMap{m}, nil
}

// write increments a counter, once for each node.
func (t *unusedMap) write() error {
	for range len(scenario.Wire{}.Nodes) {
		var count uint32
		if err := t.Lookup(uint32(0), &count); err != nil {
			return err
		}
		if err := t.Put(uint32(0), count+1); err != nil {
			return err
		}
	}
	return nil
}

// Close accepts nil.
func (t *unusedMap) Close() error {
	if t == nil {
		return nil
	}
	return t.Map.Close()
}
