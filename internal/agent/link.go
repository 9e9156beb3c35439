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
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/local"
	"pilaster.io/pilaster/internal/tenant"
)

// resolveTimeout is how long an ADD waits for the orchestrator before it says try again.
const resolveTimeout = 5 * time.Second

// heldPage is how many addresses and subnets this node says at a time that it holds: as many as the orchestrator takes in within a moment, also
// when its store has forgotten them. It registers once for each page.
const heldPage = 2048

// Link is the agent's connection to the orchestrator. Without it everything this node knows
// goes on working.
type Link struct {
	config  LinkConfig
	dialing keyLocks     // joining twice at once would buy two certificates
	uplink  []netip.Addr // as last registered; of the one registration that goes on

	mu      sync.Mutex
	client  pilasterv1connect.NodeServiceClient // nil before the first success
	status  LinkStatus
	unfreed map[allocation]bool // what could not be given back yet, or may have been given

	moreLate signal // of that
}

// LinkConfig is what a Link is made of.
type LinkConfig struct {
	URL             string
	Version         string
	Node            *Node
	Tenants         *Tenants
	Endpoints       func() []endpoint.Record // of this node
	WantedPrefix    netip.Prefix             // brought by the operator; may be zero
	Edge            bool                     // the node is an Edge Switch
	UplinkAddresses func() ([]netip.Addr, error)
	// AddressesChanged tells that they may be others than before.
	AddressesChanged <-chan struct{}
	// Dial gives a client that authenticates as the node, after joining where it has to.
	Dial func(context.Context) (pilasterv1connect.NodeServiceClient, error)
	// Wait pauses before try number n (from 0); nil means a jittered, growing pause.
	Wait func(ctx context.Context, n int) error
	Log  *slog.Logger
}

// LinkStatus is how the link is now.
type LinkStatus struct {
	Connected bool
	Since     time.Time
	Revision  int64
	LastError string
	Refused   bool // by an orchestrator that knows this node: LastError says why
}

func NewLink(c LinkConfig) *Link {
	if c.Wait == nil {
		c.Wait = backoff
	}
	return &Link{config: c, unfreed: map[allocation]bool{}, moreLate: newSignal(), status: LinkStatus{Since: time.Now(), LastError: "not connected yet"}}
}

func (l *Link) Status() LinkStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// backoff waits half a second after the first failure and up to half a minute after many, with
// jitter: an orchestrator that comes back must not meet every agent at once.
func backoff(ctx context.Context, n int) error {
	limit := min(500*time.Millisecond<<min(n, 10), 30*time.Second)
	timer := time.NewTimer(limit/2 + rand.N(limit/2))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Register makes the node known to the orchestrator, trying until it answers. It returns an
// error when trying again would not help, or when ctx ends.
func (l *Link) Register(ctx context.Context) error {
	for n := 0; ; n++ {
		_, err := l.register(ctx)
		if err == nil || !retriable(err) {
			return err
		}
		l.lost(err, n)
		if err := l.config.Wait(ctx, n); err != nil {
			return err
		}
	}
}

// retriable errors are those of a peer that is away or busy.
func retriable(err error) bool {
	var remote *connect.Error
	if !errors.As(err, &remote) {
		return false
	}
	switch remote.Code() {
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeAborted, connect.CodeInternal, connect.CodeUnknown, connect.CodeCanceled:
		return true
	}
	return false
}

// refused tells whether trying again helps only after somebody has done something: the node was
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
		return fmt.Errorf("the orchestrator refuses this node: %s\n  no endpoint is added; those there are keep working and can be removed", s.LastError)
	}
	return nil
}

