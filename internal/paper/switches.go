package paper

import (
	"context"
	"fmt"
	"strings"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/suites"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/tenant"
)

// Figures of §4.1 for a deletion.
const (
	deleteBatch  = 2000
	deleteMost   = 50_000
	deleteGrowth = 28
)

// deletions measures deletions once for both figures.
func (r *run) deletions(ctx context.Context) (*suites.FlowDeleteReport, error) {
	if r.deleted == nil {
		r.say("deletions of %s entries", humanize.Grouped(r.Form.Batch))
		report, err := r.Measure.FlowDelete(
			ctx,
			suites.FlowDeleteOptions{Installed: r.Form.Installed, Batch: r.Form.Batch, Rounds: r.Form.Rounds},
		)
		if err != nil {
			return nil, err
		}
		r.deleted = report
	}
	return r.deleted, nil
}

// costs describes a figure of a deletion, and returns its batches.
func (r *run) costs(
	ctx context.Context,
	f *Figure,
) (report *suites.FlowDeleteReport, last suites.FlowDeleteCost, err error) {
	if report, err = r.deletions(ctx); err != nil {
		return report, last, err
	}
	last = report.Results[len(report.Results)-1]
	f.Sizes = fmt.Sprintf(
		"%s to %s entries, batches of %s, %s",
		humanize.Grouped(report.Results[0].Installed),
		humanize.Grouped(last.Installed),
		humanize.Grouped(report.Batch),
		humanize.Of(report.Rounds, "round", "rounds"),
	)
	f.Scenario = map[string]any{
		"installed": r.Form.Installed,
		"batch":     report.Batch,
		"rounds":    report.Rounds,
		"seed":      report.Seed,
		"switch":    report.Switch,
	}
	return report, last, nil
}

func ms(i report.Interval) string {
	return fmt.Sprintf("%.1f ms (%.1f–%.1f)", i.Median, i.Low, i.High)
}

func looseOf(c suites.FlowDeleteCost) float64  { return c.Loose.Median }
func strictOf(c suites.FlowDeleteCost) float64 { return c.Strict.Median }

func (r *run) fig10(ctx context.Context, f *Figure) error {
	report, last, err := r.costs(ctx, f)
	if err != nil {
		return err
	}
	first := report.Results[0]
	growth := func(of func(suites.FlowDeleteCost) float64) (points [][2]float64) {
		for _, c := range report.Results {
			points = append(points, [2]float64{float64(c.Installed), of(c) / of(first)})
		}
		return points
	}
	loose, strict := looseOf(last)/looseOf(first), strictOf(last)/strictOf(first)
	f.Ran = fmt.Sprintf(
		"%s in a network namespace deleted %s entries, chosen at random from all installed ones, in one "+
			"transaction (docs/results/flow-delete.md): loosely, as NIMITZ did, and strictly, as pilaster does. "+
			"There is no traffic and no NIC.",
		report.Switch,
		humanize.Grouped(report.Batch),
	)
	f.Differs = fmt.Sprintf(
		"Loose deletions take %.1f times as long with %s entries as with %s, strict ones %.1f times. The paper's "+
			"factor of 28 is for 50,000 entries, and includes the NIC's driver, which reclaims offloaded entries "+
			"(§4.1): there is no NIC here.",
		loose,
		humanize.Grouped(last.Installed),
		humanize.Grouped(first.Installed),
		strict,
	)
	for _, c := range report.Results {
		f.Rows = append(
			f.Rows,
			Row{
				What: fmt.Sprintf("%s installed: loose; strict", humanize.Grouped(c.Installed)),
				Here: ms(c.Loose) + "; " + ms(c.Strict),
			},
		)
	}
	f.Rows = append(
		f.Rows,
		Row{
			fmt.Sprintf("growth to %s entries: loose; strict", humanize.Grouped(last.Installed)),
			fmt.Sprintf("%.1f ×; %.1f ×", loose, strict),
			"",
			"",
		},
		Row{"growth to 50,000 entries", "", "28 ×", "§4.1"},
	)
	f.Panels = []Panel{
		{
			Title: fmt.Sprintf("time relative to %s entries", humanize.Grouped(first.Installed)),
			X:     "entries installed",
			Y:     "times",
			Log:   true,
			Series: []Series{
				{Name: "loose", Of: ours, Points: growth(looseOf)},
				{Name: "strict", Of: ours, Points: growth(strictOf)},
				read("§4.1", "28 × at 50,000", [2]float64{deleteMost, deleteGrowth}),
			},
		},
	}
	return nil
}

