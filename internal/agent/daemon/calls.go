package daemon

import (
	"net/netip"
	"slices"
	"sync"
)

// calls has the addresses at which the agent has called the orchestrator.
type calls struct {
	mu  sync.Mutex
	all []netip.Addr
	to  func(netip.Addr) // gets each; nil before tell
}

func (c *calls) note(a netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if slices.Contains(c.all, a) {
		return
	}
	if c.all = append(c.all, a); c.to != nil {
		c.to(a)
	}
}

// tell passes the addresses on, also those that come later.
func (c *calls) tell(to func(netip.Addr)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.to = to
	for _, a := range c.all {
		to(a)
	}
}
