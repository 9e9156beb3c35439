package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/networks"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Core is what a link calls on the agent's core.
type Core interface {
	// Apply, ApplyPolicies, SetTransit and ApplyServices apply an event of the stream.
	Apply(ctx context.Context, states []agent.TenantState, deleted []string) error
	ApplyPolicies(ctx context.Context, n policies.Update) error
	SetTransit(ctx context.Context, names []string) error
	ApplyServices(u services.Update)
	// Linked is called once a stream has delivered its first event.
	Linked()
	// Networks returns the networks of this node, which receive mappings.
	Networks() *networks.Set
	// Endpoints returns the records of this node's endpoints.
	Endpoints() []endpoint.Record
	// IfUnused calls do while no endpoint has the key, and none is being created with it.
	IfUnused(ctx context.Context, key string, do func() error) error
}

// Link is the agent's connection to the orchestrator. Without it, everything that this node knows keeps working.
type Link struct {
	config           Config
	dialing          refusal.KeyLocks            // two concurrent joins would issue two certificates
	uplink           []netip.Addr                // as last registered; used only by the registering goroutine
	lastRegistration *pilasterv1.RegisterRequest // the last registration if it is still valid; nil after a later one

	mu           sync.Mutex
	client       pilasterv1connect.NodeServiceClient // nil before the first success
	status       agent.LinkStatus
	spreadWanted time.Duration // see spread
	// addresses to release: a release failed, or an allocation may have succeeded unseen
	pendingFrees map[allocation]bool
	startFrees   func() // starts retryFrees; nil while there is no stream
	freeing      bool   // retryFrees runs

	tried     chan struct{} // see Tried
	firstTime sync.Once
}

// Config has the parts and options of a Link.
type Config struct {
	URL     string
	Version string
	Node    *state.Node
	Tenants *agent.Tenants
	// of this node, at least those with addresses that the orchestrator allocated
	Endpoints       func() []endpoint.Record
	WantedPrefix    netip.Prefix    // brought by the operator; may be zero
	Edge            bool            // the node is an Edge Switch
	Gateway         func() bool     // whether the node has a gateway, as known so far; nil means no
	Enforces        func() []string // networks that enforce policies, as known so far; nil means none
	Form            func() string   // see network.FormProvider, as known so far; nil means none
	Offloads        func() bool     // whether it can be in offloads, as known so far; nil means no
	Egress          func() bool     // whether its containers can reach hosts outside, as known so far; nil means no
	MTUReserve      int             // bytes by which containers' MTU is smaller than the tunnels allow
	Rack            string          // of the node; may be empty
	UplinkAddresses func() ([]netip.Addr, error)
	// AddressesChanged receives a value when they may have changed; nil if they never change.
	AddressesChanged <-chan struct{}
	// FirstContact is how long Tried waits for the orchestrator from the start of Run; 0 means firstContact.
	FirstContact time.Duration
	// Reserved is called when the cluster has got the prefix of identifiers or an egress prefix after this node had
	// joined; nil: not.
	Reserved        func()
	WithoutMappings bool // do not stream changes of mappings: the caller queries them
	// Dial returns a client that authenticates as the node. It joins first if needed.
	Dial func(context.Context) (pilasterv1connect.NodeServiceClient, error)
	// Wait pauses before retry n (from 0), up to spread longer; nil means a backoff with jitter.
	Wait func(ctx context.Context, n int, spread time.Duration) error
	Log  *slog.Logger
}

func New(c Config) *Link {
	if c.Wait == nil {
		c.Wait = backoff
	}
	return &Link{
		config:       c,
		pendingFrees: map[allocation]bool{},
		tried:        make(chan struct{}),
		status:       agent.LinkStatus{Since: time.Now(), LastError: "not connected yet"},
	}
}

// firstContact is how long ADDs after a start wait for the policies that changed while the agent did not run. One
// failed try does not end it: an orchestrator may start at the same time, or refuse a connection among many.
const firstContact = 5 * time.Second

// Tried is closed once the first event is applied, or the orchestrator could not be reached for firstContact since the
// start of Run. After that, containers start with the policies on disk: availability comes before the last changes.
func (l *Link) Tried() <-chan struct{} { return l.tried }

func (l *Link) hasTried() { l.firstTime.Do(func() { close(l.tried) }) }

