package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/hostnet"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/unixrpc"
)

// closing is a Driver that remembers that it was closed.
type closing struct {
	*agenttest.Driver
	closed bool
}

func (c *closing) Close() error { c.closed = true; return nil }

// daemonOptions returns the options of a registered node whose orchestrator is unreachable.
func daemonOptions(t *testing.T, d *closing) Options {
	t.Helper()
	o := Options{
		OrchestratorURL: "https://[::1]:1", NodeName: "n1", Uplinks: []string{"lo"},
		RunDir: t.TempDir(), StateDir: t.TempDir(),
		Log:        slog.New(slog.DiscardHandler),
		OpenDriver: func(state.Membership) (DriverCloser, error) { return d, nil },
	}
	if d != nil {
		o.Networks = []network.Factory{d.Factory()}
	}
	node, err := state.OpenNode(o.StateDir, "n1")
	if err != nil {
		t.Fatal(err)
	}
	plan := address.Plan{Base: address.DefaultPlan().Base, Private: netip.MustParsePrefix("5f00::/8")}
	m := state.Membership{ClusterUUID: "cluster", Prefix: agenttest.NodePrefix, Plan: plan}
	if err := node.Join(m); err != nil {
		t.Fatal(err)
	}
	return o
}

// TestCalls: the manager gets each address of the orchestrator once, whether it was called before or later.
func TestCalls(t *testing.T) {
	var c calls
	var got []netip.Addr
	first, later := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	c.note(first)
	c.tell(func(a netip.Addr) { got = append(got, a) })
	c.note(first)
	c.note(later)
	if !slices.Equal(got, []netip.Addr{first, later}) {
		t.Errorf("got %v", got)
	}
}

// supervisor receives READY=1 as systemd does.
func supervisor(t *testing.T) *net.UnixConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return c
}

