package orchestrator

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// A stream that is told nothing else hears how far it is: so often, and where there are very many, all together so many
// times a second, which is each of 100,000 every 50 s. No agent waits for it: that the other end is there it asks by
// HTTP/2's pings. It is where the node's next stream resumes, so one that breaks within that time costs no snapshot as
// long as no more than maxHistory changes came meanwhile, 80 in a second of 100,000 streams.
const (
	heartbeatEvery = 5 * time.Second
	heartbeatRate  = 2000
)

// reconnectRate is how many nodes a second can follow anew. After a restart all do: they are asked to come no faster.
const reconnectRate = 3000

// What a node says of itself and its tenants is kept in the store.
const (
	maxVersion = 256 // bytes
	maxUplinks = 64
	maxProblem = 1024    // bytes
	maxTenants = 65_535  // as ids in a packet path
	maxApps    = 1 << 18 // of all its tenants

	maxOverrides = 4096 // of containers of all its tenants

	maxMappings = 2 * maxTenants // two of each tenant, or of each endpoint
)

// nodeService serves agents. A node acts as itself only: who it is comes from its certificate.
type nodeService struct {
	store   *store.Store
	cache   *cache
	token   *tokenFile
	timeout time.Duration // for one message of a stream to be written, or the first to be read
	now     func() time.Time
	log     *slog.Logger
	limiter *callLimiter
	lists   *rates[string]              // of mappings, by tenant; nil where there is no limit
	later   func(func(context.Context)) // does something that outlasts the call
}

func (s *nodeService) Join(
	ctx context.Context,
	req *connect.Request[pilasterv1.JoinRequest],
) (*connect.Response[pilasterv1.JoinResponse], error) {
	secret, _ := hex.DecodeString(req.Msg.Secret)
	if err := s.token.admit(ctx, secret); err != nil {
		return nil, err
	}
	node := pki.Node{Name: req.Msg.NodeName, UUID: req.Msg.NodeUuid}
	if err := s.store.Admit(ctx, node); err != nil {
		return nil, err
	}
	certificate, err := s.certify(node, req.Msg.Csr)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(
		&pilasterv1.JoinResponse{Certificate: certificate, Ca: s.store.Cluster().Authority.Certificate()},
	), nil
}

func (s *nodeService) Renew(
	ctx context.Context,
	req *connect.Request[pilasterv1.RenewRequest],
) (*connect.Response[pilasterv1.RenewResponse], error) {
	node, valid := caller(ctx)
	admit := func() error { return s.store.Admit(ctx, node) }
	if !valid {
		node, _ = expiredCaller(ctx)
		s.awaitPredecessor(ctx, node, instance(ctx))
		admit = func() error { return s.store.Readmit(ctx, node, instance(ctx)) }
	}
	if err := admit(); err != nil {
		return nil, err
	}
	certificate, err := s.certify(node, req.Msg.Csr)
	if err != nil {
		return nil, err
	}
	if !valid {
		s.log.Warn(
			"a node came back with a certificate that is not valid now, and has a new one",
			"node",
			node.Name,
			"uuid",
			node.UUID,
		)
	}
	return connect.NewResponse(&pilasterv1.RenewResponse{Certificate: certificate}), nil
}

func (s *nodeService) certify(n pki.Node, csr []byte) ([]byte, error) {
	certificate, err := s.store.Cluster().Authority.SignNode(csr, n, s.now())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	return certificate, nil
}

