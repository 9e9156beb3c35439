package restart_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// TestRotation gives a tenant new keys while its containers exchange datagrams, and while agents and the orchestrator
// are killed. No datagram is lost between containers with old IDs, with new IDs, or with one of each. An old ID retires
// when its last container is removed. Nodes drop forged packets with retired IDs.
func TestRotation(t *testing.T) {
	l := labtest.New(t, lab.Spec{
		Nodes:   []string{"n1", "n2"},
		Tenants: []lab.Tenant{{Name: "blue"}},
		Containers: []lab.Container{
			{Name: "a0", Node: "n1", Tenant: "blue"},
			{Name: "b0", Node: "n2", Tenant: "blue"},
			{Name: "c0", Node: "n1", Tenant: "blue"},
			{Name: "d0", Node: "n2", Tenant: "blue"},
		},
	})
	r := &rotator{killer: &killer{T: t, lab: l, random: rand.New(rand.NewPCG(1, 0)), start: time.Now()}}
	sending, stop := context.WithCancel(t.Context())
	defer stop()
	streams := []*stream{startStream(sending, t, l, "a0", "b0"), startStream(sending, t, l, "b0", "a0")}
	first := r.blue().Tenant.Ids[0]

	for turn := 1; turn <= 2; turn++ {
		kills := make(chan struct{})
		go func() {
			defer close(kills)
			for _, process := range []string{lab.AgentProcess("n1"), lab.Orchestrator, lab.AgentProcess("n2")} {
				if _, err := l.Crash(r.Context(), process); err != nil {
					t.Error(err)
				}
			}
		}()
		id := r.rotate()
		<-kills
		r.ready("n1")
		r.ready("n2")
		r.settled(func(now *pilasterv1.GetTenantResponse) bool {
			for _, h := range now.Hosting { // each node must use the new ID for allocations
				if !slices.Contains(h.Holds, id) {
					return false
				}
			}
			return len(now.Tenant.Ids) == turn+1
		})
		a, b := fmt.Sprint("a", turn), fmt.Sprint("b", turn)
		for name, node := range map[string]string{a: "n1", b: "n2"} {
			r.must(l.AddContainer(r.Context(), lab.Container{Name: name, Node: node, Tenant: "blue"}))
			if got := r.endpoint(name, node).TenantId; got != id {
				t.Errorf("%s has id %d, want the new one, %d", name, got, id)
			}
		}
		// Send between new containers, from a new to an old container and from an old to a new container. The last two
		// are alternately on one node and on different nodes.
		old := []string{"c0", "d0"}[turn-1]
		streams = append(streams, startStream(sending, t, l, a, b), startStream(sending, t, l, b, old),
			startStream(sending, t, l, old, a))
		_, err := l.Crash(r.Context(), lab.AgentProcess("n1"))
		r.must(err)
		r.ready("n1")
	}
	stop()
	for _, s := range streams {
		s.finish(t, r.start)
	}

	old, err := l.Container("b0")
	r.must(err)
	for _, name := range []string{"a0", "c0", "d0"} {
		r.must(l.RemoveContainer(r.Context(), name))
	}
	if ids := r.blue().Tenant.Ids; len(ids) != 3 {
		t.Errorf("b0 still exists, but the ids are %v", ids)
	}
	// b0's node is not connected, so no node can report that the ID is unused.
	r.must(l.Stop(r.Context(), lab.AgentProcess("n2")))
	if ids := r.blue().Tenant.Ids; len(ids) != 3 {
		t.Errorf("the node of b0 is not connected, but the ids are %v", ids)
	}
	r.must(l.Start(r.Context(), lab.AgentProcess("n2")))
	r.must(l.RemoveContainer(r.Context(), "b0"))
	r.settled(func(now *pilasterv1.GetTenantResponse) bool {
		return len(now.Tenant.Ids) == 2 && now.Tenant.Ids[0].Id != first.Id
	})
	for _, node := range []string{"n1", "n2"} {
		r.forgotten(node, first)
	}
	r.forged(old)
}

type rotator struct{ *killer }

