package orchestrator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// Limits are what an operator may set of what clients may take. Zero means the default.
type Limits struct {
	Connections int // of nodes and strangers together
	Strangers   int // connections of one source that have not shown a node's certificate
	Joins       int // tries of one source to join, a second; ten times as many at once
	Lists       int // queries for mappings of one tenant, a second; 0 means any number
	Apps        int // of one tenant
}

// DefaultLimits suit 100,000 nodes, each with the connection it has and one that replaces it.
var DefaultLimits = Limits{Connections: 200_000, Strangers: 256, Joins: 100, Apps: store.MaxApps}

func (l Limits) orDefault() Limits {
	return Limits{
		Connections: cmp.Or(l.Connections, DefaultLimits.Connections),
		Strangers:   cmp.Or(l.Strangers, DefaultLimits.Strangers),
		Joins:       cmp.Or(l.Joins, DefaultLimits.Joins),
		Lists:       l.Lists,
		Apps:        cmp.Or(l.Apps, DefaultLimits.Apps),
	}
}

// withinFiles leaves an eighth of the files this process may open to the store and the rest.
func (l Limits) withinFiles() (Limits, error) {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return l, err
	}
	if room := files.Cur - files.Cur/8; room < uint64(l.Connections) {
		l.Connections = int(room)
	}
	return l, nil
}

const (
	maxNodeConnections = 16       // of one node; it needs two while its certificate is renewed
	maxHeader          = 32 << 10 // bytes
	maxAnswer          = 64 << 20 // bytes of one message to a node
	minCompressed      = 1 << 10  // bytes of one: most are so small that compressed they would be longer, and take 20 µs more
)

// allowance is what one caller may have of a procedure: a node, or the source of who has no certificate.
type allowance struct {
	atOnce int   // calls or streams
	bytes  int64 // of a request, or of each message of a stream
	rate   int   // calls a second, ten times as many in a burst; 0 of Joins: Limits have it
}

// allowances have room for a node that hosts 65,535 tenants, and after a restart asks for what all its containers need
// at once, and registers once for every 2,048 addresses it holds. Agents register and follow again with growing pauses.
var allowances = map[string]allowance{
	pilasterv1connect.NodeServiceJoinProcedure:         {64, 64 << 10, 0}, // has about 500 bytes
	pilasterv1connect.NodeServiceRenewProcedure:        {4, 64 << 10, 5},
	pilasterv1connect.NodeServiceRegisterProcedure:     {4, 8 << 20, 10},
	pilasterv1connect.NodeServiceResolveProcedure:      {256, 64 << 10, 500},
	pilasterv1connect.NodeServiceFollowProcedure:       {4, 16 << 20, 5},
	pilasterv1connect.NodeServiceAllocateProcedure:     {256, 64 << 10, 500},
	pilasterv1connect.NodeServiceFreeProcedure:         {256, 64 << 10, 500},
	pilasterv1connect.NodeServiceListMappingsProcedure: {16, 64 << 10, 500},
}

// Streams begin by a change of the store each. So many do at once, which is enough to keep the store busy: with
// thousands, what the store itself runs would wait behind them for a processor. The others wait for their turn, in the
// order in which they came: one that waits costs what it will cost once it has begun, and one that is sent away costs a
// registration and a stream more.
const (
	beginningAtOnce = 256
	beginWait       = 30 * time.Second
)

// messageRate is how many messages of its streams a node is heard a second, ten times as many in a burst; the rest
// waits.
const messageRate = 100

// Words for the counter of refusals, one a limit.
const (
	limitConnections     = "connections"
	limitStrangers       = "strangers"
	limitNodeConnections = "node-connections"
	limitAtOnce          = "calls"
	limitJoins           = "joins"
	limitRate            = "rate"
	limitRequest         = "request-size"
	limitAnswer          = "answer-size"
	limitCompressed      = "compressed"
	limitLists           = "list-rate"
	limitBeginning       = "beginning"
)

var limitWords = []string{
	limitConnections,
	limitStrangers,
	limitNodeConnections,
	limitAtOnce,
	limitJoins,
	limitRate,
	limitRequest,
	limitAnswer,
	limitCompressed,
	limitLists,
	limitBeginning,
}

// limiter refuses calls for which their caller has no allowance left, before anything of them is read.
type callLimiter struct {
	rates    map[string]*rates[client] // by procedure
	messages *rates[client]
	refused  func(limit string)

	beginning chan struct{} // has a place for each stream that begins
	stopping  chan struct{} // closed when none begins any more
	stopOnce  sync.Once

	mu      sync.Mutex
	running map[call]int
}

// call is a procedure and who makes it.
type call struct {
	procedure string
	by        client
}

// client is a node wherever it calls from, or the source of a stranger.
type client struct {
	node pki.Node
	from netip.Prefix
}

func (c client) String() string {
	if c.node != (pki.Node{}) {
		return "node " + c.node.Name
	}
	return c.from.String()
}

// listRates bounds how often nodes ask for a tenant's mappings, if anything does.
func listRates(l Limits) *rates[string] {
	if l.Lists == 0 {
		return nil
	}
	return newRates[string](l.Lists, l.Lists)
}

