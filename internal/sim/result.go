package sim

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"
)

// Result is the result of a run.
type Result struct {
	Scenario   Scenario       `json:"scenario"`
	Error      string         `json:"error,omitempty"` // why the run ended before its last event
	CPUs       int            `json:"cpus"`
	InMemory   bool           `json:"storeInMemory"` // etcd's files are on a tmpfs, so writes took no disk time
	Stages     []Stage        `json:"stages"`        // the set-up, then each event
	Entries    []Entries      `json:"entriesPerNode"`
	Addresses  string         `json:"addressesSum"` // digest of all addresses with their nodes, to compare runs
	PeakBytes  int64          `json:"peakResidentBytes"`
	Warnings   map[string]int `json:"agentWarnings,omitempty"`
	Violations []string       `json:"violations"` // violated invariants
	Exceeded   []string       `json:"exceeded"`   // exceeded limits of the scenario
	Real       []string       `json:"real"`
	NotReal    []string       `json:"notReal"`
}

// Pass reports whether all events were done, and all invariants and limits held.
func (r *Result) Pass() bool { return r.Error == "" && len(r.Violations)+len(r.Exceeded) == 0 }

// Stage is the cost of one event.
type Stage struct {
	Event      string       `json:"event"`
	Unfinished bool         `json:"unfinished,omitempty"` // the run ended during it; the figures cover what was done
	Nodes      int          `json:"nodes"`                // afterwards
	Containers int          `json:"containers"`           // afterwards
	About      int          `json:"about"`                // nodes that the event affected
	Acted      float64      `json:"actedSeconds"`
	Ready      float64      `json:"readySeconds"` // until every node followed the orchestrator again
	CPU        float64      `json:"cpuSeconds"`
	Counts     Counts       `json:"messages"`          // with heartbeats
	Total      Count        `json:"total"`             // without heartbeats
	Queries    *Queries     `json:"queries,omitempty"` // for mappings; nil if there were none
	Adds       Quantiles    `json:"addMilliseconds"`
	Policies   *Propagation `json:"policies,omitempty"`  // nil if no policy was changed
	Endpoints  *Propagation `json:"endpoints,omitempty"` // of services; nil if none was changed
	Retried    int64        `json:"addsRetried"`         // ADDs that the agent refused for the time being
	Heap       int64        `json:"heapBytes"`           // live, at the end of the event
	Stacks     int64        `json:"stackBytes"`          // of goroutines
	Goroutines int          `json:"goroutines"`
	Resident   int64        `json:"residentBytes"`
	Store      int64        `json:"storeBytes"`   // etcd's file
	Syncs      int64        `json:"syncs"`        // of etcd's write-ahead log
	Written    int64        `json:"filesWritten"` // by agents, to their in-memory disks
	Samples    []Sample     `json:"samples"`      // taken during the event
}

// Quantiles of durations, in milliseconds.
type Quantiles struct {
	N      int     `json:"n"`
	Median float64 `json:"median"`
	P99    float64 `json:"p99"`
	Max    float64 `json:"max"`
}

// Entries counts the entries of one table on the nodes.
type Entries struct {
	Table string  `json:"table"`
	Least int     `json:"least"`
	Mean  float64 `json:"mean"`
	Most  int     `json:"most"`
}

// title names the event for people.
func (s Stage) title() string {
	if s.Unfinished {
		return s.Event + " (unfinished)"
	}
	return s.Event
}

func (e Event) String() string {
	switch {
	case counted[e.Do]:
		return fmt.Sprintf("%s %v", e.Do, e.By)
	case e.PerSecond > 0:
		return fmt.Sprintf("%s %d times, %d a second", e.Do, e.Times, e.PerSecond)
	case e.Times > 0:
		return fmt.Sprintf("%s %d times", e.Do, e.Times)
	}
	return e.Do
}

