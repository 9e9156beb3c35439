package control

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/network"
)

// puller is a network that subscribes to what the test says.
type puller struct {
	recorder
	mu         sync.Mutex
	begin, end []network.Mapping
	changed    chan struct{}
}

func (p *puller) Pulls() bool                           { return true }
func (p *puller) PullStats() network.PullStats          { return network.PullStats{} }
func (p *puller) SubscriptionsChanged() <-chan struct{} { return p.changed }

func (p *puller) Subscriptions(all bool) (begin, end []network.Mapping) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if all {
		return mappingsTo("10.0.0.1/32"), nil
	}
	begin, end = p.begin, p.end
	p.begin, p.end = nil, nil
	return begin, end
}

func (p *puller) want(begin, end []network.Mapping) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begin, p.end = begin, end
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

func asked(all []*pilasterv1.Subscriptions) string {
	var words []string
	for _, of := range all {
		for _, b := range of.Addresses {
			a, _ := netip.AddrFromSlice(b)
			words = append(words, of.Tenant+" "+a.String())
		}
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

// TestSubscriptionsOnAStream: a stream names the networks that pull, has all their subscriptions once the orchestrator
// accepts them, and then the changes, in messages of limited size.
func TestSubscriptionsOnAStream(t *testing.T) {
	b := newLinkBed(t)
	p := &puller{changed: make(chan struct{}, 1)}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	client, err := b.link.dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	stream := client.Follow(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	a := &asker{pullers: map[string]network.MappingPuller{"ila": p}, wanted: make(chan struct{}, 1)}
	running.Go(func() { b.link.report(ctx, stream, a) })
	if first := <-b.cluster.hosted; !slices.Equal(first.PulledNetworks, []string{"ila"}) || first.OnlySubscriptions ||
		len(first.Subscribe) > 0 {
		t.Errorf("the first message is %v", first)
	}
	a.start(ctx, true, &running, slog.New(slog.DiscardHandler))
	next := func(begin, end string) {
		t.Helper()
		m := <-b.cluster.hosted
		if !m.OnlySubscriptions || asked(m.Subscribe) != begin || asked(m.Unsubscribe) != end {
			t.Errorf("received %v; want to begin %q and to end %q", m, begin, end)
		}
	}
	next("green 10.0.0.1", "")
	p.want(mappingsTo("10.0.0.2/32", "10.0.0.3/32"), mappingsTo("10.0.0.1/32"))
	next("green 10.0.0.2, green 10.0.0.3", "green 10.0.0.1")
	var many []network.Mapping
	for i := range maxAsked + 1 {
		many = append(many, mappingsTo(fmt.Sprintf("10.1.%d.%d/32", i>>8, i&255))...)
	}
	p.want(many, nil)
	if m := <-b.cluster.hosted; len(m.Subscribe) != 1 || len(m.Subscribe[0].Addresses) != maxAsked {
		t.Errorf("received %d lists of subscriptions, want %d subscriptions of one tenant", len(m.Subscribe), maxAsked)
	}
	next("green 10.1.16.0", "")
}

// TestOrchestratorWithoutSubscriptions: the agent says so, and sends none.
func TestOrchestratorWithoutSubscriptions(t *testing.T) {
	var log bytes.Buffer
	var running sync.WaitGroup
	a := &asker{pullers: map[string]network.MappingPuller{"ila": &puller{}}, wanted: make(chan struct{}, 1)}
	a.start(t.Context(), false, &running, slog.New(slog.NewTextHandler(&log, nil)))
	running.Wait()
	if len(a.wanted) > 0 || !strings.Contains(log.String(), "upgrade the orchestrators") {
		t.Errorf("wants %d, log %q", len(a.wanted), log.String())
	}
}

// TestPulledChanges: mappings of a network that pulls are delivered as they come; there is no list of all to wait for.
func TestPulledChanges(t *testing.T) {
	p := &puller{}
	m := &mappingList{tenant: "green", sinks: mappingSinks{p}, pulled: mappingSinks{p}.pull()}
	if err := m.handleUpdate(t.Context(), mappingUpdate{revision: 9, add: mappingsTo("10.0.0.1/32")}); err != nil {
		t.Fatal(err)
	}
	if err := m.replaceAll(t.Context(), mappingsTo("10.0.0.7/32"), 10); err != nil || !m.listed {
		t.Errorf("listed %v, %v", m.listed, err)
	}
	if err := m.handleUpdate(t.Context(), mappingUpdate{revision: 9, remove: mappingsTo("10.0.0.1/32")}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"+10.0.0.1/32 -", "+ -10.0.0.1/32"}; !slices.Equal(p.said, want) {
		t.Errorf("received %q, want %q", p.said, want)
	}
}

// TestPullsBesideList: of a tenant that moves between a network that pulls and one that does not, the second receives
// the list and then the changes, and the first the changes only, as they come.
func TestPullsBesideList(t *testing.T) {
	p, r := &puller{}, &recorder{}
	core := agenttest.New(t)
	var own []bool
	reader := newListerOf(t, core, func(int, string) (*pilasterv1.ListMappingsResponse, error) {
		return page(10, "", "10.0.1.0/24", "10.0.2.0/24"), nil
	})
	reader.client = asking{reader.client, &own}
	to := mappingSinks{p, r}
	m := &mappingList{tenant: "green", sinks: to, pulled: to.pull()}
	for _, n := range []mappingUpdate{
		{revision: 9, add: mappingsTo("10.0.2.0/24")}, {revision: 11, add: mappingsTo("10.0.3.0/24")},
	} {
		if err := m.handleUpdate(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	if err := reader.listOnce(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if err := m.handleUpdate(t.Context(), mappingUpdate{revision: 12, remove: mappingsTo("10.0.3.0/24")}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"all 10.0.1.0/24,10.0.2.0/24,10.0.3.0/24", "+ -10.0.3.0/24"}; !slices.Equal(r.said, want) {
		t.Errorf("the network without subscriptions received %q, want %q", r.said, want)
	}
	if want := []string{"+10.0.2.0/24 -", "+10.0.3.0/24 -", "+ -10.0.3.0/24"}; !slices.Equal(p.said, want) {
		t.Errorf("the network with subscriptions received %q, want %q", p.said, want)
	}
	if !slices.Equal(own, []bool{false}) {
		t.Errorf("lists of the node's own allocations only: %v, want one of all", own)
	}
}

// asking notes whether lists are those of the node's own allocations.
type asking struct {
	pilasterv1connect.NodeServiceClient
	own *[]bool
}

func (a asking) ListMappings(ctx context.Context, r *connect.Request[pilasterv1.ListMappingsRequest]) (
	*connect.Response[pilasterv1.ListMappingsResponse], error,
) {
	*a.own = append(*a.own, r.Msg.Own)
	return a.NodeServiceClient.ListMappings(ctx, r)
}

// pullingNetwork is a network that subscribes to mappings.
type pullingNetwork struct {
	agent.Network
	*puller
}

// TestPulledChangeThatFails: a list of the node's own allocations does not have it, so the node asks for none. The
// network subscribes again.
func TestPulledChangeThatFails(t *testing.T) {
	core := agenttest.New(t)
	lists := 0
	reader := newListerOf(t, core, func(int, string) (*pilasterv1.ListMappingsResponse, error) {
		lists++
		return page(5, "", "10.0.1.0/24"), nil
	})
	var running sync.WaitGroup
	var log bytes.Buffer
	reader.running, reader.link.config.Log = &running, slog.New(slog.NewTextHandler(&log, nil))
	core.Networks["ila"] = pullingNetwork{puller: &puller{recorder: recorder{fail: agenttest.ErrFake}}}
	green := listed
	green.Network = "ila"
	if _, err := core.Tenants.Merge(agent.TenantState{Tenant: green}); err != nil {
		t.Fatal(err)
	}
	to := reader.sinksOf("green")
	reader.m["green"] = &mappingList{tenant: "green", sinks: to, stop: func() {}, pulled: to.pull(), listed: true}
	delta := &pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Delta{Delta: &pilasterv1.Delta{}}}
	change := mappingUpdate{revision: 6, add: mappingsTo("10.0.7.0/24")}
	reader.handleEvent(t.Context(), delta, map[string]mappingUpdate{"green": change})
	running.Wait()
	if lists != 0 || !strings.Contains(log.String(), "subscribing again") {
		t.Errorf("%d lists, log %q", lists, log.String())
	}
}

// TestReservationWhileRunning: the agent stores that the cluster has reserved a prefix or has got an egress prefix, and
// calls its daemon once for each.
func TestReservationWhileRunning(t *testing.T) {
	b := newLinkBed(t)
	reserved := 0
	b.link.config.Reserved = func() { reserved++ }
	if err := b.link.reserve(); err != nil || reserved != 0 {
		t.Errorf("before the node has joined: %d calls, %v", reserved, err)
	}
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := b.link.reserve(); err != nil {
			t.Fatal(err)
		}
	}
	if m, _ := b.node.Membership(); reserved != 1 || !m.Plan.Identifiers {
		t.Errorf("%d calls, plan %v", reserved, m.Plan)
	}
	b.cluster.answer.Plan.EgressPrefix = "2001:db8:7::/48" // the cluster gets an egress prefix
	for range 2 {
		if _, err := b.link.register(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if m, _ := b.node.Membership(); reserved != 2 || m.Plan.Egress.String() != "2001:db8:7::/48" {
		t.Errorf("with an egress prefix: %d calls, plan %v", reserved, m.Plan)
	}
}