func (l *Link) register(ctx context.Context) (pilasterv1connect.NodeServiceClient, error) {
	client, err := l.dial(ctx)
	if err != nil {
		return nil, err
	}
	addrs, err := l.config.UplinkAddresses()
	if err != nil {
		return nil, fmt.Errorf("addresses of the uplink: %w", err)
	}
	said := map[holding]bool{}
	defer l.freeGone(said)
	for more := true; more; {
		var req *pilasterv1.RegisterRequest
		before := len(said)
		req, more = l.registration(addrs, said)
		resp, err := client.Register(ctx, connect.NewRequest(req))
		if err != nil && before > 0 {
			return nil, fmt.Errorf("registering this node, of whose addresses and subnets the cluster has taken in %d and not the next %d: %w", before, len(said)-before, err)
		}
		if err != nil {
			return nil, fmt.Errorf("registering this node: %w", err)
		}
		if before > 0 {
			continue
		}
		m, err := membershipFromProto(resp.Msg)
		if err != nil {
			return nil, err
		}
		if err := l.config.Node.Join(m); err != nil {
			return nil, err
		}
	}
	l.uplink = addrs
	return client, nil
}

// holding is what the cluster gave, as this node said it.
type holding struct{ tenant, key, to string }

func holdingOf(m *pilasterv1.Mapping) holding { return holding{m.Tenant, m.Key, m.To} }

// registration is what this node says of itself, with a page of what it holds now and has not said: it registers until there is no more.
func (l *Link) registration(uplinks []netip.Addr, said map[holding]bool) (req *pilasterv1.RegisterRequest, more bool) {
	has, joined := l.config.Node.Membership()
	held := l.config.Tenants.held(has.Prefix)
	mappings := append(held.Mappings, heldAddresses(l.config.Endpoints())...)
	mappings = slices.DeleteFunc(mappings, func(m *pilasterv1.Mapping) bool { return said[holdingOf(m)] })
	if len(said) > 0 {
		held = &pilasterv1.Held{}
	}
	held.Mappings = mappings[:min(len(mappings), heldPage)]
	for _, m := range held.Mappings {
		said[holdingOf(m)] = true
	}
	req = &pilasterv1.RegisterRequest{Version: l.config.Version, Edge: l.config.Edge, Held: held}
	for _, a := range uplinks {
		req.UplinkAddresses = append(req.UplinkAddresses, a.String())
	}
	if joined {
		req.WantedPrefix, req.ClusterUuid = has.Prefix.String(), has.ClusterUUID
	} else if l.config.WantedPrefix.IsValid() {
		req.WantedPrefix = l.config.WantedPrefix.String()
	}
	return req, len(mappings) > heldPage
}

// freeGone gives back what endpoints had that went while it was said: it may have been said after they had given it back.
func (l *Link) freeGone(said map[holding]bool) {
	for _, m := range heldAddresses(l.config.Endpoints()) {
		delete(said, holdingOf(m))
	}
	for m := range said {
		if m.key != "" {
			l.setUnfreed(m.tenant, m.key, true)
		}
	}
}

func (l *Link) dial(ctx context.Context) (pilasterv1connect.NodeServiceClient, error) {
	unlock, err := l.dialing.lock(ctx, l.config.URL)
	if err != nil {
		return nil, err
	}
	defer unlock()
	l.mu.Lock()
	client := l.client
	l.mu.Unlock()
	if client != nil {
		return client, nil
	}
	client, err = l.config.Dial(ctx)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.client = client
	return client, nil
}

// lost notes why the link is not there.
func (l *Link) lost(err error, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.status.Connected {
		l.status.Connected, l.status.Since = false, time.Now()
	}
	l.status.LastError = local.Words(err)
	l.status.Refused = refused(err, n)
	l.config.Log.Warn("no connection to the orchestrator", "url", l.config.URL, "failures", n+1, "error", l.status.LastError)
}

// Run keeps the link up until ctx ends.
func (l *Link) Run(ctx context.Context, core *Core) {
	lists := newLists(l, core)
	for n := 0; ; n++ {
		heard, err := l.follow(ctx, core, lists)
		if ctx.Err() != nil {
			return
		}
		if heard {
			n = 0
		}
		l.lost(err, n)
		if l.config.Wait(ctx, n) != nil {
			return
		}
	}
}

