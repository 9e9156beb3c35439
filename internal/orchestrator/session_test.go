package orchestrator

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
)

// machine has a node's name and state directory. A test may boot it several times, like machines with copies of a disk.
type machine struct {
	node pki.Node
	dir  string
}

func newMachine(t *testing.T, n int) machine { return machine{testNode(n), t.TempDir()} }

// boot connects a new process of the agent to the address through, or to the orchestrator itself if through is empty.
func (m machine) boot(t *testing.T, s *Server, through string) *join.Client {
	t.Helper()
	url := s.url()
	if through != "" {
		url = "https://" + through
	}
	c, err := join.Dial(t.Context(), join.Config{
		URL: url, Token: s.Token(), StateDir: m.dir, NodeName: m.node.Name, NodeUUID: m.node.UUID, Log: s.config.Log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func register(t *testing.T, c *join.Client) error {
	t.Helper()
	_, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{Version: "test"}))
	return err
}

func wantRefusedClone(t *testing.T, err error) {
	t.Helper()
	wantCode(t, err, connect.CodeAlreadyExists)
	if err != nil && !strings.Contains(err.Error(), "if its disk was copied") {
		t.Errorf("got error %v, want one with advice", err)
	}
}

// wire is a TCP proxy. After cut is closed, it drops all data and keeps the connections open.
type wire struct {
	net.Listener
	cut chan struct{}

	mu    sync.Mutex
	conns []net.Conn
}

func newWire(t *testing.T, to string) *wire {
	host, _, _ := net.SplitHostPort(to)
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{Listener: l, cut: make(chan struct{})}
	t.Cleanup(w.closeAll)
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", to)
			if err != nil {
				a.Close()
				return
			}
			w.mu.Lock()
			w.conns = append(w.conns, a, b)
			w.mu.Unlock()
			go w.copy(a, b)
			go w.copy(b, a)
		}
	}()
	return w
}

// closeAll closes all connections, as the kernel does for a process that was killed.
func (w *wire) closeAll() {
	w.Close()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		c.Close()
	}
}

func (w *wire) copy(to, from net.Conn) {
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		select {
		case <-w.cut:
			return
		default:
		}
		if err != nil {
			to.Close()
			return
		}
		to.Write(b[:n])
	}
}

// Of two machines with copies of one disk, the first continues to work. Each orchestrator refuses the second.
func TestClonedDisk(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	etcd := storetest.Debian(t)
	var both [2]*Server
	for i := range both {
		c := testConfig(t)
		c.Etcd = etcd
		both[i] = start(t, c)
		both[i].cache.Lag = time.Second
	}
	m := newMachine(t, 1)
	first := m.boot(t, both[0], "")
	if err := register(t, first); err != nil {
		t.Fatal(err)
	}
	createTenant(t, both[0], "blue")
	f := follow(t, first, hosting("blue"))
	f.next(t)
	for i, s := range both {
		clone := m.boot(t, s, "")
		wantRefusedClone(t, register(t, clone))
		_, err := clone.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue"}))
		wantRefusedClone(t, err)
		stream := clone.Follow(t.Context())
		stream.Send(hosting())
		_, err = stream.Receive()
		wantRefusedClone(t, err)

		// Each orchestrator shows the node as connected, and refuses to delete it.
		op := operator(s.config.RunDir)
		nodes, err := op.ListNodes(t.Context(), connect.NewRequest(&pilasterv1.ListNodesRequest{}))
		if err != nil || len(nodes.Msg.Nodes) != 1 || !nodes.Msg.Nodes[0].Connected {
			t.Errorf("orchestrator %d: got nodes %v, %v; want one, connected", i, nodes, err)
		}
		status, err := op.ClusterStatus(t.Context(), connect.NewRequest(&pilasterv1.ClusterStatusRequest{}))
		if err != nil || status.Msg.NodesConnected != 1 {
			t.Errorf("orchestrator %d: got status %v, %v; want one connected node", i, status, err)
		}
		_, err = op.DeleteNode(t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n1"}))
		wantCode(t, err, connect.CodeFailedPrecondition)
	}
	app := resolve(t, first, "blue", "web")
	if d := f.next(t).GetDelta(); len(d.GetApps()) != 1 || d.Apps[0].Id != app.Id {
		t.Errorf("the first machine received %v, want app %d", d, app.Id)
	}

	// The first machine connects to the other orchestrator. Its old stream ends, and both orchestrators show it as
	// connected.
	moved := moveTo(t, first, m, both[1])
	g := follow(t, moved, hosting("blue"))
	g.next(t)
	f.ended(t, connect.CodeAborted)
	for i, s := range both {
		if err := s.cache.Await(t.Context(), func() bool { return s.cache.Connected("n1") }); err != nil {
			t.Errorf("orchestrator %d: %v", i, err)
		}
	}
	// An orchestrator that stops ends its streams.
	both[1].Close()
	g.ended(t, connect.CodeUnavailable)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := both[0].cache.Await(ctx, func() bool { return !both[0].cache.Connected("n1") }); err != nil {
		t.Error("n1 still counts as connected to an orchestrator that stopped")
	}
	request := connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n1"})
	if _, err := operator(both[0].config.RunDir).DeleteNode(t.Context(), request); err != nil {
		t.Error(err)
	}
}

// Deleting a node by force at one orchestrator ends its stream at the other one, and revokes its certificate.
func TestForcedDeleteRevokesCertificate(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	etcd := storetest.Debian(t)
	var both [2]*Server
	for i := range both {
		c := testConfig(t)
		c.Etcd = etcd
		both[i] = start(t, c)
	}
	createTenant(t, both[0], "blue")
	client := registered(t, both[0], testNode(1))
	stream := follow(t, client, hosting("blue"))
	stream.next(t)

	op := operator(both[1].config.RunDir)
	_, err := op.DeleteNode(t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n1", Force: true}))
	if err != nil {
		t.Fatal(err)
	}
	stream.ended(t, connect.CodeFailedPrecondition)
	wantCode(t, register(t, client), connect.CodeFailedPrecondition)
	_, err = client.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue"}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantCode(t, client.RenewCertificate(t.Context()), connect.CodeFailedPrecondition)
	_, err = op.DeleteTenant(t.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: "blue"}))
	if err != nil {
		t.Errorf("delete the tenant that the deleted node hosted: %v", err)
	}
	if nodes := both[1].cache.AllNodes(); len(nodes) != 0 {
		t.Errorf("got nodes %v, want none", nodes)
	}
}

