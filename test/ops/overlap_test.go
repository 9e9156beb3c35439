package ops_test

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// TestNetworksOfOthers: if kind or Docker has a network in the private prefix, the agent does not start, and its error
// names the remedy. A running agent rejects new endpoints and keeps the existing ones.
func TestNetworksOfOthers(t *testing.T) {
	n := newNode(t, false)
	ctx := labtest.Context(t)
	const (
		says  = "private prefix fc00::/8 overlaps fc00:f853:ccd:e793::/64 on br-kind"
		doing = "remove that from this node, or set up the cluster with another --private-prefix"
	)
	for name, network := range map[string]struct{ add, del string }{
		"a bridge": {"ip addr add fc00:f853:ccd:e793::1/64 dev br-kind nodad",
			"ip addr del fc00:f853:ccd:e793::1/64 dev br-kind"},
		"a route": {"ip route add fc00:f853:ccd:e793::/64 dev br-kind",
			"ip -6 route del fc00:f853:ccd:e793::/64 dev br-kind"},
		"another's table": {"ip -6 route add fc00:f853:ccd:e793::/64 dev br-kind table 77",
			"ip -6 route del fc00:f853:ccd:e793::/64 dev br-kind table 77"},
	} {
		say(ctx, t, n.ns, "ip link add br-kind type bridge")
		say(ctx, t, n.ns, "ip link set br-kind up")
		say(ctx, t, n.ns, network.add)
		for !strings.Contains(problems(ctx, t, n.Lab), says) {
			pause(ctx, t)
		}
		if status, err := n.Agent("n1").Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{})); err != nil ||
			status.Msg.Ready {
			t.Errorf("%s: the agent accepts endpoints: %v, %v", name, status, err)
		}
		must(t, n.Stop(ctx, lab.AgentProcess("n1")))
		err := n.Start(ctx, lab.AgentProcess("n1"))
		if err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), doing) {
			t.Errorf("%s: starting the agent: got error %v", name, err)
		}
		if echo, err := n.Ping(ctx, "b1", "b2", packet.PingOptions{Count: 3, Timeout: 3 * time.Second}); err != nil ||
			!echo.Reached() {
			t.Errorf("%s: existing containers: %+v, %v", name, echo, err)
		}
		say(ctx, t, n.ns, network.del)
		say(ctx, t, n.ns, "ip link del br-kind")
		must(t, n.Start(ctx, lab.AgentProcess("n1")))
	}
}
