package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/plot/plottest"
)

// runAsBuild makes the test binary a build that runs "bench datapath", with very short runs.
func runAsBuild(ctx context.Context, dir string) error {
	o := options(Free, dir)
	asked := func(flag string) []string {
		return strings.Split(os.Args[slices.Index(os.Args, flag)+1], ",")
	}
	var err error
	if o.Scenarios, err = scenario.Pick(o.Scenarios, asked("--scenarios")); err != nil {
		return err
	}
	if o.Metrics, err = scenario.Pick(o.Metrics, asked("--metrics")); err != nil {
		return err
	}
	r, err := Run(ctx, o)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// fakeBuild returns a program that prints the next report at each run, and exits as a benchmark whose gates failed.
func fakeBuild(t *testing.T, reports ...Report) string {
	t.Helper()
	dir := t.TempDir()
	for i, r := range reports {
		text, err := json.Marshal(r)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	script := fmt.Sprintf(
		"#!/bin/sh\ncd %s\nn=$(cat n 2>/dev/null || echo 0)\necho $((n + 1)) >n\ncat $((n %% %d))\necho said "+
			">&2\nexit 1\n",
		dir,
		len(reports),
	)
	return program(t, script)
}

func program(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pilaster")
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// reportOf returns a report of two speeds and a time.
func reportOf(rr, pps, ns float64) Report {
	return Report{Results: []Result{
		{Scenario: "netpila", Metric: "TCP_RR", Unit: "1/s", Median: rr},
		{Scenario: "netpila", Metric: "UDP_PPS", Unit: "1/s", Median: pps},
		{Scenario: "netpila", Metric: "PROGRAM_OUT", Unit: "ns", Less: true, Median: ns},
	}}
}

func comparison(this, other string) CompareOptions {
	return CompareOptions{
		This: this, Other: other, Scenarios: []string{"netpila"}, Metrics: []string{"TCP_RR", "UDP_PPS", "PROGRAM_OUT"},
		Pairs: FewestRounds, AtLeast: 0.97, Seed: 1, Progress: func(int, int) {},
	}
}

// TestCompareOfOneProgram compares a build with itself, by real runs.
func TestCompareOfOneProgram(t *testing.T) {
	t.Setenv(datapathEnv, filepath.Join(t.TempDir(), "bench"))
	o := comparison(os.Args[0], os.Args[0])
	o.Metrics, o.Pairs, o.AtLeast = []string{"UDP_RR"}, 1, 0.05 // allow for other load on the machine
	runs := 0
	o.Progress = func(done, of int) {
		if runs++; done != runs || of != 2 {
			t.Errorf("got progress %d of %d after %d runs", done, of, runs)
		}
	}
	r, err := CompareBuilds(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if x := r.Results[0]; !r.Pass || len(r.Results) != 1 || runs != 2 || len(x.This) != 1 || len(x.Other) != 1 ||
		r.This.Version == "" {
		t.Errorf("got %d runs and report %+v", runs, r)
	}
}

// TestCompareByVerdict: the comparison detects a build that is slower in one speed or in all speeds. It does not pass a
// gate whose limit is inside a wide interval. Times have no gate.
func TestCompareByVerdict(t *testing.T) {
	before := reportOf(1000, 200, 100)
	for name, c := range map[string]struct {
		this         []Report
		rr, pps, all Verdict
	}{
		"the same":                {[]Report{before}, Passed, Passed, Passed},
		"faster":                  {[]Report{reportOf(1100, 210, 90)}, Passed, Passed, Passed},
		"programs that take long": {[]Report{reportOf(1000, 200, 900)}, Passed, Passed, Passed},
		"one speed slower":        {[]Report{reportOf(960, 200, 100)}, TooLow, Passed, Passed},
		"all speeds slower":       {[]Report{reportOf(960, 190, 100)}, TooLow, TooLow, TooLow},
		"at the limit":            {[]Report{reportOf(971, 194.2, 100)}, Passed, Passed, Passed},
		"one speed noisy": {
			[]Report{reportOf(920, 200, 100), reportOf(1080, 200, 100)}, TooNoisy, Passed, Passed,
		},
		"both speeds noisy": {
			[]Report{reportOf(900, 220, 100), reportOf(1100, 180, 100)}, TooNoisy, TooNoisy, Passed,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := CompareBuilds(t.Context(), comparison(fakeBuild(t, c.this...), fakeBuild(t, before)))
			if err != nil {
				t.Fatal(err)
			}
			var got []Verdict
			for _, x := range r.Results {
				got = append(got, x.Verdict)
			}
			if !slices.Equal(got, []Verdict{c.rr, c.pps, "", c.all}) || r.Pass != (c.rr == Passed && c.pps == Passed) {
				t.Errorf("got verdicts %q, pass: %v", got, r.Pass)
			}
			var table, page bytes.Buffer
			r.Table(&table)
			if err := r.Page(&page); err != nil {
				t.Fatal(err)
			}
			plottest.CheckPage(t, page.String(), 1)
			for _, row := range r.table().Rows {
				if verdict := row[len(row)-1]; !strings.Contains(table.String(), verdict) ||
					!strings.Contains(page.String(), verdict) {
					t.Errorf("the table lacks %q", verdict)
				}
			}
		})
	}
}

// TestCompareWithoutReport: if a build prints no report, or a report without the requested figures, the comparison
// fails, and the error has the build's output.
func TestCompareWithoutReport(t *testing.T) {
	good := fakeBuild(t, reportOf(1000, 200, 100))
	lacks := reportOf(1000, 200, 100)
	lacks.Results = lacks.Results[:2]
	for other, says := range map[string]string{
		fakeBuild(t, lacks): "the run has no PROGRAM_OUT of netpila",
		program(t, "#!/bin/sh\necho first >&2\necho there is no form smoke >&2\nexit 2\n"): "no report of bench " +
			"datapath: there is no form smoke",
		program(t, "#!/bin/sh\necho '{}'\n"): "no report of bench " +
			"datapath",
		program(t, "no program"): "exec format error",
	} {
		r, err := CompareBuilds(t.Context(), comparison(good, other))
		if err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), other) {
			t.Errorf("got error %v, report %+v; want error %q", err, r, says)
		}
	}
}

// TestCompareInterrupted: the error of an interrupted comparison names the interrupt, and the build that is running can
// clean up.
func TestCompareInterrupted(t *testing.T) {
	dir := t.TempDir()
	began, left := filepath.Join(dir, "began"), filepath.Join(dir, "left")
	if err := unix.Mkfifo(began, 0o600); err != nil {
		t.Fatal(err)
	}
	build := program(
		t,
		fmt.Sprintf("#!/bin/sh\ntrap 'echo >%s; exit 1' INT\necho >%s\nwhile :; do sleep 0.01; done\n", left, began),
	)
	ctx, interrupt := context.WithCancelCause(t.Context())
	go func() {
		_, err := os.ReadFile(began)
		interrupt(errors.Join(errors.New("that is enough"), err))
	}()
	_, err := CompareBuilds(ctx, comparison(build, build))
	if err == nil || !strings.Contains(err.Error(), "interrupted: that is enough; nothing was kept") {
		t.Error(err)
	}
	if _, err := os.Stat(left); err != nil {
		t.Error(err)
	}
}
