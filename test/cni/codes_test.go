package cni_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/unixrpc"
)

// network is a network configuration used through libcni, which returns error codes.
type network struct {
	*libcni.CNIConfig
	list *libcni.NetworkConfigList
}

// network parses a configuration. Each call creates a new cache of attachments, as if the runtime had lost its own.
func (n *node) network(t *testing.T, name string, plugin map[string]any) network {
	t.Helper()
	plugin["agentSocket"] = n.lab.AgentSocket(n.name)
	list, err := libcni.NetworkConfFromBytes(conflist(t, "1.1.0", name, plugin))
	if err != nil {
		t.Fatal(err)
	}
	return network{libcni.NewCNIConfigWithCacheDir([]string{plugins(t)}, t.TempDir(), nil), list}
}

func in(tenant string) map[string]any { return map[string]any{"tenant": tenant} }

func attachment(id string, ns *netns.Namespace) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: id, NetNS: ns.Path(), IfName: lab.Interface}
}

func (w network) add(ctx context.Context, id string, ns *netns.Namespace) error {
	_, err := w.AddNetworkList(ctx, w.list, attachment(id, ns))
	return err
}

func (w network) check(ctx context.Context, id string, ns *netns.Namespace) error {
	return w.CheckNetworkList(ctx, w.list, attachment(id, ns))
}

func (w network) del(ctx context.Context, id string, ns *netns.Namespace) error {
	return w.DelNetworkList(ctx, w.list, attachment(id, ns))
}

func (w network) gc(ctx context.Context, valid ...string) error {
	args := &libcni.GCArgs{}
	for _, id := range valid {
		args.ValidAttachments = append(args.ValidAttachments,
			types.GCAttachment{ContainerID: id, IfName: lab.Interface})
	}
	return w.GCNetworkList(ctx, w.list, args)
}

func (w network) status(ctx context.Context) error { return w.GetStatusNetworkList(ctx, w.list) }

func hasCode(t *testing.T, what string, err error, code uint, said string) {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(err.Error(), said) {
		t.Errorf("%s: got error %v (%+v), want code %d and %q", what, err, e, code, said)
	}
}

// testCodes provokes each documented error code.
func testCodes(t *testing.T, n *node) {
	ctx := labtest.Context(t)
	w, ns := n.network(t, "codes", in("blue")), n.container(t, "c1")

	info, err := w.GetVersionInfo(ctx, "pilaster-cni")
	if err != nil || !slices.Equal(info.SupportedVersions(), []string{"1.0.0", "1.1.0"}) {
		t.Errorf("VERSION: %v, %v", info, err)
	}
	hasCode(t, "ADD to an unknown tenant", n.network(t, "codes", in("missing")).add(ctx, "c1", ns), 101, `"missing"`)
	hasCode(t, "ADD without a tenant", n.network(t, "codes", in("")).add(ctx, "c1", ns), types.ErrInvalidNetworkConfig,
		"pilaster.io/tenant")
	n.empty(ctx, t)

	if err := w.add(ctx, "c1", ns); err != nil {
		t.Fatal(err)
	}
	if err := n.lab.Stop(ctx, lab.AgentProcess(n.name)); err != nil {
		t.Fatal(err)
	}
	other := n.container(t, "c2")
	hasCode(t, "STATUS without an agent", w.status(ctx), 50, n.lab.AgentSocket(n.name))
	hasCode(t, "ADD without an agent", w.add(ctx, "c2", other), types.ErrTryAgainLater, n.lab.AgentSocket(n.name))
	hasCode(t, "CHECK without an agent", w.check(ctx, "c1", ns), types.ErrTryAgainLater, n.lab.AgentSocket(n.name))
	hasCode(t, "DEL without an agent", w.del(ctx, "c1", ns), types.ErrTryAgainLater, n.lab.AgentSocket(n.name))
	// c1 is listed as valid, because libcni calls DEL before GC for all others.
	hasCode(t, "GC without an agent", w.gc(ctx, "c1"), types.ErrTryAgainLater, n.lab.AgentSocket(n.name))
	if err := n.lab.Start(ctx, lab.AgentProcess(n.name)); err != nil {
		t.Fatal(err)
	}
	for _, verb := range []func() error{
		func() error { return w.status(ctx) },
		func() error { return w.check(ctx, "c1", ns) },
		func() error { return w.del(ctx, "c1", ns) },
	} {
		if err := verb(); err != nil {
			t.Error(err)
		}
	}
	n.empty(ctx, t)

	if err := w.add(ctx, "c1", ns); err != nil {
		t.Fatal(err)
	}
	if err := n.network(t, "codes", in("blue")).del(ctx, "c1", ns); err != nil { // w's cache still has c1
		t.Fatal(err)
	}
	hasCode(t, "CHECK of a deleted container", w.check(ctx, "c1", ns), types.ErrUnknownContainer, "c1")
	if err := w.del(ctx, "c1", ns); err != nil {
		t.Error(err)
	}
}

