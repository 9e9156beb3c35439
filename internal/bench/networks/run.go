package networks

import (
	"context"
	"fmt"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/bench/traffic"
)

// Options configure a run.
type Options struct {
	Form     string
	Networks []Network
	Missing  []Missing // rows that this machine does not support
	Speed    bench.Options
	// Containers start on the second of two real nodes, and Events is how often another one starts, moves and stops.
	Containers, Events int
	Look               time.Duration // between two readings of counters that must be equal
	Sizes              []Size        // of simulated clusters
	Name               string        // of labs
	Binary             string        // path of pilaster; pilaster-cni must be in the same folder
	Progress           func(string)
}

func (o Options) step(what string) { o.Progress(what) }

// Smoke takes about 15 seconds and shows that everything works.
func Smoke() Options {
	o := options("smoke", bench.Options{
		Rounds: 2, Warmup: 5 * time.Millisecond, Window: 30 * time.Millisecond,
	}, "TCP_RR")
	o.Networks = slices.DeleteFunc(o.Networks, func(n Network) bool { return !n.Smoke })
	o.Containers, o.Events, o.Look = 2, 1, 100*time.Millisecond
	o.Sizes = []Size{{Nodes: 4, Containers: 2}}
	for i := range o.Networks { // one large cluster shows that simulations work
		if o.Networks[i].Name != "ila" {
			o.Networks[i].Clusters = nil
		}
	}
	return o
}

// Quick takes about six minutes.
func Quick() Options {
	o := options("quick", bench.Options{
		TooWide: 0.20, Rounds: 20, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	}, "TCP_RR", "UDP_RR", "TCP_CRR", "UDP_PPS", "TCP_STREAM")
	o.Containers, o.Events, o.Look = 10, 5, 300*time.Millisecond
	o.Sizes = []Size{{Nodes: 100, Containers: 10}}
	return o
}

// Full takes about half an hour.
func Full() Options {
	o := options("full", bench.Options{
		TooWide: 0.10, Rounds: 40, Warmup: 20 * time.Millisecond, Window: 80 * time.Millisecond,
	}, "TCP_RR", "UDP_RR", "TCP_CRR", "UDP_PPS", "TCP_STREAM", "TCP_STREAM4", "FIRST_RTT")
	o.Containers, o.Events, o.Look = 10, 9, 300*time.Millisecond
	o.Sizes = []Size{{Nodes: 1000, Containers: 80, Followers: 8}, {Nodes: 1000, Containers: 1}}
	return o
}

func options(form string, speed bench.Options, metrics ...string) Options {
	o := Options{Form: form, Speed: speed}
	o.Networks = All()
	o.Speed.Form = form
	o.Speed.Metrics, _ = scenario.Pick(traffic.Metrics(), metrics)
	return o
}

// Run measures all rows.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	started := time.Now()
	defer func() { err = scenario.Interrupted(ctx, err) }()
	r := &Report{Form: o.Form, Missing: o.Missing, Rows: Names(o.Networks), Pass: true}
	o.Speed.After = func(ctx context.Context, s scenario.Scenario, w *scenario.Wire, p scenario.Pair) error {
		i := slices.IndexFunc(o.Networks, func(n Network) bool { return n.Scenario == s.Name })
		wire, err := measureWire(ctx, o.Networks[i], w, p)
		if err != nil {
			return fmt.Errorf("packets on the wire: %w", err)
		}
		r.Wires = append(r.Wires, wire)
		o.step("packets: " + o.Networks[i].Name)
		return nil
	}
	if r.Speed, err = bench.Run(ctx, o.Speed); err != nil {
		return nil, err
	}
	for _, group := range groups(o.Networks) {
		some, err := o.measureNodes(ctx, group[0].Nodes, group)
		if err != nil {
			return nil, fmt.Errorf("two nodes: %w", err)
		}
		r.Nodes = append(r.Nodes, some...)
	}
	for _, n := range o.Networks {
		for _, c := range n.Clusters {
			for _, size := range o.sizes(c) {
				s, err := o.simulate(ctx, n, c, size)
				if err != nil {
					return nil, fmt.Errorf("simulated cluster, %s: %w", c.Name, err)
				}
				r.Simulated = append(r.Simulated, s)
				r.Pass = r.Pass && s.Pass
			}
		}
	}
	for _, n := range o.Networks {
		r.Designs = append(r.Designs, Row{n.Name, n.Design})
	}
	r.Header = report.NewHeader(started)
	return r, nil
}

// sizes are the sizes in which a cluster is simulated: one, if all of its nodes can follow the orchestrator at the
// largest size.
func (o Options) sizes(c Cluster) []Size {
	if c.PerNode == 0 {
		return o.Sizes[:1]
	}
	return o.Sizes
}

// groups returns the rows with agents of ours, by equal agents.
func groups(all []Network) (groups [][]Network) {
	for _, n := range all {
		if n.Tenant == nil {
			continue
		}
		i := slices.IndexFunc(groups, func(g []Network) bool { return g[0].Nodes == n.Nodes })
		if i < 0 {
			groups = append(groups, nil)
			i = len(groups) - 1
		}
		groups[i] = append(groups[i], n)
	}
	return groups
}
