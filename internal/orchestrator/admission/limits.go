package admission

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

// Limits are the limits for clients that an operator can set. Zero means the default.
type Limits struct {
	Connections int // of nodes and strangers together
	Strangers   int // connections of one source without a verified node certificate
	Joins       int // attempts of one source to join, per second; the burst is ten times the rate
	Lists       int // queries for mappings of one tenant, per second; 0 means no limit
	Apps        int // of one tenant
}

// DefaultLimits suit 100,000 nodes, each with one connection and a second one that replaces it.
var DefaultLimits = Limits{Connections: 200_000, Strangers: 256, Joins: 100, Apps: store.MaxApps}

// WithDefaults replaces zeros by the defaults.
func (l Limits) WithDefaults() Limits {
	return Limits{
		Connections: cmp.Or(l.Connections, DefaultLimits.Connections),
		Strangers:   cmp.Or(l.Strangers, DefaultLimits.Strangers),
		Joins:       cmp.Or(l.Joins, DefaultLimits.Joins),
		Lists:       l.Lists,
		Apps:        cmp.Or(l.Apps, DefaultLimits.Apps),
	}
}

// WithinFiles reduces Connections to the open-file limit of the process, minus one eighth for the store and the rest.
func (l Limits) WithinFiles() (Limits, error) {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return l, err
	}
	if room := files.Cur - files.Cur/8; room < uint64(l.Connections) {
		l.Connections = int(room)
	}
	return l, nil
}

// CallTimeout is the time limit of every call that is not a stream.
const CallTimeout = 10 * time.Second

const (
	MaxNodeConnections = 16       // of one node; it needs two while it renews its certificate
	MaxHeader          = 32 << 10 // bytes
	MaxAnswer          = 64 << 20 // bytes of one message to a node
	MinCompressed      = 1 << 10  // bytes; most messages are smaller, and compressing them would not pay
)

// Allowance limits one caller of a procedure. A caller is a node, or the source address of a client without a
// certificate.
type Allowance struct {
	AtOnce int   // calls or streams
	Bytes  int64 // of a request, or of each message of a stream
	Rate   int   // calls per second, the burst is ten times the rate; 0 for Join: see Limits
}

// Allowances suffice for a node that hosts 65,535 tenants, that resolves what all its containers need at once after a
// restart, and that registers once for every 2,048 addresses it holds. Agents back off before they register and follow
// again.
var Allowances = map[string]Allowance{
	pilasterv1connect.NodeServiceJoinProcedure:         {64, 64 << 10, 0}, // a request has about 500 bytes
	pilasterv1connect.NodeServiceRenewProcedure:        {4, 64 << 10, 5},
	pilasterv1connect.NodeServiceRegisterProcedure:     {4, 8 << 20, 10},
	pilasterv1connect.NodeServiceResolveProcedure:      {256, 64 << 10, 500},
	pilasterv1connect.NodeServiceFollowProcedure:       {4, 16 << 20, 5},
	pilasterv1connect.NodeServiceAllocateProcedure:     {256, 64 << 10, 500},
	pilasterv1connect.NodeServiceFreeProcedure:         {256, 64 << 10, 500},
	pilasterv1connect.NodeServiceListMappingsProcedure: {16, 64 << 10, 500},
	pilasterv1connect.NodeServiceReportLoadProcedure:   {4, 8 << 20, 10},
	pilasterv1connect.NodeServicePutEndpointsProcedure: {16, 2 << 20, 100},
}

// Each new stream starts with a change of the store. At most beginningAtOnce start at a time, which is enough to keep
// the store busy: with thousands, the store's own work would wait for a processor. The other streams wait in order of
// arrival: waiting costs less than a refusal, after which the node registers and connects again.
const (
	beginningAtOnce = 256
	beginWait       = 30 * time.Second
)

// MessageRate is how many messages per second a node may send on its streams; the burst is ten times the rate. The
// server delays reading further messages.
const MessageRate = 100

// Labels of the counter of refusals, one per limit.
const (
	LimitConnections     = "connections"
	LimitStrangers       = "strangers"
	LimitNodeConnections = "node-connections"
	limitAtOnce          = "calls"
	LimitJoins           = "joins"
	LimitRate            = "rate"
	LimitRequest         = "request-size"
	LimitAnswer          = "answer-size"
	LimitCompressed      = "compressed"
	LimitLists           = "list-rate"
	limitBeginning       = "beginning"
)

// LimitWords are all labels.
var LimitWords = []string{
	LimitConnections,
	LimitStrangers,
	LimitNodeConnections,
	limitAtOnce,
	LimitJoins,
	LimitRate,
	LimitRequest,
	LimitAnswer,
	LimitCompressed,
	LimitLists,
	limitBeginning,
}

// CallLimiter refuses calls beyond the allowance of their caller before it reads the request.
type CallLimiter struct {
	rates    map[string]*Rates[client] // by procedure
	messages *Rates[client]
	refused  func(limit string)

	beginning chan struct{} // one token per stream that starts
	stopping  chan struct{} // closed when no more streams may start
	stopOnce  sync.Once

	mu      sync.Mutex
	running map[call]int
}

// call is a procedure and its caller.
type call struct {
	procedure string
	by        client
}

// client is a node, from whichever address it calls, or the source of a stranger.
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

