package plot

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// Page is a report as one HTML file.
type Page struct {
	Title    string // of the window
	Heading  string
	Facts    []string // one line: when, for how long and where the report was made
	Notes    []Note
	Contents []Link
	Sections []Section
	Foot     []Note
}

// Note is a paragraph.
type Note struct {
	Lead string // in bold letters before the text
	Text string
	// the style: soft, what (for text about what the page shows), paper (for text about what the papers show) or bad
	// (for a failure); empty for plain text
	Class string
}

// Link is a line of the contents: the ID of a section, its title, and its failure if it has one.
type Link struct{ To, Text, Bad string }

// Section has charts, and a table of the same values.
type Section struct {
	ID    string // for links; "" for none
	Title string
	Notes []Note
	Bars  *Bars
	Lines []*Lines
	Table *Table // nil for none
	After []Note // below the table
}

// Table is a table. Each row has as many cells as Head.
type Table struct {
	Caption string
	Head    []string
	Rows    [][]string
	Bad     []int // indexes of the rows whose last cell reports a failure
	Wrap    bool  // the last column has sentences
}

// Write writes the page.
func (p Page) Write(w io.Writer) error { return templates.ExecuteTemplate(w, "page", p) }

// Class is the style of a cell.
func (t *Table) Class(row, column int) string {
	switch last := column == len(t.Head)-1; {
	case last && t.Wrap && slices.Contains(t.Bad, row):
		return "bad wrap"
	case last && slices.Contains(t.Bad, row):
		return "bad"
	case last && t.Wrap:
		return "about"
	}
	return ""
}

// Text writes the table for a terminal. Columns are separated by tabs, and each line begins with indent.
func (t *Table) Text(w io.Writer, indent string) {
	for _, row := range append([][]string{t.Head}, t.Rows...) {
		fmt.Fprintf(w, "%s%s\n", indent, strings.Join(row, "\t"))
	}
}
