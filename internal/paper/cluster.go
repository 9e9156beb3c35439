package paper

import (
	"context"
	"fmt"
	"math"
	"strings"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/sim"
	"pilaster.io/pilaster/internal/tenant"
)

// Figures of §4.1 and §7.1 for clusters that grow by 10 %.
const (
	listRate      = 200 // queries per second of a tenant
	listPage      = 500 // nodes
	paperNodes    = 25_000
	paperQueries  = 150_000
	paperLeast    = 12 * 60.0 // seconds of warm-up
	paperMost     = 20 * 60.0 // seconds
	paperNimitz   = 12.5 * 60 // seconds, at 25,000 nodes
	paperNetpila  = 1.25 * 60 // seconds, at 25,000 nodes
	paperFarthest = 100_000   // nodes, on NETPILA
	paperFarTime  = 5 * 60.0  // seconds
	memoryLimit   = 16 << 30  // of a simulated cluster
)

// queries counts queries as §4.1 does: each new node queries all pages, and each existing node queries once for the new
// nodes.
func queries(nodes, fresh int) (ofNew, ofOthers int) {
	return fresh * ((nodes + listPage - 1) / listPage), nodes
}

// grown is a cluster before and after growth by a tenth.
type grown struct {
	nodes  int // before the growth
	result *sim.Result
}

func (g grown) event() sim.Stage { return g.result.Stages[len(g.result.Stages)-1] }

// asked returns the answered queries for mappings: pages for new nodes, and changes for the others.
func (g grown) asked() (pages, changes int) {
	if q := g.event().Queries; q != nil {
		return int(q.Pages), int(q.Changes)
	}
	return 0, 0
}

func (g grown) queries() int {
	pages, changes := g.asked()
	return pages + changes
}

func (g grown) refused() int {
	if q := g.event().Queries; q != nil {
		return int(q.Refused)
	}
	return 0
}

// throttled returns the minimum time in seconds that the queries take at listRate. The rate limit admits the queries of
// one second as a burst.
func (g grown) throttled() float64 { return max(float64(g.queries()-listRate)/listRate, 0) }

func (g grown) seconds() float64 { return g.event().Ready }
func (g grown) messages() int    { return int(g.event().Total.Messages) }

// entries returns the minimum and the maximum of the nodes' entries, over all tables of the cluster's network.
func (g grown) entries() (least, most int) {
	for _, e := range g.result.Entries {
		if strings.HasPrefix(e.Table, tenant.Nimitz) == (g.result.Scenario.Network == tenant.Nimitz) {
			least, most = least+e.Least, most+e.Most
		}
	}
	return least, most
}

// growing returns the scenario of a cluster that grows by a tenth.
func growing(network string, nodes, containers int) (sim.Scenario, error) {
	more, grow := "", "do: grow, by: 10%"
	if network == tenant.Nimitz {
		more, grow = fmt.Sprintf("mappingsBy: %s, listRate: %d, ", sim.ByQuery, listRate), grow+", listFirst: true"
	}
	text := fmt.Sprintf(
		"{network: %s, seed: %d, nodes: %d, containersPerNode: %d, %sevents: [{%s}], limits: {memory: 16GiB}}",
		network,
		seed,
		nodes,
		containers,
		more,
		grow,
	)
	return sim.Parse(fmt.Sprintf("%s-%d", network, nodes), []byte(text))
}

// cluster simulates the growth of a cluster, once for all figures.
func (r *run) cluster(ctx context.Context, network string, nodes, containers int) (grown, error) {
	key := fmt.Sprintf("%s %d %d", network, nodes, containers)
	g := grown{nodes: nodes, result: r.clusters[key]}
	if g.result != nil {
		return g, nil
	}
	s, err := growing(network, nodes, containers)
	if err != nil {
		return g, err
	}
	r.say(
		"%s, %s nodes with %s each",
		network,
		humanize.Grouped(nodes),
		humanize.Of(containers, "container", "containers"),
	)
	g.result, err = r.Measure.Sim(ctx, s)
	if err != nil {
		return g, fmt.Errorf("%s, %d nodes: %w", network, nodes, err)
	}
	if !g.result.Pass() {
		return g, fmt.Errorf(
			"%s, %d nodes: %s",
			network,
			nodes,
			strings.Join(append(g.result.Violations, g.result.Exceeded...), "; "),
		)
	}
	r.clusters[key] = g.result
	return g, nil
}

