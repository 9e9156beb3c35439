package sim

import (
	"context"
	"net/netip"
	"sync"

	"pilaster.io/pilaster/internal/network"
)

// gate keeps new nodes from being given subnets until all of them have listed those of the others.
type gate struct {
	mu   sync.Mutex
	left map[*node]bool
	open chan struct{}
}

func newGate(nodes []*node) *gate {
	g := &gate{left: map[*node]bool{}, open: make(chan struct{})}
	for _, n := range nodes {
		g.left[n] = true
	}
	return g
}

// listed notes that a node has.
func (g *gate) listed(n *node) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.left[n] {
		return
	}
	if delete(g.left, n); len(g.left) == 0 {
		close(g.open)
	}
}

// gated is the cluster as a node's network nimitz sees it, behind the gate where there is one.
type gated struct {
	network.Cluster
	world *world
}

func (c gated) NodeCIDRs(ctx context.Context, tenant string) ([]netip.Prefix, error) {
	if g := c.world.gate.Load(); g != nil {
		select {
		case <-g.open:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return c.Cluster.NodeCIDRs(ctx, tenant)
}
