package networks

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/tenant"
)

// TestRows: each network of this build has a row, each row a scenario, and each row of our networks names tests that
// exist for what it isolates and hides.
func TestRows(t *testing.T) {
	all := All()
	for _, name := range tenant.Networks() {
		if !slices.ContainsFunc(all, func(n Network) bool { return n.Tenant != nil && n.Tenant.Network == name }) {
			t.Errorf("network %s has no row in the comparison", name)
		}
	}
	known := scenario.Names(scenario.Scenarios())
	for _, n := range all {
		if !slices.Contains(known, n.Scenario) {
			t.Errorf("%s has no scenario %q", n.Name, n.Scenario)
		}
	}
	for _, n := range append(all, Peer(Flannel)) {
		d := n.Design
		for what, p := range map[string]Property{
			"tenants": d.Tenants, "policies": d.Policies, "visible": d.Visible, "wire": d.Wire,
		} {
			if p.Text == "" || n.Tenant != nil && len(p.Tests) == 0 {
				t.Errorf("%s says of %s %q, with %d tests", n.Name, what, p.Text, len(p.Tests))
			}
		}
		for _, p := range []Property{d.Tenants, d.Policies, d.Visible, d.Wire, d.Fabric, d.Features} {
			for _, test := range p.Tests {
				checkTest(t, n.Name, test)
			}
		}
	}
}

func checkTest(t *testing.T, row, test string) {
	t.Helper()
	file, name, _ := strings.Cut(test, "#")
	b, err := os.ReadFile(filepath.Join("..", "..", "..", file))
	if err != nil || !strings.Contains(string(b), "\nfunc "+name+"(t *testing.T)") {
		t.Errorf("%s names a test that does not exist: %s (%v)", row, test, err)
	}
}

// TestArithmetic: what arithmetic predicts for 1,000 nodes with 80 containers each.
func TestArithmetic(t *testing.T) {
	want := map[string]int{
		"netpila": 0, "ila, mappings by push": 79_920, "nimitz, node CIDRs": 999, "nimitz, single addresses": 79_920,
		"evpn, prefixes": 999, "evpn, host routes": 79_920, "ila, mappings by pull": 10,
	}
	seen := 0
	for _, n := range All() {
		for _, c := range n.Clusters {
			seen++
			if got, known := c.Entries(1000, 80), want[c.Name]; got != known {
				t.Errorf("%s: %d entries for other nodes, want %d", c.Name, got, known)
			}
		}
	}
	if seen != len(want) {
		t.Errorf("%d clusters, want %d", seen, len(want))
	}
}

// TestDisagreement: each figure that differs from arithmetic fails the run.
func TestDisagreement(t *testing.T) {
	good := Simulated{
		Figures:   Nodes{State: 9, Start: Messages{Stream: 4}, Stop: Messages{Stream: 4}, Move: Messages{Stream: 8}},
		Predicted: Predicted{State: 9, Start: 4, Stop: 4, Move: 8},
	}
	if !good.agrees() {
		t.Error("equal figures differ")
	}
	for name, change := range map[string]func(*Nodes){
		"state": func(n *Nodes) { n.State++ }, "start": func(n *Nodes) { n.Start.Stream++ },
		"stop": func(n *Nodes) { n.Stop.Stream-- }, "move": func(n *Nodes) { n.Move.Stream-- },
	} {
		bad := good
		if change(&bad.Figures); bad.agrees() {
			t.Errorf("another %s agrees", name)
		}
	}
}

// sample is a report with two rows.
func sample() *Report {
	result := func(row string, median, ratio float64) bench.Result {
		return bench.Result{
			Scenario: row, Metric: "TCP_RR", Unit: "1/s", Median: median, Samples: []float64{median},
			Spread: report.Interval{Median: median, Low: median, High: median},
			Ratio:  &report.Interval{Median: ratio, Low: ratio, High: ratio},
		}
	}
	r := &Report{
		Form: "quick", Rows: []string{"native", "netpila", "vxlan"},
		Missing: []Missing{{"evpn", `no ovsdb-tool`}},
		Speed: &bench.Report{
			Reference: "native", Results: []bench.Result{result("native", 40_000, 1), result("netpila", 38_000, 0.95)},
		},
		Wires: []Wire{
			{Network: "netpila", TransactionBytes: 174.02, SegmentBytes: 1514, SegmentPayload: 1428},
			{
				Network: "vxlan", TransactionBytes: 314, SegmentBytes: 1514, SegmentPayload: 1358,
				Kernel: &KernelState{1, 1, 1},
			},
		},
		Nodes: []Nodes{{
			Network: "netpila", Elsewhere: 10, Start: Messages{0, 2}, Reachable: []float64{30, 41, 35},
			Added: []float64{29},
		}},
		Simulated: []Simulated{{
			Name: "netpila", Network: "netpila", Nodes: 1000, Containers: 80, Following: 1000, Pass: true,
		}},
		Designs: []Row{{"netpila", designNetpila}},
		Pass:    true,
	}
	r.Started = time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
	return r
}

