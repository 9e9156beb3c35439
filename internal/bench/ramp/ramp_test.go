package ramp

import (
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/plot/plottest"
)

// TestRun: the offload starts when the backend's load reaches the threshold, frontends have load from then on and none
// before, no connection fails, and the report has a plot of the load (NZ5).
func TestRun(t *testing.T) {
	o := Smoke()
	o.Binary, o.Name, o.Progress = labtest.Binary(t), labtest.Name(t), func(what string) { t.Log(what) }
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	var table, page strings.Builder
	r.Table(&table)
	t.Log("\n" + table.String())
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	plottest.CheckPage(t, page.String(), 1)
	for _, s := range r.Samples {
		if s.Seconds < r.Started && s.Load[backendNode] >= threshold*r.Budget {
			t.Errorf("%.1f s: load %v is at the threshold of %v, and the offload was started at %.1f s", s.Seconds,
				s.Load[backendNode], threshold*r.Budget, r.Started)
		}
	}
	if ours := r.perConnection(frontendNode(0), true); ours < 10*r.perConnection(frontendNode(0), false) || ours < 1 {
		t.Errorf("a frontend takes %.2f µs of a connection, and %.2f µs without the offload", ours,
			r.perConnection(frontendNode(0), false))
	}
}
