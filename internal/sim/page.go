package sim

import (
	"embed"
	"fmt"
	"io"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

//go:embed page.html
var pageFiles embed.FS

var page = plot.Pages(pageFiles).Lookup("page.html")

// Page writes how the events went as one HTML file that needs no other.
func (r *Result) Page(w io.Writer, now time.Time) error {
	var sections []plot.Section
	for _, s := range r.Stages {
		sections = append(sections, s.section())
	}
	return page.ExecuteTemplate(w, "page.html", struct {
		*Result
		When, Is, IsNot string
		Sections        []plot.Section
	}{r, now.Format(time.RFC3339), strings.Join(r.Real, "; "), strings.Join(r.NotReal, "; "), sections})
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
			l.Points = append(
				l.Points,
				[2]float64{at.At, float64(count(at)-count(before)) / max(at.At-before.At, 0.001)},
			)
		}
		return l
	}
	over := func(title, y string, lines ...plot.Line) *plot.Lines {
		return plot.NewLines("", plot.Plot{Title: title, X: "seconds", Y: y, Lines: lines})
	}
	about := fmt.Sprintf(
		"%s afterwards. Everything was done after %.1f s, and every node followed after %.1f s.",
		humanize.Of(s.Nodes, "node", "nodes"),
		s.Acted,
		s.Ready,
	)
	if s.Unfinished {
		about = fmt.Sprintf(
			"%s by then. The run ended during it, after %.1f s.",
			humanize.Of(s.Nodes, "node", "nodes"),
			s.Ready,
		)
	}
	var lines []*plot.Lines
	if p := s.Policies; p != nil && p.Changes > 0 {
		about += fmt.Sprintf(
			" A policy was changed %d times: %d nodes that host its tenant were told %d to %d messages each, and the %d others %d together.",
			p.Changes,
			p.Hosts,
			p.Least,
			p.Most,
			p.Others,
			p.Astray,
		)
		lines = append(lines, p.drawn())
	}
	return plot.Section{
		Title: s.title(),
		About: about,
		Lines: append(
			lines,
			over(
				"nodes that follow the orchestrator",
				"streams",
				line("streams", func(s Sample) float64 { return float64(s.Streams) }),
			),
			over("what nodes ask", "a second",
				rate("calls", func(s Sample) int64 { return s.Calls }),
				rate("of them, nobody was there", func(s Sample) int64 { return s.Missed }),
				rate("registrations answered", func(s Sample) int64 { return s.Registered }),
				rate("snapshots", func(s Sample) int64 { return s.Snapshots })),
			over(
				"changes that wait for the store",
				"changes",
				line("waiting", func(s Sample) float64 { return float64(s.Waiting) }),
			),
			over("memory", "MiB", line("heap, with garbage", func(s Sample) float64 { return float64(s.Heap >> 20) })),
		),
		Head: []string{"messages", "bytes", "snapshots", "processor seconds", "resident"},
		Rows: [][]string{{
			humanize.Grouped(
				int(s.Total.Messages),
			), humanize.Grouped(int(s.Total.Bytes)), humanize.Grouped(int(s.Counts[snapshots].Messages)),
			fmt.Sprintf("%.1f", s.CPU), fmt.Sprintf("%d MiB", s.Resident>>20),
		}},
	}
}