func (l *Link) Status() agent.LinkStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// backoff waits half a second after the first failure and up to half a minute after many, with jitter. spread adds
// jitter: a restarted orchestrator must not receive all agents at once.
func backoff(ctx context.Context, n int, spread time.Duration) error {
	least, jitter := pauseBefore(n, spread)
	timer := time.NewTimer(least + rand.N(jitter))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func pauseBefore(n int, spread time.Duration) (least, jitter time.Duration) {
	half := min(250*time.Millisecond<<min(n, 10), 15*time.Second)
	return half, max(half, min(spread, maxSpread))
}

// maxSpread is more than any cluster needs to reconnect.
const maxSpread = 5 * time.Minute

// retriable reports whether the error is of a peer that is away or busy.
func retriable(err error) bool {
	var remote *connect.Error
	if !errors.As(err, &remote) {
		return false
	}
	switch remote.Code() {
	case connect.CodeUnavailable,
		connect.CodeDeadlineExceeded,
		connect.CodeAborted,
		connect.CodeInternal,
		connect.CodeUnknown,
		connect.CodeCanceled:
		return true
	}
	return false
}

// refused reports whether a retry helps only after an operator has acted: the node was deleted, its state contradicts
// the cluster's, or another machine uses its identity. The last may also be the stream of this machine before a reboot;
// for half a minute, six tries, it counts as that.
func refused(err error, n int) bool {
	var remote *connect.Error
	if !errors.As(err, &remote) {
		return false
	}
	return remote.Code() == connect.CodeFailedPrecondition || remote.Code() == connect.CodeAlreadyExists && n >= 5
}

// Problem returns why this node accepts no new endpoints, or nil. Without an orchestrator it does accept them; a node
// that the cluster rejects may have lost its addresses to others.
func (l *Link) Problem() error {
	if s := l.Status(); s.Refused {
		return fmt.Errorf(
			"the orchestrator rejects this node: %s\n  no endpoint is added; existing ones keep working and can be "+
				"removed",
			s.LastError,
		)
	}
	return nil
}

func (l *Link) dial(ctx context.Context) (pilasterv1connect.NodeServiceClient, error) {
	if client := l.dialled(); client != nil {
		return client, nil
	}
	unlock, err := l.dialing.Lock(ctx, l.config.URL)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if client := l.dialled(); client != nil {
		return client, nil
	}
	client, err := l.config.Dial(ctx)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.client = client
	return client, nil
}

func (l *Link) dialled() pilasterv1connect.NodeServiceClient {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.client
}

// spread is the period over which the orchestrator wants nodes to reconnect.
func (l *Link) spread() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.spreadWanted
}

// markDisconnected records why the link is down.
func (l *Link) markDisconnected(err error, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.status.Connected {
		l.status.Connected, l.status.Since = false, time.Now()
	}
	l.status.LastError, l.status.NotTaken = unixrpc.Words(err), nil // the next stream repeats it
	l.status.Refused = refused(err, n)
	l.config.Log.Warn(
		"no connection to the orchestrator",
		"url",
		l.config.URL,
		"failures",
		n+1,
		"error",
		l.status.LastError,
	)
}

// Run keeps the link up until ctx ends.
func (l *Link) Run(ctx context.Context, core Core) {
	lists := newMappingSync(l, core)
	firstContact := time.AfterFunc(cmp.Or(l.config.FirstContact, firstContact), l.hasTried)
	defer firstContact.Stop()
	for n := 0; ; n++ {
		connected, err := l.follow(ctx, core, lists)
		if ctx.Err() != nil {
			return
		}
		if connected {
			n = 0
		}
		l.markDisconnected(err, n)
		spread := l.spread()
		if connect.CodeOf(
			err,
		) == connect.CodeResourceExhausted { // only the stream of this slow node ended
			spread = 0
		}
		if l.config.Wait(ctx, n, spread) != nil {
			return
		}
	}
}

