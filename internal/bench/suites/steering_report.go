package suites

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/traffic"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
	"pilaster.io/pilaster/internal/steering"
)

// SteeringReport is the result of `pilaster bench steering`.
type SteeringReport struct {
	report.Header
	Rounds int     `json:"rounds"`
	Window float64 `json:"windowSeconds"`
	// ClientCPU is the CPU of all clients, which receives all packets of the servers' node.
	ClientCPU int              `json:"clientCPU"`
	Seed      uint64           `json:"seed"`
	Results   []SteeringResult `json:"results"`
	NotRun    []ModeNotRun     `json:"notRun,omitempty"`
}

// ModeNotRun is a mode that this machine refuses.
type ModeNotRun struct {
	Mode   string `json:"mode"`
	Reason string `json:"reason"`
}

// SteeringResult has the figures of one mode with one number of pairs.
type SteeringResult struct {
	Mode     string          `json:"mode"`
	Pairs    int             `json:"pairs"`
	Gigabits report.Interval `json:"gigabits"` // sum of all pairs, Gbit/s
	// Packets of each CPU at the ingress of a level, all rounds. The kernel merges segments (GRO) on some devices, so
	// levels may have different sums.
	Packets map[string][]uint64 `json:"packets"`
	CPUs    []traffic.CPUShare  `json:"cpus"` // means of all rounds
}

func summarise(mode string, pairs int, samples []steeringSample, random *rand.Rand) SteeringResult {
	r := SteeringResult{Mode: mode, Pairs: pairs, Packets: map[string][]uint64{}}
	var gigabits []float64
	for _, s := range samples {
		gigabits = append(gigabits, s.gigabits)
		for level, packets := range s.packets {
			if r.Packets[level] == nil {
				r.Packets[level] = make([]uint64, len(packets))
			}
			for cpu, n := range packets {
				r.Packets[level][cpu] += n
			}
		}
		for i, share := range s.cpus {
			if i == len(r.CPUs) {
				r.CPUs = append(r.CPUs, traffic.CPUShare{CPU: share.CPU})
			}
			r.CPUs[i].Idle += share.Idle / float64(len(samples))
			r.CPUs[i].Softirq += share.Softirq / float64(len(samples))
		}
	}
	r.Gigabits = report.Bootstrap(gigabits, random)
	return r
}

// share returns a CPU's share of the packets of a level.
func (r SteeringResult) share(level string, cpu int) float64 {
	var sum uint64
	for _, n := range r.Packets[level] {
		sum += n
	}
	if sum == 0 || cpu >= len(r.Packets[level]) {
		return 0
	}
	return float64(r.Packets[level][cpu]) / float64(sum)
}

// perCPU formats one value for each CPU.
func (r SteeringResult) perCPU(value func(traffic.CPUShare) float64) string {
	var all []string
	for _, c := range r.CPUs {
		all = append(all, fmt.Sprintf("%.0f", 100*value(c)))
	}
	return strings.Join(all, "/")
}

var steeringHead = []string{"mode", "Gbit/s", "host", "overlay", "container", "idle", "softirq"}

func (r SteeringResult) cells() []string {
	cells := []string{r.Mode, report.Tenths(r.Gigabits)}
	for _, level := range steering.Levels() {
		cells = append(cells, r.perCPU(func(c traffic.CPUShare) float64 { return r.share(level, c.CPU) }))
	}
	return append(cells,
		r.perCPU(func(c traffic.CPUShare) float64 { return c.Idle }),
		r.perCPU(func(c traffic.CPUShare) float64 { return c.Softirq }))
}

// pairs returns the numbers of pairs in the order of the results.
func (r *SteeringReport) pairs() (all []int) {
	for _, x := range r.Results {
		if !slices.Contains(all, x.Pairs) {
			all = append(all, x.Pairs)
		}
	}
	return all
}

func (r *SteeringReport) table(pairs int) *plot.Table {
	t := &plot.Table{Head: steeringHead}
	for _, x := range r.Results {
		if x.Pairs == pairs {
			t.Rows = append(t.Rows, x.cells())
		}
	}
	return t
}

const steeringColumns = "host, overlay, container: packets that each CPU processed at that level, in %; idle, " +
	"softirq: each CPU's time, in %; CPUs in order, with / between them."

