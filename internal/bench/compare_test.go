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

// runAsBuild is the test binary as a build of the program that runs "bench datapath", in a form that takes no time.
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

// standIn is a build that prints one report after the other and ends as a run does whose gates were missed.
func standIn(t *testing.T, reports ...Report) string {
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

// told is a report of speeds and a time.
func told(rr, pps, ns float64) Report {
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

// A build is as fast as itself, by runs that really are made.
func TestCompareOfOneProgram(t *testing.T) {
	t.Setenv(datapathEnv, filepath.Join(t.TempDir(), "bench"))
	o := comparison(os.Args[0], os.Args[0])
	o.Metrics, o.Pairs, o.AtLeast = []string{"UDP_RR"}, 1, 0.05 // the machine may do anything else meanwhile
	runs := 0
	o.Progress = func(done, of int) {
		if runs++; done != runs || of != 2 {
			t.Errorf("run %d of %d after %d", done, of, runs)
		}
	}
	r, err := CompareBuilds(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if x := r.Results[0]; !r.Pass || len(r.Results) != 1 || runs != 2 || len(x.This) != 1 || len(x.Other) != 1 ||
		r.This.Version == "" {
		t.Errorf("%d runs, %+v", runs, r)
	}
}

// A slower build is found out, in one speed or in all; a bar within a wide interval is no pass, and of times nothing is
// asked.
func TestCompareByVerdict(t *testing.T) {
	before := told(1000, 200, 100)
	for name, c := range map[string]struct {
		this         []Report
		rr, pps, all Verdict
	}{
		"the same":                {[]Report{before}, Passed, Passed, Passed},
		"faster":                  {[]Report{told(1100, 210, 90)}, Passed, Passed, Passed},
		"programs that take long": {[]Report{told(1000, 200, 900)}, Passed, Passed, Passed},
		"one slower":              {[]Report{told(960, 200, 100)}, TooLow, Passed, Passed},
		"all slower":              {[]Report{told(960, 190, 100)}, TooLow, TooLow, TooLow},
		"as slow as may be":       {[]Report{told(971, 194.2, 100)}, Passed, Passed, Passed},
		"one now so, now so":      {[]Report{told(920, 200, 100), told(1080, 200, 100)}, TooNoisy, Passed, Passed},
		"both now so, now so":     {[]Report{told(900, 220, 100), told(1100, 180, 100)}, TooNoisy, TooNoisy, Passed},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := CompareBuilds(t.Context(), comparison(standIn(t, c.this...), standIn(t, before)))
			if err != nil {
				t.Fatal(err)
			}
			var got []Verdict
			for _, x := range r.Results {
				got = append(got, x.Verdict)
			}
			if !slices.Equal(got, []Verdict{c.rr, c.pps, "", c.all}) || r.Pass != (c.rr == Passed && c.pps == Passed) {
				t.Errorf("%q, pass: %v", got, r.Pass)
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
					t.Errorf("%q is not told", verdict)
				}
			}
		})
	}
}

// A build that has no report, or not of what was asked, fails the comparison with what it said; who interrupts is told
// that.
func TestCompareWithoutReport(t *testing.T) {
	good := standIn(t, told(1000, 200, 100))
	lacks := told(1000, 200, 100)
	lacks.Results = lacks.Results[:2]
	for other, says := range map[string]string{
		standIn(t, lacks): "its run has no PROGRAM_OUT of netpila",
		program(t, "#!/bin/sh\necho first >&2\necho there is no form smoke >&2\nexit 2\n"): "no report of bench " +
			"datapath: there is no form smoke",
		program(t, "#!/bin/sh\necho '{}'\n"): "no report of bench " +
			"datapath",
		program(t, "no program"): "exec format error",
	} {
		r, err := CompareBuilds(t.Context(), comparison(good, other))
		if err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), other) {
			t.Errorf("%v, %+v, want %q", err, r, says)
		}
	}
}

// Who interrupts a comparison is told that, and the run of the moment may take away what it made.
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
