package orchestrator

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/nodeprobe"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

const (
	silentEvery  = time.Second
	silentAfter  = 5 * time.Second // without a session, before a node can be marked: agents restart in less
	silentWrites = 32              // at the same time; the store puts them into few transactions
	witnesses    = 5               // connected nodes that are probed, too
)

// silentNodes looks for dead nodes, and marks them in the store, so that their endpoints of services get no new
// connections. A node is dead if its agent has had no session at any orchestrator for a while, and its kernel answers
// no probes while those of connected nodes do. It removes the mark of a node whose agent has a session. Several
// orchestrators may do so at the same time.
type silentNodes struct {
	store  *store.Store
	cache  *cache.Cache
	log    *slog.Logger
	prober *nodeprobe.Prober
	usable func(netip.Addr) (usable, known bool)

	since     map[string]time.Time // by node: without a session
	witnesses map[string]bool      // they stay as long as they are connected: a new one has not answered yet
	tooMany   bool                 // most nodes are silent, so none is marked
}

// startSilentNodes starts it. An orchestrator that must not open sockets for probes works without.
func (s *Server) startSilentNodes() {
	p, err := nodeprobe.New(s.config.Log)
	if err != nil {
		s.config.Log.Warn("dead nodes will not be noticed: their endpoints of services get connections until the node "+
			"is deleted", "error", err)
		return
	}
	n := &silentNodes{
		store: s.store, cache: s.cache, log: s.config.Log, prober: p, usable: p.Usable,
		since: map[string]time.Time{}, witnesses: map[string]bool{},
	}
	s.running.Go(func() { p.Run(s.background, func() {}) })
	s.running.Go(func() { n.run(s.background) })
}

func (n *silentNodes) run(ctx context.Context) {
	tick := time.NewTicker(silentEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		r := n.cache.Reachability()
		probed, dead := n.judge(time.Now(), r, ownAddresses())
		n.prober.Watch(probed)
		var writes errgroup.Group
		writes.SetLimit(silentWrites)
		for _, node := range dead {
			writes.Go(func() error { n.set(ctx, node, true); return nil })
		}
		for _, node := range r.Returned {
			writes.Go(func() error { n.set(ctx, node, false); return nil })
		}
		writes.Wait()
	}
}

// judge returns the addresses to probe, and the nodes that are dead. own are addresses of this machine, whose answers
// say nothing about its network.
func (n *silentNodes) judge(
	now time.Time, r cache.Reachability, own map[netip.Addr]bool,
) (probed map[netip.Addr]bool, dead []string) {
	probed = map[netip.Addr]bool{}
	since, chosen := map[string]time.Time{}, map[string]bool{}
	witness := func(node *pilasterv1.Node) {
		if a := nodeprobe.Address(node); a.IsValid() && !own[a] && len(chosen) < witnesses {
			chosen[node.Name], probed[a] = true, true
		}
	}
	for _, node := range r.Connected {
		if n.witnesses[node.Name] {
			witness(node)
		}
	}
	for _, node := range r.Connected {
		witness(node)
	}
	for _, node := range r.Suspects {
		if since[node.Name] = now; !n.since[node.Name].IsZero() {
			since[node.Name] = n.since[node.Name]
		}
		a := nodeprobe.Address(node)
		probed[a] = true
		if usable, known := n.usable(a); known && !usable && now.Sub(since[node.Name]) >= silentAfter {
			dead = append(dead, node.Name)
		}
	}
	n.since, n.witnesses = since, chosen
	tooMany := 2*(len(dead)+len(r.Marked)) > r.Nodes
	if tooMany && len(dead) > 0 && !n.tooMany {
		n.log.Warn("more than half of the nodes with endpoints of services do not answer: the fault may be this "+
			"machine's, so none is marked", "silent", len(dead), "marked", len(r.Marked), "nodes", r.Nodes)
	}
	if n.tooMany = tooMany && len(dead) > 0; n.tooMany {
		dead = nil
	}
	return probed, dead
}

// set marks a node, or removes its mark, unless its session has changed meanwhile.
func (n *silentNodes) set(ctx context.Context, node string, dead bool) {
	ctx, cancel := context.WithTimeout(ctx, admission.CallTimeout)
	defer cancel()
	changed, err := n.store.SetUnreachable(ctx, node, dead)
	switch {
	case err != nil:
		n.log.Warn("marking a node as dead, or not, failed; retrying", "node", node, "dead", dead, "error", err)
	case changed && dead:
		n.log.Warn("a node does not answer; its endpoints of services get no new connections until its agent connects",
			"node", node)
	case changed:
		n.log.Info("a node is connected again; its endpoints of services get connections", "node", node)
	}
}