func newCallLimiter(l Limits, refused func(string)) *callLimiter {
	g := &callLimiter{
		rates:     map[string]*rates[client]{},
		messages:  newRates[client](messageRate, 10*messageRate),
		refused:   refused,
		beginning: make(chan struct{}, beginningAtOnce),
		stopping:  make(chan struct{}),
		running:   map[call]int{},
	}
	for procedure, may := range allowances {
		g.rates[procedure] = newRates[client](cmp.Or(may.rate, l.Joins), 10*cmp.Or(may.rate, l.Joins))
	}
	return g
}

// admit takes a place for the call until done.
func (g *callLimiter) admit(r *http.Request, by client) (done func(), err error) {
	may, ok := allowances[r.URL.Path]
	if !ok {
		return func() {}, nil // answered at once, and the body is not read
	}
	// A few bytes may become very many.
	for _, header := range []string{"Content-Encoding", "Connect-Content-Encoding", "Grpc-Encoding"} {
		if e := r.Header.Get(header); e != "" && e != "identity" {
			return nil, g.refuse(
				limitCompressed,
				connect.CodeUnimplemented,
				"requests are not taken compressed (%s: %s); nothing was changed: send it as it is",
				header,
				e,
			)
		}
	}
	if err := g.checkRate(r, by); err != nil {
		return nil, err
	}
	c := call{r.URL.Path, by}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.running[c] >= may.atOnce {
		return nil, g.refuse(
			limitAtOnce,
			connect.CodeUnavailable,
			"%v has %d calls of %s going on, as many as it may; nothing was changed: try again when one has ended",
			by,
			may.atOnce,
			c.procedure,
		)
	}
	g.running[c]++
	return func() { g.end(c) }, nil
}

// stop has no stream begin any more.
func (g *callLimiter) stop() { g.stopOnce.Do(func() { close(g.stopping) }) }

// begin waits for a place for a stream that begins, and has it until it has begun.
func (g *callLimiter) begin(ctx context.Context) (begun func(), err error) {
	timer := time.NewTimer(beginWait)
	defer timer.Stop()
	select {
	case g.beginning <- struct{}{}:
		return sync.OnceFunc(func() { <-g.beginning }), nil
	case <-g.stopping:
		return nil, connect.NewError(connect.CodeUnavailable, errors.New(isStopping))
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-timer.C:
		return nil, g.refuse(
			limitBeginning,
			connect.CodeUnavailable,
			"too many nodes begin to follow at this moment; nothing was changed: try again",
		)
	}
}

// checkRate refuses who calls too often.
func (g *callLimiter) checkRate(r *http.Request, by client) error {
	calls := g.rates[r.URL.Path]
	if r.URL.Path == pilasterv1connect.NodeServiceJoinProcedure {
		if from := source(r.RemoteAddr); !calls.allow(client{from: from}) {
			return g.refuse(
				limitJoins,
				connect.CodeUnavailable,
				"%v tries to join more than %d times a second; nothing was changed: try again in a few seconds, or allow more with the orchestrator's --max-joins",
				from,
				calls.rate,
			)
		}
	} else if !calls.allow(by) {
		return g.refuse(limitRate, connect.CodeUnavailable, "%v calls %s more than %d times a second; nothing was changed: try again in a few seconds, or see what runs with its certificate",
			by, r.URL.Path, calls.rate)
	}
	return nil
}

func (g *callLimiter) end(c call) {
	g.mu.Lock()
	defer g.mu.Unlock()
	decrement(g.running, c)
}

func (g *callLimiter) refuse(limit string, code connect.Code, format string, args ...any) error {
	g.refused(limit)
	return connect.NewError(code, fmt.Errorf(format, args...))
}

// body bounds what is read of a call between two calls of next: all of it, or a message of a stream.
type body struct {
	io.ReadCloser
	limiter   *callLimiter
	by        client
	max, left int64
}

func (g *callLimiter) limitBody(r *http.Request, by client) *body {
	// A message comes with up to five bytes of framing.
	max := allowances[r.URL.Path].bytes + 5
	return &body{r.Body, g, by, max, max}
}

func (b *body) Read(p []byte) (int, error) {
	if b.left == 0 && len(p) > 0 {
		// It may be the end.
		n, err := b.ReadCloser.Read(make([]byte, 1))
		if n > 0 {
			err = b.limiter.refuse(
				limitRequest,
				connect.CodeResourceExhausted,
				"a request of this kind may have %d bytes, and this one has more; nothing was changed: have the node host fewer tenants, or see what it runs",
				b.max-5,
			)
		}
		return 0, err
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// next lets a stream have another message, as long as the one before, when its node has not had too many.
func (b *body) next(ctx context.Context) error {
	b.left = b.max
	return b.limiter.messages.of(b.by).Wait(ctx)
}

func nextMessage(ctx context.Context) error {
	if b, ok := ctx.Value(bodyKey).(*body); ok {
		return b.next(ctx)
	}
	return nil
}
