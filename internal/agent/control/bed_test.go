package control

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
)

// fakeCluster is a fake orchestrator with answers and events from the test.
type fakeCluster struct {
	pilasterv1connect.UnimplementedNodeServiceHandler
	mu         sync.Mutex
	registered []*pilasterv1.RegisterRequest
	answer     *pilasterv1.RegisterResponse
	refusals   []error // of Register, one a call, before it answers
	during     func(*pilasterv1.RegisterRequest)
	resolve    func(*pilasterv1.ResolveRequest) (*pilasterv1.ResolveResponse, error)

	list func(*pilasterv1.ListMappingsRequest) (*pilasterv1.ListMappingsResponse, error)
	free func(*pilasterv1.FreeRequest) error

	allocate func(*pilasterv1.AllocateRequest) (*pilasterv1.AllocateResponse, error)

	endpoints func(*pilasterv1.PutEndpointsRequest) error

	hosted chan *pilasterv1.FollowRequest
	events chan *pilasterv1.FollowResponse // nil breaks the stream
}

func (c *fakeCluster) Register(
	_ context.Context,
	req *connect.Request[pilasterv1.RegisterRequest],
) (*connect.Response[pilasterv1.RegisterResponse], error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.registered = append(c.registered, req.Msg)
	if c.during != nil {
		c.during(req.Msg)
	}
	if len(c.refusals) > 0 {
		err := c.refusals[0]
		c.refusals = c.refusals[1:]
		return nil, err
	}
	return connect.NewResponse(c.answer), nil
}

func (c *fakeCluster) Resolve(
	_ context.Context,
	req *connect.Request[pilasterv1.ResolveRequest],
) (*connect.Response[pilasterv1.ResolveResponse], error) {
	resp, err := c.resolve(req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

func (c *fakeCluster) ListMappings(
	_ context.Context,
	req *connect.Request[pilasterv1.ListMappingsRequest],
) (*connect.Response[pilasterv1.ListMappingsResponse], error) {
	resp, err := c.list(req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

func (c *fakeCluster) Allocate(
	_ context.Context,
	req *connect.Request[pilasterv1.AllocateRequest],
) (*connect.Response[pilasterv1.AllocateResponse], error) {
	resp, err := c.allocate(req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

func (c *fakeCluster) Free(
	_ context.Context,
	req *connect.Request[pilasterv1.FreeRequest],
) (*connect.Response[pilasterv1.FreeResponse], error) {
	return connect.NewResponse(&pilasterv1.FreeResponse{}), c.free(req.Msg)
}

func (c *fakeCluster) PutEndpoints(
	_ context.Context,
	req *connect.Request[pilasterv1.PutEndpointsRequest],
) (*connect.Response[pilasterv1.PutEndpointsResponse], error) {
	return connect.NewResponse(&pilasterv1.PutEndpointsResponse{}), c.endpoints(req.Msg)
}

func (c *fakeCluster) Follow(
	ctx context.Context,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel()
		for {
			req, err := stream.Receive()
			if err != nil {
				return
			}
			select {
			case c.hosted <- req:
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		select {
		case e := <-c.events:
			if e == nil {
				return connect.NewError(connect.CodeUnavailable, errors.New("going away"))
			}
			if err := stream.Send(e); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

type linkBed struct {
	cluster *fakeCluster
	server  *httptest.Server
	node    *state.Node
	tenants *agent.Tenants
	link    *Link
	waits   chan int // the number of each pause
}

func newLinkBed(t *testing.T) *linkBed {
	t.Helper()
	b := &linkBed{
		cluster: &fakeCluster{
			answer: &pilasterv1.RegisterResponse{
				ClusterUuid: "cluster", Node: &pilasterv1.Node{Prefix: agenttest.NodePrefix.String()},
				Plan: &pilasterv1.Plan{BasePrefix: "fd70:696c:6100::/40", PrivatePrefix: "fc00::/8"},
			},
			hosted: make(chan *pilasterv1.FollowRequest), events: make(chan *pilasterv1.FollowResponse),
		},
		waits: make(chan int, 100),
	}
	mux := http.NewServeMux()
	mux.Handle(pilasterv1connect.NewNodeServiceHandler(b.cluster))
	b.server = httptest.NewUnstartedServer(mux)
	b.server.EnableHTTP2 = true
	b.server.StartTLS()
	t.Cleanup(b.server.Close)
	dir := t.TempDir()
	var err error
	if b.node, err = state.OpenNode(dir, "n1"); err != nil {
		t.Fatal(err)
	}
	if b.tenants, err = agent.OpenTenants(dir); err != nil {
		t.Fatal(err)
	}
	b.link = New(Config{
		URL: b.server.URL, Version: "v1", Node: b.node, Tenants: b.tenants,
		Endpoints: func() []endpoint.Record { return nil }, WantedPrefix: agenttest.NodePrefix,
		UplinkAddresses: func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("2001:db8::2")}, nil },
		Dial: func(context.Context) (pilasterv1connect.NodeServiceClient, error) {
			return pilasterv1connect.NewNodeServiceClient(b.server.Client(), b.server.URL), nil
		},
		Wait: func(ctx context.Context, n int, _ time.Duration) error { b.waits <- n; return ctx.Err() },
		Log:  slog.New(slog.DiscardHandler),
	})
	return b
}

// run keeps the link of a core up until stop is called.
func (b *linkBed) run(core *agenttest.Bed) (stop func()) {
	b.link.config.Tenants = core.Tenants
	ctx, cancel := context.WithCancel(core.T.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); b.link.Run(ctx, core.Core) }()
	return func() { cancel(); <-ended }
}
