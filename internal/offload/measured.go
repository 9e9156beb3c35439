package offload

import (
	"fmt"

	"pilaster.io/pilaster/internal/humanize"
)

// measured are times for a TCP connection of ten packets, in ns, from which a gain is estimated if a node has not
// measured its own: what two runs of `pilaster bench offload --quick` reported on a busy virtual machine with 2 CPUs
// (Linux 6.18, amd64), medians over the rule sets, rounded to 100 ns. Lookup depends on the rules: measuredLookups.
var measured = Times{
	Forward:  9100, // with Session, which the benchmark does not report separately
	Backend:  0,    // the messages cost what the tunnel's program and the parsing did
	Frontend: 8600,
}

// measuredLookups are the times of a lookup for a new session, by the number of CIDRs in a tenant's policies: rules by
// label are a fixed number of hash lookups, only CIDRs need a trie. What evicts the tables from the CPU's caches
// meanwhile is included. The rule set is that of the benchmark.
var measuredLookups = []struct {
	blocks int // at least
	set    string
	ns     float64
}{
	{100_000, "wide", 20_000},
	{1000, "blocks-10000", 1000},
	{0, "labels-1000", 500},
}

// Model is an estimate for a tenant from times that were measured on another machine.
type Model struct {
	Estimate
	set    string // the rule set of the benchmark that is like the tenant's
	blocks int
}

// Modelled returns the model for a tenant with a number of CIDRs in its policies.
func Modelled(blocks int) Model {
	m := Model{Estimate{measured}, "", blocks}
	for _, like := range measuredLookups {
		if blocks >= like.blocks {
			m.Lookup, m.set = like.ns, like.set
			break
		}
	}
	return m
}

// Text says what the gain of n frontends is, and what that is based on.
func (m Model) Text(n int) string {
	return fmt.Sprintf("gain %.2f with %s: a model, from times measured on another machine for rule set %s of "+
		"`pilaster bench offload`, which is like this tenant's %s", m.Gain(n), humanize.Of(n, "frontend", "frontends"),
		m.set, humanize.Of(m.blocks, "CIDR", "CIDRs"))
}
