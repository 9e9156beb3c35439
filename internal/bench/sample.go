package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// sample runs one server and one client to its end.
func (o Options) sample(ctx context.Context, p Pair, m Metric) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Warmup+o.Window+4*patience)
	defer cancel()
	s, err := o.begin(ctx, p, m, 1)
	if err != nil {
		return answer{}, err
	}
	defer s.kill()
	for {
		if got, done, err := s.turn(); done || err != nil {
			return got, err
		}
	}
}

// inTurns runs a server and a client of every scenario at once, of which one at a time is at a trial: in each turn all of
// them, in random order. So whatever the machine does for longer than a turn is in the figures of all.
func (r *run) inTurns(ctx context.Context, m Metric, windows int) ([]answer, error) {
	windows *= len(r.pairs)
	ctx, cancel := context.WithTimeout(ctx, time.Duration(windows)*(r.Warmup+r.Window)+4*patience)
	defer cancel()
	sessions := make([]*session, len(r.pairs))
	for i, p := range r.pairs {
		s, err := r.begin(ctx, p, m, windows)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.Scenarios[i].Name, err)
		}
		defer s.kill()
		sessions[i] = s
	}
	all := make([]answer, len(sessions))
	for left := len(sessions); left > 0; {
		for _, i := range r.random.Perm(len(sessions)) {
			if sessions[i] == nil {
				continue
			}
			got, done, err := sessions[i].turn()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r.Scenarios[i].Name, err)
			}
			if done {
				all[i], sessions[i] = got, nil
				left--
			}
		}
	}
	return all, nil
}

// session is a server and its client at work.
type session struct {
	pair           Pair
	server, client *generator
	waits          bool // the client, for a fresh path
}

// begin starts a session of so many warm-ups and windows.
func (o Options) begin(ctx context.Context, p Pair, m Metric, windows int) (*session, error) {
	server, err := o.start(ctx, p.Server, job{Metric: m.Name, Serve: true, Target: netip.AddrPortFrom(p.Target, 0)})
	if err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	listening, err := server.answer()
	if err != nil {
		server.kill()
		return nil, fmt.Errorf("server: %w", err)
	}
	client, err := o.start(ctx, p.Client, job{
		Metric: m.Name, Target: netip.AddrPortFrom(p.Target, listening.Port),
		Warmup: time.Duration(windows) * o.Warmup, Window: time.Duration(windows) * o.Window, CPU: o.CPU,
	})
	if err != nil {
		server.kill()
		return nil, fmt.Errorf("client: %w", err)
	}
	return &session{pair: p, server: server, client: client}, nil
}

// turn lets the client do what it waits to do, until it waits again or is done.
func (s *session) turn() (got answer, done bool, err error) {
	if s.waits {
		if err := s.client.freshen(s.pair); err != nil {
			return got, false, err
		}
	}
	got, err = s.client.answer()
	if err != nil {
		return got, false, fmt.Errorf("client: %w", err)
	}
	if s.waits = got.Fresh; s.waits {
		return got, false, nil
	}
	arrived, err := s.server.answer()
	if err != nil {
		return got, false, fmt.Errorf("server: %w", err)
	}
	if arrived.Ops > 0 { // what was sent is not what counts
		got.Ops = arrived.Ops
	}
	return got, true, errors.Join(s.client.wait(), s.server.wait())
}

func (s *session) kill() {
	s.client.kill()
	s.server.kill()
}

// freshen sees to it that nothing is cached, and lets the client go on.
func (g *generator) freshen(p Pair) error {
	if p.Fresh != nil {
		if err := p.Fresh(); err != nil {
			return fmt.Errorf("void what is cached: %w", err)
		}
	}
	return g.in.Encode(struct{}{})
}

// generator is a running generator process.
type generator struct {
	cmd    *exec.Cmd
	in     *json.Encoder
	out    *json.Decoder
	errors bytes.Buffer
}

// start puts a generator on the CPU and into the namespace, and gives it its job.
func (o Options) start(ctx context.Context, ns *netns.Namespace, j job) (*generator, error) {
	g := &generator{cmd: o.Generator(ctx)}
	g.cmd.Stderr = &g.errors
	// One thread that nothing interrupts: no preemption by signals, no collector.
	g.cmd.Env = append(g.cmd.Environ(), "GOMAXPROCS=1", "GOGC=off", "GODEBUG=asyncpreemptoff=1")
	pipe, err := g.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	to, err := g.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	g.out, g.in = json.NewDecoder(pipe), json.NewEncoder(to)
	if err := ns.Do(func() error { return o.pinned(g.cmd.Start) }); err != nil {
		return nil, err
	}
	return g, g.in.Encode(j)
}

// pinned starts what inherits the thread's CPU.
func (o Options) pinned(start func() error) error {
	if o.CPU != Free {
		var set unix.CPUSet
		set.Set(o.CPU)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("pin to CPU %d: %w", o.CPU, err)
		}
	}
	return start()
}

func (g *generator) answer() (a answer, err error) {
	if err := g.out.Decode(&a); err != nil {
		return a, errors.Join(fmt.Errorf("no answer: %w", err), g.wait())
	}
	return a, nil
}

func (g *generator) wait() error {
	if err := g.cmd.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(g.errors.Bytes()))
	}
	return nil
}

// kill ends a generator that was not waited for.
func (g *generator) kill() {
	if g.cmd.ProcessState == nil {
		g.cmd.Process.Kill()
		g.cmd.Wait()
	}
}

// LastCPU is the highest CPU this process may use: the lowest takes most interrupts.
func LastCPU() (int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, fmt.Errorf("which CPUs there are: %w", err)
	}
	for cpu := len(set)*64 - 1; cpu >= 0; cpu-- {
		if set.IsSet(cpu) {
			return cpu, nil
		}
	}
	return 0, errors.New("no CPU to run on")
}
