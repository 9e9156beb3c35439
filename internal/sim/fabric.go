package sim

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// fabric passes calls of nodes to the orchestrator's handler: complete HTTP requests and responses, but no HTTP/2, TLS
// or TCP. The context of a call carries the caller, as after a verified TLS handshake.
type fabric struct {
	// A unary call holds a slot until its response. Other calls wait: agents have no processors of their own here, and
	// thousands of runnable calls would delay the orchestrator's own work.
	slots chan struct{}

	mu       sync.RWMutex
	handler  http.Handler    // nil while no orchestrator runs
	callsCtx context.Context // parent of all calls in progress
	cut      context.CancelFunc
	calls    atomic.Int64 // calls so far
	missed   atomic.Int64 // calls while no orchestrator ran
}

var (
	errNoOrchestrator = errors.New("connection refused: no orchestrator runs")
	errCut            = errors.New("connection reset")
)

func newFabric() *fabric { return &fabric{slots: make(chan struct{}, 64)} }

// plug connects the fabric to an orchestrator.
func (f *fabric) plug(s *orchestrator.Server) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.handler = s.NodeHandler()
	f.callsCtx, f.cut = context.WithCancel(context.Background())
}

// unplug refuses new calls.
func (f *fabric) unplug() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.handler = nil
}

// cutAll aborts all calls in progress, as a short network failure does.
func (f *fabric) cutAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut()
	f.callsCtx, f.cut = context.WithCancel(context.Background())
}

// caller is the TLS identity of a node and its machine.
type caller struct {
	instance string
	state    tls.ConnectionState
	received atomic.Int64 // messages received on streams, without heartbeats
}

func newCaller(n pki.Node, instance string, now time.Time) *caller {
	return &caller{instance: instance, state: tls.ConnectionState{PeerCertificates: []*x509.Certificate{{
		Subject: pkix.Name{CommonName: n.Name}, URIs: []*url.URL{{Scheme: "urn", Opaque: "uuid:" + n.UUID}},
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(1, 0, 0),
	}}}}
}

type callerKey struct{}

// as sets the node as the caller. All nodes share one client; a real node's own client takes about 10 KiB.
func (n *node) as(ctx context.Context) context.Context {
	return context.WithValue(ctx, callerKey{}, n.caller)
}

// inTime sets the usual deadline of a unary call.
func inTime(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if _, ok := ctx.Deadline(); !ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, join.CallTimeout)
			defer cancel()
		}
		return next(ctx, req)
	}
}

// Do executes a call. A unary call runs in the goroutine of the caller.
func (f *fabric) Do(req *http.Request) (*http.Response, error) {
	who := req.Context().Value(callerKey{}).(*caller)
	f.mu.RLock()
	handler, callsCtx := f.handler, f.callsCtx
	f.mu.RUnlock()
	f.calls.Add(1)
	if handler == nil {
		f.missed.Add(1)
		return nil, errNoOrchestrator
	}
	ctx, cancel := context.WithCancel(callsCtx)
	stop := context.AfterFunc(req.Context(), cancel) // the client may end its stream
	r := (&http.Request{
		Method: req.Method, URL: req.URL, Host: req.Host, Header: req.Header, Body: req.Body,
		ContentLength: req.ContentLength,
		Proto:         "HTTP/2.0", ProtoMajor: 2, RemoteAddr: "[::1]:1", TLS: &who.state,
	}).WithContext(ctx)
	r.Header.Set(join.InstanceHeader, who.instance)
	end := func() { stop(); cancel() }
	if req.ContentLength >= 0 {
		defer end()
		select {
		case f.slots <- struct{}{}:
			defer func() { <-f.slots }()
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
		var a answer
		handler.ServeHTTP(&a, r)
		return a.response(req, io.NopCloser(&a.body)), nil
	}
	return stream(handler, req, r, end)
}

// stream starts a streaming call and returns when the response header is written.
func stream(handler http.Handler, req, r *http.Request, end func()) (*http.Response, error) {
	body := &request{ReadCloser: req.Body}
	s := &streamed{answer: answer{status: http.StatusOK}, pipe: newPipe(), request: body, begun: make(chan struct{})}
	r.Body = body
	go func() {
		defer end()
		handler.ServeHTTP(s, r)
		s.begin.Do(func() { close(s.begun) })
		s.pipe.End()
		body.Close() // the node sends nothing further
	}()
	select {
	case <-s.begun:
		return s.response(req, reading{s.pipe, end}), nil
	case <-r.Context().Done():
		end()
		if err := req.Context().Err(); err != nil {
			return nil, err
		}
		return nil, errCut
	}
}

// answer is the response of a unary call.
type answer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

func (a *answer) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(b)
}

func (a *answer) response(req *http.Request, body io.ReadCloser) *http.Response {
	a.WriteHeader(http.StatusOK)
	return &http.Response{
		Status: http.StatusText(a.status), StatusCode: a.status, Proto: "HTTP/2.0", ProtoMajor: 2,
		Header: a.Header(), Body: body, ContentLength: -1, Request: req,
	}
}

// streamed is the response of a stream.
type streamed struct {
	answer
	pipe    *pipe
	request *request
	begin   sync.Once
	begun   chan struct{} // closed when the response header is complete
}

func (s *streamed) WriteHeader(status int) {
	s.begin.Do(func() {
		s.status = status
		close(s.begun)
	})
}

func (s *streamed) Write(b []byte) (int, error) {
	s.WriteHeader(http.StatusOK)
	return s.pipe.Write(b)
}

func (s *streamed) Flush() {
	s.WriteHeader(http.StatusOK)
	s.pipe.Flush()
}

func (s *streamed) SetWriteDeadline(t time.Time) error {
	s.pipe.SetWriteDeadline(t)
	return nil
}

func (s *streamed) SetReadDeadline(t time.Time) error {
	s.request.setDeadline(t)
	return nil
}

// request is the request body of a stream: the read side of the client's pipe.
type request struct {
	io.ReadCloser
	mu    sync.Mutex
	timer *time.Timer
}

// setDeadline ends reads permanently at a time, as net/http does on HTTP/2; the zero time cancels a future deadline.
func (b *request) setDeadline(t time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
	late := func() { b.ReadCloser.(*io.PipeReader).CloseWithError(os.ErrDeadlineExceeded) }
	switch left := time.Until(t); {
	case t.IsZero():
	case left <= 0:
		late()
	default:
		b.timer = time.AfterFunc(left, late)
	}
}

// reading is the response body of a stream, for the node. Close ends the call.
type reading struct {
	*pipe
	end func()
}

func (r reading) Close() error {
	r.end()
	return r.pipe.Close()
}
