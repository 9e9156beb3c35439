package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
)

func newBenchCommand(env Env) *cobra.Command {
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure the datapath on this machine",
		Args:  cobra.NoArgs,
	}
	c.AddCommand(newBenchDatapathCommand(env), &cobra.Command{
		Use:    "generator",
		Short:  "Generate or answer traffic, as the bench says on standard input",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(*cobra.Command, []string) error { return bench.Generate(env.Stdin, env.Stdout) },
	})
	return c
}

func newBenchDatapathCommand(env Env) *cobra.Command {
	var quick, full bool
	var to string
	c := &cobra.Command{
		Use:   "datapath",
		Short: "Compare NETPILA with node to node and with kernel routing",
		Long: `Compare the speed of containers on NETPILA with that of the bare nodes and of kernel routing, all
in one run, in turn and in random order, client and server on one CPU. Every scenario has two nodes of its own,
network namespaces on a veth link.

It fails where NETPILA stays below what is asked of it, and where the run was too noisy to tell. Run it on a
machine that does nothing else.`,
		Example: "  pilaster bench datapath --quick -o results",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := requireRoot("bench"); err != nil {
				return err
			}
			o := bench.Quick()
			if full {
				o = bench.Full()
			}
			report, err := runBench(c.Context(), env, o)
			if err != nil {
				return err
			}
			if err := writeReport(env.Stdout, report, to); err != nil {
				return err
			}
			if !report.Pass {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&quick, "quick", false, "about a minute (default)")
	c.Flags().BoolVar(&full, "full", false, "about ten minutes")
	c.MarkFlagsMutuallyExclusive("quick", "full")
	c.Flags().StringVarP(&to, "output", "o", "text", "text, json, or a folder for report.json beside the text")
	return c
}

func runBench(ctx context.Context, env Env, o bench.Options) (*bench.Report, error) {
	cpu, err := bench.LastCPU()
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program, which is also the generator: %w", err)
	}
	started := time.Now()
	o.Scenarios, o.Metrics, o.Dir, o.CPU = bench.Datapath(), bench.Metrics(), "/run/pilaster-bench", cpu
	o.Seed = uint64(started.UnixNano())
	o.Generator = func(ctx context.Context) *exec.Cmd { return exec.CommandContext(ctx, self, "bench", "generator") }
	o.Progress = func(round int) {
		took := time.Since(started)
		fmt.Fprintf(env.Stderr, "round %d of %d, about %.0f s to go\n", round, o.Rounds,
			(took / time.Duration(round) * time.Duration(o.Rounds-round)).Seconds())
	}
	return bench.Run(ctx, o)
}

// writeReport writes JSON, or text and beside it report.json in the folder to.
func writeReport(stdout io.Writer, r *bench.Report, to string) error {
	if to == "text" || to == "json" {
		return (&output{to}).print(stdout, r, r.Table)
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	file := filepath.Join(to, "report.json")
	if err := os.WriteFile(file, append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	if err := (&output{"text"}).print(stdout, r, r.Table); err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "\nevery sample is in %s\n", file)
	return err
}
