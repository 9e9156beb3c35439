package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/agent/daemon"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/netns"
)

var noon = time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)

// fakeAgent is an agent with one endpoint and one drop event.
type fakeAgent struct {
	pilasterv1connect.UnimplementedAgentServiceHandler
	status *pilasterv1.StatusResponse
}

func theEndpoint() *pilasterv1.Endpoint {
	return &pilasterv1.Endpoint{
		Id: 3, ContainerId: "c0ffee", Interface: "eth0", Pod: "default/web-0", Netns: "/run/netns/x", CniNetwork: "pil",
		Tenant: "blue", TenantId: 1, App: 2, Labels: map[string]string{"app": "web"}, State: "active",
		NodeAddress: "fc00::99", DeviceKind: "veth", HostDevice: "pil3", HostIfindex: 9,
		ContainerMac: "02:70:69:6c:00:02", Mtu: 1500, Created: timestamppb.New(noon),
		HostPorts: []*pilasterv1.HostPort{{Host: 53, Container: 80, Protocol: "UDP", Address: "2a00::1"}},
		Attachments: []*pilasterv1.Attachment{{
			Network: "netpila", Plaintext: "fd70:696c:6100:1:0:100:200:7", Address: "fc00::7", Gateway: "fe80::1",
			Routes: []string{"fc00::/8"}, Egress: "fd70:696c:6100:1:0:ff:101:2f",
		}, {Network: "nimitz", Address: "10.0.3.7", Gateway: "169.254.1.1", Routes: []string{"0.0.0.0/0"}}},
	}
}

func (f *fakeAgent) Status(
	context.Context,
	*connect.Request[pilasterv1.StatusRequest],
) (*connect.Response[pilasterv1.StatusResponse], error) {
	return connect.NewResponse(f.status), nil
}

func (f *fakeAgent) ListEndpoints(
	context.Context,
	*connect.Request[pilasterv1.ListEndpointsRequest],
) (*connect.Response[pilasterv1.ListEndpointsResponse], error) {
	return connect.NewResponse(&pilasterv1.ListEndpointsResponse{Endpoints: []*pilasterv1.Endpoint{theEndpoint()}}), nil
}

func (f *fakeAgent) GetEndpoint(
	_ context.Context,
	r *connect.Request[pilasterv1.GetEndpointRequest],
) (*connect.Response[pilasterv1.GetEndpointResponse], error) {
	if r.Msg.Key != "default/web-0" {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such endpoint"))
	}
	return connect.NewResponse(&pilasterv1.GetEndpointResponse{Endpoint: theEndpoint()}), nil
}

func (f *fakeAgent) Monitor(
	_ context.Context,
	r *connect.Request[pilasterv1.MonitorRequest],
	s *connect.ServerStream[pilasterv1.MonitorResponse],
) error {
	err := s.Send(&pilasterv1.MonitorResponse{
		Time: timestamppb.New(
			noon,
		), Type: "drop", Reason: "src-not-own", Count: 1200, Hook: "container", Source: "fc00::9",
		Destination: "fc00::8",
		Protocol:    17, SourcePort: 4000, DestinationPort: 53, Length: 80, EndpointId: 3, Endpoint: "default/web-0",
		Ifindex: 9, LostEvents: 5, SourceEnd: &pilasterv1.PacketEnd{Endpoint: "default/web-0", Address: "fc00::9"},
		Rule: &pilasterv1.RuleName{Policy: "NetworkPolicy shop/web", Rule: "NetworkPolicy shop/web ingress[0]"},
	})
	return errors.Join(err, connect.NewError(connect.CodeUnavailable, errors.New("the agent is stopping")))
}

func (f *fakeAgent) ListRuleHits(
	_ context.Context,
	r *connect.Request[pilasterv1.ListRuleHitsRequest],
) (*connect.Response[pilasterv1.ListRuleHitsResponse], error) {
	if r.Msg.Tenant == "red" {
		return connect.NewResponse(&pilasterv1.ListRuleHitsResponse{}), nil
	}
	return connect.NewResponse(&pilasterv1.ListRuleHitsResponse{Hits: theStatus().Policies.Hits}), nil
}

func (f *fakeAgent) LabelEndpoint(
	_ context.Context,
	r *connect.Request[pilasterv1.LabelEndpointRequest],
) (*connect.Response[pilasterv1.LabelEndpointResponse], error) {
	e := theEndpoint()
	maps.Copy(e.Labels, r.Msg.Set)
	for _, k := range r.Msg.Remove {
		delete(e.Labels, k)
	}
	e.AppNow = 5
	return connect.NewResponse(&pilasterv1.LabelEndpointResponse{Endpoint: e}), nil
}