// changes returns the result of the event's changes; nil if it had none.
func (s Stage) changes() *Propagation { return cmp.Or(s.Policies, s.Endpoints) }

// Text writes the result for people, with columns separated by tabs.
func (r *Result) Text(w io.Writer) {
	fmt.Fprintf(
		w,
		"scenario %s: network %s, seed %d, %d CPUs\n\n",
		r.Scenario.Name,
		r.Scenario.Network,
		r.Scenario.Seed,
		r.CPUs,
	)
	if r.InMemory {
		fmt.Fprint(
			w,
			"etcd's files are on a tmpfs, in memory: writes took no disk time; on a disk, changes take longer; "+
				"use --data-dir\n\n",
		)
	}
	if r.Error != "" {
		fmt.Fprintf(w, "%s; the figures below cover only the part that was done\n\n", r.Error)
	}
	fmt.Fprintln(w, "EVENT\tNODES\tCONTAINERS\tSECONDS\tREADY\tCPU\tMESSAGES\tBYTES\tADD P50\tP99\tMEMORY")
	for _, s := range r.Stages {
		fmt.Fprintf(
			w,
			"%s\t%d\t%d\t%.2f\t%.2f\t%.1f\t%d\t%d\t%s\t%s\t%d MiB\n",
			s.title(),
			s.Nodes,
			s.Containers,
			s.Acted,
			s.Ready,
			s.CPU,
			s.Total.Messages,
			s.Total.Bytes,
			s.Adds.text(s.Adds.Median),
			s.Adds.text(s.Adds.P99),
			s.Resident>>20,
		)
	}
	for _, s := range r.Stages {
		s.kinds(w)
	}
	r.tables(w)
	for _, what := range slices.Sorted(maps.Keys(r.Warnings)) {
		fmt.Fprintf(w, "\nagents warned %d times: %s\n", r.Warnings[what], what)
	}
	r.verdict(w)
}

// kinds writes the cost of an event by kind of message, if the event had any cost.
func (s Stage) kinds(w io.Writer) {
	if s.Queries == nil && len(s.Counts) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%s, by kind:\n", s.title())
	if q := s.Queries; q != nil {
		fmt.Fprintf(
			w,
			"  queries for mappings answered: %d (%d pages, %d for changes), %.0f a second; refused and retried: "+
				"%d\n",
			q.Pages+q.Changes,
			q.Pages,
			q.Changes,
			q.PerSecond,
			q.Refused,
		)
	}
	s.changes().text(w)
	for _, kind := range s.Counts.kinds() {
		fmt.Fprintf(w, "  %s\t%d\t%d bytes\n", kind, s.Counts[kind].Messages, s.Counts[kind].Bytes)
	}
}

// tables writes the tables of the scenario's network.
func (r *Result) tables(w io.Writer) {
	if len(r.Entries) == 0 {
		return
	}
	fmt.Fprintln(w, "\nTABLE\tLEAST\tMEAN\tMOST\tof a node")
	for _, e := range r.Entries {
		fmt.Fprintf(w, "%s\t%d\t%.1f\t%d\n", e.Table, e.Least, e.Mean, e.Most)
	}
}

// verdict writes the outcome as the last lines.
func (r *Result) verdict(w io.Writer) {
	fmt.Fprintln(w)
	for _, v := range r.Violations {
		fmt.Fprintln(w, "violated:", v)
	}
	for _, v := range r.Exceeded {
		fmt.Fprintln(w, "exceeded:", v)
	}
	switch {
	case r.Pass():
		fmt.Fprintln(w, "passed: all invariants and limits held")
	case r.Error != "" && len(r.Exceeded) == 0:
		fmt.Fprintln(w, "stopped early:", r.Error)
	}
}

// text formats one quantile, or a dash if there were no observations.
func (q Quantiles) text(of float64) string {
	if q.N == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f ms", of)
}

func seconds(d time.Duration) float64 { return float64(d.Milliseconds()) / 1000 }
