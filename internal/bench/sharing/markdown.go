package sharing

import (
	"fmt"
	"strings"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/plot"
)

// Fill replaces the tables of a Markdown file, between its marks, by those of the report. It does nothing without a
// file.
func (r *Report) Fill(file string) error { return report.FillPage(file, "offload", r.markdown()) }

// markdown returns the tables.
func (r *Report) markdown() string {
	var b strings.Builder
	write := func(title, about string, t *plot.Table) {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", title, report.Wrapped(about))
		report.WriteMarkdown(&b, t)
	}
	fmt.Fprintf(&b, "\n%s\n", report.Wrapped(fmt.Sprintf("Measured on %s, Linux %s, %d CPUs: %s. %s",
		r.Started.Format("2006-01-02"), r.Machine.Kernel, r.Machine.CPUs, r.how(), r.overhead())))
	fmt.Fprintf(&b, "\n%s\n", report.Wrapped("**"+r.Verdict()+"**"))
	write("Gain by rule set", "Medians with 95 % intervals. "+aboutGains, r.gains())
	write("Gain by lookup time", aboutCurve+" Nezha has 3.3 with four frontends, where a lookup takes more than 10 µs.",
		r.curve())
	programs := r.programs()
	write("Time of each program", "Medians with 95 % intervals. Those of the sender are in the report.",
		&plot.Table{Head: programs.Head, Rows: ofReceivers(programs.Rows)})
	write("Answers of a frontend", aboutAnswers, r.answers())
	write("Rules that fit: figures",
		fmt.Sprintf("%s A session takes %.0f bytes, at the backend.", aboutMemory, r.SessionBytes), r.memories())
	return b.String() + "\n"
}

// ofReceivers returns the lines of programs without those of the sender.
func ofReceivers(rows [][]string) (all [][]string) {
	for _, row := range rows {
		if row[2] != nodeNames[sender] {
			all = append(all, row)
		}
	}
	return all
}