func (f *fakeAgent) SetEndpoint(
	_ context.Context,
	r *connect.Request[pilasterv1.SetEndpointRequest],
) (*connect.Response[pilasterv1.SetEndpointResponse], error) {
	e := theEndpoint()
	e.NotReady, e.Terminating = r.Msg.Ready != nil && !*r.Msg.Ready, r.Msg.GetTerminating()
	return connect.NewResponse(&pilasterv1.SetEndpointResponse{Endpoint: e}), nil
}

func theStatus() *pilasterv1.StatusResponse {
	return &pilasterv1.StatusResponse{
		Node: &pilasterv1.Node{
			Name:   "n1",
			Uuid:   "u",
			Prefix: "fd70:696c:6100:1::/64",
		}, Uplinks: []string{"eth0"}, Ready: true, Version: "v1", Pid: 7,
		Plan: &pilasterv1.Plan{BasePrefix: "fd70:696c:6100::/40", PrivatePrefix: "fc00::/8"},
		Orchestrator: &pilasterv1.OrchestratorLink{
			Url:       "https://o:7070",
			Connected: true,
			Revision:  1412,
			Since:     timestamppb.New(noon),
		},
		Datapath: &pilasterv1.DatapathStatus{
			DeviceKind:   "veth",
			DeviceWhy:    "this kernel has no netkit",
			Programs:     "1.4.0",
			Healthy:      true,
			FirstInChain: true,
			Switches:     map[string]string{"nimitz": "ovs"},
			Without:      []string{"traceroute"},
			Entries: []*pilasterv1.Entries{
				{
					Table:    "locals",
					Used:     2,
					Capacity: 4096,
				}, {Table: "flows", Used: 8192, Capacity: 8192, Cache: true}, {Table: "nimitz-register", Used: 1024},
				{Table: "nimitz-nat", Used: 1},
			},
		},
		Gateway: &pilasterv1.Gateway{
			Own:              "fd70:696c:6100:1:0:ff:0:1",
			Virtual:          "fd70:696c:6700:0:1::1",
			UnderlayServices: 2,
			Publications:     1,
		},
		Endpoints: 2, Tenants: 2,
		Pulls: []*pilasterv1.Pull{{
			Network: "ila", Subscriptions: 1003, Unknown: 1, Capacity: 65536, Begun: 9, Refused: 2,
		}},
		Limits: []*pilasterv1.Limit{
			{
				Name:          "endpoints",
				Used:          2000,
				Capacity:      4096,
				LargestTenant: "blue",
				LargestUsed:   1900,
			}, {Name: "tenant-ids", Used: 2, Capacity: 4096, LargestTenant: "blue", LargestUsed: 1},
		},
		Policies: &pilasterv1.Policies{
			Tenants: 1,
			Rules:   1200,
			Entries: []*pilasterv1.Entries{{Table: "policy-ports", Used: 1500, Capacity: 262144}},
			Sessions: &pilasterv1.Sessions{
				Capacity:        229376,
				Used:            1002,
				HalfOpen:        2,
				Begun:           5000,
				Evicted:         7,
				Refused:         1,
				LargestEndpoint: 3,
				Largest:         "default/web-0",
				LargestUsed:     1000,

				LargestTenant:     "blue",
				LargestTenantUsed: 1001,
			},
			Hits: []*pilasterv1.RuleHits{
				{
					Tenant:  "blue",
					Packets: 1234,
					Rule: &pilasterv1.RuleName{
						Policy: "NetworkPolicy shop/web",
						Rule:   "NetworkPolicy shop/web isolates in ingress, and no rule accepts",
					},
				},
				{
					Tenant:  "blue",
					Packets: 7,
					Rule: &pilasterv1.RuleName{
						Policy: "ClusterNetworkPolicy base",
						Rule:   `ClusterNetworkPolicy base egress[0] "out"`,
						Audit:  true,
					},
				},
			},
		},
		Offloads: []*pilasterv1.OffloadRole{
			{
				Tenant: "green", Id: 7, Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE, Backend: true, Node: "n1",
				Frontends: []string{"n2", "n3"}, LostFrontends: []string{"n3"},
			},
			{Tenant: "green", Id: 8, Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_DUAL, Node: "n4", Draining: true},
			{Tenant: "red", Id: 9, Phase: 99, Node: "n5"},
		},
		Egress: &pilasterv1.Egress{Addresses: 1200, Gateways: []*pilasterv1.EgressGatewayState{
			{Node: "n7", Alive: true, Answered: true, AgoMs: 40}, {Node: "n8", Answered: true, AgoMs: 3200},
			{Node: "n9"},
		}, Roles: []*pilasterv1.EgressGatewayRole{{Tenant: "blue", Address: "fd70:696c:6100:1:0:ff:100:10"}}},
		Services: &pilasterv1.ServicesStatus{Services: 1, Endpoints: 1200, Own: 2},
		Load: &pilasterv1.NodeLoad{Budget: 1.5, Own: .123, Fronting: []*pilasterv1.FrontingLoad{
			{Tenant: "green", Backend: "n4", Load: .25}, {Tenant: "red", Backend: "n5", Load: .05},
		}},
		Drops: []*pilasterv1.DropCount{
			{Reason: "src-not-own", Packets: 1},
			{Reason: "malformed"},
			{Reason: "dst-undecryptable", Packets: 100001, LastMinute: 12},
		},
	}
}