// series simulates the growth of clusters of all sizes that should fit in memory. leftOut says why it leaves out the
// other sizes.
func (r *run) series(ctx context.Context, network string) (all []grown, leftOut string, err error) {
	sizes := r.Form.Netpila
	if network == tenant.Nimitz {
		sizes = r.Form.Nimitz
	}
	for i, nodes := range sizes {
		if i > 0 {
			before := all[i-1]
			needs := float64(before.event().Resident) / float64(before.event().Nodes) * float64(nodes) * 1.1
			if needs > memoryLimit {
				return all, fmt.Sprintf(
					"%s nodes on %s were left out: by the previous size they would need %.0f GiB, and 16 GiB is the "+
						"limit",
					humanize.Grouped(nodes),
					network,
					needs/(1<<30),
				), nil
			}
		}
		g, err := r.cluster(ctx, network, nodes, r.Form.Containers)
		if err != nil {
			return nil, "", err
		}
		all = append(all, g)
	}
	return all, "", nil
}

// both returns the clusters of both networks, and sets the description of their sizes.
func (r *run) both(ctx context.Context, f *Figure) (onNimitz, onNetpila []grown, err error) {
	onNimitz, one, err := r.series(ctx, tenant.Nimitz)
	if err != nil {
		return nil, nil, err
	}
	onNetpila, other, err := r.series(ctx, tenant.Netpila)
	f.Sizes = sentences(fmt.Sprintf("NIMITZ %s, NETPILA %s", sizesOf(onNimitz), sizesOf(onNetpila)), one, other)
	f.Scenario = append(scenarios(onNimitz), scenarios(onNetpila)...)
	return onNimitz, onNetpila, err
}

func sentences(all ...string) string {
	return strings.Join(strings.FieldsFunc(strings.Join(all, "\x00"), func(r rune) bool { return r == 0 }), "; ")
}

func sizesOf(all []grown) string {
	var sizes []string
	for _, g := range all {
		sizes = append(sizes, humanize.Grouped(g.nodes))
	}
	return fmt.Sprintf(
		"%s nodes with %s each, and 10 %% more",
		strings.Join(sizes, ", "),
		humanize.Of(all[0].result.Scenario.ContainersPerNode, "container", "containers"),
	)
}

func scenarios(all []grown) (some []sim.Scenario) {
	for _, g := range all {
		some = append(some, g.result.Scenario)
	}
	return some
}

// over returns a point for each cluster, by its nodes before the growth.
func over(all []grown, of func(grown) float64) (points [][2]float64) {
	for _, g := range all {
		points = append(points, [2]float64{float64(g.nodes), of(g)})
	}
	return points
}

func sumOf(g grown) float64 {
	ofNew, ofOthers := queries(g.nodes, g.event().About)
	return float64(ofNew + ofOthers)
}

// sums returns the results of the paper's arithmetic for the sizes of the clusters and for the paper's size.
func sums(all []grown, by float64) [][2]float64 {
	ofNew, ofOthers := queries(paperNodes, paperNodes/10)
	return append(
		over(all, func(g grown) float64 { return sumOf(g) / by }),
		[2]float64{paperNodes, float64(ofNew+ofOthers) / by},
	)
}

