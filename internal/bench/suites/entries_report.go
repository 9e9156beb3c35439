package suites

import (
	"fmt"
	"io"
	"math"
	"slices"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// simulated describes the cluster in all reports.
const simulated = "a simulated cluster: one node with a real switch, filled as its agent fills it; " +
	"the other nodes exist only as mappings"

// EntriesReport is the result of `pilaster bench entries`.
type EntriesReport struct {
	Simulated string `json:"nature"`
	report.Header
	Density  int             `json:"containersOfANode"`
	Services int             `json:"services"`
	Samples  []EntriesSample `json:"samples"`
	Grows    []Growth        `json:"growth"`
	Pass     bool            `json:"pass"` // no entries for pairs
}

// EntriesSample is one reading of a switch.
type EntriesSample struct {
	Switch     string `json:"switch"`
	NodeCIDRs  bool   `json:"nodeCIDRs"`
	Nodes      int    `json:"nodes"`      // of the cluster, including this one
	Containers int    `json:"containers"` // on this node
	Services   int    `json:"services"`
	Stages     Counts `json:"entries"`
}

// Growth is the number of entries that a switch has per node, container and service, by differences between samples.
type Growth struct {
	Switch    string  `json:"switch"`
	NodeCIDRs bool    `json:"nodeCIDRs"`
	Node      float64 `json:"perNode"`      // per other node
	Container float64 `json:"perContainer"` // per container on this node, of a tenant with services
	Service   float64 `json:"perService"`
	// OffSum is the largest difference between a sample and the sum that the fields above predict for it. If a switch
	// had entries for pairs, such as one for each container and service, their number would appear here.
	OffSum float64 `json:"offTheSum"`
}

// of returns the samples of a switch and form, and the sizes of the cluster in ascending order.
func (r *EntriesReport) of(kind string, nodeCIDRs bool) (at func(nodes, containers, services int) Counts, nodes []int) {
	all := map[[3]int]Counts{}
	for _, s := range r.Samples {
		if s.Switch == kind && s.NodeCIDRs == nodeCIDRs {
			all[[3]int{s.Nodes, s.Containers, s.Services}] = s.Stages
			nodes = append(nodes, s.Nodes)
		}
	}
	slices.Sort(nodes)
	at = func(nodes, containers, services int) Counts { return all[[3]int{nodes, containers, services}] }
	return at, slices.Compact(nodes)
}

// grows computes the growth of each switch and form from the smallest sample and the samples that differ from the
// smallest in one quantity.
func (r *EntriesReport) grows() (all []Growth) {
	for _, kind := range EntrySwitches {
		for _, nodeCIDRs := range []bool{true, false} {
			at, nodes := r.of(kind, nodeCIDRs)
			if len(nodes) < 2 {
				continue
			}
			first, last := nodes[0], nodes[len(nodes)-1]
			least := at(first, 1, 1).All()
			each := func(more, by int) float64 { return float64(more-least) / float64(max(by, 1)) }
			g := Growth{Switch: kind, NodeCIDRs: nodeCIDRs}
			g.Node = each(at(last, 1, 1).All(), last-first)
			g.Container = each(at(first, r.Density, 1).All(), r.Density-1)
			g.Service = each(at(first, 1, r.Services).All(), r.Services-1)
			for _, s := range r.Samples {
				if s.Switch == kind && s.NodeCIDRs == nodeCIDRs {
					sum := float64(least) + g.Node*float64(s.Nodes-first) + g.Container*float64(s.Containers-1) +
						g.Service*float64(s.Services-1)
					g.OffSum = max(g.OffSum, math.Abs(float64(s.Stages.All())-sum))
				}
			}
			all = append(all, g)
		}
	}
	return all
}

func form(nodeCIDRs bool) string {
	if nodeCIDRs {
		return "with node CIDRs"
	}
	return "without node CIDRs"
}

// sizes has one line for each size of the cluster, with all its containers and services.
func (r *EntriesReport) sizes(kind string) *plot.Table {
	t := &plot.Table{Head: []string{
		"nodes", "containers", "to other nodes, with CIDRs", "without", "times", "all entries, with " +
			"CIDRs", "without", "times",
	}}
	with, nodes := r.of(kind, true)
	without, _ := r.of(kind, false)
	for _, n := range nodes {
		a, b := with(n, r.Density, r.Services), without(n, r.Density, r.Services)
		saved := "–"
		if a.Remote > 0 {
			saved = fmt.Sprintf("%.4g", float64(b.Remote)/float64(a.Remote))
		}
		t.Rows = append(t.Rows, []string{
			humanize.Grouped(n), humanize.Grouped(n * r.Density),
			humanize.Grouped(a.Remote), humanize.Grouped(b.Remote), saved,
			humanize.Grouped(
				a.All(),
			), humanize.Grouped(b.All()), fmt.Sprintf("%.1f", float64(b.All())/float64(a.All())),
		})
	}
	return t
}

// growth has one line for each switch and form.
func (r *EntriesReport) growth() *plot.Table {
	t := &plot.Table{Head: []string{
		"switch", "node CIDRs", "each node", "each container here", "each service", "off the sum",
	}}
	number := func(v float64) string { return fmt.Sprintf("%.4g", v) }
	for _, g := range r.Grows {
		t.Rows = append(t.Rows, []string{
			g.Switch, form(g.NodeCIDRs), number(g.Node), number(g.Container), number(g.Service), number(g.OffSum),
		})
	}
	return t
}

func (r *EntriesReport) verdict() string {
	if r.Pass {
		return "Entries are a sum over nodes, containers and services: no product of two is among them."
	}
	return "Entries are more than a sum over nodes, containers and services: pairs of them have their " +
		"own."
}

func (r *EntriesReport) how() string {
	return fmt.Sprintf("%s; %s a node, %s", r.Simulated,
		humanize.Of(r.Density, "container", "containers"), humanize.Of(r.Services, "service", "services"))
}

// Table writes the results for a terminal; columns are separated by tabs.
func (r *EntriesReport) Table(w io.Writer) {
	fmt.Fprintf(w, "%s; Linux %s\n", r.how(), r.Machine.Kernel)
	for _, kind := range r.switches() {
		fmt.Fprintf(w, "\nentries read from %s\n", kind)
		r.sizes(kind).Text(w, "  ")
	}
	fmt.Fprint(w, "\nentries for each, by differences\n")
	r.growth().Text(w, "  ")
	fmt.Fprintf(w, "\n%s\n", r.verdict())
}

func (r *EntriesReport) switches() (all []string) {
	for _, g := range r.Grows {
		all = append(all, g.Switch)
	}
	return slices.Compact(all)
}

// Page writes the report as one HTML file.
func (r *EntriesReport) Page(w io.Writer) error {
	var sections []plot.Section
	for _, kind := range r.switches() {
		p := plot.Plot{Title: "entries of one node", X: "nodes", Y: "entries", Log: true}
		for _, nodeCIDRs := range []bool{false, true} {
			at, nodes := r.of(kind, nodeCIDRs)
			l := plot.Line{Name: form(nodeCIDRs)}
			for _, n := range nodes {
				l.Points = append(l.Points, [2]float64{float64(n), float64(at(n, r.Density, r.Services).All())})
			}
			p.Lines = append(p.Lines, l)
		}
		sections = append(sections, plot.Section{
			Title: kind,
			Notes: []plot.Note{{Text: "Read from the switch, all stages. " +
				"NIMITZ §3.2 (NM3): up to 80 times fewer entries with a CIDR for each node."}},
			Lines: []*plot.Lines{plot.NewLines("Simulated cluster:", p)}, Table: r.sizes(kind),
		})
	}
	sections = append(sections, plot.Section{
		Title: "entries per node, container and service",
		Notes: []plot.Note{
			{Text: "By differences between samples. NIMITZ §3.1 (NM2): O(service) + O(container) + O(node), " +
				"not their product. " + r.verdict()},
		},
		Table: r.growth(),
	})
	return r.WritePage(w, plot.Page{
		Title:    "entries of a NIMITZ node",
		Heading:  "Entries of a NIMITZ node",
		Notes:    []plot.Note{{Class: "what", Lead: "Real switches, a simulated cluster.", Text: r.how() + "."}},
		Sections: sections,
	}, "docs/results/entries.md explains them.")
}
