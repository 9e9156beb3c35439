package admission

import (
	"container/list"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// ConnLimiter counts connections and closes some beyond a limit. A connection counts as a stranger until a call on it
// has a valid node certificate. Strangers may have one eighth of all connections, so that seven eighths remain for
// nodes. Those of one source have a limit of their own, and those of one IPv6 address a quarter of it.
//
// Beyond a limit of strangers, a new connection replaces another one, so strangers keep no node out; see toReplace.
// Only a node certificate or a valid join token protects a connection from that. A call without either does not.
type ConnLimiter struct {
	limits  Limits
	refused func(limit string)
	log     *slog.Logger
	logRate rate.Sometimes // limits warnings
	now     func() time.Time
	random  func(n int) int // from 0 to n-1

	mu        sync.Mutex
	all       int
	strangers strangers
	sources   map[netip.Prefix]*strangers
	addresses map[netip.Addr]*strangers
	nodes     map[pki.Node]int
}

// strangers are the connections without a valid node certificate: all, those of a source, or those of an address.
type strangers struct {
	n           int
	replaceable list.List // of *limitedConn: those that sent no valid join token, the oldest first
}

const (
	// handshakeGrace is how long a connection may take for TLS handshake and first call before a connection of a client
	// that has as many may replace it.
	handshakeGrace = time.Second
	// fullChance is the reciprocal of the chance of a new connection that finds none to replace by fairness or age. The
	// others are refused: if all were admitted, many clients at once would end each other's handshakes.
	fullChance = 8
	// maxCompared is how many of the oldest connections the search compares.
	maxCompared = 256
)

func NewConnLimiter(l Limits, refused func(string), log *slog.Logger) *ConnLimiter {
	return &ConnLimiter{limits: l, refused: refused, log: log, logRate: rate.Sometimes{First: 1, Interval: time.Minute},
		now: time.Now, random: rand.IntN,
		sources: map[netip.Prefix]*strangers{}, addresses: map[netip.Addr]*strangers{}, nodes: map[pki.Node]int{}}
}

// limitedConn is an accepted connection.
type limitedConn struct {
	net.Conn
	limiter *ConnLimiter
	from    netip.Prefix
	address netip.Addr
	since   time.Time
	known   pki.Node // none while it is a stranger
	closed  bool

	groups [3]*strangers    // all, of its source and of its address; nil if it is no stranger
	places [3]*list.Element // in their lists; nil if no other connection may replace it
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
	groups := [3]*strangers{&l.strangers, group(l.sources, g.from), group(l.addresses, g.address)}
	g.groups = groups
	var full *strangers
	switch {
	case !g.from.IsSingleIP() && groups[2].n >= max(1, l.limits.Strangers/4):
		full = groups[2]
	case groups[1].n >= l.limits.Strangers:
		full = groups[1]
	case groups[0].n >= max(1, l.limits.Connections/8):
		full = groups[0]
	}
	if full != nil {
		if replaced = l.toReplace(full, g); replaced == nil {
			l.removeEmpty(g)
			return nil, LimitStrangers
		}
		replaced.end()
		// The replaced connection may have been the last of the group.
		g.groups = [3]*strangers{&l.strangers, group(l.sources, g.from), group(l.addresses, g.address)}
	}
	l.all++
	for i, s := range g.groups {
		s.n++
		g.places[i] = s.replaceable.PushBack(g)
	}
	return replaced, ""
}

func group[K comparable](groups map[K]*strangers, k K) *strangers {
	s := groups[k]
	if s == nil {
		s = &strangers{}
		groups[k] = s
	}
	return s
}

func (l *ConnLimiter) removeEmpty(g *limitedConn) {
	if s := l.sources[g.from]; s != nil && s.n == 0 {
		delete(l.sources, g.from)
	}
	if s := l.addresses[g.address]; s != nil && s.n == 0 {
		delete(l.addresses, g.address)
	}
}

// toReplace returns which of these connections the new one replaces:
//   - of a source, or of an address of the same source, that has more than the new one's: the oldest of the largest,
//     whatever its age. So a client with few connections gets in at once beside one with many.
//   - else the oldest, if it is older than handshakeGrace;
//   - else, with a chance of one in fullChance, a random one of those with as many. So a client gets in after some
//     tries, however many connections others open per second.
//
// It returns nil if there is none.
func (l *ConnLimiter) toReplace(in *strangers, g *limitedConn) *limitedConn {
	var largest *limitedConn
	var asLarge []*limitedConn
	compared := 0
	for e := in.replaceable.Front(); e != nil && compared < maxCompared; e = e.Next() {
		compared++
		c := e.Value.(*limitedConn)
		if c.shareExceeds(g, 1) && (largest == nil || c.shareExceeds(largest, 0)) {
			largest = c
		}
		if c.shareExceeds(g, -1) {
			asLarge = append(asLarge, c)
		}
	}
	if largest != nil || compared == 0 {
		return largest
	}
	oldest := in.replaceable.Front().Value.(*limitedConn)
	switch {
	case !oldest.since.After(g.since.Add(-handshakeGrace)):
		return oldest
	case len(asLarge) == 0 || l.random(fullChance) > 0:
		return nil
	}
	return asLarge[l.random(len(asLarge))]
}

// shareExceeds reports whether its source has over n more strangers than the other's; within one source, its address.
func (g *limitedConn) shareExceeds(other *limitedConn, n int) bool {
	i := 1
	if g.from == other.from {
		i = 2
	}
	return g.groups[i].n > other.groups[i].n+n
}

// protect prevents that another connection replaces this one. Calls inside the process have no connection (nil).
func (g *limitedConn) protect() {
	if g == nil {
		return
	}
	g.limiter.mu.Lock()
	defer g.limiter.mu.Unlock()
	g.leaveReplaceable()
}

// leaveReplaceable removes the connection from the lists of those that others may replace. The caller holds the lock.
func (g *limitedConn) leaveReplaceable() {
	for i, e := range g.places {
		if e != nil {
			g.groups[i].replaceable.Remove(e)
			g.places[i] = nil
		}
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
	g.leaveReplaceable()
	for i, s := range g.groups {
		s.n--
		g.groups[i] = nil
	}
	l.removeEmpty(g)
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
	return l.all, l.strangers.n, len(l.sources)
}