func (r *run) fig9(ctx context.Context, f *Figure) error {
	all, leftOut, err := r.series(ctx, tenant.Nimitz)
	if err != nil {
		return err
	}
	f.Sizes, f.Scenario = sentences(sizesOf(all), leftOut), scenarios(all)
	f.Ran = fmt.Sprintf(
		"The real orchestrator, with %d list queries per second for the tenant and %d nodes per page, and a real "+
			"agent for each node, all in one process (docs/reference/simulation.md). All new nodes list the others "+
			"before one of them gets its subnet; then each of the other nodes queries what is new.",
		listRate,
		listPage,
	)
	var off []string
	for _, g := range all {
		if sum := int(sumOf(g)); g.queries() != sum {
			off = append(
				off,
				fmt.Sprintf(
					"%s where it has %s at %s nodes",
					humanize.Grouped(g.queries()),
					humanize.Grouped(sum),
					humanize.Grouped(g.nodes),
				),
			)
		}
	}
	f.Differs = "The counted queries equal §4.1's arithmetic at each size"
	if off != nil {
		f.Differs = "Counted queries and §4.1's arithmetic: " + strings.Join(off, ", ")
	}
	last := all[len(all)-1]
	f.Differs += fmt.Sprintf(
		"; at %s nodes they took %.1f s, of which the throttle alone requires %.1f, and it refused %s, which were "+
			"retried; the paper's minimum of 12 minutes is for 150,000 queries of 25,000 nodes.",
		humanize.Grouped(last.nodes),
		last.seconds(),
		last.throttled(),
		humanize.Grouped(last.refused()),
	)
	for _, g := range all {
		pages, changes := g.asked()
		ofNew, ofOthers := queries(g.nodes, g.event().About)
		f.Rows = append(
			f.Rows,
			Row{
				fmt.Sprintf("%s nodes: queries of new nodes, of the others; seconds", humanize.Grouped(g.nodes)),
				fmt.Sprintf("%s, %s; %.2f s", humanize.Grouped(pages), humanize.Grouped(changes), g.seconds()),
				fmt.Sprintf(
					"%s, %s; %.2f s at 200 a second, by §4.1's arithmetic",
					humanize.Grouped(ofNew),
					humanize.Grouped(ofOthers),
					sumOf(g)/listRate,
				),
				"§4.1",
			},
		)
	}
	f.Rows = append(
		f.Rows,
		Row{
			"25,000 nodes: queries of new nodes, of the others; minutes",
			"",
			"125k, 25k; 12 min at least, up to 20",
			"§4.1",
		},
	)
	at := func(y float64) [2]float64 { return [2]float64{paperNodes, y} }
	f.Panels = []Panel{
		{Title: "queries when 10 % of nodes join", X: "nodes before", Y: "queries", Log: true, Series: []Series{
			{Name: "all", Of: ours, Points: over(all, func(g grown) float64 { return float64(g.queries()) })},
			{
				Name:   "of new nodes",
				Of:     ours,
				Points: over(all, func(g grown) float64 { pages, _ := g.asked(); return float64(pages) }),
			},
			{Name: "all, §4.1", Of: arithmetic, Where: "§4.1", Points: sums(all, 1)},
			read("§4.1", "150k queries", at(paperQueries)),
		}},
		{Title: "time until all queries are answered", X: "nodes before", Y: "s", Log: true, Series: []Series{
			{Name: "NIMITZ", Of: ours, Points: over(all, grown.seconds)},
			{Name: "queries at 200/s, §4.1", Of: arithmetic, Where: "§4.1", Points: sums(all, listRate)},
			read("§4.1", "12 min at least", at(paperLeast)),
			read("§4.1", "up to 20 min", at(paperMost)),
		}},
	}
	return nil
}

func (r *run) fig17(ctx context.Context, f *Figure) error {
	onNimitz, onNetpila, err := r.both(ctx, f)
	if err != nil {
		return err
	}
	// Entries are read after the growth.
	points := func(all []grown) (points [][2]float64) {
		for _, g := range all {
			_, most := g.entries()
			points = append(points, [2]float64{float64(g.event().Nodes), float64(most)})
		}
		return points
	}
	f.Ran = "The real agents of a simulated cluster filled packet paths that only count entries " +
		"(docs/reference/simulation.md). Entries are those of all tables of the network, read on every node after " +
		"the growth."
	slope, from, to := slopes(onNimitz)
	flat, least, most := slopes(onNetpila)
	f.Differs = fmt.Sprintf(
		"NIMITZ's entries grow from %s to %s, %.2f for each further node. NETPILA's are %s at the smallest size "+
			"and %s at the largest, %.2f for each further node; %s of them are two for each container of the node. "+
			"The text has no numbers for this figure; those plotted are of the paper's jobs, whose containers per "+
			"node it does not state. It counts two pairs of entries for each container (§6.1); entries here are of "+
			"eBPF maps, not of a NIC's table.",
		humanize.Grouped(
			from,
		),
		humanize.Grouped(to),
		slope,
		humanize.Grouped(least),
		humanize.Grouped(most),
		flat,
		humanize.Grouped(2*r.Form.Containers),
	)
	for _, g := range append(onNimitz, onNetpila...) {
		least, most := g.entries()
		here := humanize.Grouped(most)
		if least != most {
			here = humanize.Grouped(least) + " to " + here
		}
		f.Rows = append(
			f.Rows,
			Row{
				What: fmt.Sprintf("%s, %s nodes", g.result.Scenario.Network, humanize.Grouped(g.event().Nodes)),
				Here: here,
			},
		)
	}
	f.Rows = append(f.Rows,
		Row{"NIMITZ as nodes grow", fmt.Sprintf("%.2f for each further node", slope), "linear", "§7.1"},
		Row{"NETPILA as nodes grow", fmt.Sprintf("%.2f for each further node", flat), "constant", "§7.1"},
		Row{"NIMITZ, a job on 8,076 nodes", "", "11,830", jobSections},
		Row{"NETPILA, jobs on 8,076 and 6,176 nodes", "", "12–20", "§7.1"})
	f.Panels = []Panel{{Title: "entries of a node", X: "nodes", Y: "entries", Log: true, Series: []Series{
		{Name: "NIMITZ", Of: ours, Points: points(onNimitz)},
		{Name: "NETPILA", Of: ours, Points: points(onNetpila)},
		read(jobSections, "NIMITZ 11,830", [2]float64{jobNodes, jobEntries}),
		read("§7.1", "NETPILA 12–20", job12To20()...),
	}}}
	return nil
}