func (r *run) fig11(ctx context.Context, f *Figure) error {
	report, last, err := r.costs(ctx, f)
	if err != nil {
		return err
	}
	// A complete deletion deletes batch after batch. Before each batch, the remaining entries are one of the measured
	// sizes.
	sum := func(of func(suites.FlowDeleteCost) float64) (points [][2]float64) {
		total := 0.0
		for _, c := range report.Results {
			total += of(c) / 1000
			points = append(points, [2]float64{float64(c.Installed), total})
		}
		return points
	}
	loose, strict := sum(looseOf), sum(strictOf)
	f.Ran = fmt.Sprintf(
		"This adds up the batches of figure 10: deleting n entries takes the time of a batch at n installed entries, "+
			"at %s fewer, and so on; each was measured with as many entries installed.",
		humanize.Grouped(report.Batch),
	)
	all := func(points [][2]float64) float64 { return points[len(points)-1][1] }
	f.Differs = fmt.Sprintf(
		"Deleting %s entries takes %.2f s loosely and %.2f s strictly. The text has no time for this figure, only "+
			"that the cluster had 50,000 containers. Deletions there also reclaim entries from a NIC (§4.1); "+
			"there is no NIC here.",
		humanize.Grouped(last.Installed),
		all(loose),
		all(strict),
	)
	for i, c := range report.Results {
		f.Rows = append(
			f.Rows,
			Row{
				What: fmt.Sprintf("%s entries, all deleted: loose; strict", humanize.Grouped(c.Installed)),
				Here: fmt.Sprintf("%.2f s; %.2f s", loose[i][1], strict[i][1]),
			},
		)
	}
	f.Rows = append(
		f.Rows,
		Row{
			"size of the cluster whose entries are deleted",
			humanize.Of(last.Installed, "entry", "entries"),
			"50k containers; the text has no time",
			"§4.1",
		},
	)
	least := min(strict[0][1], loose[0][1])
	f.Panels = []Panel{
		{Title: "time until all entries are deleted", X: "entries installed", Y: "s", Log: true, Series: []Series{
			{Name: "loose", Of: ours, Points: loose},
			{Name: "strict", Of: ours, Points: strict},
			marked(
				"§4.1",
				"50,000 containers",
				[2]float64{deleteMost, least},
				[2]float64{deleteMost, max(all(loose), all(strict))},
			),
		}},
	}
	return nil
}

// Figures of §7.1 for fig 16.
const (
	jobBNodes    = 6176
	paperFewest  = 12 // entries of a node on NETPILA
	paperLargest = 20
	services     = 16 // of a job; the text has no number
)

// job12To20 is the number of entries of a node on NETPILA, for both jobs.
func job12To20() [][2]float64 {
	return [][2]float64{
		{jobBNodes, paperFewest},
		{jobBNodes, paperLargest},
		{jobNodes, paperFewest},
		{jobNodes, paperLargest},
	}
}