func readNotify(t *testing.T, c *net.UnixConn) string {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	b := make([]byte, 64)
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

func TestDaemonWithTheOrchestratorAway(t *testing.T) {
	driver := &closing{Driver: agenttest.NewDriver()}
	o := daemonOptions(t, driver)
	// A hosted tenant, as an earlier process left it.
	earlier := agenttest.New(t)
	earlier.MustAdd("c1")
	if err := os.CopyFS(o.StateDir, os.DirFS(earlier.Dir)); err != nil {
		t.Fatal(err)
	}
	driver.Devices[1] = earlier.Endpoints()[0]

	systemd := supervisor(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- Run(ctx, o) }()
	if said := readNotify(t, systemd); said != "READY=1" {
		t.Fatalf("said %q", said)
	}
	if len(driver.IDs("blue")) != 1 {
		t.Error("the tenant was not made known again")
	}

	// Nothing in containers reaches the node's own addresses by egress.
	own, err := hostnet.OwnAddresses()
	if err != nil {
		t.Fatal(err)
	}
	agenttest.Eventually(t, func() error {
		driver.Mu.Lock()
		defer driver.Mu.Unlock()
		if !slices.Contains(driver.Calls, "SetOwnAddresses") || !slices.Equal(driver.Outside.Own, own) {
			return fmt.Errorf("own addresses are %v, want %v", driver.Outside.Own, own)
		}
		return nil
	})

	if err := Run(ctx, o); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("a second agent on the same state: %v", err)
	}

	client := pilasterv1connect.NewAgentServiceClient(
		unixrpc.Client(filepath.Join(o.RunDir, "agent.sock")),
		unixrpc.URL,
		connect.WithGRPC(),
	)
	add := func(labels map[string]string) error {
		_, err := client.AddEndpoint(ctx, connect.NewRequest(&pilasterv1.AddEndpointRequest{
			ContainerId: "c2", Interface: "eth0", Netns: agenttest.MakeNetns(t), Tenant: "blue", Labels: labels,
		}))
		return err
	}
	if err := add(map[string]string{"app": "other"}); connect.CodeOf(err) != connect.CodeUnavailable ||
		!strings.Contains(err.Error(), "app=other") {
		t.Errorf("unknown labels: %v", err)
	}
	if err := add(map[string]string{"app": "web"}); err != nil {
		t.Errorf("known labels: %v", err)
	}
	// A watcher does not keep the agent from stopping.
	stream, err := client.Monitor(t.Context(), connect.NewRequest(&pilasterv1.MonitorRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	cancel()
	if said := readNotify(t, systemd); said != "STOPPING=1" {
		t.Errorf("said %q", said)
	}
	for stream.Receive() {
	}
	if connect.CodeOf(stream.Err()) != connect.CodeUnavailable {
		t.Errorf("the watcher received %v", stream.Err())
	}
	if err := <-ended; err != nil {
		t.Errorf("ended with %v", err)
	}
	if !driver.closed || len(driver.Active) != 2 {
		t.Errorf("closed %v, active %v: a stop must leave the packet path as it is", driver.closed, driver.Active)
	}
	if _, err := os.Stat(filepath.Join(o.RunDir, "agent.sock")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func TestDaemonRefusesAnotherPrefixOrName(t *testing.T) {
	o := daemonOptions(t, nil)
	other := o
	other.NodePrefix = netip.MustParsePrefix("fd70:696c:6100:2::/64")
	if err := Run(t.Context(), other); err == nil || !strings.Contains(err.Error(), "--node-prefix") {
		t.Errorf("another prefix: %v", err)
	}
	other = o
	other.NodeName = "n2"
	if err := Run(t.Context(), other); err == nil || !strings.Contains(err.Error(), "belongs to node n1") {
		t.Errorf("another name: %v", err)
	}
}

// A node whose name the orchestrator refused can be renamed.
func TestNodeMayBeRenamedUntilItHasRegistered(t *testing.T) {
	dir := t.TempDir()
	bad, err := state.OpenNode(dir, "Not_A_Name")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := state.OpenNode(dir, "n1"); err != nil {
		t.Fatal(err)
	}
	good, err := state.OpenNode(dir, "n1")
	if err != nil || good.Name() != "n1" || good.UUID() != bad.UUID() {
		t.Errorf("%+v, %v; want UUID %s", good, err, bad.UUID())
	}
}

// At the first start without the orchestrator, answers on the socket say what the node waits for.
func TestDaemonWaitsForItsPrefix(t *testing.T) {
	o := daemonOptions(t, nil)
	o.StateDir = t.TempDir()
	o.Token = "pilaster." + strings.Repeat("0", 32) + "." + strings.Repeat("0", 64)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- Run(ctx, o) }()
	client := pilasterv1connect.NewAgentServiceClient(
		unixrpc.Client(filepath.Join(o.RunDir, "agent.sock")),
		unixrpc.URL,
	)
	var s *pilasterv1.StatusResponse
	for s.GetOrchestrator().GetLastError() == "" || strings.Contains(s.Orchestrator.LastError, "not connected yet") {
		select {
		case err := <-ended:
			t.Fatal(err)
		default:
		}
		resp, err := client.Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		if err == nil {
			s = resp.Msg
		}
	}
	if s.Ready || !strings.Contains(s.Problems[0], "no prefix yet") || !strings.Contains(s.Problems[0], "refused") {
		t.Errorf("status %v", s)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("ended with %v", err)
	}
}

// workingNetwork has something to do and to close.
type workingNetwork struct {
	agent.Network
	working chan bool
	log     *[]string
	driver  *closing
}

func (n workingNetwork) Run(ctx context.Context, _ *slog.Logger) {
	n.working <- true
	<-ctx.Done()
	*n.log = append(*n.log, "worked")
}

func (n workingNetwork) Close() error {
	if n.driver.closed {
		*n.log = append(*n.log, "without the driver")
	}
	*n.log = append(*n.log, "closed")
	return nil
}

// TestDaemonHasNetworksWork: the daemon runs and closes a network that needs it. The error for a network that this node
// lacks names the option that enables the network.
func TestDaemonHasNetworksWork(t *testing.T) {
	driver := &closing{Driver: agenttest.NewDriver()}
	o := daemonOptions(t, driver)
	var log []string
	working, own := make(chan bool), o.Networks[0]
	o.Networks = []network.Factory{{Name: own.Name, Open: func(n network.Node) (agent.Network, error) {
		opened, err := own.Open(n)
		return workingNetwork{opened, working, &log, driver}, err
	}}, {Name: "later", With: "--later"}}
	d, err := newDaemon(o)
	if err != nil {
		t.Fatal(err)
	}
	m, _ := d.node.Membership()
	if has, absent, err := d.networks(m); err != nil || len(has) != 1 || absent["later"] != "--later" {
		t.Errorf("networks %v, absent %v, %v", has, absent, err)
	}
	d.driver = driver
	if err := d.close(); err != nil || strings.Join(log, ", ") != "closed" {
		t.Errorf("%v, %v", log, err)
	}

	driver.closed, log = false, nil
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- Run(ctx, o) }()
	select {
	case <-working:
	case err := <-ended:
		t.Fatal(err)
	}
	cancel()
	if err := <-ended; err != nil || strings.Join(log, ", ") != "worked, closed" {
		t.Errorf("%v, %v", log, err)
	}
}

// hangingNetwork has a gateway, and a switch that answers once for each value in answers.
type hangingNetwork struct {
	agent.Network
	answers chan bool
}

func (n hangingNetwork) Gateway() network.Gateway { <-n.answers; return network.Gateway{} }

func (hangingNetwork) FollowMTU(int) error { return nil }

// TestRegisteringDoesNotWaitForASwitch: the node registers whether it has a gateway, even if the switch hangs.
func TestRegisteringDoesNotWaitForASwitch(t *testing.T) {
	driver := &closing{Driver: agenttest.NewDriver()}
	o := daemonOptions(t, driver)
	n := hangingNetwork{answers: make(chan bool, 1)}
	n.answers <- true
	t.Cleanup(func() { close(n.answers) })
	own := o.Networks[0]
	o.Networks = []network.Factory{{Name: own.Name, Open: func(at network.Node) (agent.Network, error) {
		opened, err := own.Open(at)
		n.Network = opened
		return n, err
	}}}
	d, err := newDaemon(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.close() })
	if d.hasGateway() {
		t.Error("a node has a gateway before its networks are opened")
	}
	m, _ := d.node.Membership()
	if _, _, err := d.networks(m); err != nil {
		t.Fatal(err)
	}
	if said := d.enforcing(); !slices.Equal(said, []string{own.Name}) {
		t.Errorf("it enforces policies on %q", said)
	}
	for range 2 {
		has := make(chan bool, 1)
		go func() { has <- d.hasGateway() }()
		select {
		case is := <-has:
			if !is {
				t.Error("it has no gateway")
			}
		case <-time.After(10 * time.Second):
			t.Fatal("registering waits for the switch")
		}
	}
}

// TestRunSaysWhyThePacketPathIsRefused: a nil pointer in an interface is no driver to close.
func TestRunSaysWhyThePacketPathIsRefused(t *testing.T) {
	o := daemonOptions(t, nil)
	refused := errors.New("the uplink is not ours")
	o.OpenDriver = func(state.Membership) (DriverCloser, error) { return (*closing)(nil), refused }
	if err := Run(t.Context(), o); !errors.Is(err, refused) {
		t.Errorf("the agent ended with %v", err)
	}
}

// Limits below the current use are refused before the packet path is opened.
func TestDaemonRefusesLessRoomThanIsInUse(t *testing.T) {
	for flag, set := range map[string]func(*Options){
		"--max-endpoints 1 is less than the 2":  func(o *Options) { o.MaxEndpoints = 1 },
		"--max-tenant-ids 1 is less than the 2": func(o *Options) { o.MaxTenantIDs = 1 },
		"--edge: an Edge Switch runs no containers, " +
			"but this node has 2 endpoints": func(o *Options) { o.Edge = true },
	} {
		driver := &closing{Driver: agenttest.NewDriver()}
		o := daemonOptions(t, driver)
		o.OpenDriver = func(state.Membership) (DriverCloser, error) {
			t.Error("the packet path was opened")
			return driver,
				nil
		}
		earlier := agenttest.New(t)
		earlier.MustAdd("c1")
		red := earlier.Request("c2")
		red.Tenant = "red"
		if _, err := earlier.Add(t.Context(), red); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(o.StateDir, os.DirFS(earlier.Dir)); err != nil {
			t.Fatal(err)
		}
		set(&o)
		if err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), flag) ||
			!strings.Contains(err.Error(), "nothing was changed") {
			t.Errorf("want %q, got %v", flag, err)
		}
	}
}

