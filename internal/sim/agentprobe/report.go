package agentprobe

import (
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/debugserver"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
	"pilaster.io/pilaster/internal/sim"
	"pilaster.io/pilaster/internal/tenant"
)

// Report is the result of Run.
type Report struct {
	Started        time.Time `json:"started"`
	Seconds        float64   `json:"seconds"`
	Sizes          []int     `json:"sizes"`
	Containers     int       `json:"agentContainers"`
	NodeContainers int       `json:"containersPerNode"`   // of each simulated node
	Followers      int       `json:"followers,omitempty"` // simulated nodes of a network with mappings that follow the orchestrator; 0: all
	Lines          []Line    `json:"networks"`
}

// Line is the result of one agent in a growing cluster.
type Line struct {
	Network  string         `json:"network"`
	Points   []Point        `json:"points"`
	NotFlat  []string       `json:"notFlat,omitempty"` // violated limits of a network without mappings
	Warnings map[string]int `json:"simulatedAgentWarnings,omitempty"`
}

// Point is the state of the agent at the end of a step.
type Point struct {
	Nodes      int                `json:"nodes"`      // simulated nodes
	Containers int                `json:"containers"` // of simulated nodes
	Memory     debugserver.Memory `json:"memory"`
	Received   sim.Count          `json:"received"` // since the previous step, without heartbeats
	Heartbeats sim.Count          `json:"heartbeats"`
	Entries    map[string]int     `json:"entries"` // by table
	Seconds    float64            `json:"seconds"` // since the beginning of the run
	Simulation int64              `json:"simulationResidentBytes"`
}

func since(now, before sim.Count) sim.Count {
	return sim.Count{Messages: now.Messages - before.Messages, Bytes: now.Bytes - before.Bytes}
}

func (p Point) entries() (n int) {
	for _, used := range p.Entries {
		n += used
	}
	return n
}

func (p Point) String() string {
	return fmt.Sprintf(
		"with %s nodes the agent has %s live, %s resident, and received %s bytes",
		humanize.Grouped(p.Nodes),
		mib(p.Memory.Heap),
		mib(p.Memory.Resident),
		humanize.Grouped(int(p.Received.Bytes)),
	)
}

// Allowed change of the agent's memory since the first size.
const (
	heapWithin     = 0.01
	residentWithin = 0.05
)

// notFlat returns the costs of the agent that depend on other nodes.
func notFlat(points []Point) (all []string) {
	for i, p := range points {
		if p.Received.Messages != 0 || p.Received.Bytes != 0 {
			all = append(
				all,
				fmt.Sprintf(
					"with %d nodes: received %d messages of %d bytes, want none",
					p.Nodes,
					p.Received.Messages,
					p.Received.Bytes,
				),
			)
		}
		if i == 0 {
			continue
		}
		for _, of := range []struct {
			what     string
			now, was int64
			within   float64
		}{{"live heap", p.Memory.Heap, points[0].Memory.Heap, heapWithin}, {"resident memory", p.Memory.Resident,
			points[0].Memory.Resident, residentWithin}} {
			if change := change(of.now, of.was); math.Abs(change) > of.within {
				all = append(
					all,
					fmt.Sprintf(
						"with %d nodes: %s changed by %+.2f %% since %d nodes; the limit is %.0f %%",
						p.Nodes,
						of.what,
						100*change,
						points[0].Nodes,
						100*of.within,
					),
				)
			}
		}
		if now, was := p.entries(), points[0].entries(); now != was {
			all = append(
				all,
				fmt.Sprintf(
					"with %d nodes: the packet path has %d entries, and had %d with %d nodes",
					p.Nodes,
					now,
					was,
					points[0].Nodes,
				),
			)
		}
	}
	return all
}

func change(now, was int64) float64 { return float64(now-was) / float64(max(was, 1)) }

// Pass reports whether all limits hold.
func (r *Report) Pass() bool {
	for _, l := range r.Lines {
		if len(l.NotFlat) > 0 {
			return false
		}
	}
	return true
}

// Measured reports whether the report has at least one point.
func (r *Report) Measured() bool {
	return slices.ContainsFunc(r.Lines, func(l Line) bool { return len(l.Points) > 0 })
}

// Table writes the report for people, with columns separated by tabs.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(
		w,
		"a real agent with %s, in a cluster whose other nodes are simulated, %s each\n",
		humanize.Of(r.Containers, "container", "containers"),
		humanize.Of(r.NodeContainers, "container", "containers"),
	)
	for _, l := range r.Lines {
		fmt.Fprintf(w, "\nnetwork %s\n", l.Network)
		writeRow(w, head)
		for i := range l.Points {
			writeRow(w, l.row(i))
		}
		for _, not := range l.NotFlat {
			fmt.Fprintln(w, "not flat:", not)
		}
		if !tenant.NetworkHas(l.Network, tenant.Mappings) && len(l.Points) == len(r.Sizes) && len(l.NotFlat) == 0 {
			fmt.Fprintln(w, "flat")
		}
	}
}

