package bench

import (
	"fmt"
	"slices"

	"pilaster.io/pilaster/internal/bench/cpuprofile"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/plot"
)

// profileTable has one line for each place with its time in each scenario; the first line is the total.
func (r *Report) profileTable() *plot.Table {
	t := &plot.Table{Head: []string{"ns of a UDP_RR transaction"}}
	total := []string{"total"}
	for _, p := range r.Profiles {
		t.Head = append(t.Head, p.Scenario)
		total = append(total, report.Nanos(p.Total))
	}
	t.Rows = append(t.Rows, total)
	for i, name := range cpuprofile.PlaceNames() {
		row := []string{name}
		for _, p := range r.Profiles {
			row = append(row, report.Nanos(p.Places[i].Ns))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func (w *WorkEach) String() string {
	part := func(passes float64) float64 { return 100 * passes / w.Passes }
	return fmt.Sprintf(
		"Open vSwitch sent each packet %.2f times through its caches; %.1f %% of the passes were decided by a "+
			"cached flow, %.1f %% by a cache of headers, %.3f %% by the tables (upcalls); it has no PMD threads, "+
			"because its "+
			"ports are not DPDK's: its main thread polls them",
		w.Passes,
		part(w.Megaflow),
		part(w.Exact),
		part(w.Upcalls),
	)
}

// profileSections show the time of each scenario by place, and its excess over netpila.
func (r *Report) profileSections() (all []plot.Section) {
	at := slices.IndexFunc(r.Profiles, func(p Profile) bool { return p.Scenario == "netpila" })
	for _, p := range r.Profiles {
		s := plot.Section{
			Title: "time of " + p.Scenario + " by place",
			Table: &plot.Table{Head: []string{"function", "place", "ns", "above netpila"}},
		}
		about := "By samples of the CPU, in ns of a UDP_RR transaction."
		if p.Work != nil {
			about += " " + p.Work.String() + "."
		}
		s.Notes = []plot.Note{{Text: about}}
		var bars []plot.Bar
		for i, spent := range p.Places {
			b := plot.Bar{
				Name: spent.Place, Class: class(p.Scenario), Figure: report.Whole(spent.Ns.Median) + " ns",
				At: plot.Span(spent.Ns),
			}
			if at >= 0 && p.Scenario != "netpila" {
				b.Figure += fmt.Sprintf(" (netpila %s)", report.Whole(r.Profiles[at].Places[i].Ns.Median))
			}
			bars = append(bars, b)
		}
		s.Bars = plot.NewBars(s.Title, "ns", report.NameWidth, false, bars)
		for _, f := range p.Most {
			more := ""
			if f.More != 0 {
				more = report.Whole(f.More)
			}
			s.Table.Rows = append(s.Table.Rows, []string{f.Name, f.Place, report.Whole(f.Ns), more})
		}
		all = append(all, s)
	}
	return all
}
