package orchestrator

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/time/rate"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/debugserver"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/announce"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/evpnroutes"
	"pilaster.io/pilaster/internal/orchestrator/rpc"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/sdnotify"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Config configures an orchestrator.
type Config struct {
	DataDir       string            // for the join token and the embedded etcd
	RunDir        string            // for the operators' socket
	Listen        string            // address for nodes, with TLS
	Advertise     []string          // further host names and addresses for the certificate
	MetricsListen string            // address for Prometheus, without TLS; empty means none
	Etcd          store.External    // without endpoints etcd is embedded
	Plan          address.Plan      // zero prefixes mean those of the cluster
	Region        string            // name of this region; empty if there are no others
	EVPN          evpnroutes.Config // without peers, no routes of tenants are exchanged
	BGP           announce.Config   // without peers, no addresses of services are announced
	Limits        admission.Limits  // for clients
	Version       string
	Log           *slog.Logger

	Now     func() time.Time `json:"-"` // clock for certificates; nil means time.Now
	timeout time.Duration    // of a request, or one message of a stream; 0 means admission.CallTimeout
	offload offload.Limits   // of the controller of offloads; zero means offload.DefaultLimits
}

// Socket is the path of the operators' socket in a run directory.
func Socket(runDir string) string { return filepath.Join(runDir, "orchestrator.sock") }

// Server is a running orchestrator.
type Server struct {
	config        Config
	store         *store.Store
	cache         *cache.Cache
	evpn          *evpnroutes.Control // nil without peers
	announcements *announce.Control   // nil without peers
	token         *admission.TokenFile
	offloads      *offloads
	metrics       *metrics
	storeHealth   health
	connLimiter   *admission.ConnLimiter
	limiter       *admission.CallLimiter
	nodes         net.Listener
	handler       http.Handler   // for nodes
	inProcess     sync.WaitGroup // calls by NodeHandler
	servers       []*http.Server
	closeEtcd     func()
	failed        chan error

	running    sync.WaitGroup
	background context.Context // for background goroutines
	stop       context.CancelFunc
}

const (
	startTimeout = 30 * time.Second
	stopTimeout  = 5 * time.Second
	pingTimeout  = 10 * time.Second
)

// Run starts an orchestrator, notifies the supervisor when it is ready, and stops it when ctx ends.
func Run(ctx context.Context, c Config) error {
	s, err := Start(ctx, c)
	if err != nil {
		return err
	}
	defer s.Close()
	c.Log.Info(
		"orchestrator is ready",
		"listen",
		s.Addr(),
		"socket",
		Socket(c.RunDir),
		"store",
		s.where(),
		"cluster",
		s.store.Cluster().UUID,
	)
	if err := sdnotify.Notify(sdnotify.Ready); err != nil {
		c.Log.Warn("notifying the supervisor failed", "error", err)
	}
	select {
	case <-ctx.Done():
		c.Log.Info("orchestrator is stopping")
		return sdnotify.Notify(sdnotify.Stopping)
	case err := <-s.failed:
		return err
	}
}

// Start returns when the orchestrator has read the store and accepts calls.
func Start(ctx context.Context, c Config) (_ *Server, err error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	c.timeout = cmp.Or(c.timeout, admission.CallTimeout)
	c.offload = cmp.Or(c.offload, offload.DefaultLimits())
	s := &Server{config: c, metrics: newMetrics(c.Version), failed: make(chan error, 8), closeEtcd: func() {}}
	s.cache = cache.New(join.NewUUID(), s.metrics.countDropped)
	background, stop := context.WithCancel(context.Background())
	s.background, s.stop = background, stop
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return nil, err
	}
	etcd, err := s.connect(ctx, background)
	if err != nil {
		return nil, err
	}
	if s.store, err = store.Open(ctx, etcd, c.Plan, c.Log); err != nil {
		return nil, err
	}
	s.store.LimitApps(c.Limits.WithDefaults().Apps)
	s.token = admission.NewTokenFile(s.store, c.DataDir)
	if _, err := s.token.Write(ctx); err != nil {
		return nil, err
	}
	s.offloads = newOffloads(s.store, s.cache, c.offload, c.Log, s.metrics.countOffload)
	s.metrics.observe(s.cache, s.store)
	s.metrics.observeOffloads(s.offloads)
	s.running.Go(func() { s.store.Watch(background, s.apply) })
	s.running.Go(func() { s.token.Run(background, c.Log) })
	s.running.Go(func() { s.storeHealth.run(background, s.store) })
	s.running.Go(func() { s.reconcile(background) })
	s.running.Go(func() { s.retireApps(background) })
	s.running.Go(func() { s.offloads.run(background) })
	s.running.Go(func() { s.store.KeepSessions(background, s.cache.Restart) })
	if err := s.cache.Await(ctx, func() bool { return s.cache.Revision != 0 }); err != nil {
		return nil, fmt.Errorf("reading the store took too long: %w", err)
	}
	if err := s.startEVPN(ctx); err != nil {
		return nil, err
	}
	if err := s.startBGP(ctx); err != nil {
		return nil, err
	}
	s.startSilentNodes()
	return s, s.serve()
}

