package nic

import (
	"fmt"
	"io"
	"math"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/plot"
)

// Nature is the first sentence of every report.
const Nature = "A model, not a measurement: no NIC, no driver and no packet took part. The figures follow from the " +
	"assumptions that are listed with them."

// Report is the result of `pilaster bench nic`.
type Report struct {
	Nature     string      `json:"nature"`
	Seed       uint64      `json:"seed"`
	Figures    []Figure    `json:"figures"`
	Parameters []Parameter `json:"parameters"`
}

// Figure is the model's counterpart of a figure of the paper.
type Figure struct {
	Number   int         `json:"number"`
	Title    string      `json:"title"`
	About    string      `json:"about"`
	Findings []Finding   `json:"findings"`
	Plots    []plot.Plot `json:"plots"`
}

// Finding is a value of the model, with the paper's value if there is one.
type Finding struct {
	What  string  `json:"what"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	Paper string  `json:"paper,omitempty"`
	Kind  string  `json:"kind"` // given by the paper; fitted to its figure; or following from given, fitted and assumed values
}

// Parameter is an assumption of the model.
type Parameter struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Origin string `json:"origin"` // paper, fitted, chosen or assumed
	Why    string `json:"why"`
}

// Parameters returns all parameters.
func Parameters() []Parameter {
	s, p := Production(), ProductionPolicy()
	mu, sigma := logNormal(jobMean, jobP95)
	return []Parameter{
		{
			"insertion channel",
			fmt.Sprintf("%.0f entries/s", s.InsertRate),
			"paper",
			"§3.3. Dumps and removals do not slow it down",
		},
		{
			"line rate, software",
			fmt.Sprintf("%.0f, %.1f Gbit/s", s.Line, s.Software),
			"paper",
			"§3.3, 8 cores. All flows in software share it, each node's alike",
		},
		{
			"delay of counters",
			fmt.Sprint(s.CounterDelay),
			"paper",
			"§4.2, at most. The driver repeatedly reads all counters, and each pass takes half of it; new entries " +
				"show zero for one to two passes",
		},
		{
			"slope of removals",
			fmt.Sprintf("×(1 + %.3f for every 1,000 entries)", s.RemoveSlope),
			"fitted",
			"to §4.1: a batch of 2,000 takes 28 times as long from 50,000 as from the last 2,000",
		},
		{
			"a removal from an empty NIC",
			fmt.Sprint(s.RemoveEntry),
			"chosen",
			"so that fig 12's effect shows; that figure's table varies it by factors of a half and two",
		},
		{
			"a dump's time for an entry",
			fmt.Sprint(s.DumpEntry),
			"chosen",
			"the same; fig 7's 8,000 entries stay below the threshold",
		},
		{
			"revalidation",
			fmt.Sprintf("every %v, idle after %v", p.Period, p.Idle),
			"assumed",
			"Open vSwitch's defaults (max-revalidator, max-idle)",
		},
		{
			"its threshold",
			fmt.Sprint(p.Threshold),
			"assumed",
			"a round that takes longer, removals included, makes the next one remove entries whose counter is zero, " +
				"and idle ones after " + fmt.Sprint(
				p.Pressed,
			) + " (§4.2 names no times)",
		},
		{
			"room, flow groups",
			fmt.Sprintf(
				"%s entries; %d groups of %d at line rate",
				humanize.Grouped(s.Capacity),
				s.FreeGroups,
				s.GroupSize,
			),
			"assumed",
			"§4.2 has no figures. Beyond that, the rate falls with the number of groups",
		},
		{
			"peers of a node of fig 7",
			fmt.Sprintf(
				"log-normal, median %.0f, σ %.2f, at most %s",
				math.Exp(mu),
				sigma,
				humanize.Grouped(jobNodes-1),
			),
			"fitted",
			"to mean 1,200 and P95 3,300; there is one megaflow for each other node. To each peer, 4 s of traffic, " +
				"then a pause of 2 s on average",
		},
		{
			"entries of fig 7",
			fmt.Sprintf("%s: %s nodes, rest: services", humanize.Grouped(jobEntries), humanize.Grouped(jobNodes-1)),
			"assumed",
			"§3.3 does not describe the rest; the model never offloads it",
		},
		{
			"server of fig 12",
			fmt.Sprintf(
				"container 1: %s steady peers; container 2: %s, with each %.0f of every %.0f s",
				humanize.Grouped(steadyPeers),
				humanize.Grouped(newJobPeers),
				turnBusy.Seconds(),
				turn.Seconds(),
			),
			"chosen",
			fmt.Sprintf(
				"so that the effect shows. An earlier job's %s entries age as container 2's job, on %s nodes (§4.2), "+
					"begins",
				humanize.Grouped(oldJobPeers),
				humanize.Grouped(newJobNodes),
			),
		},
	}
}

// Table writes the report for a terminal; columns are separated by tabs.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(w, "%s Seed %d.\n", r.Nature, r.Seed)
	for _, f := range r.Figures {
		fmt.Fprintf(w, "\nfigure %d by the model: %s\n  what\tmodel\tpaper\tkind\n", f.Number, f.Title)
		for _, x := range f.Findings {
			fmt.Fprintf(w, "  %s\t%s\t%s\t%s\n", x.What, x.Text(), x.Paper, x.Kind)
		}
	}
	fmt.Fprint(w, "\nparameters of the model\n  name\tvalue\torigin\n")
	for _, p := range r.Parameters {
		fmt.Fprintf(w, "  %s\t%s\t%s\n", p.Name, p.Value, p.Origin)
	}
}

// Text formats a finding's value for people.
func (f Finding) Text() string {
	if whole := int(math.Round(f.Value)); f.Unit != "s" {
		return humanize.Grouped(whole) + " " + f.Unit
	}
	return fmt.Sprintf("%.1f s", f.Value)
}
