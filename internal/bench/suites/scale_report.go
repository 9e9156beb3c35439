package suites

import (
	"fmt"
	"io"

	"pilaster.io/pilaster/internal/bench/report"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// ScaleReport is the result of `pilaster bench scale`. All times are medians with 95 % intervals, in ns per packet, of
// the program alone.
type ScaleReport struct {
	report.Header
	Rounds  int         `json:"rounds"`
	Packets int         `json:"packets"` // per round
	CPU     int         `json:"cpu"`
	Seed    uint64      `json:"seed"`
	Slots   int         `json:"slots"` // slots of the flow cache of each CPU
	Hooks   []HookCost  `json:"hooks"`
	Sprays  []SprayCost `json:"sprays"`
}

// HookCost is the cost at one hook of a node.
type HookCost struct {
	Hook      string          `json:"hook"`
	Endpoints int             `json:"endpoints"`
	Tenants   int             `json:"tenants"`
	Miss      report.Interval `json:"miss"` // one peer, and the cache is invalidated before every packet
	Peers     []PeersCost     `json:"peers"`
}

// PeersCost is the cost of packets of Peers peers in random order.
type PeersCost struct {
	Peers       int             `json:"peers"`
	Missed      float64         `json:"missed"` // calculated share of packets that miss the cache
	Nanoseconds report.Interval `json:"ns"`
}

// SprayCost has the cost of flows at the container hook with and without another container, the sprayer, that sends
// packets to many addresses.
type SprayCost struct {
	Endpoints int             `json:"endpoints"`
	Keys      int             `json:"keys"`    // pairs of valid address and path that the sprayer uses; 0: random addresses, whose packets are all dropped
	Evicted   float64         `json:"evicted"` // calculated share of the others' slots that one packet of each key evicts
	Alone     report.Interval `json:"alone"`   // of the flows, while the sprayer sends the same number of packets to one peer
	Beside    report.Interval `json:"beside"`  // of the flows, while the sprayer sends to all keys between every two packets of a flow
	Own       report.Interval `json:"own"`     // of a packet of the sprayer
}

var sprayHead = []string{
	"endpoints", "keys of the sprayer", "beside one that does not", "beside it", "slots taken", "the sprayer's own",
}

func (s SprayCost) cells(keys string) []string {
	return []string{
		humanize.Grouped(
			s.Endpoints,
		), keys, report.Spread(s.Alone), report.Spread(s.Beside), report.Percent(s.Evicted), report.Spread(s.Own),
	}
}

// Table writes the results for a terminal; columns are separated by tabs.
func (r *ScaleReport) Table(w io.Writer) {
	fmt.Fprintf(w, "programs alone, ns a packet: median (95 %%); %d rounds of %d packets on CPU %d, Linux %s\n",
		r.Rounds, r.Packets, r.CPU, r.Machine.Kernel)
	for _, h := range r.Hooks {
		fmt.Fprintf(w, "\n%s, %s, %s\n", h.Hook,
			humanize.Of(h.Endpoints, "endpoint", "endpoints"), humanize.Of(h.Tenants, "tenant", "tenants"))
		t := &plot.Table{Head: []string{"peers", "ns", "not in the cache"}}
		for _, p := range h.Peers {
			t.Rows = append(
				t.Rows,
				[]string{humanize.Grouped(p.Peers), report.Spread(p.Nanoseconds), report.Percent(p.Missed)},
			)
		}
		t.Rows = append(t.Rows, []string{"1, cache void", report.Spread(h.Miss), report.Percent(1)})
		t.Text(w, "  ")
	}
	fmt.Fprintf(
		w,
		"\na container sprays once over all its keys between every two packets of %d flows of others\n",
		victimFlows,
	)
	t := &plot.Table{Head: sprayHead}
	for _, s := range r.Sprays {
		keys := humanize.Grouped(s.Keys)
		if s.Keys == 0 {
			keys = "made up, dropped"
		}
		t.Rows = append(t.Rows, s.cells(keys))
	}
	t.Text(w, "  ")
}

// Page writes the report as one HTML file.
func (r *ScaleReport) Page(w io.Writer) error {
	var sections []plot.Section
	for i, h := range r.Hooks {
		if all := r.costs(h.Hook); all[0] == &r.Hooks[i] {
			sections = append(sections, hookSection(h.Hook, all))
		}
	}
	return r.WritePage(w, plot.Page{
		Title:   "what a packet costs as a node grows",
		Heading: "What a packet costs as a node grows",
		Notes: []plot.Note{
			{
				Class: "what",
				Lead:  "Programs alone,",
				Text: "run by the kernel over packets as data: no device, no wire. " +
					"Compare lines of one run; times differ between machines.",
			},
			{Text: fmt.Sprintf("%d rounds of %d packets on CPU %d. %s The flow cache has %d slots on each CPU.",
				r.Rounds, r.Packets, r.CPU, report.BarNote, r.Slots)},
		},
		Sections: append(sections, r.spraySection()),
	}, "docs/results/scale.md explains them.")
}

// costs returns the costs at one hook, by endpoints.
func (r *ScaleReport) costs(hook string) (all []*HookCost) {
	for i := range r.Hooks {
		if r.Hooks[i].Hook == hook {
			all = append(all, &r.Hooks[i])
		}
	}
	return all
}

// hookSection orders the bars by peers, and those with equal peers by endpoints, so that they can be compared.
func hookSection(hook string, costs []*HookCost) plot.Section {
	t := &plot.Table{Head: []string{"peers", "endpoints", "tenants", "ns", "not in the cache"}}
	var bars []plot.Bar
	add := func(peers string, h *HookCost, class string, ns report.Interval, missed float64) {
		bars = append(bars, plot.Bar{
			Name:  fmt.Sprintf("%s · %s", peers, humanize.Of(h.Endpoints, "endpoint", "endpoints")),
			Class: class, Figure: fmt.Sprintf("%.0f ns", ns.Median), At: plot.Span(ns),
		})
		t.Rows = append(t.Rows, []string{
			peers, humanize.Grouped(h.Endpoints), humanize.Grouped(h.Tenants), report.Spread(ns),
			report.Percent(missed),
		})
	}
	for i := range costs[0].Peers {
		for _, h := range costs {
			p := h.Peers[i]
			add(humanize.Of(p.Peers, "peer", "peers"), h, "ours", p.Nanoseconds, p.Missed)
		}
	}
	for _, h := range costs {
		add("cache void", h, "theirs", h.Miss, 1)
	}
	return plot.Section{
		Title: hook,
		Notes: []plot.Note{{Text: "The cost of a packet by peers, for each number of endpoints of the node. " +
			"It should not depend on the endpoints. With more peers than slots, packets miss the cache."}},
		Bars:  plot.NewBars(hook+" by peers and endpoints", "ns a packet", report.NameWidth, false, bars),
		Table: t,
	}
}

func (r *ScaleReport) spraySection() plot.Section {
	t := &plot.Table{Head: sprayHead}
	var bars []plot.Bar
	for _, c := range r.Sprays {
		keys := "made-up addresses"
		if c.Keys > 0 {
			keys = humanize.Of(c.Keys, "key", "keys")
		}
		bars = append(bars,
			plot.Bar{
				Name:  fmt.Sprintf("%s · %s", keys, humanize.Of(c.Endpoints, "endpoint", "endpoints")),
				Class: "ours", Figure: fmt.Sprintf("%.0f ns beside it", c.Beside.Median), At: plot.Span(c.Beside),
			},
			plot.Bar{
				Name: "without", Class: "theirs", Figure: fmt.Sprintf("%.0f ns", c.Alone.Median),
				At: plot.Span(c.Alone),
			})
		t.Rows = append(t.Rows, c.cells(keys))
	}
	return plot.Section{
		Title: "beside a container that sprays",
		Notes: []plot.Note{
			{Text: fmt.Sprintf("The cost of a packet of %d flows beside a container that sends once over all "+
				"its keys between every two packets of each flow, and beside one that sends as much to one "+
				"peer.", victimFlows)},
		},
		Bars:  plot.NewBars("flows beside a sprayer", "ns a packet", report.NameWidth, false, bars),
		Table: t,
	}
}
