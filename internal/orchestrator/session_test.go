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

// machine is a node's disk, from which any number of machines may be started.
type machine struct {
	node pki.Node
	dir  string
}

func newMachine(t *testing.T, n int) machine { return machine{testNode(n), t.TempDir()} }

// boot is a process of the agent; what it calls goes by way of through where that is given.
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
		t.Errorf("%v does not say what to do", err)
	}
}

// wire is a network path that can be cut so that neither side hears of it.
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

// closeAll is what a kernel does for a process that was killed.
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
		case <-w.cut: // it lies on this side for ever
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

// Two machines from one disk: the first goes on, the second is refused, at each orchestrator.
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

		// Each orchestrator knows of the node, and neither lets it be deleted.
		nodes, err := operator(
			s.config.RunDir,
		).ListNodes(t.Context(), connect.NewRequest(&pilasterv1.ListNodesRequest{}))
		if err != nil || len(nodes.Msg.Nodes) != 1 || !nodes.Msg.Nodes[0].Connected {
			t.Errorf("orchestrator %d shows %v, %v", i, nodes, err)
		}
		status, err := operator(
			s.config.RunDir,
		).ClusterStatus(t.Context(), connect.NewRequest(&pilasterv1.ClusterStatusRequest{}))
		if err != nil || status.Msg.NodesConnected != 1 {
			t.Errorf("orchestrator %d: status %v, %v", i, status, err)
		}
		_, err = operator(
			s.config.RunDir,
		).DeleteNode(t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n1"}))
		wantCode(t, err, connect.CodeFailedPrecondition)
	}
	app := resolve(t, first, "blue", "web")
	if d := f.next(t).GetDelta(); len(d.GetApps()) != 1 || d.Apps[0].Id != app.Id {
		t.Errorf("the first hears %v", d)
	}

	// The first moves to the other orchestrator: its old stream ends, and both say it is connected.
	moved := moveTo(t, first, m, both[1])
	g := follow(t, moved, hosting("blue"))
	g.next(t)
	f.ended(t, connect.CodeAborted)
	for i, s := range both {
		if err := s.cache.Await(t.Context(), func() bool { return s.cache.Connected("n1") }); err != nil {
			t.Errorf("orchestrator %d: %v", i, err)
		}
	}
	// An orchestrator that stops takes its streams along.
	both[1].Close()
	g.ended(t, connect.CodeUnavailable)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := both[0].cache.Await(ctx, func() bool { return !both[0].cache.Connected("n1") }); err != nil {
		t.Error("n1 still counts as connected at an orchestrator that stopped")
	}
	if _, err := operator(both[0].config.RunDir).DeleteNode(t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n1"})); err != nil {
		t.Error(err)
	}
}

// Who has a node's key and stays connected is put out by another orchestrator, at once and for good.
func TestStolenKeyIsTakenBack(t *testing.T) {
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
	thief := registered(t, both[0], testNode(1))
	stream := follow(t, thief, hosting("blue"))
	stream.next(t)

	people := operator(both[1].config.RunDir)
	_, err := people.DeleteNode(t.Context(), connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: "n1", Force: true}))
	if err != nil {
		t.Fatal(err)
	}
	stream.ended(t, connect.CodeFailedPrecondition)
	wantCode(t, register(t, thief), connect.CodeFailedPrecondition)
	_, err = thief.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "blue"}))
	wantCode(t, err, connect.CodeFailedPrecondition)
	wantCode(t, thief.RenewCertificate(t.Context()), connect.CodeFailedPrecondition)
	if _, err := people.DeleteTenant(t.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: "blue"})); err != nil {
		t.Errorf("the tenant that the thief said it hosts: %v", err)
	}
	if nodes := both[1].cache.AllNodes(); len(nodes) != 0 {
		t.Errorf("left: %v", nodes)
	}
}

// An orchestrator that is cut off from the store ends its streams when the store lets other machines in.
func TestOrchestratorIsCutOff(t *testing.T) {
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
	session := func(is bool) {
		t.Helper()
		if err := other.cache.Await(ctx, func() bool { return other.cache.Sessions["n1"].None() != is }); err != nil {
			t.Fatal(err)
		}
	}
	session(true)
	close(w.cut)
	session(false)
	select {
	case err := <-ended:
		wantCode(t, err, connect.CodeAborted)
	case <-time.After(10 * time.Second):
		t.Error("another machine may be let in, and the stream goes on")
	}
	moved := moveTo(t, first, m, other)
	if err := register(t, moved); err != nil {
		t.Fatal(err)
	}
	follow(t, moved, hosting()).next(t)
}

// A call that does not end takes its own time of a stop, and none of what the store must be told.
func TestStopEndsSessions(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Etcd = storetest.Debian(t)
	other := start(t, c)
	c.DataDir, c.RunDir, c.patience = t.TempDir(), t.TempDir(), time.Minute
	s, stop := startAndStop(t, c)
	registered(t, s, testNode(1)).Close()
	if err := s.store.Connect(t.Context(), testNode(1), store.Session{Orchestrator: s.cache.Self, Instance: "i", Stream: "1"}); err != nil {
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

// moveTo is the same process at another orchestrator.
func moveTo(t *testing.T, c *join.Client, m machine, s *Server) *join.Client {
	t.Helper()
	moved, err := join.Dial(t.Context(), join.Config{
		URL: s.url(), StateDir: m.dir, NodeName: m.node.Name, NodeUUID: m.node.UUID, Instance: c.Instance(), Log: s.config.Log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(moved.Close)
	return moved
}

// The orchestrator has not noticed yet that the network was cut when the same agent comes back by another path.
func TestReconnectBeforeTheOldStreamIsDead(t *testing.T) {
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
		t.Errorf("took %v: it waited for the old stream to die", took)
	}
	s.cache.Mu.Lock()
	now := s.cache.Subscribers["n1"]
	s.cache.Mu.Unlock()
	if now == old || now == nil {
		t.Error("the old stream is still the node's")
	}
}

// An agent that was killed leaves a connection that its kernel closes: the next process is let in at its first try.
func TestRestartedAgentGetsIn(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	m := newMachine(t, 1)
	for _, again := range []bool{false, true, true, true, false} {
		w := newWire(t, s.Addr().String())
		c := m.boot(t, s, w.Addr().String())
		if again {
			_, err := c.Resolve(t.Context(), connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: "none"}))
			wantCode(t, err, connect.CodeNotFound) // an ADD may come before anything else
		}
		if err := register(t, c); err != nil {
			t.Fatal(err)
		}
		follow(t, c, hosting()).next(t)
		w.closeAll()
	}
}
