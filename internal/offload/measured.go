package offload

import (
	"fmt"

	"pilaster.io/pilaster/internal/humanize"
)

// measured are times for a TCP connection of ten packets, in ns, from which a gain is estimated: those of
// docs/results/offload.md (an idle virtual machine with 2 CPUs, Linux 6.18, amd64), rounded to 100 ns. Lookup depends
// on the rules: measuredLookups.
var measured = Times{
	Forward:  8700, // with Session, which the benchmark does not report separately
	Backend:  -600, // messages cost less than the parsing and routing that the frontend does
	Frontend: 8800,
}

// measuredLookups are the times of a lookup for a new session, by the number of CIDRs in a tenant's policies: rules by
// label are a fixed number of hash lookups, only CIDRs need a trie. What evicts the tables from the CPU's caches
// meanwhile is included. The rule set is that of the benchmark.
var measuredLookups = []struct {
	blocks int // at least
	ns     float64
}{
	{100_000, 15_900}, // wide
	{1000, 500},       // blocks-10000
	{0, 400},          // labels-1000
}

// Model is an estimate for a tenant from times that were measured on another machine.
type Model struct {
	Estimate
	blocks int
}

// Modelled returns the model for a tenant with a number of CIDRs in its policies.
func Modelled(blocks int) Model {
	m := Model{Estimate{measured}, blocks}
	for _, like := range measuredLookups {
		if blocks >= like.blocks {
			m.Lookup = like.ns
			break
		}
	}
	return m
}

// Text says in two lines what the gain of n frontends is, and what that is based on.
func (m Model) Text(n int) string {
	return fmt.Sprintf("gain %.2f with %s (a model, from times of another machine)\ncounted: %s in the policies",
		m.Gain(n), humanize.Of(n, "frontend", "frontends"), humanize.Of(m.blocks, "CIDR", "CIDRs"))
}