// follow registers and reads the stream until it breaks; connected means that the stream delivered an event.
func (l *Link) follow(ctx context.Context, core Core, lists *mappingSync) (connected bool, err error) {
	client, err := l.registeredClient(ctx)
	if err != nil {
		return false, err
	}
	ctx, end := context.WithCancelCause(ctx)
	stream := client.Follow(ctx)
	var reports sync.WaitGroup
	asking := &asker{pullers: core.Networks().Pullers(), wanted: make(chan struct{}, 1)}
	reports.Go(func() { l.report(ctx, stream, asking) })
	if l.config.AddressesChanged != nil {
		reports.Go(func() {
			if err := l.reportUplink(ctx); err != nil {
				end(err)
			}
		})
	}
	defer func() {
		end(nil)
		l.setFreeRunner(nil)
		reports.Wait()
		stream.CloseResponse()
	}()
	reader := &streamMappings{mappingSync: lists, client: client, running: &reports, end: end}
	policing := &policyQueue{link: l, core: core, running: &reports, end: end}
	var begun *pilasterv1.FollowResponse // the messages so far of an event in several messages
	for {
		event, err := stream.Receive()
		if cause := context.Cause(ctx); cause != nil {
			return connected, cause
		}
		if err != nil {
			return connected, fmt.Errorf("following the orchestrator: %w", err)
		}
		if event, begun = reassemble(begun, event); event == nil {
			continue
		}
		if event.Identifiers {
			if err := l.reserve(); err != nil {
				return connected, err
			}
		}
		if connected && isPolicyOnly(event) {
			if err := policing.handleEvent(ctx, event); err != nil {
				return connected, err
			}
			continue
		}
		if err := policing.waitBefore(ctx, event); err != nil {
			return connected, err
		}
		changed, err := mappingUpdates(event)
		if err != nil {
			return connected, fmt.Errorf("an event of the orchestrator is invalid: %w", err)
		}
		if err := l.apply(ctx, core, event); err != nil {
			return connected, err
		}
		if err := policing.handleEvent(ctx, event); err != nil {
			return connected, err
		}
		if !connected { // an ADD may rely on the policies of the first event
			if err := policing.wait(ctx); err != nil {
				return connected, err
			}
		}
		reader.handleEvent(ctx, event, changed)
		if !connected {
			connected = true
			l.hasTried()
			core.Linked()
			asking.start(ctx, event.WithSubscriptions, &reports, l.config.Log)
			l.setFreeRunner(func() { reports.Go(func() { l.retryFrees(ctx, core) }) })
			l.config.Log.Info("connected to the orchestrator", "url", l.config.URL, "revision", event.Revision)
		}
	}
}

// reportUplink registers again when the addresses of the uplink change: the fabric's routes use them. While there is no
// uplink, the registered addresses stay.
func (l *Link) reportUplink(ctx context.Context) error {
	for {
		select {
		case <-l.config.AddressesChanged:
		case <-ctx.Done():
			return nil
		}
		addrs, err := l.config.UplinkAddresses()
		if err != nil || slices.Equal(addrs, l.uplink) {
			continue
		}
		if _, err := l.register(ctx); err != nil {
			return err
		}
		l.config.Log.Info("registered new addresses of the uplink", "addresses", addrs)
	}
}

// apply applies an event, except its policy updates.
func (l *Link) apply(ctx context.Context, core Core, event *pilasterv1.FollowResponse) error {
	var own *pilasterv1.Node // nil if unchanged
	var tenants []*pilasterv1.Tenant
	var apps []*pilasterv1.App
	var deleted []string
	whole := func(string) bool { return true }
	switch e := event.Event.(type) {
	case *pilasterv1.FollowResponse_Snapshot:
		own, tenants, apps = e.Snapshot.Node, e.Snapshot.Tenants, e.Snapshot.Apps
	case *pilasterv1.FollowResponse_Delta:
		own, tenants, apps, deleted = e.Delta.Node, e.Delta.Tenants, e.Delta.Apps, e.Delta.DeletedTenants
		whole = func(tenant string) bool { return slices.Contains(e.Delta.WholeTenants, tenant) }
	}
	states, err := statesFromProto(tenants, apps, whole, l.plan())
	if err != nil {
		return fmt.Errorf("an event of the orchestrator is invalid: %w", err)
	}
	if own != nil {
		err = core.SetTransit(ctx, own.Carries)
	}
	if _, err := policiesFromProto(event, time.Now()); err != nil {
		return fmt.Errorf("an event of the orchestrator is invalid: %w", err)
	}
	updates, invalid := servicesFromProto(event)
	if invalid != nil {
		return fmt.Errorf("an event of the orchestrator is invalid: %w", invalid)
	}
	if err := errors.Join(err, core.Apply(ctx, states, deleted)); err != nil {
		return err // the next stream repeats the event
	}
	for _, u := range updates {
		core.ApplyServices(u)
	}
	return nil
}

// markApplied records that an event was applied.
func (l *Link) markApplied(event *pilasterv1.FollowResponse) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.status.Connected {
		l.status.Connected, l.status.Since, l.status.LastError = true, time.Now(), ""
		l.status.Refused = false
	}
	if event.Refusals != nil {
		l.status.NotTaken = event.Refusals.Reasons
	}
	l.spreadWanted = time.Duration(event.SpreadMs) * time.Millisecond
	if event.Revision > 0 {
		if !event.WithPolicies {
			l.config.Tenants.RequestPolicies()
		}
		if !event.WithServices {
			l.config.Tenants.RequestServices()
		}
		l.status.Revision = event.Revision
	}
}