func (s *nodeService) Register(
	ctx context.Context,
	req *connect.Request[pilasterv1.RegisterRequest],
) (*connect.Response[pilasterv1.RegisterResponse], error) {
	cluster := s.store.Cluster()
	if pinned := req.Msg.ClusterUuid; pinned != "" && pinned != cluster.UUID {
		return nil, connect.NewError(
			connect.CodeFailedPrecondition,
			fmt.Errorf(
				"this node belongs to cluster %s, and this is cluster %s; nothing was changed: name the right orchestrator, or empty the node's state directory to join this one",
				pinned,
				cluster.UUID,
			),
		)
	}
	r, err := registration(ctx, req.Msg)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if node := s.cache.registered(r); node != nil {
		return connect.NewResponse(
			&pilasterv1.RegisterResponse{Node: node, Plan: plan(cluster.Plan), ClusterUuid: cluster.UUID},
		), nil
	}
	if n := s.cache.claims(r.Node.Name, r.Mappings); n > 0 {
		if err := s.cache.room(r.Node.Name, n); err != nil {
			return nil, err
		}
	}
	s.awaitPredecessor(ctx, r.Node, r.Instance)
	node, err := s.store.Register(ctx, r)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(
		&pilasterv1.RegisterResponse{Node: node, Plan: plan(cluster.Plan), ClusterUuid: cluster.UUID},
	), nil
}

func registration(ctx context.Context, m *pilasterv1.RegisterRequest) (r store.Registration, err error) {
	r.Node, _ = caller(ctx)
	r.Instance = instance(ctx)
	if len(m.Version) > maxVersion || len(m.UplinkAddresses) > maxUplinks {
		return r, fmt.Errorf(
			"a version of %d bytes and %d uplink addresses; at most %d and %d are kept",
			len(m.Version),
			len(m.UplinkAddresses),
			maxVersion,
			maxUplinks,
		)
	}
	if err := checkHeld(m.Held); err != nil {
		return r, err
	}
	for _, network := range m.Enforces {
		if _, known := tenant.TraitsOf(network); !known {
			continue // a later build has one more
		}
		r.Enforces = append(r.Enforces, network)
	}
	slices.Sort(r.Enforces)
	r.Enforces = slices.Compact(r.Enforces)
	r.Edge, r.Gateway, r.Published = m.Edge, m.Gateway, m.Held.GetPublished()
	r.Version, r.Tenants, r.Apps, r.Mappings = printable(
		m.Version,
	), m.Held.GetTenants(), m.Held.GetApps(), m.Held.GetMappings()
	if m.WantedPrefix != "" {
		if r.Prefix, err = netip.ParsePrefix(m.WantedPrefix); err != nil {
			return r, fmt.Errorf("node prefix: %w", err)
		}
	}
	for _, text := range m.UplinkAddresses {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return r, fmt.Errorf("uplink address: %w", err)
		}
		r.Uplinks = append(r.Uplinks, a)
	}
	return r, nil
}

func checkHeld(held *pilasterv1.Held) error {
	if tenants, apps := len(held.GetTenants()), len(held.GetApps()); tenants > maxTenants || apps > maxApps {
		return fmt.Errorf(
			"the node holds %s with %s, and a node may have %d with %d; nothing was changed: have it host fewer tenants",
			humanize.Of(tenants, "tenant", "tenants"),
			humanize.Of(apps, "app", "apps"),
			maxTenants,
			maxApps,
		)
	}
	if mappings := len(held.GetMappings()); mappings > maxMappings {
		return fmt.Errorf(
			"the node holds %d addresses and subnets of tenants, and a node may have %d; nothing was changed: remove containers from it",
			mappings,
			maxMappings,
		)
	}
	for _, t := range held.GetTenants() {
		if len(t.Ids) > tenant.MaxIDs {
			return fmt.Errorf(
				"the node holds %d ids of a tenant, and a tenant has %d at most; nothing was changed",
				len(t.Ids),
				tenant.MaxIDs,
			)
		}
	}
	return nil
}

func plan(p address.Plan) *pilasterv1.Plan {
	out := &pilasterv1.Plan{BasePrefix: p.Base.String(), PrivatePrefix: p.Private.String()}
	for _, gateway := range []netip.Prefix{p.Gateway4, p.Gateway6} {
		if gateway.IsValid() {
			out.GatewayPrefixes = append(out.GatewayPrefixes, gateway.String())
		}
	}
	return out
}

