package networks

import (
	"fmt"
	"os"
	"path"
	"strings"

	"pilaster.io/pilaster/internal/plot"
)

// Marks around the tables of a Markdown file.
const (
	tablesBegin = "<!-- tables of pilaster bench networks: begin -->"
	tablesEnd   = "<!-- tables of pilaster bench networks: end -->"
)

// Fill replaces the tables of a Markdown file, between its marks, by those of the report. It does nothing without a
// file.
func (r *Report) Fill(file string) error {
	if file == "" {
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("--page: %w", err)
	}
	filled, err := r.fill(string(text))
	if err != nil {
		return fmt.Errorf("--page %s: %w; the file was not changed", file, err)
	}
	return os.WriteFile(file, []byte(filled), 0o644)
}

func (r *Report) fill(text string) (string, error) {
	before, rest, found := strings.Cut(text, tablesBegin+"\n")
	_, after, ends := strings.Cut(rest, tablesEnd)
	if !found || !ends {
		return "", fmt.Errorf("it has no lines %q and %q", tablesBegin, tablesEnd)
	}
	return before + tablesBegin + "\n" + r.markdown() + tablesEnd + after, nil
}

// markdown returns all tables, with links to tests for a file in docs.
func (r *Report) markdown() string {
	var b strings.Builder
	measured := fmt.Sprintf("Measured on %s: %s.", r.Started.Format("2006-01-02"), r.how())
	fmt.Fprintf(&b, "\n%s\n", wrapped(measured))
	for _, part := range []struct {
		title, legend string
		table         *plot.Table
	}{
		{"Speed", speedLegend, r.SpeedTable()},
		{"Two real nodes", costLegend, r.CostTable()},
		{"Large clusters, simulated", clusterLegend, r.ClusterTable()},
		{"What is isolated and hidden", "Properties by design, with the tests that show them.", r.DesignTable(linked)},
	} {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", part.title, wrapped(part.legend))
		writeTable(&b, part.table)
	}
	for _, m := range r.Missing {
		fmt.Fprintf(&b, "\nLeft out: %s: %s.\n", m.Network, m.Reason)
	}
	return b.String() + "\n"
}

// linked is a property with links to its tests.
func linked(p Property) string {
	text := p.Text
	for i, test := range p.Tests {
		file, name, _ := strings.Cut(test, "#")
		separator := ", "
		if i == 0 {
			separator = " ("
		}
		text += fmt.Sprintf("%s[%s](%s)", separator, strings.TrimPrefix(name, "Test"), path.Join("..", file))
	}
	if len(p.Tests) > 0 {
		text += ")"
	}
	return text
}

func writeTable(b *strings.Builder, t *plot.Table) {
	row := func(cells []string) { fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | ")) }
	b.WriteByte('\n')
	row(t.Head)
	row(strings.Split(strings.Repeat("---,", len(t.Head)-1)+"---", ","))
	for _, cells := range t.Rows {
		row(cells)
	}
}

// pageWidth is the width of lines in a page.
const pageWidth = 118

// wrapped breaks a text into lines.
func wrapped(text string) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > pageWidth {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	return strings.Join(append(lines, line), "\n")
}
