package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// congestion control of every TCP connection.
const congestion = "cubic"

// Options are how a run is made.
type Options struct {
	Scenarios []Scenario
	Metrics   []Metric
	Rounds    int
	Warmup    time.Duration
	Window    time.Duration
	CPU       int    // of client and server both
	Seed      uint64 // of the order of scenarios and of the bootstrap
	Dir       string // for namespaces and pins; one run at a time uses it, and removes it

	// Generator makes a command that calls Generate.
	Generator func(context.Context) *exec.Cmd
	// Progress is called after each round with its number, from 1.
	Progress func(round int)
}

// Quick takes about a minute; Full about ten.
func Quick() Options {
	return Options{Rounds: 20, Warmup: 50 * time.Millisecond, Window: 250 * time.Millisecond}
}

func Full() Options {
	return Options{Rounds: 60, Warmup: 100 * time.Millisecond, Window: time.Second}
}

// Run builds every scenario and measures them in turn.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	started := time.Now()
	release, err := claim(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	pairs := make([]Pair, len(o.Scenarios))
	for i, s := range o.Scenarios {
		w, err := newWire(filepath.Join(o.Dir, s.Name))
		if err != nil {
			return nil, fmt.Errorf("scenario %s: %w", s.Name, err)
		}
		defer func() { err = errors.Join(err, w.Close()) }()
		if pairs[i], err = s.Build(w); err != nil {
			return nil, fmt.Errorf("scenario %s: %w", s.Name, err)
		}
	}
	random := rand.New(rand.NewPCG(o.Seed, 0))
	samples := make([][][]float64, len(o.Scenarios)) // by scenario, metric and round
	for i := range samples {
		samples[i] = make([][]float64, len(o.Metrics))
	}
	lost := 0
	for round := range o.Rounds {
		for m, metric := range o.Metrics {
			for _, s := range random.Perm(len(o.Scenarios)) {
				got, err := o.sample(ctx, pairs[s], metric)
				if err != nil {
					return nil, fmt.Errorf("round %d, %s of %s: %w", round+1, metric.Name, o.Scenarios[s].Name, err)
				}
				samples[s][m] = append(samples[s][m], got.PerSecond*metric.factor)
				lost += got.Lost
			}
		}
		o.Progress(round + 1)
	}
	return o.report(started, samples, lost, random), nil
}

// claim makes a folder this run's own, and clears away what a run that was killed left in it.
func claim(dir string) (release func() error, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("a folder for namespaces: %w", err)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("a folder for namespaces: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w; is another bench running? Two at once would measure each other", dir, err)
	}
	wires, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, wire := range wires {
		err = errors.Join(err, clearWire(wire))
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("clear away what an earlier bench left: %w", err)
	}
	return func() error { return errors.Join(os.Remove(dir), f.Close()) }, nil
}

func clearWire(dir string) error {
	mounts, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, mount := range mounts {
		err = errors.Join(err, unmount(mount))
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// sample runs one server and one client to its end.
func (o Options) sample(ctx context.Context, p Pair, m Metric) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Warmup+o.Window+4*patience)
	defer cancel()
	server, err := o.start(ctx, p.Server, job{Metric: m.Name, Serve: true, Target: netip.AddrPortFrom(p.Target, 0)})
	if err != nil {
		return answer{}, fmt.Errorf("server: %w", err)
	}
	defer server.kill()
	listening, err := server.answer()
	if err != nil {
		return answer{}, fmt.Errorf("server: %w", err)
	}
	client, err := o.start(ctx, p.Client, job{
		Metric: m.Name, Target: netip.AddrPortFrom(p.Target, listening.Port), Warmup: o.Warmup, Window: o.Window,
	})
	if err != nil {
		return answer{}, fmt.Errorf("client: %w", err)
	}
	defer client.kill()
	counted, err := client.answer()
	if err != nil {
		return answer{}, fmt.Errorf("client: %w", err)
	}
	return counted, errors.Join(client.wait(), server.wait())
}

// generator is a running generator process.
type generator struct {
	cmd    *exec.Cmd
	out    *json.Decoder
	errors bytes.Buffer
}

// start puts a generator on the CPU and into the namespace, and gives it its job.
func (o Options) start(ctx context.Context, ns *netns.Namespace, j job) (*generator, error) {
	told, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	g := &generator{cmd: o.Generator(ctx)}
	g.cmd.Stdin, g.cmd.Stderr = bytes.NewReader(told), &g.errors
	// One thread that nothing interrupts: no preemption by signals, no collector.
	g.cmd.Env = append(g.cmd.Environ(), "GOMAXPROCS=1", "GOGC=off", "GODEBUG=asyncpreemptoff=1")
	pipe, err := g.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	g.out = json.NewDecoder(pipe)
	return g, ns.Do(func() error {
		var set unix.CPUSet
		set.Set(o.CPU)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("pin to CPU %d: %w", o.CPU, err)
		}
		return g.cmd.Start() // the child inherits the thread's CPU and namespace
	})
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