// An orchestrator that cannot reach the store ends its streams when its sessions expire in the store.
func TestOrchestratorWithoutStore(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	etcd := storetest.Debian(t)
	w := newWire(t, strings.TrimPrefix(etcd.Endpoints[0], "https://"))
	behind, beside := testConfig(t), testConfig(t)
	behind.Etcd, beside.Etcd = etcd, etcd
	behind.Etcd.Endpoints = []string{"https://" + w.Addr().String()}
	cut, other := start(t, behind), start(t, beside)
	m := newMachine(t, 1)
	first := m.boot(t, cut, "")
	if err := register(t, first); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	f := stream{first.Follow(ctx)}
	f.send(t, hosting())
	f.next(t)
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := f.Receive(); err != nil {
				ended <- err
				return
			}
		}
	}()
	awaitSession := func(exists bool) {
		t.Helper()
		reached := func() bool { return other.cache.Sessions["n1"].None() != exists }
		if err := other.cache.Await(ctx, reached); err != nil {
			t.Fatal(err)
		}
	}
	awaitSession(true)
	close(w.cut)
	awaitSession(false)
	select {
	case err := <-ended:
		wantCode(t, err, connect.CodeAborted)
	case <-time.After(10 * time.Second):
		t.Error("the stream continues 10 s after its session expired in the store")
	}
	moved := moveTo(t, first, m, other)
	if err := register(t, moved); err != nil {
		t.Fatal(err)
	}
	follow(t, moved, hosting()).next(t)
}

// When an orchestrator stops, it ends its sessions in the store, also if a call does not end in time.
func TestStopEndsSessions(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Etcd = storetest.Debian(t)
	other := start(t, c)
	c.DataDir, c.RunDir, c.timeout = t.TempDir(), t.TempDir(), time.Minute
	s, stop := startAndStop(t, c)
	registered(t, s, testNode(1)).Close()
	session := store.Session{Orchestrator: s.cache.Self, Instance: "i", Stream: "1"}
	if err := s.store.Connect(t.Context(), testNode(1), session); err != nil {
		t.Fatal(err)
	}
	ended := hang(t.Context(), t, transport(t, s, testNode(1)), s.url()+pilasterv1connect.NodeServiceRegisterProcedure)
	for s.limiter.Running() == 0 {
		time.Sleep(time.Millisecond)
	}
	stop()
	<-ended
	if err := other.store.DeleteNode(t.Context(), "n1", false); err != nil {
		t.Error(err)
	}
}

// moveTo connects the process of a client to another orchestrator, or by another path.
func moveTo(t *testing.T, c *join.Client, m machine, s *Server) *join.Client {
	t.Helper()
	moved, err := join.Dial(t.Context(), join.Config{
		URL: s.url(), StateDir: m.dir, NodeName: m.node.Name, NodeUUID: m.node.UUID,
		Instance: c.Instance(), Log: s.config.Log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(moved.Close)
	return moved
}

// An agent reconnects by another path before the orchestrator has detected that the old connection is broken.
func TestReconnectBeforeOldStreamEnds(t *testing.T) {
	s := start(t, testConfig(t))
	w := newWire(t, s.Addr().String())
	m := newMachine(t, 1)
	before := m.boot(t, s, w.Addr().String())
	if err := register(t, before); err != nil {
		t.Fatal(err)
	}
	f := follow(t, before, hosting())
	f.next(t)
	close(w.cut)
	old := s.cache.Subscribers["n1"]

	began := time.Now()
	after := moveTo(t, before, m, s)
	if err := register(t, after); err != nil {
		t.Fatal(err)
	}
	g := follow(t, after, hosting())
	g.next(t)
	if took := time.Since(began); took >= cache.MaxLag {
		t.Errorf("the new stream took %v, want less than %v: it waited for the old one", took, cache.MaxLag)
	}
	s.cache.Mu.Lock()
	now := s.cache.Subscribers["n1"]
	s.cache.Mu.Unlock()
	if now == old || now == nil {
		t.Error("the cache still has the old stream")
	}
}

// After an agent was killed, the kernel closes its connections. The first call of the next process is accepted.
func TestRestartedAgent(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	m := newMachine(t, 1)
	for _, again := range []bool{false, true, true, true, false} {
		w := newWire(t, s.Addr().String())
		c := m.boot(t, s, w.Addr().String())
		if again {
			_, err := c.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "none"}))
			wantCode(t, err, connect.CodeNotFound) // an ADD may resolve labels before the agent registers
		}
		if err := register(t, c); err != nil {
			t.Fatal(err)
		}
		follow(t, c, hosting()).next(t)
		w.closeAll()
	}
}
