package sim

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/plot"
)

// Propagation is how soon repeated changes of one tenant are in force, and what they cost. Times are from the beginning
// of a change until packet paths have it. Messages are those that nodes received on their streams, without heartbeats.
type Propagation struct {
	Changes   int          `json:"changes"`
	PerSecond float64      `json:"perSecond"`        // changes that began, without the time in which garbage was collected
	Hosts     int          `json:"hosts"`            // nodes that host the tenant
	Node      Quantiles    `json:"nodeMilliseconds"` // until a hosting node has a change, over all nodes
	Last      Quantiles    `json:"lastMilliseconds"` // until the last hosting node has a change, over all changes
	OnNode    [][2]float64 `json:"onNode"`           // distribution of Node: milliseconds, and percent that took no longer
	OnLast    [][2]float64 `json:"onLast"`           // the same of Last
	Least     int64        `json:"leastMessages"`    // to one hosting node
	Most      int64        `json:"mostMessages"`
	Others    int          `json:"others"`         // nodes that do not host the tenant
	ToOthers  int64        `json:"othersMessages"` // to all of these together

	of *changeKind
}

// changeKind describes what changes.
type changeKind struct {
	of    string // what changes, such as "a policy"
	since string // when a change begins
	// last returns what the limit of the event applies to, of the times until the last node has a change, and in how
	// many cases it took no longer.
	last func(Quantiles) (milliseconds float64, cases string)
}

var (
	policyChanges = &changeKind{"a policy", "the operator's call", func(q Quantiles) (float64, string) {
		return q.Median, "half of the"
	}}
	endpointChanges = &changeKind{"endpoints", "the container's change", func(q Quantiles) (float64, string) {
		return q.P99, "99 of 100"
	}}
)

// changes measures changes while they happen. Its methods are safe for concurrent use.
type changes struct {
	of         *changeKind
	hosts      map[*node]bool
	received   map[*node]int64 // messages before the first change
	each, last latencies
	live       uint64 // bytes of the heap after the last collection

	mu           sync.Mutex
	began, count int
	first, late  time.Time     // when the first change began, and the last one
	collecting   time.Duration // time for garbage, in which no change began
}

// beginChanges begins the measurement of changes of a tenant.
func (w *world) beginChanges(of *changeKind, tenant string) *changes {
	c := &changes{of: of, hosts: w.hosting(tenant), received: map[*node]int64{}, live: inUse()}
	for _, n := range w.nodes {
		c.received[n] = n.caller.received.Load()
	}
	w.stage.changes = c
	return c
}

// collect collects garbage while nothing is measured: all nodes share one heap, and a collection would delay them.
func (c *changes) collect() {
	began := time.Now()
	runtime.GC()
	c.live = inUse()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.collecting += time.Since(began)
}

// collectIfDue collects garbage if there is so much that a collection would soon start during a change.
func (c *changes) collectIfDue() {
	if inUse() > c.live/2*3 {
		c.collect()
	}
}

// begin notes the beginning of a change, and returns its time.
func (c *changes) begin() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.late = time.Now()
	if c.began++; c.began == 1 {
		c.first = c.late
	}
	return c.late
}

// done notes that a change is in force on all nodes, and how long the last one took.
func (c *changes) done(last time.Duration) {
	c.last.note(last)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count++
}

// propagation computes the results after the last message was sent.
func (c *changes) propagation() *Propagation {
	p := &Propagation{
		of: c.of, Changes: c.count, Hosts: len(c.hosts), Others: len(c.received) - len(c.hosts), Least: -1,
	}
	if long := c.late.Sub(c.first) - c.collecting; long > 0 {
		p.PerSecond = float64(c.began-1) / long.Seconds()
	}
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
func (p *Propagation) violated() []string {
	if p == nil || p.ToOthers == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%d messages went to %d nodes that do not host the tenant with changes of %s",
		p.ToOthers, p.Others, p.of.of)}
}

// exceeded returns the exceeded limits. The 99th percentile of the time until a hosting node has a change must be at
// most within, and so must the time until the last one has it: the median for policies, the 99th percentile for
// endpoints. Each change may cost one message for each node that hosts the tenant. sent is the orchestrator's count,
// which includes messages that no node has read.
func (p *Propagation) exceeded(within time.Duration, sent int64) (all []string) {
	if within > 0 && p.Node.P99 > milliseconds(within) {
		all = append(all, fmt.Sprintf(
			"a change was in force on a node within %.0f ms in 99 of 100 cases; the limit is %v", p.Node.P99, within))
	}
	if last, cases := p.of.last(p.Last); within > 0 && last > milliseconds(within) {
		all = append(all, fmt.Sprintf(
			"a change was in force on the last node within %.0f ms in %s cases; the limit is %v", last, cases, within))
	}
	if most := int64(p.Changes); p.Most > most || sent > most*int64(p.Hosts) {
		all = append(all, fmt.Sprintf("%d changes cost %d messages, up to %d to a node; %d nodes host the tenant, and "+
			"one message for each change is enough", p.Changes, sent, p.Most, p.Hosts))
	}
	return all
}

func (p *Propagation) text(w io.Writer) {
	if p == nil {
		return
	}
	fmt.Fprintf(w, "  a change of %s was in a node's packet path after %s by half, %s by 99 of 100 and %s at most, on "+
		"the last of %d nodes after %s, %s and %s\n", p.of.of, p.Node.text(p.Node.Median), p.Node.text(p.Node.P99),
		p.Node.text(p.Node.Max), p.Hosts, p.Last.text(p.Last.Median), p.Last.text(p.Last.P99), p.Last.text(p.Last.Max))
	fmt.Fprintf(w, "  messages for %d changes, %.1f a second: %d to %d to each of these nodes, %d to the %d others "+
		"together\n", p.Changes, p.PerSecond, p.Least, p.Most, p.ToOthers, p.Others)
}

// about describes the changes in one sentence.
func (p *Propagation) about() string {
	return fmt.Sprintf(" There were %d changes of %s: %d nodes that host the tenant received %d to %d messages each, "+
		"and the %d others %d in total.", p.Changes, p.of.of, p.Hosts, p.Least, p.Most, p.Others, p.ToOthers)
}

// lines plots how soon changes were in force.
func (p *Propagation) lines() *plot.Lines {
	return plot.NewLines("", plot.Plot{
		Title: "changes of " + p.of.of + " that are in force",
		X:     "milliseconds since " + p.of.since,
		Y:     "percent",
		Lines: []plot.Line{{Name: "on a node", Points: p.OnNode}, {Name: "on the last node", Points: p.OnLast}},
	})
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
