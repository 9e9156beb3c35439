package nic

import (
	"context"
	"fmt"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// Numbers are the paper's figures with a model.
var Numbers = []int{7, 8, 12}

// Draw runs the model for these figures. Equal seeds give equal reports. A cancelled context ends it early.
func Draw(ctx context.Context, seed uint64, numbers ...int) (*Report, error) {
	r := &Report{Nature: Nature, Seed: seed, Parameters: Parameters()}
	for _, n := range numbers {
		draw := map[int]func(context.Context, uint64) (Figure, error){7: drawCounts, 8: drawPeak,
			12: drawFluctuation}[n]
		if draw == nil {
			return nil, fmt.Errorf("there is no model of figure %d; choose from %v", n, Numbers)
		}
		f, err := draw(ctx, seed)
		if ctx.Err() != nil {
			return nil, fmt.Errorf(
				"interrupted: %w; nothing was kept: only a complete run has a report",
				context.Cause(ctx),
			)
		}
		if err != nil {
			return nil, fmt.Errorf("figure %d: %w", n, err)
		}
		r.Figures = append(r.Figures, f)
	}
	return r, nil
}

func drawCounts(ctx context.Context, seed uint64) (Figure, error) {
	job, err := RunJob(ctx, seed, 1)
	if err != nil {
		return Figure{}, err
	}
	return Figure{
		Number: 7, Title: "entries of a node and how many are offloaded",
		About: fmt.Sprintf(
			"A job on %s nodes, each of which runs the model for 20 s. The number of peers of a node is fitted; the "+
				"peak follows, because a node has at most one megaflow for each other node of the job.",
			humanize.Grouped(jobNodes),
		),
		Findings: []Finding{
			{"entries of a node's switch", float64(job.Entries), "entries", "11,830", "given"},
			{"offloaded, mean over the nodes", job.Mean, "entries", "1.2K", "fitted"},
			{"offloaded, P95", job.P95, "entries", "3.3K", "fitted"},
			{"offloaded, peak", job.Peak, "entries", "8K", "follows"},
		},
		Plots: []plot.Plot{
			{Title: "entries by node", X: "% of the nodes, in ascending order", Y: "entries", Lines: []plot.Line{
				{
					Name:   "offloaded",
					Points: job.Curve(),
				}, {Name: "in the switch", Points: [][2]float64{{0, jobEntries}, {100, jobEntries}}},
			}},
		},
	}, nil
}

func drawPeak(ctx context.Context, seed uint64) (Figure, error) {
	j := ownJob()
	return j.draw(ctx, seed, j.rehearsed(fullDemand, seed), "the record of a rehearsal with another seed")
}

// DrawRecorded runs the model for figure 8 with preheating from a recorded matrix. If job is nil, the model's own job
// runs. Otherwise the job sends to the destinations of job's matrix.
func DrawRecorded(ctx context.Context, seed uint64, preheated Matrix, job *Matrix) (*Report, error) {
	j, from := ownJob(), "the record: "+preheated.Source
	if job != nil {
		j = recordedJob(*job, preheated, seed)
		from += ". The job has the destinations of another recording: " + job.Source
	}
	known, of := 0, map[Handle]bool{}
	for _, h := range j.to {
		of[h] = true
	}
	for _, h := range j.table.Pins(preheated) {
		if of[h] {
			known++
		}
	}
	if known == 0 {
		return nil, fmt.Errorf(
			"the matrix has %s, and the job sends to none of them: its first is %v of VNI %d; a record of a switch "+
				"needs --job with a second record",
			humanize.Of(len(preheated.Destinations), "destination", "destinations"),
			preheated.Destinations[0].To,
			preheated.Destinations[0].VNI,
		)
	}
	f, err := j.draw(ctx, seed, preheated, from)
	if ctx.Err() != nil {
		return nil, fmt.Errorf(
			"interrupted: %w; nothing was kept: only a complete run has a report", context.Cause(ctx))
	}
	f.Findings = append([]Finding{
		{"destinations of the matrix", float64(len(preheated.Destinations)), "megaflows", "", "given"},
		{"of them, destinations of the job", float64(known), "megaflows", "", "given"},
		{"destinations of the job", float64(len(j.to)), "megaflows", "", "given"},
	}, f.Findings...)
	return &Report{Nature: Nature, Seed: seed, Parameters: Parameters(), Figures: []Figure{f}}, err
}

// Rehearse returns the matrix recorded in a rehearsal of figure 8's job.
func Rehearse(seed uint64) Matrix { return ownJob().rehearsed(fullDemand, seed) }

const fullDemand = 1000 // new megaflows a second, the paper's peak

func (j peakJob) draw(ctx context.Context, seed uint64, preheated Matrix, from string) (Figure, error) {
	f := Figure{
		Number: 8, Title: "capacity of the insertion channel, and demand of a peak",
		About: fmt.Sprintf(
			"From %v to %v, or until it has sent to all of them, a container sends to new nodes at a fixed rate, "+
				"and continues with all. Preheating installs entries before %s and pins them.",
			peakBegin,
			peakEnd,
			from,
		),
		Plots: []plot.Plot{
			{Title: "megaflows that wait for the channel", X: "s", Y: "megaflows"},
			{Title: "throughput of the container", X: "s", Y: "Gbit/s"},
		},
	}
	for _, c := range []struct {
		demand    float64
		preheated bool
	}{{600, false}, {fullDemand, false}, {fullDemand, true}} {
		r, end := j.run(c.demand, seed), j.ends(c.demand, seed)
		name := humanize.Grouped(int(c.demand)) + "/s"
		if end < peakEnd {
			name += fmt.Sprintf(", %s in all", humanize.Grouped(len(j.to)))
		}
		if c.preheated {
			r.Pinned = j.table.Pins(preheated)
			name += ", preheated"
		}
		samples, err := r.Do(ctx)
		if err != nil {
			return f, err
		}
		p := peakOf(samples, end)
		paper := ""
		switch {
		case end < peakEnd: // not the paper's peak
		case c.preheated:
			paper = "no longer a bottleneck"
		case c.demand == fullDemand:
			paper = "638/s of 1,000/s: the channel is the bottleneck"
		}
		f.Findings = append(f.Findings,
			Finding{name + ": longest queue", float64(p.backlog), "megaflows", paper, "follows"},
			Finding{name + ": queue empty, after the peak's end", p.drained.Seconds(), "s", "", "follows"},
			Finding{name + ": lowest throughput", p.lowest, "Gbit/s", "", "follows"})
		f.Plots[0].Lines = append(
			f.Plots[0].Lines,
			line(name, samples, peakBegin, func(s Sample) float64 { return float64(s.Backlog) }),
		)
		f.Plots[1].Lines = append(
			f.Plots[1].Lines,
			line(name, samples, peakBegin, func(s Sample) float64 { return s.Rates[0] }),
		)
	}
	return f, nil
}

func drawFluctuation(ctx context.Context, seed uint64) (Figure, error) {
	f := Figure{
		Number: 12, Title: "throughput of two containers with revalidation",
		About: fmt.Sprintf(
			"An earlier job's entries age at %v, when container 2's job begins. Because their removal takes long, the "+
				"switch concludes that the NIC has too many entries, and removes those that seem idle. That includes "+
				"new entries, whose counters are late. They are installed again, and removed again. The evaluation "+
				"starts at %v; low means below 90 %% of %d Gbit/s. Each cure removes one cause.",
			newJobBegins,
			judgedFrom,
			containerMax,
		),
		Plots: []plot.Plot{
			{Title: "throughput, as in the paper", X: "s", Y: "Gbit/s"},
			{Title: "offloaded entries", X: "s", Y: "entries"},
			{Title: "throughput of container 2, with cures", X: "s", Y: "Gbit/s"},
		},
	}
	for _, c := range slices.Concat([]change{{"as in the paper", func(*Run, uint64) {}}}, cures(), []change{free}) {
		r := serverRun(seed)
		c.make(&r, seed)
		samples, err := r.Do(ctx)
		if err != nil {
			return f, err
		}
		rate := func(container int) func(Sample) float64 { return func(s Sample) float64 { return s.Rates[container] } }
		one, two := judge(r, samples, 0), judge(r, samples, 1)
		paper := ""
		if len(f.Findings) == 0 {
			paper = "it fluctuates"
			f.Findings = append(
				f.Findings,
				Finding{c.Name + ": container 1 is low", one.Below, "s", "stable", "follows"},
			)
			f.Plots[0].Lines = []plot.Line{
				line("container 1", samples, newJobBegins, rate(0)),
				line("container 2", samples, newJobBegins, rate(1)),
			}
		} else {
			f.Plots[2].Lines = append(f.Plots[2].Lines, line(c.Name, samples, newJobBegins, rate(1)))
		}
		f.Findings = append(f.Findings,
			Finding{c.Name + ": container 2 is low", two.Below, "s", paper, "follows"},
			Finding{c.Name + ": its lowest throughput", two.Lowest, "Gbit/s", "", "follows"},
			Finding{c.Name + ": entries removed", float64(two.Removed), "entries", "", "follows"},
			Finding{c.Name + ": of them in use", float64(two.Mistaken), "entries", "", "follows"})
		f.Plots[1].Lines = append(
			f.Plots[1].Lines,
			line(c.Name, samples, newJobBegins, func(s Sample) float64 { return float64(s.Offloaded) }),
		)
	}
	all, err := sensitivity(ctx, seed)
	f.Findings = append(f.Findings, all...)
	return f, err
}

// sensitivity runs the server with late counters and with the NIC's times for dumps and removals multiplied by 0.5, 1
// and 2. It also returns the worst result of these runs without counter delay.
func sensitivity(ctx context.Context, seed uint64) (all []Finding, err error) {
	var worst Fluctuation
	for _, dump := range []float64{0.5, 1, 2} {
		for _, remove := range []float64{0.5, 1, 2} {
			r := serverRun(seed)
			r.Spec.DumpEntry = time.Duration(dump * float64(r.Spec.DumpEntry))
			r.Spec.RemoveEntry = time.Duration(remove * float64(r.Spec.RemoveEntry))
			samples, err := r.Do(ctx)
			if err != nil {
				return nil, err
			}
			name, f := fmt.Sprintf(
				"dump of an entry in %v, removal in %v: ",
				r.Spec.DumpEntry,
				r.Spec.RemoveEntry,
			), judge(
				r,
				samples,
				1,
			)
			all = append(all, Finding{name + "container 2 is low", f.Below, "s", "", "follows"},
				Finding{name + "removed in use", float64(f.Mistaken), "entries", "", "follows"})
			r.Spec.CounterDelay = 0
			if samples, err = r.Do(ctx); err != nil {
				return nil, err
			}
			f = judge(r, samples, 1)
			worst = Fluctuation{Below: max(worst.Below, f.Below), Mistaken: max(worst.Mistaken, f.Mistaken)}
		}
	}
	return append(
		all,
		Finding{"the worst of these nine without delay: container 2 is low", worst.Below, "s", "", "follows"},
		Finding{
			"the worst of these nine without delay: removed in use",
			float64(worst.Mistaken),
			"entries",
			"",
			"follows",
		},
	), nil
}

// line returns means over half a second.
func line(name string, samples []Sample, from time.Duration, of func(Sample) float64) plot.Line {
	const bin = 5
	l := plot.Line{Name: name}
	for i := 0; i+bin <= len(samples); i += bin {
		if samples[i].At < from-bin*100*time.Millisecond {
			continue
		}
		sum := 0.0
		for _, s := range samples[i : i+bin] {
			sum += of(s)
		}
		l.Points = append(l.Points, [2]float64{samples[i].At.Seconds(), sum / bin})
	}
	return l
}
