package control

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/egress"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/netpila"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/unixrpc"
)

// cluster is an orchestrator with its store, for agents without a kernel.
type cluster struct {
	t *testing.T
	*orchestrator.Server
	dir   string
	op    pilasterv1connect.OperatorServiceClient
	ahead atomic.Int64 // of its clock, in nanoseconds
	apps  int          // that a tenant may have; 0: as many as there are numbers
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir()}
	c.start("[::1]:0", 0)
	t.Cleanup(func() { c.Close() })
	return c
}

// start starts the orchestrator with a limit of list queries per second.
func (c *cluster) start(listen string, listRate int) {
	c.t.Helper()
	c.op = pilasterv1connect.NewOperatorServiceClient(unixrpc.Client(orchestrator.Socket(c.dir)), unixrpc.URL)
	s, err := orchestrator.Start(c.t.Context(), orchestrator.Config{
		DataDir: filepath.Join(c.dir, "data"), RunDir: c.dir, Listen: listen, Log: slog.New(slog.DiscardHandler),
		Now:    func() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) },
		Limits: admission.Limits{Lists: listRate, Apps: c.apps},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.Server = s
}

func (c *cluster) createTenant(name string) uint32 {
	c.t.Helper()
	resp, err := c.op.CreateTenant(c.t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: name}))
	if err != nil {
		c.t.Fatal(err)
	}
	return resp.Msg.Tenant.Ids[0].Id
}

func (c *cluster) deleteTenant(name string) error {
	_, err := c.op.DeleteTenant(c.t.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: name}))
	return err
}

func (c *cluster) deleteNode(name string) error {
	_, err := c.op.DeleteNode(c.t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: name}))
	return err
}

// member is an agent process of a node, with a fake kernel.
type member struct {
	*agenttest.Bed
	link *Link
	stop func() // leaves the state on disk
}

// boot starts an agent with dir as its state directory. driver stands for the kernel: a test that passes the same
// driver again simulates a restart, and a new driver simulates a reboot.
func (c *cluster) boot(dir, name string, driver *agenttest.Driver) *member {
	c.t.Helper()
	node, err := state.OpenNode(dir, name)
	if err != nil {
		c.t.Fatal(err)
	}
	tenants, err := agent.OpenTenants(dir)
	if err != nil {
		c.t.Fatal(err)
	}
	store, err := endpoint.OpenStore(endpoint.StoreConfig{Dir: dir})
	if err != nil {
		c.t.Fatal(err)
	}
	link := New(Config{
		URL: "https://" + c.Addr().
			String(),
		Version: "v1", Node: node, Tenants: tenants, Endpoints: func() []endpoint.Record { return store.List() },
		UplinkAddresses: func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("2001:db8::2")}, nil },
		Enforces:        func() []string { return []string{"netpila", "nimitz"} },
		Egress:          func() bool { return true },
		Offloads:        func() bool { return true }, MTUReserve: 104,
		Dial: func(ctx context.Context) (pilasterv1connect.NodeServiceClient, error) {
			return join.Dial(ctx, join.Config{
				URL: "https://" + c.Addr().
					String(),
				Token: c.Token(), StateDir: dir, NodeName: name, NodeUUID: node.UUID(),
				Log: slog.New(slog.DiscardHandler),
			})
		},
		Log: slog.New(slog.DiscardHandler),
	})
	m := &member{
		Bed:  &agenttest.Bed{T: c.t, Dir: dir, Driver: driver, Now: time.Now(), Store: store, Tenants: tenants},
		link: link,
	}
	if _, ok := node.Membership(); !ok {
		if err := link.Register(c.t.Context()); err != nil {
			c.t.Fatal(err)
		}
	}
	membership, _ := node.Membership()
	if m.Egress, err = egress.Open(egress.Config{
		Dir: dir, Plan: membership.Plan, Node: membership.Prefix, Records: store.List(),
		Log: slog.New(slog.DiscardHandler),
	}); err != nil {
		c.t.Fatal(err)
	}
	own, err := netpila.New(network.Node{
		Plan: membership.Plan, Prefix: membership.Prefix, Indexes: store, Egress: m.Egress,
	}, driver.Path())
	if err != nil {
		c.t.Fatal(err)
	}
	overlay := nimitz.New(
		nimitz.Config{
			Plan:    membership.Plan,
			Node:    membership.Prefix,
			Indexes: store,
			Cluster: link,
			Switch:  driver.VXLAN,
		},
	)
	if m.Core, err = agent.New(agent.Config{
		Store: store, Tenants: tenants, Networks: map[string]agent.Network{netpila.Name: own, nimitz.Name: overlay},
		Driver: driver, Resolver: link, Egress: m.Egress, Plan: membership.Plan, Node: membership.Prefix,
		Name: name, Reporter: link, MTUReserve: tenant.OffloadOverhead, Log: slog.New(slog.DiscardHandler),
	}); err != nil {
		c.t.Fatal(err)
	}
	if err := m.Start(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); link.Run(ctx, m.Core) }()
	m.stop = func() { cancel(); <-ended; store.Close() }
	c.t.Cleanup(m.stop)
	return m
}

