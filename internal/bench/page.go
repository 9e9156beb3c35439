package bench

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/plot"
)

const (
	inThePapers = "In the papers:"
	here        = "Here: a software datapath between namespaces."
)

// Page writes the report as one HTML file.
func (r *Report) Page(w io.Writer) error {
	sections := []plot.Section{r.checkSection()}
	for _, name := range r.metrics() {
		m, _ := traffic.MetricByName(name)
		sections = append(sections, r.metricSection(m))
	}
	sections = slices.Concat(
		sections, r.besideSections(), r.lookupsSections(), r.profileSections(), r.programSections())
	var foot []plot.Note
	for _, line := range r.unjudged() {
		foot = append(foot, plot.Note{Text: "not checked: " + line})
	}
	for _, why := range r.LeftOut {
		foot = append(foot, plot.Note{Text: "left out: " + why})
	}
	if r.Lost > 0 {
		foot = append(foot, plot.Note{Text: fmt.Sprintf("%d datagrams were lost.", r.Lost)})
	}
	title := "packet paths measured"
	if r.isOfPolicy() {
		title = "policy rules measured"
	}
	return r.WritePage(w, plot.Page{
		Title:   title,
		Heading: strings.ToUpper(title[:1]) + title[1:],
		Notes: []plot.Note{
			{Lead: "Result:", Text: r.conclusion()},
			{Class: "what", Lead: "A software datapath between network namespaces of one machine.",
				Text: "There is no wire and no NIC. Ratios within this run are comparable; its figures are not " +
					"comparable with " +
					"those of another machine, nor with those of the papers, which measured servers on a wire."},
			{Text: r.Settings.text(r.Machine) + ". " + report.BarNote},
			{Text: fmt.Sprintf(ratioLegend, r.Reference)},
		},
		Sections: sections, Foot: foot,
	}, "docs/reference/benchmarks.md explains scenarios, metrics and method.", "form "+r.Settings.Form)
}

const ratioLegend = `In the tables, "of %s" is the ratio of the scenario's figure to that of this reference, and ` +
	`"95 %%" is the interval that holds 95 %% of resampled medians.`

const gateLegend = `"beside" is the scenario whose figure of the same round is the divisor; "is" is the median ` +
	`ratio, or without a divisor ("–") the figure itself; "95 %" is its interval; "verdict" compares it with the ` +
	`limit. A verdict "too noisy to tell" means that the limit is inside an interval that is too wide.`

// isOfPolicy reports whether the run compared numbers of rules.
func (r *Report) isOfPolicy() bool {
	return slices.ContainsFunc(r.Results,
		func(x Result) bool { return strings.HasPrefix(x.Scenario, "netpila-rules-") })
}

// failures counts the gates that were not reached and those that were too noisy to tell.
func (r *Report) failures() (missed, noisy int) {
	for _, c := range r.Checks {
		switch c.Verdict {
		case Passed:
		case TooNoisy:
			noisy++
		default:
			missed++
		}
	}
	return missed, noisy
}

// conclusion is the result of the run in one line.
func (r *Report) conclusion() string {
	missed, noisy := r.failures()
	all := len(r.Checks)
	var parts []string
	if missed > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d gates not reached", missed, all))
	}
	if noisy > 0 {
		parts = append(parts,
			fmt.Sprintf("%d of %d gates too noisy to tell; repeat the run on an idle machine", noisy, all))
	}
	switch {
	case all == 0 && r.Pass:
		return "no gate applies to this run."
	case len(parts) > 0:
		return strings.Join(parts, ", ") + "."
	case !r.Pass:
		return "not all gates were checked."
	case r.isOfPolicy():
		return fmt.Sprintf("policy rules cost less than the limits allow: all %d gates passed.", all)
	}
	return fmt.Sprintf("all %d gates passed.", all)
}