// Table writes the results for a terminal; columns are separated by tabs.
func (r *SteeringReport) Table(w io.Writer) {
	fmt.Fprintf(w, "TCP streams over kernel VXLAN, received on CPU %d; %d rounds of %.3g s, Linux %s, %s\n",
		r.ClientCPU, r.Rounds, r.Window, r.Machine.Kernel, humanize.Of(r.Machine.CPUs, "CPU", "CPUs"))
	fmt.Fprintln(w, steeringColumns)
	for _, pairs := range r.pairs() {
		fmt.Fprintf(w, "\n%s of client and server\n", humanize.Of(pairs, "pair", "pairs"))
		r.table(pairs).Text(w, "  ")
	}
	if len(r.NotRun) > 0 {
		fmt.Fprintln(w)
	}
	for _, n := range r.NotRun {
		fmt.Fprintf(w, "not run: %s: %s\n", n.Mode, n.Reason)
	}
}

// Page writes the report as one HTML file.
func (r *SteeringReport) Page(w io.Writer) error {
	p := plot.Page{
		Title:   "RPS and RFS over VXLAN",
		Heading: "Where packets of a VXLAN network are processed",
		Notes: []plot.Note{
			{
				Class: "what",
				Lead:  "TCP streams",
				Text: fmt.Sprintf("between containers of two nodes of this machine, over kernel VXLAN. All clients "+
					"run on CPU %d, so the servers' node receives all packets there, as from a network card with one "+
					"queue. Steering is set on that node; servers run on any CPU.", r.ClientCPU),
			},
			{Text: fmt.Sprintf("%d rounds of %.3g s. %s %s", r.Rounds, r.Window, report.BarNote, steeringColumns)},
		},
	}
	for _, mode := range SteeringModes() {
		p.Notes = append(p.Notes, plot.Note{Lead: mode.Name + ":", Text: mode.About + "."})
	}
	for _, n := range r.NotRun {
		p.Notes = append(p.Notes, plot.Note{Class: "bad", Lead: n.Mode + " was not run:", Text: n.Reason})
	}
	for _, pairs := range r.pairs() {
		p.Sections = append(p.Sections, r.sections(pairs)...)
	}
	return r.WritePage(w, p, "docs/howto/steering.md explains the modes.")
}

// sections shows one number of pairs: throughput, packets of each level, and CPU time.
func (r *SteeringReport) sections(pairs int) []plot.Section {
	var speed, packets, times []plot.Bar
	percent := func(name, class string, part float64) plot.Bar {
		v := 100 * part
		at := plot.Span{Median: v, Low: v, High: v}
		return plot.Bar{Name: name, Class: class, Figure: report.Percent(part), At: at}
	}
	for _, x := range r.Results {
		if x.Pairs != pairs {
			continue
		}
		class := "ours"
		if x.Mode == SteeringModes()[0].Name {
			class = "theirs"
		}
		speed = append(speed, plot.Bar{
			Name: x.Mode, Class: class, At: plot.Span(x.Gigabits),
			Figure: fmt.Sprintf("%.1f Gbit/s", x.Gigabits.Median),
		})
		for _, c := range x.CPUs {
			for _, level := range steering.Levels() {
				packets = append(packets,
					percent(fmt.Sprintf("%s · %s · CPU %d", x.Mode, level, c.CPU), class, x.share(level, c.CPU)))
			}
			times = append(times,
				percent(fmt.Sprintf("%s · CPU %d · softirq", x.Mode, c.CPU), class, c.Softirq),
				percent(fmt.Sprintf("%s · CPU %d · idle", x.Mode, c.CPU), class, c.Idle))
		}
	}
	of := humanize.Of(pairs, "pair", "pairs")
	return []plot.Section{
		{
			Title: of, Table: r.table(pairs),
			Bars: plot.NewBars("throughput of "+of, "Gbit/s, sum of all pairs", report.NameWidth, false, speed),
		},
		{
			Title: of + ": packets of each CPU",
			Bars:  plot.NewBars("packets by level, "+of, "% of the level's packets", report.NameWidth, false, packets),
		},
		{
			Title: of + ": time of each CPU",
			Bars:  plot.NewBars("CPU time, "+of, "% of the CPU's time", report.NameWidth, false, times),
		},
	}
}
