package nic

import (
	"embed"
	"io"

	"pilaster.io/pilaster/internal/plot"
)

//go:embed page.html
var pages embed.FS

var page = plot.Pages(pages).Lookup("page.html")

// Page writes the report as one HTML file that needs no other.
func (r *Report) Page(w io.Writer) error {
	type section struct {
		Figure
		Charts []*plot.Lines
	}
	var sections []section
	for _, f := range r.Figures {
		s := section{Figure: f}
		for _, p := range f.Plots {
			s.Charts = append(s.Charts, plot.NewLines("Model, no measurement:", p))
		}
		sections = append(sections, s)
	}
	return page.Execute(w, struct {
		*Report
		Sections []section
	}{r, sections})
}
