package sharing

import (
	"fmt"
	"io"
	"math"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// Figures of Nezha: its lookups take slightly more than 10 µs (§3.2.3), with four frontends it has 3.3 times the
// connections per second (§6.2).
const (
	paperLookup    = 10_000 // ns
	paperGain      = 3.3
	paperFrontends = 4
)

// paperLookups is Nezha's table A1: millions of lookups per second on a SmartNIC, by rules and bytes of a packet.
var paperLookups = map[[2]int]float64{
	{0, 64}: 6.612, {1, 64}: 6.609, {8, 64}: 6.333, {64, 64}: 5.973, {100, 64}: 5.966, {1000, 64}: 5.422,
	{0, 128}: 6.543, {1, 128}: 6.455, {8, 128}: 6.303, {64, 128}: 5.826, {100, 128}: 5.702, {1000, 128}: 5.365,
	{0, 256}: 6.415, {1, 256}: 6.341, {8, 256}: 6.030, {64, 256}: 5.430, {100, 256}: 5.685, {1000, 256}: 5.228,
	{0, 512}: 5.985, {1, 512}: 5.925, {8, 512}: 5.455, {64, 512}: 5.258, {100, 512}: 5.035, {1000, 512}: 4.762,
}

// curveLookups are the lookup times of the curve, in ns.
var curveLookups = []float64{100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000}

// base is the rule set whose costs the curve has, except that of the lookup.
func (r *Report) base() Costs { return r.Sets[0].Costs }

// micros formats ns as µs.
func micros(ns float64) string {
	if math.IsNaN(ns) {
		return "no lookup time"
	}
	return fmt.Sprintf("%.2f µs", ns/1000)
}

func ratio(v float64) string { return fmt.Sprintf("%.2f", v) }

func microSpread(i report.Interval) string {
	return fmt.Sprintf("%.2f (%.2f–%.2f)", i.Median/1000, i.Low/1000, i.High/1000)
}

// programs has one line for each program on the way of a transaction.
func (r *Report) programs() *plot.Table {
	t := &plot.Table{Head: []string{
		"rule set", "frontend", "node", "program", "runs of a transaction", "ns of a run", "ns of a transaction",
	}}
	for _, s := range r.Sets {
		for _, p := range s.Programs {
			t.Rows = append(t.Rows, []string{
				s.Name, splitName(p.Split), p.Node, p.Program, fmt.Sprintf("%.1f", p.Runs), report.Spread(p.Ns),
				report.Spread(p.Transaction),
			})
		}
	}
	return t
}

func splitName(split bool) string {
	if split {
		return "one"
	}
	return "none"
}

// gains has one line for each rule set.
func (r *Report) gains() *plot.Table {
	t := &plot.Table{Head: []string{
		"rule set", "lookup alone, µs", "lookup on the way, µs", "backend without frontends, µs", "backend, µs",
		"frontend, µs",
	}}
	for _, n := range Frontends {
		t.Head = append(t.Head, fmt.Sprintf("gain with %d", n))
	}
	for _, s := range r.Sets {
		row := []string{s.Name, microSpread(s.Lookup), ratio(s.Costs.Lookup / 1000)}
		for _, of := range []struct {
			split bool
			node  int
		}{{false, backend}, {true, backend}, {true, frontend}} {
			for _, n := range s.Nodes {
				if n.Split == of.split && n.Node == nodeNames[of.node] {
					row = append(row, microSpread(n.Transaction))
				}
			}
		}
		for _, g := range s.Gains {
			row = append(row, fmt.Sprintf("%.2f (%.2f–%.2f)", g.Gain.Median, g.Gain.Low, g.Gain.High))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// curve has one line for each lookup time.
func (r *Report) curve() *plot.Table {
	t := &plot.Table{Head: []string{"lookup"}}
	for _, n := range Frontends {
		t.Head = append(t.Head, fmt.Sprintf("gain with %d", n))
	}
	for _, ns := range curveLookups {
		row := []string{fmt.Sprintf("%g µs", ns/1000)}
		for _, n := range Frontends {
			row = append(row, ratio(r.base().WithLookup(ns).Gain(n)))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// Verdict says what the model gives for a lookup as long as Nezha's.
func (r *Report) Verdict() string {
	c := r.base().WithLookup(paperLookup)
	text := fmt.Sprintf("Model: with a lookup of 10 µs and all else as with rule set %s, %d frontends gain %.2f. "+
		"They gain 1.0 from a lookup of %s on, and %.1f from %s on.", r.Sets[0].Name, paperFrontends,
		c.Gain(paperFrontends), micros(c.LookupFor(1, paperFrontends)), paperGain,
		micros(c.LookupFor(paperGain, paperFrontends)))
	if c.Gain(paperFrontends) >= paperGain {
		return text
	}
	by := fmt.Sprintf("the backend keeps %s of a transaction's %s, so that no number of frontends gains more than %.2f",
		micros(c.Backend), micros(c.Unsplit), c.Limit())
	if c.Frontend/paperFrontends > c.Backend {
		by = fmt.Sprintf("each frontend takes %s for a transaction, of which it has a quarter",
			micros(c.Frontend))
	}
	return text + fmt.Sprintf(" That is less than the %.1f of Nezha at 10 µs: %s.", paperGain, by)
}

// answers has one line for each number of rules and size of packets. What can be compared with the paper is how both
// depend on the number of rules: relative to none, with packets of that size.
func (r *Report) answers() *plot.Table {
	t := &plot.Table{Head: []string{
		"rules", "bytes", "ns", "a second", "relative to no rules", "Nezha, on a NIC", "relative to no rules",
	}}
	none := map[int]float64{} // ns without rules, by bytes
	for _, a := range r.Answers {
		if a.Rules == 0 {
			none[a.Bytes] = a.Ns.Median
		}
	}
	for _, a := range r.Answers {
		paper, theirs := "–", "–"
		if v, ok := paperLookups[[2]int{a.Rules, a.Bytes}]; ok {
			paper, theirs = fmt.Sprintf("%.3f million", v), ratio(v/paperLookups[[2]int{0, a.Bytes}])
		}
		t.Rows = append(t.Rows, []string{
			humanize.Grouped(a.Rules), humanize.Grouped(a.Bytes), report.Spread(a.Ns),
			report.Figure(1e9 / a.Ns.Median), ratio(none[a.Bytes] / a.Ns.Median), paper, theirs,
		})
	}
	return t
}

// rooms are the sizes of rule tables for which capacities are computed.
var rooms = []int{datapath.DefaultMaxRules, datapath.MaxMaxRules}

// memories has two lines for each rule set.
func (r *Report) memories() *plot.Table {
	t := &plot.Table{Head: []string{"rule set", "entries", "KiB", "--max-rules"}}
	counts := append([]int{0}, Frontends[:len(Frontends)-1]...)
	for _, n := range counts {
		t.Head = append(t.Head, fmt.Sprintf("tenants with %d", n))
	}
	t.Head = append(t.Head, "with all of 4")
	for _, s := range r.Sets {
		for _, room := range rooms {
			c := Capacity{Entries: s.Entries, Room: room}
			row := []string{
				s.Name, humanize.Grouped(s.Entries), report.Figure(float64(s.Bytes) / 1024), humanize.Grouped(room),
			}
			for _, n := range counts {
				row = append(row, humanize.Grouped(c.Spread(n)))
			}
			t.Rows = append(t.Rows, append(row, humanize.Grouped(c.Copied(paperFrontends))))
		}
	}
	return t
}

const (
	aboutAnswers = "Frontends' answers to a backend: messages with a packet of this size, whose verdict is not " +
		"cached. The kernel runs the program alone, on one CPU (BPF_PROG_TEST_RUN). The last columns are table A1 of " +
		"the paper, another quantity: a SmartNIC with its driver. What compares is how both fall with more rules."
	aboutMemory = "Arithmetic: how many tenants' rules fit if all have this set and nothing else is there. A tenant " +
		"may use at most half of what others leave, and a frontend lends half of its room. Each offloaded tenant has " +
		"one frontend, in the last column all four, which then all have a copy. Rules of offloaded tenants are not " +
		"at the backend."
	aboutGains = "Modelled from these times. A lookup alone is one of the rules of both ends in a loop; on the way " +
		"of packets it is what a frontend takes more than with the first rule set, plus that lookup."
	aboutCurve = "Model: costs as measured with the first rule set, except for the lookup. Each frontend has an " +
		"equal share of the transactions, and nothing but the programs limits nodes."
)

func (r *Report) how() string {
	return fmt.Sprintf("%d rounds of %s from %s on CPU %d, on which all nodes run",
		r.Rounds, humanize.Of(r.Transactions, "transaction", "transactions"),
		humanize.Of(r.Clients, "address", "addresses"), r.CPU)
}

func (r *Report) overhead() string {
	return fmt.Sprintf("The kernel's run-time statistics take %.0f ns of each run, which are subtracted. With them "+
		"the speed is %.3f (%.3f–%.3f) of that without.", r.EmptyProgram, r.Slowdown.Median, r.Slowdown.Low,
		r.Slowdown.High)
}

// Table writes the results for a terminal; columns are separated by tabs.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(w, "%s; %s; Linux %s\n%s\n", r.Nature, r.how(), r.Machine.Kernel, r.overhead())
	for _, part := range []struct {
		title string
		table *plot.Table
	}{
		{"programs of a transaction: median (95 %)", r.programs()},
		{"gain of frontends. " + aboutGains, r.gains()},
		{"gain by lookup time. " + aboutCurve, r.curve()},
		{aboutAnswers, r.answers()},
		{fmt.Sprintf("%s A session takes %.0f bytes, at the backend.", aboutMemory, r.SessionBytes), r.memories()},
	} {
		fmt.Fprintf(w, "\n%s\n", part.title)
		part.table.Text(w, "  ")
	}
	fmt.Fprintf(w, "\n%s\n", r.Verdict())
}

// plots returns the curve, with the rule sets and the paper on it.
func (r *Report) plots() plot.Plot {
	p := plot.Plot{Title: "gain by lookup time", X: "lookup, µs", Y: "gain", Log: true}
	for _, n := range Frontends {
		l := plot.Line{Name: humanize.Of(n, "frontend", "frontends")}
		for _, ns := range curveLookups {
			l.Points = append(l.Points, [2]float64{ns / 1000, r.base().WithLookup(ns).Gain(n)})
		}
		p.Lines = append(p.Lines, l)
	}
	own := plot.Line{Name: "the rule sets, with 4", Apart: true}
	for _, s := range r.Sets {
		own.Points = append(own.Points, [2]float64{s.Costs.Lookup / 1000, s.Costs.Gain(paperFrontends)})
	}
	return plot.Plot{Title: p.Title, X: p.X, Y: p.Y, Log: true, Lines: append(p.Lines, own, plot.Line{
		Name: "Nezha, with 4", Apart: true, Points: [][2]float64{{paperLookup / 1000, paperGain}},
	})}
}

// Page writes the report as one HTML file.
func (r *Report) Page(w io.Writer) error {
	var bars []plot.Bar
	for _, s := range r.Sets {
		for _, of := range []struct {
			split bool
			node  int
			name  string
			class string
		}{
			{false, backend, "no frontends", "theirs"}, {true, backend, "backend", "ours"},
			{true, frontend, "frontend", "ours"},
		} {
			for _, n := range s.Nodes {
				if n.Split == of.split && n.Node == nodeNames[of.node] {
					bars = append(bars, plot.Bar{
						Name: s.Name + " · " + of.name, Class: of.class,
						Figure: report.Whole(n.Transaction.Median) + " ns", At: plot.Span(n.Transaction),
					})
				}
			}
		}
	}
	return r.WritePage(w, plot.Page{
		Title:   "load sharing between nodes",
		Heading: "Load sharing between nodes",
		Notes: []plot.Note{
			{Class: "what", Lead: "Gains are a model.", Text: r.how() + ". " + r.overhead()},
			{Text: r.Verdict() + " " + report.BarNote},
		},
		Sections: []plot.Section{
			{
				Title: "gain by lookup time",
				Notes: []plot.Note{
					{Text: aboutCurve},
					{Class: "paper", Text: "Nezha §3.2.3: a lookup takes slightly more than 10 µs. §6.2 (NZ9): 3.3 " +
						"times the connections per second with four frontends."},
				},
				Lines: []*plot.Lines{plot.NewLines("Model:", r.plots())}, Table: r.curve(),
			},
			{
				Title: "programs' time for a transaction",
				Notes: []plot.Note{{Text: aboutGains}},
				Bars:  plot.NewBars("programs of a node", "ns a transaction", report.NameWidth, false, bars),
				Table: r.gains(),
			},
			{Title: "each program", Table: r.programs()},
			{Title: "answers of a frontend", Notes: []plot.Note{{Text: aboutAnswers}}, Table: r.answers()},
			{
				Title: "rules that fit",
				Notes: []plot.Note{{Text: aboutMemory}, {
					Text: fmt.Sprintf("A session takes %.0f bytes, at the backend.", r.SessionBytes),
				}},
				Table: r.memories(),
			},
		},
	}, "docs/results/offload.md explains them.")
}
