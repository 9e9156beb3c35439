package join

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// Config says who joins what.
type Config struct {
	URL      string // of the orchestrator: https://host:port
	Token    string // text of the join token; may be empty once the node has joined
	StateDir string // where the certificate is kept, in a file of mode 0600
	NodeName string
	NodeUUID string // lower-case, with dashes
	// of the calling machine, which tells it from one with a copy of its disk; empty means a new one
	Instance string
	Heard    func(procedure string, message any) // called with each message of the orchestrator's; nil for none
	Log      *slog.Logger

	Now func() time.Time // nil means time.Now
}

// Client calls the orchestrator as this node. A call without a deadline gets one of 10 s;
// streams have none and end when the peer has been silent for 20 s. A call, not a stream, that is refused
// because of the node's certificate gets a new one and is made again.
type Client struct {
	pilasterv1connect.NodeServiceClient
	config   Config
	renewing sync.Mutex
	current  atomic.Pointer[identity]
}

// identity is a membership and the connections that were made with it.
type identity struct {
	*member
	*http.Transport
}

// Do makes new connections with the newest certificate; streams go on with the one they began with.
func (c *Client) Do(r *http.Request) (*http.Response, error) {
	return (&http.Client{Transport: c.current.Load().Transport}).Do(r)
}

// CallTimeout is how long a call may take that has no deadline of its own.
const CallTimeout = 10 * time.Second

// Dial returns a client that authenticates as the node, after joining the cluster where the disk holds no certificate;
// whether one is still valid is for the orchestrator's clock to say. It needs the orchestrator only for joining; the
// error is then that of the call (connect.CodeUnavailable if there is no answer).
func Dial(ctx context.Context, c Config) (*Client, error) {
	if err := checkURL(c.URL); err != nil {
		return nil, err
	}
	c.Instance = cmp.Or(c.Instance, NewUUID())
	if c.Now == nil {
		c.Now = time.Now
	}
	m, err := c.membership(ctx)
	if err != nil {
		return nil, err
	}
	client := &Client{config: c}
	client.use(m)
	client.NodeServiceClient = newService(client, c, m.pin(), renewal{client})
	return client, nil
}

// use makes the calls to come with this membership.
func (c *Client) use(m *member) {
	roots := x509.NewCertPool()
	roots.AddCert(m.ca)
	was := c.current.Swap(&identity{m, newTransport(&tls.Config{
		MinVersion: tls.VersionTLS13,
		RootCAs:    roots,
		ServerName: ServerName,
		Time:       c.config.Now,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return m.tlsCertificate(), nil
		},
	})})
	if was != nil {
		was.CloseIdleConnections() // those in use follow when they are idle
	}
}

func checkURL(s string) error {
	if u, err := url.Parse(s); err != nil || u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("orchestrator URL %q is not of the form https://host:port", s)
	}
	return nil
}

// Instance is the machine that the client calls as.
func (c *Client) Instance() string { return c.config.Instance }

// Close ends idle connections.
func (c *Client) Close() { c.current.Load().CloseIdleConnections() }

// membership is the one on disk where it is still good, or else a new one.
func (c Config) membership(ctx context.Context) (*member, error) {
	var token *Token
	if c.Token != "" {
		t, err := ParseToken(c.Token)
		if err != nil {
			return nil, err
		}
		token = &t
	}
	m, err := load(c.StateDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case token != nil && m.caSum() != token.CA:
		return nil, fmt.Errorf(
			"this node joined another cluster than the join token's; its state in %s was left as it was: empty it to "+
				"join the new cluster",
			c.StateDir,
		)
	case !m.is(c.NodeName, c.NodeUUID):
		return nil, fmt.Errorf(
			"this node joined as %s, not as %s (%s); its state in %s was left as it was: keep the name, or delete "+
				"the node and empty that directory",
			m.cert.Subject.CommonName,
			c.NodeName,
			c.NodeUUID,
			c.StateDir,
		)
	default:
		return m, nil
	}
	if token == nil {
		return nil, errors.New(
			"this node has no certificate and no join token to buy one; copy the orchestrator's join-token file to " +
				"this node and name it with --token-file",
		)
	}
	return c.join(ctx, *token)
}

func (c Config) join(ctx context.Context, token Token) (*member, error) {
	transport := newTransport(token.tlsConfig(c.Now))
	defer transport.CloseIdleConnections()
	key, csr, err := request()
	if err != nil {
		return nil, err
	}
	resp, err := newService(
		&http.Client{Transport: transport},
		c,
		Token{CA: token.CA},
	).Join(ctx, connect.NewRequest(&pilasterv1.JoinRequest{
		Secret:   fmt.Sprintf("%x", token.Secret),
		NodeName: c.NodeName,
		NodeUuid: c.NodeUUID,
		Csr:      csr,
	}))
	if err != nil {
		return nil, fmt.Errorf("join the cluster at %s: %w", c.URL, err)
	}
	m, err := newMember(key, resp.Msg.Certificate, resp.Msg.Ca)
	if err != nil {
		return nil, err
	}
	if m.caSum() != token.CA || !m.is(c.NodeName, c.NodeUUID) {
		return nil, fmt.Errorf(
			"the orchestrator at %s answered with a certificate of another cluster or node; nothing was kept",
			c.URL,
		)
	}
	c.Log.Info("joined the cluster", "url", c.URL, "certificate_until", m.cert.NotAfter)
	return m, m.save(c.StateDir)
}

// newTransport speaks HTTP/2 only: streams in both directions need it.
func newTransport(t *tls.Config) *http.Transport {
	var p http.Protocols
	p.SetHTTP2(true)
	dialer := net.Dialer{Timeout: 5 * time.Second}
	return &http.Transport{
		Protocols:           &p,
		TLSClientConfig:     t,
		DialContext:         dialer.DialContext,
		TLSHandshakeTimeout: 5 * time.Second,
		IdleConnTimeout:     90 * time.Second,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 10 * time.Second},
	}
}

// InstanceHeader names the machine that calls, on each call.
const InstanceHeader = "Pilaster-Instance"

func newService(
	t connect.HTTPClient,
	c Config,
	pin Token,
	outer ...connect.Interceptor,
) pilasterv1connect.NodeServiceClient {
	return pilasterv1connect.NewNodeServiceClient(t, c.URL, connect.WithInterceptors(append(outer, calls{c, pin})...))
}

// calls gives each call what all have in common.
type calls struct {
	Config
	pin Token // of the authority; it has no secret
}

func (c calls) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set(InstanceHeader, c.Instance)
		if _, ok := ctx.Deadline(); !ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, CallTimeout)
			defer cancel()
		}
		resp, err := next(ctx, req)
		if err == nil && c.Heard != nil {
			c.Heard(req.Spec().Procedure, resp.Any())
		}
		return resp, c.clocks(ctx, c.pin, err)
	}
}

func (c calls) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set(InstanceHeader, c.Instance)
		if c.Heard != nil {
			return heard{conn, c.Heard}
		}
		return conn
	}
}

// heard reports the messages of a stream.
type heard struct {
	connect.StreamingClientConn
	tell func(procedure string, message any)
}

func (h heard) Receive(m any) error {
	err := h.StreamingClientConn.Receive(m)
	if err == nil {
		h.tell(h.Spec().Procedure, m)
	}
	return err
}

func (c calls) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
