package lab

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// Echo is what came of pinging one container or node from another.
type Echo struct {
	From     string   `json:"from"`
	To       string   `json:"to"`
	Sent     int      `json:"sent"`
	Received int      `json:"received"`
	RTTUs    *float64 `json:"rttUs"` // median in µs; null where nothing came back
}

// Reached reports whether any answer came.
func (e Echo) Reached() bool { return e.Received > 0 }

// Ping sends echoes from a container or node to another. Without a route nothing is sent.
func (l *Lab) Ping(ctx context.Context, from, to string, o packet.PingOptions) (Echo, error) {
	e := Echo{From: from, To: to}
	address, err := l.Address(to)
	if err != nil {
		return e, err
	}
	ns, err := l.Namespace(from)
	if err != nil {
		return e, err
	}
	defer ns.Close()
	r, err := packet.Ping(ctx, ns, address, o)
	if err != nil && !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH) {
		return e, err
	}
	e.Sent, e.Received = r.Sent, r.Received
	if len(r.RTT) > 0 {
		us := float64(Median(r.RTT).Nanoseconds()) / 1000
		e.RTTUs = &us
	}
	return e, nil
}

// pingsAtOnce is how many pairs PingAll has under way: most of them wait for answers that must
// not come.
const pingsAtOnce = 16

// patience is what a pair that must reach each other gets at least. It costs time only where
// something is wrong.
const patience = 2 * time.Second

// PingAll pings from every container to every other. The timeout is for those that must not reach
// each other.
func (l *Lab) PingAll(ctx context.Context, o packet.PingOptions) ([]Echo, error) {
	containers := l.Containers()
	var echoes []Echo
	for _, from := range containers {
		for _, to := range containers {
			if from.Name != to.Name {
				echoes = append(echoes, Echo{From: from.Name, To: to.Name})
			}
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(pingsAtOnce)
	for i, e := range echoes {
		group.Go(func() (err error) {
			o := o
			if must, err := l.MustReach(e.From, e.To); err != nil {
				return err
			} else if must {
				o.Timeout = max(o.Timeout, patience)
			}
			echoes[i], err = l.Ping(ctx, e.From, e.To, o)
			return err
		})
	}
	return echoes, group.Wait()
}

// MustReach reports whether two containers must reach each other: those of one tenant must, those
// of two must not. A tenant of network nimitz is one in all regions; any other is another in each.
func (l *Lab) MustReach(from, to string) (bool, error) {
	a, err := l.Container(from)
	if err != nil {
		return false, err
	}
	b, err := l.Container(to)
	if err != nil {
		return false, err
	}
	joined := l.tenant(a.Tenant).Network == tenant.Nimitz || l.RegionOf(a.Node) == l.RegionOf(b.Node)
	return a.Tenant == b.Tenant && joined, nil
}

// Median of durations; the upper one of an even number. There must be one.
func Median(d []time.Duration) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[len(d)/2]
}
