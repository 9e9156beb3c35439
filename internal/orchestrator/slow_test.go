package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/unixrpc"
)

// slowEtcd is a proxy that delays calls to etcd, as a slow disk does: connections stay open, and etcd performs every
// call, also after its client has given up.
type slowEtcd struct {
	etcd *grpc.ClientConn
	mode atomic.Int32
	txns atomic.Int32
}

// Modes of a slowEtcd.
const (
	quick   = iota
	lagging // delays requests and responses by lag
	lateTxn // delays transactions by late: every second one before it is performed, the others after it
	lateAll // delays all requests by late
)

const (
	lag  = 50 * time.Millisecond
	late = 6 * time.Second // more than the timeout of a request
)

func startSlowEtcd(t *testing.T) (*slowEtcd, store.External) {
	t.Helper()
	client, err := store.Dial(storetest.Debian(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &slowEtcd{etcd: client.ActiveConnection()}
	server := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}), grpc.UnknownServiceHandler(s.pass))
	go server.Serve(l)
	t.Cleanup(server.Stop)
	return s, store.External{Endpoints: []string{"http://" + l.Addr().String()}}
}

// rawCodec passes messages on without decoding them.
type rawCodec struct{}

func (rawCodec) Name() string                    { return "raw" }
func (rawCodec) Marshal(v any) ([]byte, error)   { return *v.(*[]byte), nil }
func (rawCodec) Unmarshal(b []byte, v any) error { *v.(*[]byte) = b; return nil }

// delays returns the delays of a call's request and response.
func (s *slowEtcd) delays(method string) (request, response time.Duration) {
	switch mode := s.mode.Load(); {
	case mode == lagging:
		return lag, lag
	case mode == lateAll:
		return late, 0
	case mode == lateTxn && strings.HasSuffix(method, "/Txn"):
		if s.txns.Add(1)%2 == 0 {
			return late, 0
		}
		return 0, late
	}
	return 0, 0
}

func (s *slowEtcd) pass(_ any, in grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(in)
	headers, _ := metadata.FromIncomingContext(in.Context())
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(context.WithoutCancel(in.Context()), headers))
	defer cancel()
	out, err := s.etcd.NewStream(
		ctx,
		&grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		method,
		grpc.ForceCodec(rawCodec{}),
	)
	if err != nil {
		return err
	}
	request, response := s.delays(method)
	go func() {
		defer out.CloseSend()
		for {
			var message []byte
			if in.RecvMsg(&message) != nil {
				return
			}
			time.Sleep(request) // the test needs the delay
			if out.SendMsg(&message) != nil {
				return
			}
		}
	}()
	for {
		var message []byte
		if err := out.RecvMsg(&message); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		time.Sleep(response)
		in.SendMsg(&message) // fails if the client has given up
	}
}

// slowClients are the clients of a slow store, and the results that they received.
type slowClients struct {
	t        *testing.T
	s        *Server
	mu       sync.Mutex
	received map[string]string // tenant or node: id or prefix
	unknown  atomic.Int32      // calls with an unknown outcome
}

// retry repeats a call until it succeeds. The only error that it accepts is the one for an unknown outcome, in time.
func (c *slowClients) retry(ctx context.Context, what string, call func(context.Context) error) bool {
	for {
		began := time.Now()
		err := call(ctx)
		if ctx.Err() != nil {
			return false
		}
		if took := time.Since(began); took > 2*admission.CallTimeout {
			c.t.Errorf("the call for %s returned after %v, want at most %v", what, took, 2*admission.CallTimeout)
		}
		if err == nil {
			return true
		}
		if connect.CodeOf(err) != connect.CodeUnavailable ||
			!strings.Contains(
				err.Error(),
				"the store did not answer, so it is not known whether anything changed; try again",
			) {
			c.t.Errorf("%s: got error %v", what, err)
			return false
		}
		c.unknown.Add(1)
	}
}

func (c *slowClients) record(what, result string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.received[what] = result
}

func (c *slowClients) createTenant(ctx context.Context, name string) bool {
	op := operator(c.s.config.RunDir)
	tries := 0
	return c.retry(ctx, name, func(ctx context.Context) error {
		tries++
		resp, err := op.CreateTenant(ctx, connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: name}))
		if connect.CodeOf(err) == connect.CodeAlreadyExists && tries > 1 {
			c.record(name, "") // created by an earlier call, whose response was lost
			return nil
		}
		if err == nil {
			c.record(name, fmt.Sprint(resp.Msg.Tenant.Ids[0].Id))
		}
		return err
	})
}