// testAlone adds containers while no orchestrator runs. The state that the node has cached is enough.
func testAlone(t *testing.T, n *node) {
	ctx := labtest.Context(t)
	w, ns, other := n.network(t, "alone", in("blue")), n.container(t, "c1"), n.container(t, "c2")
	if err := w.add(ctx, "c1", ns); err != nil {
		t.Fatal(err)
	}
	if err := n.lab.Stop(ctx, lab.Orchestrator); err != nil {
		t.Fatal(err)
	}
	hasCode(t, "a tenant new to the node", n.network(t, "alone", in("red")).add(ctx, "c2", other),
		types.ErrTryAgainLater, "red")
	labels := n.network(t, "alone", map[string]any{"tenant": "blue", "labels": map[string]string{"app": "new"}})
	hasCode(t, "labels new to the node", labels.add(ctx, "c2", other), types.ErrTryAgainLater, "app=new")
	for _, err := range []error{w.status(ctx), w.add(ctx, "c2", other), w.check(ctx, "c2", other),
		w.del(ctx, "c2", other)} {
		if err != nil {
			t.Error(err)
		}
	}
	if err := n.lab.Start(ctx, lab.Orchestrator); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(labels.add(ctx, "c2", other), labels.del(ctx, "c2", other),
		w.del(ctx, "c1", ns)); err != nil {
		t.Error(err)
	}
	n.empty(ctx, t)
}

// TestFullNode adds one container more than the node's maximum.
func TestFullNode(t *testing.T) {
	ctx := labtest.Context(t)
	n := newNode(t, labtest.New(t, lab.Spec{Nodes: []string{"n1"}, Tenants: []lab.Tenant{{Name: "blue"}}},
		func(o *lab.Options) { o.AgentArgs = []string{"--max-endpoints", "1", "--max-tenant-ids", "1"} }), "n1")
	w, first, second := n.network(t, "full", in("blue")), n.container(t, "c1"), n.container(t, "c2")
	if err := w.add(ctx, "c1", first); err != nil {
		t.Fatal(err)
	}
	if _, err := n.lab.Kill(ctx, lab.AgentProcess(n.name)); err != nil { // the agent of a full node must start
		t.Fatal(err)
	}
	devices, metrics := n.devices(t), n.metrics(t)
	hasCode(t, "ADD to a full node", w.add(ctx, "c2", second), 102,
		"1 of 1 endpoints are in use, 1 of them by tenant blue")
	labels := n.network(t, "full", map[string]any{"tenant": "blue", "labels": map[string]string{"app": "new"}})
	hasCode(t, "ADD to a full node, of an unknown app", labels.add(ctx, "c2", second), 102, "--max-endpoints")
	if d := links(t, second); len(d) != 1 || !slices.Equal(n.devices(t), devices) || n.metrics(t) != metrics {
		t.Errorf("the refused container has %d devices, the node %v; its tables\n%swere\n%s", len(d), n.devices(t),
			n.metrics(t), metrics)
	}
	want := "pilaster_table_largest_tenant_entries{table=\"endpoints\",tenant=\"blue\"} 1\n"
	if !strings.Contains(metrics, want) {
		t.Errorf("no %q in\n%s", want, metrics)
	}
	if err := w.check(ctx, "c1", first); err != nil {
		t.Error(err)
	}
	if err := w.del(ctx, "c1", first); err != nil {
		t.Fatal(err)
	}
	if err := w.add(ctx, "c2", second); err != nil {
		t.Errorf("ADD after a DEL: %v", err)
	}
	if err := w.del(ctx, "c2", second); err != nil {
		t.Fatal(err)
	}
	if apps, err := n.lab.Operator().GetTenant(ctx,
		connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "blue"})); err != nil || len(apps.Msg.Apps) != 1 {
		t.Errorf("the cluster has state of a refused container: %v, %v", apps, err)
	}
	n.empty(ctx, t)
}