// checkSection lists all gates.
func (r *Report) checkSection() plot.Section {
	s := plot.Section{ID: "gates", Title: "Gates"}
	t := r.checkTable()
	t.Wrap = true
	missed, noisy := r.failures()
	switch {
	case len(r.Checks) == 0:
		s.Notes = []plot.Note{{Text: "No gate applies to these scenarios and metrics."}}
		return s
	case r.Pass:
		s.Notes = []plot.Note{{Text: "All gates passed."}}
	case missed > 0 || noisy > 0:
		if missed > 0 {
			s.Notes = append(s.Notes,
				plot.Note{Class: "bad", Text: fmt.Sprintf("%d of %d not reached.", missed, len(r.Checks))})
		}
		if noisy > 0 { // not red: the run does not show that these limits are exceeded
			s.Notes = append(s.Notes, plot.Note{Text: fmt.Sprintf("%d of %d too noisy to tell. The run fails; "+
				"repeat it on an idle machine.", noisy, len(r.Checks))})
		}
	default:
		s.Notes = []plot.Note{{Class: "bad", Text: "Not all gates were checked."}}
	}
	t.Caption = "Each ratio is taken within a round; the gate applies to the median over the rounds, or to the whole " +
		"interval"
	s.Notes = append(s.Notes, plot.Note{Class: "soft", Text: gateLegend})
	s.Table = t
	return s
}

// metricSection lists ratios to the reference if there are any, and otherwise figures.
func (r *Report) metricSection(m traffic.Metric) plot.Section {
	axis, relative := m.Unit, r.find(r.Reference, m.Name) != nil
	if relative {
		axis = "of " + r.Reference
	}
	better := "More is better."
	if m.Less {
		better = "Less is better."
	}
	t := &plot.Table{
		Caption: fmt.Sprintf("%s, medians of %d rounds", m.Name, r.Settings.Rounds),
		Head:    []string{"scenario", "median", "of " + r.Reference, "95 %", "CPU time", "what it is"},
		Wrap:    true,
	}
	var bars []plot.Bar
	for _, x := range r.of(m.Name) {
		b := plot.Bar{
			Name: x.Scenario, Class: class(x.Scenario), Figure: report.Figure(x.Median) + " " + x.Unit,
			At: plot.Span(x.Spread),
		}
		if relative {
			b.At = plot.Span(*x.Ratio)
		}
		ratio, interval := "", ""
		if x.Ratio != nil {
			ratio, interval = report.Precise(x.Ratio.Median), x.Ratio.String()
		}
		bars = append(bars, b)
		t.Rows = append(t.Rows, []string{x.Scenario, b.Figure, ratio, interval, x.cpu(), x.About})
	}
	return plot.Section{
		ID: m.Name, Title: m.Name,
		Notes: []plot.Note{
			{Text: m.About + ". " + better},
			{Class: "paper", Lead: inThePapers, Text: m.Figure + ". " + here},
		},
		Bars:  plot.NewBars(m.Name+" by scenario", axis, 150, relative, bars),
		Table: t,
	}
}

// programSections returns one section, or none if no program of ours was measured.
func (r *Report) programSections() []plot.Section {
	if len(r.Programs) == 0 {
		return nil
	}
	t := &plot.Table{Caption: "ns a run, under UDP_RR", Head: []string{"program", "scenario", "median", "95 %"}}
	for _, p := range r.Programs {
		t.Rows = append(t.Rows, []string{p.Name, p.Scenario, fmt.Sprintf("%.0f", p.Ns.Median), p.Ns.String()})
	}
	return []plot.Section{{
		ID: "programs", Title: "Each of our programs", Table: t,
		Notes: []plot.Note{{Class: "paper", Lead: inThePapers,
			Text: "ONCache's table of the CPU time of each part of the path; NETPILA §6.2. Here: the kernel's BPF " +
				"statistics, " +
				fmt.Sprintf(
					"above the %.0f ns of an empty program, which are the cost of the clock.",
					r.EmptyProgramNs,
				)}},
	}}
}

// class returns the colour of a scenario, derived from its name.
func class(scenario string) string {
	switch {
	case strings.HasPrefix(scenario, "netpila"):
		return "ours"
	case strings.HasPrefix(scenario, "bound"):
		return "bound"
	}
	return "theirs"
}
