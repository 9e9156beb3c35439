package paper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/suites"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/sim"
	"pilaster.io/pilaster/internal/tenant"
)

const generatorEnv = "PILASTER_PAPER_TEST_GENERATOR"

// TestMain lets the test binary act as the traffic generator too.
func TestMain(m *testing.M) {
	if os.Getenv(generatorEnv) == "" {
		os.Exit(m.Run())
	}
	if err := traffic.Generate(os.Stdin, os.Stdout); err != nil {
		os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
}

// tiny measures everything, at sizes that take seconds.
func tiny() Form {
	f := Quick()
	f.JobStep, f.Delays, f.Netpila, f.Nimitz, f.Containers = 400, []time.Duration{
		0,
		counterDelay,
	}, []int{
		10,
		30,
	}, []int{
		10,
		30,
	}, 3
	f.Installed, f.Batch, f.Rounds, f.Switches, f.Datapath = []int{200, 400}, 200, 1, []string{"ebpf"}, 1
	f.Jobs = []Job{{"A", 40, 3, 10}}
	return f
}

// real measures as the command does, in its own folders.
func real(t *testing.T) Measures {
	dir, err := os.MkdirTemp("/tmp", "paper") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return Measures{
		Sim: func(ctx context.Context, s sim.Scenario) (*sim.Result, error) {
			own, err := os.MkdirTemp(dir, "s")
			if err != nil {
				return nil, err
			}
			return sim.Run(ctx, s, sim.Options{Dir: own, Log: slog.New(slog.DiscardHandler)})
		},
		FlowDelete: func(ctx context.Context, o suites.FlowDeleteOptions) (*suites.FlowDeleteReport, error) {
			o.Dir, o.Progress = filepath.Join(dir, "c"), func(int, int) {}
			return suites.FlowDelete(ctx, o)
		},
		Entries: func(ctx context.Context, o suites.EntriesOptions) (*suites.EntriesReport, error) {
			o.Dir, o.Progress = filepath.Join(dir, "e"), func(int, int) {}
			return suites.Entries(ctx, o)
		},
		Datapath: func(ctx context.Context, o bench.Options) (_ *bench.Report, err error) {
			if o.CPU, err = traffic.LastCPU(); err != nil {
				return nil, err
			}
			o.Dir, o.Progress, o.Warmup, o.Window = filepath.Join(
				dir,
				"d",
			), func(bench.Step) {}, time.Millisecond, 10*time.Millisecond
			o.Generator = func(ctx context.Context) *exec.Cmd {
				c := exec.CommandContext(ctx, os.Args[0])
				c.Env = append(os.Environ(), generatorEnv+"=1")
				return c
			}
			return bench.Run(ctx, o)
		},
	}
}

func draw(t *testing.T, m Measures, to Folder, only ...string) (map[string]Figure, error) {
	t.Helper()
	all := map[string]Figure{}
	err := Draw(t.Context(), Options{
		Form: tiny(), Only: only, Origin: Origin{Commit: "c0ffee", CPUs: 2, Kernel: "6.18"}, Measure: m,
		Progress: func(text string) { t.Log(text) },
		Done: func(f Figure) error {
			all[f.ID] = f
			t.Logf("%s took %.1f s", f.ID, f.Seconds)
			return to.Put(f)
		},
	})
	return all, err
}

// ahead runs the simulated clusters of the tiny form concurrently, because they mostly wait for time and disks.
func ahead(t *testing.T, m Measures) Measures {
	t.Helper()
	f := tiny()
	type key struct {
		network           string
		nodes, containers int
	}
	var runs errgroup.Group
	var mu sync.Mutex
	done := map[key]*sim.Result{}
	for _, network := range []string{tenant.Nimitz, tenant.Netpila} {
		for _, k := range []key{{network, 10, f.Containers}, {network, 30, f.Containers}, {network, 10, 1}} {
			runs.Go(func() error {
				s, err := growing(k.network, k.nodes, k.containers)
				if err != nil {
					return err
				}
				r, err := m.Sim(t.Context(), s)
				mu.Lock()
				defer mu.Unlock()
				done[k] = r
				return err
			})
		}
	}
	if err := runs.Wait(); err != nil {
		t.Fatal(err)
	}
	m.Sim = func(_ context.Context, s sim.Scenario) (*sim.Result, error) {
		return done[key{s.Network, s.Nodes, s.ContainersPerNode}], nil
	}
	return m
}

// TestFigures creates all figures in one folder, as several runs with --only do. Each figure has the paper's values,
// the measured values and their origin. The page has all figures and no external references.
func TestFigures(t *testing.T) {
	to, m := Folder(t.TempDir()), ahead(t, real(t))
	all := map[string]Figure{}
	t.Run("draw", func(t *testing.T) {
		var mu sync.Mutex
		for _, only := range [][]string{{"fig10", "fig11", "fig16"}, {"table1"}, {"fig7", "fig9", "fig12", "fig17",
			"fig18"}} {
			t.Run(only[0], func(t *testing.T) {
				t.Parallel()
				some, err := draw(t, m, Folder(t.TempDir()), only...)
				if err != nil {
					t.Fatal(err)
				}
				mu.Lock()
				defer mu.Unlock()
				for id, f := range some {
					all[id] = f
					if err := to.Put(f); err != nil {
						t.Fatal(err)
					}
				}
			})
		}
	})
	page, err := os.ReadFile(filepath.Join(string(to), PageName))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range definitions {
		f := all[d.id]
		if f.Sizes == "" || f.Ran == "" || f.Differs == "" || f.Scenario == nil || f.Origin.Form != "quick" ||
			f.Origin.Date.IsZero() {
			t.Errorf("%s lacks part of its description: %+v", d.id, f)
		}
		whose := map[string]int{}
		for _, p := range f.Panels {
			for _, s := range p.Series {
				whose[s.Of]++
				if len(s.Points) == 0 ||
					s.Of == theirs && !regexp.MustCompile(`^§\d\.\d, from the text$`).MatchString(s.Where) {
					t.Errorf("%s: unexpected series %+v", d.id, s)
				}
			}
		}
		for _, chart := range f.Charts() {
			for _, c := range chart.Curves {
				if n := len([]rune(c.Name)); n > 30 { // the width of the legend, at 13 px
					t.Errorf("%s: the name %q has %d characters, want at most 30", d.id, c.Name, n)
				}
			}
		}
		papers := slices.ContainsFunc(f.Rows, func(r Row) bool { return r.Paper != "" && r.Where != "" })
		if !papers || d.id != "table1" && (whose[ours] == 0 || whose[theirs] == 0) {
			t.Errorf("%s lacks the paper's or our values: %v, %+v", d.id, whose, f.Rows)
		}
		if !strings.Contains(string(page), `<h2 id="`+d.id+`"`) || strings.Count(string(page), "<svg") < len(f.Panels) {
			t.Errorf("the page lacks %s", d.id)
		}
		for _, ends := range []string{".json", ".tsv"} {
			b, err := os.ReadFile(filepath.Join(string(to), d.id+ends))
			if err != nil || !bytes.Contains(b, []byte("c0ffee")) ||
				ends == ".tsv" && bytes.Count(b, []byte("\n")) < 8 {
				t.Errorf("%v, %s", err, b)
			}
		}
	}
	if found := regexp.MustCompile(`(?i)(https?:)?//[a-z]|src=|@import|url\(|href="[^#]`).FindString(string(page)); found != "" {
		t.Errorf("the page has an external reference: %q", found)
	}
	checkQueries(t, all["fig9"])
	checkEntries(t, all["fig17"], all["fig16"], all["table1"])
	checkSums(t, all["fig10"], all["fig11"])
}

func series(t *testing.T, f Figure, of, name string) [][2]float64 {
	t.Helper()
	for _, p := range f.Panels {
		for _, s := range p.Series {
			if s.Of == of && s.Name == name {
				return s.Points
			}
		}
	}
	t.Fatalf("%s has no series %s from %s", f.ID, name, of)
	return nil
}

// checkQueries requires the counts of §4.1's arithmetic: with 10 and 30 nodes, one page for each new node, and one
// query of each existing node.
func checkQueries(t *testing.T, f Figure) {
	for of, want := range map[string][][2]float64{"all": {{10, 11}, {30, 33}}, "of new nodes": {{10, 1}, {30, 3}}} {
		if got := series(t, f, ours, of); !slices.Equal(got, want) {
			t.Errorf("queries, %s: got %v, want %v", of, got, want)
		}
	}
	if got, want := series(t, f, arithmetic, "all, §4.1"), [][2]float64{{10, 11}, {30, 33}, {25_000,
		150_000}}; !slices.Equal(
		got,
		want,
	) {
		t.Errorf("arithmetic: got %v, want %v", got, want)
	}
	if !strings.HasPrefix(f.Differs, "The counted queries equal") {
		t.Errorf("unexpected differences: %s", f.Differs)
	}
}

// checkEntries: a node on NIMITZ has one entry for each other node. A node on NETPILA has only entries of its own
// containers.
func checkEntries(t *testing.T, clusters, job, table Figure) {
	nimitz, netpila := series(t, clusters, ours, "NIMITZ"), series(t, clusters, ours, "NETPILA")
	if nimitz[1][1]-nimitz[0][1] != 33-11 || netpila[0] != [2]float64{11, 2*3 + 2} ||
		netpila[1] != [2]float64{33, 2*3 + 2} {
		t.Errorf("unexpected entries of nodes: %v, %v", nimitz, netpila)
	}
	if got := series(t, job, ours, "NIMITZ, in ebpf"); len(got) != 1 || got[0][1] < 39+4*3 {
		t.Errorf("unexpected entries of job A: %v", got)
	}
	for i, want := range []string{"1.00 for each further node, 2.00 for each container here", "0.00 for each further " +
		"node, 2.00 for each container here"} {
		if table.Rows[i].Here != want {
			t.Errorf("row %d is %q, want %q", i, table.Rows[i].Here, want)
		}
	}
}

// checkSums: the time of a complete deletion is the sum of its batches.
func checkSums(t *testing.T, batches, whole Figure) {
	growth, seconds := series(t, batches, ours, "loose"), series(t, whole, ours, "loose")
	if first, both := seconds[0][1], seconds[1][1]; growth[0][1] != 1 || both/first < growth[1][1] ||
		both/first > growth[1][1]+1.001 {
		t.Errorf("unexpected growth %v, seconds %v", growth, seconds)
	}
}

// TestFailure: a failed figure is named, also on the page, and the others are still created.
func TestFailure(t *testing.T) {
	m := Measures{
		FlowDelete: func(context.Context, suites.FlowDeleteOptions) (*suites.FlowDeleteReport, error) {
			return nil, errors.New("the switch ended")
		},
		Sim: func(_ context.Context, s sim.Scenario) (*sim.Result, error) {
			return &sim.Result{Scenario: s, Violations: []string{"two containers have one address"}}, nil
		},
	}
	to := Folder(t.TempDir())
	all, err := draw(t, m, to, "fig7", "fig10", "fig9")
	if err == nil || !strings.Contains(err.Error(), "fig10: the switch ended") ||
		!strings.Contains(err.Error(), "fig9: nimitz, 10 nodes: two containers have one address") {
		t.Errorf("got error %v", err)
	}
	if all["fig10"].Failed != "the switch ended" || all["fig7"].Failed != "" || len(all["fig7"].Panels) != 1 {
		t.Errorf("unexpected figures %+v", all)
	}
	page, _ := os.ReadFile(filepath.Join(string(to), PageName))
	for _, want := range []string{"It failed: the switch ended", "Not plotted: fig11, fig12, fig16, fig17, fig18, " +
		"table1."} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := Draw(ctx, Options{Form: tiny(), Only: []string{"fig7"}, Progress: func(string) {},
		Done: to.Put}); err == nil ||
		!strings.Contains(err.Error(), "fig7: interrupted") {
		t.Errorf("interrupted: got error %v", err)
	}
}

// TestFolder: figures of an earlier run keep their own date; an unreadable figure is named.
func TestFolder(t *testing.T) {
	to := Folder(t.TempDir())
	for i, id := range []string{"fig18", "fig7"} {
		if err := to.Put(Figure{ID: id, Title: "title of " + id, Ran: "x",
			Origin: Origin{Date: time.Unix(int64(i)*86_400, 0).UTC()}}); err != nil {
			t.Fatal(err)
		}
	}
	page, _ := os.ReadFile(filepath.Join(string(to), PageName))
	if a, b := bytes.Index(page, []byte("1970-01-02")), bytes.Index(page, []byte("1970-01-01")); a < 0 || b < a {
		t.Errorf("figures are missing, or not in order: %s", page)
	}
	if err := os.WriteFile(filepath.Join(string(to), "fig9.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := to.Put(Figure{ID: "fig7"}); err == nil ||
		!strings.Contains(err.Error(), "fig9.json: unexpected end of JSON input; remove the file") {
		t.Errorf("got error %v", err)
	}
}

// TestLacks: before any measurement, an error names the figures that cannot be created here, and how to leave them out.
func TestLacks(t *testing.T) {
	for _, c := range []struct {
		only []string
		root bool
		ovs  error
		says string
	}{
		{nil, true, nil, ""},
		{[]string{"fig7", "fig9", "fig18"}, false, errors.New("no switch"), ""},
		{nil, false, nil, "fig10, fig11, fig16, table1: root is needed, to create network namespaces and load eBPF " +
			"programs; leave them out with --only fig7,fig9,fig12,fig17,fig18; nothing was run"},
		{[]string{"table1"}, false, nil, "table1: root is needed, to create network namespaces and load eBPF " +
			"programs; nothing was run"},
		{[]string{"fig10", "table1"}, true, errors.New("no switch"), "fig10: no switch; or leave them out with " +
			"--only table1; nothing was run"},
	} {
		err := Lacks(c.only, c.root, c.ovs)
		if got := ""; err != nil {
			got = err.Error()
			if got != c.says {
				t.Errorf("%v: got %s, want %s", c.only, got, c.says)
			}
		} else if c.says != "" {
			t.Errorf("%v: got an error although nothing is missing", c.only)
		}
	}
}

// TestForms: each form has enough sizes for a figure, and larger sizes than the form before it. The largest form
// includes the paper's sizes.
func TestForms(t *testing.T) {
	before := Form{}
	for _, f := range []Form{Quick(), Standard(), Full()} {
		for _, sizes := range [][]int{f.Netpila, f.Nimitz, f.Installed} {
			if len(sizes) < 2 || !slices.IsSorted(sizes) || sizes[0] < 10 {
				t.Errorf("%s: unexpected sizes %v", f.Name, sizes)
			}
		}
		if slices.Max(f.Netpila) <= slices.Max(append(before.Netpila, 0)) ||
			slices.Max(f.Nimitz) <= slices.Max(append(before.Nimitz, 0)) {
			t.Errorf("%s is not larger than %s", f.Name, before.Name)
		}
		if !slices.Contains(f.Delays, counterDelay) {
			t.Errorf("%s: unexpected delays %v", f.Name, f.Delays)
		}
		before = f
	}
	if !slices.Contains(before.Nimitz, paperNodes) || !slices.Contains(before.Netpila, paperFarthest) ||
		slices.Max(before.Installed) != deleteMost {
		t.Errorf("unexpected full form %+v", before)
	}
}

// TestArithmetic checks §4.1's example: 25,000 nodes and a tenth more.
func TestArithmetic(t *testing.T) {
	if ofNew, ofOthers := queries(25_000, 2500); ofNew != 125_000 || ofOthers != 25_000 {
		t.Errorf("got %d queries of new nodes, %d of the others", ofNew, ofOthers)
	}
	if ofNew, _ := queries(501, 50); ofNew != 100 {
		t.Errorf("two pages: got %d queries", ofNew)
	}
	if got := overhead(report.Interval{Median: 0.8, Low: 0.5, High: 1}, true); got != "+25.0 % (+0.0 to +100.0)" {
		t.Errorf("unexpected latency %s", got)
	}
	var f Figure
	if err := json.Unmarshal([]byte(`{"id":"fig9","panels":[{"series":[{"of":"paper",`+
		`"where":"§4.1, from the text","name":"x","points":[[1,2]]}]}]}`), &f); err != nil ||
		f.Charts()[0].Curves[0].Name != "paper: x, §4.1" {
		t.Errorf("got %v, %+v", err, f)
	}
}
