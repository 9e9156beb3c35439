package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/sim"
)

func simScenario(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "small.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSimRun(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	dir, err := os.MkdirTemp("", "sim")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	profile := filepath.Join(t.TempDir(), "profile")
	file := simScenario(t, "{nodes: 5, containersPerNode: 2, events: [{do: grow, by: 2}]}")
	code, out, errs := run(t, "\n", "sim", "run", file, "-o", "json", "--data-dir", dir, "--profile", profile, "--step")
	var r sim.Result
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != ExitDone {
		t.Fatalf("sim run: exit %d, %v, stderr %s; want exit %d and JSON", code, err, errs, ExitDone)
	}
	if len(r.Stages) != 2 || r.Stages[1].Nodes != 7 || r.Stages[1].Containers != 14 || r.Scenario.Name != "small" ||
		len(r.Real) == 0 ||
		len(r.NotReal) == 0 {
		t.Errorf("result: %s, want 2 stages, the last with 7 nodes and 14 containers", out)
	}
	if !strings.Contains(errs, "next event: grow 2; press Enter") {
		t.Errorf("--step prints %q, want the next event", errs)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("files left in --data-dir: %v, %v", left, err)
	}
	for _, name := range []string{"cpu-0-set-up.pprof", "cpu-1-grow-2.pprof", "heap.pprof"} {
		if about, err := os.Stat(filepath.Join(profile, name)); err != nil || about.Size() == 0 {
			t.Errorf("profile %s: %v", name, err)
		}
	}
}

func TestSimMistakes(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	small := simScenario(t, "{nodes: 2, containersPerNode: 1, limits: {messages: 3}}")
	for _, c := range []struct {
		line      string
		code      int
		out, errs string
	}{
		{"sim run", ExitUsage, "", "usage: pilaster sim run FILE"},
		{"sim run /nonexistent.yaml", ExitUsage, "", "read the scenario: open /nonexistent.yaml: no such file or " +
			"directory; nothing was simulated"},
		{"sim run " + simScenario(t, "nodes: 0"), ExitUsage, "", "small.yaml:1: nodes 0: use 1 to 1000000; nothing " +
			"was simulated"},
		{"sim run " + small + " --data-dir /nonexistent", ExitUsage, "", "--data-dir: "},
		{"sim run " + small + " --plot /nonexistent/page.html", ExitUsage, "", "--plot: open /nonexistent/page.html: " +
			"no such file or directory; nothing was simulated"},
		{"sim run " + small + " --plot /tmp", ExitUsage, "", "--plot: open /tmp: is a directory; nothing was " +
			"simulated"},
		{"sim run " + small, ExitFailed, " messages; the limit is 3\n", ""},
	} {
		code, out, errs := run(t, "", strings.Fields(c.line)...)
		if code != c.code || !strings.Contains(out, c.out) || !strings.Contains(errs, c.errs) {
			t.Errorf("pilaster %s: exit %d, stdout %q, stderr %q; want %q", c.line, code, out, errs, c.errs)
		}
	}
}

// TestSimInterrupted: an interrupted run prints the completed events, and its result is marked as interrupted.
func TestSimInterrupted(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	ctx, interrupt := context.WithCancel(t.Context())
	var out, errs bytes.Buffer
	file := simScenario(t, "{nodes: 2, containersPerNode: 1, events: [{do: grow, by: 1}]}")
	env := Env{
		Args:   []string{"sim", "run", file, "--step", "-o", "json"},
		Stdin:  endless{interrupt},
		Stdout: &out,
		Stderr: &errs,
	}
	code := Run(ctx, env)
	var r sim.Result
	if err := json.Unmarshal(out.Bytes(), &r); err != nil || code != ExitFailed ||
		r.Error != `interrupted after "set up"` ||
		len(r.Stages) != 1 ||
		r.Stages[0].Unfinished {
		t.Errorf("sim run: exit %d, %v, result %s; want one finished stage and the interrupt", code, err, out.String())
	}
	if want := `error: interrupted after "set up"` + "\n"; !strings.HasSuffix(errs.String(), want) {
		t.Errorf("stderr %q, want suffix %q", errs.String(), want)
	}
}

// endless is an input without lines. The first read interrupts the run.
type endless struct{ interrupt func() }

func (e endless) Read([]byte) (int, error) {
	e.interrupt()
	select {}
}

func TestSimAgentMistakes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ line, errs string }{
		{"sim agent --sizes 1000", "give at least two sizes"},
		{"sim agent --sizes 1000,1000", "size 1000 after 1000"},
		{"sim agent --sizes 0,1000", "nodes 0: use 1 to 1000000"},
		{"sim agent --containers 0", "0 containers of the agent: use 1 or more"},
		{"sim agent --followers=-1", "-1 followers: use 0 or more"},
		{"sim agent --data-dir /nonexistent", "--data-dir /nonexistent is no folder"},
		{"sim agent --networks vxlan", `--networks "vxlan": use netpila, nimitz`},
	} {
		code, out, errs := run(t, "", strings.Fields(c.line)...)
		if code != ExitUsage || out != "" || !strings.Contains(errs, c.errs) ||
			!strings.Contains(errs, "; nothing was simulated") {
			t.Errorf("pilaster %s: exit %d, stdout %q, stderr %q; want %q", c.line, code, out, errs, c.errs)
		}
	}
}