func (s *Server) connect(ctx, background context.Context) (*clientv3.Client, error) {
	if len(s.config.Etcd.Endpoints) > 0 {
		client, err := store.Dial(s.config.Etcd)
		if err != nil {
			return nil, err
		}
		s.closeEtcd = func() { client.Close() }
		return client, nil
	}
	e, err := store.Embed(ctx, s.config.DataDir, s.config.Log)
	if err != nil {
		return nil, err
	}
	s.closeEtcd = e.Close
	s.running.Go(func() {
		select {
		case err := <-e.Failed():
			s.failed <- fmt.Errorf("embedded etcd: %w", err)
		case <-background.Done():
		}
	})
	return e.Client, nil
}

func (s *Server) where() string {
	if e := s.config.Etcd.Endpoints; len(e) > 0 {
		return "etcd at " + strings.Join(e, ", ")
	}
	return "embedded etcd in " + s.config.DataDir
}

func (s *Server) serve() error {
	limits, err := s.config.Limits.WithDefaults().WithinFiles()
	if err != nil {
		return err
	}
	if want := s.config.Limits.WithDefaults().Connections; limits.Connections < want {
		s.config.Log.Warn(
			"the open-file limit is too low for --max-connections; raise LimitNOFILE of the unit",
			"wanted",
			want,
			"connections",
			limits.Connections,
		)
	}
	s.connLimiter = admission.NewConnLimiter(limits, s.metrics.countRefused, s.config.Log)
	options := connect.WithHandlerOptions(
		connect.WithInterceptors(rpc.CallInterceptor{Count: s.metrics.countCall, CountMessage: s.metrics.countMessage}),
		connect.WithCompressMinBytes(admission.MinCompressed),
		rpc.FastGzip(),
	)
	health := func(mux *http.ServeMux) {
		mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
		mux.HandleFunc("/readyz", s.storeHealth.serve)
	}

	nodes, err := net.Listen("tcp", s.config.Listen)
	if err != nil {
		return fmt.Errorf("listen for nodes: %w", err)
	}
	mux := http.NewServeMux()
	health(mux)
	s.limiter = admission.NewCallLimiter(limits, s.metrics.countRefused)
	mux.Handle(pilasterv1connect.NewNodeServiceHandler(&rpc.NodeService{
		Store: s.store, Cache: s.cache, Token: s.token, Timeout: s.config.timeout,
		Now: s.config.Now, Log: s.config.Log,
		Limiter: s.limiter, Lists: admission.ListRates(limits),
		LoadWrites: rate.NewLimiter(rpc.LoadWrites, rpc.LoadWrites),
		Later:      func(work func(context.Context)) { s.running.Go(func() { work(s.background) }) },
	}, options))
	s.nodes = nodes
	s.handler = admission.Authenticate(s.config.Now, s.limiter, mux)
	s.ServeNodes(nodes)

	operator, err := unixrpc.Listen(Socket(s.config.RunDir))
	if err != nil {
		return err
	}
	mux = http.NewServeMux()
	health(mux)
	mux.Handle("/metrics", s.metrics.handler())
	mux.HandleFunc("/debug/goroutines", debugserver.Goroutines)
	mux.HandleFunc(EVPNStatusPath, s.serveEVPNStatus)
	mux.HandleFunc(BGPStatusPath, s.serveBGPStatus)
	mux.Handle(pilasterv1connect.NewOperatorServiceHandler(&rpc.OperatorService{
		Store: s.store, Cache: s.cache, Token: s.token, Version: s.config.Version, Where: s.where(),
		Listen: s.Addr().String(), RegionName: s.config.Region, Started: time.Now(), Offloads: s.offloads,
		Occupied: s.occupied,
	}, options, connect.WithReadMaxBytes(16<<20)))
	s.start(operator, false, unixrpc.Server(mux))

	if s.config.MetricsListen == "" {
		return nil
	}
	metrics, err := net.Listen("tcp", s.config.MetricsListen)
	if err != nil {
		return fmt.Errorf("listen for Prometheus: %w", err)
	}
	mux = http.NewServeMux()
	mux.Handle("/metrics", s.metrics.handler())
	s.start(
		admission.LimitedListener{Listener: metrics, Limiter: s.connLimiter},
		false,
		s.withTimeouts(&http.Server{Handler: mux}),
	)
	return nil
}

