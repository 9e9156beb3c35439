package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// maxPages is how many pages of lists are asked for at the same time; the orchestrator takes more.
const maxPages = 8

// mappingSync are the mappings of hosted tenants, over all streams of a link. What one stream has told whole the next goes on
// merged.
type mappingSync struct {
	link  *Link
	core  *Core
	pages chan struct{}

	sinkLocks keyLocks // by tenant

	mu sync.Mutex
	m  map[string]*mappingList // by tenant
}

func newMappingSync(l *Link, core *Core) *mappingSync {
	core.tenants.setHasMappings(func(t tenant.Tenant) bool { return len(core.mappingSinks(t)) > 0 })
	return &mappingSync{link: l, core: core, pages: make(chan struct{}, maxPages), m: map[string]*mappingList{}}
}

// streamMappings is the part of lists that lives as long as a stream.
type streamMappings struct {
	*mappingSync
	client  pilasterv1connect.NodeServiceClient
	running *sync.WaitGroup
	end     context.CancelCauseFunc // apply the stream
	started bool
}

// applyPolicies takes an event that the core has taken. Tenants that it tells whole are listed: from it on the stream has their
// changes.
func (r *streamMappings) handleEvent(ctx context.Context, event *pilasterv1.FollowResponse, changed map[string]mappingUpdate) {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := r.tenantsToList(event)
	for name, m := range r.m {
		if to := r.sinksOf(name); !slices.Equal(m.sinks, to) {
			m.stop()
			delete(r.m, name)
			names = append(names, name)
		}
	}
	for name, n := range changed {
		if m := r.m[name]; m != nil {
			if err := m.handleUpdate(ctx, n); err != nil {
				r.link.config.Log.Error(
					"changes of a tenant's mappings were not taken; all are asked for again",
					"tenant",
					name,
					"error",
					err,
				)
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

// tenantsToList is the tenants to be listed: those told whole, and at the start of a stream those whose list the one before did
// not end.
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
	told, whole := event.GetDelta().GetTenants(), event.GetDelta().GetWholeTenants()
	if s := event.GetSnapshot(); s != nil {
		told = s.Tenants
	}
	for _, t := range told {
		if event.GetSnapshot() != nil || slices.Contains(whole, t.Name) {
			names = append(names, t.Name)
		}
	}
	return names
}

// sinksOf are none of a tenant that is not here.
func (r *streamMappings) sinksOf(name string) mappingSinks {
	known, _, ok := r.core.tenants.get(name)
	if !ok {
		return nil
	}
	return r.core.mappingSinks(known.Tenant)
}

// errIncomplete is of a list without something that this node has: the orchestrator knows it again when the node registers.
var errIncomplete = errors.New("the orchestrator's list lacks what this node has")

// maxIncomplete is how often a list may lack something before the node registers anew.
const maxIncomplete = 5

// list begins a tenant's list anew. The caller holds the lock.
func (r *streamMappings) list(ctx context.Context, name string, to mappingSinks) {
	if old := r.m[name]; old != nil {
		old.stop()
	}
	ctx, stop := context.WithCancel(ctx)
	m := &mappingList{tenant: name, sinks: to, stop: stop}
	r.m[name] = m
	r.running.Go(func() {
		defer stop()
		for n := 0; ; n++ {
			err := r.listOnce(ctx, m)
			if err == nil || ctx.Err() != nil {
				return
			}
			r.link.config.Log.Warn(
				"mappings of a tenant are not known; what this node knows of them stays, and they are asked for again",
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
	held := r.core.heldPrefixes(m.tenant)
	var list []network.Mapping
	var own []*pilasterv1.Mapping
	var revision int64
	for token := ""; ; {
		page, err := r.page(ctx, m.tenant, token)
		if err != nil {
			return err
		}
		if revision != 0 && page.Revision != revision {
			return fmt.Errorf("a list of tenant %s goes on at revision %d from %d", m.tenant, page.Revision, revision)
		}
		for _, said := range page.Mappings {
			has, err := MappingFromProto(said)
			if err != nil {
				return err
			}
			list = append(list, has)
			if said.Key != "" {
				own = append(own, said)
			}
		}
		revision, token = page.Revision, page.NextPageToken
		if token == "" {
			break
		}
	}
	// What is empty by mistake lacks this too.
	for _, to := range held {
		if !slices.ContainsFunc(list, func(has network.Mapping) bool { return has.To == to }) {
			return fmt.Errorf("%w: of tenant %s it has %d mappings, and none of %v", errIncomplete, m.tenant, len(list), to)
		}
	}
	if err := r.replaceAll(ctx, m, list, revision); err != nil {
		return err
	}
	r.core.tenants.setListed(m.tenant)
	for _, of := range own {
		r.link.freeUnused(ctx, r.core, of.Tenant, of.Key)
	}
	return nil
}

// signal has one list of a tenant told after the other, and none that was stopped.
func (r *streamMappings) replaceAll(ctx context.Context, m *mappingList, list []network.Mapping, revision int64) error {
	unlock, err := r.sinkLocks.lock(ctx, m.tenant)
	if err != nil {
		return err
	}
	defer unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	return m.replaceAll(ctx, list, revision)
}

// page waits as long as the orchestrator wants it to.
func (r *streamMappings) page(ctx context.Context, name, token string) (*pilasterv1.ListMappingsResponse, error) {
	for {
		select {
		case r.pages <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		resp, err := r.client.ListMappings(
			ctx,
			connect.NewRequest(&pilasterv1.ListMappingsRequest{Tenant: name, PageToken: token}),
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
		case <-time.After(pause + rand.N(pause)): // not all nodes at once
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// RetryAfter is when the orchestrator wants to be asked again, where a query for mappings was one too many.
func RetryAfter(err error) (time.Duration, bool) {
	var remote *connect.Error
	if !errors.As(err, &remote) || remote.Code() != connect.CodeResourceExhausted {
		return 0, false
	}
	seconds, err := strconv.ParseUint(remote.Meta().Get("Retry-After"), 10, 8)
	return time.Duration(seconds) * time.Second, err == nil && seconds > 0
}

// heldPrefixes is what of a tenant's overlays is this node's, as it knows itself.
func (c *Core) heldPrefixes(name string) []netip.Prefix {
	all := c.tenants.subnets(name)
	for _, m := range heldAddresses(c.store.List()) {
		if to, err := netip.ParsePrefix(m.To); err == nil && m.Tenant == name {
			all = append(all, to)
		}
	}
	return all
}

// heldAddresses are those that the cluster gave to endpoints one by one, and that they do not give back now.
func heldAddresses(records []endpoint.Record) []*pilasterv1.Mapping {
	var all []*pilasterv1.Mapping
	for _, r := range records {
		if r.State == endpoint.Deleting {
			continue
		}
		for _, a := range r.Attachments {
			if _, _, drawn := r.AllocatedIndex(a); !drawn {
				all = append(
					all,
					&pilasterv1.Mapping{
						Tenant: r.Tenant,
						To:     netip.PrefixFrom(a.Address, a.Address.BitLen()).String(),
						Key:    key(r.ContainerID, r.Interface),
					},
				)
			}
		}
	}
	return all
}

// ifUnused does something while no endpoint has a key, and none is being made.
func (c *Core) ifUnused(ctx context.Context, key string, do func() error) error {
	unlock, err := c.byKey.lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	if i := strings.LastIndexByte(key, '/'); i >= 0 { // others are no endpoint's
		if _, used := c.store.Find(key[:i], key[i+1:]); used {
			return nil
		}
	}
	return do()
}
