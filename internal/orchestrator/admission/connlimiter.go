package admission

import (
	"container/list"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// ConnLimiter counts connections and closes some beyond a limit. A connection counts as a stranger until a call on it
// has a valid node certificate. Strangers may have one eighth of all connections, so that seven eighths remain for
// nodes. Those of one source have a limit of their own, and those of one IPv6 address a quarter of it.
//
// Beyond a limit of strangers, the oldest connection without a call is closed for the new one, so idle connections keep
// no node out. A connection with a call, or younger than handshakeGrace, is never closed for another one.
type ConnLimiter struct {
	limits  Limits
	refused func(limit string)
	log     *slog.Logger
	logRate rate.Sometimes // limits warnings
	now     func() time.Time

	mu        sync.Mutex
	all       int
	strangers int
	sources   map[netip.Prefix]int // of strangers
	addresses map[netip.Addr]int   // of strangers
	silent    list.List            // of *limitedConn: strangers without a call until now, the oldest first
	nodes     map[pki.Node]int
}

// handshakeGrace is how long a connection may take for TLS handshake and first call before another one may replace it.
const handshakeGrace = time.Second

func NewConnLimiter(l Limits, refused func(string), log *slog.Logger) *ConnLimiter {
	return &ConnLimiter{limits: l, refused: refused, log: log, logRate: rate.Sometimes{First: 1, Interval: time.Minute},
		now:     time.Now,
		sources: map[netip.Prefix]int{}, addresses: map[netip.Addr]int{}, nodes: map[pki.Node]int{}}
}

// limitedConn is an accepted connection.
type limitedConn struct {
	net.Conn
	limiter *ConnLimiter
	from    netip.Prefix
	address netip.Addr
	since   time.Time
	active  atomic.Bool   // it has had a call
	silent  *list.Element // nil after the first call
	known   pki.Node      // none while it is a stranger
	closed  bool
}

// LimitedListener accepts connections within the limits of a ConnLimiter.
type LimitedListener struct {
	net.Listener
	Limiter *ConnLimiter
}

func (l LimitedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if g, limit := l.Limiter.admit(c); limit == "" {
			return g, nil
		} else {
			l.Limiter.refuse(c, limit)
		}
	}
}

// refuse closes a connection. It cannot send a reason: TLS has not started.
func (l *ConnLimiter) refuse(c net.Conn, limit string) {
	l.refused(limit)
	c.Close()
	l.logRate.Do(func() {
		l.log.Warn(
			"connections are refused; --max-connections and --max-strangers allow more",
			"limit",
			limit,
			"last_from",
			c.RemoteAddr(),
		)
	})
}

// admit counts a new connection, and closes an older one if it must.
func (l *ConnLimiter) admit(c net.Conn) (_ *limitedConn, limit string) {
	g := &limitedConn{Conn: c, limiter: l, since: l.now()}
	g.from, g.address = source(c.RemoteAddr().String())
	replaced, limit := l.count(g)
	if limit != "" {
		return nil, limit
	}
	if replaced != nil {
		l.refuse(replaced, LimitStrangers)
	}
	return g, ""
}

// count returns the connection that the caller must close for the new one, or the limit that refuses the new one.
func (l *ConnLimiter) count(g *limitedConn) (replaced *limitedConn, limit string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all >= l.limits.Connections {
		return nil, LimitConnections
	}
	var makesRoom func(*limitedConn) bool // if it is closed; nil: there is room
	switch {
	case !g.from.IsSingleIP() && l.addresses[g.address] >= max(1, l.limits.Strangers/4):
		makesRoom = func(c *limitedConn) bool { return c.address == g.address }
	case l.sources[g.from] >= l.limits.Strangers:
		makesRoom = func(c *limitedConn) bool { return c.from == g.from }
	case l.strangers >= max(1, l.limits.Connections/8):
		makesRoom = func(*limitedConn) bool { return true }
	}
	if makesRoom != nil {
		if replaced = l.oldestSilent(g.since.Add(-handshakeGrace), makesRoom); replaced == nil {
			return nil, LimitStrangers
		}
		replaced.end()
	}
	l.all++
	l.strangers++
	l.sources[g.from]++
	l.addresses[g.address]++
	g.silent = l.silent.PushBack(g)
	return replaced, ""
}

// oldestSilent returns the oldest of these connections that was accepted before that time and has had no call.
func (l *ConnLimiter) oldestSilent(before time.Time, which func(*limitedConn) bool) *limitedConn {
	for e := l.silent.Front(); e != nil; e = e.Next() {
		c := e.Value.(*limitedConn)
		if c.since.After(before) {
			return nil
		}
		if which(c) {
			return c
		}
	}
	return nil
}

// called records that the connection has had a call. From then on it is closed for no other one. Calls inside the
// process have no connection (nil).
func (g *limitedConn) called() {
	if g == nil || g.active.Swap(true) {
		return
	}
	g.limiter.mu.Lock()
	defer g.limiter.mu.Unlock()
	g.leaveSilent()
}

// leaveSilent removes the connection from the list of those without a call. The caller holds the lock.
func (g *limitedConn) leaveSilent() {
	if g.silent != nil {
		g.limiter.silent.Remove(g.silent)
		g.silent = nil
	}
}

// identify counts the connection as one of a node, unless the node already has its maximum. Calls inside the process
// have no connection (nil).
func (g *limitedConn) identify(n pki.Node) error {
	if g == nil {
		return nil
	}
	l := g.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	if g.closed || g.known == n {
		return nil
	}
	if l.nodes[n] >= MaxNodeConnections {
		l.refused(LimitNodeConnections)
		return connect.NewError(
			connect.CodeUnavailable,
			fmt.Errorf(
				"node %s has %d connections, which is the maximum, so this one is closed; nothing was changed: find "+
					"out what else uses this node's certificate",
				n.Name,
				MaxNodeConnections,
			),
		)
	}
	l.uncount(g)
	g.known = n
	l.nodes[n]++
	return nil
}

// uncount removes the connection from the counter that it is in.
func (l *ConnLimiter) uncount(g *limitedConn) {
	if g.known != (pki.Node{}) {
		decrement(l.nodes, g.known)
		return
	}
	g.leaveSilent()
	l.strangers--
	decrement(l.sources, g.from)
	decrement(l.addresses, g.address)
}

func decrement[K comparable](count map[K]int, k K) {
	if count[k]--; count[k] == 0 {
		delete(count, k)
	}
}

func (g *limitedConn) Close() error {
	g.limiter.mu.Lock()
	g.end()
	g.limiter.mu.Unlock()
	return g.Conn.Close()
}

// end stops counting the connection. The caller holds the lock.
func (g *limitedConn) end() {
	if g.closed {
		return
	}
	g.closed = true
	g.limiter.all--
	g.limiter.uncount(g)
}

// WithConn is for http.Server.ConnContext.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return context.WithValue(ctx, connKey, c)
}

// connOf returns the connection of a call, nil if there is none.
func connOf(ctx context.Context) *limitedConn {
	g, _ := ctx.Value(connKey).(*limitedConn)
	return g
}

// Counts are the open connections, those of them without a verified node certificate, and the sources of the latter.
func (l *ConnLimiter) Counts() (all, strangers, sources int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all, l.strangers, len(l.sources)
}
