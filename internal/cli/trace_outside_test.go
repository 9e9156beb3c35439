package cli

import (
	"context"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// outsideAgent is the agent of a node whose program does not take the packets of a host outside.
type outsideAgent struct {
	traceAgent
	asked *pilasterv1.TraceRequest
}

func (a *outsideAgent) Status(
	context.Context, *connect.Request[pilasterv1.StatusRequest],
) (*connect.Response[pilasterv1.StatusResponse], error) {
	return connect.NewResponse(&pilasterv1.StatusResponse{
		Node: &pilasterv1.Node{Name: "n4", Prefix: "fd70:696c:6100:4::/64"},
	}), nil
}

func (a *outsideAgent) Trace(
	_ context.Context, r *connect.Request[pilasterv1.TraceRequest],
) (*connect.Response[pilasterv1.TraceResponse], error) {
	a.asked = r.Msg
	return connect.NewResponse(&pilasterv1.TraceResponse{
		Node: "n4", Verdict: "passed", Source: &pilasterv1.TraceEnd{Address: r.Msg.Source},
		Destination: &pilasterv1.TraceEnd{Address: r.Msg.Destination},
		Steps: []*pilasterv1.TraceStep{
			{Stage: "uplink", Source: r.Msg.Source, Destination: r.Msg.Destination, Detail: "from outside"},
		},
	}), nil
}

// servicesOperator is an orchestrator that also knows on which nodes the services' tenants are.
type servicesOperator struct{ explainOperator }

func (servicesOperator) GetService(
	_ context.Context, r *connect.Request[pilasterv1.GetServiceRequest],
) (*connect.Response[pilasterv1.GetServiceResponse], error) {
	return connect.NewResponse(&pilasterv1.GetServiceResponse{
		Service: &pilasterv1.Service{Tenant: r.Msg.Tenant, Name: r.Msg.Name}, Nodes: []string{"n1", "n2"},
	}), nil
}

// TestTraceOutside: a trace of a packet of a host outside asks with its port and its ingress node. If the node does not
// expose the destination, it says by an orchestrator which service has it and where.
func TestTraceOutside(t *testing.T) {
	agent := &outsideAgent{}
	socket := serve(t, agent)
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", serveOperator(t, servicesOperator{}))
	for _, c := range []struct {
		args    string
		code    int
		says    string
		ingress string
		port    uint32
	}{
		{"2001:db8:7::9 tcp/80 --source-port 51234", ExitFailed,
			"2001:db8:7::9 is the address of service shop/web of tenant blue, for packets to nodes that host the " +
				"tenant: n1, n2", "", 51234},
		{"fd70:696c:6100:4::1 tcp/30080", ExitFailed, "30080/TCP is a node port of service shop/web", "", 0},
		{"fd70:696c:6100:4::1 udp/30080", ExitFailed, "no service of the cluster has the address " +
			"fd70:696c:6100:4::1 or the node port 30080/UDP", "", 0},
		{"2001:db8:7::9 tcp/80 --ingress n3", ExitFailed, "stack", "fd70:696c:6100:3::/64", 0},
		{"2001:db8:7::9 tcp/80 --ingress fd70:696c:6100:5::/64", ExitFailed, "stack", "fd70:696c:6100:5::/64", 0},
		{"2001:db8:7::9 tcp/80 --ingress n9", ExitUsage, "knows a node with this name; use its /64", "", 0},
		{"2001:db8:7::9 icmpv6 --source-port 9", ExitUsage, "protocol 58 has no ports", "", 0},
	} {
		agent.asked = nil
		args := append([]string{"trace", "--agent-socket", socket, "--dry-run", "2001:db8:f00d::2"},
			strings.Fields(c.args)...)
		code, stdout, stderr := run(t, "", args...)
		if code != c.code || !strings.Contains(stdout+stderr, c.says) || agent.asked.GetIngress() != c.ingress ||
			agent.asked.GetSourcePort() != c.port {
			t.Errorf("%s: exit %d, asked %v\n%s%s\nwant exit %d, %s", c.args, code, agent.asked, stdout, stderr, c.code,
				c.says)
		}
	}
}
