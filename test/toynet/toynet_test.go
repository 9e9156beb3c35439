package toynet_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/netpila"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/test/toynet"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func namespace(t *testing.T, name string) *netns.Namespace {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	ns, err := netns.Create(path)
	must(t, err)
	t.Cleanup(func() { ns.Close(); must(t, netns.Remove(path)) })
	return ns
}

// machine returns a namespace with an uplink, and a folder for the state and bpffs of its agent.
func machine(t *testing.T) (*netns.Namespace, string) {
	t.Helper()
	ns, fabric := namespace(t, "node"), namespace(t, "fabric")
	h, err := ns.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "eth0", 100
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(fabric.FD())
	must(t, h.LinkAdd(pair))
	eth0, err := h.LinkByName("eth0")
	must(t, err)
	must(t, h.LinkSetUp(eth0))
	dir := t.TempDir()
	t.Cleanup(func() { unix.Unmount(filepath.Join(dir, "bpf"), unix.MNT_DETACH) })
	return ns, dir
}

// node is an agent's core with networks netpila and toy over the data path of a namespace.
type node struct {
	*agent.Core
	path *datapath.Datapath
	toy  *toynet.Network
}

func open(t *testing.T, ns *netns.Namespace, dir string, orchestrator *agenttest.Orchestrator) *node {
	t.Helper()
	plan, own := address.DefaultPlan(), netip.MustParsePrefix("fd70:696c:6100:1::/64")
	log := slog.New(slog.DiscardHandler)
	n := &node{}
	must(t, ns.Do(func() (err error) {
		n.path, err = datapath.Open(datapath.Config{
			Uplinks: []string{"eth0"}, NodePrefix: own, Plan: plan, MaxEndpoints: 100, BPFFS: filepath.Join(dir, "bpf"),
			Log: log,
		})
		return err
	}))
	var err error
	n.toy, err = toynet.New(n.path)
	must(t, err)
	store, err := endpoint.OpenStore(endpoint.StoreConfig{Dir: dir})
	must(t, err)
	tenants, err := agent.OpenTenants(dir)
	must(t, err)
	addresses, err := netpila.New(network.Node{Plan: plan, Prefix: own, Indexes: store}, n.path.Netpila())
	must(t, err)
	n.Core, err = agent.New(agent.Config{
		Store: store, Tenants: tenants, Driver: n.path, Resolver: orchestrator, Plan: plan, Log: log,
		Networks: map[string]agent.Network{tenant.Netpila: addresses, toynet.Name: n.toy},
	})
	must(t, err)
	must(t, n.Start(t.Context()))
	t.Cleanup(n.close)
	return n
}

func (n *node) close() {
	for _, c := range []io.Closer{n.toy, n.path} {
		c.Close()
	}
}

// TestToyNetwork: containers of a tenant on the toy network reach each other, those of another tenant do not, and a
// restart of the agent keeps all of it.
func TestToyNetwork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	tenant.AddNetwork(toynet.Traits)
	ns, dir := machine(t)
	orchestrator := agenttest.NewOrchestrator()
	for i, name := range []string{"green", "gold"} {
		orchestrator.Tenants[name] = tenant.Tenant{
			Name: name, Network: toynet.Name, Addressing: tenant.Clear,
			IDs: []tenant.ID{{ID: address.TenantID(10 + i)}},
		}
	}
	n := open(t, ns, dir, orchestrator)
	containers, addresses := map[string]*netns.Namespace{}, map[string]netip.Addr{}
	for name, of := range map[string]string{"c1": "green", "c2": "green", "c3": "gold", "c4": "blue"} {
		containers[name] = namespace(t, name)
		r, err := n.Add(t.Context(), agent.AddRequest{
			ContainerID: name, Interface: "eth0", Netns: containers[name].Path(), Tenant: of,
		})
		must(t, err)
		addresses[name] = r.Addresses()[0]
	}
	reaches := func(when string) {
		t.Helper()
		for pair, want := range map[[2]string]int{
			{"c1", "c2"}: 1, {"c2", "c1"}: 1, {"c1", "c3"}: 0, {"c3", "c1"}: 0,
		} {
			got, err := packet.Ping(t.Context(), containers[pair[0]], addresses[pair[1]], packet.PingOptions{})
			if err != nil || got.Received != want {
				t.Errorf("%s, %v: %d replies, %v; want %d", when, pair, got.Received, err, want)
			}
		}
	}
	reaches("at first")
	for name, ns := range containers {
		must(t, n.Check(context.Background(), agent.CheckRequest{
			ContainerID: name, Interface: "eth0", Netns: ns.Path(),
		}))
	}
	n.close()
	n = open(t, ns, dir, orchestrator)
	reaches("after a restart")

	must(t, n.Delete(t.Context(), "c2", "eth0"))
	entries, err := n.toy.Entries(t.Context())
	must(t, err)
	if want := 2; entries[0].Used != want {
		t.Errorf("%d entries after a DEL, want %d", entries[0].Used, want)
	}
}

