package sharing

import (
	"errors"
	"fmt"
	"slices"

	"pilaster.io/pilaster/internal/bench/report"
)

const nature = "a model: measured times of programs for a TCP_CRR transaction, of which gains are computed; all " +
	"nodes are namespaces of one machine"

// Report is the result of `pilaster bench offload`. Times are in ns.
type Report struct {
	Nature string `json:"nature"`
	report.Header
	Transactions int    `json:"transactions"` // of a sample
	Answered     int    `json:"answered"`     // of a sample
	Rounds       int    `json:"rounds"`
	Clients      int    `json:"clients"` // addresses
	CPU          int    `json:"cpu"`
	Seed         uint64 `json:"seed"`
	// What the kernel's run-time statistics say of an empty program, in ns; it is subtracted from each run.
	EmptyProgram float64 `json:"emptyProgram"`
	// Transactions per second with run-time statistics, relative to those without.
	Slowdown     report.Interval `json:"speedWithStatistics"`
	SessionBytes float64         `json:"sessionBytes"` // memory of a session
	Sets         []Set           `json:"sets"`
	Answers      []Answer        `json:"answers"`
}

// Set has the figures of a rule set.
type Set struct {
	Name     string            `json:"name"`
	Rules    int               `json:"rules"`   // or CIDRs in each direction
	Entries  int               `json:"entries"` // of the table that the rules fill most
	Bytes    int64             `json:"bytes"`   // of memory, in all tables of rules
	Lookup   report.Interval   `json:"lookup"`  // alone, with tables in the CPU's caches
	Programs []Program         `json:"programs"`
	Nodes    []NodeCost        `json:"nodes"`
	Speeds   []report.Interval `json:"speeds"` // transactions per second without statistics: without a frontend, with one
	Costs    Costs             `json:"costs"`
	Gains    []Gain            `json:"gains"` // modelled
}

// Program is a program on the way of a transaction. Programs that it calls count for it.
type Program struct {
	Split       bool            `json:"split"` // with a frontend
	Node        string          `json:"node"`
	Program     string          `json:"program"`
	Runs        float64         `json:"runs"` // in a transaction
	Ns          report.Interval `json:"ns"`   // of a run
	Transaction report.Interval `json:"nsOfTransaction"`
}

// NodeCost is the time of all programs of a node for a transaction.
type NodeCost struct {
	Split       bool            `json:"split"`
	Node        string          `json:"node"`
	Transaction report.Interval `json:"nsOfTransaction"`
}

// Gain is the modelled gain with a number of frontends.
type Gain struct {
	Frontends int             `json:"frontends"`
	Gain      report.Interval `json:"gain"`
}

// Answer is the time of a frontend's program for an answer.
type Answer struct {
	Rules int             `json:"rules"`
	Bytes int             `json:"bytes"` // of the packet, from its Ethernet header
	Ns    report.Interval `json:"ns"`
}

func (s *Set) cost(split bool, node int) float64 {
	for _, n := range s.Nodes {
		if n.Split == split && n.Node == nodeNames[node] {
			return n.Transaction.Median
		}
	}
	return 0
}

// entry is the program of packets from containers.
const entry = "pil_nimitz"

// passed lists the programs that packets pass on a node. pil_uplink_in calls pil_offload_in at the backend, and
// pil_tunnel_in calls pil_offload_out at a frontend.
var passed = map[bool][nodes][]string{
	false: {
		sender:  {entry, "pil_tunnel_in", "pil_uplink_in", "pil_uplink_out"},
		backend: {entry, "pil_tunnel_in", "pil_uplink_in", "pil_uplink_out"},
	},
	true: {
		sender:   {entry, "pil_tunnel_in", "pil_uplink_in", "pil_uplink_out"},
		backend:  {entry, "pil_uplink_in", "pil_uplink_out"},
		frontend: {"pil_tunnel_in", "pil_uplink_in", "pil_uplink_out"},
	},
}

// complete returns an error if a figure is missing.
func (r *Report) complete(o Options) error {
	var errs []error
	missing := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("not measured: "+format, args...))
	}
	if len(r.Sets) != 4 {
		missing("%d of 4 rule sets", 4-len(r.Sets))
	}
	for _, s := range r.Sets {
		for split, all := range passed {
			for node, programs := range all {
				var ran []string
				for _, p := range s.Programs {
					if p.Split == split && p.Node == nodeNames[node] {
						ran = append(ran, p.Program)
						if p.Ns.Median <= 0 {
							missing("rule set %s, frontend %v: %s of the %s", s.Name, split, p.Program, p.Node)
						}
					}
				}
				for _, p := range programs {
					if !slices.Contains(ran, p) {
						missing("rule set %s, frontend %v: %s of the %s, which ran %v", s.Name, split, p,
							nodeNames[node], ran)
					}
				}
			}
		}
		if s.Lookup.Median <= 0 || s.Entries <= 0 || s.Bytes <= 0 || len(s.Speeds) != 2 ||
			len(s.Gains) != len(Frontends) {
			missing("rule set %s: %+v", s.Name, s)
		}
	}
	if want := len(o.AnswerRules) * len(o.AnswerBytes); len(r.Answers) != want {
		missing("%d of %d answers", want-len(r.Answers), want)
	}
	for _, a := range r.Answers {
		if a.Ns.Median <= 0 {
			missing("answers under %d rules to packets of %d bytes", a.Rules, a.Bytes)
		}
	}
	if r.EmptyProgram <= 0 || r.Slowdown.Median <= 0 || r.SessionBytes <= 0 {
		missing("overhead of statistics, or sessions")
	}
	return errors.Join(errs...)
}
