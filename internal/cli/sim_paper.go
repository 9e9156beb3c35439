package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/suites"
	"pilaster.io/pilaster/internal/paper"
	"pilaster.io/pilaster/internal/sim"
)

func newSimPaperCommand(env Env) *cobra.Command {
	var quick, full bool
	var only []string
	var dir string
	var to reportPlace
	c := &cobra.Command{
		Use:   "paper",
		Short: "Reproduce figures of the NETPILA and NIMITZ paper with runs on this machine",
		Long: `Reproduce figures 7, 9 to 12 and 16 to 18 and table 1 of the NETPILA and NIMITZ paper, beside the
numbers of its text: with simulated clusters of the real orchestrator and agents, with the tables of the kernel and of
Open vSwitch, with the benchmark of the datapath, and with the model of "pilaster bench nic" in place of a NIC. Each
figure states its sizes, what was run, and why it differs from the paper. docs/results/paper.md explains them.

A folder given with -o gets index.html with all plots, which needs no other file, and for each figure its data with the
scenario: fig9.json and fig9.tsv. Figures of an earlier run stay in the folder until they are plotted again, so that
--only can produce one after the other.

Figures 10, 11 and 16 and table 1 need root, and except for the table Open vSwitch (Debian: openvswitch-switch). If one
of them is missing, nothing is run. A figure that fails does not stop the others; it is named, and the exit code is 1.
Run it on an idle machine.`,
		Example: `  pilaster sim paper --quick -o figures
  pilaster sim paper --only fig9,fig18 -o figures
  pilaster sim paper --only fig12 -o json`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			form := paper.Standard()
			switch {
			case quick:
				form = paper.Quick()
			case full:
				form = paper.Full()
			}
			if c.Flags().Changed("only") && len(only) == 0 {
				return usage("--only is empty; omit it for all, or name some")
			}
			for _, id := range only {
				if !slices.Contains(paper.IDs(), id) {
					return usage("--only: there is no figure %q; use some of %s", id, strings.Join(paper.IDs(), ", "))
				}
			}
			if err := checkDataDir(dir); err != nil {
				return err
			}
			if err := paper.Lacks(only, os.Geteuid() == 0, scenario.OVSMissing()); err != nil {
				return err
			}
			giveUp, err := makeFolder(to, paper.Files(only))
			if err != nil {
				return err
			}
			defer giveUp()
			return drawPaper(c.Context(), env, form, only, dir, to)
		},
	}
	f := c.Flags()
	f.BoolVar(&quick, "quick", false, "two minutes: small sizes")
	f.BoolVar(&full, "full", false, "an hour or more: the paper's sizes, as far as 16 GiB of memory go")
	c.MarkFlagsMutuallyExclusive("quick", "full")
	f.StringSliceVar(&only, "only", nil, "only these: "+strings.Join(paper.IDs(), ", "))
	f.StringVar(
		&dir,
		"data-dir",
		os.TempDir(),
		"folder on a real disk, for the simulated orchestrators' etcd during the run",
	)
	bindReport(c, &to)
	c.Flags().Lookup("output").Usage = "text, json, or a folder for index.html and each figure's data beside the text"
	_ = c.MarkFlagDirname("data-dir")
	_ = c.RegisterFlagCompletionFunc("only", listed(paper.IDs()))
	return c
}

func drawPaper(ctx context.Context, env Env, form paper.Form, only []string, dir string, to reportPlace) error {
	var figures []paper.Figure
	err := paper.Draw(ctx, paper.Options{
		Form: form, Only: only, Origin: originOf(buildVersion()), Measure: paperMeasures(env, dir),
		Progress: func(text string) { fmt.Fprintln(env.Stderr, text) },
		Done: func(f paper.Figure) error {
			figures = append(figures, f)
			if !to.isFolder() {
				return nil
			}
			return paper.Folder(to).Put(f)
		},
	})
	format := "text"
	if !to.isFolder() {
		format = to.String()
	}
	printed := (&output{format: format}).print(env.Stdout, figures, func(w io.Writer) {
		for _, f := range figures {
			f.Table(w)
		}
	})
	if to.isFolder() && len(figures) > 0 {
		fmt.Fprintf(env.Stdout, "\nplots are in %s/%s, each figure's data beside it\n", to, paper.PageName)
	}
	return errors.Join(err, printed)
}

func originOf(v versionView) paper.Origin {
	o := paper.Origin{Version: v.Version, Commit: v.Revision, CPUs: runtime.NumCPU()}
	if o.Commit == "" {
		o.Commit = "unknown"
	}
	if v.Modified {
		o.Commit += " with changes"
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		o.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	return o
}

// paperMeasures runs the simulator and the benchmarks as their own commands do.
func paperMeasures(env Env, dir string) paper.Measures {
	every := func(what string) func(done, of int) {
		printed := time.Now()
		return func(done, of int) {
			if now := time.Now(); done == of || now.Sub(printed) >= 2*time.Second {
				printed = now
				fmt.Fprintf(env.Stderr, "%s %d of %d\n", what, done, of)
			}
		}
	}
	return paper.Measures{
		Sim: func(ctx context.Context, s sim.Scenario) (*sim.Result, error) {
			return runSim(
				ctx,
				env,
				s,
				sim.Options{Progress: func(p sim.Progress) { fmt.Fprintln(env.Stderr, p) }, Every: 2 * time.Second},
				dir,
				"",
			)
		},
		FlowDelete: func(ctx context.Context, o suites.FlowDeleteOptions) (*suites.FlowDeleteReport, error) {
			o.Dir, o.Seed, o.Progress = benchDir, uint64(time.Now().UnixNano()), every("sample")
			return suites.FlowDelete(ctx, o)
		},
		Entries: func(ctx context.Context, o suites.EntriesOptions) (*suites.EntriesReport, error) {
			o.Dir, o.Progress = benchDir, every("cluster")
			return suites.Entries(ctx, o)
		},
		Datapath: func(ctx context.Context, o bench.Options) (*bench.Report, error) {
			return runBench(ctx, env, o, false)
		},
	}
}