func TestStatusText(t *testing.T) {
	var o output
	o.format = "text"
	var b bytes.Buffer
	v := viewStatus(theStatus())
	if err := o.print(&b, v, v.textAt(noon.Add(90*time.Second))); err != nil {
		t.Fatal(err)
	}
	want := (`
node n1        ready             fd70:696c:6100:1::/64 on eth0, pilaster v1
               fabric            route to this node: not verified; test it with: pilaster preflight --uplink eth0
limits         endpoints         2,000 of 4,096, of which tenant blue has 1,900
               tenant-ids        2 of 4,096
orchestrator   connected         https://o:7070, revision 1,412, for 1m30s
gateway        open              fd70:696c:6100:1:0:ff:0:1 to the underlay, fd70:696c:6700:0:1::1 to containers; ` +
		`2 underlay services, 1 publication
datapath       healthy           veth, programs 1.4.0, first in chain
               device            veth: this kernel has no netkit
               switch            nimitz: ovs
               without           traceroute
               locals            2 of 4,096 entries
               flows             a cache of 8,192 slots
               nimitz-register   1,024 entries
               nimitz-nat        1 entry
               ila-pull          1,003 of 65,536 subscriptions, 1 without a mapping; cache misses: 9 begun, 2 refused
policies       enforced          1,200 rules of 1 tenant; packets denied: 1,234, in audit mode: 7   pilaster policy hits
               policy-ports      1,500 of 262,144 entries
               sessions          1,002 of 229,376, of which endpoint 3 default/web-0 has 1,000, ` +
		`and tenant blue 1,001; ` +
		`2 half open; since start 7 evicted, 1 refused
offloads       backend           tenant green, offload 7, active: frontends n2, n3; without an answer: n3
               frontend          tenant green, offload 8, dual: backend n4, draining
               frontend          tenant red, offload 9, unknown: backend n5
egress         addresses         1,200 in use
               gateway           n7 answered 40ms ago
               gateway           n8 answered 3.2s ago; new connections avoid it
               gateway           n9 has not answered; new connections avoid it
               gateway of        tenant blue at fd70:696c:6100:1:0:ff:100:10
services       in use            1 service with 1,200 endpoints, 2 of them here
packets        load              12 % of 1.5 CPUs by own containers, 30 % as a frontend
drops          last minute 12; since start 100,002 (dst-undecryptable 100,001, src-not-own 1)` +
		`   pilaster monitor --type drop
`)[1:]
	if b.String() != want {
		t.Errorf("status\n%s\nwant\n%s", b.String(), want)
	}
	none := theStatus()
	none.Gateway = &pilasterv1.Gateway{Missing: "the kernel has no NAT\n  nothing was changed"}
	b.Reset()
	none.Node.Edge = true
	if viewStatus(none).text(&b, noon); !strings.Contains(
		b.String(),
		"edge\topen\tbetween this region and others; no containers\n",
	) {
		t.Errorf("status\n%s\nwant a row of the Edge Switch", b.String())
	}
	b.Reset()
	if viewStatus(none).text(&b, noon); !strings.Contains(
		b.String(),
		"gateway\tnone\tthe kernel has no NAT; nothing was changed\n",
	) {
		t.Errorf("status\n%s\nwant a row about the missing gateway", b.String())
	}
}