// ServeNodes serves nodes on one more listener, such as one of another network namespace, until Close.
func (s *Server) ServeNodes(l net.Listener) {
	var both http.Protocols
	both.SetHTTP1(true)
	both.SetHTTP2(true)
	certificate := &serverCertificate{
		authority: s.store.Cluster().Authority,
		hosts:     s.hosts(l.Addr()),
		now:       s.config.Now,
	}
	s.start(admission.LimitedListener{Listener: l, Limiter: s.connLimiter}, true, s.withTimeouts(&http.Server{
		Handler:     s.handler,
		ConnContext: admission.WithConn,
		Protocols:   &both,
		TLSConfig: &tls.Config{
			MinVersion:       tls.VersionTLS13,
			ClientAuth:       tls.RequestClientCert, // VerifyNode verifies it
			ClientCAs:        certificate.authority.Pool(),
			VerifyConnection: admission.VerifyNode(certificate.authority),
			GetCertificate:   certificate.get,
		},
		HTTP2: &http.HTTP2Config{SendPingTimeout: pingTimeout, PingTimeout: pingTimeout, WriteByteTimeout: pingTimeout},
	}))
}

// withTimeouts sets timeouts for everything but streams, and the maximum size of a header.
func (s *Server) withTimeouts(h *http.Server) *http.Server {
	h.ReadHeaderTimeout = s.config.timeout / 2 // also of the TLS handshake
	h.ReadTimeout = s.config.timeout
	h.WriteTimeout = 2 * s.config.timeout // starts at the end of the header, so it includes the call
	h.IdleTimeout = 2 * s.config.timeout
	h.MaxHeaderBytes = admission.MaxHeader
	return h
}

func (s *Server) start(l net.Listener, secure bool, h *http.Server) {
	h.ErrorLog = slog.NewLogLogger(s.config.Log.Handler(), slog.LevelDebug)
	s.servers = append(s.servers, h)
	s.running.Go(func() {
		var err error
		if secure {
			err = h.ServeTLS(l, "", "")
		} else {
			err = h.Serve(l)
		}
		if !errors.Is(err, http.ErrServerClosed) {
			s.failed <- fmt.Errorf("serve %v: %w", l.Addr(), err)
		}
	})
}

// Addr is the address for nodes.
func (s *Server) Addr() net.Addr { return s.nodes.Addr() }

// NodeHandler serves nodes that run in this process, such as simulated ones. The caller sets Request.TLS, as net/http
// does after a verified handshake. Close waits for all calls; no call may start after it.
func (s *Server) NodeHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.inProcess.Add(1)
		defer s.inProcess.Done()
		s.handler.ServeHTTP(w, r)
	})
}

// Gatherer has the metrics; it remains usable after Close.
func (s *Server) Gatherer() prometheus.Gatherer { return s.metrics.registry }

// Token is the join token in the text form of the file.
func (s *Server) Token() string { return s.token.Current().String() }

func (s *Server) apply(b store.Batch) {
	s.cache.Apply(b)
	s.token.HandleBatch(b)
}

// Close ends all streams with a reason, then the servers, then the store.
func (s *Server) Close() {
	s.cache.Stop()
	if s.limiter != nil {
		s.limiter.Stop()
	}
	for _, h := range s.servers {
		if withStopTimeout(h.Shutdown) != nil {
			h.Close()
		}
	}
	s.inProcess.Wait()
	if s.store != nil {
		withStopTimeout(s.store.EndSessions) // without this, they expire later
	}
	s.stop()
	s.running.Wait()
	s.closeEtcd()
}

// withStopTimeout runs one step of Close with a timeout of its own.
func withStopTimeout(step func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	return step(ctx)
}

// hosts returns the names in the certificate by which administrators' clients may verify it. Nodes verify
// join.ServerName.
func (s *Server) hosts(listen net.Addr) []string {
	hosts := append([]string{"localhost", "::1", "127.0.0.1"}, s.config.Advertise...)
	if name, err := os.Hostname(); err == nil {
		hosts = append(hosts, name)
	}
	if a, ok := listen.(*net.TCPAddr); ok && !a.IP.IsUnspecified() {
		hosts = append(hosts, a.IP.String())
	}
	return hosts
}
