package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// simulated is said wherever figures are.
const simulated = "a simulated cluster: one node with a real switch, filled as its agent fills it; the others are told of and do not exist"

// EntriesReport is what `pilaster bench entries` found.
type EntriesReport struct {
	Simulated string          `json:"nature"`
	Started   time.Time       `json:"started"`
	Seconds   float64         `json:"seconds"`
	Machine   Machine         `json:"machine"`
	Density   int             `json:"containersOfANode"`
	Services  int             `json:"services"`
	Samples   []EntriesSample `json:"samples"`
	Grows     []Growth        `json:"growth"`
	Pass      bool            `json:"pass"` // nothing grows with a product
}

// EntriesSample is what was read from a switch.
type EntriesSample struct {
	Switch     string `json:"switch"`
	NodeCIDRs  bool   `json:"nodeCIDRs"`
	Nodes      int    `json:"nodes"`      // of the cluster, this one too
	Containers int    `json:"containers"` // on this node
	Services   int    `json:"services"`
	Stages     Counts `json:"entries"`
}

// Growth is how many entries a switch has for each of what there is, by differences between samples.
type Growth struct {
	Switch    string  `json:"switch"`
	NodeCIDRs bool    `json:"nodeCIDRs"`
	Node      float64 `json:"perNode"`      // each other one
	Container float64 `json:"perContainer"` // each on this node, of a tenant with services
	Service   float64 `json:"perService"`
	// OffSum is the most that any sample is off the sum of these. Where any two of nodes, containers and services had
	// entries for each pair, that would be their product.
	OffSum float64 `json:"offTheSum"`
}

// of are the samples of a switch and form, and its smallest and largest sizes.
func (r *EntriesReport) of(kind string, nodeCIDRs bool) (at func(nodes, containers, services int) Counts, nodes []int) {
	all := map[[3]int]Counts{}
	for _, s := range r.Samples {
		if s.Switch == kind && s.NodeCIDRs == nodeCIDRs {
			all[[3]int{s.Nodes, s.Containers, s.Services}] = s.Stages
			nodes = append(nodes, s.Nodes)
		}
	}
	slices.Sort(nodes)
	return func(nodes, containers, services int) Counts { return all[[3]int{nodes, containers, services}] }, slices.Compact(
		nodes,
	)
}

// grows tells of each switch and form, from its smallest sample and those that differ from it in one thing.
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
					sum := float64(
						least,
					) + g.Node*float64(
						s.Nodes-first,
					) + g.Container*float64(
						s.Containers-1,
					) + g.Service*float64(
						s.Services-1,
					)
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

// sizes have a line for each size of the cluster, with all containers and services there.
func (r *EntriesReport) sizes(kind string) (rows [][]string) {
	with, nodes := r.of(kind, true)
	without, _ := r.of(kind, false)
	for _, n := range nodes {
		a, b := with(n, r.Density, r.Services), without(n, r.Density, r.Services)
		saved := "–"
		if a.Remote > 0 {
			saved = fmt.Sprintf("%.4g", float64(b.Remote)/float64(a.Remote))
		}
		rows = append(rows, []string{
			humanize.Grouped(
				n,
			), humanize.Grouped(n * r.Density), humanize.Grouped(a.Remote), humanize.Grouped(b.Remote), saved,
			humanize.Grouped(
				a.All(),
			), humanize.Grouped(b.All()), fmt.Sprintf("%.1f", float64(b.All())/float64(a.All())),
		})
	}
	return rows
}

var (
	entriesHead = []string{
		"nodes",
		"containers",
		"to other nodes, with CIDRs",
		"without",
		"times",
		"all entries, with CIDRs",
		"without",
		"times",
	}
	growthHead = []string{"switch", "node CIDRs", "each node", "each container here", "each service", "off the sum"}
)

func (r *EntriesReport) growthRows() (rows [][]string) {
	for _, g := range r.Grows {
		number := func(v float64) string { return fmt.Sprintf("%.4g", v) }
		rows = append(
			rows,
			[]string{
				g.Switch,
				form(g.NodeCIDRs),
				number(g.Node),
				number(g.Container),
				number(g.Service),
				number(g.OffSum),
			},
		)
	}
	return rows
}

func (r *EntriesReport) verdict() string {
	if r.Pass {
		return "Entries are a sum of what nodes, containers and services have each: no product of two is among them."
	}
	return "Entries are more than what nodes, containers and services have each: something is there for pairs of them."
}

func (r *EntriesReport) how() string {
	return fmt.Sprintf(
		"%s; %s a node, %s",
		r.Simulated,
		humanize.Of(r.Density, "container", "containers"),
		humanize.Of(r.Services, "service", "services"),
	)
}

// Table writes the results for a person; columns are separated by tabs.
func (r *EntriesReport) Table(w io.Writer) {
	fmt.Fprintf(w, "%s; Linux %s\n", r.how(), r.Machine.Kernel)
	table := func(head []string, rows [][]string) {
		for _, row := range append([][]string{head}, rows...) {
			fmt.Fprintf(w, "  %s\n", strings.Join(row, "\t"))
		}
	}
	for _, kind := range r.switches() {
		fmt.Fprintf(w, "\nentries read from %s\n", kind)
		table(entriesHead, r.sizes(kind))
	}
	fmt.Fprint(w, "\nentries for each, by differences\n")
	table(growthHead, r.growthRows())
	fmt.Fprintf(w, "\n%s\n", r.verdict())
}

func (r *EntriesReport) switches() (all []string) {
	for _, g := range r.Grows {
		all = append(all, g.Switch)
	}
	return slices.Compact(all)
}

// Page writes the report as one HTML file that needs no other.
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
			Title: kind, About: "Read from the switch, all stages. NIMITZ §3.2 (NM3): up to 80 times fewer entries with a CIDR for each node.",
			Lines: []*plot.Lines{plot.NewLines("Simulated cluster:", p)}, Head: entriesHead, Rows: r.sizes(kind),
		})
	}
	sections = append(sections, plot.Section{
		Title: "what one more adds", About: "By differences between samples. NIMITZ §3.1 (NM2): O(service) + O(container) + O(node), and not their product. " + r.verdict(),
		Head: growthHead, Rows: r.growthRows(),
	})
	return pageTemplates.ExecuteTemplate(w, "entriespage.html", struct {
		*EntriesReport
		When, How string
		Sections  []plot.Section
	}{r, r.Started.Format(time.RFC3339), r.how(), sections})
}
