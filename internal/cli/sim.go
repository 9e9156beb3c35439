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
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/sim"
)

func newSimCommand(env Env) *cobra.Command {
	c := &cobra.Command{
		Use:     "sim",
		Short:   "A cluster of very many simulated nodes, with the real orchestrator",
		Example: "  pilaster sim run grow.yaml\n  pilaster sim paper --quick -o figures",
		Args:    cobra.NoArgs,
	}
	c.AddCommand(newSimRunCommand(env), newSimAgentCommand(env), newSimPaperCommand(env))
	return c
}

func newSimRunCommand(env Env) *cobra.Command {
	var o output
	var dir, profile string
	var step bool
	c := &cobra.Command{
		Use:   "run FILE",
		Short: "Play a scenario and count what orchestrator and agents say to each other",
		Long: `Play the scenario of a YAML file: so many nodes with so many containers each, and what happens to them. It runs the
real orchestrator with its etcd and, for every node, the real agent but for its kernel, disk and sockets, all in one process, and says
for each event how long it took and which messages it cost. docs/simulation.md says what may stand in a scenario, what is real and
what is not.

It ends with 1 where something did not hold that always must, such as that no two containers have one address, or a limit of the scenario was
exceeded. It needs no root. Run it on a machine that does nothing else.`,
		Example: `  pilaster sim run grow.yaml
  pilaster sim run grow.yaml -o json --data-dir /var/tmp > grow.json`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := sim.Read(args[0])
			if err != nil {
				return usage("%w; nothing was simulated", err)
			}
			options := sim.Options{Progress: func(p sim.Progress) { fmt.Fprintln(env.Stderr, p) }, Every: 2 * time.Second}
			if step {
				options.Before = func(event string) {
					fmt.Fprintf(env.Stderr, "next is: %s; press Enter\n", event)
					_, _ = bufio.NewReader(env.Stdin).ReadString('\n')
				}
			}
			r, err := runSim(c.Context(), env, s, options, dir, profile)
			if r != nil {
				if failed := o.print(env.Stdout, r, r.Text); failed != nil {
					return failed
				}
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
	c.Flags().StringVar(&dir, "data-dir", os.TempDir(), "folder on a real disk, where the orchestrator's etcd is while it runs")
	c.Flags().BoolVar(&step, "step", false, "wait for Enter before each event")
	c.Flags().StringVar(&profile, "profile", "", "folder for profiles of this process, which pprof reads: cpu.pprof, heap.pprof")
	_ = c.MarkFlagDirname("data-dir")
	_ = c.MarkFlagDirname("profile")
	return c
}

func runSim(ctx context.Context, env Env, s sim.Scenario, o sim.Options, dir, profile string) (r *sim.Result, err error) {
	own, err := os.MkdirTemp(dir, "pilaster-sim-")
	if err != nil {
		return nil, usage("--data-dir: %w; nothing was simulated", err)
	}
	defer os.RemoveAll(own)
	end, err := profiled(profile)
	if err != nil {
		return nil, usage("--profile: %w; nothing was simulated", err)
	}
	o.Dir, o.Log, o.Settled = own, slog.New(slog.NewTextHandler(env.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})), end
	return sim.Run(ctx, s, o)
}

// profiled starts profiles in a folder; end, called while all is still there, writes them.
func profiled(folder string) (end func() error, err error) {
	if folder == "" {
		return func() error { return nil }, nil
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	cpu, err := os.Create(filepath.Join(folder, "cpu.pprof"))
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return nil, errors.Join(err, cpu.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		heap, err := os.Create(filepath.Join(folder, "heap.pprof"))
		if err != nil {
			return errors.Join(err, cpu.Close())
		}
		runtime.GC()
		return errors.Join(pprof.WriteHeapProfile(heap), heap.Close(), cpu.Close())
	}, nil
}
