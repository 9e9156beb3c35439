package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/sim"
)

func newSimCommand(env Env) *cobra.Command {
	c := &cobra.Command{
		Use:     "sim",
		Short:   "Simulate a cluster of many nodes, with the real orchestrator",
		Example: "  pilaster sim run grow.yaml\n  pilaster sim paper --quick -o figures",
		Args:    cobra.NoArgs,
	}
	c.AddCommand(newSimRunCommand(env), newSimAgentCommand(env), newSimPaperCommand(env))
	return c
}

func newSimRunCommand(env Env) *cobra.Command {
	var o output
	var dir, profile, plot string
	var step bool
	c := &cobra.Command{
		Use:   "run FILE",
		Short: "Run a scenario and count the messages between orchestrator and agents",
		Long: `Run the scenario of a YAML file: a number of nodes and containers, and events. The command runs the
real orchestrator with its etcd and, for every node, the real agent without its kernel, disk and sockets, all in one
process, and prints the duration and the messages of each event. docs/reference/simulation.md describes scenarios, and
what is real.

It exits with 1 if an invariant was violated, for example if two containers have the same address, or if a limit of the
scenario was exceeded. It needs no root. Run it on an idle machine.`,
		Example: `  pilaster sim run grow.yaml
  pilaster sim run grow.yaml -o json --data-dir /var/tmp > grow.json
  pilaster sim run restart.yaml --plot restart.html`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := sim.Read(args[0])
			if err != nil {
				return usage("%w; nothing was simulated", err)
			}
			options := sim.Options{
				Progress: func(p sim.Progress) { fmt.Fprintln(env.Stderr, p) },
				Every:    2 * time.Second,
			}
			if step {
				in := bufio.NewReader(env.Stdin)
				options.Before = func(event string) error {
					fmt.Fprintf(env.Stderr, "next event: %s; press Enter\n", event)
					return awaitEnter(c.Context(), in)
				}
			}
			if plot != "" {
				if err := writable(plot); err != nil {
					return usage("--plot: %w; nothing was simulated", err)
				}
			}
			r, err := runSim(c.Context(), env, s, options, dir, profile)
			if r != nil {
				if failed := errors.Join(o.print(env.Stdout, r, r.Text), writeSimPage(r, plot)); failed != nil {
					return failed
				}
			}
			if r != nil && err != nil {
				return &exitError{ExitFailed, err} // not ExitUnreachable, if a simulated node's call failed
			}
			if err != nil {
				return err
			}
			if !r.Pass() {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	o.bind(c)
	c.Flags().
		StringVar(&dir, "data-dir", os.TempDir(), "folder on a real disk, for the orchestrator's etcd during the run")
	c.Flags().BoolVar(&step, "step", false, "wait for Enter before each event")
	c.Flags().
		StringVar(&profile, "profile", "", "folder for profiles of this process, which pprof reads: "+
			"cpu-0-set-up.pprof, one more for each event, heap.pprof")
	c.Flags().StringVar(&plot, "plot", "", "HTML file to write, with a plot of each event over time")
	_ = c.MarkFlagFilename("plot", "html")
	_ = c.MarkFlagDirname("data-dir")
	_ = c.MarkFlagDirname("profile")
	return c
}

// awaitEnter waits for a line or an interrupt. After an interrupt, the goroutine that reads remains until the process
// ends.
func awaitEnter(ctx context.Context, in *bufio.Reader) error {
	line := make(chan struct{})
	go func() {
		defer close(line)
		_, _ = in.ReadString('\n') // at the end of input the run continues
	}()
	select {
	case <-line:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// checkDataDir returns a usage error if the folder does not exist.
func checkDataDir(dir string) error {
	if about, err := os.Stat(dir); err != nil || !about.IsDir() {
		return usage("--data-dir %s is no folder; nothing was simulated", dir)
	}
	return nil
}

// writeSimPage writes the page if a path is given.
func writeSimPage(r *sim.Result, path string) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	return errors.Join(r.Page(f, time.Now()), f.Close())
}

func runSim(
	ctx context.Context,
	env Env,
	s sim.Scenario,
	o sim.Options,
	dir, profile string,
) (r *sim.Result, err error) {
	own, err := os.MkdirTemp(dir, "pilaster-sim-")
	if err != nil {
		return nil, usage("--data-dir: %w; nothing was simulated", err)
	}
	defer os.RemoveAll(own)
	o.Dir, o.Log = own, slog.New(slog.NewTextHandler(env.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if profile != "" {
		p := &profiles{folder: profile}
		if err := p.begin("set up"); err != nil {
			return nil, usage("--profile: %w; nothing was simulated", err)
		}
		before := o.Before
		o.Before = func(event string) error {
			if before != nil {
				if err := before(event); err != nil {
					return err
				}
			}
			return errors.Join(p.end(), p.begin(event))
		}
		o.Settled = func() error { return errors.Join(p.end(), p.heap()) }
	}
	return sim.Run(ctx, s, o)
}

// profiles writes a CPU profile of each event, and a heap profile.
type profiles struct {
	folder string
	begun  int
	cpu    *os.File
}

func (p *profiles) begin(event string) (err error) {
	if err = os.MkdirAll(p.folder, 0o755); err != nil {
		return err
	}
	name := fmt.Sprintf("cpu-%d-%s.pprof", p.begun, strings.ReplaceAll(event, " ", "-"))
	if p.cpu, err = os.Create(filepath.Join(p.folder, name)); err != nil {
		return err
	}
	p.begun++
	return pprof.StartCPUProfile(p.cpu)
}

func (p *profiles) end() error {
	pprof.StopCPUProfile()
	return p.cpu.Close()
}

// heap writes the heap profile while all simulated nodes still exist.
func (p *profiles) heap() error {
	f, err := os.Create(filepath.Join(p.folder, "heap.pprof"))
	if err != nil {
		return err
	}
	runtime.GC()
	return errors.Join(pprof.WriteHeapProfile(f), f.Close())
}
