package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/sharing"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/cniclient"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/unixrpc"
)

// serviceBed is a Service on its socket, with a real namespace for a container.
type serviceBed struct {
	*agenttest.Bed
	service *Service
	socket  string
	netns   string
	client  pilasterv1connect.AgentServiceClient
}

func newServiceBed(t *testing.T) *serviceBed {
	t.Helper()
	b := &serviceBed{Bed: agenttest.New(t), socket: filepath.Join(t.TempDir(), "agent.sock")}
	b.netns = agenttest.MakeNetns(t)
	node, err := state.OpenNode(t.TempDir(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	m := state.Membership{ClusterUUID: "cluster", Prefix: agenttest.NodePrefix, Plan: address.DefaultPlan()}
	if err := node.Join(m); err != nil {
		t.Fatal(err)
	}
	link := func() agent.LinkStatus { return agent.LinkStatus{LastError: "not connected yet"} }
	b.service = New(
		Config{Node: node, Link: link, URL: "https://orchestrator", Uplinks: []string{"eth0"}, Version: "v1",
			Log: slog.New(slog.DiscardHandler)},
	)
	l, err := unixrpc.Listen(b.socket)
	if err != nil {
		t.Fatal(err)
	}
	server := unixrpc.Server(b.service.Handler(b.service.ObserveHandler()))
	server.ConnContext = WithPeer
	done := make(chan struct{})
	go func() { defer close(done); server.Serve(l) }()
	t.Cleanup(func() { server.Close(); <-done })
	b.client = pilasterv1connect.NewAgentServiceClient(unixrpc.Client(b.socket), unixrpc.URL)
	return b
}

// cni runs the plugin as a runtime does, for the container's eth0.
func (b *serviceBed) cni(verb, container, extra string) (stdout string, err error) {
	b.T.Helper()
	return b.cniIn(verb, container, b.netns, extra)
}

func (b *serviceBed) cniIn(verb, container, netns, extra string) (string, error) {
	b.T.Helper()
	env := []string{
		"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + container, "CNI_NETNS=" + netns, "CNI_IFNAME=eth0",
		"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0",
	}
	config := `{"cniVersion":"1.1.0","name":"pilaster","type":"pilaster-cni","tenant":"blue",` +
		`"labels":{"app":"web"},"agentSocket":"` + b.socket + `"` + extra + `}`
	c := &cniclient.Call{Kernel: syscall.Syscall6}
	for _, v := range env {
		c.Variable(v)
	}
	stdin, write, err := os.Pipe()
	if err != nil {
		b.T.Fatal(err)
	}
	defer stdin.Close()
	if _, err := write.WriteString(config); err != nil { // fits into the pipe's buffer
		b.T.Fatal(err)
	}
	write.Close()
	stdout, _, exit := c.Run(int(stdin.Fd()))
	if exit == 0 {
		return stdout, nil
	}
	refused := &types.Error{}
	if err := json.Unmarshal([]byte(stdout), refused); err != nil {
		b.T.Fatalf("%s printed %q, which is no error of CNI: %v", verb, stdout, err)
	}
	return "", refused
}

func code(err error) uint {
	var e *types.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}

// The plugin and the agent together, over the socket, with every verb.
func TestPluginAgainstTheAgent(t *testing.T) {
	b := newServiceBed(t)
	if _, err := b.cni("STATUS", "", ""); code(err) != 50 || !strings.Contains(err.Error(), "starting") {
		t.Fatalf("STATUS before the core is there: %v", err)
	}
	if _, err := b.cni("ADD", "c1", ""); code(err) != types.ErrTryAgainLater {
		t.Fatalf("ADD before the core is there: %v", err)
	}
	var blocked error
	b.service.Serve(b.Core, func() error { return blocked })
	if _, err := b.cni("STATUS", "", ""); err != nil {
		t.Fatalf("STATUS: %v", err)
	}

	var opened string
	b.Driver.During = func(call string, r endpoint.Record) {
		if call == "CreateDevice" {
			opened = r.Netns
			same, err := sameFile(r.Netns, b.netns)
			if err != nil || !same {
				t.Errorf("%s is not the container's namespace: %v", r.Netns, err)
			}
		}
	}
	out, err := b.cni("ADD", "c1", "")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(opened, "/proc/self/fd/") {
		t.Errorf("the driver was to open %s", opened)
	}
	r, err := b.Find("default/web-0")
	if err != nil {
		t.Fatal(err)
	}
	if r.Netns != b.netns || r.CNINetwork != "pilaster" || r.Labels["app"] != "web" || r.Pod != "default/web-0" {
		t.Errorf("record %+v", r)
	}
	// The result is what the container sees, and nothing of the plaintext.
	var result types100.Result
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		t.Fatal(err)
	}
	a := r.Attachments[0]
	if len(result.IPs) != 1 || result.IPs[0].Address.String() != a.Address.String()+"/128" ||
		result.IPs[0].Gateway.String() != "fe80::1" ||
		len(result.Routes) != 2 ||
		result.Routes[0].Dst.String() != "fc00::/8" || result.Routes[1].Dst.String() != "fd70:696c:7300::/40" ||
		result.CNIVersion != "1.1.0" {
		t.Errorf("result %s", out)
	}
	if inside := result.Interfaces[*result.IPs[0].Interface]; inside.Name != "eth0" || inside.Sandbox != b.netns ||
		inside.Mac != "02:70:69:6c:00:02" ||
		inside.Mtu != 1500 {
		t.Errorf("interface %+v", inside)
	}
	if strings.Contains(out, a.Plaintext.String()) {
		t.Errorf("the plaintext address is in %s", out)
	}

	if _, err := b.cni("ADD", "c1", ""); code(err) != types.ErrInternal {
		t.Errorf("second ADD: %v", err)
	}
	prev := `,"prevResult":` + out
	if _, err := b.cni("CHECK", "c1", prev); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if _, err := b.cni("CHECK", "c1", ""); code(err) != types.ErrInvalidNetworkConfig {
		t.Errorf("CHECK without prevResult: %v", err)
	}
	if _, err := b.cni("CHECK", "c1", strings.Replace(prev, "/128", "/64", 1)); code(err) != types.ErrInternal ||
		!strings.Contains(err.Error(), "address") {
		t.Errorf("CHECK of another address: %v", err)
	}
	b.Driver.Fail["Check"] = errors.New("neighbour fe80::1 is missing")
	if _, err := b.cni("CHECK", "c1", prev); code(err) != types.ErrInternal ||
		!strings.Contains(err.Error(), "neighbour fe80::1") {
		t.Errorf("CHECK of a broken neighbour: %v", err)
	}
	if _, err := b.cni("CHECK", "c9", prev); code(err) != types.ErrUnknownContainer {
		t.Errorf("CHECK of an unknown container: %v", err)
	}

	blocked = errors.New("private prefix overlaps")
	if _, err := b.cni("ADD", "c2", ""); code(err) != types.ErrTryAgainLater {
		t.Errorf("ADD while blocked: %v", err)
	}
	if _, err := b.cni("STATUS", "", ""); code(err) != 50 || !strings.Contains(err.Error(), "overlaps") {
		t.Errorf("STATUS while blocked: %v", err)
	}
	blocked = nil

	if _, err := b.cni("GC", "", `,"cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}]`); err != nil ||
		len(b.Endpoints()) != 1 {
		t.Errorf("GC that lists all: %v, %d left", err, len(b.Endpoints()))
	}
	for range 2 {
		if _, err := b.cniIn("DEL", "c1", "", ""); err != nil {
			t.Errorf("DEL without a namespace: %v", err)
		}
	}
	if _, err := b.cni("DEL", "never", ""); err != nil {
		t.Errorf("DEL of an unknown container: %v", err)
	}
	if _, err := b.cni("ADD", "c3", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := b.cni("GC", "", `,"cni.dev/valid-attachments":[]`); err != nil {
		t.Errorf("GC: %v", err)
	}
	b.CheckClean()
}

func TestStatusTellsAll(t *testing.T) {
	b := newServiceBed(t)
	status := func() *pilasterv1.StatusResponse {
		resp, err := b.client.Status(t.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Msg
	}
	if s := status(); s.Ready || len(s.Problems) != 1 || s.Node.Prefix != agenttest.NodePrefix.String() ||
		s.Datapath != nil {
		t.Errorf("before the core is there: %v", s)
	}
	b.service.Serve(b.Core, nil)
	b.MustAdd("c1")
	b.Driver.Health = dpapi.Status{
		DeviceKind: "veth", Programs: "p1", Healthy: true, FirstInChain: true,
		Drops: []dpapi.Drops{{Reason: "src-not-own", Packets: 7}, {Reason: "malformed", Packets: 0}},
	}
	b.Driver.Used = []dpapi.Entries{
		{Table: "locals", Used: 1, Capacity: 10},
		{Table: "flows", Used: 3, Capacity: 8, Cache: true},
	}
	b.service.drops.Add([]dpapi.Drops{{Reason: "src-not-own", Packets: 3}})
	s := status()
	if !s.Ready || s.Endpoints != 1 || len(s.Limits) != 2 || s.Limits[0].Capacity != dpapi.DefaultMaxEndpoints ||
		s.Tenants != 1 ||
		!slices.Equal(s.Uplinks, []string{"eth0"}) ||
		len(s.Datapath.Entries) != 2 {
		t.Errorf("status %v", s)
	}
	if d := s.Drops[0]; d.Packets != 7 || d.LastMinute != 4 {
		t.Errorf("drops %v", s.Drops)
	}
	get := func(path string) (int, string) {
		resp, err := unixrpc.Client(b.socket).Get(unixrpc.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body)
	}
	if status, body := get("/readyz"); status != 200 || body != "ok\n" {
		t.Errorf("/readyz %d %q", status, body)
	}
	_, metrics := get("/metrics")
	for _, want := range []string{
		`pilaster_table_entries{table="endpoints"} 1`, `pilaster_table_capacity{table="endpoints"} 4096`,
		`pilaster_table_entries{table="locals"} 1`,
		`pilaster_table_largest_tenant_entries{table="tenant-ids",tenant="blue"} 1`,
		`pilaster_datapath_drops_total{reason="src-not-own"} 7`,
		`pilaster_agent_call_duration_seconds_count{code="ok",procedure="/pilaster.v1.AgentService/Status"} 2`,
		`pilaster_build_info{goversion="` + runtime.Version() + `",programs="p1",version="v1"} 1`,
	} {
		if !strings.Contains(metrics, want+"\n") {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	if strings.Contains(metrics, `table="flows"`) {
		t.Error("/metrics has a cache among the tables")
	}
	b.Driver.Health.Problems, b.Driver.Health.FirstInChain = []string{"another program stands before ours"}, false
	if s := status(); !s.Ready || s.Datapath.FirstInChain || len(s.Problems) != 1 {
		t.Errorf("behind another program: %v", s)
	}
	if _, metrics := get("/metrics"); !strings.Contains(metrics, "pilaster_datapath_tcx_first 0\n") {
		t.Error("/metrics does not say that another program stands before ours")
	}
	b.Driver.Health.Problems, b.Driver.Health.Healthy = []string{"the uplink has no program"}, false
	if s := status(); s.Ready || s.Problems[0] != "the uplink has no program" {
		t.Errorf("with a problem: %v", s)
	}
	if status, body := get("/readyz"); status != 503 || !strings.Contains(body, "no program") {
		t.Errorf("/readyz with a problem: %d %q", status, body)
	}
	if status, _ := get("/healthz"); status != 200 {
		t.Errorf("/healthz with a problem: %d", status)
	}
}

func TestExplain(t *testing.T) {
	b := newServiceBed(t)
	blue := b.Orchestrator.Tenants["blue"]
	blue.ServicesNumber = 5
	b.Orchestrator.Tenants["blue"] = blue
	b.service.Serve(b.Core, nil)
	r := b.MustAdd("c1")
	ask := func(addr string) *pilasterv1.ExplainResponse {
		resp, err := b.client.Explain(t.Context(), connect.NewRequest(&pilasterv1.ExplainRequest{Address: addr}))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Msg
	}
	a := r.Attachments[0]
	for _, addr := range []netip.Addr{a.Address, a.Plaintext} {
		e := ask(addr.String())
		if e.Plaintext != a.Plaintext.String() || e.Tenant != "blue" || e.App.GetLabels()["app"] != "web" ||
			e.Endpoint.GetId() != uint32(r.ID) {
			t.Errorf("%v: %v", addr, e)
		}
	}
	if e := ask("fc00::1"); e.Plaintext != "" || e.Tenant != "" || e.Endpoint != nil {
		t.Errorf("a ciphertext of no tenant: %v", e)
	}
	if e := ask("fd70:696c:6100:9:0:500:100:1"); e.Plaintext == "" || e.Tenant != "" || e.App != nil ||
		e.Endpoint != nil {
		t.Errorf("a plaintext of a tenant that is not here: %v", e)
	}
	for addr, of := range map[string]string{"fd70:696c:7300:5::1": "blue", "fd70:696c:7300:6::1": ""} {
		if e := ask(addr); e.Plaintext != "" || e.Tenant != of {
			t.Errorf("the address of a service, %s: %v, want tenant %q", addr, e, of)
		}
	}
	if _, err := b.client.Explain(t.Context(),
		connect.NewRequest(&pilasterv1.ExplainRequest{Address: "::ffff:1.2.3.4"})); connect.CodeOf(
		err,
	) != connect.CodeInvalidArgument {
		t.Errorf("an IPv4-mapped address: %v", err)
	}
}

func TestGetEndpoint(t *testing.T) {
	b := newServiceBed(t)
	b.service.Serve(b.Core, nil)
	r := b.MustAdd("c1")
	two := b.Request("c1")
	two.Interface = "eth1"
	if _, err := b.Add(t.Context(), two); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]connect.Code{
		"1": 0, r.Attachments[0].Address.String(): 0, r.Attachments[0].Plaintext.String(): 0,
		"c1": connect.CodeInvalidArgument, "default/c1": connect.CodeInvalidArgument, "": connect.CodeNotFound,
		"c9": connect.CodeNotFound,
	} {
		resp, err := b.client.GetEndpoint(t.Context(), connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: key}))
		if want == 0 && (err != nil || resp.Msg.Endpoint.Id != 1) || want != 0 && connect.CodeOf(err) != want {
			t.Errorf("%q: %v, %v", key, resp, err)
		}
	}
	resp, err := b.client.GetEndpoint(t.Context(), connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: "1"}))
	if err != nil {
		t.Fatal(err)
	}
	seen, err := address.Parse(resp.Msg.Endpoint.NodeAddress)
	if err != nil {
		t.Fatal(err)
	}
	p := address.Split(b.Explain(seen).Plaintext)
	if own := address.Split(r.Attachments[0].Plaintext); p.Node != own.Node || p.Tenant != own.Tenant ||
		p.App != address.GatewayApp {
		t.Errorf("the container sees its node as %v, which is %+v", seen, p)
	}
}

