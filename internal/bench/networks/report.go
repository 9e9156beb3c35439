package networks

import (
	"fmt"
	"io"
	"slices"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// Report is a complete run.
type Report struct {
	report.Header
	Form      string        `json:"form"`
	Rows      []string      `json:"networks"`
	Missing   []Missing     `json:"leftOut,omitempty"`
	Speed     *bench.Report `json:"speed"`
	Wires     []Wire        `json:"wire"`
	Nodes     []Nodes       `json:"twoNodes"`
	Simulated []Simulated   `json:"simulated"`
	Designs   []Row         `json:"design"`
	Pass      bool          `json:"pass"` // simulations agree with arithmetic
}

// Row is the design of a network.
type Row struct {
	Network string `json:"network"`
	Design
}

// unknown is a cell without a figure.
const unknown = "–"

// speed returns the result of a row and a metric; nil if there is none.
func (r *Report) speed(row, metric string) *bench.Result {
	i := slices.IndexFunc(r.Speed.Results,
		func(x bench.Result) bool { return x.Scenario == row && x.Metric == metric })
	if i < 0 {
		return nil
	}
	return &r.Speed.Results[i]
}

// metrics returns the metrics of the run in order.
func (r *Report) metrics() (all []string) {
	for _, x := range r.Speed.Results {
		if !slices.Contains(all, x.Metric) {
			all = append(all, x.Metric)
		}
	}
	return all
}

// SpeedTable has the speed of all rows, relative to the first.
func (r *Report) SpeedTable() *plot.Table {
	metrics := r.metrics()
	t := &plot.Table{Head: append([]string{"network"}, metrics...)}
	for _, row := range r.Rows {
		cells := []string{row}
		for _, m := range metrics {
			cell := unknown
			if x := r.speed(row, m); x != nil {
				cell = report.Figure(x.Median) + " " + x.Unit
				if x.Ratio != nil {
					cell += fmt.Sprintf(" (%.2f)", x.Ratio.Median)
				}
			}
			cells = append(cells, cell)
		}
		t.Rows = append(t.Rows, cells)
	}
	return t
}

// CostTable has what each row puts on the wire, keeps for other nodes and sends, on two real nodes.
func (r *Report) CostTable() *plot.Table {
	t := &plot.Table{Head: []string{
		"network", "bytes of a transaction", "payload of a full segment", "bytes of its packet",
		"entries for another node", "messages: start", "stop", "move", "reachable after, ms", "of which ADD, ms",
	}}
	for _, row := range r.Rows {
		cells := append([]string{row}, r.wireCells(row)...)
		t.Rows = append(t.Rows, append(cells, r.nodeCells(row)...))
	}
	return t
}

func (r *Report) wireCells(row string) []string {
	i := slices.IndexFunc(r.Wires, func(w Wire) bool { return w.Network == row })
	if i < 0 {
		return []string{unknown, unknown, unknown}
	}
	w := r.Wires[i]
	return []string{
		report.Whole(w.TransactionBytes), report.Whole(float64(w.SegmentPayload)), report.Whole(w.SegmentBytes),
	}
}

func (r *Report) nodeCells(row string) []string {
	if i := slices.IndexFunc(r.Nodes, func(n Nodes) bool { return n.Network == row }); i >= 0 {
		n := r.Nodes[i]
		return []string{
			fmt.Sprintf("%d, %s there", n.State, humanize.Of(n.Elsewhere, "container", "containers")),
			n.Start.String(), n.Stop.String(), n.Move.String(),
			fmt.Sprintf("%.0f", median(n.Reachable)), fmt.Sprintf("%.0f", median(n.Added)),
		}
	}
	cells := []string{unknown, unknown, unknown, unknown, unknown, unknown}
	i := slices.IndexFunc(r.Wires, func(w Wire) bool { return w.Network == row })
	if i >= 0 && r.Wires[i].Kernel != nil {
		if k := r.Wires[i].Kernel; k.All() > 0 {
			cells[0] = fmt.Sprintf("%d (fdb %d, neighbours %d, routes %d)", k.All(), k.FDB, k.Neighbours, k.Routes)
		} else {
			cells[0] = "0"
		}
	}
	return cells
}

// String formats messages of streams, and others.
func (m Messages) String() string { return fmt.Sprintf("%s + %s", number(m.Stream), number(m.Calls)) }

// number formats a mean of counts, mostly a whole number.
func number(v float64) string {
	if v == float64(int(v)) {
		return humanize.Grouped(int(v))
	}
	return fmt.Sprintf("%.1f", v)
}

// ClusterTable compares simulated clusters with arithmetic.
func (r *Report) ClusterTable() *plot.Table {
	t := &plot.Table{Head: []string{
		"network", "nodes", "containers each", "follow", "entries for other nodes", "predicted",
		"messages to nodes: start", "predicted", "stop", "predicted", "move", "predicted", "",
	}}
	for i, s := range r.Simulated {
		verdict := "agrees"
		if !s.Pass {
			verdict = "differs"
			t.Bad = append(t.Bad, i)
		}
		t.Rows = append(t.Rows, []string{
			s.Name, humanize.Grouped(s.Nodes), humanize.Grouped(s.Containers), humanize.Grouped(s.Following),
			humanize.Grouped(s.Figures.State), humanize.Grouped(s.Predicted.State),
			number(s.Figures.Start.Stream), number(s.Predicted.Start),
			number(s.Figures.Stop.Stream), number(s.Predicted.Stop),
			number(s.Figures.Move.Stream), number(s.Predicted.Move), verdict,
		})
	}
	return t
}

// DesignTable has what networks isolate and hide.
func (r *Report) DesignTable(cell func(Property) string) *plot.Table {
	t := &plot.Table{Head: []string{
		"network", "tenants are isolated", "policies", "an address tells containers", "the fabric can read",
		"the fabric routes", "features",
	}, Wrap: true}
	for _, d := range r.Designs {
		cells := []string{d.Network}
		for _, p := range []Property{d.Tenants, d.Policies, d.Visible, d.Wire, d.Fabric, d.Features} {
			text := unknown
			if p.Text != "" {
				text = cell(p)
			}
			cells = append(cells, text)
		}
		t.Rows = append(t.Rows, cells)
	}
	return t
}

func plain(p Property) string { return p.Text }

const (
	speedLegend = "Medians; in brackets the median of the rounds' ratios to the first row."
	costLegend  = "Bytes are read from the node's fabric device, with Ethernet headers, without segmentation " +
		"offload. Entries are those that the tables of a node have more with the containers on the other node than " +
		"without, read from its kernel or Open vSwitch; of kernel overlays, what their VXLAN devices have " +
		"for the other node. Messages are those of the orchestrator, for one container of a tenant that " +
		"both nodes host: to nodes on their streams + calls of nodes, their answers and reports. A move is " +
		"a stop and a start on the other node. The time until a container is reachable begins when a " +
		"runtime would call, and ends with its answer to the other node."
	clusterLegend = "A simulated cluster: two real nodes, whose tables and messages are counted, and the others " +
		"simulated, around one real orchestrator. \"follow\" is the number of nodes that receive updates; where " +
		"these would be too many for one machine, the others register, start their containers and end."
	designLegend = "Properties by design; the tests that show them are in report.json and docs/networks.md."
)

// Table writes the results for a terminal; columns are separated by tabs.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(w, "%s\n\nspeed\n", r.how())
	r.SpeedTable().Text(w, "  ")
	fmt.Fprintf(w, "%s\n\ntwo real nodes\n", speedLegend)
	r.CostTable().Text(w, "  ")
	fmt.Fprintf(w, "%s\n\nlarge clusters, simulated\n", costLegend)
	r.ClusterTable().Text(w, "  ")
	fmt.Fprintf(w, "%s\n\ndesign\n", clusterLegend)
	r.DesignTable(plain).Text(w, "  ")
	fmt.Fprintln(w)
	for _, m := range r.Missing {
		fmt.Fprintf(w, "left out: %s: %s\n", m.Network, m.Reason)
	}
	fmt.Fprintln(w, r.verdict())
}

