package policies_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

const webFromFront = `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"web"},
	"spec":{"podSelector":{"matchLabels":{"app":"web"}},
	"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"front"}}}]}]}}`

// labelled is the maximum time until other nodes apply policies by a container's new labels.
const labelled = 100 * time.Millisecond

// TestLabelsOnOtherNodes: when a container's labels change, other nodes that host the tenant apply policies by the new
// labels immediately. They do so until the container is removed, also after the agent on the container's node has
// restarted.
func TestLabelsOnOtherNodes(t *testing.T) {
	l := labtest.New(t, lab.Spec{Nodes: nodes, Tenants: []lab.Tenant{{Name: "blue"}}, Containers: []lab.Container{
		{Name: "web", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "web"}},
		{Name: "front", Node: "n2", Tenant: "blue", Labels: map[string]string{"app": "front"}},
		{Name: "guest", Node: "n2", Tenant: "blue", Labels: map[string]string{"app": "guest"}},
	}})
	ctx := labtest.Context(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	guest, err := l.Container("guest")
	must(err)
	web, err := l.Container("web")
	must(err)
	// allows queries the kernel of web's node.
	allows := func() bool {
		t.Helper()
		resp, err := l.Agent("n1").Why(ctx,
			connect.NewRequest(&pilasterv1.WhyRequest{Source: guest.Plaintext.String(),
				Destination: web.Plaintext.String(), Protocol: 6, Port: 80}))
		must(err)
		if len(resp.Msg.Reasons) != 1 {
			t.Fatalf("unexpected verdict of n1: %v", resp.Msg)
		}
		return resp.Msg.Reasons[0].Allowed
	}
	until := func(what string, allowed bool) time.Duration {
		t.Helper()
		for start := time.Now(); ; {
			if allows() == allowed {
				return time.Since(start)
			}
			if ctx.Err() != nil || time.Since(start) > 20*time.Second {
				t.Fatalf("%s: n1 did not change its verdict to allowed: %v", what, allowed)
			}
		}
	}
	label := func(app string) {
		t.Helper()
		_, err := l.Agent("n2").LabelEndpoint(ctx,
			connect.NewRequest(&pilasterv1.LabelEndpointRequest{Key: l.ContainerID("guest"),
				Set: map[string]string{"app": app}}))
		must(err)
	}
	_, err = l.Operator().ApplyPolicies(ctx,
		connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: "blue", Documents: []string{webFromFront}}))
	must(err)
	until("there is a policy", false)
	echoes, err := l.PingAll(ctx, packet.PingOptions{Timeout: 300 * time.Millisecond})
	must(err)
	must(l.MarkDenied(ctx, echoes))
	for _, e := range echoes {
		if denied := e.From == "guest" && e.To == "web"; e.Denied != denied || e.Reached() == denied {
			t.Errorf("ping between all containers: got %+v, want denied: %v", e, denied)
		}
	}

	var took []time.Duration
	for range 10 {
		label("front")
		took = append(took, until("guest is front", true))
		label("guest")
		took = append(took, until("guest is itself", false))
	}
	slices.Sort(took)
	t.Logf("from the label to the other node's kernel: median %v, most %v of %d", took[len(took)/2], took[len(took)-1],
		len(took))
	if median := took[len(took)/2]; median > labelled {
		t.Errorf("the median delay of the other node is %v", median)
	}

	label("front")
	until("guest is front", true)
	_, err = l.Kill(ctx, lab.AgentProcess("n2"))
	must(err)
	if !allows() {
		t.Error("guest's new labels were lost when its agent was killed")
	}
	must(awaitConnected(ctx, l, "n2"))
	if !allows() {
		t.Error("guest's new labels were lost when its agent restarted")
	}
	if echo, err := l.Ping(ctx, "guest", "web", packet.PingOptions{}); err != nil || !echo.Reached() {
		t.Errorf("guest with front's labels cannot reach web: %+v, %v", echo, err)
	}
	must(l.RemoveContainer(ctx, "guest"))
	until("guest has ended", false)
}

// awaitConnected waits until a node's agent follows the orchestrator.
func awaitConnected(ctx context.Context, l *lab.Lab, node string) error {
	for {
		status, err := l.Agent(node).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		if err == nil && status.Msg.Orchestrator.Connected {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}