func TestKinds(t *testing.T) {
	seen := map[connect.Code]bool{}
	for _, kind := range []error{
		refusal.ErrInvalid, refusal.ErrNotFound, refusal.ErrExists, refusal.ErrExhausted, refusal.ErrUnavailable,
		refusal.ErrCheck,
	} {
		err := toConnect(refusal.New(kind, "because"))
		if seen[connect.CodeOf(err)] || connect.CodeOf(err) == connect.CodeInternal ||
			!strings.HasSuffix(err.Error(), "because") {
			t.Errorf("%v became %v", kind, err)
		}
		seen[connect.CodeOf(err)] = true
	}
	if connect.CodeOf(toConnect(agenttest.ErrFake)) != connect.CodeInternal || toConnect(nil) != nil {
		t.Error("an error of no kind is internal, and none stays none")
	}
}

// sharingPath is the packet path of a node that can be in offloads.
type sharingPath struct{ dpapi.Sharing }

func (sharingPath) Probe(dpapi.Probe, netip.Prefix) error { return nil }

func (sharingPath) ProbeAnswered(uint32, netip.Prefix) (time.Duration, bool, error) {
	return 0, true, nil
}

func (sharingPath) Messages() (map[uint32]dpapi.Messages, error) {
	return map[uint32]dpapi.Messages{7: {1: 100, 2: 5, 4: 20}, 8: {3: 40}}, nil
}

