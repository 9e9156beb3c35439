package offload

import (
	"fmt"

	"pilaster.io/pilaster/internal/humanize"
)

// measured are times for a TCP connection of ten packets, in ns, from which a gain is estimated if a node has not
// measured its own: what `pilaster bench offload --quick` reported on a busy virtual machine with 2 CPUs (Linux 6.18,
// amd64), medians over the rule sets, rounded to 100 ns. Lookup depends on the rules: measuredLookups.
var measured = Times{
	Forward:  10_300, // with Session, which the benchmark does not report separately
	Backend:  800,
	Frontend: 10_600,
}

// measuredLookups are the times of a lookup for a new session, by the number of CIDRs in a tenant's policies: rules by
// label are a fixed number of hash lookups, only CIDRs need a trie. What evicts the tables from the CPU's caches
// meanwhile is included. The rule set is that of the benchmark.
var measuredLookups = []struct {
	blocks int // at least
	set    string
	ns     float64
}{
	{100_000, "wide", 10_800},
	{1000, "blocks-10000", 2600},
	{0, "labels-1000", 600},
}

// Modelled estimates the gain of n frontends for a tenant with a number of CIDRs in its policies, from times that were
// measured on another machine, and says so.
func Modelled(blocks, n int) (gain float64, text string) {
	times := Estimate{measured}
	for _, m := range measuredLookups {
		if blocks >= m.blocks {
			times.Lookup = m.ns
			gain = times.Gain(n)
			return gain, fmt.Sprintf("gain %.2f with %s: a model, from times measured on another machine for "+
				"rule set %s of `pilaster bench offload`, which is like this tenant's %s",
				gain, humanize.Of(n, "frontend", "frontends"), m.set, humanize.Of(blocks, "CIDR", "CIDRs"))
		}
	}
	return 0, ""
}
