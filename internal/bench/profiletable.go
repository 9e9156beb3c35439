package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// profileTable writes places by scenario.
func (r *Report) profileTable(w io.Writer) {
	if len(r.Profiles) == 0 {
		return
	}
	fmt.Fprintf(w, "\nns of a UDP_RR transaction\t%s\n", strings.Join(r.profileHead(), "\t"))
	for _, row := range r.profileRows() {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	for _, p := range r.Profiles {
		if p.Work != nil {
			fmt.Fprintf(w, "\n%s: %s\n", p.Scenario, p.Work)
		}
	}
}

func (r *Report) profileHead() (names []string) {
	for _, p := range r.Profiles {
		names = append(names, p.Scenario)
	}
	return names
}

// profileRows have a place and its time in each scenario; the first is the whole.
func (r *Report) profileRows() (rows [][]string) {
	all := []string{"all of it"}
	for _, p := range r.Profiles {
		all = append(all, nanos(p.Total))
	}
	rows = append(rows, all)
	for i, name := range placeNames() {
		row := []string{name}
		for _, p := range r.Profiles {
			row = append(row, nanos(p.Places[i].Ns))
		}
		rows = append(rows, row)
	}
	return rows
}

func nanos(i Interval) string {
	if i.High == 0 {
		return "–"
	}
	return fmt.Sprintf("%s (%s–%s)", whole(i.Median), whole(i.Low), whole(i.High))
}

func (w *WorkEach) String() string {
	return fmt.Sprintf(
		"Open vSwitch sent each packet %.2f times through its caches; %.1f %% of the passes were decided by a cached flow, %.1f %% by a cache of headers, %.3f %% by the tables (upcalls); it has no PMD threads, for its ports are no DPDK's: its main thread polls them",
		w.Passes,
		100*w.Megaflow/w.Passes,
		100*w.Exact/w.Passes,
		100*w.Upcalls/w.Passes,
	)
}

// profileSections tell of each of theirs where its time beyond netpila's goes.
func (r *Report) profileSections() (all []plot.Section) {
	at := slices.IndexFunc(r.Profiles, func(p Profile) bool { return p.Scenario == "netpila" })
	for _, p := range r.Profiles {
		s := plot.Section{
			Title: "where the time of " + p.Scenario + " goes",
			Head:  []string{"function", "place", "ns", "beyond netpila"},
		}
		s.About = "By samples of the CPU, in ns of a UDP_RR transaction."
		if p.Work != nil {
			s.About += " " + p.Work.String() + "."
		}
		var bars []plot.Bar
		for i, spent := range p.Places {
			name := spent.Place
			b := plot.Bar{
				Name:   name,
				Class:  class(p.Scenario),
				Figure: whole(spent.Ns.Median) + " ns",
				At:     plot.Span(spent.Ns),
			}
			if at >= 0 && p.Scenario != "netpila" {
				b.Figure += fmt.Sprintf(" (netpila %s)", whole(r.Profiles[at].Places[i].Ns.Median))
			}
			bars = append(bars, b)
		}
		s.Bars = plot.NewBars(s.Title, "ns", besideNames, false, bars)
		for _, f := range p.Most {
			more := ""
			if f.More != 0 {
				more = whole(f.More)
			}
			s.Rows = append(s.Rows, []string{f.Name, f.Place, whole(f.Ns), more})
		}
		all = append(all, s)
	}
	return all
}

// whole is a number without a fraction.
func whole(v float64) string { return humanize.Grouped(int(math.Round(max(v, 0)))) }
