package orchestrator

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/unixrpc"
)

// asProcess is an environment variable that makes this test binary run an orchestrator. Its value is a Config in JSON.
const asProcess = "PILASTER_TEST_ORCHESTRATOR"

func TestMain(m *testing.M) {
	text := os.Getenv(asProcess)
	if text == "" {
		flag.Set("test.parallel", "8") // tests wait for timers and disks, not for processors
		os.Exit(m.Run())
	}
	var c Config
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		panic(err)
	}
	c.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := Run(ctx, c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// testConfig configures an orchestrator with its own folders, on the loopback device.
func testConfig(t testing.TB) Config {
	dir := t.TempDir()
	return Config{
		DataDir: filepath.Join(dir, "data"),
		RunDir:  filepath.Join(dir, "run"),
		Listen:  "[::1]:0",
		Log:     slog.New(slog.DiscardHandler),
	}
}

func start(t *testing.T, c Config) *Server {
	t.Helper()
	s, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func (s *Server) url() string { return "https://" + s.Addr().String() }

func operator(runDir string) pilasterv1connect.OperatorServiceClient {
	return pilasterv1connect.NewOperatorServiceClient(unixrpc.Client(Socket(runDir)), unixrpc.URL)
}

func testNode(n int) pki.Node { return pki.Node{Name: fmt.Sprintf("n%d", n), UUID: storetest.UUID(n)} }

// dial joins the cluster as a node.
func dial(t *testing.T, s *Server, n pki.Node) *join.Client {
	t.Helper()
	c, err := join.Dial(t.Context(), join.Config{
		URL: s.url(), Token: s.Token(), StateDir: t.TempDir(), NodeName: n.Name, NodeUUID: n.UUID, Log: s.config.Log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// registered joins the cluster as a node and registers it.
func registered(t *testing.T, s *Server, n pki.Node) *join.Client {
	t.Helper()
	c := dial(t, s, n)
	if _, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Version: "test", Enforces: []string{"netpila", "nimitz"},
	})); err != nil {
		t.Fatal(err)
	}
	return c
}

func createTenant(t *testing.T, s *Server, name string) *pilasterv1.Tenant {
	t.Helper()
	resp, err := operator(
		s.config.RunDir,
	).CreateTenant(t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: name}))
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg.Tenant
}

func resolve(t *testing.T, c *join.Client, tenant, app string) *pilasterv1.App {
	t.Helper()
	resp, err := c.Resolve(
		t.Context(),
		connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: tenant, Labels: map[string]string{"app": app}}),
	)
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg.App
}

func wantCode(t *testing.T, err error, want connect.Code) {
	t.Helper()
	if err == nil || connect.CodeOf(err) != want {
		t.Errorf("got error %v, want code %v", err, want)
	}
}

// stream is a Follow stream; the test reads its messages one by one.
type stream struct {
	*connect.BidiStreamForClient[pilasterv1.FollowRequest, pilasterv1.FollowResponse]
}

func follow(t *testing.T, c *join.Client, first *pilasterv1.FollowRequest) stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	s := stream{c.Follow(ctx)}
	t.Cleanup(func() {
		cancel()
		s.CloseRequest()
		s.CloseResponse()
	})
	s.send(t, first)
	return s
}

func hosting(tenants ...string) *pilasterv1.FollowRequest {
	return &pilasterv1.FollowRequest{HostedTenants: tenants}
}

func (s stream) send(t *testing.T, req *pilasterv1.FollowRequest) {
	t.Helper()
	if err := s.Send(req); err != nil {
		t.Fatal(err)
	}
}

// next returns the next message, without heartbeats that carry no refusals.
func (s stream) next(t *testing.T) *pilasterv1.FollowResponse {
	t.Helper()
	for {
		r, err := s.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if r.GetHeartbeat() == nil || r.Refusals != nil {
			return r
		}
	}
}

// ended waits for the end of the stream and checks its code.
func (s stream) ended(t *testing.T, want connect.Code) {
	t.Helper()
	for {
		_, err := s.Receive()
		if err == nil {
			continue
		}
		wantCode(t, err, want)
		return
	}
}

// raw returns a client with the transport's own TLS configuration.
func raw(t *testing.T, s *Server, tr *http.Transport) pilasterv1connect.NodeServiceClient {
	var p http.Protocols
	p.SetHTTP2(true)
	tr.Protocols = &p
	t.Cleanup(tr.CloseIdleConnections)
	return pilasterv1connect.NewNodeServiceClient(&http.Client{Transport: tr}, s.url())
}
