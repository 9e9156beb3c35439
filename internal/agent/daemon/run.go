package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/api"
	"pilaster.io/pilaster/internal/agent/control"
	"pilaster.io/pilaster/internal/agent/hostnet"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/agent/sharing"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/agent/trace"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/egress"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/sdnotify"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Options configure the daemon.
type Options struct {
	OrchestratorURL  string
	Token            string // join token; may be empty once joined
	NodeName         string
	NodePrefix       netip.Prefix // chosen by the operator; may be zero
	Uplinks          []string
	RunDir, StateDir string
	MaxEndpoints     int
	MaxTenantIDs     int
	Identifiers      bool    // the packet path reserves the prefix of identifiers in any case
	Edge             bool    // this node is an Edge Switch: it runs no containers
	MTUReserve       int     // bytes by which containers' MTU is smaller than the tunnels allow
	Rack             string  // of this node, a DNS label; may be empty
	Zone             string  // of this node, for services that prefer endpoints in it; empty: the rack
	PacketCPUs       float64 // the node's budget for packets; 0: all CPUs
	MetricsListen    string  // "host:port"; empty means the unix socket only
	Version          string
	// OpenDriver opens the packet path once the node's prefix is known. Close must leave the packet path in place.
	OpenDriver func(state.Membership) (DriverCloser, error)
	Networks   []network.Factory // all known networks, in the order in which they are opened
	// Steering sets RPS or RFS of devices, also of new ones, until the context ends. nil leaves them as they are.
	Steering func(context.Context) error
	Log      *slog.Logger
}

// DriverCloser is a Driver that must be closed.
type DriverCloser interface {
	dpapi.Driver
	io.Closer
}

// ErrReserved means that the cluster has reserved a prefix for containers. The packet path protects it once Run has
// started again.
var ErrReserved = errors.New("the cluster has reserved a prefix for containers")

