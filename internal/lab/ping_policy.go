package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// MarkDenied sets Denied of each echo between containers that must reach each other but whose policies deny an ICMP
// echo. It asks the agents of both nodes. The error joins the failed calls; their echoes keep Denied false.
func (l *Lab) MarkDenied(ctx context.Context, echoes []Echo) error {
	failed := make([]error, len(echoes))
	var group errgroup.Group
	group.SetLimit(pingsAtOnce)
	for i := range echoes {
		group.Go(func() error {
			echoes[i].Denied, failed[i] = l.denies(ctx, echoes[i])
			return nil
		})
	}
	_ = group.Wait() // the errors are in failed
	return errors.Join(failed...)
}

// denies reports whether the policies at either end deny the echo.
func (l *Lab) denies(ctx context.Context, e Echo) (bool, error) {
	if must, err := l.MustReach(e.From, e.To); err != nil || !must {
		return false, err
	}
	from, err := l.Container(e.From)
	if err != nil {
		return false, err
	}
	to, err := l.Container(e.To)
	if err != nil {
		return false, err
	}
	at := slices.IndexFunc(to.Attachments, func(a Attachment) bool { return a.Address == e.Address })
	if at < 0 {
		return false, nil
	}
	same := slices.IndexFunc(from.Attachments,
		func(a Attachment) bool {
			return a.Network == to.Attachments[at].Network && a.Address.Is4() == e.Address.Is4()
		})
	if same < 0 {
		return false, nil
	}
	ask := &pilasterv1.WhyRequest{Source: from.Attachments[same].Address.String(), Destination: e.Address.String(),
		Protocol: unix.IPPROTO_ICMPV6, Tenant: from.Tenant}
	if e.Address.Is4() {
		ask.Protocol = unix.IPPROTO_ICMP
	}
	ctx, cancel := context.WithTimeout(ctx, agentPatience)
	defer cancel()
	for _, end := range [2]struct{ own, peer ContainerStatus }{{from, to}, {to, from}} {
		if ask.PeerApp, err = l.appNow(ctx, end.peer); err != nil {
			return false, err
		}
		answer, err := l.Agent(end.own.Node).Why(ctx, connect.NewRequest(ask))
		if err != nil {
			return false, fmt.Errorf("policies from %s to %s on %s: %w", e.From, e.To, end.own.Node, err)
		}
		if slices.ContainsFunc(answer.Msg.Reasons, func(r *pilasterv1.Reason) bool { return !r.Allowed }) {
			return true, nil
		}
	}
	return false, nil
}

// appNow returns the app that policies use for a container; its labels may have changed.
func (l *Lab) appNow(ctx context.Context, c ContainerStatus) (uint32, error) {
	got, err := l.Agent(c.Node).
		GetEndpoint(ctx, connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: l.ContainerID(c.Name)}))
	if err != nil {
		return 0, fmt.Errorf("labels of %s on %s: %w", c.Name, c.Node, err)
	}
	return cmp.Or(got.Msg.Endpoint.GetAppNow(), got.Msg.Endpoint.GetApp()), nil
}
