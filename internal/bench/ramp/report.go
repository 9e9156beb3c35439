package ramp

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

const nature = "run time of programs; all nodes are namespaces of one machine, with the real daemons"

// Report is the result of `pilaster bench offload ramp`.
type Report struct {
	Nature string `json:"nature"`
	report.Header
	CIDRs     int      `json:"cidrs"` // in each direction
	Frontends int      `json:"frontends"`
	Rate      float64  `json:"rate"`      // connections per second at the end
	Budget    float64  `json:"budget"`    // CPUs, chosen: the threshold is reached in the middle of the ramp
	Threshold float64  `json:"threshold"` // part of the budget
	Started   float64  `json:"started"`   // when the offload was started, in seconds
	Turns     int      `json:"turns"`     // ramps until the load reached the threshold; Samples has the last one
	Failed    int64    `json:"failed"`    // connections, of all turns
	Samples   []Sample `json:"samples"`
}

// Sample is what happened since the sample before.
type Sample struct {
	Seconds float64            `json:"seconds"` // since the start of the ramp
	Opened  int64              `json:"opened"`  // connections
	Failed  int64              `json:"failed"`  // connections
	Phase   string             `json:"phase,omitempty"`
	Load    map[string]float64 `json:"load"` // by node, in CPUs
}

// complete returns an error if the ramp does not show what it should: load before and after the start, no connection
// that failed.
func (r *Report) complete() error {
	before, after := 0, 0
	for _, s := range r.Samples {
		switch {
		case s.Phase == "":
			before++
		case s.Phase == "active":
			after++
		}
	}
	switch {
	case r.Started == 0:
		return errors.New("not measured: the backend's load did not reach the threshold early enough")
	case before == 0 || after == 0:
		return fmt.Errorf("not measured: %d samples before the offload, %d while it was active", before, after)
	case r.Failed > 0:
		return fmt.Errorf("%d connections failed", r.Failed)
	}
	for i := range r.Frontends {
		if last := r.Samples[len(r.Samples)-1].Load; last[frontendNode(i)] <= 0 {
			return fmt.Errorf("not measured: load of %s", frontendNode(i))
		}
	}
	return nil
}

// perConnection returns the time of a node's programs for a connection in µs, before the offload or while it is active.
func (r *Report) perConnection(node string, active bool) float64 {
	busy, opened, last := 0.0, 0.0, 0.0
	for _, s := range r.Samples {
		if active && s.Phase == "active" || !active && s.Phase == "" {
			busy += s.Load[node] * (s.Seconds - last)
			opened += float64(s.Opened)
		}
		last = s.Seconds
	}
	if opened == 0 {
		return 0
	}
	return busy / opened * 1e6
}

func (r *Report) nodes() []string { return slices.Sorted(maps.Keys(r.Samples[0].Load)) }

// Verdict says what the offload changed.
func (r *Report) Verdict() string {
	return fmt.Sprintf("The offload was started at %.1f s, at %.0f %% of the budget. A connection took %.1f µs of the "+
		"backend's programs before, %.1f µs while it was active, and %.1f µs at %s together.", r.Started,
		100*r.Threshold, r.perConnection(backendNode, false), r.perConnection(backendNode, true), r.atFrontends(),
		humanize.Of(r.Frontends, "frontend", "frontends"))
}

func (r *Report) atFrontends() (sum float64) {
	for i := range r.Frontends {
		sum += r.perConnection(frontendNode(i), true)
	}
	return sum
}

func (r *Report) how() string {
	return fmt.Sprintf("Clients open connections at a rate that grows from 0 to %s a second, under %s in each "+
		"direction. Load is the run time of programs in %% of a budget of %.4f CPUs, which is chosen so that %.0f %% "+
		"are reached in the middle.", report.Figure(r.Rate), humanize.Of(r.CIDRs, "CIDR", "CIDRs"), r.Budget,
		100*r.Threshold)
}

// samples has one line for each sample.
func (r *Report) samples() *plot.Table {
	t := &plot.Table{Head: []string{"s", "connections", "failed", "offload"}}
	for _, n := range r.nodes() {
		t.Head = append(t.Head, n+", %")
	}
	for _, s := range r.Samples {
		phase := s.Phase
		if phase == "" {
			phase = "none"
		}
		row := []string{fmt.Sprintf("%.1f", s.Seconds), fmt.Sprint(s.Opened), fmt.Sprint(s.Failed), phase}
		for _, n := range r.nodes() {
			row = append(row, fmt.Sprintf("%.0f", 100*s.Load[n]/r.Budget))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// plot draws the load of the backend and its frontends, the threshold, and the start.
func (r *Report) plot() plot.Plot {
	p := plot.Plot{Title: "load over time", X: "s", Y: "% of the budget"}
	names := []string{backendNode}
	for i := range r.Frontends {
		names = append(names, frontendNode(i))
	}
	for _, n := range names {
		l := plot.Line{Name: n}
		for _, s := range r.Samples {
			l.Points = append(l.Points, [2]float64{s.Seconds, 100 * s.Load[n] / r.Budget})
		}
		p.Lines = append(p.Lines, l)
	}
	last := r.Samples[len(r.Samples)-1].Seconds
	p.Lines = append(p.Lines,
		plot.Line{Name: "threshold", Points: [][2]float64{{0, 100 * r.Threshold}, {last, 100 * r.Threshold}}},
		plot.Line{Name: "offload started", Apart: true, Points: [][2]float64{{r.Started, 100 * r.Threshold}}})
	return p
}

// Table writes the results for a terminal; columns are separated by tabs.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(w, "%s; Linux %s\n%s\n\n", r.Nature, r.Machine.Kernel, r.how())
	r.samples().Text(w, "  ")
	fmt.Fprintf(w, "\n%s\n", r.Verdict())
}

// Page writes the report as one HTML file.
func (r *Report) Page(w io.Writer) error {
	return r.WritePage(w, plot.Page{
		Title: "load over time", Heading: "Load of a backend and its frontends over time",
		Notes: []plot.Note{{Class: "what", Text: r.how()}, {Text: r.Verdict()}},
		Sections: []plot.Section{{
			Title: "load over time", Lines: []*plot.Lines{plot.NewLines("", r.plot())}, Table: r.samples(),
		}},
	}, "docs/results/offload.md explains them.")
}