// switchedNetwork has a switch, which may enforce no policies.
type switchedNetwork struct {
	agent.Network
	kind      string
	unpoliced error
}

func (n switchedNetwork) Switch() string                         { return n.kind }
func (switchedNetwork) Lacks() []string                          { return nil }
func (n switchedNetwork) PolicyError() error                     { return n.unpoliced }
func (switchedNetwork) Seal(context.Context, string, bool) error { return nil }

// TestWhichNodesCanOffload: nodes with the eBPF switch, if it enforces policies.
func TestWhichNodesCanOffload(t *testing.T) {
	closed := make(chan bool)
	close(closed)
	for _, c := range []struct {
		name string
		on   agent.Network
		want bool
	}{
		{"ebpf", switchedNetwork{kind: "ebpf"}, true},
		{"ebpf without policies", switchedNetwork{kind: "ebpf", unpoliced: errors.New("no kernel support")}, false},
		{"ovs", switchedNetwork{kind: "ovs"}, false},
		{"without a switch", hangingNetwork{answers: closed}, false},
	} {
		o := daemonOptions(t, &closing{Driver: agenttest.NewDriver()})
		o.Networks = []network.Factory{{Name: c.name, Open: func(network.Node) (agent.Network, error) {
			return c.on, nil
		}}}
		d, err := newDaemon(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.close() })
		m, _ := d.node.Membership()
		if _, _, err := d.networks(m); err != nil {
			t.Fatal(err)
		}
		if d.offloads != c.want {
			t.Errorf("network %s: %v, want %v", c.name, d.offloads, c.want)
		}
	}
}
