package sim

import (
	"context"
	"net/netip"
	"sync"

	"pilaster.io/pilaster/internal/network"
)

// gate delays the subnet allocation of new nodes until all new nodes have listed the mappings of the others. Only a
// node with a slot runs; a node that waits at the gate releases its slot.
type gate struct {
	slots chan struct{}
	open  chan struct{}

	mu   sync.Mutex
	left int                     // nodes that have not listed yet
	done map[*node]chan struct{} // the channel is closed when its node has listed
}

func newGate(nodes []*node, atOnce int) *gate {
	g := &gate{
		slots: make(chan struct{}, atOnce),
		open:  make(chan struct{}),
		left:  len(nodes),
		done:  map[*node]chan struct{}{},
	}
	for _, n := range nodes {
		g.done[n] = make(chan struct{})
	}
	return g
}

// listed records that a node has listed its mappings, and reports whether this was its first list.
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
	case g.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *gate) leave() { <-g.slots }

// pass waits until the gate is open. A node that has listed releases its slot while it waits and takes a slot again
// afterwards, also after an interrupt.
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
	g.slots <- struct{}{}
	return err
}

// gated is the cluster interface of a node's network, behind the gate if there is one.
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
