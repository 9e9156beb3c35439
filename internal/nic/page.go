package nic

import (
	"fmt"
	"io"

	"pilaster.io/pilaster/internal/plot"
)

// Page writes the report as one HTML file.
func (r *Report) Page(w io.Writer) error {
	const title = "a model of NIMITZ's offloading"
	page := plot.Page{
		Title:   title,
		Heading: "A model of NIMITZ's offloading",
		Notes: []plot.Note{
			{Class: "what", Lead: r.Nature},
			{Class: "soft", Text: fmt.Sprintf(
				"Seed %d; the same seed gives the same figures. The paper is NIMITZ §3.3 and §4.2.", r.Seed)},
		},
		Foot: []plot.Note{{Class: "soft", Text: "All points are in report.json beside this file. " +
			"docs/results/nic.md explains the model."}},
	}
	for _, f := range r.Figures {
		page.Sections = append(page.Sections, f.section())
	}
	t := &plot.Table{Head: []string{"parameter", "value", "origin", "why"}, Wrap: true}
	for _, p := range r.Parameters {
		t.Rows = append(t.Rows, []string{p.Name, p.Value, p.Origin, p.Why})
	}
	page.Sections = append(page.Sections, plot.Section{ID: "parameters", Title: "Assumptions of the model", Table: t})
	return page.Write(w)
}

func (f Figure) section() plot.Section {
	t := &plot.Table{
		Caption: fmt.Sprintf("Model, figure %d. Given: by the paper. Fitted: to its figure. "+
			"Follows: from given, fitted and assumed values", f.Number),
		Head: []string{"what", "model", "paper", "kind"},
	}
	for _, x := range f.Findings {
		t.Rows = append(t.Rows, []string{x.What, x.Text(), x.Paper, x.Kind})
	}
	s := plot.Section{
		ID: fmt.Sprintf("f%d", f.Number), Title: fmt.Sprintf("Figure %d by the model: %s", f.Number, f.Title),
		Notes: []plot.Note{{Text: f.About}}, Table: t,
	}
	for _, p := range f.Plots {
		s.Lines = append(s.Lines, plot.NewLines("Model, not a measurement:", p))
	}
	return s
}
