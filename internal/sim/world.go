// Package sim runs one orchestrator and very many agents in a single process and counts their messages (NETPILA §7.1,
// NIMITZ §4.1).
//
// The orchestrator is real, with etcd on a disk, its handlers and the encoding of messages. Of each agent, the core,
// the link to the orchestrator and the address allocation are real. This package simulates the rest: connections
// without TLS and sockets (fabric), packet paths that only count (driver), and in-memory disks of agents (disk). All
// nodes share one machine's clock and processors. docs/reference/simulation.md explains the consequences.
package sim

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
	"pilaster.io/pilaster/internal/unixrpc"
)

// world is the simulated cluster of a scenario.
type world struct {
	scenario Scenario
	dir      string // folder of the orchestrator
	url      string
	version  string
	fabric   *fabric
	clients  pilasterv1connect.NodeServiceClient
	operator pilasterv1connect.OperatorServiceClient
	live     live // the orchestrator
	log      *slog.Logger
	agentLog *slog.Logger
	warnings *warnings
	written  *written

	uplink   []netip.Addr
	netns    string
	labels   map[string]string
	tenants  []string
	services map[string][]dpapi.FrontendKey // by tenant

	nodes     []*node
	followers int          // simulated nodes that follow the orchestrator; 0 means all
	keeps     map[int]bool // nodes whose disks are read again, by number
	joined    int          // number of nodes that have ever joined

	devices  *deviceNames
	numbers  *numbers             // of mappings
	gate     atomic.Pointer[gate] // nil for none
	progress *progress
	stage    *stage
	adds     *latencies
	sum      string       // digest of all addresses at the last check
	retried  atomic.Int64 // ADDs that agents refused temporarily

	policyPort uint16 // port that the current policy names
	patience   time.Duration
}

func newWorld(s Scenario, dir string, log *slog.Logger) *world {
	f := newFabric()
	w := &world{
		scenario: s, dir: dir, url: "https://orchestrator.sim", version: "sim", fabric: f, log: log,
		warnings: newWarnings(), written: new(written),
		uplink: []netip.Addr{
			netip.MustParseAddr("2001:db8::2"),
		}, netns: "/run/netns/sim", labels: map[string]string{"app": "job"},
		keeps: map[int]bool{}, devices: new(deviceNames), numbers: newNumbers(), progress: new(progress),
		adds: new(latencies), services: map[string][]dpapi.FrontendKey{},
	}
	w.agentLog = slog.New(w.warnings)
	w.clients = pilasterv1connect.NewNodeServiceClient(f, w.url, connect.WithInterceptors(streamInterceptor{inTime}))
	return w
}

// open starts the first orchestrator and creates the tenants.
func (w *world) open(ctx context.Context) error {
	if err := w.startOrchestrator(ctx); err != nil {
		return err
	}
	w.operator = pilasterv1connect.NewOperatorServiceClient(unixrpc.Client(orchestrator.Socket(w.dir)), unixrpc.URL)
	for i := range w.scenario.Tenants {
		name := fmt.Sprintf("t%d", i+1)
		if _, err := w.operator.CreateTenant(ctx, connect.NewRequest(w.scenario.tenant(name))); err != nil {
			return fmt.Errorf("create tenant %s: %w", name, err)
		}
		w.tenants = append(w.tenants, name)
	}
	return nil
}

// Probe adds real nodes to a simulated cluster.
type Probe interface {
	// Join is called once, after the orchestrator has the tenants and before the first node joins.
	Join(context.Context, Cluster) error
	// After is called after each stage, when no more messages are in transit.
	After(context.Context, Stage) error
}

// Cluster is what a probe joins.
type Cluster struct {
	Orchestrator *orchestrator.Server
	Socket       string // of the operator API
	Token        string // path of the file with the join token
	Tenants      []string
	Labels       map[string]string // of every container
}

func (w *world) cluster() Cluster {
	return Cluster{
		Orchestrator: w.live.server,
		Socket:       orchestrator.Socket(w.dir),
		Token:        filepath.Join(w.dir, "data", "join-token"),
		Tenants:      w.tenants,
		Labels:       w.labels,
	}
}

func (s Scenario) tenant(name string) *pilasterv1.CreateTenantRequest {
	req := &pilasterv1.CreateTenantRequest{Name: name, Network: s.Network}
	switch {
	case tenant.NetworkHas(s.Network, tenant.OwnCIDRs):
		o := s.overlay()
		req.Overlays = []*pilasterv1.Overlay{{Cidr: o.CIDR.String(), NodeBits: uint32(o.NodeBits)}}
	case s.Addressing == tenant.Clear:
		req.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
	}
	return req
}

func (w *world) startOrchestrator(ctx context.Context) error {
	s, err := orchestrator.Start(ctx, orchestrator.Config{
		DataDir: filepath.Join(
			w.dir,
			"data",
		), RunDir: w.dir, Listen: "127.0.0.1:0", Plan: address.DefaultPlan(), Version: w.version,
		Limits: admission.Limits{Connections: 64, Lists: w.scenario.ListRate}, Log: w.log, // without connections
	})
	if err != nil {
		return fmt.Errorf("start the orchestrator: %w", err)
	}
	w.live.set(s, nil)
	w.fabric.plug(s)
	return nil
}

