// Package plot draws what reports show: bars with intervals and lines, as SVG in HTML pages that need no other file. It
// has the one style of all pages, and knows nothing of what is drawn.
package plot

import (
	"embed"
	"html/template"
	"io/fs"
)

//go:embed plot.html
var own embed.FS

// Pages are a package's, which may use "head", "foot", "bars", "lines" and "sections".
func Pages(of fs.FS) *template.Template {
	return template.Must(template.Must(template.ParseFS(own, "*.html")).ParseFS(of, "*.html"))
}

// Section is drawings, and a table of what they show.
type Section struct {
	Title, About string
	Bars         *Bars
	Lines        []*Lines
	Head         []string
	Rows         [][]string
}

// Span is a median with its interval.
type Span struct{ Median, Low, High float64 }
