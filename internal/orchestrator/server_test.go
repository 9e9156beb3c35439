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
		t.Errorf("join token file: got %q, %v; want %s with mode 0600", text, err, token)
	}
	createTenant(t, s, "blue")
	n1 := registered(t, s, testNode(1))

	if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("start with a data directory in use: got error %v", err)
	}
	n1.Close()
	s.Close()
	if _, err := os.Stat(Socket(c.RunDir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket exists after Close: %v", err)
	}

	other := c
	other.Plan.Base = netip.MustParsePrefix("fd22::/48")
	var refused *store.Error
	if _, err := Start(t.Context(), other); !errors.As(err, &refused) || refused.Reason != store.Refused {
		t.Errorf("start with another base prefix: got error %v, want a refusal", err)
	}
	c.Plan.Base = netip.Prefix{}
	s = start(t, c)
	nodes, err := operator(c.RunDir).ListNodes(t.Context(), connect.NewRequest(&pilasterv1.ListNodesRequest{}))
	if err != nil || len(nodes.Msg.Nodes) != 1 || nodes.Msg.Nodes[0].Prefix != "fd11:0:0:1::/64" || s.Token() != token {
		t.Errorf("after a restart: got nodes %v, %v; want one, and the same token", nodes, err)
	}
	tenants, err := operator(c.RunDir).ListTenants(t.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	if err != nil || len(tenants.Msg.Tenants) != 1 || tenants.Msg.Tenants[0].Ids[0].Key != nil {
		t.Errorf("after a restart: got tenants %v, %v; want one without its key", tenants, err)
	}
}

func TestLongDataDirIsRefused(t *testing.T) {
	c := testConfig(t)
	c.DataDir = filepath.Join(c.DataDir, strings.Repeat("x", 100))
	if _, err := Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "shorter --data-dir") {
		t.Errorf("got error %v, want advice to use a shorter --data-dir", err)
	}
}

func TestReadiness(t *testing.T) {
	var h health
	status := func() int {
		w := httptest.NewRecorder()
		h.serve(w, nil)
		return w.Code
	}
	if got := status(); got != http.StatusServiceUnavailable {
		t.Errorf("before the first answer of the store: got status %d, want 503", got)
	}
	h.note(time.Now())
	if got := status(); got != http.StatusOK {
		t.Errorf("after an answer: got status %d, want 200", got)
	}
	h.note(time.Now().Add(-2 * staleAfter))
	if got := status(); got != http.StatusServiceUnavailable {
		t.Errorf("%v after the last answer: got status %d, want 503", 2*staleAfter, got)
	}
	h.note(time.Now())
	if kept := h.answered.Load(); *kept == kept.Round(0) { // Round removes the reading of the monotonic clock
		t.Error("the recorded time has no reading of the monotonic clock")
	}
}

// The orchestrator ends the stream of a node that does not read it.
func TestStalledStream(t *testing.T) {
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
	go func() { // the cache receives sessions from the store, and all other events from the test
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
		Store: s.store, Cache: m, Timeout: time.Second, Log: s.config.Log,
		Limiter: admission.NewCallLimiter(admission.DefaultLimits, func(string) {}),
		Later:   func(func(context.Context)) {},
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
	if _, err := stream.Receive(); err != nil { // only the snapshot
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
		if keepsUp { // a full queue would end the stream for another reason
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
				t.Error("the stream ended because its queue was full, want a stalled connection")
			}
			if ended["stalled"] != 1 {
				t.Errorf("ended streams by reason: got %v, want one stalled", ended)
			}
			return
		case <-ctx.Done():
			t.Fatal("the handler has not returned after 20 s")
		case <-time.After(time.Millisecond):
		}
	}
}

// A call that changes something returns when the cache has reached the revision of the change, also if another client
// has reverted the change meanwhile.
func TestRevertedChange(t *testing.T) {
	t.Parallel()
	st, err := store.Open(t.Context(), storetest.Embedded(t), address.Plan{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	m := cache.New("self", func(string) {})
	s := &rpc.OperatorService{Store: st, Cache: m}
	m.Apply(store.Batch{Whole: true, Revision: 1 << 20}) // later than the change, and without the tenant
	ctx, cancel := context.WithTimeout(t.Context(), admission.CallTimeout)
	defer cancel()
	if _, err := s.CreateTenant(ctx, connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: "blue"})); err != nil {
		t.Fatal(err)
	}
	if ctx.Err() != nil {
		t.Error("the call returned only at its deadline")
	}
}
