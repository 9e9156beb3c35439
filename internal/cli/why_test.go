package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

const (
	whyFront   = "fd70:696c:6100:1:0:100:200:7" // on the fabric
	whyWeb     = "fd70:696c:6100:1:0:100:300:9"
	whyService = "fd70:696c:7300:5::1"
	whyFar     = "fc98:14bc:4974:c7a8:470f:98a:c932:1f42"
)

// whyAgent is an agent with the endpoints shop/front, of two networks, and c0ffee, which has no pod. It denies what
// enters c0ffee.
type whyAgent struct {
	pilasterv1connect.UnimplementedAgentServiceHandler
	asked *string // source and destination of the last question
}

func whyEndpoints() map[string]*pilasterv1.Endpoint {
	return map[string]*pilasterv1.Endpoint{
		"shop/front": {Id: 1, Pod: "shop/front", ContainerId: "c0c0a", Tenant: "blue",
			Attachments: []*pilasterv1.Attachment{
				{Network: "nimitz", Address: "10.0.3.7"}, {Network: "netpila", Plaintext: whyFront, Address: "fc00::7"},
			}},
		"c0ffee": {Id: 2, ContainerId: "c0ffee", Tenant: "blue", Attachments: []*pilasterv1.Attachment{
			{Network: "netpila", Plaintext: whyWeb, Address: "fc00::9"}}},
	}
}