// ListRates limits queries for mappings per tenant; nil if there is no limit.
func ListRates(l Limits) *Rates[string] {
	if l.Lists == 0 {
		return nil
	}
	return newRates[string](l.Lists, l.Lists)
}

func NewCallLimiter(l Limits, refused func(string)) *CallLimiter {
	g := &CallLimiter{
		rates:     map[string]*Rates[client]{},
		messages:  newRates[client](MessageRate, 10*MessageRate),
		refused:   refused,
		beginning: make(chan struct{}, beginningAtOnce),
		stopping:  make(chan struct{}),
		running:   map[call]int{},
	}
	for procedure, may := range Allowances {
		g.rates[procedure] = newRates[client](cmp.Or(may.Rate, l.Joins), 10*cmp.Or(may.Rate, l.Joins))
	}
	return g
}

// admit counts the call as running until done is called.
func (g *CallLimiter) admit(r *http.Request, by client) (done func(), err error) {
	may, ok := Allowances[r.URL.Path]
	if !ok {
		return func() {}, nil // its handler returns at once, without reading the body
	}
	// A few compressed bytes may expand to very many.
	for _, header := range []string{"Content-Encoding", "Connect-Content-Encoding", "Grpc-Encoding"} {
		if e := r.Header.Get(header); e != "" && e != "identity" {
			return nil, g.Refuse(
				LimitCompressed,
				connect.CodeUnimplemented,
				"compressed requests are not accepted (%s: %s); nothing was changed: send it uncompressed",
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
	if g.running[c] >= may.AtOnce {
		return nil, g.Refuse(
			limitAtOnce,
			connect.CodeUnavailable,
			"%v has %d calls of %s in progress, which is the maximum; nothing was changed: try again when one has "+
				"ended",
			by,
			may.AtOnce,
			c.procedure,
		)
	}
	g.running[c]++
	return func() { g.end(c) }, nil
}

// Stop prevents further streams from starting.
func (g *CallLimiter) Stop() { g.stopOnce.Do(func() { close(g.stopping) }) }

// Begin waits until the stream may start, and occupies a slot until begun is called.
func (g *CallLimiter) Begin(ctx context.Context) (begun func(), err error) {
	timer := time.NewTimer(beginWait)
	defer timer.Stop()
	select {
	case g.beginning <- struct{}{}:
		return sync.OnceFunc(func() { <-g.beginning }), nil
	case <-g.stopping:
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("the orchestrator is stopping"))
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-timer.C:
		return nil, g.Refuse(
			limitBeginning,
			connect.CodeUnavailable,
			"too many streams of nodes are starting; nothing was changed: try again",
		)
	}
}

// checkRate refuses a caller beyond its rate.
func (g *CallLimiter) checkRate(r *http.Request, by client) error {
	calls := g.rates[r.URL.Path]
	if r.URL.Path == pilasterv1connect.NodeServiceJoinProcedure {
		if from, _ := source(r.RemoteAddr); !calls.Allow(client{from: from}) {
			return g.Refuse(
				LimitJoins,
				connect.CodeUnavailable,
				"%v tries to join more than %d times a second; nothing was changed: try again in a few seconds, or "+
					"raise the orchestrator's --max-joins",
				from,
				calls.PerSecond,
			)
		}
	} else if !calls.Allow(by) {
		return g.Refuse(LimitRate, connect.CodeUnavailable, "%v calls %s more than %d times a second; nothing was "+
			"changed: try again in a few seconds, or find out what uses its certificate",
			by, r.URL.Path, calls.PerSecond)
	}
	return nil
}

func (g *CallLimiter) end(c call) {
	g.mu.Lock()
	defer g.mu.Unlock()
	decrement(g.running, c)
}

// Refuse counts a refusal and returns its error.
func (g *CallLimiter) Refuse(limit string, code connect.Code, format string, args ...any) error {
	g.refused(limit)
	return connect.NewError(code, fmt.Errorf(format, args...))
}

// body limits the bytes read of a call, or of each message of a stream: next starts a new message.
type body struct {
	io.ReadCloser
	limiter   *CallLimiter
	by        client
	max, left int64
}

func (g *CallLimiter) limitBody(r *http.Request, by client) *body {
	// Framing adds up to five bytes to a message.
	max := Allowances[r.URL.Path].Bytes + 5
	return &body{r.Body, g, by, max, max}
}

func (b *body) Read(p []byte) (int, error) {
	if b.left == 0 && len(p) > 0 {
		// This may be the end of the body.
		n, err := b.ReadCloser.Read(make([]byte, 1))
		if n > 0 {
			err = b.limiter.Refuse(
				LimitRequest,
				connect.CodeResourceExhausted,
				"this request is longer than the maximum of %d bytes; nothing was changed: host fewer tenants on the "+
					"node, or find out what it runs",
				b.max-5,
			)
		}
		return 0, err
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// next allows one more message of the stream, and waits while the node exceeds its message rate.
func (b *body) next(ctx context.Context) error {
	b.left = b.max
	return b.limiter.messages.of(b.by).Wait(ctx)
}

// NextMessage allows one more message of the call's stream; see body.next.
func NextMessage(ctx context.Context) error {
	if b, ok := ctx.Value(bodyKey).(*body); ok {
		return b.next(ctx)
	}
	return nil
}

// Running is the number of calls and streams that are in progress.
func (g *CallLimiter) Running() (sum int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, n := range g.running {
		sum += n
	}
	return sum
}