func (s *nodeService) Resolve(
	ctx context.Context,
	req *connect.Request[pilasterv1.ResolveRequest],
) (*connect.Response[pilasterv1.ResolveResponse], error) {
	node, err := s.acting(ctx)
	if err != nil {
		return nil, err
	}
	tenant, app, err := s.store.Resolve(ctx, node, req.Msg.Sequence, req.Msg.Tenant, req.Msg.Labels)
	if err != nil {
		return nil, err
	}
	// The model may not have heard yet of what another orchestrator has made.
	ruled, err := s.store.HasPolicies(ctx, tenant.Name)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(
		&pilasterv1.ResolveResponse{Tenant: s.cache.withRegions(tenant), App: app, HasPolicies: ruled},
	), nil
}

// acting is the caller, a registered node, if no other machine is connected as it.
func (s *nodeService) acting(ctx context.Context) (pki.Node, error) {
	node, _ := caller(ctx)
	if err := s.registered(ctx); err != nil {
		return node, err
	}
	s.awaitPredecessor(ctx, node, instance(ctx))
	return node, s.cache.session(node.Name).Admit(node.Name, instance(ctx))
}

// registered waits a moment for a node that registered with another orchestrator just now.
func (s *nodeService) registered(ctx context.Context) error {
	n, _ := caller(ctx)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := s.cache.awaitNode(ctx, n.Name, func() bool { return s.cache.knows(n) }); err != nil {
		return connect.NewError(
			connect.CodeFailedPrecondition,
			fmt.Errorf("node %s is not registered; register first", n.Name),
		)
	}
	return nil
}

func (s *nodeService) Follow(
	ctx context.Context,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
) error {
	if err := s.registered(ctx); err != nil {
		return err
	}
	deadlines := controller(ctx)
	deadlines.SetReadDeadline(time.Now().Add(s.timeout))
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	deadlines.SetReadDeadline(time.Time{})
	if err := checkHosted(first); err != nil {
		return err
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	node, _ := caller(ctx)
	s.awaitPredecessor(ctx, node, instance(ctx))
	begun, err := s.limiter.begin(ctx)
	if err != nil {
		return err
	}
	defer begun()
	session := store.Session{Orchestrator: s.cache.self, Instance: instance(ctx), Stream: join.NewUUID()}
	defer func() {
		if !s.cache.stopped() { // then all sessions end at once
			s.later(func(ctx context.Context) { s.disconnect(ctx, node, session) })
		}
	}()
	err = s.connect(ctx, node, session)
	begun() // only now: were the next to begin before the model had heard of this one, the model would lag behind for longer than streams wait for it
	if err != nil {
		return err
	}
	f := s.cache.subscribe(node, session, first, end)
	defer s.cache.unsubscribe(f)

	requests := make(chan *pilasterv1.FollowRequest)
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		end(receive(ctx, stream, requests))
	}()
	defer func() {
		end(nil)
		deadlines.SetReadDeadline(time.Now()) // wakes the reader
		<-reading
	}()
	// The queue holds already what is incomplete.
	again := proto.CloneOf(first)
	again.IncompleteTenants = nil
	if err := s.host(ctx, f, again); err != nil {
		return err
	}
	return s.writeStream(ctx, f, stream, requests)
}

// writeStream writes the stream until it ends, and says why it did.
func (s *nodeService) writeStream(
	ctx context.Context,
	f *subscriber,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
	requests <-chan *pilasterv1.FollowRequest,
) error {
	heartbeat := time.NewTimer(s.cache.heartbeatEvery())
	defer heartbeat.Stop()
	var told time.Time // something else, last: it says as well how far the stream is
	for {
		var next *pilasterv1.FollowResponse
		select {
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(cause, io.EOF) {
				return cause
			}
			return nil // the node has no more to say
		case req := <-requests:
			if err := s.host(ctx, f, req); err != nil {
				return err
			}
			continue
		case <-f.queue.filled:
			next = f.queue.next()
		case <-heartbeat.C:
			every := s.cache.heartbeatEvery()
			if left := time.Until(told.Add(every)); left > 0 {
				heartbeat.Reset(left)
				continue
			}
			next = s.cache.heartbeat(f)
			heartbeat.Reset(every)
		}
		if next == nil {
			continue
		}
		for _, part := range parts(next) {
			if err := s.send(ctx, f, stream, part); err != nil {
				return err
			}
		}
		if next.GetHeartbeat() == nil {
			told = time.Now()
		}
	}
}