func (sharingPath) TenantSessions() (used map[uint32]int, capacity int, err error) {
	return nil, 2, nil
}

// TestStatusOfOffloads: the status lists what this node does for offloads.
func TestStatusOfOffloads(t *testing.T) {
	b := newServiceBed(t)
	blue := b.Orchestrator.Tenants["blue"]
	far := netip.MustParsePrefix("fd70:696c:6100:2::/64")
	blue.Offloads = []tenant.Offload{{
		ID: 7, Node: "n2", Prefix: far, Phase: tenant.OffloadReturning, Epoch: 1,
		Frontends: []tenant.Frontend{
			{Node: "n1", Prefix: agenttest.NodePrefix, Draining: true},
			{Node: "n3", Prefix: netip.MustParsePrefix("fd70:696c:6100:3::/64")},
		},
	}}
	blue.Offloads = append(blue.Offloads, tenant.Offload{
		ID: 8, Node: "n1", Prefix: agenttest.NodePrefix, Phase: tenant.OffloadActive, Epoch: 1,
		Frontends: []tenant.Frontend{{Node: "n2", Prefix: far}},
	})
	b.Orchestrator.Tenants["blue"] = blue
	b.MustAdd("c1")
	b.service.Serve(b.Core, nil)
	path := sharingPath{}
	is := Sharing{
		Prober: sharing.NewProber(b.Core, path, slog.New(slog.DiscardHandler)),
		Meter:  sharing.NewMeter(b.Core, path, 2),
	}
	b.service.ServeSharing(is)
	ctx, cancel := context.WithCancel(t.Context())
	probing := make(chan struct{})
	go func() {
		defer close(probing)
		is.Prober.Run(ctx)
	}()
	agenttest.Eventually(t, func() error {
		if len(is.Prober.Answers("blue")) == 0 {
			return errors.New("no frontend was probed")
		}
		return nil
	})
	cancel()
	<-probing
	b.SetFrontends("blue", []string{"n2"}, nil)
	if _, err := is.Meter.Load(false); err != nil {
		t.Fatal(err)
	}
	want := []*pilasterv1.OffloadRole{
		{
			Tenant: "blue", Id: 7, Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_RETURNING, Node: "n2",
			Frontends: []string{"n3"}, Draining: true, Packets: 105, Answered: 20,
		},
		{
			Tenant: "blue", Id: 8, Phase: pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE, Node: "n1", Backend: true,
			Frontends: []string{"n2"}, LostFrontends: []string{"n2"}, Asked: 40,
		},
	}
	status := b.service.status(t.Context())
	if status.Load.GetBudget() != 2 {
		t.Errorf("load %v", status.Load)
	}
	if len(status.Offloads) != len(want) || len(status.Offloads[1].Answers) != 1 {
		t.Fatalf("offloads %v, want %v", status.Offloads, want)
	}
	status.Offloads[1].Answers = nil
	for i, got := range status.Offloads {
		if !proto.Equal(got, want[i]) {
			t.Errorf("offload %v, want %v", got, want[i])
		}
	}
	w := httptest.NewRecorder()
	b.service.ObserveHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, line := range []string{
		`pilaster_offload_messages_total{backend="n2",kind="packet",tenant="blue"} 105`,
		`pilaster_offload_messages_total{backend="n2",kind="answer",tenant="blue"} 20`,
		`pilaster_offload_messages_total{backend="n1",kind="question",tenant="blue"} 40`,
		`pilaster_offload_lost_frontends{tenant="blue"} 1`,
		`pilaster_offload_probe_age_seconds{frontend="n2",tenant="blue"} `,
		`pilaster_packet_load{of="own"} 0`, `pilaster_packet_load{of="frontend"} 0`,
	} {
		if !strings.Contains(w.Body.String(), line) {
			t.Errorf("no line %s in\n%s", line, w.Body)
		}
	}
}
