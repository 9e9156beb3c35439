package control

import (
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
)

// The agent ignores messages and fields of a later orchestrator that it does not know, and applies the rest.
func TestLaterOrchestratorIsFollowed(t *testing.T) {
	core := agenttest.New(t)
	core.MustAdd("c1")
	b := newLinkBed(t)
	agenttest.Later(b.cluster.answer)
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop := b.run(core)
	defer stop()
	go func() {
		for { // the test ignores reports
			select {
			case <-b.cluster.hosted:
			case <-t.Context().Done():
				return
			}
		}
	}()
	blue := &pilasterv1.Tenant{
		Name: "blue",
		Ids: []*pilasterv1.TenantId{
			agenttest.Later(&pilasterv1.TenantId{Id: 1, Key: agenttest.BlueKey[:]}),
			{Id: 9, Key: make([]byte, 16)},
		},
	}
	b.cluster.events <- agenttest.Later(&pilasterv1.FollowResponse{Revision: 5}) // of a kind this build does not know
	b.cluster.events <- agenttest.Later(&pilasterv1.FollowResponse{Revision: 6, Event: &pilasterv1.FollowResponse_Delta{
		Delta: agenttest.Later(&pilasterv1.Delta{Tenants: []*pilasterv1.Tenant{agenttest.Later(blue)}}),
	}})
	for len(core.Driver.IDs("blue")) != 2 {
		b.cluster.events <- agenttest.Later(&pilasterv1.FollowResponse{Revision: 7})
	}
	if s := b.link.Status(); !s.Connected || s.LastError != "" {
		t.Errorf("link %+v", s)
	}
}

// An earlier orchestrator does not know a call of a later agent: the error says that nothing was changed.
func TestEarlierOrchestratorIsNamed(t *testing.T) {
	b := newLinkBed(t)
	b.cluster.resolve = func(*pilasterv1.ResolveRequest) (*pilasterv1.ResolveResponse, error) {
		return nil, connect.NewError(connect.CodeUnimplemented, nil)
	}
	_, err := b.link.Resolve(t.Context(), "blue", nil, false)
	if err == nil || !strings.Contains(err.Error(), "nothing was changed; try again") {
		t.Errorf("said is %v", err)
	}
}

// An orchestrator sends policies in several messages, of which only the last has the revision. An agent without
// policies continues.
func TestPoliciesArePassedOver(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	c := newCluster(t)
	c.createTenant("blue")
	dir, driver := t.TempDir(), agenttest.NewDriver()
	n1 := c.boot(dir, "n1", driver)
	n1.until(connected)
	n1.MustAdd("c1")
	apply := func(i int) {
		t.Helper()
		req := &pilasterv1.ApplyPoliciesRequest{Tenant: "blue"}
		for j := range 15 {
			req.Documents = append(
				req.Documents,
				fmt.Sprintf(
					"{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: p%d-%d, annotations: "+
						"{x: %s}}, spec: {podSelector: {}}}",
					i,
					j,
					strings.Repeat("x", 60<<10),
				),
			)
		}
		if _, err := c.op.ApplyPolicies(t.Context(), connect.NewRequest(req)); err != nil {
			t.Fatal(err)
		}
	}
	handlesAll := func() {
		t.Helper()
		said, err := c.op.ClusterStatus(t.Context(), connect.NewRequest(&pilasterv1.ClusterStatusRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		n1.until(func(s agent.LinkStatus) bool {
			return s.Connected && s.LastError == "" && s.Revision >= said.Msg.Revision
		})
	}
	for i := range 5 { // more than a message has
		apply(i)
	}
	handlesAll()
	n1.stop()
	n1 = c.boot(dir, "n1", driver)
	handlesAll()
	n1.MustAdd("c2")
}
