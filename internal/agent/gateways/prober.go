package gateways

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/probe"
	"pilaster.io/pilaster/internal/tenant"
)

// deadAfter is after how many probes without an answer a gateway is dead: 0.7 s. With the time of a lost answer and of
// the change, new connections leave it within 1 s.
const deadAfter = 7

// Path sends probes and writes which gateways are alive.
type Path interface {
	ProbeGateway(node netip.Prefix, id address.TenantID) error
	GatewayAnswered(node netip.Prefix, id address.TenantID) (ago time.Duration, ok bool, err error)
	SetGatewayAlive(node netip.Prefix, id address.TenantID, alive bool) error
}

// Rules has the egress rules of the tenants that have containers on this node.
type Rules interface {
	// EgressGateways returns the rules that have gateways.
	EgressGateways() []Rule
	// GatewaysChanged receives a value after a change.
	GatewaysChanged() <-chan struct{}
}

// Rule is a rule of a tenant.
type Rule struct {
	Tenant string
	IDs    []address.TenantID
	Via    []tenant.EgressGateway
}

// State is what this node knows of a gateway of a tenant.
type State struct {
	Node     string
	Tenant   string
	Alive    bool      // new connections may use it
	Answered time.Time // zero: it has not answered yet
}

// Prober probes the gateways of the rules, except this node: each for each tenant id, because a gateway answers only
// for tenants whose rules it has.
//
// A gateway that does not answer is dead if another one of a rule with it is not: this node then knows better. If all
// gateways of its rules are silent, the fault may be this node's, and all stay alive. A gateway of a rule that arrives
// while the prober runs is silent until its first answer.
type Prober struct {
	rules Rules
	path  Path
	own   netip.Prefix // of this node
	log   *slog.Logger

	mu     sync.Mutex
	seen   map[key]*gateway
	failed string // of the last round
}

// key is a gateway of a tenant id.
type key struct {
	node netip.Prefix
	id   address.TenantID
}

type gateway struct {
	node  string
	of    string // tenant
	round uint64
	added bool // while the prober runs
	said  bool // alive is in the packet path
	alive bool
	probe.Pulse
}

// silent reports whether a gateway has missed too many probes, or has yet to answer the first one.
func (g *gateway) silent() bool { return g.Missed >= deadAfter || g.added && g.Answered.IsZero() }

// New returns a prober that does not run yet.
func New(rules Rules, path Path, own netip.Prefix, log *slog.Logger) *Prober {
	return &Prober{rules: rules, path: path, own: own, log: log, seen: map[key]*gateway{}}
}

// Run probes until ctx ends. Without a gateway, it waits for one.
func (p *Prober) Run(ctx context.Context) {
	round := uint64(0)
	probe.Rounds(ctx, p.rules.GatewaysChanged(), func() time.Duration { round++; return p.probe(round) })
}

// probe reads the answers, writes which gateways are alive, and sends the next probes.
func (p *Prober) probe(round uint64) (next time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	rules := p.rules.EgressGateways()
	var errs []error
	for _, rule := range rules {
		for _, g := range rule.Via {
			for _, id := range rule.IDs {
				k := key{g.Prefix, id}
				if s := p.see(k, g.Node, rule.Tenant, round); s != nil {
					errs = append(errs, p.probeOne(k, s))
				}
			}
		}
	}
	for k, s := range p.seen {
		alive := s.round != round || !s.silent() || !p.hasOther(rules, k)
		if s.said && s.alive == alive || !s.said && s.Answered.IsZero() && !s.silent() {
			continue // until it is known, what an earlier agent has found out counts
		}
		if err := p.path.SetGatewayAlive(k.node, k.id, alive); err != nil {
			errs = append(errs, fmt.Errorf("gateway %s: %w", s.node, err))
			continue
		}
		if s.said && s.round == round {
			p.log.Info("an egress gateway is used, or avoided", "gateway", s.node, "tenant", s.of,
				"used", alive)
		}
		s.said, s.alive = true, alive
	}
	for k, s := range p.seen {
		if s.round != round && (!s.said || s.alive) {
			delete(p.seen, k)
		}
	}
	p.report(errors.Join(errs...))
	if len(p.seen) == 0 {
		return 0
	}
	return probe.Every
}

// see returns what is known of a gateway; nil for this node, and for one that this round has seen.
func (p *Prober) see(k key, node, of string, round uint64) *gateway {
	if k.node == p.own {
		return nil
	}
	s := p.seen[k]
	if s == nil {
		s = &gateway{alive: true, added: round > 1}
		p.seen[k] = s
	}
	if s.round == round {
		return nil
	}
	s.node, s.of, s.round = node, of, round
	return s
}

// probeOne counts whether the last probe was answered, and sends the next one.
func (p *Prober) probeOne(k key, s *gateway) error {
	if !s.Sent.IsZero() && time.Since(s.Sent) < probe.Every*9/10 {
		return nil // a change caused this round
	}
	ago, ok, err := p.path.GatewayAnswered(k.node, k.id)
	s.Count(ago, ok)
	s.Send(true)
	if err := errors.Join(err, p.path.ProbeGateway(k.node, k.id)); err != nil {
		return fmt.Errorf("gateway %s: %w", s.node, err)
	}
	return nil
}

// hasOther reports whether a rule has the gateway and another one that is not silent.
func (p *Prober) hasOther(rules []Rule, k key) bool {
	return slices.ContainsFunc(rules, func(rule Rule) bool {
		return slices.Contains(rule.IDs, k.id) &&
			slices.ContainsFunc(rule.Via, func(g tenant.EgressGateway) bool { return g.Prefix == k.node }) &&
			slices.ContainsFunc(rule.Via, func(g tenant.EgressGateway) bool {
				return g.Prefix != k.node && (g.Prefix == p.own || !p.seen[key{g.Prefix, k.id}].silent())
			})
	})
}

// report logs an error that the round before did not have.
func (p *Prober) report(err error) {
	said := ""
	if err != nil {
		said = err.Error()
	}
	if said != "" && said != p.failed {
		p.log.Warn("probing egress gateways failed; it counts as probes without an answer", "error", err)
	}
	p.failed = said
}

// States returns what is known of the gateways, by name and tenant. Of several ids of a tenant, the worst counts.
func (p *Prober) States() (all []State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	worst := map[[2]string]State{}
	for _, s := range p.seen {
		at := [2]string{s.node, s.of}
		is := State{Node: s.node, Tenant: s.of, Alive: s.alive, Answered: s.Answered}
		if other, ok := worst[at]; ok {
			is.Alive = is.Alive && other.Alive
			if other.Answered.Before(is.Answered) {
				is.Answered = other.Answered
			}
		}
		worst[at] = is
	}
	return slices.SortedFunc(maps.Values(worst), func(a, b State) int {
		return cmp.Or(strings.Compare(a.Node, b.Node), strings.Compare(a.Tenant, b.Tenant))
	})
}