// rotate retries until it succeeds, because the orchestrator may be down.
func (r *rotator) rotate() uint32 {
	for {
		resp, err := r.lab.Operator().RotateKey(r.Context(),
			connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: "blue"}))
		if err == nil {
			return resp.Msg.Id
		}
		if connect.CodeOf(err) != connect.CodeUnavailable {
			r.Fatal(err)
		}
		r.pause()
	}
}

// pause waits a moment before a retry.
func (r *rotator) pause() {
	select {
	case <-time.After(50 * time.Millisecond):
	case <-r.Context().Done():
		r.Fatal(context.Cause(r.Context()))
	}
}

func (r *rotator) blue() *pilasterv1.GetTenantResponse {
	for {
		resp, err := r.lab.Operator().GetTenant(r.Context(),
			connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "blue", ShowKey: true}))
		if err == nil {
			return resp.Msg
		}
		if connect.CodeOf(err) != connect.CodeUnavailable {
			r.Fatal(err)
		}
		r.pause()
	}
}

func (r *rotator) settled(is func(*pilasterv1.GetTenantResponse) bool) {
	r.Helper()
	for end := time.Now().Add(time.Minute); ; r.pause() {
		now := r.blue()
		if is(now) {
			return
		}
		if time.Now().After(end) {
			r.Fatalf("the ids of blue remain %v", now)
		}
	}
}

func (r *rotator) endpoint(name, node string) *pilasterv1.Endpoint {
	got, err := r.lab.Agent(node).GetEndpoint(r.Context(),
		connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: r.lab.ContainerID(name)}))
	r.must(err)
	return got.Msg.Endpoint
}

// forgotten checks that a node has no state of an ID and its key.
func (r *rotator) forgotten(node string, id *pilasterv1.TenantId) {
	r.Helper()
	tables := func() map[string]uint32 {
		status, err := r.lab.Agent(node).Status(r.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
		r.must(err)
		used := map[string]uint32{}
		for _, e := range status.Msg.Datapath.Entries {
			used[e.Table] = e.Used
		}
		return used
	}
	for end := time.Now().Add(time.Minute); tables()["tenants"] != 2 || tables()["keys"] != 2; r.pause() {
		if time.Now().After(end) {
			r.Fatalf("%s still has %v", node, tables())
		}
	}
	text, err := os.ReadFile(filepath.Join(r.lab.Folder(), "nodes", node, "state", "tenants", "blue.json"))
	r.must(err)
	if bytes.Contains(text, []byte(hex.EncodeToString(id.Key))) {
		r.Errorf("%s still has the key of id %d on disk", node, id.Id)
	}
}

// forged sends packets with the source of a container with a retired ID, from the router's port, where the fabric does
// not check sources.
func (r *rotator) forged(old lab.ContainerStatus) {
	to, err := r.lab.Container("a1")
	r.must(err)
	router, err := r.lab.Namespace(lab.Router)
	r.must(err)
	defer router.Close()
	wire, err := packet.NewInjector(router, "n1")
	r.must(err)
	defer wire.Close()
	node, err := r.lab.Namespace("n1")
	r.must(err)
	defer node.Close()
	uplink, err := packet.NewInjector(node, lab.Uplink)
	r.must(err)
	defer uplink.Close()
	before := r.drops()
	const forgeries = 20
	p := packet.Packet{Source: old.Plaintext, Destination: to.Plaintext, HopLimit: 64,
		Body: packet.UDP{SourcePort: 1, DestinationPort: port, Payload: []byte("forged")}}
	for range forgeries {
		r.must(wire.Send(p.Frame(uplink.MAC(), wire.MAC())))
	}
	for end := time.Now().Add(time.Minute); r.drops() < before+forgeries; r.pause() {
		if time.Now().After(end) {
			r.Fatalf("%d of %d forged packets were dropped", r.drops()-before, forgeries)
		}
	}
}

func (r *rotator) drops() uint64 {
	all, err := r.lab.Drops(r.Context(), "n1")
	r.must(err)
	return all["tenant-mismatch"]
}
