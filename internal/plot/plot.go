// Package plot writes reports as HTML pages that need no other file: bars with intervals and lines as SVG, tables and
// notes. All pages have the same style. The package does not depend on the meaning of the values.
package plot

import (
	"embed"
	"html/template"
)

//go:embed *.html
var files embed.FS

var templates = template.Must(template.ParseFS(files, "*.html"))

// Span is a median with its interval.
type Span struct{ Median, Low, High float64 }
