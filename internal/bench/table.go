package bench

import (
	"fmt"
	"io"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/plot"
)

// Table writes the results for a terminal; columns are separated by tabs.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(w, "%s\n\n", r.Settings.text(r.Machine))
	fmt.Fprintf(w, "metric\tscenario\tmedian\tof %s\t95 %%\tCPU time\n", r.Reference)
	for _, metric := range r.metrics() {
		for _, x := range r.of(metric) {
			fmt.Fprintf(w, "%s\t%s\t%s %s\t%s\t%s\n",
				x.Metric, x.Scenario, report.Figure(x.Median), x.Unit, x.ratio(r.Reference), x.cpu())
		}
	}
	fmt.Fprintf(w, "\n"+ratioLegend+"\n", r.Reference)
	if len(r.Beside) > 0 {
		fmt.Fprintln(w)
		besideTable(r.Beside).Text(w, "")
	}
	if len(r.Lookups) > 0 {
		fmt.Fprint(w, "\npackets that need a rule lookup, the program alone\n")
		r.lookupsTable().Text(w, "")
	}
	if len(r.Profiles) > 0 {
		fmt.Fprintln(w)
		r.profileTable().Text(w, "")
	}
	for _, p := range r.Profiles {
		if p.Work != nil {
			fmt.Fprintf(w, "\n%s: %s\n", p.Scenario, p.Work)
		}
	}
	if len(r.Programs) > 0 {
		fmt.Fprintf(
			w,
			"\nprogram\tscenario\tns a packet\t\t95 %%\t(above the %.0f of the clock)\n",
			r.EmptyProgramNs,
		)
		for _, p := range r.Programs {
			fmt.Fprintf(w, "%s\t%s\t%.0f\t\t%.0f–%.0f\t\n", p.Name, p.Scenario, p.Ns.Median, p.Ns.Low, p.Ns.High)
		}
	}
	if len(r.Checks) == 0 {
		fmt.Fprint(w, "\nno gate applies to these scenarios and metrics\n")
	} else {
		fmt.Fprintln(w)
		r.checkTable().Text(w, "")
		fmt.Fprintf(w, "\n%s\n", gateLegend)
	}
	for _, line := range r.unjudged() {
		fmt.Fprintf(w, "\nnot checked: %s", line)
	}
	if len(r.NotJudged) > 0 {
		fmt.Fprintln(w)
	}
	for _, why := range r.LeftOut {
		fmt.Fprintf(w, "\nleft out: %s\n", why)
	}
	if r.Lost > 0 {
		fmt.Fprintf(w, "\n%d datagrams were lost\n", r.Lost)
	}
}

// checkTable has one line for each gate.
func (r *Report) checkTable() *plot.Table {
	t := &plot.Table{Head: []string{"gate on", "beside", "metric", "is", "95 %", "verdict"}}
	for i, c := range r.Checks {
		t.Rows = append(t.Rows, []string{
			c.of(), c.beside(), c.what(), report.Precise(c.Got.Median), c.Got.String(), c.verdict(),
		})
		if c.Verdict != Passed && c.Verdict != TooNoisy {
			t.Bad = append(t.Bad, i)
		}
	}
	return t
}

// text describes how the run was made.
func (s Settings) text(m report.Machine) string {
	where := fmt.Sprintf("client and server on CPU %d", s.CPU)
	if s.CPU < 0 {
		where = "client and server on any CPU"
	}
	return fmt.Sprintf("%d rounds of %d ms in random order, %s, %s, Linux %s; a software datapath between namespaces",
		s.Rounds, s.WindowMs, where, s.Congestion, m.Kernel)
}

// ratio fills two columns.
func (x Result) ratio(reference string) string {
	switch {
	case x.Ratio == nil:
		return "\t"
	case x.Scenario == reference:
		return "1\t"
	}
	return fmt.Sprintf("%.3f\t%v", x.Ratio.Median, x.Ratio)
}

func (x Result) cpu() string {
	if x.Counted == "" {
		return ""
	}
	return fmt.Sprintf("%.2f µs/%s", x.CPUMicros, x.Counted)
}

func (c Check) of() string {
	if c.Best {
		return c.Scenario + " (best device)"
	}
	return c.Scenario
}

func (c Check) beside() string {
	if c.Against == "" {
		return "–"
	}
	return c.Against
}

func (c Check) verdict() string {
	switch c.Verdict {
	case TooNoisy:
		return "too noisy to tell, failed: " + c.wants()
	default:
		return string(c.Verdict) + ": " + c.wants()
	}
}
