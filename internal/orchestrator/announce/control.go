package announce

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/probe"
)

// Control announces what the cache has.
type Control struct {
	config  Config
	cache   *cache.Cache
	log     *slog.Logger
	speaker *speaker
	prober  *prober

	wake  chan struct{}         // something changed
	since map[hosting]time.Time // when nodes began to host tenants; zero: before the first derivation. Run's
	nodes map[netip.Addr]string // that are probed, by NODE::1. Run's

	mu     sync.Mutex
	status []AddressStatus
	err    error // of the last announcement
}

type hosting struct{ tenant, node string }

const (
	interval    = 50 * time.Millisecond // minimum between two announcements
	idleFactor  = 3                     // pause after an announcement, in times that it took
	retryPeriod = time.Second
	// settling is how long a node must have hosted a tenant before packets come in by it: its tables must be complete,
	// or it would reset connections that the fabric moves to it.
	settling = 3 * time.Second
)

// Start starts the speaker, which connects when Run has announced.
func Start(ctx context.Context, c Config, m *cache.Cache, identity [16]byte, log *slog.Logger) (*Control, error) {
	if !c.RouterID.IsValid() {
		c.RouterID = bgp.RouterID(identity)
	}
	p, err := newProber(log)
	if err != nil {
		return nil, err
	}
	s, err := startSpeaker(ctx, c, log)
	if err != nil {
		p.close()
		return nil, err
	}
	return &Control{
		config: c, cache: m, log: log, speaker: s, prober: p, wake: make(chan struct{}, 1),
		nodes: map[netip.Addr]string{},
	}, nil
}

// Run announces the addresses of services, and again after each change, until ctx ends.
func (c *Control) Run(ctx context.Context) {
	defer c.speaker.close()
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(c.prober.run)
	defer c.prober.close()
	targets := make(chan struct{}, 1)
	running.Go(func() { probe.Rounds(ctx, targets, c.probe) })
	running.Go(func() { c.follow(ctx) })
	for {
		select {
		case <-c.wake:
		case <-ctx.Done():
			return
		}
		began := time.Now()
		changed, again := c.announce(ctx)
		if changed {
			notify(targets)
		}
		if again > 0 {
			time.AfterFunc(again, func() { notify(c.wake) })
		}
		select {
		case <-time.After(max(interval, idleFactor*time.Since(began))):
		case <-ctx.Done():
			return
		}
	}
}

func notify(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// follow wakes Run after changes of the cache.
func (c *Control) follow(ctx context.Context) {
	last := int64(0)
	for c.cache.Await(ctx, func() bool { return c.cache.Revision > last }) == nil {
		last = c.cache.CurrentRevision()
		notify(c.wake)
	}
}

// probe is one round of probes.
func (c *Control) probe() time.Duration {
	changed, next := c.prober.round()
	if changed {
		notify(c.wake)
	}
	return next
}

// announce announces what the cache and the probes say. It returns whether other nodes are to be probed, and after
// which time it must run again without a change.
func (c *Control) announce(ctx context.Context) (probed bool, again time.Duration) {
	tenants, _ := c.cache.Exposed()
	targets := derive(tenants)
	left := c.waits(tenants, time.Now())
	wanted, nodes := map[route]bool{}, map[netip.Addr]string{}
	ready := true // the state of all nodes is known
	status := make([]AddressStatus, 0, len(targets))
	for _, t := range targets {
		is := AddressStatus{Address: t.addr, Tenant: t.tenant, Reason: t.reason}
		for i, n := range t.candidates {
			if len(is.Nodes) == c.config.NextHops || i == 2*c.config.NextHops {
				break
			}
			wait := left[hosting{t.tenant, n.Name}]
			if wait > 0 {
				is.Reason = whySettling
				again = minimum(again, wait)
				continue
			}
			nodes[n.Addr] = n.Name
			usable, known := c.prober.usable(n.Addr)
			ready = ready && known
			if usable {
				is.Nodes = append(is.Nodes, n)
				wanted[route{t.addr, n.Addr}] = true
			} else {
				is.Silent = append(is.Silent, n)
				is.Reason = whySilent
			}
		}
		if len(is.Nodes) > 0 {
			is.Reason = ""
		}
		status = append(status, is)
	}
	probed = c.watch(nodes)
	var err error
	if ready || c.speaker.connected {
		err = c.speaker.announce(ctx, wanted)
	}
	if err != nil {
		c.log.Warn("announcing routes failed; retrying", "error", err)
		again = retryPeriod
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status, c.err = status, err
	return probed, again
}

// watch sets which nodes are probed, and returns whether that is a change.
func (c *Control) watch(nodes map[netip.Addr]string) bool {
	c.prober.watch(nodes)
	changed := false
	for a := range nodes {
		_, had := c.nodes[a]
		changed = changed || !had
	}
	c.nodes = nodes
	return changed
}

// waits returns for how much longer nodes must wait that have just begun to host a tenant.
func (c *Control) waits(tenants []cache.Exposed, now time.Time) map[hosting]time.Duration {
	is, left := map[hosting]time.Time{}, map[hosting]time.Duration{}
	for _, t := range tenants {
		for _, n := range t.Nodes {
			h := hosting{t.Tenant, n.Name}
			since, known := c.since[h]
			if !known && c.since != nil {
				since = now
			}
			is[h] = since
			if wait := settling - now.Sub(since); wait > 0 {
				left[h] = wait
			}
		}
	}
	c.since = is
	return left
}

func minimum(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return min(a, b)
}

// Status is the state of the announcements, as JSON.
type Status struct {
	ASN       uint32          `json:"asn"`
	RouterID  netip.Addr      `json:"routerId"`
	Peers     []PeerStatus    `json:"peers"`
	Addresses []AddressStatus `json:"addresses"`
	Error     string          `json:"error,omitempty"` // of the last announcement
}

// AddressStatus says by which nodes an address is announced.
type AddressStatus struct {
	Address netip.Addr `json:"address"`
	Tenant  string     `json:"tenant"`
	Nodes   []Node     `json:"nodes"`            // its next hops
	Silent  []Node     `json:"silent,omitempty"` // do not answer probes
	Reason  string     `json:"reason,omitempty"` // why it is not announced
}

// Status returns what an operator sees.
func (c *Control) Status() Status {
	s := Status{ASN: c.config.ASN, RouterID: c.speaker.config.RouterID}
	s.Peers = c.speaker.peerStatus()
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Addresses = slices.Clone(c.status)
	if c.err != nil {
		s.Error = c.err.Error()
	}
	return s
}
