package sim

import (
	"context"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/plot"
	"pilaster.io/pilaster/internal/policy"
)

// Policies is the cost of changes of a tenant's policy. Times are from the operator's call until packet paths have the
// change. Messages are those that nodes received on their streams, without heartbeats.
type Policies struct {
	Changes  int          `json:"changes"`
	Hosts    int          `json:"hosts"`            // nodes that host the tenant
	Node     Quantiles    `json:"nodeMilliseconds"` // until one hosting node has a change, over all hosting nodes and changes
	Last     Quantiles    `json:"lastMilliseconds"` // until the last hosting node has a change, over all changes
	OnNode   [][2]float64 `json:"onNode"`           // distribution of Node: milliseconds, and percent that took no longer
	OnLast   [][2]float64 `json:"onLast"`           // the same of Last
	Least    int64        `json:"leastMessages"`    // to one hosting node
	Most     int64        `json:"mostMessages"`
	Others   int          `json:"others"`         // nodes that do not host the tenant
	ToOthers int64        `json:"othersMessages"` // to all of these together
}

// changes measures policy changes while they happen.
type changes struct {
	done       int
	hosts      map[*node]bool
	received   map[*node]int64 // messages before the first change
	each, last latencies
}

// changePolicy changes a policy of the first tenant so many times. After each change it waits until all nodes that host
// the tenant have the change in their packet paths.
func (w *world) changePolicy(ctx context.Context, times int) error {
	name := w.tenants[0]
	c := &changes{hosts: w.hosting(name), received: map[*node]int64{}}
	for _, n := range w.nodes {
		c.received[n] = n.caller.received.Load()
	}
	w.stage.changes = c
	left := inUse()
	for i := range times {
		// Collect garbage now, while nothing is measured: all nodes share one heap, and a collection would delay them.
		if inUse() > left/2*3 {
			runtime.GC()
			left = inUse()
		}
		w.policyPort = w.policyPort%50_000 + 1
		port := w.policyPort
		began := time.Now()
		if _, err := w.operator.ApplyPolicies(ctx, connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: name,
			Documents: []string{portPolicy(port)}})); err != nil {
			return fmt.Errorf("policy change %d: %w", i+1, err)
		}
		var last time.Duration
		for n := range c.hosts {
			since, err := n.driver.awaitPort(ctx, port)
			if err != nil {
				return fmt.Errorf("policy change %d did not reach node %s: %w", i+1, n.name, err)
			}
			took := since.Sub(began)
			c.each.note(took)
			last = max(last, took)
		}
		c.last.note(last)
		c.done++
	}
	return nil
}

// policies computes the results after the last message was sent.
func (c *changes) policies() *Policies {
	p := &Policies{Changes: c.done, Hosts: len(c.hosts), Others: len(c.received) - len(c.hosts), Least: -1}
	p.OnNode, p.OnLast = c.each.distribution(), c.last.distribution()
	p.Node, p.Last = c.each.take(), c.last.take()
	for n, before := range c.received {
		received := n.caller.received.Load() - before
		if !c.hosts[n] {
			p.ToOthers += received
			continue
		}
		if p.Most = max(p.Most, received); p.Least < 0 || received < p.Least {
			p.Least = received
		}
	}
	p.Least = max(p.Least, 0)
	return p
}

// violated returns the violated invariants of messages.
func (p *Policies) violated() []string {
	if p == nil || p.ToOthers == 0 {
		return nil
	}
	return []string{
		fmt.Sprintf(
			"%d messages went to %d nodes that do not host the tenant whose policy was changed",
			p.ToOthers,
			p.Others,
		),
	}
}

// exceeded returns the exceeded limits. The 99th percentile of the time until a hosting node has a change, and the
// median of the time until the last one has the change, must be at most within. Each change may cost one message for
// each node that hosts the tenant. sent is the orchestrator's count, which includes messages that no node has read.
func (p *Policies) exceeded(within time.Duration, sent int64) (all []string) {
	if within > 0 && p.Node.P99 > milliseconds(within) {
		all = append(
			all,
			fmt.Sprintf(
				"a change was in force on a node within %.0f ms in 99 of 100 cases; the limit is %v",
				p.Node.P99,
				within,
			),
		)
	}
	if within > 0 && p.Last.Median > milliseconds(within) {
		all = append(
			all,
			fmt.Sprintf(
				"a change was in force on the last node within %.0f ms in half of the cases; the limit is %v",
				p.Last.Median,
				within,
			),
		)
	}
	if most := int64(p.Changes); p.Most > most || sent > most*int64(p.Hosts) {
		all = append(
			all,
			fmt.Sprintf(
				"%d changes cost %d messages, up to %d to a node; %d nodes host the tenant, and "+
					"one message for each change is enough",
				p.Changes,
				sent,
				p.Most,
				p.Hosts,
			),
		)
	}
	return all
}

