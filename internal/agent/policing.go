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

// policing has what a stream says of policies in force while the stream is read on: what comes during one compile
// waits, and the next one takes all of it.
type policing struct {
	link    *Link
	core    *Core
	running *sync.WaitGroup
	end     context.CancelCauseFunc // of the stream

	mu      sync.Mutex
	waiting []PolicyUpdate
	size    int                        // of the messages that these came in, in bytes
	last    *pilasterv1.FollowResponse // of these messages, without what it says of policies
	rested  chan struct{}              // closed when nothing waits and all is in force; nil since then
	more    chan struct{}              // wakes who has them in force; nil as long as there was none, so that a stream without policies costs nothing
}

// maxUnenforced is how many bytes of messages wait at most: as much as the largest message has, or a stream in its
// windows.
const maxUnenforced = 4 << 20

// isOfPolicies tells whether an event says something of policies and of nothing else: nothing else depends on when that
// is in force.
func isOfPolicies(event *pilasterv1.FollowResponse) bool {
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

// hear takes an event that is of policies alone. It returns before these are in force, unless very much waits.
func (p *policing) hear(ctx context.Context, event *pilasterv1.FollowResponse) error {
	news, err := policiesFromProto(event, time.Now())
	if err != nil {
		return fmt.Errorf("an event of the orchestrator cannot be used: %w", err)
	}
	size := proto.Size(event)
	if p.isFull(size) {
		if err := p.rest(ctx); err != nil {
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
	if p.rested == nil {
		p.rested = make(chan struct{})
	}
	if p.more == nil {
		p.more = make(chan struct{}, 1)
		p.running.Go(func() { p.work(ctx) })
	}
	select {
	case p.more <- struct{}{}:
	default:
	}
	return nil
}

func (p *policing) isFull(more int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.size > 0 && p.size+more > maxUnenforced
}

// rest waits until all that was heard is in force.
func (p *policing) rest(ctx context.Context) error {
	p.mu.Lock()
	rested := p.rested
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

// work goes on as long as the stream. What could not be kept ends that; the next one tells it again.
func (p *policing) work(ctx context.Context) {
	for {
		select {
		case <-p.more:
		case <-ctx.Done():
			return
		}
		for news, last := p.take(); last != nil; news, last = p.take() {
			for _, n := range byTenant(news) {
				if err := p.core.ApplyPolicies(ctx, n); err != nil {
					p.end(err)
					return
				}
			}
			p.link.follows(last)
		}
	}
}

func (p *policing) take() ([]PolicyUpdate, *pilasterv1.FollowResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	news, last := p.waiting, p.last
	if p.waiting, p.size, p.last = nil, 0, nil; last == nil && p.rested != nil {
		close(p.rested)
		p.rested = nil
	}
	return news, last
}

// byTenant puts together what is of one tenant, in the order in which it was said.
func byTenant(news []PolicyUpdate) (all []PolicyUpdate) {
	of := map[string][]PolicyUpdate{}
	var names []string
	for _, n := range news {
		if of[n.Tenant] == nil {
			names = append(names, n.Tenant)
		}
		of[n.Tenant] = append(of[n.Tenant], n)
	}
	for _, name := range names {
		all = append(all, together(of[name]))
	}
	return all
}

// together is what several say of one tenant one after the other.
func together(news []PolicyUpdate) PolicyUpdate {
	if len(news) == 1 {
		return news[0]
	}
	documents := map[policyName]*Document{} // nil for one that has ended
	apps := map[netip.Addr]address.AppID{}  // 0 for that of the address
	all := PolicyUpdate{Tenant: news[0].Tenant, Heard: news[0].Heard, Overrides: map[netip.Addr]address.AppID{}}
	for _, n := range news {
		if n.Whole {
			all.Whole = true
			clear(documents)
			clear(apps)
		}
		for _, d := range n.Ended {
			documents[d.name()] = nil
		}
		for _, d := range n.Documents {
			documents[d.name()] = &d
		}
		for _, a := range n.Back {
			apps[a] = 0
		}
		maps.Copy(apps, n.Overrides)
	}
	for name, d := range documents {
		if d == nil {
			all.Ended = append(all.Ended, Document{Kind: name.Kind, Namespace: name.Namespace, Name: name.Name})
		} else {
			all.Documents = append(all.Documents, *d)
		}
	}
	for a, app := range apps {
		if app == 0 {
			all.Back = append(all.Back, a)
		} else {
			all.Overrides[a] = app
		}
	}
	return all
}
