package join

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// Config configures a Client.
type Config struct {
	URL      string // of the orchestrator: https://host:port
	Token    string // text of the join token; may be empty once the node has joined
	StateDir string // for the certificate and its key, in a file with mode 0600
	NodeName string
	NodeUUID string // lower-case, with dashes
	// identifies this machine, so that another machine with a copy of its disk is detected; empty means a new UUID
	Instance string
	Received func(procedure string, message any) // called with each message from the orchestrator; may be nil
	Calling  func(netip.Addr)                    // called before each connection to the orchestrator; may be nil
	Log      *slog.Logger

	Now func() time.Time // nil means time.Now
}

// Client calls the orchestrator as this node. A call without a deadline gets a deadline of 10 s. Streams get none; they
// end 20 s after the last data from the orchestrator. If the orchestrator refuses a call (not a stream) because of the
// node's certificate, the client gets a new certificate and repeats the call.
type Client struct {
	pilasterv1connect.NodeServiceClient
	config   Config
	renewing sync.Mutex
	current  atomic.Pointer[identity]
}

// identity is a certificate and the connections that use it.
type identity struct {
	*member
	*http.Transport
}

// Do uses the newest certificate for new connections. Existing streams continue with the older one.
func (c *Client) Do(r *http.Request) (*http.Response, error) {
	current := c.current.Load()
	resp, err := (&http.Client{Transport: current.Transport}).Do(r)
	return resp, c.config.explainCluster(current.caSum(), err)
}

// explainCluster replaces a certificate error by a clearer one if the server is an orchestrator of another cluster.
func (c Config) explainCluster(own [sha256.Size]byte, err error) error {
	var refused *tls.CertificateVerificationError
	var unknown x509.UnknownAuthorityError
	if !errors.As(err, &refused) || !errors.As(err, &unknown) {
		return err
	}
	for _, other := range refused.UnverifiedCertificates {
		if other.IsCA && other.Subject.CommonName == AuthorityName {
			return fmt.Errorf(
				"the orchestrator at %s belongs to another cluster than this node (its join tokens end in %x…, those "+
					"of this node's cluster in %x…); packets flow as before\n  if the orchestrator has lost its data, "+
					"restore it from a backup; else correct --orchestrator, or empty the state directory %s to join "+
					"the other cluster",
				c.URL, sha256Prefix(sha256.Sum256(other.Raw)), sha256Prefix(own), c.StateDir)
		}
	}
	return err
}

// sha256Prefix returns enough of a hash to distinguish two clusters.
func sha256Prefix(sum [sha256.Size]byte) []byte { return sum[:4] }

// CallTimeout is the time limit of a call without a deadline.
const CallTimeout = 10 * time.Second

// Dial returns a client that authenticates as the node. Without a certificate on disk, Dial joins the cluster first; if
// that fails, it returns the error of the call (connect.CodeUnavailable if the orchestrator does not answer). With a
// certificate, it makes no connection. It does not check the validity period, because the orchestrator does.
func Dial(ctx context.Context, c Config) (*Client, error) {
	if err := checkURL(c.URL); err != nil {
		return nil, err
	}
	c.Instance = cmp.Or(c.Instance, NewUUID())
	if c.Now == nil {
		c.Now = time.Now
	}
	m, err := c.loadOrJoin(ctx)
	if err != nil {
		return nil, err
	}
	client := &Client{config: c}
	client.use(m)
	client.NodeServiceClient = newService(client, c, m.pin(), renewal{client})
	return client, nil
}

// use makes all later calls use this certificate.
func (c *Client) use(m *member) {
	roots := x509.NewCertPool()
	roots.AddCert(m.ca)
	was := c.current.Swap(&identity{m, c.config.newTransport(&tls.Config{
		MinVersion: tls.VersionTLS13,
		RootCAs:    roots,
		ServerName: ServerName,
		Time:       c.config.Now,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return m.tlsCertificate(), nil
		},
	})})
	if was != nil {
		was.CloseIdleConnections() // connections in use close after they have been idle for IdleConnTimeout
	}
}