// metrics returns the metrics of the node's tables.
func (n *node) metrics(t *testing.T) string {
	t.Helper()
	resp, err := unixrpc.Client(n.lab.AgentSocket(n.name)).Get(unixrpc.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(slices.DeleteFunc(strings.SplitAfter(string(body), "\n"), func(line string) bool {
		return !strings.HasPrefix(line, "pilaster_table_")
	}), "")
}

// testGarbage collects endpoints that no runtime lists as valid.
func testGarbage(t *testing.T, n *node) {
	ctx := labtest.Context(t)
	w, other := n.network(t, "garbage", in("blue")), n.network(t, "other", in("blue"))
	for _, id := range []string{"kept", "lost-1", "lost-2"} {
		if err := w.add(ctx, id, n.container(t, id)); err != nil {
			t.Fatal(err)
		}
	}
	if err := other.add(ctx, "foreign", n.container(t, "foreign")); err != nil {
		t.Fatal(err)
	}
	// The runtime has lost its cache, so only the plugin's GC removes anything.
	forgetful := n.network(t, "garbage", in("blue"))
	left := func(valid ...string) []string {
		if err := forgetful.gc(ctx, valid...); err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, e := range n.endpoints(ctx, t) {
			ids = append(ids, e.ContainerId)
		}
		slices.Sort(ids)
		if d := n.devices(t); len(d) != len(withoutContainers)+len(ids) {
			t.Errorf("endpoints %v remain, with devices %v", ids, d)
		}
		return ids
	}
	if got := left("kept", "lost-1", "lost-2"); !slices.Equal(got, []string{"foreign", "kept", "lost-1", "lost-2"}) {
		t.Errorf("unexpected endpoints after a GC without garbage: %v", got)
	}
	// A container whose namespace is gone is garbage too; the agent may already have removed it.
	if err := netns.Remove(n.folder + "/netns/lost-2"); err != nil {
		t.Fatal(err)
	}
	if got := left("kept", "never-was"); !slices.Equal(got, []string{"foreign", "kept"}) {
		t.Errorf("endpoints remain after GC: %v", got)
	}

	// cnitool lists no valid attachments, so its GC removes all endpoints of the network.
	n.configure(t, "garbage", conflist(t, "1.1.0", "garbage", map[string]any{"tenant": "blue"}))
	tool := newCNITool(t, n, "garbage")
	tool.add(ctx, t, n.container(t, "c1"))
	tool.must(ctx, t, "gc", n.container(t, "none"))
	if got := n.endpoints(ctx, t); len(got) != 1 || got[0].ContainerId != "foreign" {
		t.Errorf("endpoints remain after cnitool gc: %v", got)
	}
	if err := other.gc(ctx); err != nil {
		t.Fatal(err)
	}
	n.empty(ctx, t)
}

// testHostPorts passes host ports as a runtime does, with the capability portMappings.
func testHostPorts(t *testing.T, n *node) {
	ctx := labtest.Context(t)
	mapping := func(more string) json.RawMessage {
		return json.RawMessage(`[{"hostPort": 8080, "containerPort": 80` + more + `}]`)
	}
	tcp := mapping(`, "protocol": "tcp", "hostIP": "0.0.0.0"`)
	plugin := func() map[string]any {
		return map[string]any{"tenant": "blue", "capabilities": map[string]bool{"portMappings": true}}
	}
	call := func(verb, id string, mappings json.RawMessage) error {
		t.Helper()
		w := n.network(t, "ports", plugin())
		ns, err := netns.Open(filepath.Join(n.folder, "netns", id))
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		with := attachment(id, ns)
		with.CapabilityArgs = map[string]any{"portMappings": mappings}
		switch verb {
		case "ADD":
			_, err = w.AddNetworkList(ctx, w.list, with)
		case "DEL":
			err = w.DelNetworkList(ctx, w.list, with)
		}
		return err
	}
	first := n.container(t, "c1")
	n.container(t, "c2")
	for more, said := range map[string]string{
		`, "protocol": "sctp"`:                                          "tcp or udp only",
		`, "protocol": "tcp", "hostIP": "192.0.2.1"`:                    "use an IPv6 address of this node",
		`, "protocol": "tcp", "hostIP": "127.0.0.1"`:                    "no loopback address",
		`, "protocol": "tcp", "hostIP": "2001:db8:ffff::1"`:             "this node does not have the address",
		`, "protocol": "tcp"}, {"hostPort": 8080, "containerPort": 81`:  "exclude each other",
		`, "protocol": "tcp"}, {"hostPort": 70000, "containerPort": 81`: "use 1 to 65535",
	} {
		hasCode(t, more, call("ADD", "c1", mapping(more)), types.ErrInvalidNetworkConfig, said)
	}
	n.empty(ctx, t)

	// One cache for ADD and CHECK, which needs the result.
	w := n.network(t, "ports", plugin())
	with := attachment("c1", first)
	with.CapabilityArgs = map[string]any{"portMappings": tcp}
	if _, err := w.AddNetworkList(ctx, w.list, with); err != nil {
		t.Fatal(err)
	}
	if ports := n.endpoints(ctx, t)[0].HostPorts; len(ports) != 1 || ports[0].Host != 8080 || ports[0].Address != "" {
		t.Errorf("the agent has host ports %v", ports)
	}
	if err := w.CheckNetworkList(ctx, w.list, with); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	with.CapabilityArgs = map[string]any{"portMappings": mapping(`, "protocol": "udp"`)}
	hasCode(t, "CHECK of another host port", w.CheckNetworkList(ctx, w.list, with), types.ErrInternal, "host ports")
	hasCode(t, "ADD of a host port that is taken", call("ADD", "c2", tcp), 102, "is that of container c1")
	if err := call("ADD", "c2", mapping(`, "protocol": "udp"`)); err != nil {
		t.Errorf("the same port over UDP: %v", err)
	}
	if err := call("DEL", "c2", mapping(`, "protocol": "sctp"`)); err != nil {
		t.Errorf("DEL does not read host ports: %v", err)
	}
	if err := w.gc(ctx); err != nil { // the container is not valid any more
		t.Error(err)
	}
	if err := call("ADD", "c2", tcp); err != nil {
		t.Errorf("a host port after GC: %v", err)
	}
	if err := call("DEL", "c2", tcp); err != nil {
		t.Error(err)
	}
	n.empty(ctx, t)
}
