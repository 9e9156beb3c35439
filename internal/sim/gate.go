package sim

import (
	"context"
	"net/netip"
	"sync"

	"pilaster.io/pilaster/internal/network"
)

// gate delays the allocation of subnets to new nodes until all of them have listed those of the others. Only nodes with
// a place run; a node that waits at the gate has none.
type gate struct {
	places chan struct{}
	open   chan struct{}

	mu   sync.Mutex
	left int                     // that have not listed
	done map[*node]chan struct{} // closed when a node has
}

func newGate(nodes []*node, atOnce int) *gate {
	g := &gate{
		places: make(chan struct{}, atOnce),
		open:   make(chan struct{}),
		left:   len(nodes),
		done:   map[*node]chan struct{}{},
	}
	for _, n := range nodes {
		g.done[n] = make(chan struct{})
	}
	return g
}

// listed records that a node has listed, and reports whether it is the first time.
func (g *gate) listed(n *node) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	done := g.done[n]
	if done == nil || closed(done) {
		return false
	}
	close(done)
	if g.left--; g.left == 0 {
		close(g.open)
	}
	return true
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (g *gate) enter(ctx context.Context) error {
	select {
	case g.places <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *gate) leave() { <-g.places }

// pass waits until the gate is open. A node releases its place when it has listed, and takes one again afterwards, also
// after an interrupt.
func (g *gate) pass(ctx context.Context, n *node) error {
	done := g.done[n]
	if done == nil || closed(g.open) {
		return nil
	}
	select {
	case <-done:
		g.leave()
	case <-ctx.Done():
		return ctx.Err()
	}
	var err error
	select {
	case <-g.open:
	case <-ctx.Done():
		err = ctx.Err()
	}
	g.places <- struct{}{}
	return err
}

// gated is the cluster as a node's network nimitz sees it, behind the gate where there is one.
type gated struct {
	network.Cluster
	world *world
	node  *node
}

func (c gated) NodeCIDRs(ctx context.Context, tenant string) ([]netip.Prefix, error) {
	if g := c.world.gate.Load(); g != nil {
		if err := g.pass(ctx, c.node); err != nil {
			return nil, err
		}
	}
	return c.Cluster.NodeCIDRs(ctx, tenant)
}