// follow registers and reads the stream until it breaks; heard means that it once worked.
func (l *Link) follow(ctx context.Context, core *Core, lists *lists) (heard bool, err error) {
	client, err := l.register(ctx)
	if err != nil {
		return false, err
	}
	ctx, end := context.WithCancelCause(ctx)
	stream := client.Follow(ctx)
	var reports sync.WaitGroup
	reports.Go(func() { l.reportHosted(ctx, stream) })
	reports.Go(func() {
		if err := l.reportUplink(ctx); err != nil {
			end(err)
		}
	})
	defer func() {
		end(nil)
		reports.Wait()
		stream.CloseResponse()
	}()
	reader := &reader{lists: lists, client: client, running: &reports, end: end}
	for {
		event, err := stream.Receive()
		if cause := context.Cause(ctx); cause != nil {
			return heard, cause
		}
		if err != nil {
			return heard, fmt.Errorf("following the orchestrator: %w", err)
		}
		changed, err := newsOf(event)
		if err != nil {
			return heard, fmt.Errorf("an event of the orchestrator cannot be used: %w", err)
		}
		if err := l.apply(ctx, core, event); err != nil {
			return heard, err
		}
		reader.hear(ctx, event, changed)
		if !heard {
			heard = true
			reports.Go(func() { l.freeLate(ctx, core) })
			l.config.Log.Info("connected to the orchestrator", "url", l.config.URL, "revision", event.Revision)
		}
	}
}

// reportHosted tells what this node hosts now and whenever it has changed.
func (l *Link) reportHosted(ctx context.Context, stream *connect.BidiStreamForClient[pilasterv1.FollowRequest, pilasterv1.FollowResponse]) {
	known := l.Status().Revision
	for first := true; ; first = false {
		report := &pilasterv1.FollowRequest{Sequence: l.config.Node.Sequence()}
		if first {
			report.ResumeRevision = known
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
	news, err := knownFromProto(tenants, apps, whole)
	if err != nil {
		return fmt.Errorf("an event of the orchestrator cannot be used: %w", err)
	}
	if own != nil {
		err = core.Carry(ctx, own.Carries)
	}
	if err := errors.Join(err, core.Apply(ctx, news, deleted)); err != nil {
		return err // the next stream tells all of it again
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.status.Connected {
		l.status.Connected, l.status.Since, l.status.LastError = true, time.Now(), ""
		l.status.Refused = false
	}
	if event.Revision > 0 {
		l.status.Revision = event.Revision
	}
	return nil
}

// Resolve implements Resolver by one call.
func (l *Link) Resolve(ctx context.Context, name string, identity map[string]string) (tenant.Tenant, address.AppID, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	client, err := l.dial(ctx)
	if err == nil {
		var resp *connect.Response[pilasterv1.ResolveResponse]
		resp, err = client.Resolve(ctx, connect.NewRequest(&pilasterv1.ResolveRequest{Tenant: name, Labels: identity, Sequence: l.config.Node.Sequence()}))
		if err == nil {
			return resolved(resp.Msg)
		}
	}
	return tenant.Tenant{}, 0, l.unhelpful(err, l.missing(name, identity))
}

// unhelpful is what an ADD says of an error of the orchestrator, without which it lacks something.
func (l *Link) unhelpful(err error, lacking string) error {
	var remote *connect.Error
	if errors.As(err, &remote) {
		switch remote.Code() {
		case connect.CodeNotFound:
			return refuse(ErrNotFound, "%s", remote.Message())
		case connect.CodeInvalidArgument:
			return refuse(ErrInvalid, "%s", remote.Message())
		case connect.CodeResourceExhausted:
			return refuse(ErrExhausted, "%s", remote.Message())
		}
	}
	return refuse(ErrUnavailable, "%s, and the orchestrator at %s did not help: %s\n  nothing was changed; try again when it does", lacking, l.config.URL, local.Words(err))
}

// missing names what this node would have to know.
func (l *Link) missing(name string, identity map[string]string) string {
	if _, _, known := l.config.Tenants.get(name); known {
		return fmt.Sprintf("this node does not know the app of labels %q in tenant %s", tenant.Canonical(identity), name)
	}
	return fmt.Sprintf("this node does not know tenant %s", name)
}

func resolved(r *pilasterv1.ResolveResponse) (tenant.Tenant, address.AppID, error) {
	t, err := tenantFromProto(r.GetTenant())
	if err != nil {
		return t, 0, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
	}
	a, err := appFromProto(r.GetApp())
	if err != nil {
		return t, 0, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
	}
	return t, a.ID, nil
}