func (r *run) fig16(ctx context.Context, f *Figure) error {
	offloaded, err := r.offloads(ctx)
	if err != nil {
		return err
	}
	onNimitz := map[string]*Series{}
	onNetpila := Series{Name: "NETPILA", Of: ours, Apart: true}
	var sizes, texts []string
	var options []any
	for _, j := range r.Form.Jobs {
		o := suites.EntriesOptions{
			Switches: r.Form.Switches,
			Nodes:    []int{2, j.Nodes},
			Density:  j.Containers,
			Services: services,
		}
		r.say("entries of a node's switch in a cluster of %s nodes", humanize.Grouped(j.Nodes))
		report, err := r.Measure.Entries(ctx, o)
		if err != nil {
			return fmt.Errorf("job %s on nimitz: %w", j.Name, err)
		}
		for _, s := range report.Samples {
			if !s.NodeCIDRs || s.Nodes != j.Nodes || s.Containers != j.Containers || s.Services != services {
				continue
			}
			of := onNimitz[s.Switch]
			if of == nil {
				of = &Series{Name: "NIMITZ, in " + s.Switch, Of: ours, Apart: true}
				onNimitz[s.Switch] = of
			}
			of.Points = append(of.Points, [2]float64{float64(j.Nodes), float64(s.Stages.All())})
			f.Rows = append(
				f.Rows,
				Row{
					What: fmt.Sprintf(
						"job %s on NIMITZ, read from %s: entries; of them, to other nodes",
						j.Name,
						s.Switch,
					),
					Here: fmt.Sprintf("%s; %s", humanize.Grouped(s.Stages.All()), humanize.Grouped(s.Stages.Remote)),
				},
			)
			if s.Switch == r.Form.Switches[0] {
				texts = append(
					texts,
					fmt.Sprintf(
						"of job %s's %s entries %s lead to other nodes and %s are of the node's own containers and "+
							"services",
						j.Name,
						humanize.Grouped(s.Stages.All()),
						humanize.Grouped(s.Stages.Remote),
						humanize.Grouped(s.Stages.All()-s.Stages.Remote),
					),
				)
			}
		}
		g, err := r.cluster(ctx, tenant.Netpila, j.Simulated, j.Containers)
		if err != nil {
			return err
		}
		_, most := g.entries()
		onNetpila.Points = append(onNetpila.Points, [2]float64{float64(g.event().Nodes), float64(most)})
		f.Rows = append(
			f.Rows,
			Row{
				fmt.Sprintf("job %s on NETPILA, %s simulated nodes", j.Name, humanize.Grouped(g.event().Nodes)),
				humanize.Grouped(most),
				"12–20",
				"§7.1",
			},
		)
		sizes = append(
			sizes,
			fmt.Sprintf(
				"job %s %s nodes with %s each on NIMITZ, %s on NETPILA",
				j.Name,
				humanize.Grouped(j.Nodes),
				humanize.Of(j.Containers, "container", "containers"),
				humanize.Grouped(g.event().Nodes),
			),
		)
		options = append(
			options,
			map[string]any{"job": j, "nodes": o.Nodes, "services": services, "switches": o.Switches},
			g.result.Scenario,
		)
	}
	f.Sizes, f.Scenario = strings.Join(
		sizes,
		"; ",
	), append(
		options,
		modelled(map[string]any{"everyNode": r.Form.JobStep}),
	)
	f.Rows = append(
		f.Rows,
		Row{
			"job A on NIMITZ, the model of figure 7: offloaded at the peak",
			humanize.Grouped(int(offloaded.Peak)),
			"~8k, of both jobs",
			"§7.1",
		},
		Row{"entries of a node's switch in a job on 8,076 nodes", "", "11,830", jobSections},
	)
	f.Ran = fmt.Sprintf(
		"NIMITZ's entries were read from a real switch of one node, with mappings of the other nodes "+
			"(docs/results/entries.md). NETPILA's were counted by the agents of a simulated cluster "+
			"(docs/reference/simulation.md). Offloaded entries are figure 7's model, with %s nodes of job A.",
		humanize.Grouped(len(offloaded.Counts)),
	)
	f.Differs = fmt.Sprintf(
		"Here %s. The text does not state containers and services of the paper's jobs, so containers were chosen such "+
			"that two pairs of entries for each match its 12 and 20, and %d services. NETPILA's entries here "+
			"are two for each container, one of the tenant and one of its key, of eBPF maps, not of a NIC's table.",
		strings.Join(texts, ", "),
		services,
	)
	var series []Series
	for _, name := range r.Form.Switches {
		if s := onNimitz[name]; s != nil {
			series = append(series, *s)
		}
	}
	f.Panels = []Panel{
		{Title: "entries of a node", X: "nodes of the job", Y: "entries", Log: true, Series: append(
			series,
			onNetpila,
			Series{
				Name:   "NIMITZ offloaded, model",
				Of:     ours,
				Apart:  true,
				Points: [][2]float64{{jobNodes, offloaded.Peak}},
			},
			read("§7.1", "~8k offloaded", [2]float64{jobBNodes, jobPeak}, [2]float64{jobNodes, jobPeak}),
			read("§7.1", "NETPILA 12–20", job12To20()...),
		)},
	}
	return nil
}
