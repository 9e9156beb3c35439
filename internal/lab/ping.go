package lab

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// Echo is what came of pinging one container or node from another.
type Echo struct {
	From    string     `json:"from"`
	To      string     `json:"to"`
	Address netip.Addr `json:"address"`
	// who has the address for From, where To is another tenant's: tenants may overlap. Nothing is sent
	Own      string   `json:"own,omitempty"`
	Sent     int      `json:"sent"`
	Received int      `json:"received"`
	RTTUs    *float64 `json:"rttUs"` // median in µs; null where nothing came back
}

// Reached reports whether any answer came.
func (e Echo) Reached() bool { return e.Received > 0 }

// Ping sends echoes from a container or node to another. Without a route nothing is sent.
func (l *Lab) Ping(ctx context.Context, from, to string, o packet.PingOptions) (Echo, error) {
	all, err := l.PingEach(ctx, from, to, o)
	if err != nil {
		return Echo{From: from, To: to}, err
	}
	return all[0], nil
}

// PingEach is Ping by one address of each network that two containers are both on: there are two while their tenant
// moves.
func (l *Lab) PingEach(ctx context.Context, from, to string, o packet.PingOptions) ([]Echo, error) {
	if err := l.refreshOf(ctx, from, to); err != nil {
		return nil, err
	}
	addresses, err := l.between(from, to)
	if err != nil {
		return nil, err
	}
	var echoes []Echo
	for _, a := range addresses {
		e, err := l.ping(ctx, from, to, a, o)
		if err != nil {
			return nil, err
		}
		echoes = append(echoes, e)
	}
	return echoes, nil
}

func (l *Lab) ping(ctx context.Context, from, to string, address netip.Addr, o packet.PingOptions) (Echo, error) {
	e := Echo{From: from, To: to, Address: address, Own: l.own(from, to, address)}
	if e.Own != "" {
		return e, nil
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

// PingAll pings from every container to every other, as PingEach does. The timeout is for those that must not reach
// each other.
func (l *Lab) PingAll(ctx context.Context, o packet.PingOptions) ([]Echo, error) {
	if _, err := l.Refresh(ctx); err != nil {
		return nil, err
	}
	containers := l.Containers()
	var echoes []Echo
	for _, from := range containers {
		for _, to := range containers {
			if from.Name == to.Name {
				continue
			}
			addresses, err := l.between(from.Name, to.Name)
			if err != nil {
				return nil, err
			}
			for _, a := range addresses {
				echoes = append(echoes, Echo{From: from.Name, To: to.Name, Address: a})
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
			echoes[i], err = l.ping(ctx, e.From, e.To, e.Address, o)
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
	joined := a.on(tenant.Nimitz) && b.on(tenant.Nimitz) || l.RegionOf(a.Node) == l.RegionOf(b.Node)
	return a.Tenant == b.Tenant && joined, nil
}

// own is the container, maybe the sender itself, that the sender reaches at an address of another tenant's.
func (l *Lab) own(from, to string, address netip.Addr) string {
	if must, err := l.MustReach(from, to); err != nil || must {
		return ""
	}
	for _, c := range l.Containers() {
		if must, err := l.MustReach(from, c.Name); err == nil && must && slices.Contains(c.Addresses(), address) {
			return c.Name
		}
	}
	return ""
}

// Median of durations; the upper one of an even number. There must be one.
func Median(d []time.Duration) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[len(d)/2]
}
