package offload

import "math"

// Times are the run times of programs in nanoseconds, summed over the packets of one connection that is set up, used
// and closed, or over another unit that all fields share. They come from the kernel's statistics of BPF programs.
type Times struct {
	Lookup   float64 // finding the rules and the pre-actions of a new session; at the frontend if split
	Session  float64 // finding, beginning and updating the session; at the backend either way
	Forward  float64 // everything else that the backend does either way: parse, route, deliver
	Backend  float64 // what splitting adds at the backend: NSH removed, checked, and written for the other direction
	Frontend float64 // what splitting costs at the frontend without the lookup: decapsulation, NSH, sending
}

// Estimate is a capacity model, not a measurement: gain(n) = T_unsplit / max(T_BE, T_FE / n). It is the ratio of
// the connection rates at which the first node is out of CPU, with rules at n frontends and without. It assumes that
// all nodes have as much CPU for packets, that frontends do nothing else, that packets are spread evenly, and that
// neither links nor memory limit the rate. So it is an upper bound.
type Estimate struct{ Times }

// Unsplit is the backend's time with its rules.
func (e Estimate) Unsplit() float64 { return e.Forward + e.Session + e.Lookup }

// AtBackend is the backend's time with the rules at frontends.
func (e Estimate) AtBackend() float64 { return e.Forward + e.Session + e.Backend }

// AtFrontends is the sum of the frontends' times.
func (e Estimate) AtFrontends() float64 { return e.Frontend + e.Lookup }

// Gain is the factor for n frontends; below 1 is a loss. It is 0 without times or frontends.
func (e Estimate) Gain(n int) float64 {
	if n < 1 {
		return 0
	}
	limit := max(e.AtBackend(), e.AtFrontends()/float64(n))
	if limit <= 0 {
		return 0
	}
	return e.Unsplit() / limit
}

// Moved is the part of the backend's time, 0..1, that n frontends take from it; 0 if they add more than they take.
func (e Estimate) Moved() float64 {
	if e.Unsplit() <= 0 {
		return 0
	}
	return max(0, 1-e.AtBackend()/e.Unsplit())
}

// LookupFor returns the shortest lookup, in nanoseconds, with which the gain of n frontends is at least gain, all other
// times as they are. It returns false if there is none: with long lookups the gain approaches n.
//
// Solved in closed form: the gain is the smaller of unsplit/T_BE and n·unsplit/T_FE, both functions of the lookup.
func (e Estimate) LookupFor(gain float64, n int) (float64, bool) {
	if n < 1 || gain <= 0 || e.AtBackend() <= 0 {
		return 0, false
	}
	rest, members := e.Forward+e.Session, float64(n)
	shortest := max(0, gain*e.AtBackend()-rest) // the backend's bound
	longest := math.Inf(1)
	switch bound := gain*e.Frontend - members*rest; { // the frontends': (n - gain) · lookup >= bound
	case members > gain:
		shortest = max(shortest, bound/(members-gain))
	case members < gain:
		longest = bound / (members - gain)
	case bound > 0:
		return 0, false
	}
	return shortest, shortest <= longest
}
