package networks

import (
	"fmt"
	"path"
	"strings"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/plot"
)

// Fill replaces the tables of a Markdown file, between its marks, by those of the report. It does nothing without a
// file.
func (r *Report) Fill(file string) error { return report.FillPage(file, "networks", r.markdown()) }

// markdown returns all tables, with links to tests for a file in docs.
func (r *Report) markdown() string {
	var b strings.Builder
	measured := fmt.Sprintf("Measured on %s: %s.", r.Started.Format("2006-01-02"), r.how())
	fmt.Fprintf(&b, "\n%s\n", report.Wrapped(measured))
	for _, part := range []struct {
		title, legend string
		table         *plot.Table
	}{
		{"Speed", speedLegend, r.SpeedTable()},
		{"Two real nodes", costLegend, r.CostTable()},
		{"Large clusters, simulated", clusterLegend, r.ClusterTable()},
		{"What is isolated and hidden", "Properties by design, with the tests that show them.", r.DesignTable(linked)},
	} {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", part.title, report.Wrapped(part.legend))
		report.WriteMarkdown(&b, part.table)
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