func (p *Policies) text(w io.Writer) {
	if p == nil {
		return
	}
	fmt.Fprintf(
		w,
		"  a change was in a node's packet path after %s by half and %s by 99 of 100, on the last of %d nodes after "+
			"%s and %s\n",
		p.Node.text(
			p.Node.Median,
		),
		p.Node.text(p.Node.P99),
		p.Hosts,
		p.Last.text(p.Last.Median),
		p.Last.text(p.Last.P99),
	)
	fmt.Fprintf(
		w,
		"  messages for %d changes: %d to %d to each of these nodes, %d to the %d others together\n",
		p.Changes,
		p.Least,
		p.Most,
		p.ToOthers,
		p.Others,
	)
}

// lines plots how soon changes were in force.
func (p *Policies) lines() *plot.Lines {
	return plot.NewLines(
		"",
		plot.Plot{
			Title: "changes of a policy that are in force",
			X:     "milliseconds since the operator's call",
			Y:     "percent",
			Lines: []plot.Line{
				{Name: "on a node", Points: p.OnNode}, {Name: "on the last node", Points: p.OnLast},
			},
		},
	)
}

// hosting returns the nodes that have containers of a tenant.
func (w *world) hosting(tenant string) map[*node]bool {
	hosts := map[*node]bool{}
	for _, n := range w.nodes {
		for _, c := range n.running {
			if c.tenant == tenant {
				hosts[n] = true
			}
		}
	}
	return hosts
}

// checkPolicies compares the policies of packet paths with the last change: nodes that host the tenant enforce only
// that policy, and other nodes enforce none.
func (w *world) checkPolicies(v *violations) {
	if w.policyPort == 0 {
		return
	}
	hosts := w.hosting(w.tenants[0])
	for _, n := range w.nodes {
		n.driver.mu.Lock()
		ports := n.driver.enforced.ports
		n.driver.mu.Unlock()
		switch {
		case hosts[n] && !(ports[w.policyPort] && len(ports) == 1):
			v.add(
				"a changed policy is not in force",
				"node %s accepts ports %v, want %d",
				n.name,
				slices.Collect(maps.Keys(ports)),
				w.policyPort,
			)
		case !hosts[n] && len(ports) > 0:
			v.add("a node without the tenant has its policy", "node %s has rules of tenant %s", n.name, w.tenants[0])
		}
	}
}

// streamInterceptor sets the usual deadline of calls, and counts the messages that nodes receive on streams.
type streamInterceptor struct{ connect.UnaryInterceptorFunc }

func (streamInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		return countedStream{next(ctx, spec), &ctx.Value(callerKey{}).(*caller).received}
	}
}

type countedStream struct {
	connect.StreamingClientConn
	received *atomic.Int64
}

func (h countedStream) Receive(m any) error {
	err := h.StreamingClientConn.Receive(m)
	if r, ok := m.(*pilasterv1.FollowResponse); err == nil && ok && r.GetHeartbeat() == nil {
		h.received.Add(1)
	}
	return err
}

// portPolicy returns a policy that admits connections to one port only.
func portPolicy(port uint16) string {
	return fmt.Sprintf(
		`{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: sim, namespace: default}, `+
			`spec: {podSelector: {}, ingress: [{ports: [{port: %d}]}]}}`,
		port,
	)
}

// enforced is the last policy of a packet path.
type enforced struct {
	ports map[uint16]bool // ports that a rule names
	since time.Time
	next  chan struct{} // closed at the next change; nil while no goroutine waits
}

func (d *driver) RestorePolicies(all, _ []dpapi.TenantPolicies) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ports = map[string]map[uint16]bool{}
	for _, of := range all {
		d.ports[of.Tenant] = portsOf(of)
	}
	d.enforce()
	return nil
}

func (d *driver) SetPolicies(of dpapi.TenantPolicies) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ports[of.Tenant] = portsOf(of)
	d.enforce()
	return nil
}

func portsOf(t dpapi.TenantPolicies) map[uint16]bool {
	ports := map[uint16]bool{}
	for k := range t.Tables.Ports {
		if k.Scope == policy.ThisPort {
			ports[k.Port] = true
		}
	}
	return ports
}

// enforce requires the lock.
func (d *driver) enforce() {
	given := enforced{ports: map[uint16]bool{}, since: time.Now()}
	for _, ports := range d.ports {
		maps.Copy(given.ports, ports)
	}
	if d.enforced.next != nil {
		close(d.enforced.next)
	}
	d.enforced = given
}

// awaitPort waits until a rule names the port, and returns when the rule took effect.
func (d *driver) awaitPort(ctx context.Context, port uint16) (since time.Time, err error) {
	for {
		d.mu.Lock()
		if d.enforced.next == nil {
			d.enforced.next = make(chan struct{})
		}
		now := d.enforced
		d.mu.Unlock()
		if now.ports[port] {
			return now.since, nil
		}
		select {
		case <-now.next:
		case <-ctx.Done():
			return since, ctx.Err()
		}
	}
}