// until waits for the link to become what it should.
func (m *member) until(should func(agent.LinkStatus) bool) {
	m.T.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if should(m.link.Status()) {
			return
		}
		if time.Now().After(end) {
			m.T.Fatalf("the link is %+v", m.link.Status())
		}
	}
}

func connected(s agent.LinkStatus) bool { return s.Connected }

// A tenant that a disconnected node hosts cannot be deleted, unless the node is deleted too. The containers of a
// deleted node keep running, it accepts no new ones, and it can join again only as another node.
func TestPartitionedNodeWhoseTenantIsDeleted(t *testing.T) {
	c := newCluster(t)
	c.createTenant("blue")
	dir, driver := t.TempDir(), agenttest.NewDriver()
	n1 := c.boot(dir, "n1", driver)
	n1.until(connected)
	old := n1.MustAdd("c1")
	first, _ := n1.link.config.Node.Membership()

	n1.stop() // the orchestrator sees a partition as the end of the stream; packets continue
	if err := c.deleteTenant("blue"); err == nil || !strings.Contains(err.Error(), "has containers on n1") ||
		!strings.Contains(err.Error(), "node delete") {
		t.Fatalf("a tenant of a node that cannot be asked: %v", err)
	}
	if err := c.deleteNode("n1"); err != nil {
		t.Fatal(err)
	}
	if err := c.deleteTenant("blue"); err != nil {
		t.Fatal(err)
	}
	if id := c.createTenant("blue"); id <= uint32(old.TenantID) {
		t.Errorf("the new blue has id %d, the old one had %d", id, old.TenantID)
	}

	// The partition heals.
	n1 = c.boot(dir, "n1", driver)
	n1.until(func(s agent.LinkStatus) bool { return s.Refused })
	if why := n1.link.Problem(); why == nil || !strings.Contains(why.Error(), "until it was deleted") ||
		!strings.Contains(why.Error(), "state directory") {
		t.Errorf("why it is refused: %v", why)
	}
	if _, ok := driver.Active[old.ID]; !ok {
		t.Error("its container was stopped")
	}
	q := n1.Request("c2")
	q.Tenant = "green"
	if _, err := n1.Add(t.Context(), q); !errors.Is(err, refusal.ErrUnavailable) {
		t.Errorf("a tenant new to a node that was deleted: %v", err)
	}
	if err := n1.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	n1.CheckClean()
	n1.stop()

	n1 = c.boot(t.TempDir(), "n1", driver) // its state directory was emptied
	n1.until(connected)
	second, _ := n1.link.config.Node.Membership()
	if second.Prefix == first.Prefix {
		t.Errorf("prefix %v was given twice", second.Prefix)
	}
	if r := n1.MustAdd("c1"); r.TenantID <= old.TenantID || r.Attachments[0].Plaintext == old.Attachments[0].Plaintext {
		t.Errorf("made anew: %+v, before: %+v", r, old)
	}
}