// TestReport: the tables have all figures as text, in the page and in Markdown; a run that fails says so.
func TestReport(t *testing.T) {
	r := sample()
	var text, page bytes.Buffer
	r.Table(&text)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	begin, end := report.Marks("networks")
	filled, err := report.Fill("before\n"+begin+"\nold\n"+end+"\nafter\n", "networks", r.markdown())
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string]string{"text": text.String(), "page": page.String(), "Markdown": filled} {
		for _, want := range []string{
			"38,000 1/s (0.95)", "174", "1,428", "314", "3 (fdb 1, neighbours 1, routes 1)", "0, 10 containers there",
			"0 + 2", "35", "1,000", "agrees", "evpn: no ovsdb-tool", "cryptographic",
		} {
			if !strings.Contains(html.UnescapeString(got), want) {
				t.Errorf("%s lacks %q:\n%s", name, want, got)
			}
		}
	}
	if strings.Contains(filled, "old") || !strings.HasPrefix(filled, "before\n") ||
		!strings.HasSuffix(filled, "\nafter\n") ||
		!strings.Contains(filled, "[WhoReachesWhom](../internal/datapath/wire_test.go)") {
		t.Errorf("unexpected file:\n%s", filled)
	}
	if _, err := report.Fill("no marks", "networks", r.markdown()); err == nil {
		t.Error("a file without marks was filled")
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	again := new(Report)
	if err := json.Unmarshal(b, again); err != nil || again.markdown() != r.markdown() {
		t.Errorf("%v: tables of a report that was read again differ", err)
	}
	r.Simulated[0].Pass, r.Pass = false, false
	text.Reset()
	r.Table(&text)
	if !strings.Contains(text.String(), "differs") || !strings.Contains(text.String(), "not as arithmetic predicts") {
		t.Errorf("a run that fails says:\n%s", text.String())
	}
}

// TestParse reads metrics as a daemon writes them.
func TestParse(t *testing.T) {
	var got []string
	err := parse(strings.NewReader("# HELP x\ngo_threads 3\npilaster_up 1\npilaster_table_entries{table=\"a\"} 12\n"),
		func(name, labels string, v float64) { got = append(got, fmt.Sprint(name, "|", labels, "|", v)) })
	want := []string{"pilaster_up||1", `pilaster_table_entries|table="a"|12`}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v: %q, want %q", err, got, want)
	}
	if parse(strings.NewReader("pilaster_up many\n"), func(string, string, float64) {}) == nil {
		t.Error("a value that is no number was accepted")
	}
}

// TestGrowth: state for other nodes is the sum of what tables have more.
func TestGrowth(t *testing.T) {
	tables, sum := growth(map[string]int{"a": 1, "b": 5}, map[string]int{"a": 1, "b": 7, "c": 3})
	if sum != 5 || !slices.Equal(tables, []Table{{"b", 2}, {"c", 3}}) {
		t.Errorf("%d more entries in %+v", sum, tables)
	}
}

// TestForms: all forms have the rows of this build, and each row its scenario.
func TestForms(t *testing.T) {
	all := All()
	for name, form := range map[string]Options{"quick": Quick(), "full": Full(), "smoke": Smoke()} {
		if form.Form != name || len(form.Speed.Metrics) == 0 || len(form.Sizes) == 0 {
			t.Errorf("form %s: %+v", name, form)
		}
		if name != "smoke" && len(form.Networks) != len(all) {
			t.Errorf("form %s has %d of %d rows", name, len(form.Networks), len(all))
		}
		for _, n := range form.Networks {
			if _, err := scenario.Pick(scenario.Scenarios(), []string{n.Scenario}); err != nil {
				t.Errorf("row %s: %v", n.Name, err)
			}
		}
	}
	if full := Full().Sizes[0]; full.Nodes != 1000 || full.Containers != 80 {
		t.Errorf("the large cluster has %d nodes with %d containers", full.Nodes, full.Containers)
	}
	if !regexp.MustCompile(`^[a-z0-9-]+$`).MatchString(strings.Join(Names(all), "-")) {
		t.Errorf("names of rows: %q", Names(all))
	}
}
