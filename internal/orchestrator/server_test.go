package orchestrator

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/rpc"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/unixrpc"
)

func TestRestart(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Plan.Base = netip.MustParsePrefix("fd11::/48")
	s, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	token := s.Token()
	text, err := os.ReadFile(filepath.Join(c.DataDir, "join-token"))
	if fi, _ := os.Stat(filepath.Join(c.DataDir, "join-token")); err != nil ||
		strings.TrimSpace(string(text)) != token ||
		fi.Mode().Perm() != 0o600 {
		t.Errorf("join token on disk: %v, %q", err, text)
	}
	createTenant(t, s, "blue")
	n1 := registered(t, s, testNode(1))

	if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("a second one on the same data: %v", err)
	}
	n1.Close()
	s.Close()
	if _, err := os.Stat(Socket(c.RunDir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket is still there: %v", err)
	}

	other := c
	other.Plan.Base = netip.MustParsePrefix("fd22::/48")
	var refused *store.Error
	if _, err := Start(t.Context(), other); !errors.As(err, &refused) || refused.Reason != store.Refused {
		t.Errorf("another base prefix: %v", err)
	}
	c.Plan.Base = netip.Prefix{}
	s = start(t, c)
	nodes, err := operator(c.RunDir).ListNodes(t.Context(), connect.NewRequest(&pilasterv1.ListNodesRequest{}))
	if err != nil || len(nodes.Msg.Nodes) != 1 || nodes.Msg.Nodes[0].Prefix != "fd11:0:0:1::/64" || s.Token() != token {
		t.Errorf("after a restart: %v, %v", nodes, err)
	}
	tenants, err := operator(c.RunDir).ListTenants(t.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	if err != nil || len(tenants.Msg.Tenants) != 1 || tenants.Msg.Tenants[0].Ids[0].Key != nil {
		t.Errorf("after a restart: %v, %v", tenants, err)
	}
}

func TestLongDataDirIsRefused(t *testing.T) {
	c := testConfig(t)
	c.DataDir = filepath.Join(c.DataDir, strings.Repeat("x", 100))
	if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "shorter --data-dir") {
		t.Errorf("got %v", err)
	}
}

func TestReadyOnlyWhileTheStoreAnswers(t *testing.T) {
	var h health
	status := func() int {
		w := httptest.NewRecorder()
		h.serve(w, nil)
		return w.Code
	}
	if got := status(); got != http.StatusServiceUnavailable {
		t.Errorf("before the store answered: %d", got)
	}
	h.note(time.Now())
	if got := status(); got != http.StatusOK {
		t.Errorf("after: %d", got)
	}
	h.note(time.Now().Add(-2 * staleAfter))
	if got := status(); got != http.StatusServiceUnavailable {
		t.Errorf("long after: %d", got)
	}
	h.note(time.Now())
	if kept := h.answered.Load(); *kept == kept.Round(0) { // which takes the monotonic clock's reading away
		t.Error("what is remembered goes by the clock that people set")
	}
}

// A node that reads nothing must not hold its handler for ever.
func TestNodeThatReadsNothing(t *testing.T) {
	s := start(t, testConfig(t))
	registered(t, s, testNode(1))
	ended := map[string]int{}
	m := cache.New("self", func(reason string) { ended[reason]++ })
	n1 := testNode(1)
	m.Apply(store.Batch{Revision: 10, Whole: true, Events: []store.Event{
		{Node: &pilasterv1.Node{Name: n1.Name, Uuid: n1.UUID}},
		{Tenant: &pilasterv1.Tenant{Name: "blue"}}, {Tenant: &pilasterv1.Tenant{Name: "red"}},
		{Hosting: &pilasterv1.Hosting{Tenant: "blue", Node: "n1"}},
	}})
	stopped, stop := context.WithCancel(t.Context())
	defer stop()
	watching := make(chan struct{})
	go func() { // what this orchestrator notes it must hear of; the rest is made up
		defer close(watching)
		s.store.Watch(stopped, func(b store.Batch) {
			for _, e := range b.Events {
				if e.Session != nil {
					m.Apply(store.Batch{Revision: 11, Events: []store.Event{e}})
				}
			}
		})
	}()
	defer func() { stop(); <-watching }()
	mux := http.NewServeMux()
	mux.Handle(pilasterv1connect.NewNodeServiceHandler(&rpc.NodeService{
		Store: s.store, Cache: m, Timeout: time.Second, Log: s.config.Log, Limiter: admission.NewCallLimiter(admission.DefaultLimits, func(string) {}), Later: func(func(context.Context)) {},
	}))
	returned := make(chan struct{})
	path := filepath.Join(t.TempDir(), "s")
	l, err := unixrpc.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	server := unixrpc.Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := admission.WithCaller(r.Context(), testNode(1))
		ctx = admission.WithController(ctx, http.NewResponseController(w))
		mux.ServeHTTP(w, r.WithContext(ctx))
		close(returned)
	}))
	defer server.Close()
	go server.Serve(l)

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	stream := pilasterv1connect.NewNodeServiceClient(unixrpc.Client(path), unixrpc.URL).Follow(ctx)
	if err := stream.Send(&pilasterv1.FollowRequest{HostedTenants: []string{"blue"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Receive(); err != nil { // the snapshot, and nothing after it
		t.Fatal(err)
	}
	noise := make([]byte, 60<<10) // does not compress
	rand.Read(noise)
	big := map[string]string{"app": fmt.Sprintf("%x", noise)}
	for revision := int64(12); ; revision++ {
		m.Mu.Lock()
		f := m.Subscribers[testNode(1).Name]
		keepsUp := f == nil || f.Queue.Len() == 0
		m.Mu.Unlock()
		if keepsUp { // so that it is not ended because of its queue
			m.Apply(
				store.Batch{
					Revision: revision,
					Events:   []store.Event{{App: &pilasterv1.App{Tenant: "blue", Id: 1, Labels: big}}},
				},
			)
		}
		select {
		case <-returned:
			if ended["slow"] != 0 {
				t.Error("its queue was full before its connection was: this proved nothing")
			}
			if ended["stalled"] != 1 {
				t.Errorf("ended %v", ended)
			}
			return
		case <-ctx.Done():
			t.Fatal("the handler still waits for the node")
		case <-time.After(time.Millisecond):
		}
	}
}

// A change that somebody else undid at once is answered as soon as it was seen: it may never be there to be seen.
func TestChangeUndoneAtOnce(t *testing.T) {
	t.Parallel()
	st, err := store.Open(t.Context(), storetest.Embedded(t), address.Plan{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	m := cache.New("self", func(string) {})
	s := &rpc.OperatorService{Store: st, Cache: m}
	m.Apply(store.Batch{Whole: true, Revision: 1 << 20}) // later than what follows: it is made and gone
	ctx, cancel := context.WithTimeout(t.Context(), admission.CallTimeout)
	defer cancel()
	if _, err := s.CreateTenant(ctx, connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: "blue"})); err != nil {
		t.Fatal(err)
	}
	if ctx.Err() != nil {
		t.Error("the answer came only when the call had run out of time")
	}
}
