package orchestrator

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/nodeprobe"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/probe"
	"pilaster.io/pilaster/internal/tenant"
)

// silentEvery is how often nodes without a session are looked for.
const silentEvery = time.Second

// silentNodes looks for dead nodes, and marks their endpoints of services: they get no new connections. A node is dead
// if its agent has no session at any orchestrator, and its kernel answers no probes while that of another node does.
// Its agent removes the marks when it reports its endpoints again. Several orchestrators may do so at the same time.
type silentNodes struct {
	store  *store.Store
	cache  *cache.Cache
	log    *slog.Logger
	prober *nodeprobe.Prober
	more   chan struct{} // more nodes are probed
}

// startSilentNodes starts it. An orchestrator that must not open sockets for probes works without.
func (s *Server) startSilentNodes() {
	p, err := nodeprobe.New(s.config.Log)
	if err != nil {
		s.config.Log.Warn("dead nodes will not be noticed: their endpoints of services get connections until the node "+
			"is deleted", "error", err)
		return
	}
	n := &silentNodes{s.store, s.cache, s.config.Log, p, make(chan struct{}, 1)}
	s.running.Go(p.Run)
	s.running.Go(func() {
		defer p.Close()
		probe.Rounds(s.background, n.more, func() time.Duration {
			_, next := p.Round()
			return next
		})
	})
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
		suspects, witnesses := n.cache.Suspects()
		probed := map[netip.Addr]bool{}
		for _, w := range witnesses {
			if a, err := netip.ParsePrefix(w.Prefix); err == nil {
				probed[tenant.NodeAddress(a)] = true
			}
		}
		for _, s := range suspects {
			prefix, err := netip.ParsePrefix(s.Node.Prefix)
			if err != nil {
				continue
			}
			a := tenant.NodeAddress(prefix)
			probed[a] = true
			if usable, known := n.prober.Usable(a); known && !usable {
				n.mark(ctx, s)
			}
		}
		if n.prober.Watch(probed) {
			select {
			case n.more <- struct{}{}:
			default:
			}
		}
	}
}

// mark marks the endpoints of a node, unless its agent has connected meanwhile.
func (n *silentNodes) mark(ctx context.Context, s cache.Suspect) {
	ctx, cancel := context.WithTimeout(ctx, admission.CallTimeout)
	defer cancel()
	marked, err := n.store.MarkUnreachable(ctx, s.Node.Name, s.Slices)
	switch {
	case err != nil:
		n.log.Warn("marking the endpoints of a dead node failed; retrying", "node", s.Node.Name, "error", err)
	case marked > 0:
		n.log.Warn("a node does not answer; its endpoints of services get no new connections until its agent connects",
			"node", s.Node.Name, "slices", marked)
	}
}
