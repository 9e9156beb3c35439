package restart_test

import (
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// TestBothKilled kills an orchestrator and an agent that is connected to it. The store still lists the agent's old
// stream as open. Nevertheless the restarted agent must register: the test adds a container with an unknown app, for
// which the agent needs the orchestrator.
func TestBothKilled(t *testing.T) {
	l := labtest.New(t, lab.Spec{Nodes: []string{"n1"}, Tenants: []lab.Tenant{{Name: "blue"}}})
	ctx := t.Context()
	for connected := false; !connected; time.Sleep(10 * time.Millisecond) {
		got, err := l.Operator().GetNode(ctx, connect.NewRequest(&pilasterv1.GetNodeRequest{Name: "n1"}))
		if err != nil {
			t.Fatal(err)
		}
		connected = got.Msg.Node.Connected
	}
	for _, do := range []func() error{
		func() error { return l.KillNoRestart(ctx, lab.Orchestrator) },
		func() error { return l.KillNoRestart(ctx, lab.AgentProcess("n1")) },
		func() error { return l.Start(ctx, lab.Orchestrator) },
		func() error { return l.Start(ctx, lab.AgentProcess("n1")) },
		func() error {
			return l.AddContainer(ctx,
				lab.Container{Name: "c", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "new"}})
		},
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
}
