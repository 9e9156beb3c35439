package announce

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/nodeprobe"
)

// Control announces what the cache has.
type Control struct {
	config  Config
	cache   *cache.Cache
	log     *slog.Logger
	speaker *speaker
	prober  *nodeprobe.Prober
	usable  func(netip.Addr) (usable, known bool) // by the prober
	wake    chan struct{}                         // something changed

	// Only Run uses these.
	revision int64 // of the cache, of which targets are
	targets  []target
	since    map[route]time.Time // by which nodes may take packets to an address; zero: since before the start
	started  bool                // since has what was there at the start

	mu     sync.Mutex
	status []AddressStatus
	err    error // of the last announcement
}

const (
	interval    = 20 * time.Millisecond // minimum between two announcements
	idleFactor  = 3                     // pause after reading the cache, in times that it took
	retryPeriod = time.Second
	// settling is how long a node waits before packets to an address come in by it, while its agent has a session: its
	// tables must have the address, or it would reset connections that the fabric moves to it.
	settling = 3 * time.Second
)

// Start starts the speaker, which connects when Run has announced.
func Start(ctx context.Context, c Config, m *cache.Cache, identity [16]byte, log *slog.Logger) (*Control, error) {
	if !c.RouterID.IsValid() {
		c.RouterID = bgp.RouterID(identity)
	}
	p, err := nodeprobe.New(log)
	if err != nil {
		return nil, fmt.Errorf("--bgp-peer: %w", err)
	}
	s, err := startSpeaker(ctx, c, log)
	if err != nil {
		p.Close()
		return nil, err
	}
	return &Control{
		config: c, cache: m, log: log, speaker: s, prober: p, usable: p.Usable, wake: make(chan struct{}, 1),
	}, nil
}

// Run announces the addresses of services, and again after each change, until ctx ends.
func (c *Control) Run(ctx context.Context) {
	defer c.speaker.close()
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { c.prober.Run(ctx, func() { notify(c.wake) }) })
	running.Go(func() { c.follow(ctx) })
	notify(c.wake)
	for {
		select {
		case <-c.wake:
		case <-ctx.Done():
			return
		}
		took := c.read()
		if again := c.announce(ctx, time.Now()); again > 0 {
			time.AfterFunc(again, func() { notify(c.wake) })
		}
		select {
		case <-time.After(max(interval, idleFactor*took)):
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
	for c.cache.Await(ctx, func() bool {
		changed := c.cache.ExposedRevision > last
		last = c.cache.ExposedRevision
		return changed
	}) == nil {
		notify(c.wake)
	}
}

// read derives the targets again if the cache has changed, and returns how long that took.
func (c *Control) read() time.Duration {
	began := time.Now()
	tenants, revision := c.cache.Exposed(c.revision)
	if revision == c.revision && c.started {
		return 0
	}
	c.targets, c.revision = derive(tenants), revision
	c.note(began)
	return time.Since(began)
}

// note records since when nodes may take packets to addresses. A node whose agent has no session does not begin,
// because it may not have the address; one that has begun goes on.
func (c *Control) note(now time.Time) {
	is := map[route]time.Time{}
	for _, t := range c.targets {
		for _, n := range t.candidates {
			r := route{t.addr, n.Addr}
			since, had := c.since[r]
			switch {
			case had:
				is[r] = since
			case !c.started:
				is[r] = time.Time{}
			case n.live:
				is[r] = now
			}
		}
	}
	c.since, c.started = is, true
}

// announce announces what the cache and the probes say. It returns after which time it must run again without a change.
func (c *Control) announce(ctx context.Context, now time.Time) (again time.Duration) {
	wanted, nodes := map[route]bool{}, map[netip.Addr]bool{}
	ready := true // the state of all nodes is known
	status := make([]AddressStatus, 0, len(c.targets))
	for _, t := range c.targets {
		s := c.choose(t, now)
		for _, n := range s.is.Nodes {
			wanted[route{t.addr, n.Addr}] = true
		}
		for _, n := range s.probed {
			nodes[n.Addr] = true
		}
		ready = ready && s.unknown == 0
		if s.waits > 0 && (again == 0 || s.waits < again) {
			again = s.waits
		}
		status = append(status, s.is)
	}
	c.prober.Watch(nodes)
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
	return again
}

// choice is what follows for one address.
type choice struct {
	is      AddressStatus
	probed  []Node
	unknown int           // probed nodes that have neither answered nor been silent for long
	waits   time.Duration // until a node has settled; 0: none waits
}

// choose chooses the first usable candidates, and probes one more, so that it can replace one. A node that is a next
// hop now stays one until there are enough before it.
func (c *Control) choose(t target, now time.Time) choice {
	s := choice{is: AddressStatus{Address: t.addr, Tenant: t.tenant, Reason: t.reason}}
	limit, silent := c.config.NextHops, 0
	var stay []Node
	for _, n := range t.candidates {
		r := route{t.addr, n.Addr}
		since, begun := c.since[r]
		if !begun {
			continue
		}
		if left := settling - now.Sub(since); left > 0 {
			if s.waits == 0 || left < s.waits {
				s.waits = left
			}
			continue
		}
		enough := len(s.is.Nodes)+s.unknown > limit
		if enough && !c.speaker.announced[r] {
			continue
		}
		s.probed = append(s.probed, n.Node)
		usable, known := c.usable(n.Addr)
		switch {
		case !known:
			s.unknown++
		case !usable:
			silent++
			s.is.Silent = append(s.is.Silent, n.Node)
		case enough:
			stay = append(stay, n.Node)
		default:
			s.is.Nodes = append(s.is.Nodes, n.Node)
		}
	}
	if s.is.Nodes = append(s.is.Nodes, stay...); len(s.is.Nodes) > limit {
		s.is.Nodes = s.is.Nodes[:limit]
	}
	switch {
	case len(s.is.Nodes) > 0 || s.is.Reason != "":
	case silent > 0:
		s.is.Reason = whySilent
	default:
		s.is.Reason = whySettling
	}
	return s
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