func (s *nodeService) send(
	ctx context.Context,
	f *subscriber,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
	r *pilasterv1.FollowResponse,
) error {
	if size := proto.Size(r); size > maxAnswer {
		return s.limiter.refuse(
			limitAnswer,
			connect.CodeResourceExhausted,
			"what the tenants of this node have makes a message of %d bytes, and %d are the most; nothing was changed on this node: have it host fewer tenants",
			size,
			maxAnswer,
		)
	}
	deadlines, began := controller(ctx), time.Now()
	deadlines.SetWriteDeadline(began.Add(s.timeout))
	if err := stream.Send(r); err != nil {
		if time.Since(began) >= s.timeout {
			s.cache.stalled(f, s.timeout)
			s.log.Warn(
				"a node reads nothing; its stream is ended, and begins with what it missed when it follows again",
				"node",
				f.node.Name,
			)
			return context.Cause(ctx)
		}
		return err
	}
	deadlines.SetWriteDeadline(time.Time{})
	return nil
}

// host makes the stream carry these tenants, and notes in the store what the node says of them.
func (s *nodeService) host(ctx context.Context, f *subscriber, req *pilasterv1.FollowRequest) error {
	add, remove := s.cache.rehost(f, req)
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	noted, err := s.store.RecordHosting(ctx, f.node, req.Sequence, add, remove)
	s.cache.forgetRecorded(f, noted.Overtaken)
	if err == nil && s.cache.refuse(f, add, noted.Refused) {
		s.log.Warn(
			"what a node says of labels of its containers was refused in part; its status says what",
			"node",
			f.node.Name,
		)
	}
	return err
}

func receive(
	ctx context.Context,
	stream *connect.BidiStream[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
	to chan<- *pilasterv1.FollowRequest,
) error {
	for {
		if err := nextMessage(ctx); err != nil {
			return err
		}
		req, err := stream.Receive()
		if err != nil {
			return err
		}
		if err := checkHosted(req); err != nil {
			return err
		}
		select {
		case to <- req:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// printable is a node's words on one line and without what a terminal obeys, as people are shown them.
func printable(words string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, words)
}

// checkHosted refuses what no node of ours says.
func checkHosted(req *pilasterv1.FollowRequest) error {
	for _, name := range slices.Concat(req.HostedTenants, req.CarriedTenants) {
		if err := tenant.CheckName(name); err != nil {
			return connect.NewError(connect.CodeInvalidArgument, err)
		}
	}
	overrides := 0
	for _, h := range req.Hosting {
		if h.Unenforced = printable(h.Unenforced); h.Moving != nil {
			h.Moving.Problem = printable(h.Moving.Problem)
		}
		overrides += len(h.Overrides)
		if n := max(len(h.GetMoving().GetProblem()), len(h.Unenforced)); n > maxProblem {
			return connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf("a problem of %d bytes, and %d are kept; nothing was changed", n, maxProblem),
			)
		}
		if len(h.Accepts) > tenant.MaxIDs || len(h.Holds) > tenant.MaxIDs {
			return connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf(
					"the node accepts %d ids of a tenant and holds %d, and a tenant has %d at most; nothing was changed",
					len(h.Accepts),
					len(h.Holds),
					tenant.MaxIDs,
				),
			)
		}
	}
	for _, h := range req.Hosting {
		if n := len(h.KeepsApps); n > store.MaxRound {
			return connect.NewError(
				connect.CodeInvalidArgument,
				fmt.Errorf(
					"the node keeps %d retiring apps of a tenant, and there are %d at most; nothing was changed",
					n,
					store.MaxRound,
				),
			)
		}
	}
	if overrides > maxOverrides {
		return connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf(
				"%d containers of the node are of another app than their addresses say, and a node may have %d; nothing was changed: start those anew whose labels have changed",
				overrides,
				maxOverrides,
			),
		)
	}
	return nil
}
