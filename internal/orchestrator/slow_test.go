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

// slowEtcd stands before an etcd that takes its time, as with a slow disk: connections live, and what was asked is
// done however late, also when nobody waits for it any more.
type slowEtcd struct {
	etcd *grpc.ClientConn
	mode atomic.Int32
	txns atomic.Int32
}

// Modes of a slowEtcd.
const (
	quick   = iota
	lagging // by lag
	lateTxn // by late: every other change is made late, the others are answered late
	lateAll // by late, before anything is done
)

const (
	lag  = 50 * time.Millisecond
	late = 6 * time.Second // more than a request is given
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
	server := grpc.NewServer(grpc.ForceServerCodec(untouched{}), grpc.UnknownServiceHandler(s.pass))
	go server.Serve(l)
	t.Cleanup(server.Stop)
	return s, store.External{Endpoints: []string{"http://" + l.Addr().String()}}
}

// untouched leaves messages as they are.
type untouched struct{}

func (untouched) Name() string                    { return "untouched" }
func (untouched) Marshal(v any) ([]byte, error)   { return *v.(*[]byte), nil }
func (untouched) Unmarshal(b []byte, v any) error { *v.(*[]byte) = b; return nil }

// delays are how long a call waits on its way there and back.
func (s *slowEtcd) delays(method string) (there, back time.Duration) {
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
		grpc.ForceCodec(untouched{}),
	)
	if err != nil {
		return err
	}
	there, back := s.delays(method)
	go func() {
		defer out.CloseSend()
		for {
			var message []byte
			if in.RecvMsg(&message) != nil {
				return
			}
			time.Sleep(there) // the lateness is what is tested
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
		time.Sleep(back)
		in.SendMsg(&message) // to no client, perhaps
	}
}

// Tenants is what clients of a slow store did and were told.
type asked struct {
	t       *testing.T
	s       *Server
	mu      sync.Mutex
	told    map[string]string // tenant or node: id or prefix
	unknown atomic.Int32      // calls without an outcome
}

// insist asks until the store answers, and refuses any error but the one that says so in time.
func (a *asked) insist(ctx context.Context, what string, ask func(context.Context) error) bool {
	for {
		began := time.Now()
		err := ask(ctx)
		if ctx.Err() != nil {
			return false
		}
		if took := time.Since(began); took > 2*admission.CallTimeout {
			a.t.Errorf("%s was answered after %v", what, took)
		}
		if err == nil {
			return true
		}
		if connect.CodeOf(err) != connect.CodeUnavailable ||
			!strings.Contains(
				err.Error(),
				"the store did not answer, so it is not known whether anything changed; try again",
			) {
			a.t.Errorf("%s: %v", what, err)
			return false
		}
		a.unknown.Add(1)
	}
}

func (a *asked) note(what, was string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.told[what] = was
}

func (a *asked) createTenant(ctx context.Context, name string) bool {
	op := operator(a.s.config.RunDir)
	tries := 0
	return a.insist(ctx, name, func(ctx context.Context) error {
		tries++
		resp, err := op.CreateTenant(ctx, connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: name}))
		if connect.CodeOf(err) == connect.CodeAlreadyExists && tries > 1 {
			a.note(name, "") // by the call before, whose answer nobody got
			return nil
		}
		if err == nil {
			a.note(name, fmt.Sprint(resp.Msg.Tenant.Ids[0].Id))
		}
		return err
	})
}

func (a *asked) register(ctx context.Context, n int) bool {
	id := testNode(n)
	config := join.Config{
		URL:      a.s.url(),
		Token:    a.s.Token(),
		StateDir: a.t.TempDir(),
		NodeName: id.Name,
		NodeUUID: id.UUID,
		Log:      slog.New(slog.DiscardHandler),
	}
	return a.insist(ctx, id.Name, func(ctx context.Context) error {
		c, err := join.Dial(ctx, config)
		if err != nil {
			return err
		}
		defer c.Close()
		resp, err := c.Register(ctx, connect.NewRequest(&pilasterv1.RegisterRequest{}))
		if err == nil {
			a.note(id.Name, resp.Msg.Node.Prefix)
		}
		return err
	})
}

