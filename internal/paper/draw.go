package paper

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/suites"
	"pilaster.io/pilaster/internal/nic"
	"pilaster.io/pilaster/internal/sim"
)

// Form is the sizes of the measurements.
type Form struct {
	Name       string
	JobStep    int             // every JobStep-th node of fig 7's job is simulated
	Delays     []time.Duration // of counters, including the paper's
	Netpila    []int           // nodes that grow by a tenth; at least two sizes
	Nimitz     []int           // the same for NIMITZ
	Containers int             // on each of these nodes
	Installed  []int           // entries before the deletion of each batch: consecutive multiples of the batch
	Batch      int
	Rounds     int      // of each deletion
	Switches   []string // switches whose entries are counted
	Jobs       []Job
	Datapath   int // rounds
}

// Job is one of fig 16's jobs. The paper does not state the containers per node. With two pairs of entries for each, 3
// and 5 containers give the paper's 12 and 20 entries.
type Job struct {
	Name       string
	Nodes      int
	Containers int
	Simulated  int // nodes of the simulated cluster on netpila that represents the job
}

func jobs(most int) []Job {
	return []Job{{"A", jobNodes, 3, min(jobNodes, most)}, {"B", jobBNodes, 5, min(jobBNodes, most)}}
}

// paperContainers is the number of containers per node in fig 17 and 18 (§7.1).
const paperContainers = 31

var delays = []time.Duration{
	0,
	500 * time.Millisecond,
	time.Second,
	1500 * time.Millisecond,
	counterDelay,
	3 * time.Second,
}

// batches returns the sizes from one batch to n batches.
func batches(n int) (all []int) {
	for i := range n {
		all = append(all, (i+1)*deleteBatch)
	}
	return all
}

// Quick takes one or two minutes.
func Quick() Form {
	return Form{
		Name: "quick", JobStep: 16, Delays: delays, Netpila: []int{100, 300, 1000}, Nimitz: []int{100, 300, 1000},
		Containers: paperContainers,
		Installed: batches(
			5,
		), Batch: deleteBatch, Rounds: 3, Switches: suites.EntrySwitches, Jobs: jobs(100), Datapath: 8,
	}
}

// Standard takes about ten minutes.
func Standard() Form {
	f := Quick()
	f.Name, f.JobStep, f.Datapath, f.Jobs = "default", 1, 24, jobs(10_000)
	f.Netpila, f.Nimitz, f.Installed = []int{500, 1000, 2000, 5000, 10_000}, []int{500, 1000, 2000, 5000}, batches(10)
	return f
}

// Full has the paper's sizes, as far as memoryLimit allows.
func Full() Form {
	f := Standard()
	f.Name, f.Datapath = "full", 40
	f.Netpila, f.Nimitz, f.Installed = append(f.Netpila, 25_000, 100_000), append(f.Nimitz, 10_000, 25_000), batches(25)
	return f
}

// Measures are the sources of the figures.
type Measures struct {
	Sim        func(context.Context, sim.Scenario) (*sim.Result, error)
	FlowDelete func(context.Context, suites.FlowDeleteOptions) (*suites.FlowDeleteReport, error)
	Entries    func(context.Context, suites.EntriesOptions) (*suites.EntriesReport, error)
	Datapath   func(context.Context, bench.Options) (*bench.Report, error)
}

// Options configure Draw.
type Options struct {
	Form     Form
	Only     []string // IDs; none means all
	Origin   Origin   // without form and date
	Measure  Measures
	Progress func(string)
	Done     func(Figure) error // receives each figure, including failed ones
}

// definition describes how a figure is created.
type definition struct {
	id, title, claims, nature string
	root, ovs                 bool // requirements: root, Open vSwitch
	draw                      func(*run, context.Context, *Figure) error
}

const (
	simulated = "simulated"
	model     = "a model"
	measured  = "measured"
)