func (c *slowClients) register(ctx context.Context, n int) bool {
	id := testNode(n)
	config := join.Config{
		URL:      c.s.url(),
		Token:    c.s.Token(),
		StateDir: c.t.TempDir(),
		NodeName: id.Name,
		NodeUUID: id.UUID,
		Log:      slog.New(slog.DiscardHandler),
	}
	return c.retry(ctx, id.Name, func(ctx context.Context) error {
		client, err := join.Dial(ctx, config)
		if err != nil {
			return err
		}
		defer client.Close()
		resp, err := client.Register(ctx, connect.NewRequest(&pilasterv1.RegisterRequest{}))
		if err == nil {
			c.record(id.Name, resp.Msg.Node.Prefix)
		}
		return err
	})
}

func (c *slowClients) ready() bool {
	resp, err := unixrpc.Client(Socket(c.s.config.RunDir)).Get(unixrpc.URL + "/readyz")
	if err != nil {
		c.t.Error(err)
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// await waits until a condition holds.
func (c *slowClients) await(what string, condition func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("after 2 minutes, still waiting for %s", what)
		}
	}
}

// With an etcd that is slower than the timeout of a call, calls fail with an error that says that the outcome is
// unknown. No change that was acknowledged is lost.
func TestSlowStore(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	etcd, external := startSlowEtcd(t)
	config := testConfig(t)
	config.Etcd = external
	c := &slowClients{t: t, s: start(t, config), received: map[string]string{}}
	node := registered(t, c.s, testNode(0))

	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var stop atomic.Bool
	var work sync.WaitGroup
	defer work.Wait()
	for w := range 6 {
		work.Go(func() {
			for i := 0; !stop.Load(); i++ {
				if n := 100*(w+1) + i; w%2 == 0 && !c.createTenant(ctx, fmt.Sprint("t", n)) ||
					w%2 == 1 && !c.register(ctx, n) {
					return
				}
			}
		})
	}
	count := func() int { c.mu.Lock(); defer c.mu.Unlock(); return len(c.received) }
	c.await("changes with a quick store", func() bool { return count() > 20 })
	etcd.mode.Store(lagging)
	before := count()
	c.await("changes with a lagging store", func() bool { return count() > before+3 })
	if n := c.unknown.Load(); n > 0 || !c.ready() {
		t.Errorf("with a lag of %v, %d calls had an unknown outcome, want none and a ready orchestrator", lag, n)
	}
	etcd.mode.Store(lateTxn)
	c.await("calls with an unknown outcome", func() bool { return c.unknown.Load() >= 4 })
	etcd.mode.Store(lateAll)
	c.await("an orchestrator that is not ready", func() bool { return !c.ready() })
	etcd.mode.Store(quick)
	c.await("an orchestrator that is ready again", c.ready)
	before = count()
	c.await("changes after the store is quick again", func() bool { return count() > before+10 })
	stop.Store(true)
	work.Wait()
	c.compare(t.Context())
	createTenant(t, c.s, "blue")
	resolve(t, node, "blue", "web")
	t.Logf("%d changes, %d calls with an unknown outcome", len(c.received), c.unknown.Load())
}

// compare compares the results that clients received with the state that the orchestrator shows, and with the state
// that a new orchestrator reads from the store.
func (c *slowClients) compare(ctx context.Context) {
	config := testConfig(c.t)
	config.Etcd = c.s.config.Etcd
	for i, s := range []*Server{c.s, start(c.t, config)} {
		shown, owners := map[string]string{}, map[string]string{}
		add := func(what, result string) {
			if other := owners[result]; other != "" {
				c.t.Errorf("orchestrator %d: %s is allocated to %s and to %s", i, result, other, what)
			}
			owners[result] = what
			if c.received[what] == "" {
				result = "" // no client received it
			}
			shown[what] = result
		}
		tenants, err := operator(s.config.RunDir).ListTenants(ctx, connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
		if err != nil {
			c.t.Fatal(err)
		}
		for _, tenant := range tenants.Msg.Tenants {
			add(tenant.Name, fmt.Sprint(tenant.Ids[0].Id))
		}
		nodes, err := operator(s.config.RunDir).ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
		if err != nil {
			c.t.Fatal(err)
		}
		for _, n := range nodes.Msg.Nodes {
			if n.Name != "n0" {
				add(n.Name, n.Prefix)
			}
		}
		if !maps.Equal(shown, c.received) {
			c.t.Errorf("orchestrator %d shows %d results, clients received %d:\n%v\n%v",
				i, len(shown), len(c.received), shown, c.received)
		}
	}
}
