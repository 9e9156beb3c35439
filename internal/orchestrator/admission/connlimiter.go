package admission

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// ConnLimiter counts connections and closes new ones beyond a limit. A connection counts as a stranger until a call on
// it has a valid node certificate. Strangers may have one eighth of all connections, so that seven eighths remain for
// nodes.
type ConnLimiter struct {
	limits  Limits
	refused func(limit string)
	log     *slog.Logger
	logRate rate.Sometimes // limits warnings

	mu        sync.Mutex
	all       int
	strangers int
	sources   map[netip.Prefix]int // of strangers
	nodes     map[pki.Node]int
}

func NewConnLimiter(l Limits, refused func(string), log *slog.Logger) *ConnLimiter {
	return &ConnLimiter{limits: l, refused: refused, log: log, logRate: rate.Sometimes{First: 1, Interval: time.Minute},
		sources: map[netip.Prefix]int{}, nodes: map[pki.Node]int{}}
}

// limitedConn is an accepted connection.
type limitedConn struct {
	net.Conn
	limiter *ConnLimiter
	from    netip.Prefix
	known   pki.Node // none while it is a stranger
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

func (l *ConnLimiter) admit(c net.Conn) (_ *limitedConn, limit string) {
	g := &limitedConn{Conn: c, limiter: l, from: source(c.RemoteAddr().String())}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.all >= l.limits.Connections:
		return nil, LimitConnections
	case l.strangers >= max(1, l.limits.Connections/8), l.sources[g.from] >= l.limits.Strangers:
		return nil, LimitStrangers
	}
	l.all++
	l.strangers++
	l.sources[g.from]++
	return g, ""
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
	l.strangers--
	decrement(l.sources, g.from)
}

func decrement[K comparable](count map[K]int, k K) {
	if count[k]--; count[k] == 0 {
		delete(count, k)
	}
}

func (g *limitedConn) Close() error {
	l := g.limiter
	l.mu.Lock()
	if !g.closed {
		g.closed = true
		l.all--
		l.uncount(g)
	}
	l.mu.Unlock()
	return g.Conn.Close()
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
