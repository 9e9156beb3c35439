package control

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/policies"
)

// policyQueue enforces policy updates of a stream while the stream is read on: updates that arrive during a compilation
// wait, and the next compilation includes all of them.
type policyQueue struct {
	link    *Link
	core    Core
	running *sync.WaitGroup
	end     context.CancelCauseFunc // of the stream

	mu      sync.Mutex
	waiting []policies.Update
	size    int                        // bytes of the waiting messages
	last    *pilasterv1.FollowResponse // the last of these messages, without its policies
	idle    chan struct{}              // closed when all updates are in force; nil if none is pending
	// wakes the goroutine run; nil before the first update, so that a stream without policies has no goroutine
	wake chan struct{}
}

// maxUnenforced is the maximum of waiting bytes: the size of the largest message, or of a stream's flow-control window.
const maxUnenforced = 4 << 20

// isPolicyOnly reports whether an event contains policy updates and nothing else: nothing else depends on when they are
// in force.
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

// handleEvent queues an event with only policy updates. It returns before they are in force, unless the queue is full.
func (p *policyQueue) handleEvent(ctx context.Context, event *pilasterv1.FollowResponse) error {
	updates, err := policiesFromProto(event, time.Now())
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
	p.waiting, p.size = append(p.waiting, updates...), p.size+size
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

// wait returns once all queued updates are in force.
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

// run enforces queued updates until the stream ends. An update that cannot be stored ends the stream; the next one
// repeats it.
func (p *policyQueue) run(ctx context.Context) {
	for {
		select {
		case <-p.wake:
		case <-ctx.Done():
			return
		}
		for updates, last := p.take(); last != nil; updates, last = p.take() {
			for _, n := range policies.MergeByTenant(updates) {
				if err := p.core.ApplyPolicies(ctx, n); err != nil {
					p.end(err)
					return
				}
			}
			p.link.markApplied(last)
		}
	}
}

func (p *policyQueue) take() ([]policies.Update, *pilasterv1.FollowResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	updates, last := p.waiting, p.last
	if p.waiting, p.size, p.last = nil, 0, nil; last == nil && p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
	return updates, last
}