func writeRow(w io.Writer, cells []string) {
	for i, c := range cells {
		if i > 0 {
			fmt.Fprint(w, "\t")
		}
		fmt.Fprint(w, c)
	}
	fmt.Fprintln(w)
}

var head = []string{
	"NODES",
	"LIVE HEAP",
	"",
	"RESIDENT",
	"",
	"ENTRIES",
	"MESSAGES",
	"BYTES",
	"A NODE",
	"HEARTBEATS",
	"BYTES",
}

func (l Line) row(i int) []string {
	p, first, before := l.Points[i], l.Points[0], 0
	if i > 0 {
		before = l.Points[i-1].Nodes
	}
	percent := func(now, was int64) string { return fmt.Sprintf("%+.2f %%", 100*change(now, was)) }
	return []string{
		humanize.Grouped(
			p.Nodes,
		), mib(p.Memory.Heap), percent(p.Memory.Heap, first.Memory.Heap), mib(p.Memory.Resident),
		percent(p.Memory.Resident, first.Memory.Resident),
		humanize.Grouped(
			p.entries(),
		), humanize.Grouped(int(p.Received.Messages)), humanize.Grouped(int(p.Received.Bytes)), fmt.Sprintf("%.1f",
			float64(p.Received.Bytes)/float64(p.Nodes-before)),
		humanize.Grouped(int(p.Heartbeats.Messages)), humanize.Grouped(int(p.Heartbeats.Bytes)),
	}
}

func mib(bytes int64) string { return fmt.Sprintf("%.2f MiB", float64(bytes)/(1<<20)) }

// Page writes the report as one HTML file.
func (r *Report) Page(w io.Writer) error {
	plots := []plot.Plot{
		{Title: "live heap of the agent", Y: "MiB"},
		{Title: "resident memory of the agent", Y: "MiB"},
		{Title: "received since its containers exist, without heartbeats", Y: "KiB"},
		{Title: "entries of its packet path", Y: "entries"},
	}
	t := &plot.Table{Head: append([]string{"NETWORK"}, head...)}
	for _, l := range r.Lines {
		points := make([][][2]float64, len(plots))
		received := int64(0)
		for i, p := range l.Points {
			received += p.Received.Bytes
			for j, y := range []float64{
				float64(p.Memory.Heap) / (1 << 20), float64(p.Memory.Resident) / (1 << 20),
				float64(received) / (1 << 10),
				float64(p.entries()),
			} {
				points[j] = append(points[j], [2]float64{float64(p.Nodes), y})
			}
			t.Rows = append(t.Rows, append([]string{l.Network}, l.row(i)...))
		}
		for j := range plots {
			plots[j].Lines = append(plots[j].Lines, plot.Line{Name: l.Network, Points: points[j]})
		}
	}
	s := plot.Section{
		Title: "the agent in a growing cluster",
		Notes: []plot.Note{
			{Text: "The same agent with the same containers; the axis is the number of simulated nodes."},
		},
		Table: t,
	}
	for _, p := range plots {
		p.X = "simulated nodes"
		s.Lines = append(s.Lines, plot.NewLines("", p))
	}
	followers := "all of them follow the orchestrator."
	if r.Followers > 0 {
		followers = fmt.Sprintf(
			"%d of them follow the orchestrator; the others keep their initial state and send nothing.",
			r.Followers,
		)
	}
	when := r.Started.Format(time.RFC3339)
	page := plot.Page{
		Title:   "the state of an agent as its cluster grows, " + when,
		Heading: "The state of an agent as its cluster grows",
		Facts: []string{when, fmt.Sprintf("%.0f s", r.Seconds), fmt.Sprintf(
			"%d containers of the agent, %d of each simulated node", r.Containers, r.NodeContainers)},
		Notes: []plot.Note{
			{Class: "what", Lead: "The agent is real,", Text: "with containers and a packet path in the kernel, " +
				"and follows a real orchestrator by TLS. The other nodes are simulated. On network " +
				tenant.NetworksWith(tenant.Mappings) + " " + followers},
		},
		Sections: []plot.Section{s},
		Foot: []plot.Note{{Class: "soft", Text: "All figures are in report.json beside this file. " +
			"docs/reference/simulation.md explains their limits."}},
	}
	for _, l := range r.Lines {
		for _, not := range l.NotFlat {
			page.Notes = append(page.Notes, plot.Note{Class: "bad", Text: "not flat: " + not})
		}
	}
	return page.Write(w)
}