func TestStatusBeforeRegistration(t *testing.T) {
	w := &fakeAgent{status: &pilasterv1.StatusResponse{
		Node: &pilasterv1.Node{Name: "n1"}, Problems: []string{"this node has no prefix yet\n  start the orchestrator"},
		Orchestrator: &pilasterv1.OrchestratorLink{
			Url:       "https://o:7070",
			Since:     timestamppb.New(noon),
			LastError: "connection refused\n  start it",
		},
	}}
	socket := serve(t, w)
	code, out, errs := run(t, "", "status", "--agent-socket", socket)
	if code != ExitFailed || errs != "" || !strings.Contains(out, "not ready") ||
		!strings.Contains(out, "connection refused; start it; existing tenants and containers") ||
		!strings.Contains(
			out,
			"\nproblem        this node has no prefix yet\n               start the orchestrator\n",
		) {
		t.Errorf("status: exit %d, stdout\n%sstderr %q; want exit %d, not ready, with the problem",
			code, out, errs, ExitFailed)
	}
	w.status = theStatus()
	code, out, _ = run(t, "", "status", "-o", "json", "--agent-socket", socket)
	var v statusView
	if err := json.Unmarshal([]byte(out), &v); code != ExitDone || err != nil || !v.Ready ||
		v.Drops[2].LastMinute != 12 ||
		!v.Datapath.Entries[1].Cache ||
		v.Datapath.Switches["nimitz"] != "ovs" ||
		v.Policies.Sessions.Evicted != 7 ||
		v.Policies.Hits[1].Mode != "audit" || len(v.Offloads) != 3 || v.Offloads[1].Role != "frontend" ||
		len(v.Egress.Gateways) != 3 || *v.Egress.Gateways[1].AnsweredMs != 3200 ||
		v.Egress.Gateways[2].AnsweredMs != nil || len(v.Egress.GatewayOf) != 1 || v.Services.Endpoints != 1200 {
		t.Errorf("status -o json: exit %d, %v, stdout\n%s", code, err, out)
	}
}

func TestEndpointCommands(t *testing.T) {
	socket := serve(t, &fakeAgent{})
	code, out, _ := run(t, "", "endpoint", "list", "--agent-socket", socket)
	want := `
ID   CONTAINER       TENANT   APP   STATE    NETWORK   ADDRESS    PLAINTEXT                      HOST PORTS
3    default/web-0   blue     2     active   netpila   fc00::7    fd70:696c:6100:1:0:100:200:7   [2a00::1]:53/UDP to 80
                                             nimitz    10.0.3.7   -
`[1:]
	if code != ExitDone || out != want {
		t.Errorf("exit %d\n%s\nwant\n%s", code, out, want)
	}
	if _, out, _ := run(t, "", "__complete", "endpoint", "get", "--agent-socket", socket, ""); !strings.HasPrefix(
		out,
		"default/web-0\n:4\n",
	) {
		t.Errorf("endpoint get <TAB>: %q, want default/web-0", out)
	}
	code, out, _ = run(t, "", "endpoint", "get", "default/web-0", "--agent-socket", socket)
	want = `
endpoint     3, active
container    c0ffee eth0
pod          default/web-0
tenant       blue, id 1
app          2, app=web
netpila      fc00::7                        address in the container
             fd70:696c:6100:1:0:100:200:7   address on the fabric
             fd70:696c:6100:1:0:ff:101:2f   address for hosts outside
             fc00::/8 via fe80::1
nimitz       10.0.3.7   address in the container
             0.0.0.0/0 via 169.254.1.1
host ports   [2a00::1]:53/UDP to 80
node         fc00::99   address of the node for the container
device       veth pil3, index 9, MTU 1500, container's MAC 02:70:69:6c:00:02
netns        /run/netns/x
since        2026-11-01T12:00:00Z
`[1:]
	if code != ExitDone || out != want {
		t.Errorf("exit %d\n%s\nwant\n%s", code, out, want)
	}
	var v endpointView
	code, out, _ = run(t, "", "endpoint", "get", "default/web-0", "-o", "json", "--agent-socket", socket)
	if err := json.Unmarshal([]byte(out), &v); code != ExitDone || err != nil ||
		v.Attachments[0].Address != "fc00::7" ||
		v.ID != 3 || len(v.HostPorts) != 1 ||
		v.HostPorts[0] != (hostPortView{53, 80, "udp", "2a00::1"}) ||
		v.DeviceKind != "veth" {
		t.Errorf("endpoint get -o json: exit %d, %v, stdout\n%s", code, err, out)
	}
	if code, _, errs := run(t, "", "endpoint", "get", "none", "--agent-socket", socket); code != ExitFailed ||
		!strings.Contains(errs, "error: no such endpoint") {
		t.Errorf("unknown endpoint: exit %d, stderr %q; want exit %d", code, errs, ExitFailed)
	}
	if code, _, errs := run(t, "", "endpoint", "list", "--agent-socket", "/nonexistent"); code != ExitUnreachable ||
		errs == "" {
		t.Errorf("no agent: exit %d, stderr %q; want exit %d", code, errs, ExitUnreachable)
	}
}

