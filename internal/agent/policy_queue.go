package agent

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
)

// policyQueue has what a stream says of policies in force while the stream is read on: what comes during one compile
// waits, and the next one takes all of it.
type policyQueue struct {
	link    *Link
	core    *Core
	running *sync.WaitGroup
	end     context.CancelCauseFunc // apply the stream

	mu      sync.Mutex
	waiting []PolicyUpdate
	size    int                        // apply the messages that these came in, in bytes
	last    *pilasterv1.FollowResponse // apply these messages, without what it says of policies
	idle    chan struct{}              // closed when nothing waits and all is in force; nil since then
	wake    chan struct{}              // wakes who has them in force; nil as long as there was none, so that a stream without policies costs nothing
}

// maxUnenforced is how many bytes of messages wait at most: as much as the largest message has, or a stream in its
// windows.
const maxUnenforced = 4 << 20

// isPolicyOnly tells whether an event says something of policies and of nothing else: nothing else depends on when that
// is in force.
func isPolicyOnly(event *pilasterv1.FollowResponse) bool {
	d := event.GetDelta()
	if d == nil || event.More || event.Refusals != nil {
		return false
	}
	others := len(
		d.Tenants,
	) + len(
		d.Apps,
	) + len(
		d.DeletedTenants,
	) + len(
		d.WholeTenants,
	) + len(
		d.Mappings,
	) + len(
		d.EndedMappings,
	)
	return d.Node == nil && others == 0 &&
		len(d.Policies)+len(d.EndedPolicies)+len(d.Overrides)+len(d.EndedOverrides)+len(d.WholePolicies) > 0
}

// applyPolicies takes an event that is of policies alone. It returns before these are in force, unless very much waits.
func (p *policyQueue) handleEvent(ctx context.Context, event *pilasterv1.FollowResponse) error {
	news, err := policiesFromProto(event, time.Now())
	if err != nil {
		return fmt.Errorf("an event of the orchestrator cannot be used: %w", err)
	}
	size := proto.Size(event)
	if p.isFull(size) {
		if err := p.wait(ctx); err != nil {
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiting, p.size = append(p.waiting, news...), p.size+size
	p.last = &pilasterv1.FollowResponse{
		Revision:     event.Revision,
		SpreadMs:     event.SpreadMs,
		WithPolicies: event.WithPolicies,
	}
	if p.idle == nil {
		p.idle = make(chan struct{})
	}
	if p.wake == nil {
		p.wake = make(chan struct{}, 1)
		p.running.Go(func() { p.run(ctx) })
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return nil
}

func (p *policyQueue) isFull(more int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.size > 0 && p.size+more > maxUnenforced
}

// wait waits until all that was heard is in force.
func (p *policyQueue) wait(ctx context.Context) error {
	p.mu.Lock()
	rested := p.idle
	p.mu.Unlock()
	if rested == nil {
		return nil
	}
	select {
	case <-rested:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run goes on as long as the stream. What could not be kept ends that; the next one tells it again.
func (p *policyQueue) run(ctx context.Context) {
	for {
		select {
		case <-p.wake:
		case <-ctx.Done():
			return
		}
		for news, last := p.take(); last != nil; news, last = p.take() {
			for _, n := range mergeByTenant(news) {
				if err := p.core.ApplyPolicies(ctx, n); err != nil {
					p.end(err)
					return
				}
			}
			p.link.markApplied(last)
		}
	}
}

func (p *policyQueue) take() ([]PolicyUpdate, *pilasterv1.FollowResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	news, last := p.waiting, p.last
	if p.waiting, p.size, p.last = nil, 0, nil; last == nil && p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
	return news, last
}

// mergeByTenant puts together what is of one tenant, in the order in which it was said.
func mergeByTenant(news []PolicyUpdate) (all []PolicyUpdate) {
	of := map[string][]PolicyUpdate{}
	var names []string
	for _, n := range news {
		if of[n.Tenant] == nil {
			names = append(names, n.Tenant)
		}
		of[n.Tenant] = append(of[n.Tenant], n)
	}
	for _, name := range names {
		all = append(all, mergeUpdates(of[name]))
	}
	return all
}

// mergeUpdates is what several say of one tenant one after the other.
func mergeUpdates(news []PolicyUpdate) PolicyUpdate {
	if len(news) == 1 {
		return news[0]
	}
	documents := map[policyName]*Document{} // nil for one that has ended
	apps := map[netip.Addr]address.AppID{}  // 0 for that of the address
	all := PolicyUpdate{Tenant: news[0].Tenant, Received: news[0].Received, Overrides: map[netip.Addr]address.AppID{}}
	for _, n := range news {
		if n.Whole {
			all.Whole = true
			clear(documents)
			clear(apps)
		}
		for _, d := range n.Removed {
			documents[d.name()] = nil
		}
		for _, d := range n.Documents {
			documents[d.name()] = &d
		}
		for _, a := range n.EndedOverrides {
			apps[a] = 0
		}
		maps.Copy(apps, n.Overrides)
	}
	for name, d := range documents {
		if d == nil {
			all.Removed = append(all.Removed, Document{Kind: name.Kind, Namespace: name.Namespace, Name: name.Name})
		} else {
			all.Documents = append(all.Documents, *d)
		}
	}
	for a, app := range apps {
		if app == 0 {
			all.EndedOverrides = append(all.EndedOverrides, a)
		} else {
			all.Overrides[a] = app
		}
	}
	return all
}
