package sharing

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/plot/plottest"
)

// TestRun: a run has every figure of each rule set, node and program, and its report shows them (NZ9, NZ10). A report
// without one of them is an error.
func TestRun(t *testing.T) {
	o := Smoke()
	var err error
	if o.CPU, err = traffic.LastCPU(); err != nil {
		t.Fatal(err)
	}
	var last [2]int
	o.Dir, o.Seed, o.Progress = filepath.Join(t.TempDir(), "b"), 1, func(done, of int) { last = [2]int{done, of} }
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if want := 4*(1+o.Rounds) + len(o.AnswerRules); last != [2]int{want, want} {
		t.Errorf("progress ended at %v, want %d", last, want)
	}
	var names []string
	for _, s := range r.Sets {
		names = append(names, s.Name)
	}
	if want := []string{"one", "labels-10", "blocks-20", "wide"}; !slices.Equal(names, want) {
		t.Errorf("rule sets %v, want %v", names, want)
	}
	if wide := r.Sets[3]; wide.Entries < 3*o.Wide || wide.Lookup.Median < r.Sets[0].Lookup.Median {
		t.Errorf("rule set wide has %d entries, a lookup takes %v ns, with one rule %v; want entries of three sets",
			wide.Entries, wide.Lookup, r.Sets[0].Lookup)
	}
	var table, page strings.Builder
	r.Table(&table)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	plottest.CheckPage(t, page.String(), 2)
	for _, want := range []string{"| labels-10 | one | frontend | pil_tunnel_in |", "| 10 µs |", "| 1,500 |"} {
		if text := r.markdown(); !strings.Contains(text, want) {
			t.Errorf("the Markdown lacks %q:\n%s", want, text)
		}
	}
	for _, want := range []string{
		"labels-10", "frontend\tpil_tunnel_in", "Model: with a lookup of 10 µs", "6.612 million\t1.00",
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("the table lacks %q", want)
		}
	}
	t.Log("\n" + table.String())

	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for name, lose := range map[string]func(*Report){
		"a rule set":        func(r *Report) { r.Sets = r.Sets[1:] },
		"a program":         func(r *Report) { r.Sets[2].Programs = r.Sets[2].Programs[1:] },
		"a program's time":  func(r *Report) { r.Sets[1].Programs[3].Ns.Median = 0 },
		"a lookup":          func(r *Report) { r.Sets[3].Lookup.Median = 0 },
		"the memory":        func(r *Report) { r.Sets[0].Bytes = 0 },
		"a speed":           func(r *Report) { r.Sets[0].Speeds = r.Sets[0].Speeds[1:] },
		"an answer":         func(r *Report) { r.Answers = r.Answers[1:] },
		"an answer's time":  func(r *Report) { r.Answers[0].Ns.Median = 0 },
		"the statistics":    func(r *Report) { r.EmptyProgram = 0 },
		"the slowdown":      func(r *Report) { r.Slowdown.Median = 0 },
		"a session's bytes": func(r *Report) { r.SessionBytes = 0 },
	} {
		var copied Report
		if err := json.Unmarshal(text, &copied); err != nil {
			t.Fatal(err)
		}
		if err := copied.complete(o); err != nil {
			t.Fatalf("the whole report: %v", err)
		}
		lose(&copied)
		if err := copied.complete(o); err == nil || !strings.Contains(err.Error(), "not measured") {
			t.Errorf("without %s: %v, want an error", name, err)
		}
	}
}
