package control

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/mobility"
	"pilaster.io/pilaster/internal/tenant"
)

// recorder is a network that records the mappings it receives.
type recorder struct {
	said []string
	fail error
}

func (r *recorder) Replace(_ context.Context, _ string, all []network.Mapping) error {
	r.said = append(r.said, "all "+words(all))
	return r.fail
}

func (r *recorder) Apply(_ context.Context, _ string, add, remove []network.Mapping) error {
	r.said = append(r.said, "+"+words(add)+" -"+words(remove))
	return r.fail
}

func words(mappings []network.Mapping) string {
	var all []string
	for _, m := range mappings {
		all = append(all, m.To.String())
	}
	slices.Sort(all)
	return strings.Join(all, ",")
}

func mappingsTo(tos ...string) (all []network.Mapping) {
	for _, to := range tos {
		all = append(all, network.Mapping{Tenant: "green", To: netip.MustParsePrefix(to)})
	}
	return all
}

// Changes that arrive while a list is read are delivered after it, except those that the list contains.
func TestListThenChanges(t *testing.T) {
	r := &recorder{}
	m := &mappingList{tenant: "green", sinks: mappingSinks{r}}
	ctx := t.Context()
	for _, n := range []mappingUpdate{
		{revision: 9, remove: mappingsTo("10.0.1.0/24")}, // in the list, which has it again
		{revision: 11, add: mappingsTo("10.0.3.0/24"), remove: mappingsTo("10.0.2.0/24")},
	} {
		if err := m.handleUpdate(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.said) != 0 {
		t.Errorf("before the list: %v", r.said)
	}
	if err := m.replaceAll(ctx, mappingsTo("10.0.1.0/24", "10.0.2.0/24"), 10); err != nil {
		t.Fatal(err)
	}
	for _, n := range []mappingUpdate{{revision: 10, remove: mappingsTo("10.0.1.0/24")},
		{revision: 12, remove: mappingsTo("10.0.3.0/24")}} {
		if err := m.handleUpdate(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"all 10.0.1.0/24,10.0.3.0/24", "+ -10.0.3.0/24"}; !slices.Equal(r.said, want) {
		t.Errorf("received %q, want %q", r.said, want)
	}

	m, r.fail = &mappingList{tenant: "green", sinks: mappingSinks{r}}, agenttest.ErrFake
	if err := m.replaceAll(ctx, nil, 10); !errors.Is(err, agenttest.ErrFake) || m.listed {
		t.Errorf("a list that was not accepted counts as delivered: %v", err)
	}
}

// during is a network to which a change is sent while it processes a list.
type during struct {
	*recorder
	m *mappingList
}

func (d during) Replace(ctx context.Context, name string, all []network.Mapping) error {
	d.m.handleUpdate(ctx, mappingUpdate{revision: 20, add: mappingsTo("10.0.7.0/24")})
	return d.recorder.Replace(ctx, name, all)
}

func TestChangeWhileAListIsTaken(t *testing.T) {
	d := during{recorder: &recorder{}}
	d.m = &mappingList{tenant: "green", sinks: nil}
	d.m.sinks = mappingSinks{d}
	if err := d.m.replaceAll(t.Context(), mappingsTo("10.0.1.0/24"), 10); err != nil {
		t.Fatal(err)
	}
	if want := []string{"all 10.0.1.0/24", "+10.0.7.0/24 -"}; !slices.Equal(d.said, want) || !d.m.listed {
		t.Errorf("received %q, want %q", d.said, want)
	}
}

// listed is the tenant of a lister, whose node has 10.0.1.0/24.
var listed = tenant.Tenant{
	Name: "green", Network: tenant.Nimitz, Addressing: tenant.Own, IDs: []tenant.ID{{ID: 7}},
	Overlays: []tenant.Overlay{{CIDR: netip.MustParsePrefix("10.0.0.0/16"), NodeBits: 24}},
}

func newLister(
	t *testing.T,
	answer func(n int, token string) (*pilasterv1.ListMappingsResponse, error),
) (*streamMappings, *recorder) {
	return newListerOf(t, agenttest.New(t), answer), &recorder{}
}

// newListerOf adds tenant green to a core and returns a lister for it.
func newListerOf(
	t *testing.T,
	core *agenttest.Bed,
	answer func(n int, token string) (*pilasterv1.ListMappingsResponse, error),
) *streamMappings {
	b := newLinkBed(t)
	b.link.config.Tenants = core.Tenants
	calls := 0
	b.cluster.list = func(req *pilasterv1.ListMappingsRequest) (*pilasterv1.ListMappingsResponse, error) {
		calls++
		return answer(calls, req.PageToken)
	}
	if _, err := core.Tenants.Merge(agent.TenantState{Tenant: listed}); err != nil {
		t.Fatal(err)
	}
	if err := core.Tenants.SetSubnets("green", []netip.Prefix{netip.MustParsePrefix("10.0.1.0/24")}); err != nil {
		t.Fatal(err)
	}
	client, err := b.link.dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return &streamMappings{mappingSync: newMappingSync(b.link, core.Core), client: client}
}

func page(revision int64, next string, tos ...string) *pilasterv1.ListMappingsResponse {
	p := &pilasterv1.ListMappingsResponse{Revision: revision, NextPageToken: next}
	for _, to := range tos {
		p.Mappings = append(p.Mappings,
			&pilasterv1.Mapping{Tenant: "green", To: to, Node: agenttest.NodePrefix.String()})
	}
	return p
}

// A list that is incomplete, or lacks an allocation of the node, is not delivered: nothing is removed by mistake.
func TestListsThatAreNotTold(t *testing.T) {
	away := connect.NewError(connect.CodeUnavailable, agenttest.ErrFake)
	for name, c := range map[string]struct {
		pages []*pilasterv1.ListMappingsResponse
		err   error // after them
		words string
	}{
		"empty": {[]*pilasterv1.ListMappingsResponse{page(5, "")}, nil, "not 10.0.1.0/24"},
		"without this node's": {[]*pilasterv1.ListMappingsResponse{page(5, "", "10.0.2.0/24")}, nil,
			"not 10.0.1.0/24"},
		"broken off": {[]*pilasterv1.ListMappingsResponse{page(5, "a", "10.0.1.0/24")}, away,
			agenttest.ErrFake.Error()},
		"of two revisions": {[]*pilasterv1.ListMappingsResponse{page(5, "a", "10.0.1.0/24"),
			page(6, "", "10.0.2.0/24")}, nil, "revision 6"},
		"with what is no prefix": {[]*pilasterv1.ListMappingsResponse{page(5, "", "10.0.1.0/24", "10.0.2")}, nil,
			"not a prefix"},
		"with bits beside a prefix": {[]*pilasterv1.ListMappingsResponse{page(5, "", "10.0.1.0/24", "10.0.2.1/24")},
			nil, "not a prefix"},
		"refused, and not for a bit": {
			nil, connect.NewError(connect.CodeResourceExhausted, agenttest.ErrFake), agenttest.ErrFake.Error(),
		},
	} {
		reader, told := newLister(t, func(n int, _ string) (*pilasterv1.ListMappingsResponse, error) {
			if n > len(c.pages) {
				return nil, c.err
			}
			return c.pages[n-1], nil
		})
		m := &mappingList{tenant: "green", sinks: mappingSinks{told}}
		if err := reader.listOnce(t.Context(), m); err == nil || !strings.Contains(err.Error(), c.words) ||
			len(told.said) != 0 ||
			m.listed {
			t.Errorf("%s: %v, received %q", name, err, told.said)
		}
	}
}

// If several lists lack an allocation of this node, the stream ends, and the node registers with the allocation.
func TestListThatLacks(t *testing.T) {
	tries := 0
	reader, told := newLister(t, func(n int, _ string) (*pilasterv1.ListMappingsResponse, error) {
		tries = n
		return page(5, "", "10.0.2.0/24"), nil
	})
	reader.link.config.Wait = func(_ context.Context, n int, _ time.Duration) error {
		if n > 2*maxIncomplete {
			return agenttest.ErrFake
		}
		return nil
	}
	ctx, end := context.WithCancelCause(t.Context())
	var running sync.WaitGroup
	reader.end, reader.running = end, &running
	reader.mu.Lock()
	reader.list(ctx, "green", mappingSinks{told})
	reader.mu.Unlock()
	running.Wait()
	if err := context.Cause(ctx); !errors.Is(err, errIncomplete) || tries != maxIncomplete || len(told.said) != 0 {
		t.Errorf("after %d tries the stream ended with %v, received %q", tries, err, told.said)
	}
}

// TestListWithoutMovedAddress: a list of the node's own allocations lacks the address of a container that has moved to
// another node, until the container here is removed. It must have other addresses.
func TestListWithoutMovedAddress(t *testing.T) {
	at := func(address string, sequence uint64) endpoint.Attachment {
		return endpoint.Attachment{
			Network: "ila", Address: netip.MustParseAddr(address), Gateway: netip.MustParseAddr("10.0.5.254"),
			Routes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}, Sequence: sequence,
		}
	}
	moved := endpoint.Record{
		ID: 1, ContainerID: "c1", Interface: "eth0", Tenant: "green", TenantID: 7, State: endpoint.Active,
		AddressKey: "db-0", Attachments: []endpoint.Attachment{at("10.0.5.1", 3)},
	}
	fixed := moved
	fixed.ID, fixed.ContainerID, fixed.AddressKey = 2, "c2", ""
	fixed.Attachments = []endpoint.Attachment{at("10.0.5.2", 0)}
	for _, c := range []struct {
		name string
		held endpoint.Record
		sink network.MappingSink
		want error
	}{
		{"own allocations, with an address key", moved, &puller{}, nil},
		{"own allocations, without a key", fixed, &puller{}, errIncomplete},
		{"all mappings, with an address key", moved, &recorder{}, errIncomplete},
	} {
		core := agenttest.New(t)
		reader := newListerOf(t, core, func(int, string) (*pilasterv1.ListMappingsResponse, error) {
			return page(5, "", "10.0.1.0/24"), nil
		})
		if err := core.Store.Put(c.held); err != nil {
			t.Fatal(err)
		}
		to := mappingSinks{c.sink}
		m := &mappingList{tenant: "green", sinks: to, pulled: to.pull()}
		if err := reader.listOnce(t.Context(), m); !errors.Is(err, c.want) || m.listed != (c.want == nil) {
			t.Errorf("%s: listed %v, %v; want %v", c.name, m.listed, err, c.want)
		}
	}
}

// mappedNetwork is a network that receives mappings.
type mappedNetwork struct {
	agent.Network
	*recorder
}

// Every network of a tenant that uses mappings receives them, and a network added later receives all. A node that has
// hosted the tenant until lately receives changes of containers that have moved.
func TestEveryNetworkWithMappingsIsTold(t *testing.T) {
	core := agenttest.New(t)
	reader := newListerOf(t, core, func(int, string) (*pilasterv1.ListMappingsResponse, error) {
		return page(5, "", "10.0.1.0/24"), nil
	})
	var running sync.WaitGroup
	reader.running = &running
	first, second := &recorder{}, &recorder{}
	core.Networks["first"], core.Networks["second"] = mappedNetwork{nil, first}, mappedNetwork{nil, second}
	says := func(step string, firsts, seconds []string) {
		t.Helper()
		running.Wait()
		if !slices.Equal(first.said, firsts) || !slices.Equal(second.said, seconds) {
			t.Errorf(
				"%s: the first received %q, the second %q; want %q, %q",
				step,
				first.said,
				second.said,
				firsts,
				seconds,
			)
		}
	}
	delta := &pilasterv1.FollowResponse{Event: &pilasterv1.FollowResponse_Delta{Delta: &pilasterv1.Delta{}}}
	handles := func(on, leaving string, event *pilasterv1.FollowResponse, changed map[string]mappingUpdate) {
		green := listed
		green.Network, green.Leaving = on, leaving
		if _, err := core.Tenants.Merge(agent.TenantState{Tenant: green}); err != nil {
			t.Fatal(err)
		}
		reader.handleEvent(t.Context(), event, changed)
	}
	all, more := "all 10.0.1.0/24", "+10.0.7.0/24 -"
	handles(
		"first",
		"",
		&pilasterv1.FollowResponse{
			Event: &pilasterv1.FollowResponse_Snapshot{
				Snapshot: &pilasterv1.Snapshot{Tenants: []*pilasterv1.Tenant{{Name: "green"}}},
			},
		},
		nil,
	)
	says("on the first", []string{all}, nil)
	handles("second", "first", delta, nil)
	says("leaving it", []string{all, all}, []string{all})
	handles("second", "first", delta, map[string]mappingUpdate{"green": {revision: 6, add: mappingsTo("10.0.7.0/24")}})
	says("at a change", []string{all, all, more}, []string{all, more})
	handles("second", "", delta, nil)
	says("having left", []string{all, all, more}, []string{all, more, all})
	late := map[string]mappingUpdate{"green": {revision: 7, add: mappingsTo("10.0.8.0/24")}}
	handles("none", "", delta, nil)
	handles("none", "", delta, late)
	after := []string{all, more, all, "+10.0.8.0/24 -"}
	says("hosting it no more", []string{all, all, more}, after)
	reader.m["green"].gone = time.Now().Add(-2 * mobility.FormerTime)
	handles("none", "", delta, late)
	says("later", []string{all, all, more}, after)
}

// A limited number of changes waits for a list. Beyond the limit, the node requests the whole list again.
func TestChangesThatWaitHaveAnEnd(t *testing.T) {
	m := &mappingList{tenant: "green", sinks: mappingSinks{&recorder{}}}
	for i := range maxPending + 1 {
		if err := m.handleUpdate(t.Context(), mappingUpdate{revision: int64(i)}); (err != nil) != (i == maxPending) {
			t.Fatalf("change %d: %v", i, err)
		}
	}
}

// If the orchestrator rate-limits list queries of a tenant, the node waits and continues the list at the same page.
func TestListWaits(t *testing.T) {
	t.Parallel()
	late := connect.NewError(connect.CodeResourceExhausted, agenttest.ErrFake)
	late.Meta().Set("Retry-After", "1")
	var asked []time.Time
	reader, told := newLister(t, func(n int, token string) (*pilasterv1.ListMappingsResponse, error) {
		asked = append(asked, time.Now())
		switch {
		case n == 1:
			return page(5, "a", "10.0.1.0/24"), nil
		case n == 2:
			return nil, late
		case token != "a":
			t.Errorf("asked for page %q", token)
		}
		return page(5, "", "10.0.2.0/24"), nil
	})
	if err := reader.listOnce(t.Context(), &mappingList{tenant: "green", sinks: mappingSinks{told}}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"all 10.0.1.0/24,10.0.2.0/24"}; !slices.Equal(told.said, want) || len(asked) != 3 ||
		asked[2].Sub(asked[1]) < time.Second {
		t.Errorf("received %q after queries at %v", told.said, asked)
	}
}

// slow is a network that takes its time for the first list.
type slow struct {
	*recorder
	begun, end chan struct{}
	first      sync.Once
}

func (s *slow) Replace(ctx context.Context, name string, all []network.Mapping) error {
	err := s.recorder.Replace(ctx, name, all)
	s.first.Do(func() { close(s.begun); <-s.end; s.recorder.said = append(s.recorder.said, "done") })
	return err
}

// A cancelled list is not delivered while or after its replacement is.
func TestListsOneAfterTheOther(t *testing.T) {
	var pages atomic.Int32
	reader, told := newLister(t, func(n int, _ string) (*pilasterv1.ListMappingsResponse, error) {
		pages.Add(1)
		return page(int64(n), "", "10.0.1.0/24", fmt.Sprintf("10.0.%d.0/24", 1+n)), nil
	})
	to := &slow{recorder: told, begun: make(chan struct{}), end: make(chan struct{})}
	var running sync.WaitGroup
	reader.running = &running
	list := func(n int32) {
		reader.mu.Lock()
		reader.list(t.Context(), "green", mappingSinks{to})
		reader.mu.Unlock()
		agenttest.Eventually(t, func() error {
			if got := pages.Load(); got < n {
				return fmt.Errorf("%d pages were asked for", got)
			}
			return nil
		})
	}
	list(1)
	<-to.begun
	list(2)                           // waits for the first, and is stopped
	time.Sleep(20 * time.Millisecond) // in which it would be delivered at the same time
	list(3)
	close(to.end)
	running.Wait()
	if want := []string{"all 10.0.1.0/24,10.0.2.0/24", "done", "all 10.0.1.0/24,10.0.4.0/24"}; !slices.Equal(
		told.said,
		want,
	) {
		t.Errorf("received %q, want %q", told.said, want)
	}
}

// The first ADD of a tenant returns when this node has the tenant's mappings: until then packets to other nodes would
// be dropped.
func TestFirstAddWaitsForTheList(t *testing.T) {
	b, core := newLinkBed(t), agenttest.NewWithTwoNetworks(t)
	var added atomic.Bool
	b.cluster.list = func(*pilasterv1.ListMappingsRequest) (*pilasterv1.ListMappingsResponse, error) {
		time.Sleep(50 * time.Millisecond) // in which it would return
		if added.Load() {
			t.Error("the ADD did not wait")
		}
		return page(5, ""), nil
	}
	defer b.run(core)()
	<-b.cluster.hosted
	b.cluster.events <- &pilasterv1.FollowResponse{Revision: 4, Event: &pilasterv1.FollowResponse_Heartbeat{}}
	done := make(chan error)
	go func() {
		_, err := core.Add(t.Context(), core.Green("c1"))
		added.Store(true)
		done <- err
	}()
	for req := range b.cluster.hosted {
		if slices.Contains(req.HostedTenants, "green") {
			break
		}
	}
	go func() {
		for range b.cluster.hosted { // it reports more
		}
	}()
	green := &pilasterv1.Tenant{
		Name: "green", Network: tenant.Nimitz, Addressing: pilasterv1.Addressing_ADDRESSING_OWN,
		Overlays: []*pilasterv1.Overlay{{Cidr: "10.0.0.0/16", NodeBits: 24}},
	}
	for _, id := range core.Orchestrator.Tenants["green"].IDs {
		green.Ids = append(green.Ids, &pilasterv1.TenantId{Id: uint32(id.ID), Key: id.Key[:]})
	}
	b.cluster.events <- &pilasterv1.FollowResponse{Revision: 5,
		Event: &pilasterv1.FollowResponse_Delta{Delta: &pilasterv1.Delta{
			Tenants: []*pilasterv1.Tenant{green}, WholeTenants: []string{"green"}}}}
	began := time.Now()
	if err := <-done; err != nil || time.Since(began) > agent.ListWait {
		t.Errorf("the ADD: %v after %v", err, time.Since(began))
	}
}

// heldAddresses returns the addresses that the orchestrator allocated, and none that this node allocated itself.
func TestHeldAddresses(t *testing.T) {
	given, drawn := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.1.0.1")
	held := heldAddresses(
		[]endpoint.Record{{ContainerID: "c1", Interface: "eth0", Tenant: "green", Attachments: []endpoint.Attachment{
			{
				Network: "later",
				Address: given,
			}, {Network: "later", Address: drawn, Subnet: netip.MustParsePrefix("10.1.0.0/24")},
			{Network: tenant.Netpila, Address: agenttest.NodePrefix.Addr(), Plaintext: agenttest.NodePrefix.Addr()},
		}}},
	)
	if len(held) != 1 || held[0].To != "10.0.0.1/32" || held[0].Key != "c1/eth0" {
		t.Errorf("held %v", held)
	}
}
