package sharing

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/probe"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	probeEvery = probe.Every // NZ6
	lostAfter  = 3           // probes without an answer
	maxProbes  = 1024        // in one round; more frontends take turns

	// A start waits for the first answers, which come once a frontend has loaded its rules.
	probeNewEvery = 10 * time.Millisecond
	newFor        = 2 * time.Second
)

// Probing sends probes to the programs of frontends.
type Probing interface {
	Probe(p dpapi.Probe, frontend netip.Prefix) error
	ProbeAnswered(offload uint32, frontend netip.Prefix) (ago time.Duration, ok bool, err error)
}

// Backends has the offloads whose backend this node is.
type Backends interface {
	Roles() []agent.Role
	// OffloadsChanged receives a value after a change of Roles.
	OffloadsChanged() <-chan struct{}
	// SetFrontends reports to the orchestrator which frontends of a tenant's offload do not answer, and which have
	// answered since they were last lost.
	SetFrontends(tenant string, lost, answering []string)
}

// Prober probes the frontends of this node's offloads.
//
// A frontend is reported as lost when three probes in a row have no answer, and as good with the next answer. The probe
// of a frontend that has no rules yet is not answered. So a draining one, or one of an offload that begins, counts only
// if it has answered before; until it has, it is probed more often for a short time.
type Prober struct {
	of   Backends
	path Probing
	log  *slog.Logger

	mu     sync.Mutex
	seen   map[probed]*sight
	failed error // of the last round
}

type probed struct {
	offload  uint32
	frontend netip.Prefix
}

// sight is what the backend knows of a frontend.
type sight struct {
	tenant, node string
	prefix       netip.Prefix
	asked        dpapi.Probe
	used         bool      // packets are sent to it
	since        time.Time // when it became a frontend
	round        uint64
	probe.Pulse
}

// NewProber returns a prober that does not run yet.
func NewProber(of Backends, path Probing, log *slog.Logger) *Prober {
	return &Prober{of: of, path: path, log: log, seen: map[probed]*sight{}}
}

// Run probes until ctx ends. Without an offload whose backend is this node, it waits for one.
func (p *Prober) Run(ctx context.Context) {
	round := uint64(0)
	probe.Rounds(ctx, p.of.OffloadsChanged(), func() time.Duration { round++; return p.probe(round) })
}

// probe reads the answers, sends a probe to each frontend that is due, and reports what has changed. It returns the
// time until the next round; 0 if there are no frontends.
func (p *Prober) probe(round uint64) (next time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var due []*sight
	for _, role := range p.of.Roles() {
		if !role.Backend || role.Phase == tenant.OffloadEnding {
			continue
		}
		for _, f := range role.Frontends {
			s := p.see(role, f)
			s.round, next = round, probeEvery
			if s.Sent.IsZero() || time.Since(s.Sent) >= s.every()*9/10 { // if not, a change caused this round
				due = append(due, s)
			}
		}
	}
	slices.SortStableFunc(due, func(a, b *sight) int { return a.Sent.Compare(b.Sent) })
	var failed error
	for _, s := range due[:min(len(due), maxProbes)] {
		if err := p.probeOne(s); err != nil {
			failed = err
		}
	}
	type answers struct{ lost, answering []string }
	tenants := map[string]*answers{}
	for _, s := range p.seen {
		of := tenants[s.tenant]
		if of == nil {
			of = &answers{}
			tenants[s.tenant] = of
		}
		switch {
		case s.round != round: // it is no frontend any more
		case s.Missed >= lostAfter:
			of.lost = append(of.lost, s.node)
		case !s.Answered.IsZero():
			of.answering = append(of.answering, s.node)
		default:
			next = min(next, s.every())
		}
	}
	maps.DeleteFunc(p.seen, func(_ probed, s *sight) bool { return s.round != round })
	for name, of := range tenants {
		slices.Sort(of.lost)
		slices.Sort(of.answering)
		p.of.SetFrontends(name, of.lost, of.answering)
	}
	if failed != nil && (p.failed == nil || p.failed.Error() != failed.Error()) {
		p.log.Warn("probing a frontend failed; it counts as a probe without an answer", "error", failed)
	}
	p.failed = failed
	return next
}

// see returns what is known of a frontend, with its present part in the offload.
func (p *Prober) see(role agent.Role, f tenant.Frontend) *sight {
	key := probed{role.ID, f.Prefix}
	s := p.seen[key]
	if s == nil {
		s = &sight{since: time.Now()}
		p.seen[key] = s
	}
	s.tenant, s.node, s.prefix = role.Tenant, f.Node, f.Prefix
	s.asked = dpapi.Probe{Offload: role.ID, VNI: uint32(role.TenantID), Epoch: role.Epoch}
	s.used = role.Phase.Fronted() && !f.Draining
	return s
}

// every returns the time between two probes.
func (s *sight) every() time.Duration {
	if s.Answered.IsZero() && !s.Due && time.Since(s.since) < newFor {
		return probeNewEvery
	}
	return probeEvery
}

// probeOne counts whether the last probe was answered, and sends the next one.
func (p *Prober) probeOne(s *sight) error {
	ago, ok, err := p.path.ProbeAnswered(s.asked.Offload, s.prefix)
	s.Count(ago, ok)
	s.Send(!s.Answered.IsZero() || s.used)
	return cmp.Or(p.path.Probe(s.asked, s.prefix), err)
}

// Problems says if frontends are probed less often than they should be.
func (p *Prober) Problems() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.seen)
	if n <= maxProbes {
		return nil
	}
	return []string{fmt.Sprintf("the offloads of this node have %d frontends, and %d are probed in %v: one that fails "+
		"is found after %v\n  stop offloads of this node, or start them with fewer frontends",
		n, maxProbes, probeEvery, lostAfter*probeEvery*time.Duration((n+maxProbes-1)/maxProbes))}
}

// Answers returns, by tenant and frontend of this node's offloads, how long ago it has last answered a probe; a
// frontend that has not answered yet is left out.
func (p *Prober) Answers(name string) map[string]time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string]time.Duration{}
	for _, s := range p.seen {
		if s.tenant == name && !s.Answered.IsZero() {
			all[s.node] = time.Since(s.Answered)
		}
	}
	return all
}
