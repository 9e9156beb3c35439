package agent

import (
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
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Link is the agent's connection to the orchestrator. Without it everything this node knows
// goes on working.
type Link struct {
	config           LinkConfig
	dialing          keyLocks                    // joining twice at once would buy two certificates
	uplink           []netip.Addr                // as last registered; of the one registration that goes on
	lastRegistration *pilasterv1.RegisterRequest // what this node would have said again after Register; nil once more was said

	mu           sync.Mutex
	client       pilasterv1connect.NodeServiceClient // nil before the first success
	status       LinkStatus
	spreadWanted time.Duration       // see spread
	pendingFrees map[allocation]bool // what could not be given back yet, or may have been given
	startFrees   func()              // begins to; nil while there is no stream
	freeing      bool                // it goes on

	tried     chan struct{} // closed by the first stream, or when there is none
	firstTime sync.Once
}

// LinkConfig is what a Link is made of.
type LinkConfig struct {
	URL             string
	Version         string
	Node            *Node
	Tenants         *Tenants
	Endpoints       func() []endpoint.Record // apply this node, those at least that have addresses from the cluster
	WantedPrefix    netip.Prefix             // brought by the operator; may be zero
	Edge            bool                     // the node is an Edge Switch
	Gateway         func() bool              // whether the node has one, as far as it knows yet; nil means no
	Enforces        func() []string          // networks on which it enforces policies, as far as it knows yet; nil means none
	UplinkAddresses func() ([]netip.Addr, error)
	// AddressesChanged tells that they may be others than before; nil where they never are.
	AddressesChanged <-chan struct{}
	WithoutMappings  bool // the stream is not to tell how mappings change: somebody asks
	// Dial gives a client that authenticates as the node, after joining where it has to.
	Dial func(context.Context) (pilasterv1connect.NodeServiceClient, error)
	// Wait pauses before try number n (from 0), for up to spread longer; nil means a jittered, growing pause.
	Wait func(ctx context.Context, n int, spread time.Duration) error
	Log  *slog.Logger
}

// LinkStatus is how the link is now.
type LinkStatus struct {
	Connected bool
	Since     time.Time
	Revision  int64
	LastError string
	Refused   bool // by an orchestrator that knows this node: LastError says why

	NotTaken []string // what it has not taken of what this node says of its containers, and why
}

func NewLink(c LinkConfig) *Link {
	if c.Wait == nil {
		c.Wait = backoff
	}
	return &Link{
		config:       c,
		pendingFrees: map[allocation]bool{},
		tried:        make(chan struct{}),
		status:       LinkStatus{Since: time.Now(), LastError: "not connected yet"},
	}
}

// Tried is closed once the orchestrator has told what this node is to know, or cannot be reached.
func (l *Link) Tried() <-chan struct{} { return l.tried }

func (l *Link) hasTried() { l.firstTime.Do(func() { close(l.tried) }) }

func (l *Link) Status() LinkStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// backoff waits half a second after the first failure and up to half a minute after many, with jitter, and with as much
// apply it as an orchestrator wants: one that comes back must not meet every agent at once.
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

// maxSpread is more than any cluster needs to be heard.
const maxSpread = 5 * time.Minute

// retriable errors are those of a peer that is away or busy.
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

// lastErr tells whether trying again helps only after somebody has done something: the node was
// deleted, what it holds is not what the cluster knows, or its identity is used by another machine. The
// last may be the stream of this machine before it booted: for half a minute, of six tries, it is taken for that.
func refused(err error, n int) bool {
	var remote *connect.Error
	if !errors.As(err, &remote) {
		return false
	}
	return remote.Code() == connect.CodeFailedPrecondition || remote.Code() == connect.CodeAlreadyExists && n >= 5
}

// problem says why this node takes no new endpoints. Without an orchestrator it does; one that the
// cluster refuses may have lost its addresses to others.
func (l *Link) problem() error {
	if s := l.Status(); s.Refused {
		return fmt.Errorf(
			"the orchestrator refuses this node: %s\n  no endpoint is added; those there are keep working and can be removed",
			s.LastError,
		)
	}
	return nil
}

func (l *Link) dial(ctx context.Context) (pilasterv1connect.NodeServiceClient, error) {
	if client := l.dialled(); client != nil {
		return client, nil
	}
	unlock, err := l.dialing.lock(ctx, l.config.URL)
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

// spread is how far apart the orchestrator wants nodes to call when their streams have broken.
func (l *Link) spread() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.spreadWanted
}

// markDisconnected notes why the link is not there.
func (l *Link) markDisconnected(err error, n int) {
	defer l.hasTried()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.status.Connected {
		l.status.Connected, l.status.Since = false, time.Now()
	}
	l.status.LastError, l.status.NotTaken = unixrpc.Words(err), nil // the next stream says it again
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
func (l *Link) Run(ctx context.Context, core *Core) {
	lists := newMappingSync(l, core)
	for n := 0; ; n++ {
		heard, err := l.follow(ctx, core, lists)
		if ctx.Err() != nil {
			return
		}
		if heard {
			n = 0
		}
		l.markDisconnected(err, n)
		spread := l.spread()
		if connect.CodeOf(
			err,
		) == connect.CodeResourceExhausted { // so ends the stream of one node that is too slow, and the others' go on
			spread = 0
		}
		if l.config.Wait(ctx, n, spread) != nil {
			return
		}
	}
}

// follow registers and reads the stream until it breaks; heard means that it once worked.
func (l *Link) follow(ctx context.Context, core *Core, lists *mappingSync) (heard bool, err error) {
	client, err := l.registeredClient(ctx)
	if err != nil {
		return false, err
	}
	ctx, end := context.WithCancelCause(ctx)
	stream := client.Follow(ctx)
	var reports sync.WaitGroup
	reports.Go(func() { l.reportHosted(ctx, stream) })
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
	var begun *pilasterv1.FollowResponse // an event that comes in several messages, as far as it has
	for {
		event, err := stream.Receive()
		if cause := context.Cause(ctx); cause != nil {
			return heard, cause
		}
		if err != nil {
			return heard, fmt.Errorf("following the orchestrator: %w", err)
		}
		if event, begun = reassemble(begun, event); event == nil {
			continue
		}
		if heard && isPolicyOnly(event) {
			if err := policing.handleEvent(ctx, event); err != nil {
				return heard, err
			}
			continue
		}
		if err := policing.wait(ctx); err != nil {
			return heard, err
		}
		changed, err := mappingUpdates(event)
		if err != nil {
			return heard, fmt.Errorf("an event of the orchestrator cannot be used: %w", err)
		}
		if err := l.apply(ctx, core, event); err != nil {
			return heard, err
		}
		reader.handleEvent(ctx, event, changed)
		if !heard {
			heard = true
			l.hasTried()
			l.setFreeRunner(func() { reports.Go(func() { l.retryFrees(ctx, core) }) })
			l.config.Log.Info("connected to the orchestrator", "url", l.config.URL, "revision", event.Revision)
		}
	}
}

// reportHosted tells what this node hosts now and whenever it has changed.
func (l *Link) reportHosted(
	ctx context.Context,
	stream *connect.BidiStreamForClient[pilasterv1.FollowRequest, pilasterv1.FollowResponse],
) {
	known := l.Status().Revision
	for first := true; ; first = false {
		report := &pilasterv1.FollowRequest{Sequence: l.config.Node.Sequence()}
		if first {
			report.ResumeRevision = known
			report.WithoutMappings = l.config.WithoutMappings
		}
		l.config.Tenants.Report(report, first)
		if err := stream.Send(report); err != nil {
			return // Receive tells the reason
		}
		select {
		case <-l.config.Tenants.Changed():
		case <-ctx.Done():
			stream.CloseRequest()
			return
		}
	}
}

// reportUplink registers anew whenever the uplink has other addresses: the fabric's routes lead to them.
// While there is no uplink they stay as they were.
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
		l.config.Log.Info("the orchestrator knows the new addresses of the uplink", "addresses", addrs)
	}
}

func (l *Link) apply(ctx context.Context, core *Core, event *pilasterv1.FollowResponse) error {
	heard := time.Now()
	var own *pilasterv1.Node // nil where nothing is new of it
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
	news, err := statesFromProto(tenants, apps, whole)
	if err != nil {
		return fmt.Errorf("an event of the orchestrator cannot be used: %w", err)
	}
	if own != nil {
		err = core.SetTransit(ctx, own.Carries)
	}
	policies, err2 := policiesFromProto(event, heard)
	if err2 != nil {
		return fmt.Errorf("an event of the orchestrator cannot be used: %w", err2)
	}
	if err := errors.Join(err, core.Apply(ctx, news, deleted)); err != nil {
		return err // the next stream tells all of it again
	}
	for _, p := range policies {
		if err := core.ApplyPolicies(ctx, p); err != nil {
			return err
		}
	}
	l.markApplied(event)
	return nil
}

// markApplied notes that what an event said has been done.
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
			l.config.Tenants.requestPolicies()
		}
		l.status.Revision = event.Revision
	}
}
