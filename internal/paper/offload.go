package paper

import (
	"context"
	"fmt"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/nic"
	"pilaster.io/pilaster/internal/plot"
)

// Figures of §3.3 for fig 7.
const (
	jobEntries  = 11_830
	jobMean     = 1200
	jobP95      = 3300
	jobPeak     = 8000
	jobNodes    = 8076
	jobSections = "§3.3"
)

// offloads simulates fig 7's job once for all figures.
func (r *run) offloads(ctx context.Context) (nic.Offloads, error) {
	if r.job == nil {
		r.say("the model of offloading, every %d. of %s nodes", r.Form.JobStep, humanize.Grouped(jobNodes))
		o, err := nic.RunJob(ctx, seed, r.Form.JobStep)
		if err != nil {
			return o, err
		}
		r.job = &o
	}
	return *r.job, nil
}

// modelled returns the parameters of a model's run.
func modelled(more map[string]any) map[string]any {
	more["seed"], more["parameters"] = seed, nic.Parameters()
	return more
}

func (r *run) fig7(ctx context.Context, f *Figure) error {
	o, err := r.offloads(ctx)
	if err != nil {
		return err
	}
	ran := len(o.Counts)
	f.Sizes = fmt.Sprintf("%s of the job's %s nodes", humanize.Grouped(ran), humanize.Grouped(o.Nodes))
	if ran == o.Nodes {
		f.Sizes = fmt.Sprintf("all %s nodes of the job", humanize.Grouped(ran))
	}
	f.Ran = fmt.Sprintf(
		"The model of pilaster bench nic (docs/results/nic.md), with no NIC and no packets, ran %s for 20 s each.",
		f.Sizes,
	)
	f.Differs = fmt.Sprintf(
		"That mean and P95 match shows nothing, because the number of a node's peers is fitted to the paper's. The "+
			"peak follows: a node can have one megaflow for each of the %s other nodes, and the busiest of the "+
			"simulated nodes had %s.",
		humanize.Grouped(o.Nodes-1),
		humanize.Grouped(int(o.Peak)),
	)
	f.Scenario = modelled(map[string]any{"everyNode": r.Form.JobStep})
	f.Rows = []Row{
		{"entries in a node's switch (given by the paper)", humanize.Grouped(o.Entries), "11,830", jobSections},
		{"offloaded, mean over the nodes (fitted)", humanize.Grouped(int(o.Mean)), "1.2k", jobSections},
		{"offloaded, P95 (fitted)", humanize.Grouped(int(o.P95)), "3.3k", jobSections},
		{"offloaded, peak (follows)", humanize.Grouped(int(o.Peak)), "8k", jobSections},
	}
	level := func(y float64) [][2]float64 { return [][2]float64{{0, y}, {100, y}} }
	f.Panels = []Panel{{
		Title: "entries by node", X: "% of the nodes, in ascending order", Y: "entries", Series: []Series{
			{Name: "offloaded", Of: ours, Points: o.Curve()},
			{Name: "mean offloaded", Of: ours, Points: level(o.Mean)},
			marked(jobSections, "mean 1.2k", level(jobMean)[0], level(jobMean)[1]),
			read(jobSections, "P95 3.3k", [2]float64{95, jobP95}),
			read(jobSections, "peak 8k", [2]float64{100, jobPeak}),
			marked(jobSections, "switch 11,830", level(jobEntries)[0], level(jobEntries)[1]),
		},
	}}
	return nil
}

// counterDelay is the maximum delay of the driver's counters (§4.2).
const counterDelay = 2 * time.Second

func (r *run) fig12(ctx context.Context, f *Figure) error {
	var at nic.Server
	var delays []float64
	var late []string
	low, removed := Series{Name: "container 2", Of: ours}, Series{Name: "removed in use", Of: ours}
	for _, delay := range r.Form.Delays {
		s, err := nic.RunServer(ctx, seed, delay)
		if err != nil {
			return err
		}
		if delay == counterDelay {
			at = s
		}
		two := s.Containers[1]
		delays, late = append(delays, delay.Seconds()), append(late, fmt.Sprint(delay.Seconds()))
		low.Points = append(low.Points, [2]float64{delay.Seconds(), two.Below})
		removed.Points = append(removed.Points, [2]float64{delay.Seconds(), float64(two.Mistaken)})
		f.Rows = append(
			f.Rows,
			Row{
				What: fmt.Sprintf("counters late by %v s: container 2 low; removed while in use", delay.Seconds()),
				Here: fmt.Sprintf("%.1f s; %s entries", two.Below, humanize.Grouped(two.Mistaken)),
			},
		)
	}
	one, two := at.Containers[0], at.Containers[1]
	f.Rows = append([]Row{
		{"counters late by 2 s: container 1 low", fmt.Sprintf("%.1f s", one.Below), "stable", "§4.2"},
		{"counters late by 2 s: container 2 low", fmt.Sprintf("%.1f s", two.Below), "fluctuates", "§4.2"},
		{
			"counters late by 2 s: lowest throughput of container 2",
			fmt.Sprintf("%.0f of %.0f Gbit/s", two.Lowest, at.Most),
			"",
			"",
		},
	}, f.Rows...)
	f.Sizes = fmt.Sprintf(
		"one server and a new job on 12,000 nodes (§4.2); counters late by %s s",
		strings.Join(late, ", "),
	)
	f.Ran = fmt.Sprintf(
		"The model of pilaster bench nic (docs/results/nic.md), with no NIC and no packets, simulated a server whose "+
			"container 2 begins a new job at 30 s, with counters late by none to %v s; low is below 90 %% of %.0f "+
			"Gbit/s, from 40 s to 120 s.",
		delays[len(delays)-1],
		at.Most,
	)
	f.Differs = "The text has no throughput for this figure, only that one container fluctuates and the other does " +
		"not, and that counters are late by up to 2 s. The times of the model's dumps and removals were chosen so " +
		"that the effect shows (docs/results/nic.md); depth and duration of container 2's falls follow " +
		"from that choice."
	f.Scenario = modelled(map[string]any{"countersLateSeconds": delays})
	top := func(s Series) (most float64) {
		for _, p := range s.Points {
			most = max(most, p[1])
		}
		return max(most, 1)
	}
	line := func(l plot.Line) Series { return Series{Name: l.Name, Of: ours, Points: l.Points} }
	until := func(s Series) Series {
		return marked(
			"§4.2",
			"late by up to 2 s",
			[2]float64{counterDelay.Seconds(), 0},
			[2]float64{counterDelay.Seconds(), top(s)},
		)
	}
	f.Panels = []Panel{
		{
			Title:  "throughput with counters late by 2 s",
			X:      "s",
			Y:      "Gbit/s",
			Series: []Series{line(at.Lines[0]), line(at.Lines[1])},
		},
		{
			Title:  "time for which container 2 is low",
			X:      "s that counters are late",
			Y:      "s",
			Series: []Series{low, until(low)},
		},
		{
			Title:  "entries removed while in use",
			X:      "s that counters are late",
			Y:      "entries",
			Series: []Series{removed, until(removed)},
		},
	}
	return nil
}