// Run runs the agent daemon until ctx ends. The packet path continues without it.
func Run(ctx context.Context, o Options) (err error) {
	d, err := newDaemon(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	if err := d.serve(ctx, g); err != nil {
		cancel()
		return errors.Join(err, g.Wait())
	}
	g.Go(func() error { return d.keepCertificate(ctx) })
	g.Go(func() error {
		if err := d.start(ctx, g); err != nil && ctx.Err() == nil {
			return err
		}
		return nil
	})
	<-ctx.Done()
	if !errors.Is(context.Cause(ctx), ErrReserved) {
		sdnotify.Notify(sdnotify.Stopping)
	}
	return g.Wait()
}

// daemon has the parts that Run connects.
type daemon struct {
	Options
	lock      *os.File
	node      *state.Node
	tenants   *agent.Tenants
	store     *endpoint.Store
	egress    *egress.Addresses
	link      *control.Link
	service   *api.Service
	received  control.MessageCounter
	joined    chan *join.Client
	changed   chan struct{} // receives a value when addresses of this node changed, for its registration
	readdress chan struct{} // likewise, for node ports
	calls     calls
	reserved  chan struct{} // receives a value when the cluster has reserved a prefix
	driver    DriverCloser
	opened    []agent.Network // in that order
	// one of them has a working gateway; queried once, because a network may wait for its switch
	gateway bool

	enforces []string // names of networks that enforce policies
	form     string   // of packets on the fabric; known once networks are open
	offloads bool     // this node can be in offloads; known once networks are open
	leaves   bool     // its containers can reach hosts outside; known once the packet path is open
}

func newDaemon(o Options) (*daemon, error) {
	if err := os.MkdirAll(o.StateDir, 0o700); err != nil {
		return nil, err
	}
	d := &daemon{
		Options:   o,
		received:  control.NewMessageCounter(),
		joined:    make(chan *join.Client, 1),
		changed:   make(chan struct{}, 1),
		readdress: make(chan struct{}, 1),
		reserved:  make(chan struct{}, 1),
	}
	var err error
	if d.lock, err = statefile.Lock(o.StateDir); err != nil {
		return nil, err
	}
	if err := d.load(); err != nil {
		d.lock.Close()
		return nil, stateError(err)
	}
	d.link = control.New(control.Config{
		URL: o.OrchestratorURL, Version: o.Version, Node: d.node, Tenants: d.tenants,
		Endpoints:    d.store.WithClusterAddresses,
		WantedPrefix: o.NodePrefix, Edge: o.Edge,
		Gateway:  d.hasGateway,
		Enforces: d.enforcing,
		Form:     func() string { return d.form },
		Egress:   func() bool { return d.leaves },
		Offloads: func() bool { return d.offloads }, MTUReserve: o.MTUReserve, Rack: o.Rack,
		UplinkAddresses: func() ([]netip.Addr, error) {
			m, _ := d.node.Membership()
			return hostnet.UplinkAddresses(d.Uplinks, m.Prefix)
		},
		AddressesChanged: d.changed, Dial: d.dial, Log: o.Log,
		Reserved: func() {
			select {
			case d.reserved <- struct{}{}:
			default:
			}
		},
	})
	d.service = api.New(
		api.Config{
			Node:    d.node,
			Link:    d.link.Status,
			URL:     o.OrchestratorURL,
			Uplinks: o.Uplinks,
			Edge:    o.Edge,
			Version: o.Version,
			Log:     o.Log,
			Metrics: []prometheus.Collector{d.received},

			SourceTo: hostnet.SourceTo,
		},
	)
	return d, nil
}

// hasGateway reports whether the node has a gateway; it is known once networks are open.
func (d *daemon) hasGateway() bool { return d.gateway }

// enforcing returns the networks that enforce policies; they are known once networks are open.
func (d *daemon) enforcing() []string { return d.enforces }

// stateError adds to an error of corrupt state what it means for the node.
func stateError(err error) error {
	var corrupt *statefile.CorruptError
	if errors.As(err, &corrupt) {
		return fmt.Errorf(
			"%w\n  packets of containers flow as before; restore the file from a backup, or drain the node and run "+
				"`pilaster node reset`",
			err,
		)
	}
	return err
}

func (d *daemon) load() (err error) {
	damages := statefile.NewDamages(statefile.Disk{}, d.Log, nil)
	if d.node, err = state.OpenNodeWith(statefile.Disk{}, damages, d.StateDir, d.NodeName); err != nil {
		return err
	}
	if m, ok := d.node.Membership(); ok && d.NodePrefix.IsValid() && d.NodePrefix != m.Prefix {
		return fmt.Errorf(
			"--node-prefix %v differs from %v, the prefix of this node\n  nothing was changed; omit the flag, or "+
				"delete the node and use an empty --state-dir",
			d.NodePrefix,
			m.Prefix,
		)
	}
	if d.tenants, err = agent.OpenTenantsWith(statefile.Disk{}, damages, d.StateDir); err != nil {
		return err
	}
	if d.store, err = endpoint.OpenStore(endpoint.StoreConfig{Dir: d.StateDir, Damages: damages}); err != nil {
		return err
	}
	return d.fits()
}

// fits refuses settings that are too small for the existing state, before the packet path is opened with them.
func (d *daemon) fits() error {
	if has := d.store.List(); d.Edge && len(has) > 0 {
		return fmt.Errorf(
			"--edge: an Edge Switch runs no containers, but this node has %s, such as %s of container %s\n  nothing "+
				"was changed and packets flow as before; start the agent without --edge, or use another node",
			humanize.Of(len(has), "endpoint", "endpoints"),
			has[0].Interface,
			has[0].ContainerID,
		)
	}
	ids := 0
	for _, k := range d.tenants.All() {
		ids += len(k.Tenant.IDs)
	}
	for _, c := range []struct {
		flag, what string
		max, has   int
	}{
		{"--max-endpoints", "endpoints", cmp.Or(d.MaxEndpoints, dpapi.DefaultMaxEndpoints), len(d.store.List())},
		{"--max-tenant-ids", "tenant ids", cmp.Or(d.MaxTenantIDs, dpapi.DefaultMaxTenantIDs), ids},
	} {
		if c.has > c.max {
			return fmt.Errorf(
				"%s %d is less than the %d %s of this node\n  nothing was changed and packets flow as before; allow "+
					"at least as many, or remove containers first",
				c.flag,
				c.max,
				c.has,
				c.what,
			)
		}
	}
	return nil
}

func (d *daemon) close() error {
	var errs []error
	for _, n := range slices.Backward(d.opened) {
		if c, ok := n.(io.Closer); ok {
			errs = append(errs, c.Close())
		}
	}
	if d.driver != nil {
		errs = append(errs, d.driver.Close())
	}
	return errors.Join(append(errs, d.store.Close(), d.lock.Close())...)
}

// dial returns a client of the orchestrator; it joins first if needed.
func (d *daemon) dial(ctx context.Context) (pilasterv1connect.NodeServiceClient, error) {
	instance, err := state.Instance(d.RunDir)
	if err != nil {
		return nil, err
	}
	c, err := join.Dial(ctx, join.Config{
		URL: d.OrchestratorURL, Token: d.Token, StateDir: d.StateDir, NodeName: d.node.Name(), NodeUUID: d.node.UUID(),
		Instance: instance,
		Received: d.received.Count, Calling: d.calls.note, Log: d.Log,
	})
	if err != nil {
		return nil, err
	}
	d.joined <- c // dialled once
	return c, nil
}

func (d *daemon) keepCertificate(ctx context.Context) error {
	select {
	case c := <-d.joined:
		defer c.Close()
		if err := c.KeepCertificate(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	case <-ctx.Done():
	}
	return nil
}

// agentSocket is the name of the agent's socket in the run directory.
const agentSocket = "agent.sock"

// serve serves the agent's socket; until the core is ready, answers say what the agent waits for.
func (d *daemon) serve(ctx context.Context, g *errgroup.Group) error {
	observer := d.service.ObserveHandler()
	socket, err := unixrpc.Listen(filepath.Join(d.RunDir, agentSocket))
	if err != nil {
		return err
	}
	server := unixrpc.Server(d.service.Handler(observer))
	server.ConnContext = api.WithPeer
	serve(ctx, g, server, socket)
	if d.MetricsListen == "" {
		return nil
	}
	l, err := net.Listen("tcp", d.MetricsListen)
	if err != nil {
		return fmt.Errorf("--metrics-listen: %w", err)
	}
	serve(ctx, g, &http.Server{Handler: observer, ReadHeaderTimeout: 5 * time.Second}, l)
	return nil
}

// serve runs a server in the group. When ctx ends, running calls are cancelled: an ADD is rolled back, other calls can
// be repeated.
func serve(ctx context.Context, g *errgroup.Group, s *http.Server, l net.Listener) {
	s.BaseContext = func(net.Listener) context.Context { return ctx }
	g.Go(func() error {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if s.Shutdown(grace) != nil {
			return s.Close()
		}
		return nil
	})
}

// start starts the core, at once if the node knows its prefix, otherwise after the registration, and starts its
// background tasks.
func (d *daemon) start(ctx context.Context, g *errgroup.Group) error {
	_, member := d.node.Membership()
	if !member {
		if err := d.link.Register(ctx); err != nil {
			return err
		}
	}
	if d.node.LostGateways() {
		d.registerAgain(ctx)
	}
	m, _ := d.node.Membership()
	own := make(chan struct{}, 1)
	overlap := hostnet.NewOverlapWatch(m.Plan.Private, d.changed, d.readdress, own)
	if err := overlap.Check(); err != nil {
		return err
	}
	driver, err := d.OpenDriver(m)
	if err != nil {
		return err // the driver that came with it is not valid and must not be closed
	}
	d.driver = driver
	if err := d.openEgress(ctx, g, m, own); err != nil {
		return err
	}
	networks, absent, err := d.networks(m)
	if err != nil {
		return err
	}
	// the first registration did not name the networks that enforce policies: containers of tenants with policies would
	// be refused
	if !member {
		if err := d.link.Register(ctx); err != nil {
			return err
		}
	}
	addresses, err := nodeAddresses(d.Uplinks, m.Prefix)
	if err != nil {
		return err
	}
	core, err := agent.New(agent.Config{
		Store: d.store, Tenants: d.tenants, Networks: networks, Absent: absent, Driver: d.driver, Resolver: d.link,
		Reporter: d.link, Name: d.node.Name(), Zone: cmp.Or(d.Zone, d.Rack),
		Addresses: addresses, Egress: d.egress, Tried: d.link.Tried(), Edge: d.Edge, MTUReserve: d.MTUReserve,
		Plan: m.Plan, Node: m.Prefix, MaxEndpoints: d.MaxEndpoints, MaxTenantIDs: d.MaxTenantIDs, Log: d.Log,
	})
	if err != nil {
		return stateError(err)
	}
	if err := core.Start(ctx); err != nil {
		return stateError(err)
	}
	d.calls.tell(core.OrchestratorAt)
	d.serveTraces(core, m, networks)
	d.service.Serve(core, func() error { return cmp.Or(overlap.Problem(), d.link.Problem()) })
	d.Log.Info("agent is ready", "node", d.node.Name(), "prefix", m.Prefix, "endpoints", len(core.Endpoints()))
	if err := sdnotify.Notify(sdnotify.Ready); err != nil {
		d.Log.Warn("notifying the service manager failed", "error", err)
	}
	d.supply(ctx, g, core, overlap)
	if !m.Plan.Identifiers && !d.Identifiers || !m.Plan.Egress.IsValid() {
		g.Go(func() error { return d.awaitReservation(ctx) })
	}
	return nil
}

// awaitReservation ends the daemon when the cluster has reserved a prefix that the packet path does not protect yet.
func (d *daemon) awaitReservation(ctx context.Context) error {
	select {
	case <-d.reserved:
		return ErrReserved
	case <-ctx.Done():
		return nil
	}
}

// serveTraces makes the service answer traces, if the packet path can be traced.
func (d *daemon) serveTraces(core *agent.Core, m state.Membership, networks map[string]agent.Network) {
	path, ok := d.driver.(dpapi.Tracing)
	if !ok {
		return
	}
	c := trace.Config{Core: core, Path: path, Plan: m.Plan, Prefix: m.Prefix, Node: d.node.Name()}
	c.Revision = func() int64 { return d.link.Status().Revision }
	c.Pipelines = map[string]trace.Pipeline{}
	for name, n := range networks {
		if p, ok := n.(interface {
			Pipeline(context.Context) ([]pipeline.Entry, error)
		}); ok {
			its := trace.Pipeline{Entries: p.Pipeline}
			if s, ok := n.(interface{ Switch() string }); ok {
				its.Switch = s.Switch()
			}
			if t, ok := n.(interface{ TunnelPool() netip.Prefix }); ok {
				its.Pool = t.TunnelPool()
			}
			c.Pipelines[name] = its
		}
		if located, ok := n.(network.Located); ok {
			c.Located = located
		}
	}
	d.service.ServeTraces(trace.New(c))
}

// registerWait is how long a start without the gateway prefixes waits for the orchestrator.
const registerWait = 10 * time.Second

// registerAgain requests the gateway prefixes, which the packet path needs when it is opened.
func (d *daemon) registerAgain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, registerWait)
	defer cancel()
	if err := d.link.Register(ctx); err != nil {
		d.Log.Error("requesting the gateway prefixes failed; the agent starts without them", "error", err)
	}
}