func TestMonitorLines(t *testing.T) {
	socket := serve(t, &fakeAgent{})
	code, out, errs := run(t, "", "monitor", "--type", "drop", "--agent-socket", socket)
	want := "2026-11-01T12:00:00.000Z  drop  src-not-own         [fc00::9]:4000 (default/web-0) → [fc00::8]:53  UDP  " +
		"80 bytes  at container of endpoint 3 default/web-0  ×1,200  by NetworkPolicy shop/web ingress[0]  " +
		"(5 events lost before)\n"
	if out != want || code != ExitUnreachable || !strings.Contains(errs, "stopping") {
		t.Errorf("exit %d, %s\n%s\nwant\n%s", code, errs, out, want)
	}
	other := eventView{
		Time:   "2026-11-01T12:00:00Z",
		Type:   "drop",
		Reason: "not-ip6",
		Hook:   "container",
		Length: 28,
		Count:  1,
	}
	if got, want := other.line(), "2026-11-01T12:00:00.000Z  drop  not-ip6             not IP  28 bytes  at "+
		"container  ×1"; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	const onFabric = "fd70:696c:6100:1:0:100:200:7"
	for want, end := range map[string]*packetEnd{
		" → [" + onFabric + "]:53  UDP":                          nil,
		" → [" + onFabric + "]:53 (default/web-0, fc00::7)  UDP": {"default/web-0", "fc00::7", onFabric},
		" → [" + onFabric + "]:53 (fc00::8)  UDP":                {"", "fc00::8", onFabric},      // on another node
		" → [" + onFabric + "]:53 (c0ffee)  UDP":                 {"c0ffee", onFabric, onFabric}, // of a clear tenant
		" → [" + onFabric + "]:53  UDP ":                         {Plaintext: onFabric},
	} {
		e := eventView{Source: "fc00::9", Destination: onFabric, DestinationPort: 53, Protocol: 17, DestinationEnd: end}
		if got := e.line() + " "; !strings.Contains(got, want) {
			t.Errorf("%s\nwant%s", got, want)
		}
	}
	_, out, _ = run(t, "", "monitor", "-o", "json", "--agent-socket", socket)
	var v eventView
	if err := json.Unmarshal([]byte(out), &v); err != nil || v.Reason != "src-not-own" || v.Count != 1200 ||
		v.SourceEnd == nil || v.SourceEnd.Endpoint != "default/web-0" || v.DestinationEnd != nil ||
		strings.Count(out, "\n") != 1 {
		t.Errorf("monitor -o json: %v, stdout\n%s\nwant one event of 1200 packets", err, out)
	}
	for _, args := range [][]string{{"monitor", "--type", "trace"}, {"monitor", "-o", "yaml"}} {
		if code, _, _ := run(t, "", args...); code != ExitUsage {
			t.Errorf("%v: exit %d, want %d", args, code, ExitUsage)
		}
	}
}

