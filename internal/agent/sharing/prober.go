package sharing

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	probeEvery = 100 * time.Millisecond // NZ6
	lostAfter  = 3                      // probes without an answer
	maxProbes  = 1024                   // in one round, as many answers as the kernel's table has
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
	// SetLostFrontends reports to the orchestrator which frontends of a tenant's offload do not answer.
	SetLostFrontends(tenant string, nodes []string)
}

// Prober probes the frontends of this node's offloads.
//
// A frontend is reported as lost when three probes in a row have no answer, and as good with the next answer. The probe
// of a frontend that has no rules yet is not answered. So a draining one, or one of an offload that begins, counts only
// if it has answered before.
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
	sent         time.Time // the last probe; zero before the first one
	due          bool      // the last probe should be answered
	answered     time.Time // the last answer; zero before the first one
	missed       int       // probes in a row
	round        uint64
}

// NewProber returns a prober that does not run yet.
func NewProber(of Backends, path Probing, log *slog.Logger) *Prober {
	return &Prober{of: of, path: path, log: log, seen: map[probed]*sight{}}
}

// Run probes until ctx ends. Without an offload whose backend is this node, it waits for one.
func (p *Prober) Run(ctx context.Context) {
	ticks := time.NewTicker(probeEvery)
	defer ticks.Stop()
	for round := uint64(1); ; round++ {
		next := ticks.C
		if !p.probe(round) {
			next = nil
		}
		select {
		case <-next:
		case <-p.of.OffloadsChanged():
		case <-ctx.Done():
			return
		}
	}
}

// probe reads the answers, reports what is lost, and sends a probe to each frontend that is due. It returns false if
// there are none.
func (p *Prober) probe(round uint64) (any bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	lost := map[string][]string{} // by tenant
	var failed error
	sent := 0
	for _, role := range p.of.Roles() {
		if !role.Backend || role.Phase == tenant.OffloadEnding {
			continue
		}
		lost[role.Tenant] = nil
		for _, f := range role.Frontends {
			if sent++; sent > maxProbes {
				break
			}
			s, err := p.probeOne(role, f)
			if err != nil {
				failed = err
			}
			if s.round = round; s.missed >= lostAfter {
				lost[role.Tenant] = append(lost[role.Tenant], f.Node)
			}
		}
	}
	for _, s := range p.seen {
		if _, still := lost[s.tenant]; !still {
			lost[s.tenant] = nil // the offload has ended
		}
	}
	maps.DeleteFunc(p.seen, func(_ probed, s *sight) bool { return s.round != round })
	for name, nodes := range lost {
		slices.Sort(nodes)
		p.of.SetLostFrontends(name, nodes)
	}
	if failed != nil && (p.failed == nil || p.failed.Error() != failed.Error()) {
		p.log.Warn("probing a frontend failed; it counts as a probe without an answer", "error", failed)
	}
	p.failed = failed
	return sent > 0
}

// probeOne counts whether the last probe was answered, and sends the next one if it is time.
func (p *Prober) probeOne(role agent.Role, f tenant.Frontend) (*sight, error) {
	key := probed{role.ID, f.Prefix}
	s := p.seen[key]
	if s == nil {
		s = &sight{tenant: role.Tenant, node: f.Node}
		p.seen[key] = s
	}
	if !s.sent.IsZero() && time.Since(s.sent) < probeEvery*9/10 {
		return s, nil // this round came because of a change
	}
	ago, ok, err := p.path.ProbeAnswered(role.ID, f.Prefix)
	if at := time.Now().Add(-ago); ok && !s.sent.IsZero() && !at.Before(s.sent) {
		s.answered, s.missed = at, 0
	} else if s.due {
		s.missed++
	}
	s.sent, s.due = time.Now(), !s.answered.IsZero() || role.Phase.Fronted() && !f.Draining
	next := dpapi.Probe{Offload: role.ID, VNI: uint32(role.TenantID), Epoch: role.Epoch}
	if failed := p.path.Probe(next, f.Prefix); failed != nil {
		err = failed
	}
	return s, err
}

// Answers returns, by tenant and frontend of this node's offloads, how long ago it has last answered a probe; a
// frontend that has not answered yet is left out.
func (p *Prober) Answers(name string) map[string]time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string]time.Duration{}
	for _, s := range p.seen {
		if s.tenant == name && !s.answered.IsZero() {
			all[s.node] = time.Since(s.answered)
		}
	}
	return all
}
