package control

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/api"
)

// Status shows the parts of the node's reports that the orchestrator refused, until the orchestrator accepts them or a
// new stream starts.
func TestUntakenLabelsAreSeen(t *testing.T) {
	b, core := newLinkBed(t), agenttest.New(t)
	link := b.link
	link.config.Tenants = core.Tenants
	service := api.New(api.Config{Node: b.node, Link: link.Status})
	service.Serve(core.Core, func() error { return nil })
	problems := func() (n int) {
		t.Helper()
		s, err := service.Status(t.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range s.Msg.Problems {
			if strings.Contains(p, "node n1 says that") {
				n++
			}
		}
		return n
	}
	handles := func(reasons ...string) {
		t.Helper()
		r := &pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Heartbeat{}, WithPolicies: true}
		if reasons != nil {
			r.Refusals = &pilasterv1.Refusals{Reasons: reasons}
		}
		queue := &policyQueue{link: link, core: core.Core, running: new(sync.WaitGroup), end: func(error) {}}
		if err := errors.Join(link.apply(t.Context(), core.Core, r), queue.handleEvent(t.Context(), r)); err != nil {
			t.Fatal(err)
		}
	}
	handles("node n1 says that a", "node n1 says that b")
	handles()
	if n := problems(); n != 2 {
		t.Errorf("%d problems are seen, want 2", n)
	}
	handles([]string{}...) // which is not nil
	if n := problems(); n != 0 {
		t.Errorf("%d problems are seen after all was taken", n)
	}
	handles("node n1 says that a")
	link.markDisconnected(errors.New("the stream broke"), 0)
	if n := problems(); n != 0 {
		t.Errorf("%d problems of a stream that has ended", n)
	}
}