func (whyAgent) GetEndpoint(
	_ context.Context, r *connect.Request[pilasterv1.GetEndpointRequest],
) (*connect.Response[pilasterv1.GetEndpointResponse], error) {
	if e := whyEndpoints()[r.Msg.Key]; e != nil {
		return connect.NewResponse(&pilasterv1.GetEndpointResponse{Endpoint: e}), nil
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no endpoint %q on this node", r.Msg.Key))
}

func (whyAgent) Status(
	context.Context, *connect.Request[pilasterv1.StatusRequest],
) (*connect.Response[pilasterv1.StatusResponse], error) {
	return connect.NewResponse(&pilasterv1.StatusResponse{
		Node: &pilasterv1.Node{Name: "n2", Prefix: "fd70:696c:6100:2::/64"},
	}), nil
}

func (a whyAgent) Why(
	_ context.Context, r *connect.Request[pilasterv1.WhyRequest],
) (*connect.Response[pilasterv1.WhyResponse], error) {
	*a.asked = r.Msg.Source + " " + r.Msg.Destination
	answer := &pilasterv1.WhyResponse{}
	if r.Msg.Destination == whyService {
		front := whyEndpoints()["shop/front"]
		return connect.NewResponse(&pilasterv1.WhyResponse{Reasons: []*pilasterv1.Reason{
			{Direction: "egress", Tenant: "blue", App: 2, Endpoint: front, Peer: whyService, Allowed: true,
				Rule: &pilasterv1.RuleName{Rule: "the service has 1 endpoint"}},
			{Direction: "egress", Tenant: "blue", App: 2, Endpoint: front, Peer: whyWeb, PeerApp: 3, Allowed: true,
				Backend: "[fc00::9]:8080"},
			{Direction: "ingress", Tenant: "blue", App: 3, Endpoint: whyEndpoints()["c0ffee"], Peer: whyFront,
				PeerApp: 2, Backend: "[fc00::9]:8080"},
		}}), nil
	}
	if r.Msg.Source != whyFar {
		answer.Reasons = append(answer.Reasons, &pilasterv1.Reason{Direction: "egress", Tenant: "blue", App: 2,
			Endpoint: whyEndpoints()["shop/front"], Peer: whyWeb, PeerApp: 3, Allowed: true, Policed: true})
	}
	answer.Reasons = append(answer.Reasons, &pilasterv1.Reason{Direction: "ingress", Tenant: "blue", App: 3,
		Endpoint: whyEndpoints()["c0ffee"], Peer: whyFront, PeerApp: 2, Policed: true,
		Rule: &pilasterv1.RuleName{Rule: "NetworkPolicy shop/web isolates in ingress, and no rule accepts"}})
	return connect.NewResponse(answer), nil
}

func TestWhyNames(t *testing.T) {
	var asked string
	socket := serve(t, whyAgent{asked: &asked})
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", serveOperator(t, explainOperator{}))
	const denied = "NetworkPolicy shop/web isolates in ingress, and no rule accepts\n"
	for args, want := range map[string]struct{ asked, out string }{
		"shop/front c0ffee": {"fc00::7 fc00::9", "egress   allowed  endpoint 1 shop/front (tenant blue, app 2), " +
			"peer c0ffee fc00::9 (app 3): no policy restricts it\n" +
			"ingress  denied   endpoint 2 c0ffee (tenant blue, app 3), peer shop/front fc00::7 (app 2): " + denied},
		// An address stays as the user gave it, on the fabric too, and selects the family of a name's address.
		whyFar + " c0ffee": {whyFar + " fc00::9",
			"ingress  denied   endpoint 2 c0ffee (tenant blue, app 3), peer " + whyFar + " (app 2): " + denied},
		"shop/front " + whyWeb: {"fc00::7 " + whyWeb, "peer c0ffee " + whyWeb + " (app 3): no policy"},
		"shop/front n2":        {"fc00::7 fd70:696c:6100:2::1", "fd70:696c:6100:2::1 (app 3): no policy"},
		"shop/front n3":        {"fc00::7 fd70:696c:6100:3::1", "fd70:696c:6100:3::1 (app 3): no policy"},
		"shop/front " + whyService: {"fc00::7 " + whyService,
			"egress   allowed  endpoint 1 shop/front (tenant blue, app 2), peer " + whyService +
				" (app 0): the service has 1 endpoint\n" +
				"egress   allowed  endpoint 1 shop/front (tenant blue, app 2), peer [fc00::9]:8080 (app 3): tenant " +
				"blue has no policies\n" +
				"ingress  denied   endpoint 2 c0ffee (tenant blue, app 3), peer fc00::7 (app 2), as [fc00::9]:8080: "},
		"shop/front 10.0.9.9": {"10.0.3.7 10.0.9.9", "peer c0ffee 10.0.9.9 (app 3): no policy"},
	} {
		ends := strings.Fields(args)
		code, out, errs := run(t, "", "why", "--agent-socket", socket, ends[0], ends[1], "tcp/80")
		if code != ExitFailed || asked != want.asked || !strings.Contains(out, want.out) {
			t.Errorf("why %s: exit %d, asked for %s, want %s\n%s%s\nwant\n%s",
				args, code, asked, want.asked, out, errs, want.out)
		}
	}
	_, out, _ := run(t, "", "why", "--agent-socket", socket, "shop/front", "c0ffee", "tcp/80", "-o", "json")
	var v whyView
	if err := json.Unmarshal([]byte(out), &v); err != nil || len(v.Reasons) != 2 || v.Reasons[0].Name != "shop/front" ||
		v.Reasons[0].PeerName != "c0ffee" || v.Reasons[0].Peer != whyWeb || v.Reasons[1].PeerName != "shop/front" {
		t.Errorf("%v: %s", err, out)
	}
}

func TestWhyRefuses(t *testing.T) {
	var asked string
	socket := serve(t, whyAgent{asked: &asked})
	for line, want := range map[string]struct {
		code int
		says string
	}{
		"":                          {ExitUsage, "wrong number of arguments; usage: pilaster why SOURCE"},
		"shop/front c0ffee":         {ExitUsage, "PROTOCOL is missing: add for example tcp/80, udp/53 or icmpv6"},
		"shop/front guest tcp/80":   {ExitFailed, `"guest" is no address, and no endpoint on this node has the name`},
		"shop/front 10.0.9 tcp/80":  {ExitUsage, "10.0.9"},
		"shop/front fc00::x tcp/80": {ExitUsage, "fc00::x"},
		"shop/front c0ffee tcp":     {ExitUsage, "TCP, UDP and SCTP have a port"},
		"shop/front c0ffee tpc/80":  {ExitUsage, `"tpc/80": use tcp/80`},
	} {
		args := append([]string{"why", "--agent-socket", socket}, strings.Fields(line)...)
		code, out, errs := run(t, "", args...)
		if code != want.code || out != "" || !strings.Contains(errs, want.says) || asked != "" {
			t.Errorf("why %s: exit %d, want %d; stdout %q, stderr %q, want %q",
				line, code, want.code, out, errs, want.says)
		}
	}
}