// nodeAddresses returns the addresses of this node for exposed services.
func nodeAddresses(uplinks []string, prefix netip.Prefix) (services.Addresses, error) {
	own, err := hostnet.OwnAddresses()
	if err != nil {
		return services.Addresses{}, err
	}
	ports, err := hostnet.NodePortAddresses(uplinks, prefix)
	return services.Addresses{Own: own, Ports: ports}, err
}

// supply starts the background tasks.
func (d *daemon) supply(ctx context.Context, g *errgroup.Group, core *agent.Core, overlap *hostnet.OverlapWatch) {
	g.Go(func() error { d.link.Run(ctx, core); return nil })
	g.Go(func() error { return d.service.RunEvents(ctx, d.driver, d.Log) })
	g.Go(func() error { d.service.RunDrops(ctx, core, d.driver.ReconcileSettings, d.Log); return nil })
	g.Go(func() error { core.Run(ctx); return nil })
	for _, n := range d.opened {
		if working, ok := n.(network.Runner); ok {
			g.Go(func() error { working.Run(ctx, d.Log); return nil })
		}
	}
	if path, ok := d.driver.(dpapi.Sharing); ok && d.offloads {
		prober := sharing.NewProber(core, path, d.Log)
		meter := sharing.NewMeter(core, path, cmp.Or(d.PacketCPUs, float64(runtime.NumCPU())))
		d.service.ServeSharing(api.Sharing{Prober: prober, Meter: meter})
		g.Go(func() error { prober.Run(ctx); return nil })
		g.Go(func() error { d.link.ReportLoads(ctx, meter, core.LoadDue()); return nil })
	}
	d.probeGateways(ctx, g, core)
	g.Go(func() error { return overlap.Run(ctx, d.Log) })
	g.Go(func() error {
		m, _ := d.node.Membership()
		hostnet.FollowOwnAddresses(ctx, d.readdress, func([]netip.Addr) error {
			is, err := nodeAddresses(d.Uplinks, m.Prefix)
			if err == nil {
				core.SetAddresses(is)
			}
			return err
		}, d.Log)
		return nil
	})
	g.Go(func() error { return hostnet.WatchDevices(ctx, d.Uplinks, core, d.Log) })
	if d.Steering != nil {
		g.Go(func() error { return d.Steering(ctx) })
	}
}
