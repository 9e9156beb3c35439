package sim

import (
	"fmt"
	"io"
	"time"
)

// Result is what a run came to.
type Result struct {
	Scenario   Scenario       `json:"scenario"`
	CPUs       int            `json:"cpus"`
	InMemory   bool           `json:"storeInMemory"` // etcd's files are on a tmpfs: its waits for a disk took no time
	Stages     []Stage        `json:"stages"`        // setting it up, then each event
	Entries    []Entries      `json:"entriesPerNode"`
	Addresses  string         `json:"addressesSum"` // the same where every address is on the same node
	PeakBytes  int64          `json:"peakResidentBytes"`
	Warnings   map[string]int `json:"agentWarnings,omitempty"`
	Violations []string       `json:"violations"` // of what always holds
	Exceeded   []string       `json:"exceeded"`   // limits of the scenario
	Real       []string       `json:"real"`
	NotReal    []string       `json:"notReal"`
}

// Pass tells whether all held that always must, within the scenario's limits.
func (r *Result) Pass() bool { return len(r.Violations)+len(r.Exceeded) == 0 }

// Stage is one event and what it cost.
type Stage struct {
	Event      string    `json:"event"`
	Nodes      int       `json:"nodes"`      // afterwards
	Containers int       `json:"containers"` // afterwards
	About      int       `json:"about"`      // nodes that it was about
	Acted      float64   `json:"actedSeconds"`
	Ready      float64   `json:"readySeconds"` // until every node follows the orchestrator, too
	CPU        float64   `json:"cpuSeconds"`
	Counts     Counts    `json:"messages"`          // with heartbeats
	Total      Count     `json:"total"`             // without
	Queries    *Queries  `json:"queries,omitempty"` // for mappings; nil where there were none
	Adds       Quantiles `json:"addMilliseconds"`
	Retried    int64     `json:"addsRetried"` // refused for the moment, and asked for again
	Heap       int64     `json:"heapBytes"`   // live, at its end
	Stacks     int64     `json:"stackBytes"`  // of goroutines
	Goroutines int       `json:"goroutines"`
	Resident   int64     `json:"residentBytes"`
	Store      int64     `json:"storeBytes"`   // etcd's file
	Syncs      int64     `json:"syncs"`        // of etcd's log
	Written    int64     `json:"filesWritten"` // by agents, to their disks in memory
	Samples    []Sample  `json:"samples"`      // of the time that it took
}

// Quantiles of durations, in milliseconds.
type Quantiles struct {
	N      int     `json:"n"`
	Median float64 `json:"median"`
	P99    float64 `json:"p99"`
}

// Entries is how many of a table nodes have.
type Entries struct {
	Table string  `json:"table"`
	Least int     `json:"least"`
	Mean  float64 `json:"mean"`
	Most  int     `json:"most"`
}

func (e Event) String() string {
	if counted[e.Do] {
		return fmt.Sprintf("%s %v", e.Do, e.By)
	}
	return e.Do
}

// Text writes the result for people, with columns separated by tabs.
func (r *Result) Text(w io.Writer) {
	fmt.Fprintf(w, "scenario %s: network %s, seed %d, %d CPUs\n\n", r.Scenario.Name, r.Scenario.Network, r.Scenario.Seed, r.CPUs)
	if r.InMemory {
		fmt.Fprint(w, "etcd's files are on a tmpfs, in memory: it never waited for a disk, and with one changes take longer; use --data-dir\n\n")
	}
	fmt.Fprintln(w, "EVENT\tNODES\tCONTAINERS\tSECONDS\tREADY\tCPU\tMESSAGES\tBYTES\tADD P50\tP99\tMEMORY")
	for _, s := range r.Stages {
		fmt.Fprintf(w, "%s\t%d\t%d\t%.2f\t%.2f\t%.1f\t%d\t%d\t%.2f ms\t%.2f ms\t%d MiB\n", s.Event, s.Nodes, s.Containers, s.Acted, s.Ready, s.CPU,
			s.Total.Messages, s.Total.Bytes, s.Adds.Median, s.Adds.P99, s.Resident>>20)
	}
	for _, s := range r.Stages {
		fmt.Fprintf(w, "\n%s, by kind:\n", s.Event)
		if q := s.Queries; q != nil {
			fmt.Fprintf(w, "  queries for mappings answered: %d (%d pages, %d for changes), %.0f a second; refused and asked again: %d\n", q.Pages+q.Changes, q.Pages, q.Changes, q.PerSecond, q.Refused)
		}
		for _, kind := range s.Counts.kinds() {
			fmt.Fprintf(w, "  %s\t%d\t%d bytes\n", kind, s.Counts[kind].Messages, s.Counts[kind].Bytes)
		}
	}
	fmt.Fprintln(w, "\nTABLE\tLEAST\tMEAN\tMOST\tof a node")
	for _, e := range r.Entries {
		fmt.Fprintf(w, "%s\t%d\t%.1f\t%d\n", e.Table, e.Least, e.Mean, e.Most)
	}
	for what, n := range r.Warnings {
		fmt.Fprintf(w, "\nagents warned %d times: %s\n", n, what)
	}
	for _, v := range r.Violations {
		fmt.Fprintln(w, "\nviolated:", v)
	}
	for _, v := range r.Exceeded {
		fmt.Fprintln(w, "\nexceeded:", v)
	}
}

func seconds(d time.Duration) float64 { return float64(d.Milliseconds()) / 1000 }
