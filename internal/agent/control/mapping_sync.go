package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// maxPages is the number of concurrent page requests; the orchestrator allows more.
const maxPages = 8

// mappingSync keeps the mappings of hosted tenants over all streams of a link. A list that one stream completed stays
// valid for the next.
type mappingSync struct {
	link  *Link
	core  Core
	pages chan struct{}

	sinkLocks refusal.KeyLocks // by tenant

	mu sync.Mutex
	m  map[string]*mappingList // by tenant
}

func newMappingSync(l *Link, core Core) *mappingSync {
	l.config.Tenants.SetHasMappings(func(t tenant.Tenant) bool { return len(core.Networks().MappingSinks(t)) > 0 })
	return &mappingSync{link: l, core: core, pages: make(chan struct{}, maxPages), m: map[string]*mappingList{}}
}

// streamMappings is the part of mappingSync that lives as long as a stream.
type streamMappings struct {
	*mappingSync
	client  pilasterv1connect.NodeServiceClient
	running *sync.WaitGroup
	end     context.CancelCauseFunc // of the stream
	started bool
}

// handleEvent processes an event after the core has applied it. It lists tenants that the event contains whole: from
// then on the stream delivers their changes.
func (r *streamMappings) handleEvent(ctx context.Context, event *pilasterv1.FollowResponse,
	changed map[string]mappingUpdate) {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := r.tenantsToList(event)
	for name, m := range r.m {
		if to := r.sinksOf(name); !slices.Equal(m.sinks, to) || !m.gone.IsZero() {
			m.stop()
			if len(to) == 0 && m.lately() {
				continue
			}
			delete(r.m, name)
			names = append(names, name)
		}
	}
	for name, n := range changed {
		if m := r.m[name]; m != nil {
			err := m.handleUpdate(ctx, n)
			switch {
			case err != nil && !m.gone.IsZero():
				r.link.config.Log.Warn("applying changes of a former tenant's mappings failed; packets to containers "+
					"that have moved may be lost", "tenant", name, "error", err)
			case err != nil && m.pulled:
				r.link.config.Log.Error("applying changes of a tenant's mappings failed; subscribing again", "tenant",
					name, "error", err)
			case err != nil:
				r.link.config.Log.Error("applying changes of a tenant's mappings failed; listing all again", "tenant",
					name, "error", err)
				r.list(ctx, name, m.sinks)
			}
		}
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if to := r.sinksOf(name); len(to) > 0 {
			r.list(ctx, name, to)
		}
	}
}

// tenantsToList returns the tenants to list: those that the event contains whole, and at the start of a stream those
// whose list the previous stream did not finish.
func (r *streamMappings) tenantsToList(event *pilasterv1.FollowResponse) (names []string) {
	if !r.started {
		r.started = true
		for name, m := range r.m {
			m.mu.Lock()
			if !m.listed {
				names = append(names, name)
			}
			m.mu.Unlock()
		}
	}
	sent, whole := event.GetDelta().GetTenants(), event.GetDelta().GetWholeTenants()
	if s := event.GetSnapshot(); s != nil {
		sent = s.Tenants
	}
	for _, t := range sent {
		if event.GetSnapshot() != nil || slices.Contains(whole, t.Name) {
			names = append(names, t.Name)
		}
	}
	return names
}

// sinksOf returns no sinks for an unknown tenant.
func (r *streamMappings) sinksOf(name string) mappingSinks {
	known, _, ok := r.link.config.Tenants.Get(name)
	if !ok {
		return nil
	}
	return r.core.Networks().MappingSinks(known.Tenant)
}

// errIncomplete means that a list lacks an allocation of this node. The orchestrator learns it again when the node
// registers.
var errIncomplete = errors.New("the orchestrator's list lacks an allocation of this node")

// maxIncomplete is how many incomplete lists the node accepts before it registers again.
const maxIncomplete = 5

// list starts listing a tenant. The caller holds the lock.
func (r *streamMappings) list(ctx context.Context, name string, to mappingSinks) {
	if old := r.m[name]; old != nil {
		old.stop()
	}
	ctx, stop := context.WithCancel(ctx)
	m := &mappingList{tenant: name, sinks: to, stop: stop, pulled: to.pull()}
	r.m[name] = m
	r.running.Go(func() {
		defer stop()
		for n := 0; ; n++ {
			err := r.listOnce(ctx, m)
			if err == nil || ctx.Err() != nil {
				return
			}
			r.link.config.Log.Warn(
				"listing the mappings of a tenant failed; the known ones stay; retrying",
				"tenant",
				name,
				"failures",
				n+1,
				"error",
				err,
			)
			if errors.Is(err, errIncomplete) && n+1 >= maxIncomplete {
				r.end(err)
				return
			}
			if r.link.config.Wait(ctx, n, 0) != nil {
				return
			}
		}
	})
}

