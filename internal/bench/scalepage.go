package bench

import (
	"fmt"
	"io"
	"time"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// scaleNames is the room for names of bars.
const scaleNames = 270

// Page writes the report as one HTML file that needs no other.
func (r *ScaleReport) Page(w io.Writer) error {
	var sections []plot.Section
	for i, h := range r.Hooks {
		if first := r.costs(h.Hook); first[0] == &r.Hooks[i] {
			sections = append(sections, hookSection(h.Hook, first))
		}
	}
	sections = append(sections, r.spraySection())
	return pageTemplates.ExecuteTemplate(w, "scalepage.html", struct {
		*ScaleReport
		When     string
		Sections []plot.Section
	}{r, r.Started.Format(time.RFC3339), sections})
}

// costs are those of one hook, by endpoints.
func (r *ScaleReport) costs(hook string) (all []*HookCost) {
	for i := range r.Hooks {
		if r.Hooks[i].Hook == hook {
			all = append(all, &r.Hooks[i])
		}
	}
	return all
}

// hookSection has what is to be compared beneath each other: the same peers at more and more endpoints.
func hookSection(hook string, costs []*HookCost) plot.Section {
	s := plot.Section{
		Title: hook,
		About: "A packet's cost by peers, for each number of endpoints of the node: it is to be the same at any. With more peers than slots, packets find nothing in the cache.",
		Head:  []string{"peers", "endpoints", "tenants", "ns", "not in the cache"},
	}
	var bars []plot.Bar
	add := func(peers string, h *HookCost, class string, ns Interval, missed float64) {
		bars = append(bars, plot.Bar{
			Name: fmt.Sprintf(
				"%s · %s",
				peers,
				humanize.Of(h.Endpoints, "endpoint", "endpoints"),
			), Class: class, Figure: fmt.Sprintf("%.0f ns", ns.Median), At: plot.Span(ns),
		})
		s.Rows = append(
			s.Rows,
			[]string{
				peers,
				humanize.Grouped(h.Endpoints),
				humanize.Grouped(h.Tenants),
				spread(ns),
				fmt.Sprintf("%.0f %%", 100*missed),
			},
		)
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
	s.Bars = plot.NewBars(hook+" by peers and endpoints", "ns a packet", scaleNames, false, bars)
	return s
}

func (r *ScaleReport) spraySection() plot.Section {
	s := plot.Section{
		Title: "beside a container that sprays",
		About: fmt.Sprintf(
			"What a packet of %d flows takes beside a container that sends once over all it knows between every two packets of each, and beside one that sends as much to one peer.",
			victimFlows,
		),
		Head: []string{
			"endpoints",
			"keys of the sprayer",
			"beside one that does not",
			"beside it",
			"slots taken",
			"the sprayer's own",
		},
	}
	var bars []plot.Bar
	for _, c := range r.Sprays {
		keys := "made-up addresses"
		if c.Keys > 0 {
			keys = humanize.Of(c.Keys, "key", "keys")
		}
		name := fmt.Sprintf("%s · %s", keys, humanize.Of(c.Endpoints, "endpoint", "endpoints"))
		bars = append(
			bars,
			plot.Bar{
				Name:   name,
				Class:  "ours",
				Figure: fmt.Sprintf("%.0f ns beside it", c.Beside.Median),
				At:     plot.Span(c.Beside),
			},
			plot.Bar{
				Name:   "without",
				Class:  "theirs",
				Figure: fmt.Sprintf("%.0f ns", c.Alone.Median),
				At:     plot.Span(c.Alone),
			},
		)
		s.Rows = append(
			s.Rows,
			[]string{
				humanize.Grouped(c.Endpoints),
				keys,
				spread(c.Alone),
				spread(c.Beside),
				fmt.Sprintf("%.0f %%", 100*c.Evicted),
				spread(c.Own),
			},
		)
	}
	s.Bars = plot.NewBars("flows beside a sprayer", "ns a packet", scaleNames, false, bars)
	return s
}