func checkURL(s string) error {
	if u, err := url.Parse(s); err != nil || u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("orchestrator URL %q is not of the form https://host:port", s)
	}
	return nil
}

// Instance identifies the machine in the client's calls.
func (c *Client) Instance() string { return c.config.Instance }

// Close ends idle connections.
func (c *Client) Close() { c.current.Load().CloseIdleConnections() }

// loadOrJoin returns the certificate on disk. If there is none, it joins the cluster.
func (c Config) loadOrJoin(ctx context.Context) (*member, error) {
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
			"this node has joined another cluster than the join token's; nothing was changed: empty the state "+
				"directory %s to join the token's cluster",
			c.StateDir,
		)
	case !m.is(c.NodeName, c.NodeUUID):
		return nil, fmt.Errorf(
			"this node has joined as %s, not as %s (%s); nothing was changed: use the old name and UUID, or delete "+
				"the node and empty its state directory %s",
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
			"this node has no certificate and no join token; copy the orchestrator's join-token file to this node " +
				"and name it with --token-file",
		)
	}
	return c.join(ctx, *token)
}

func (c Config) join(ctx context.Context, token Token) (*member, error) {
	transport := c.newTransport(token.tlsConfig(c.Now))
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
	if other := new(OtherClusterError); errors.As(err, &other) {
		// without the connect error, whose code permits a retry
		return nil, fmt.Errorf("join the cluster at %s: %w", c.URL, other)
	}
	if err != nil {
		return nil, fmt.Errorf("join the cluster at %s: %w", c.URL, err)
	}
	m, err := newMember(key, resp.Msg.Certificate, resp.Msg.Ca)
	if err != nil {
		return nil, err
	}
	if m.caSum() != token.CA || !m.is(c.NodeName, c.NodeUUID) {
		return nil, fmt.Errorf(
			"the orchestrator at %s returned a certificate of another cluster or node; nothing was changed",
			c.URL,
		)
	}
	c.Log.Info("joined the cluster", "url", c.URL, "certificate_until", m.cert.NotAfter)
	return m, m.save(c.StateDir)
}

// newTransport uses HTTP/2 only: bidirectional streams need it.
func (c Config) newTransport(t *tls.Config) *http.Transport {
	var p http.Protocols
	p.SetHTTP2(true)
	dialer := net.Dialer{Timeout: 5 * time.Second, Control: func(_, to string, _ syscall.RawConn) error {
		if at, err := netip.ParseAddrPort(to); err == nil && c.Calling != nil {
			c.Calling(at.Addr())
		}
		return nil
	}}
	return &http.Transport{
		Protocols:           &p,
		TLSClientConfig:     t,
		DialContext:         dialer.DialContext,
		TLSHandshakeTimeout: 5 * time.Second,
		IdleConnTimeout:     90 * time.Second,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 10 * time.Second},
	}
}

// InstanceHeader is a header of each call that has Config.Instance.
const InstanceHeader = "Pilaster-Instance"

func newService(
	t connect.HTTPClient,
	c Config,
	pin Token,
	outer ...connect.Interceptor,
) pilasterv1connect.NodeServiceClient {
	return pilasterv1connect.NewNodeServiceClient(t, c.URL, connect.WithInterceptors(append(outer, calls{c, pin})...))
}

// calls intercepts all calls: it sets InstanceHeader and deadlines, passes messages to Received, and explains errors
// that a wrong clock causes.
type calls struct {
	Config
	pin Token // of the authority; without a secret
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
		if err == nil && c.Received != nil {
			c.Received(req.Spec().Procedure, resp.Any())
		}
		return resp, c.explainClocks(ctx, c.pin, err)
	}
}

func (c calls) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set(InstanceHeader, c.Instance)
		if c.Received != nil {
			return reportingStream{conn, c.Received}
		}
		return conn
	}
}

// reportingStream passes the messages that it receives to Config.Received.
type reportingStream struct {
	connect.StreamingClientConn
	received func(procedure string, message any)
}

func (s reportingStream) Receive(m any) error {
	err := s.StreamingClientConn.Receive(m)
	if err == nil {
		s.received(s.Spec().Procedure, m)
	}
	return err
}

func (c calls) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