func (r *Report) how() string {
	return fmt.Sprintf("form %s; %d rounds of %d ms; Linux %s, %s; nodes are namespaces of one machine",
		r.Form, r.Speed.Settings.Rounds, r.Speed.Settings.WindowMs, r.Machine.Kernel,
		humanize.Of(r.Machine.CPUs, "CPU", "CPUs"))
}

func (r *Report) verdict() string {
	if r.Pass {
		return "entries and messages of all simulated clusters are as arithmetic predicts"
	}
	return "entries or messages of a simulated cluster are not as arithmetic predicts; see the rows that differ"
}

// Page writes the report as one HTML file.
func (r *Report) Page(w io.Writer) error {
	sections := []plot.Section{{
		ID: "cost", Title: "Two real nodes", Table: r.CostTable(),
		Notes: []plot.Note{{Text: costLegend}},
		Bars:  r.wireBars(),
	}}
	for _, m := range r.metrics() {
		sections = append(sections, r.speedSection(m))
	}
	sections = append(sections, plot.Section{
		ID: "clusters", Title: "Large clusters, simulated", Table: r.ClusterTable(),
		Notes: []plot.Note{{Class: "what", Text: clusterLegend}, {Text: r.verdict() + "."}},
		Bars:  r.stateBars(),
	}, plot.Section{
		ID: "design", Title: "What is isolated and hidden", Table: r.DesignTable(plain),
		Notes: []plot.Note{{Text: designLegend}},
	})
	speed := r.SpeedTable()
	speed.Caption = speedLegend
	sections = append([]plot.Section{{ID: "speed", Title: "Speed", Table: speed}}, sections...)
	var foot []plot.Note
	for _, m := range r.Missing {
		foot = append(foot, plot.Note{Text: fmt.Sprintf("left out: %s: %s", m.Network, m.Reason)})
	}
	return r.WritePage(w, plot.Page{
		Title: "networks side by side", Heading: "Networks side by side", Sections: sections, Foot: foot,
		Notes: []plot.Note{
			{Class: "what", Lead: "A software datapath between network namespaces of one machine.",
				Text: "Ratios within this run are comparable; its figures are not comparable with those of another " +
					"machine."},
			{Text: r.how() + ". " + report.BarNote},
		},
	}, "docs/networks.md explains them.", "form "+r.Form)
}

