package bench

import (
	"fmt"
	"io"
	"time"

	"pilaster.io/pilaster/internal/humanize"
)

// ScaleReport is what `pilaster bench scale` found. All times are of the program alone, in ns a packet, medians
// with 95 % intervals.
type ScaleReport struct {
	Started time.Time   `json:"started"`
	Seconds float64     `json:"seconds"`
	Machine Machine     `json:"machine"`
	Rounds  int         `json:"rounds"`
	Packets int         `json:"packets"` // a round
	CPU     int         `json:"cpu"`
	Seed    uint64      `json:"seed"`
	Slots   int         `json:"slots"` // of the flow cache, on each CPU
	Hooks   []HookCost  `json:"hooks"`
	Sprays  []SprayCost `json:"sprays"`
}

// HookCost is of one hook of a node.
type HookCost struct {
	Hook      string      `json:"hook"`
	Endpoints int         `json:"endpoints"`
	Tenants   int         `json:"tenants"`
	Miss      Interval    `json:"miss"` // one peer, and the cache void before every packet
	Peers     []PeersCost `json:"peers"`
}

// PeersCost is with packets of that many peers in random order.
type PeersCost struct {
	Peers       int      `json:"peers"`
	Missed      float64  `json:"missed"` // part of the packets that find nothing in the cache, by calculation
	Nanoseconds Interval `json:"ns"`
}

// SprayCost is what one container's spraying costs the flows of others at the container hook.
type SprayCost struct {
	Endpoints int      `json:"endpoints"`
	Keys      int      `json:"keys"`    // pairs of valid address and path that it has; 0: made-up addresses, all dropped
	Evicted   float64  `json:"evicted"` // part of the others' slots it takes by sending one packet of each, by calculation
	Alone     Interval `json:"alone"`   // the flows, when it sends as much to one peer
	Beside    Interval `json:"beside"`  // the flows, when it sprays between every two packets of each
	Own       Interval `json:"own"`     // what it spends itself, for a packet
}

// Table writes the results for a person; columns are separated by tabs.
func (r *ScaleReport) Table(w io.Writer) {
	fmt.Fprintf(
		w,
		"programs alone, ns a packet: median (95 %%); %d rounds of %d packets on CPU %d, Linux %s\n",
		r.Rounds,
		r.Packets,
		r.CPU,
		r.Machine.Kernel,
	)
	hook := ""
	for _, h := range r.Hooks {
		if title := fmt.Sprint(h.Hook, h.Endpoints); title != hook {
			hook = title
			fmt.Fprintf(
				w,
				"\n%s, %s, %s\n  peers\tns\tnot in the cache\n",
				h.Hook,
				humanize.Of(h.Endpoints, "endpoint", "endpoints"),
				humanize.Of(h.Tenants, "tenant", "tenants"),
			)
		}
		for _, p := range h.Peers {
			fmt.Fprintf(w, "  %s\t%s\t%.0f %%\n", humanize.Grouped(p.Peers), spread(p.Nanoseconds), 100*p.Missed)
		}
		fmt.Fprintf(w, "  1, cache void\t%s\t100 %%\n", spread(h.Miss))
	}
	fmt.Fprintf(
		w,
		"\na container sprays once over all it knows between every two packets of %d flows of others\n",
		victimFlows,
	)
	fmt.Fprint(
		w,
		"  endpoints\tkeys of the sprayer\tbeside one that does not\tbeside it\tslots taken\tthe sprayer's own\n",
	)
	for _, s := range r.Sprays {
		keys := humanize.Grouped(s.Keys)
		if s.Keys == 0 {
			keys = "made up, dropped"
		}
		fmt.Fprintf(
			w,
			"  %s\t%s\t%s\t%s\t%.0f %%\t%s\n",
			humanize.Grouped(s.Endpoints),
			keys,
			spread(s.Alone),
			spread(s.Beside),
			100*s.Evicted,
			spread(s.Own),
		)
	}
}

func spread(i Interval) string { return fmt.Sprintf("%.0f (%.0f–%.0f)", i.Median, i.Low, i.High) }