func (a *asked) ready() bool {
	resp, err := unixrpc.Client(Socket(a.s.config.RunDir)).Get(unixrpc.URL + "/readyz")
	if err != nil {
		a.t.Error(err)
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// until waits for what others do.
func (a *asked) until(what string, is func() bool) {
	a.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			a.t.Fatalf("never: %s", what)
		}
	}
}

// An etcd that is late by more than a call may take costs time and clear errors, and nothing that was acknowledged.
func TestSlowStore(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	etcd, external := startSlowEtcd(t)
	config := testConfig(t)
	config.Etcd = external
	a := &asked{t: t, s: start(t, config), told: map[string]string{}}
	node := registered(t, a.s, testNode(0))

	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var calm atomic.Bool
	var work sync.WaitGroup
	defer work.Wait()
	for w := range 6 {
		work.Go(func() {
			for i := 0; !calm.Load(); i++ {
				if n := 100*(w+1) + i; w%2 == 0 && !a.createTenant(ctx, fmt.Sprint("t", n)) ||
					w%2 == 1 && !a.register(ctx, n) {
					return
				}
			}
		})
	}
	count := func() int { a.mu.Lock(); defer a.mu.Unlock(); return len(a.told) }
	a.until("changes while it is quick", func() bool { return count() > 20 })
	etcd.mode.Store(lagging)
	before := count()
	a.until("changes while it lags", func() bool { return count() > before+3 })
	if n := a.unknown.Load(); n > 0 || !a.ready() {
		t.Errorf("a store that lags is not answered for: %d calls", n)
	}
	etcd.mode.Store(lateTxn)
	a.until("changes without an outcome", func() bool { return a.unknown.Load() >= 4 })
	etcd.mode.Store(lateAll)
	a.until("an orchestrator that says it is not ready", func() bool { return !a.ready() })
	etcd.mode.Store(quick)
	a.until("an orchestrator that is ready again", a.ready)
	before = count()
	a.until("changes after all", func() bool { return count() > before+10 })
	calm.Store(true)
	work.Wait()
	a.compare(t.Context())
	createTenant(t, a.s, "blue")
	resolve(t, node, "blue", "web")
	t.Logf("%d changes, %d calls without an outcome", len(a.told), a.unknown.Load())
}

// compare holds what clients were told against what the orchestrator shows, and another one reads in the store.
func (a *asked) compare(ctx context.Context) {
	config := testConfig(a.t)
	config.Etcd = a.s.config.Etcd
	for i, s := range []*Server{a.s, start(a.t, config)} {
		shows, owners := map[string]string{}, map[string]string{}
		show := func(what, is string) {
			if other := owners[is]; other != "" {
				a.t.Errorf("orchestrator %d: %s is of %s and of %s", i, is, other, what)
			}
			owners[is] = what
			if a.told[what] == "" {
				is = "" // nobody was told
			}
			shows[what] = is
		}
		tenants, err := operator(s.config.RunDir).ListTenants(ctx, connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
		if err != nil {
			a.t.Fatal(err)
		}
		for _, tenant := range tenants.Msg.Tenants {
			show(tenant.Name, fmt.Sprint(tenant.Ids[0].Id))
		}
		nodes, err := operator(s.config.RunDir).ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
		if err != nil {
			a.t.Fatal(err)
		}
		for _, n := range nodes.Msg.Nodes {
			if n.Name != "n0" {
				show(n.Name, n.Prefix)
			}
		}
		if !maps.Equal(shows, a.told) {
			a.t.Errorf(
				"orchestrator %d shows %d, clients were told of %d:\n%v\n%v",
				i,
				len(shows),
				len(a.told),
				shows,
				a.told,
			)
		}
	}
}
