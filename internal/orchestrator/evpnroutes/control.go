package evpnroutes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/evpn/speaker"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// Control announces what the cache has.
type Control struct {
	config  Config
	plan    address.Plan
	cache   *cache.Cache
	store   *store.Store
	log     *slog.Logger
	speaker *speaker.Speaker
	self    string // identifies this orchestrator

	announced map[string]bool // containers, by name; only Run uses it
	settings  evpn.Settings   // of the speaker; only Run uses it

	mu      sync.Mutex
	skipped map[string]string
	err     error // of the last announcement
}

const (
	interval    = 100 * time.Millisecond // minimum between two announcements: many containers may start at once
	idleFactor  = 3                      // pause after an announcement, in times that it took
	retryPeriod = time.Second
)

// Start records the VTEP pool in the store and starts the speaker, which connects when Run has announced.
func Start(ctx context.Context, c Config, s *store.Store, m *cache.Cache, identity [16]byte, log *slog.Logger,
) (*Control, error) {
	if err := s.UseVTEPs(ctx, c.Pool); err != nil {
		return nil, err
	}
	if !c.RouterID.IsValid() {
		c.RouterID = bgp.RouterID(identity)
	}
	is, err := speaker.Start(ctx, speaker.Config{
		ASN: c.ASN, RouterID: c.RouterID, Peers: c.Peers, Limits: c.Limits, Stale: c.Stale, Log: log,
	})
	if err != nil {
		return nil, err
	}
	return &Control{
		config: c, plan: s.Cluster().Plan, cache: m, store: s, log: log, speaker: is, self: m.Self,
		announced: map[string]bool{},
	}, nil
}

// Run announces the cluster's routes, and again after each change, until ctx ends.
func (c *Control) Run(ctx context.Context) {
	defer c.speaker.Close()
	var imports sync.WaitGroup
	defer imports.Wait()
	imports.Go(func() { c.runImports(ctx) })
	last := int64(0)
	for c.cache.Await(ctx, func() bool { return c.cache.Revision > last }) == nil {
		began := time.Now()
		tenants, revision := c.cache.Placements(isAnnounced)
		pause := interval
		if err := c.announce(ctx, tenants); err != nil {
			c.log.Warn("announcing routes failed; retrying", "error", err)
			pause = retryPeriod
		} else {
			last = revision
		}
		select {
		case <-time.After(max(pause, idleFactor*time.Since(began))):
		case <-ctx.Done():
		}
	}
}

func isAnnounced(network string) bool { return tenant.NetworkHas(network, tenant.Announced) }

func (c *Control) announce(ctx context.Context, tenants []cache.Placement) error {
	d := derive(c.plan, c.config, tenants)
	settings := evpn.Settings{ASNs: c.config.asns(), OwnVTEPs: c.config.Pool, VTEPs: c.config.VTEPs}
	for _, o := range d.own {
		settings.Tenants = append(settings.Tenants, o.Tenant)
	}
	err := c.configure(settings)
	if err == nil {
		// A raised sequence is a change of the store, and so of the cache: the next run announces it. Until then the
		// containers concerned are not announced, and all others are.
		raised, failed := c.raiseSequences(ctx, d)
		d.without(raised)
		if err = errors.Join(failed, c.speaker.Announce(ctx, d.own)); err == nil {
			c.announced = d.names()
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.skipped, c.err = d.skipped, err
	return err
}

// configure sets the import rules if they changed, because all routes are checked again.
func (c *Control) configure(s evpn.Settings) error {
	if reflect.DeepEqual(s, c.settings) {
		return nil
	}
	if err := c.speaker.Configure(s); err != nil {
		return err
	}
	c.settings = s
	return nil
}

// raiseSequences gives a container that appears while others announce its MAC the next mobility sequence. All
// orchestrators do so, and the store keeps the highest. Containers that were there before keep theirs: then others have
// moved the MAC away, or claim it wrongly. It returns the names of those that must not be announced yet.
func (c *Control) raiseSequences(ctx context.Context, d derivation) (raised map[string]bool, err error) {
	raised = map[string]bool{}
	for _, p := range d.moved {
		next := c.speaker.NextSequence(p.vni, p.mac)
		if c.announced[p.name()] || uint64(next) <= p.mapping.Sequence {
			continue
		}
		to, invalid := netip.ParsePrefix(p.mapping.To)
		if invalid != nil {
			continue
		}
		raised[p.name()] = true
		if failed := c.store.RaiseSequence(ctx, p.mapping.Tenant, to, uint64(next)); failed != nil {
			failed = fmt.Errorf("record sequence %d of %s of tenant %s: %w", next, to, p.mapping.Tenant, failed)
			err = errors.Join(err, failed)
		}
	}
	return raised, err
}

// Records returns the imported records in order, and a subscription to the changes after them.
func (c *Control) Records() ([]evpn.Record, *evpn.Subscription) { return c.speaker.Records() }

// Status returns what an operator sees.
func (c *Control) Status() Status {
	s := Status{Status: c.speaker.Status(), Pool: c.config.Pool}
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Skipped = maps.Clone(c.skipped)
	if c.err != nil {
		s.Error = c.err.Error()
	}
	return s
}

// Status is the state of the exchange with peers, as JSON.
type Status struct {
	speaker.Status
	Pool    netip.Prefix      `json:"vtepPool"`
	Skipped map[string]string `json:"skipped,omitempty"` // tenants and nodes that are not announced, and why
	Error   string            `json:"error,omitempty"`   // of the last announcement
}
