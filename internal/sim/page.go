package sim

import (
	"fmt"
	"io"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// Page writes the course of each event as one HTML file.
func (r *Result) Page(w io.Writer, now time.Time) error {
	page := plot.Page{
		Title:   "simulation " + r.Scenario.Name,
		Heading: "Simulation " + r.Scenario.Name,
		Facts: []string{
			now.Format(time.RFC3339), "network " + r.Scenario.Network, fmt.Sprint("seed ", r.Scenario.Seed),
			fmt.Sprint(r.CPUs, " CPUs"),
		},
		Notes: []plot.Note{{Class: "what", Lead: "A simulation in one process.", Text: fmt.Sprintf(
			"Real: %s. Not real: %s.", strings.Join(r.Real, "; "), strings.Join(r.NotReal, "; "))}},
		Foot: []plot.Note{{Class: "soft", Text: "pilaster sim run -o json prints all figures. " +
			"docs/reference/simulation.md explains them."}},
	}
	bad := func(text string) { page.Notes = append(page.Notes, plot.Note{Class: "bad", Text: text}) }
	if r.Error != "" {
		bad(r.Error + "; the figures below cover only the part that was done")
	}
	for _, v := range r.Violations {
		bad("violated: " + v)
	}
	for _, v := range r.Exceeded {
		bad("exceeded: " + v)
	}
	for _, s := range r.Stages {
		page.Sections = append(page.Sections, s.section())
	}
	return page.Write(w)
}

func (s Stage) section() plot.Section {
	line := func(name string, value func(Sample) float64) plot.Line {
		l := plot.Line{Name: name}
		for _, at := range s.Samples {
			l.Points = append(l.Points, [2]float64{at.At, value(at)})
		}
		return l
	}
	rate := func(name string, count func(Sample) int64) plot.Line {
		l := plot.Line{Name: name}
		for i, at := range s.Samples[1:] {
			before := s.Samples[i]
			perSecond := float64(count(at)-count(before)) / max(at.At-before.At, 0.001)
			l.Points = append(l.Points, [2]float64{at.At, perSecond})
		}
		return l
	}
	over := func(title, y string, lines ...plot.Line) *plot.Lines {
		return plot.NewLines("", plot.Plot{Title: title, X: "seconds", Y: y, Lines: lines})
	}
	about := fmt.Sprintf(
		"%s afterwards. The event was done after %.1f s; all nodes followed the orchestrator after %.1f s.",
		humanize.Of(s.Nodes, "node", "nodes"), s.Acted, s.Ready,
	)
	if s.Unfinished {
		about = fmt.Sprintf("%s by then. The run ended during the event, after %.1f s.",
			humanize.Of(s.Nodes, "node", "nodes"), s.Ready)
	}
	var lines []*plot.Lines
	if p := s.changes(); p != nil && p.Changes > 0 {
		about += p.about()
		lines = append(lines, p.lines())
	}
	lines = append(lines,
		over("nodes that follow the orchestrator", "streams",
			line("streams", func(s Sample) float64 { return float64(s.Streams) })),
		over("calls of nodes", "a second",
			rate("calls", func(s Sample) int64 { return s.Calls }),
			rate("calls while no orchestrator ran", func(s Sample) int64 { return s.Missed }),
			rate("registrations answered", func(s Sample) int64 { return s.Registered }),
			rate("snapshots", func(s Sample) int64 { return s.Snapshots })),
		over("changes in the store's queue", "changes",
			line("waiting", func(s Sample) float64 { return float64(s.Waiting) })),
		over("memory", "MiB", line("heap, with garbage", func(s Sample) float64 { return float64(s.Heap >> 20) })))
	return plot.Section{
		Title: s.title(), Notes: []plot.Note{{Text: about}}, Lines: lines,
		Table: &plot.Table{
			Head: []string{"messages", "bytes", "snapshots", "processor seconds", "resident"},
			Rows: [][]string{{
				humanize.Grouped(int(s.Total.Messages)), humanize.Grouped(int(s.Total.Bytes)),
				humanize.Grouped(int(s.Counts[snapshots].Messages)),
				fmt.Sprintf("%.1f", s.CPU), fmt.Sprintf("%d MiB", s.Resident>>20),
			}},
		},
	}
}