// TestPolicies: an object file with policy/policy.h shares the tables of the data path: the rules of SetPolicies apply
// to its packets, and Sessions counts theirs.
func TestPolicies(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	const owner, number = 77, 5
	ns, dir := machine(t)
	path := open(t, ns, dir, agenttest.NewOrchestrator()).path
	spec, err := toynet.LoadPoliced()
	must(t, err)
	must(t, spec.Variables["policed_tenant"].Set(uint32(owner)))
	must(t, spec.Variables["endpoint_number"].Set(uint32(number)))
	objects, err := path.LoadNetwork(spec)
	must(t, err)
	defer objects.Close()
	spec.Maps["toy_map_of_16_by"] = &ebpf.MapSpec{}
	if _, err := path.LoadNetwork(spec); err == nil || !strings.Contains(err.Error(), "16 characters") {
		t.Errorf("a map with a long name: %v", err)
	}
	frame := packet.Packet{
		Source: netip.MustParseAddr("fd99::1"), Destination: netip.MustParseAddr("fd99::2"),
		Body: packet.UDP{SourcePort: 1000, DestinationPort: 53},
	}.Frame(make(net.HardwareAddr, 6), make(net.HardwareAddr, 6))
	const pass, drop = 0, 2
	result := func() uint32 {
		verdict, err := objects.Programs["toy_policed"].Run(&ebpf.RunOptions{Data: frame})
		must(t, err)
		return verdict
	}
	drops := func() (all uint64) {
		status, err := path.Status()
		must(t, err)
		for _, d := range status.Drops {
			if d.Reason == dropreason.PolicyDenied.String() {
				all += d.Packets
			}
		}
		return all
	}
	allowing := policy.Tables{Subjects: map[address.AppID]policy.Subject{policy.AnyApp: {}}}
	for _, c := range []struct {
		name            string
		tables          policy.Tables
		want            uint32
		drops, sessions uint64
	}{
		{"no policies", policy.Tables{}, pass, 0, 0},
		{"isolating policies", policy.Isolating(), drop, 1, 0},
		{"allowing policies", allowing, pass, 1, 1},
		{"isolating policies again", policy.Isolating(), drop, 2, 1},
	} {
		must(t, path.SetPolicies(dpapi.TenantPolicies{
			Tenant: "green", IDs: []address.TenantID{owner}, Tables: c.tables,
		}))
		got := result()
		sessions, err := path.Sessions()
		must(t, err)
		if got != c.want || drops() != c.drops || sessions.Begun != c.sessions {
			t.Errorf("%s: verdict %d, %d drops, %d sessions begun; want %d, %d, %d", c.name, got, drops(),
				sessions.Begun, c.want, c.drops, c.sessions)
		}
	}
	if sessions, err := path.Sessions(); err != nil || sessions.Largest != number || sessions.LargestTenant != owner {
		t.Errorf("sessions %+v, %v; want those of endpoint %d and tenant %d", sessions, err, number, owner)
	}
}

// TestSize: a network needs at most 150 lines, without comments and blank lines.
func TestSize(t *testing.T) {
	lines := 0
	for _, name := range []string{"toy.go", "bpf/toy.bpf.c"} {
		b, err := os.ReadFile(name)
		must(t, err)
		for line := range strings.Lines(string(b)) {
			line = strings.TrimSpace(line)
			if line != "" && !strings.HasPrefix(line, "//") && !strings.HasPrefix(line, "/*") &&
				!strings.HasPrefix(line, "*") {
				lines++
			}
		}
	}
	if lines > 150 || lines < 50 {
		t.Errorf("%d lines", lines)
	}
}