func TestAgentUsage(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	base := []string{
		"agent",
		"--orchestrator",
		"https://o:7070",
		"--uplink",
		"eth0",
		"--run-dir",
		t.TempDir(),
		"--state-dir",
		t.TempDir(),
	}
	for want, more := range map[string][]string{
		"--max-endpoints":  {"--max-endpoints", "0"},
		"--max-tenant-ids": {"--max-tenant-ids", "65536"},
		"--node-prefix":    {"--node-prefix", "fd70::/48"},
		"--max-mappings":   {"--max-mappings", "0"},
		"--nimitz":         {"--nimitz", "hardware"},
		"--device macvlan cannot be combined with --nimitz ebpf": {"--nimitz", "ebpf", "--device", "macvlan"},
		"--device macvlan cannot be combined with --nimitz ovs":  {"--nimitz", "ovs", "--device", "macvlan"},
		"--mtu-reserve":                         {"--mtu-reserve", "-1"},
		"--rack":                                {"--rack", "Row_1"},
		"--zone":                                {"--zone", "Zone_1"},
		"--packet-cpus -1: choose 0 (all CPUs)": {"--packet-cpus", "-1"},
		"--packet-cpus 99999":                   {"--packet-cpus", "99999"},
		"--packet-cpus NaN":                     {"--packet-cpus", "NaN"},
		"--orchestrator":                        {"--orchestrator", "o:7070"},
	} {
		code, _, errs := run(t, "", append(base, more...)...)
		if code != ExitUsage || !strings.Contains(errs, want) {
			t.Errorf("%v: exit %d, stderr %q; want exit %d, stderr with %q", more, code, errs, ExitUsage, want)
		}
	}
	if code, _, errs := run(t, "", append(base, "--token-file", "/nonexistent")...); code != ExitFailed ||
		!strings.Contains(errs, "--token-file") {
		t.Errorf("no token file: exit %d, stderr %q; want exit %d", code, errs, ExitFailed)
	}
	if code, _, errs := run(t, "", append(base, "--uplink", "nosuch0")...); code != ExitFailed ||
		!strings.Contains(errs, "--uplink nosuch0") {
		t.Errorf("no uplink: exit %d, stderr %q; want exit %d", code, errs, ExitFailed)
	}
	if code, _, errs := run(t, "", "agent"); code != ExitUsage || !strings.Contains(errs, "required") {
		t.Errorf("no flags: exit %d, stderr %q; want exit %d", code, errs, ExitUsage)
	}
}

func TestCompleteAgent(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("pilaster.x.y\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o := daemon.Options{OrchestratorURL: "https://o:7070", MaxEndpoints: 10, MaxTenantIDs: 10}
	if err := completeAgent(&o, token, "fd70:696c:6100:1::/64"); err != nil {
		t.Fatal(err)
	}
	if o.Token != "pilaster.x.y\n" || o.NodePrefix.String() != "fd70:696c:6100:1::/64" || o.NodeName == "" ||
		o.NodeName != strings.ToLower(o.NodeName) {
		t.Errorf("options: %+v, want token, prefix and host name", o)
	}
}

// A node that has joined needs no token, so a missing token file is not an error.
func TestAgentWithoutItsTokenFile(t *testing.T) {
	o := daemon.Options{OrchestratorURL: "https://o:7070", MaxEndpoints: 10, MaxTenantIDs: 10, StateDir: t.TempDir()}
	if err := completeAgent(&o, "/nonexistent/join-token", ""); err == nil ||
		!strings.Contains(err.Error(), "/nonexistent/join-token: no such file") ||
		exitCode(err) != ExitFailed {
		t.Errorf("before it joined: %v, want an error with the path", err)
	}
	if err := os.WriteFile(filepath.Join(o.StateDir, join.MemberFile), []byte("a certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := completeAgent(&o, "/nonexistent/join-token", ""); err != nil || o.Token != "" {
		t.Errorf("after it joined: %v, token %q; want no error and no token", err, o.Token)
	}
}

// The agent must not start in a mount namespace without the machine's bpffs: when it ended, its pins would disappear,
// and containers would lose their network.
func TestAgentWithOwnBPFFS(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	flags := []string{"--uplink", "lo", "--bpffs", filepath.Join(t.TempDir(), "bpf")}
	err := netns.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		code, _, errs := run(
			t,
			"",
			append(
				[]string{
					"agent",
					"--orchestrator",
					"https://[::1]:1",
					"--run-dir",
					t.TempDir(),
					"--state-dir",
					t.TempDir(),
				},
				flags...)...)
		if code != ExitFailed || !strings.Contains(errs, "pins in "+flags[3]+" would be removed with the agent") {
			t.Errorf("agent: exit %d, stderr %q; want exit %d and the folder of the pins", code, errs, ExitFailed)
		}
		code, out, _ := run(t, "", append([]string{"preflight"}, flags...)...)
		if code != ExitFailed ||
			!strings.Contains(out, "fail   bpffs                   pins in "+flags[3]+
				" would be removed with the agent") {
			t.Errorf("preflight: exit %d, stdout %q; want exit %d and a failed check of bpffs", code, out, ExitFailed)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
