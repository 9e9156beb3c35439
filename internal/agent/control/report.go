package control

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/network"
)

// nodeStream is a stream from the node's side.
type nodeStream = *connect.BidiStreamForClient[pilasterv1.FollowRequest, pilasterv1.FollowResponse]

// report sends the hosted tenants now and after each change, and the subscriptions of networks that pull mappings.
// After an error, Receive returns the reason.
func (l *Link) report(ctx context.Context, stream nodeStream, a *asker) {
	first := &pilasterv1.FollowRequest{
		Sequence: l.config.Node.Sequence(), ResumeRevision: l.Status().Revision,
		WithoutMappings: l.config.WithoutMappings, PulledNetworks: slices.Sorted(maps.Keys(a.pullers)),
	}
	l.config.Tenants.Report(first, true)
	defer stream.CloseRequest() // without it Receive does not return if ctx ends during Send
	err := stream.Send(first)
	for err == nil {
		select {
		case <-l.config.Tenants.Changed():
			err = l.reportHosted(stream)
		case <-a.wanted:
			// The orchestrator ignores subscriptions of tenants that the node does not host.
			select {
			case <-l.config.Tenants.Changed():
				err = l.reportHosted(stream)
			default:
			}
			if err == nil {
				err = a.send(ctx, stream)
			}
		case <-ctx.Done():
			return
		}
	}
}

func (l *Link) reportHosted(stream nodeStream) error {
	report := &pilasterv1.FollowRequest{Sequence: l.config.Node.Sequence()}
	l.config.Tenants.Report(report, false)
	return stream.Send(report)
}

// asker sends the subscriptions of a node's networks on one stream.
type asker struct {
	pullers map[string]network.MappingPuller // by name
	wanted  chan struct{}                    // has a value while a network has changes
	sent    bool                             // the stream has had all subscriptions
}

// start begins after the stream's first event.
func (a *asker) start(ctx context.Context, accepted bool, running *sync.WaitGroup, log *slog.Logger) {
	if len(a.pullers) > 0 && !accepted {
		log.Error("the orchestrator's build accepts no subscriptions to mappings: containers reach no new peers on "+
			"other nodes; upgrade the orchestrators, or start the agent with pushed mappings", "networks",
			slices.Sorted(maps.Keys(a.pullers)))
		return
	}
	for _, p := range a.pullers {
		running.Go(func() {
			for {
				select {
				case a.wanted <- struct{}{}:
				default:
				}
				select {
				case <-p.SubscriptionsChanged():
				case <-ctx.Done():
					return
				}
			}
		})
	}
}

// askPause is the least time between two messages with subscriptions: an orchestrator reads 100 messages a second.
const askPause = 10 * time.Millisecond

// maxAsked is the maximum of subscriptions in one message, and so of mappings in its answer.
const maxAsked = 4096

// send sends all subscriptions once, and then what has changed.
func (a *asker) send(ctx context.Context, stream nodeStream) error {
	var begin, end []network.Mapping
	for _, p := range a.pullers {
		some, others := p.Subscriptions(!a.sent)
		begin, end = append(begin, some...), append(end, others...)
	}
	a.sent = true
	for len(begin)+len(end) > 0 {
		n := min(len(begin), maxAsked)
		m := min(len(end), maxAsked)
		err := stream.Send(&pilasterv1.FollowRequest{
			OnlySubscriptions: true,
			Subscribe:         subscriptionsToProto(begin[:n]), Unsubscribe: subscriptionsToProto(end[:m]),
		})
		if err != nil {
			return err
		}
		begin, end = begin[n:], end[m:]
		select {
		case <-time.After(askPause):
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// subscriptionsToProto groups addresses by tenant.
func subscriptionsToProto(all []network.Mapping) (some []*pilasterv1.Subscriptions) {
	by := map[string]*pilasterv1.Subscriptions{}
	for _, m := range all {
		of := by[m.Tenant]
		if of == nil {
			of = &pilasterv1.Subscriptions{Tenant: m.Tenant}
			by[m.Tenant], some = of, append(some, of)
		}
		of.Addresses = append(of.Addresses, m.To.Addr().AsSlice())
	}
	return some
}
