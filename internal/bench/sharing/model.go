package sharing

import (
	"math"

	"pilaster.io/pilaster/internal/offload"
)

// Costs are the times in ns that the programs of one node take for a transaction.
type Costs struct {
	Unsplit  float64 `json:"unsplit"`  // of the containers' node, which also looks up the rules
	Backend  float64 `json:"backend"`  // of the containers' node, if frontends look up the rules
	Frontend float64 `json:"frontend"` // of a frontend, for a transaction that passes it
	Lookup   float64 `json:"lookup"`   // the part of Unsplit and Frontend that is the lookup of the rules
}

// lookupOnTheWay returns the time of a lookup in ns on the way of packets: what a frontend takes more than with the
// costs of another rule set, and the lookup there. Other work has evicted the tables from the CPU's caches by then, so
// it is at least alone, the time of lookups without other work.
func (c Costs) lookupOnTheWay(other Costs, alone float64) float64 {
	return max(alone, other.Lookup+c.Frontend-other.Frontend)
}

// Frontends are the numbers of frontends that an offload can have.
var Frontends = []int{1, 2, 4, 8}

// estimate returns the capacity model of these costs. The backend's part without the lookup counts as Forward.
func (c Costs) estimate() offload.Estimate {
	rest := c.Unsplit - c.Lookup
	return offload.Estimate{Times: offload.Times{
		Lookup: c.Lookup, Forward: rest, Backend: c.Backend - rest, Frontend: c.Frontend - c.Lookup,
	}}
}

// Gain is that of the capacity model with n frontends.
func (c Costs) Gain(n int) float64 { return c.estimate().Gain(n) }

// Limit is the gain with very many frontends, which the backend limits.
func (c Costs) Limit() float64 { return c.Unsplit / c.Backend }

// WithLookup returns the costs if the lookup took another time, in ns, and everything else the same.
func (c Costs) WithLookup(ns float64) Costs {
	more := ns - c.Lookup
	return Costs{Unsplit: c.Unsplit + more, Backend: c.Backend, Frontend: c.Frontend + more, Lookup: ns}
}

// LookupFor returns the shortest lookup, in ns, with which n frontends gain at least gain, and everything else costs
// the same. It is NaN if there is none.
func (c Costs) LookupFor(gain float64, n int) float64 {
	if lookup, is := c.estimate().LookupFor(gain, n); is {
		return lookup
	}
	return math.NaN()
}

// Capacity is how many tenants' rules fit on nodes, if each tenant has the same rules and nothing else is there.
type Capacity struct {
	Entries int `json:"entries"` // of the table that a tenant's rules fill most
	Room    int `json:"room"`    // entries of that table on each node
}

// Alone is how many fit on a node without frontends. A tenant may use at most half of what others leave.
func (c Capacity) Alone() int { return max(0, c.Room/c.Entries-1) }

// lent is how many fit on one frontend, which lends half of its rules.
func (c Capacity) lent() int { return c.Room / 2 / c.Entries }

// Spread is how many fit with n frontends if each offloaded tenant has one of them.
func (c Capacity) Spread(n int) int { return c.Alone() + n*c.lent() }

// Copied is how many fit with n frontends if each offloaded tenant has all of them: each has a copy of the rules.
func (c Capacity) Copied(n int) int {
	if n == 0 {
		return c.Alone()
	}
	return c.Alone() + c.lent()
}