var definitions = []definition{
	{
		"fig7",
		"entries of a NIMITZ node, and offloaded ones",
		"§3.3, fig 7; NM4",
		model,
		false,
		false,
		(*run).fig7,
	},
	{
		"fig9",
		"queries of 10 % more nodes on NIMITZ, and their time",
		"§4.1, fig 9; NM7",
		simulated,
		false,
		false,
		(*run).fig9,
	},
	{
		"fig10",
		"deleting a batch, by number of installed entries",
		"§4.1, fig 10; NM8",
		measured,
		true,
		true,
		(*run).fig10,
	},
	{"fig11", "deleting all entries, by their number", "§4.1, fig 11; NM8", measured, true, true, (*run).fig11},
	{
		"fig12",
		"throughput of two containers with revalidation and late counters",
		"§4.2, fig 12; NM9",
		model,
		false,
		false,
		(*run).fig12,
	},
	{
		"fig16",
		"entries of a node in two jobs, on both networks",
		"§7.1, fig 16; NP10, NM4",
		"measured, simulated and a model",
		true,
		true,
		(*run).fig16,
	},
	{
		"fig17",
		"entries of a node as the cluster grows, on both networks",
		"§7.1, fig 17; NP10",
		simulated,
		false,
		false,
		(*run).fig17,
	},
	{"fig18", "time to grow by 10 %, on both networks", "§7.1, fig 18; NP9", simulated, false, false, (*run).fig18},
	{
		"table1",
		"NIMITZ and NETPILA compared",
		"§6.1, table 1; NP9, NP10",
		"simulated and measured",
		true,
		false,
		(*run).table1,
	},
}

// IDs returns the IDs of all figures.
func IDs() (all []string) {
	for _, d := range definitions {
		all = append(all, d.id)
	}
	return all
}

func chosen(only []string) (some []definition) {
	for _, d := range definitions {
		if len(only) == 0 || slices.Contains(only, d.id) {
			some = append(some, d)
		}
	}
	return some
}

// Lacks returns an error that names the figures that cannot be created here, because they need root or Open vSwitch.
// ovs is the error of a check for Open vSwitch, or nil.
func Lacks(only []string, root bool, ovs error) error {
	need := func(what func(definition) bool) (with, without []string) {
		for _, d := range chosen(only) {
			if what(d) {
				with = append(with, d.id)
			} else {
				without = append(without, d.id)
			}
		}
		return with, without
	}
	instead := func(rest []string) string {
		if len(rest) == 0 {
			return "nothing was run"
		}
		return "leave them out with --only " + strings.Join(rest, ",") + "; nothing was run"
	}
	if with, rest := need(func(d definition) bool { return d.root }); !root && len(with) > 0 {
		return fmt.Errorf(
			"%s: root is needed, to create network namespaces and load eBPF programs; %s",
			strings.Join(with, ", "),
			instead(rest),
		)
	}
	if with, rest := need(func(d definition) bool { return d.ovs }); ovs != nil && len(with) > 0 {
		return fmt.Errorf("%s: %w; or %s", strings.Join(with, ", "), ovs, instead(rest))
	}
	return nil
}

// run has the results of measurements, which figures share.
type run struct {
	Options
	of       string // the current figure
	job      *nic.Offloads
	deleted  *suites.FlowDeleteReport
	clusters map[string]*sim.Result
}

// seed is the seed of all random choices.
const seed = 1

// Draw creates the figures. If a figure fails, Draw still creates the others; the error names all failed figures.
func Draw(ctx context.Context, o Options) error {
	r := &run{Options: o, clusters: map[string]*sim.Result{}}
	var failed error
	for _, d := range chosen(o.Only) {
		began := time.Now()
		f := Figure{ID: d.id, Title: d.title, Claims: d.claims, Nature: d.nature, Origin: o.Origin}
		f.Origin.Form, f.Origin.Date = o.Form.Name, began.UTC().Truncate(time.Second)
		r.of = d.id
		r.say("begins")
		err := d.draw(r, ctx, &f)
		if ctx.Err() != nil {
			return errors.Join(
				failed,
				fmt.Errorf("%s: interrupted: %w; completed figures are kept", d.id, context.Cause(ctx)),
			)
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", d.id, err))
			f = Figure{
				ID:     d.id,
				Title:  d.title,
				Claims: d.claims,
				Nature: d.nature,
				Origin: f.Origin,
				Failed: err.Error(),
			}
		}
		f.Seconds = time.Since(began).Round(100 * time.Millisecond).Seconds()
		if err := o.Done(f); err != nil {
			return errors.Join(failed, err)
		}
	}
	return failed
}

func (r *run) say(format string, args ...any) { r.Progress(r.of + ": " + fmt.Sprintf(format, args...)) }