// stopOrchestrator stops the orchestrator gracefully, as a service manager does.
func (w *world) stopOrchestrator() error {
	w.fabric.unplug()
	s := w.live.server
	s.Close()
	last, err := readMetrics(s)
	w.live.set(nil, last.counts)
	return err
}

// counts returns the counters of all orchestrators so far.
func (w *world) counts() (Counts, error) {
	now, err := w.live.read()
	return now.counts, err
}

// close ends agents first, so that the orchestrator does not have to end each stream.
func (w *world) close() error {
	w.fabric.unplug()
	for _, n := range w.nodes {
		if n.stop != nil {
			n.stop()
		}
	}
	for _, n := range w.nodes {
		if n.stop != nil {
			<-n.done
		}
	}
	if s := w.live.server; s != nil {
		s.Close()
	}
	return os.RemoveAll(w.dir)
}

// join creates so many nodes, without agents.
func (w *world) join(many int) []*node {
	fresh := make([]*node, many)
	for i := range fresh {
		w.joined++
		d := statefile.On(discardDisk{w.written})
		if w.keeps[w.joined] {
			d = statefile.On(newDisk(w.written))
		}
		fresh[i] = w.newNode(w.joined, d)
	}
	w.nodes = append(w.nodes, fresh...)
	return fresh
}

// start boots nodes and creates their containers.
func (w *world) start(ctx context.Context, nodes []*node) error {
	return w.each(ctx, nodes, func(ctx context.Context, n *node) error { return n.start(ctx, w) })
}

// startListing boots nodes. All of them list the mappings of the others' containers before any of them gets a subnet,
// as NIMITZ §4.1 counts.
func (w *world) startListing(ctx context.Context, nodes []*node) error {
	g := newGate(nodes, w.scenario.AtOnce)
	w.gate.Store(g)
	defer w.gate.Store(nil)
	return eachOf(ctx, nodes, len(nodes), func(ctx context.Context, n *node) error {
		if err := g.enter(ctx); err != nil {
			return err
		}
		defer g.leave()
		return n.start(ctx, w)
	})
}

func (w *world) listed(n *node) {
	if g := w.gate.Load(); g != nil {
		if g.listed(n) {
			w.progress.did()
		}
	}
}

// each calls do for every node, for as many at a time as the scenario allows.
func (w *world) each(ctx context.Context, nodes []*node, do func(context.Context, *node) error) error {
	return eachOf(ctx, nodes, w.scenario.AtOnce, func(ctx context.Context, n *node) error {
		err := do(ctx, n)
		w.progress.did()
		return err
	})
}

func eachOf(ctx context.Context, nodes []*node, atOnce int, do func(context.Context, *node) error) error {
	g, ctx := errgroup.WithContext(ctx)
	next := make(chan *node)
	for range min(atOnce, len(nodes)) {
		g.Go(func() error {
			for n := range next {
				if err := do(ctx, n); err != nil {
					return err
				}
			}
			return nil
		})
	}
	g.Go(func() error {
		defer close(next)
		for _, n := range nodes {
			select {
			case next <- n:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	return g.Wait()
}

// await waits until every node follows the orchestrator on a stream that began after since.
func (w *world) await(ctx context.Context, nodes []*node, since time.Time) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; {
		// Do not check all nodes each time: that would take processor time from them.
		for i < len(nodes) && nodes[i].follows(since) {
			i++
		}
		if i == len(nodes) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf(
				"some of %d nodes do not follow the orchestrator, such as %s: %s: %w",
				len(nodes),
				nodes[i].name,
				nodes[i].link.Status().LastError,
				ctx.Err(),
			)
		}
	}
}

// follows reports whether the node's agent follows the orchestrator on a stream that began after since. Nodes whose
// agents must not follow count as following.
func (n *node) follows(since time.Time) bool {
	if n.link == nil { // the agent of visit has ended
		return true
	}
	s := n.link.Status()
	return s.Connected && !s.Since.Before(since)
}

// warnings counts the warnings of agents.
type warnings struct {
	mu sync.Mutex
	m  map[string]int
}

func newWarnings() *warnings { return &warnings{m: map[string]int{}} }

func (h *warnings) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (h *warnings) WithAttrs([]slog.Attr) slog.Handler           { return h }
func (h *warnings) WithGroup(string) slog.Handler                { return h }
func (h *warnings) Handle(_ context.Context, r slog.Record) error {
	what := r.Message
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "error" {
			why, _, _ := strings.Cut(a.Value.String(), ";")
			what += ": " + digits.ReplaceAllString(why, "N")
		}
		return true
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.m[what] == 0 && len(h.m) >= maxWarnings {
		what = "something else"
	}
	h.m[what]++
	return nil
}

// digits are removed from warnings, so that warnings about different nodes, tenants and revisions count together.
var digits = regexp.MustCompile("[0-9]+")

// maxWarnings limits the number of distinct warnings.
const maxWarnings = 100
