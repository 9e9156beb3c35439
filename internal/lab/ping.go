package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Echo is the result of a ping from one container or node to another.
type Echo struct {
	From    string     `json:"from"`
	To      string     `json:"to"`
	Address netip.Addr `json:"address"`
	// If To is of another tenant, Own is the container of From's tenant that has the same address, if there is one:
	// tenants may have overlapping addresses. If Own is set, Ping sends nothing.
	Own      string   `json:"own,omitempty"`
	Denied   bool     `json:"denied,omitempty"` // policies deny the echo; set by MarkDenied
	ToNode   string   `json:"toNode,omitempty"` // the tenant, if To is a node that its containers may not reach
	Sent     int      `json:"sent"`
	Received int      `json:"received"`
	RTTUs    *float64 `json:"rttUs"` // median in µs; null without a response
}

// Reached reports whether any response arrived.
func (e Echo) Reached() bool { return e.Received > 0 }

// Ping sends echo requests from a container or node to another. Without a route it sends nothing.
func (l *Lab) Ping(ctx context.Context, from, to string, o packet.PingOptions) (Echo, error) {
	all, err := l.PingEach(ctx, from, to, o)
	if err != nil {
		return Echo{From: from, To: to}, err
	}
	return all[0], nil
}

// PingEach pings one address of each network that both containers are on; there are two such networks while their
// tenant moves.
func (l *Lab) PingEach(ctx context.Context, from, to string, o packet.PingOptions) ([]Echo, error) {
	if err := l.refreshOf(ctx, from, to); err != nil {
		return nil, err
	}
	addresses, err := l.between(from, to)
	if err != nil {
		return nil, err
	}
	seen, denied, err := l.nodeSeenBy(ctx, from, to)
	if err != nil {
		return nil, err
	}
	if seen.IsValid() {
		addresses = []netip.Addr{seen}
	}
	var echoes []Echo
	for _, a := range addresses {
		e, err := l.ping(ctx, from, to, a, o)
		e.ToNode = denied
		if err != nil {
			return nil, err
		}
		echoes = append(echoes, e)
	}
	return echoes, nil
}

// nodeSeenBy returns the address at which a container reaches a node: the agent of the container knows the alias that
// containers of encrypted tenants see. denied is the tenant if its containers may not reach the node. The address is
// invalid for other pairs.
func (l *Lab) nodeSeenBy(ctx context.Context, from, to string) (seen netip.Addr, denied string, err error) {
	c, notFrom := l.Container(from)
	if notFrom != nil || !c.Plaintext.IsValid() || !slices.Contains(l.NodeNames(), to) {
		return seen, "", nil
	}
	node, err := l.Address(to)
	if err != nil {
		return seen, "", err
	}
	ctx, cancel := context.WithTimeout(ctx, agentPatience)
	defer cancel()
	answer, err := l.Agent(c.Node).Trace(ctx, connect.NewRequest(&pilasterv1.TraceRequest{
		Source: c.Plaintext.String(), Destination: node.String(), Protocol: unix.IPPROTO_ICMPV6, Tenant: c.Tenant,
	}))
	if err == nil {
		seen, err = netip.ParseAddr(answer.Msg.Destination.GetAddress())
	}
	if err != nil {
		return seen, "", fmt.Errorf("ask the agent of %s for the address at which %s sees %s: %w\n  nothing was sent; "+
			"pilaster lab status shows whether the agent runs", c.Node, from, to, err)
	}
	if answer.Msg.Drop == dropreason.ToNode.String() {
		denied = c.Tenant
	}
	return seen, denied, nil
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

// pingsAtOnce is the number of concurrent pairs of PingAll: most of them wait for a timeout.
const pingsAtOnce = 16

// patience is the minimum timeout of pairs that must reach each other. It costs time only if a ping fails.
const patience = 2 * time.Second

// PingAll pings from every container to every other, as PingEach does. The timeout of the options applies to pairs that
// must not reach each other.
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

// MustReach reports whether two containers must reach each other: yes if they are of the same tenant. A tenant of
// a network that does not span regions is a separate tenant in each region.
func (l *Lab) MustReach(from, to string) (bool, error) {
	a, err := l.Container(from)
	if err != nil {
		return false, err
	}
	b, err := l.Container(to)
	if err != nil {
		return false, err
	}
	spanned := slices.ContainsFunc(tenant.Networks(tenant.Regions), func(n string) bool { return a.on(n) && b.on(n) })
	joined := spanned || l.RegionOf(a.Node) == l.RegionOf(b.Node)
	return a.Tenant == b.Tenant && joined, nil
}

// own returns the container of the sender's tenant that has the same address as a container of another tenant, or "".
// The result may be the sender itself.
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

// Median returns the median of durations, the upper one of an even number. all must not be empty.
func Median(d []time.Duration) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[len(d)/2]
}

// MarkDenied sets Denied of each echo between containers that must reach each other but whose policies deny an ICMP
// echo. It asks the agents of both nodes. The error joins the failed calls; their echoes keep Denied false.
func (l *Lab) MarkDenied(ctx context.Context, echoes []Echo) error {
	failed := make([]error, len(echoes))
	var group errgroup.Group
	group.SetLimit(pingsAtOnce)
	for i := range echoes {
		group.Go(func() error {
			denied, err := l.denies(ctx, echoes[i])
			if echoes[i].Denied = denied; err != nil {
				failed[i] = errors.New(unixrpc.Words(err))
			}
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
		answer, err := l.why(ctx, end.own, ask)
		if err != nil {
			return false, fmt.Errorf("policies from %s to %s on %s: %w", e.From, e.To, end.own.Node, err)
		}
		if slices.ContainsFunc(answer.Msg.Reasons, func(r *pilasterv1.Reason) bool { return !r.Allowed }) {
			return true, nil
		}
	}
	return false, nil
}

// why asks the node of a container what policies say, or a frontend of its offload.
func (l *Lab) why(
	ctx context.Context,
	own ContainerStatus,
	ask *pilasterv1.WhyRequest,
) (*connect.Response[pilasterv1.WhyResponse], error) {
	answer, err := l.Agent(own.Node).Why(ctx, connect.NewRequest(ask))
	if connect.CodeOf(err) != connect.CodeFailedPrecondition {
		return answer, err
	}
	all, failed := l.Operator().ListOffloads(
		ctx, connect.NewRequest(&pilasterv1.ListOffloadsRequest{Tenant: own.Tenant, Node: own.Node}))
	if failed != nil {
		return nil, err
	}
	for _, o := range all.Msg.Offloads {
		for _, f := range o.Offload.GetFrontends() {
			if !f.Draining && !slices.Contains(o.LostFrontends, f.Node) {
				return l.Agent(f.Node).Why(ctx, connect.NewRequest(ask))
			}
		}
	}
	return nil, err
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
