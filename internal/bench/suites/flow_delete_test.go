package suites

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestFlowDelete deletes a batch of few and of many entries (NM8). The time of loose deletions grows with the number of
// entries, because Open vSwitch searches for the entries of each. The time of strict deletions does not grow. The
// bounds tolerate other load on the machine.
func TestFlowDelete(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "clean")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	steps := 0
	r, err := FlowDelete(t.Context(), FlowDeleteOptions{
		Installed: []int{
			500,
			10_000,
		}, Batch: 500, Rounds: 3, Dir: filepath.Join(dir, "b"), Seed: 1, Progress: func(int, int) { steps++ },
	})
	if err != nil {
		t.Fatal(err)
	}
	if steps != 12 || len(r.Results) != 2 || !strings.Contains(r.Switch, "Open vSwitch") {
		t.Fatalf("got %d steps, report %+v", steps, r)
	}
	loose, strict := r.growth(r.Results[1])
	if loose < 5 {
		t.Errorf("loose deletions take %.1f times as long with 20 times the entries: %+v", loose, r.Results)
	}
	if strict > loose/2 || 3*r.Results[1].Strict.Median > r.Results[1].Loose.Median {
		t.Errorf(
			"with 20 times the entries, strict deletions take %.1f times as long, and loose ones %.1f times: %+v",
			strict,
			loose,
			r.Results,
		)
	}
	var table, page strings.Builder
	r.Table(&table)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for name, has := range map[string][2]string{
		"table": {table.String(), "10,000"}, "page": {page.String(), "<svg"},
		"JSON": {string(text), `"looseMs":{"median":`},
	} {
		if !strings.Contains(has[0], has[1]) {
			t.Errorf("the %s lacks %s: %s", name, has[1], has[0])
		}
	}
	t.Log(table.String())
}