func (r *streamMappings) listOnce(ctx context.Context, m *mappingList) error {
	held := r.heldPrefixes(m)
	var list []network.Mapping
	var own []*pilasterv1.Mapping
	var revision int64
	for token := ""; ; {
		page, err := r.page(ctx, m, token)
		if err != nil {
			return err
		}
		if revision != 0 && page.Revision != revision {
			return fmt.Errorf("a page of tenant %s has revision %d, the first page had %d", m.tenant, page.Revision,
				revision)
		}
		for _, entry := range page.Mappings {
			has, err := MappingFromProto(entry)
			if err != nil {
				return err
			}
			list = append(list, has)
			if entry.Key != "" {
				own = append(own, entry)
			}
		}
		revision, token = page.Revision, page.NextPageToken
		if token == "" {
			break
		}
	}
	// This also detects a list that is empty by mistake.
	for _, to := range held {
		if !slices.ContainsFunc(list, func(has network.Mapping) bool { return has.To == to }) {
			return fmt.Errorf("%w: of tenant %s it has %d mappings, but not %v", errIncomplete, m.tenant, len(list), to)
		}
	}
	if err := r.replaceAll(ctx, m, list, revision); err != nil {
		return err
	}
	r.link.config.Tenants.SetListed(m.tenant)
	for _, of := range own {
		r.link.freeUnused(ctx, r.core, of.Tenant, of.Key)
	}
	return nil
}

// replaceAll delivers the lists of a tenant one after the other, and none of a cancelled listing.
func (r *streamMappings) replaceAll(ctx context.Context, m *mappingList, list []network.Mapping, revision int64) error {
	unlock, err := r.sinkLocks.Lock(ctx, m.tenant)
	if err != nil {
		return err
	}
	defer unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	return m.replaceAll(ctx, list, revision)
}

// page requests one page. If the orchestrator limits the rate, it waits as long as the answer says.
func (r *streamMappings) page(ctx context.Context, m *mappingList, token string) (
	*pilasterv1.ListMappingsResponse, error,
) {
	for {
		select {
		case r.pages <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		resp, err := r.client.ListMappings(
			ctx,
			connect.NewRequest(&pilasterv1.ListMappingsRequest{Tenant: m.tenant, PageToken: token, Own: m.pulled}),
		)
		<-r.pages
		if err == nil {
			return resp.Msg, nil
		}
		pause, ok := RetryAfter(err)
		if !ok {
			return nil, err
		}
		select {
		case <-time.After(pause + rand.N(pause)): // spreads the retries of the nodes
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// RetryAfter returns the pause that the orchestrator requested when it rate-limited a query for mappings.
func RetryAfter(err error) (time.Duration, bool) {
	var remote *connect.Error
	if !errors.As(err, &remote) || remote.Code() != connect.CodeResourceExhausted {
		return 0, false
	}
	seconds, err := strconv.ParseUint(remote.Meta().Get("Retry-After"), 10, 8)
	return time.Duration(seconds) * time.Second, err == nil && seconds > 0
}

// heldPrefixes returns what a list must have: this node's subnets and addresses in a tenant's overlays, from local
// state. An address with a key may be another node's by now; then it is not in a list of this node's allocations only.
func (s *mappingSync) heldPrefixes(list *mappingList) []netip.Prefix {
	all := s.link.config.Tenants.Subnets(list.tenant)
	for _, m := range heldAddresses(s.core.Endpoints()) {
		to, err := netip.ParsePrefix(m.To)
		if mayHaveMoved := m.AddressKey != ""; err != nil || m.Tenant != list.tenant || list.pulled && mayHaveMoved {
			continue
		}
		all = append(all, to)
	}
	return all
}

// heldAddresses returns the addresses that the orchestrator allocated to single endpoints, except those being released.
func heldAddresses(records []endpoint.Record) []*pilasterv1.Mapping {
	var all []*pilasterv1.Mapping
	for _, r := range records {
		if r.State == endpoint.Deleting {
			continue
		}
		for _, a := range r.Attachments {
			if _, _, drawn := r.AllocatedIndex(a); !drawn {
				held := &pilasterv1.Mapping{
					Tenant:     r.Tenant,
					To:         netip.PrefixFrom(a.Address, a.Address.BitLen()).String(),
					Key:        agent.EndpointKey(r.ContainerID, r.Interface),
					AddressKey: r.AddressKey, Sequence: a.Sequence,
				}
				if tenant.NetworkHas(a.Network, tenant.Identifiers) {
					held.App = uint32(cmp.Or(r.AppNow, r.App))
				}
				all = append(all, held)
			}
		}
	}
	return all
}
