// Package scale_test reads a node's kernel state while its cluster grows, and counts the cluster's messages.
//
// NP2, §6.1, table 1, fig 14: two pairs of entries per container, none for other nodes.
//
// NP10, §7.1, fig 16, 17: a node's state does not depend on the size of the cluster.
//
// NP1, §6.1: a new container causes no message to other nodes.
package scale_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

const (
	hub   = "hub"
	peers = 16
)

func peer(i int) string { return fmt.Sprintf("p%d", i) }

// on returns the n-th container of a node. All containers have the same tenant and labels.
func on(node string, n int) lab.Container {
	return lab.Container{Name: fmt.Sprintf("%s-c%d", node, n), Node: node, Tenant: "blue",
		Labels: map[string]string{"app": "web"}}
}

// TestPeers makes a growing number of nodes communicate with one node, whose kernel state must not change.
func TestPeers(t *testing.T) {
	spec := lab.Spec{Nodes: []string{hub}, Tenants: []lab.Tenant{{Name: "blue"}},
		Containers: []lab.Container{on(hub, 1), on(hub, 2)}}
	for i := range peers {
		spec.Nodes = append(spec.Nodes, peer(i+1))
	}
	l := labtest.New(t, spec)
	ctx := labtest.Context(t)

	talk(ctx, t, l, on(hub, 1).Name, on(hub, 2).Name)
	alone := dump(ctx, t, l, hub)
	if alone.slots == 0 {
		t.Fatal("two containers have communicated, but the cache is empty: it is not the cache in use")
	}
	slots, talked := alone.slots, 0
	for _, n := range []int{1, 4, peers} {
		for ; talked < n; talked++ {
			addFirst(ctx, t, l, peer(talked+1))
		}
		now := dump(ctx, t, l, hub)
		alone.same(t, now, fmt.Sprintf("%d peers have communicated", n))
		if now.slots <= slots {
			t.Errorf("%d peers have communicated, but the cache went from %d to %d used slots", n, slots, now.slots)
		}
		slots = now.slots
		t.Logf("%2d peers: %d elements in pinned maps, %d routes, %d neighbours; besides, %d of %d cache "+
			"slots in use",
			n, now.count("map "), now.count("route "), now.count("neighbour "), now.slots, now.capacity)
	}

	// More containers on nodes that already host the tenant cause no message.
	before := said(ctx, t, l)
	for i := range peers {
		if err := l.AddContainer(ctx, on(peer(i+1), 2)); err != nil {
			t.Fatal(err)
		}
	}
	talk(ctx, t, l, on(hub, 1).Name, on(peer(peers), 2).Name)
	if after := said(ctx, t, l); after != before {
		t.Errorf("%d more containers caused messages: %+v, before %+v", peers, after, before)
	}
	alone.same(t, dump(ctx, t, l, hub), "every peer has two containers")

	// Check the comparison itself: a further container on this node must add four entries, a device and a route.
	if err := l.AddContainer(ctx, on(hub, 3)); err != nil {
		t.Fatal(err)
	}
	more := dump(ctx, t, l, hub)
	for kind, want := range map[string]int{
		"map pil_sources": 1, "map pil_locals": 1, "map pil_macs": 1, "map pil_svcnetns": 1,
		"map ":    4,
		"device ": 1, "address ": 0, "route ": 1, "rule ": 0,
		"neighbour ": 0,
	} {
		if got := more.count(kind) - alone.count(kind); got != want {
			t.Errorf("one container on this node added %d of %q, want %d", got, kind, want)
		}
	}
}

// addFirst adds a node's first container, which then communicates with containers of the hub. Only this node may
// request the tenant and receive an event.
func addFirst(ctx context.Context, t *testing.T, l *lab.Lab, node string) {
	t.Helper()
	before := said(ctx, t, l)
	c := on(node, 1)
	if err := l.AddContainer(ctx, c); err != nil {
		t.Fatal(err)
	}
	for _, here := range []string{on(hub, 1).Name, on(hub, 2).Name} {
		talk(ctx, t, l, here, c.Name)
		talk(ctx, t, l, c.Name, here)
	}
	after := waitSent(ctx, t, l, before)
	if after.deltas != before.deltas+1 || after.snapshots != before.snapshots || after.resolved != before.resolved+1 {
		t.Errorf("the first container on %s: %+v, before %+v, want one call and one delta", node, after, before)
	}
}

// talk sends echo requests from one container to another.
func talk(ctx context.Context, t *testing.T, l *lab.Lab, from, to string) {
	t.Helper()
	if e, err := l.Ping(ctx, from, to, packet.PingOptions{Count: 2}); err != nil || e.Received != 2 {
		t.Fatalf("ping from %s to %s: %+v, %v", from, to, e, err)
	}
}

// words counts the orchestrator's calls, changes and messages to nodes since its start, without heartbeats.
type words struct {
	resolved, snapshots, deltas int
	revision                    int64 // of its store
}

func said(ctx context.Context, t *testing.T, l *lab.Lab) words {
	t.Helper()
	status, err := l.Operator().ClusterStatus(ctx, connect.NewRequest(&pilasterv1.ClusterStatusRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	metrics := scrape(ctx, t, l)
	return words{
		resolved:  metrics[`pilaster_orchestrator_calls_total{code="ok",procedure="/pilaster.v1.NodeService/Resolve"}`],
		snapshots: metrics[`pilaster_orchestrator_messages_total{direction="out",event="snapshot",procedure="/pilaster.v1.NodeService/Follow"}`],
		deltas:    metrics[`pilaster_orchestrator_messages_total{direction="out",event="delta",procedure="/pilaster.v1.NodeService/Follow"}`],
		revision:  status.Msg.Revision,
	}
}

// poll is the polling interval of metrics.
const poll = 10 * time.Millisecond

// waitSent waits until the orchestrator has sent another delta and has stored the hosting node, because an ADD waits
// for neither.
func waitSent(ctx context.Context, t *testing.T, l *lab.Lab, before words) words {
	t.Helper()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		now := said(ctx, t, l)
		if now.deltas > before.deltas && now.revision > before.revision {
			return now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("no delta was sent: %+v, before %+v", now, before)
		}
	}
}