// slopes returns how many entries a node has more for each node by which the largest cluster exceeds the smallest, and
// a node's entries in the smallest and in the largest cluster.
func slopes(all []grown) (each float64, from, to int) {
	first, last := all[0], all[len(all)-1]
	_, from = first.entries()
	_, to = last.entries()
	return float64(to-from) / float64(last.event().Nodes-first.event().Nodes), from, to
}

// power returns p if a count grows as nodes^p from the smallest cluster to the largest.
func power(all []grown, of func(grown) float64) float64 {
	first, last := all[0], all[len(all)-1]
	return math.Log(of(last)/of(first)) / math.Log(float64(last.nodes)/float64(first.nodes))
}

func (r *run) fig18(ctx context.Context, f *Figure) error {
	onNimitz, onNetpila, err := r.both(ctx, f)
	if err != nil {
		return err
	}
	f.Ran = fmt.Sprintf(
		"The real orchestrator, with %d list queries per second for the tenant, and a real agent for each node, all "+
			"in one process (docs/reference/simulation.md). A tenth more nodes join and get their containers; the "+
			"time ends when all of them follow the orchestrator and, on NIMITZ, the other nodes have queried "+
			"what is new.",
		listRate,
	)
	nimitz, netpila := onNimitz[len(onNimitz)-1], onNetpila[len(onNetpila)-1]
	f.Differs = fmt.Sprintf(
		"NIMITZ at %s nodes made %s list queries, for which the throttle alone requires %.1f of its %.1f s. NETPILA "+
			"at %s nodes made %s, so the throttle does not affect its %.2f s, which took %.1f s of CPU time for %s "+
			"messages. Here one machine's %d CPUs run the orchestrator and all agents; the paper's nodes are "+
			"separate machines.",
		humanize.Grouped(nimitz.nodes),
		humanize.Grouped(nimitz.queries()),
		nimitz.throttled(),
		nimitz.seconds(),
		humanize.Grouped(
			netpila.nodes,
		),
		humanize.Grouped(netpila.queries()),
		netpila.seconds(),
		netpila.event().CPU,
		humanize.Grouped(netpila.messages()),
		r.Origin.CPUs,
	)
	for _, g := range append(onNimitz, onNetpila...) {
		f.Rows = append(
			f.Rows,
			Row{
				What: fmt.Sprintf(
					"%s, %s nodes and %s more",
					g.result.Scenario.Network,
					humanize.Grouped(g.nodes),
					humanize.Grouped(g.event().About),
				),
				Here: fmt.Sprintf(
					"%.2f s (CPU %.2f s); %s messages; %s list queries",
					g.seconds(),
					g.event().CPU,
					humanize.Grouped(g.messages()),
					humanize.Grouped(g.queries()),
				),
			},
		)
	}
	f.Rows = append(
		f.Rows,
		Row{
			"NIMITZ, 25,000 nodes",
			"",
			"12.5 min",
			"§7.1",
		},
		Row{"NETPILA, 25,000 nodes", "", "1.25 min", "§7.1"},
		Row{"NETPILA, 100,000 nodes", "", "5 min", "§7.1"},
	)
	f.Panels = []Panel{{Title: "time to grow by 10 %", X: "nodes before", Y: "s", Log: true, Series: []Series{
		{Name: "NIMITZ", Of: ours, Points: over(onNimitz, grown.seconds)},
		{Name: "NETPILA", Of: ours, Points: over(onNetpila, grown.seconds)},
		{Name: "queries at 200/s, §4.1", Of: arithmetic, Where: "§4.1", Points: sums(onNimitz, listRate)},
		read("§7.1", "NIMITZ", [2]float64{paperNodes, paperNimitz}),
		read("§7.1", "NETPILA", [2]float64{paperNodes, paperNetpila}, [2]float64{paperFarthest, paperFarTime}),
	}}}
	return nil
}
