package gateways

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/probe"
	"pilaster.io/pilaster/internal/tenant"
)

// deadAfter is after how many probes without an answer a gateway is dead: 0.7 s. With the time of a lost answer and of
// the change, new connections leave it within 1 s.
const deadAfter = 7

// Path sends probes and writes which gateways are alive.
type Path interface {
	ProbeGateway(node netip.Prefix) error
	GatewayAnswered(node netip.Prefix) (ago time.Duration, ok bool, err error)
	SetGatewayAlive(node netip.Prefix, alive bool) error
}

// Rules has the egress rules of the tenants that have containers on this node.
type Rules interface {
	// EgressGateways returns the gateways of each rule that has some.
	EgressGateways() [][]tenant.EgressGateway
	// GatewaysChanged receives a value after a change.
	GatewaysChanged() <-chan struct{}
}

// State is what this node knows of a gateway.
type State struct {
	Node     string
	Alive    bool      // new connections may use it
	Silent   bool      // it has missed too many probes
	Only     bool      // it is silent, and so is any other gateway of one of its rules: what leaves by that is lost
	Answered time.Time // zero: it has not answered yet
}

// Prober probes the gateways of the rules, except this node.
//
// A gateway that does not answer is dead if another one of a rule with it is not: this node then knows better. If all
// gateways of its rules are silent, the fault may be this node's, and all stay alive.
type Prober struct {
	rules Rules
	path  Path
	own   netip.Prefix // of this node
	log   *slog.Logger

	mu     sync.Mutex
	seen   map[netip.Prefix]*gateway
	failed string // of the last round
}

type gateway struct {
	node  string
	round uint64
	said  bool // alive is in the packet path
	alive bool
	probe.Pulse
}

// silent reports whether a gateway has missed too many probes.
func (g *gateway) silent() bool { return g.Missed >= deadAfter }

// New returns a prober that does not run yet.
func New(rules Rules, path Path, own netip.Prefix, log *slog.Logger) *Prober {
	return &Prober{rules: rules, path: path, own: own, log: log, seen: map[netip.Prefix]*gateway{}}
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
		for _, g := range rule {
			if s := p.see(g, round); s != nil {
				errs = append(errs, p.probeOne(g.Prefix, s))
			}
		}
	}
	for prefix, s := range p.seen {
		alive := s.round != round || !s.silent() || !p.hasRule(rules, prefix, true)
		if s.said && s.alive == alive || !s.said && s.Answered.IsZero() && !s.silent() {
			continue // until it is known, what an earlier agent has found out counts
		}
		if err := p.path.SetGatewayAlive(prefix, alive); err != nil {
			errs = append(errs, fmt.Errorf("gateway %s: %w", s.node, err))
			continue
		}
		if s.said && s.round == round {
			p.log.Info("an egress gateway is used, or avoided", "gateway", s.node, "used", alive)
		}
		s.said, s.alive = true, alive
	}
	for prefix, s := range p.seen {
		if s.round != round && (!s.said || s.alive) {
			delete(p.seen, prefix)
		}
	}
	p.report(errors.Join(errs...))
	if len(p.seen) == 0 {
		return 0
	}
	return probe.Every
}

// see returns what is known of a gateway; nil for this node, and for one that this round has seen.
func (p *Prober) see(g tenant.EgressGateway, round uint64) *gateway {
	if g.Prefix == p.own {
		return nil
	}
	s := p.seen[g.Prefix]
	if s == nil {
		s = &gateway{alive: true}
		p.seen[g.Prefix] = s
	}
	if s.round == round {
		return nil
	}
	s.node, s.round = g.Node, round
	return s
}

// probeOne counts whether the last probe was answered, and sends the next one.
func (p *Prober) probeOne(prefix netip.Prefix, s *gateway) error {
	if !s.Sent.IsZero() && time.Since(s.Sent) < probe.Every*9/10 {
		return nil // a change caused this round
	}
	ago, ok, err := p.path.GatewayAnswered(prefix)
	s.Count(ago, ok)
	s.Send(true)
	if err := errors.Join(err, p.path.ProbeGateway(prefix)); err != nil {
		return fmt.Errorf("gateway %s: %w", s.node, err)
	}
	return nil
}

// hasRule reports whether a rule has the gateway, and another one that is not silent or none such.
func (p *Prober) hasRule(rules [][]tenant.EgressGateway, prefix netip.Prefix, other bool) bool {
	return slices.ContainsFunc(rules, func(rule []tenant.EgressGateway) bool {
		return slices.ContainsFunc(rule, func(g tenant.EgressGateway) bool { return g.Prefix == prefix }) &&
			slices.ContainsFunc(rule, func(g tenant.EgressGateway) bool {
				return g.Prefix != prefix && !p.isSilent(g.Prefix)
			}) == other
	})
}

// isSilent reports whether a gateway has missed too many probes. This node is not probed.
func (p *Prober) isSilent(prefix netip.Prefix) bool {
	s := p.seen[prefix]
	return prefix != p.own && s != nil && s.silent()
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

// States returns what is known of the gateways, by name.
func (p *Prober) States() (all []State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	rules := p.rules.EgressGateways()
	for prefix, s := range p.seen {
		all = append(all, State{Node: s.node, Alive: s.alive, Silent: s.silent(), Answered: s.Answered,
			Only: s.silent() && p.hasRule(rules, prefix, false)})
	}
	slices.SortFunc(all, func(a, b State) int { return strings.Compare(a.Node, b.Node) })
	return all
}