func (r *Report) speedSection(metric string) plot.Section {
	var bars []plot.Bar
	axis, relative := "", true
	for _, row := range r.Rows {
		x := r.speed(row, metric)
		if x == nil {
			continue
		}
		axis = x.Unit
		relative = relative && x.Ratio != nil
		bars = append(bars, plot.Bar{
			Name: row, Class: class(row), Figure: report.Figure(x.Median) + " " + x.Unit, At: plot.Span(x.Spread),
		})
	}
	if relative {
		axis = "of " + r.Speed.Reference
		for i := range bars {
			bars[i].At = plot.Span(*r.speed(bars[i].Name, metric).Ratio)
		}
	}
	return plot.Section{
		ID: metric, Title: metric, Bars: plot.NewBars(metric+" by network", axis, barNames, relative, bars),
	}
}

// barNames is the room for names of rows, in units of SVG.
const barNames = 150

func exact(v float64) plot.Span { return plot.Span{Median: v, Low: v, High: v} }

func (r *Report) wireBars() *plot.Bars {
	var bars []plot.Bar
	for _, w := range r.Wires {
		bars = append(bars, plot.Bar{
			Name: w.Network, Class: class(w.Network), Figure: report.Whole(w.TransactionBytes) + " bytes",
			At: exact(w.TransactionBytes),
		})
	}
	return plot.NewBars("a transaction on the wire", "bytes, both directions", barNames, false, bars)
}

func (r *Report) stateBars() *plot.Bars {
	var bars []plot.Bar
	for _, s := range r.Simulated {
		bars = append(bars, plot.Bar{
			Name: fmt.Sprintf("%s, %d × %d", s.Name, s.Nodes, s.Containers), Class: class(s.Network),
			Figure: humanize.Grouped(s.Figures.State), At: exact(float64(s.Figures.State)),
		})
	}
	return plot.NewBars("entries for other nodes on a node", "entries", report.NameWidth, false, bars)
}

// class is the colour of a row: ours, or others'.
func class(row string) string {
	all := All()
	if slices.ContainsFunc(all, func(n Network) bool { return n.Name == row && n.Tenant != nil }) {
		return "ours"
	}
	return "theirs"
}
