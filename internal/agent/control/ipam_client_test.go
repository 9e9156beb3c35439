package control

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
)

// Failed releases are retried when a new stream starts, unless an endpoint has the address by then.
func TestFreeLater(t *testing.T) {
	b, core := newLinkBed(t), agenttest.New(t)
	freed := make(chan string, 10)
	var back atomic.Bool
	b.cluster.free = func(req *pilasterv1.FreeRequest) error {
		if back.Load() {
			freed <- req.Tenant + " " + req.Key
			return nil
		}
		return connect.NewError(connect.CodeUnavailable, agenttest.ErrFake)
	}
	for _, container := range []string{"c1", "c2"} {
		if err := b.link.Free(t.Context(), "green", container+"/eth0"); err != nil {
			t.Fatal(err)
		}
	}
	back.Store(true)
	core.MustAdd("c2")
	defer b.run(core)()
	<-b.cluster.hosted
	b.cluster.events <- &pilasterv1.FollowResponse{Revision: 4, Event: &pilasterv1.FollowResponse_Heartbeat{}}
	if got := <-freed; got != "green c1/eth0" {
		t.Errorf("freed %s", got)
	}
	agenttest.Eventually(t, func() error {
		b.link.mu.Lock()
		defer b.link.mu.Unlock()
		if len(b.link.pendingFrees) != 0 {
			return fmt.Errorf("%v waits", b.link.pendingFrees)
		}
		return nil
	})
	if len(freed) != 0 {
		t.Errorf("freed %s, which a container has", <-freed)
	}
}

// While there is a stream, failed releases are retried, and so are releases of addresses that may have been allocated
// for an ADD that received no answer.
func TestFreeAgain(t *testing.T) {
	b, core := newLinkBed(t), agenttest.New(t)
	late := connect.NewError(connect.CodeDeadlineExceeded, agenttest.ErrFake)
	freed := make(chan string, 10)
	var tries atomic.Int32
	b.cluster.free = func(req *pilasterv1.FreeRequest) error {
		if tries.Add(1) <= 3 {
			return late
		}
		freed <- req.Tenant + " " + req.Key
		return nil
	}
	b.cluster.allocate = func(req *pilasterv1.AllocateRequest) (*pilasterv1.AllocateResponse, error) {
		switch req.Key {
		case "full/eth0":
			return nil, connect.NewError(connect.CodeResourceExhausted, agenttest.ErrFake)
		case "late/eth0":
			return nil, late
		}
		return &pilasterv1.AllocateResponse{Prefixes: []string{"10.0.0.2/32"}}, nil
	}
	defer b.run(core)()
	<-b.cluster.hosted
	b.cluster.events <- &pilasterv1.FollowResponse{Revision: 4, Event: &pilasterv1.FollowResponse_Heartbeat{}}
	if err := b.link.Free(t.Context(), "green", "c1/eth0"); err != nil {
		t.Fatal(err)
	}
	if got := <-freed; got != "green c1/eth0" {
		t.Errorf("freed %s", got)
	}
	for _, key := range []string{"full/eth0", "good/eth0", "late/eth0"} {
		if _, err := b.link.Allocate(t.Context(), "green", key, 0); (err == nil) != (key == "good/eth0") {
			t.Errorf("%s: %v", key, err)
		}
	}
	if got := <-freed; got != "green late/eth0" {
		t.Errorf("freed %s", got)
	}
}

// A release that the orchestrator refuses permanently is not retried, and does not delay others.
func TestFreeThatIsRefused(t *testing.T) {
	b := newLinkBed(t)
	for code, again := range map[connect.Code]bool{
		connect.CodeInvalidArgument: false, connect.CodeFailedPrecondition: false, connect.CodeUnavailable: true,
		connect.CodeResourceExhausted: true,
	} {
		b.cluster.free = func(*pilasterv1.FreeRequest) error { return connect.NewError(code, agenttest.ErrFake) }
		key := code.String() + "/eth0"
		if err := b.link.Free(t.Context(), "green", key); err != nil {
			t.Fatal(err)
		}
		if slices.Contains(b.link.pendingNow(t.Context()), allocation{"green", key}) != again {
			t.Errorf("%v: %v waits", code, b.link.pendingNow(t.Context()))
		}
	}
}

// An allocation whose key belongs to no endpoint is released too, once.
func TestFreeOfNobodys(t *testing.T) {
	b, core := newLinkBed(t), agenttest.New(t)
	var freed []string
	b.cluster.free = func(req *pilasterv1.FreeRequest) error { freed = append(freed, req.Key); return nil }
	b.link.freeUnused(t.Context(), core.Core, "green", "nobodys")
	if late := b.link.pendingNow(t.Context()); !slices.Equal(freed, []string{"nobodys"}) || len(late) > 0 {
		t.Errorf("freed %q, and %v waits", freed, late)
	}
}