// A node that was disconnected until its certificate had expired reconnects with the same identity.
func TestCutOffBeyondItsCertificate(t *testing.T) {
	c := newCluster(t)
	c.createTenant("blue")
	dir, driver := t.TempDir(), agenttest.NewDriver()
	n1 := c.boot(dir, "n1", driver)
	n1.until(connected)
	n1.MustAdd("c1")
	first, _ := n1.link.config.Node.Membership()
	was, err := join.Describe(dir)
	if err != nil {
		t.Fatal(err)
	}
	n1.stop()
	c.ahead.Store(int64(pki.NodeLife + 24*time.Hour))
	n1 = c.boot(dir, "n1", driver)
	n1.until(connected)
	if now, err := join.Describe(dir); err != nil || now[0].SHA256 == was[0].SHA256 {
		t.Errorf("the certificate is %+v, %v", now, err)
	}
	if again, _ := n1.link.config.Node.Membership(); again.Prefix != first.Prefix {
		t.Errorf("prefix %v, was %v", again.Prefix, first.Prefix)
	}
	n1.MustAdd("c2")
}

// A node gets a new disk and the old name: an administrator must delete the old node, whose prefix is never reused.
func TestReplacedNode(t *testing.T) {
	c := newCluster(t)
	n1 := c.boot(t.TempDir(), "n1", agenttest.NewDriver())
	n1.until(connected)
	first, _ := n1.link.config.Node.Membership()

	node, err := state.OpenNode(t.TempDir(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	_, err = join.Dial(t.Context(), join.Config{
		URL: "https://" + c.Addr().
			String(),
		Token: c.Token(), StateDir: t.TempDir(), NodeName: "n1", NodeUUID: node.UUID(),
		Log: slog.New(slog.DiscardHandler),
	})
	if err == nil || !strings.Contains(err.Error(), "pilaster node delete n1") ||
		!strings.Contains(err.Error(), n1.link.config.Node.UUID()) {
		t.Errorf("another machine by the name of n1: %v", err)
	}
	if err := c.deleteNode("n1"); err == nil || !strings.Contains(err.Error(), "stop its agent first") {
		t.Errorf("deleting a node that lives: %v", err)
	}
	n1.stop()
	agenttest.Eventually(t, func() error { return c.deleteNode("n1") })
	n1 = c.boot(t.TempDir(), "n1", agenttest.NewDriver())
	n1.until(connected)
	if second, _ := n1.link.config.Node.Membership(); second.Prefix == first.Prefix {
		t.Errorf("prefix %v was given twice", second.Prefix)
	}
}

// While an ADD resolves a tenant, it cannot be deleted; when the ADD fails, it can, although the node has
// never reported it.
func TestTenantIsNotDeletedUnderAnADD(t *testing.T) {
	c := newCluster(t)
	c.createTenant("blue")
	driver := agenttest.NewDriver()
	n1 := c.boot(t.TempDir(), "n1", driver)
	n1.until(connected)
	tried := 0
	driver.During = func(call string, _ endpoint.Record) {
		if call != "PutTenant" { // resolved, and not yet an endpoint
			return
		}
		tried++
		if err := c.deleteTenant("blue"); connect.CodeOf(err) != connect.CodeFailedPrecondition {
			t.Errorf("deleted in the middle of an ADD: %v", err)
		}
	}
	driver.Fail["CreateDevice"] = agenttest.ErrFake
	if _, err := n1.Add(t.Context(), n1.Request("c1")); !errors.Is(err, agenttest.ErrFake) {
		t.Fatal(err)
	}
	driver.Fail["CreateDevice"] = nil
	n1.MustAdd("c1")
	if tried != 2 {
		t.Fatalf("%d tries to delete, want 2", tried)
	}
	driver.During = nil
	if err := n1.Delete(t.Context(), "c1", "eth0"); err != nil {
		t.Fatal(err)
	}
	agenttest.Eventually(t, func() error { return c.deleteTenant("blue") })
	n1.CheckClean()
}
