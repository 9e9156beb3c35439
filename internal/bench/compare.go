package bench

import (
	"bytes"
	"cmp"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/version"
)

// CompareOptions configure a comparison of two builds of this program.
type CompareOptions struct {
	This, Other string // paths of the programs
	Scenarios   []string
	Metrics     []string
	Pairs       int     // of runs, one of each build per pair
	AtLeast     float64 // minimum ratio to the other build's speed
	Seed        uint64  // of the order of runs and of the bootstrap
	// Progress is called after each run.
	Progress func(done, of int)
}

// CompareMetrics are the default metrics of a comparison of builds: the main speeds, and the time of our programs.
var CompareMetrics = []string{"TCP_RR", "UDP_RR", "TCP_CRR", "UDP_PPS", "TCP_STREAM", "PROGRAM_OUT", "PROGRAM_IN"}

// interruptTimeout bounds how long an interrupted run may take to remove its namespaces.
const interruptTimeout = 20 * time.Second

// CompareBuilds runs the datapath benchmark of both programs, in pairs and in random order within a pair. All runs use
// the smoke form: these runs are short, so the two runs of a pair are only seconds apart.
func CompareBuilds(ctx context.Context, o CompareOptions) (_ *CompareReport, err error) {
	defer func() { err = scenario.Interrupted(ctx, err) }()
	random := rand.New(rand.NewPCG(o.Seed, 0))
	r := &CompareReport{
		This: identify(o.This), Other: identify(o.Other), Pairs: o.Pairs, AtLeast: o.AtLeast, TooWide: Quick().TooWide,
		Seed: o.Seed,
	}
	started := time.Now()
	programs := [2]string{o.This, o.Other}
	var runs [2][]*Report
	for pair := range o.Pairs {
		for i, which := range random.Perm(len(programs)) {
			got, err := runBuild(ctx, programs[which], o)
			if err != nil {
				return nil, fmt.Errorf("pair %d, %s: %w", pair+1, programs[which], err)
			}
			runs[which] = append(runs[which], got)
			o.Progress(2*pair+i+1, 2*o.Pairs)
		}
	}
	r.Header = report.NewHeader(started)
	return r, r.judge(o, runs[0], runs[1])
}

// runBuild runs a program once and reads its report. It ignores exit code 1, which the smoke form returns if a gate
// fails.
func runBuild(ctx context.Context, program string, o CompareOptions) (*Report, error) {
	c := exec.CommandContext(ctx, program, "bench", "datapath", "--smoke",
		"--scenarios", strings.Join(o.Scenarios, ","), "--metrics", strings.Join(o.Metrics, ","), "-o", "json")
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = interruptTimeout
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	err := c.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return nil, err
	}
	r := &Report{}
	if json.Unmarshal(out.Bytes(), r) != nil || len(r.Results) == 0 {
		said := strings.TrimSpace(errs.String())
		return nil, fmt.Errorf(
			"the program printed no report of bench datapath: %s",
			cmp.Or(said[strings.LastIndexByte(said, '\n')+1:], fmt.Sprint(err)),
		)
	}
	return r, nil
}

// identify reads the version of a program from its build information, if it has one.
func identify(program string) Build {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return Build{Program: program}
	}
	return Build{Program: program, Version: cmp.Or(version.Recorded(info).Describe(), info.Main.Version)}
}
