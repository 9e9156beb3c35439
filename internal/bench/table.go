package bench

import (
	"fmt"
	"io"
)

// Table writes the results for a person; columns are separated by tabs.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(w, "%s\n\n", r.Settings.text(r.Machine))
	fmt.Fprintf(w, "metric\tscenario\tmedian\tof %s\t95 %%\tCPU time\n", r.Reference)
	for _, metric := range r.metrics() {
		for _, x := range r.of(metric) {
			fmt.Fprintf(
				w,
				"%s\t%s\t%s %s\t%s\t%s\n",
				x.Metric,
				x.Scenario,
				figure(x.Median),
				x.Unit,
				x.ratio(r.Reference),
				x.cpu(),
			)
		}
	}
	r.besideTable(w)
	r.lookupsTable(w)
	r.profileTable(w)
	if len(r.Programs) > 0 {
		fmt.Fprintf(
			w,
			"\nprogram\tscenario\tns a packet\t\t95 %%\t(beyond the %.0f that are the clock)\n",
			r.EmptyProgramNs,
		)
		for _, p := range r.Programs {
			fmt.Fprintf(w, "%s\t%s\t%.0f\t\t%.0f–%.0f\t\n", p.Name, p.Scenario, p.Ns.Median, p.Ns.Low, p.Ns.High)
		}
	}
	if len(r.Checks) == 0 {
		fmt.Fprint(w, "\nnothing is asked of these scenarios and metrics\n")
	} else {
		fmt.Fprint(w, "\nasked of\tbeside\tmetric\tis\t95 %\tverdict\n")
		for _, c := range r.Checks {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", c.of(), c.beside(), c.Metric, precise(c.Got.Median), c.Got, c.verdict())
		}
	}
	for _, line := range r.unjudged() {
		fmt.Fprintf(w, "\nnot judged: %s", line)
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

// text is how the run was made.
func (s Settings) text(m Machine) string {
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

func (i Interval) String() string { return precise(i.Low) + "–" + precise(i.High) }

// precise is a ratio, or a figure that is judged by itself.
func precise(v float64) string {
	if v < 10 {
		return fmt.Sprintf("%.3f", v)
	}
	return fmt.Sprintf("%.1f", v)
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
		return "too noisy to tell, no pass: " + c.wants()
	default:
		return string(c.Verdict) + ": " + c.wants()
	}
}

// figure is a number as people read it: "135,012" and "41.2".
func figure(v float64) string {
	if v < 1000 {
		return fmt.Sprintf("%.1f", v)
	}
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
