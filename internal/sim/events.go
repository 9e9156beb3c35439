package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// step is an event of a scenario with the numbers of its nodes.
type step struct {
	Event
	nodes []int
	setUp bool
}

// plan chooses the nodes of each event by the seed alone, so that the choice does not depend on timing.
func (s Scenario) plan() (steps []step) {
	random := rand.New(rand.NewPCG(s.Seed, 0))
	var there []int
	made := 0
	grow := func(by int) (fresh []int) {
		for range by {
			made++
			fresh = append(fresh, made)
		}
		there = append(there, fresh...)
		return fresh
	}
	grow(s.Nodes)
	for _, e := range s.Events {
		var chosen []int
		if e.Do == Grow {
			chosen = grow(e.By.of(len(there)))
		} else if counted[e.Do] {
			for _, i := range random.Perm(len(there))[:e.By.of(len(there))] {
				chosen = append(chosen, there[i])
			}
			slices.Sort(chosen)
		}
		if e.Do == Shrink {
			there = slices.DeleteFunc(
				there,
				func(n int) bool { _, gone := slices.BinarySearch(chosen, n); return gone },
			)
		}
		steps = append(steps, step{Event: e, nodes: chosen})
	}
	return steps
}

// keeps returns the nodes whose agents restart in a later step.
func keeps(steps []step) map[int]bool {
	all := map[int]bool{}
	for _, s := range steps {
		if s.Do == Crash {
			for _, n := range s.nodes {
				all[n] = true
			}
		}
	}
	return all
}

// play executes an event. It returns when the event is done, the querying nodes have queried, and every node follows
// the orchestrator.
func (w *world) play(ctx context.Context, s step) error {
	var nodes []*node
	if s.Do == Grow {
		nodes = w.join(len(s.nodes))
	} else {
		nodes = w.numbered(s.nodes)
	}
	w.progress.begin(s.String(), len(nodes))
	var err error
	var since time.Time // zero time: streams from before the event are valid too
	switch s.Do {
	case Grow:
		start := w.start
		if s.ListFirst {
			start = w.startListing
		}
		err = start(ctx, nodes)
	case Shrink:
		err = w.shrink(ctx, nodes)
		nodes = nil
	case RestartJob:
		err = w.each(ctx, nodes, func(ctx context.Context, n *node) error { return n.restartJob(ctx, w) })
	case Crash:
		err = w.each(ctx, nodes, func(ctx context.Context, n *node) error {
			n.kill()
			return n.boot(ctx, w)
		})
	case Reconnect:
		nodes = w.nodes
		since = time.Now()
		w.fabric.cutAll()
	case RestartOrchestrator:
		nodes = w.nodes
		since = time.Now()
		if err = w.stopOrchestrator(); err == nil {
			err = w.startOrchestrator(ctx)
		}
	case ChangePolicy:
		err = w.changePolicy(ctx, s.Times)
	case ChangeEndpoint:
		err = w.changeEndpoints(ctx, s.Event)
	}
	if err == nil && s.setUp && w.scenario.Services > 0 {
		err = w.createServices(ctx)
	}
	if err == nil && w.scenario.asks() {
		if err = w.await(ctx, nodes, since); err == nil {
			err = w.ask(ctx, s)
		}
	}
	if err == nil && w.scenario.ActivePeers > 0 {
		if err = w.await(ctx, nodes, since); err == nil {
			w.talk()
		}
	}
	w.stage.acted()
	if err != nil {
		return err
	}
	return w.await(ctx, nodes, since)
}

// streams returns the number of streams that an event starts; each may cost one snapshot.
func (s step) streams(nodes int) int {
	switch s.Do {
	case Grow, Crash:
		return len(s.nodes)
	case Reconnect, RestartOrchestrator:
		return nodes
	}
	return 0
}

// numbered returns the nodes with these numbers; w.nodes is sorted by number.
func (w *world) numbered(numbers []int) []*node {
	var some []*node
	for _, number := range numbers {
		i, _ := slices.BinarySearchFunc(w.nodes, number, func(n *node, number int) int { return n.number - number })
		some = append(some, w.nodes[i])
	}
	return some
}

// restartJob removes the node's containers and creates as many new ones.
func (n *node) restartJob(ctx context.Context, w *world) error {
	for len(n.running) > 0 {
		if err := n.remove(ctx); err != nil {
			return err
		}
	}
	return n.fill(ctx, w)
}

// shrink removes nodes in an operator's order: containers, agent, node.
func (w *world) shrink(ctx context.Context, nodes []*node) error {
	gone := map[*node]bool{}
	for _, n := range nodes {
		gone[n] = true
	}
	err := w.each(ctx, nodes, func(ctx context.Context, n *node) error {
		for len(n.running) > 0 {
			if err := n.remove(ctx); err != nil {
				return err
			}
		}
		n.kill()
		return w.deleteNode(ctx, n)
	})
	w.nodes = slices.DeleteFunc(w.nodes, func(n *node) bool { return gone[n] })
	return err
}

// deleteNode retries until the orchestrator has noticed that the node's stream ended.
func (w *world) deleteNode(ctx context.Context, n *node) error {
	for {
		_, err := w.operator.DeleteNode(ctx, connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: n.name}))
		if err == nil || connect.CodeOf(err) != connect.CodeFailedPrecondition {
			return err
		}
		if err := pause(ctx, noticeEvery); err != nil {
			return fmt.Errorf("delete node %s: %w", n.name, err)
		}
	}
}
