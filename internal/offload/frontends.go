package offload

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

// state is what a frontend is good for.
type state int

const (
	good       state = iota // packets may be sent to it
	loading                 // draining: it has not loaded the rules yet
	recovering              // draining: it has not answered for long enough since it was lost
	replace                 // it works, but another should take its place
	unfit                   // draining: it did not load the rules in time
	lost                    // it does not answer, or has left the cluster
	doubtful                // active: it does not answer, and so do most
)

// assess returns the state of a record's frontend, and why it is not good.
func (s *step) assess(r *Record, be *Node, f tenant.Frontend, lagging bool) (state, string) {
	fe, k := s.node(f.Node), r.Key()
	if fe == nil || !fe.Offloads {
		return lost, f.Node + " has left the cluster or has no offloads"
	}
	if s.lost(k, f.Node) {
		if !f.Draining && s.result.InDoubt && fe.Connected {
			return doubtful, f.Node + " does not answer the backend's probes"
		}
		return lost, f.Node + " does not answer the backend's probes"
	}
	if f.Draining {
		sight := s.sights[pair{k, f.Node}]
		switch {
		case !s.acked(f.Node, r) && s.now.Sub(r.Changed) >= s.limits.Load:
			return unfit, fmt.Sprintf("%s has not loaded the rules in %v", f.Node, s.limits.Load)
		case !s.acked(f.Node, r):
			return loading, f.Node + " loads the rules"
		case !s.answers(f.Node, r) && be.Connected && s.now.Sub(r.Changed) >= s.limits.Load:
			return unfit, fmt.Sprintf("%s has not answered the backend's probes for %v", f.Node, s.limits.Load)
		case !s.answers(f.Node, r):
			return loading, f.Node + " has not answered the backend's probes yet"
		case !sight.lastLost.IsZero() && s.now.Sub(sight.lastLost) < s.goodFor(sight):
			return recovering, f.Node + " was lost just now"
		}
	}
	if s.in.Auto && s.lasting(fe.Own >= s.limits.ScaleAt, condition{"own", f.Node, ""}, s.limits.ScaleFor) {
		return replace, fmt.Sprintf("%s needs %s of its packet budget for its own containers", f.Node, percent(fe.Own))
	}
	if lagging {
		if h := fe.Tenants[r.Tenant]; h.Unenforced != "" {
			return replace, fmt.Sprintf("%s does not enforce the policies (%s)", f.Node, h.Unenforced)
		} else if h.Lag > s.limits.Lag {
			return replace, fmt.Sprintf("%s has policies that are %v behind", f.Node, h.Lag.Round(time.Millisecond))
		}
	}
	return good, ""
}

// goodFor is doubled with each loss of a frontend that is lost again and again.
func (s *step) goodFor(g *sight) time.Duration {
	return s.limits.GoodFor << min(max(0, g.times-1), s.limits.MaxDoublings)
}

// maintain keeps an offload at its number of frontends. It returns true if it emitted a change.
//
// A lost frontend goes at once. If no other is ready, half as many remain active, because their number is a power of
// two; the others of them keep their rules as a reserve. One that only should be replaced stays until another is ready.
// If most are lost, nothing changes but that: an active one that is lost makes room for another that is ready and
// answers.
func (s *step) maintain(r *Record, be *Node) bool {
	want, age, lagging := r.want(), s.now.Sub(r.Changed), s.lagging(r)
	states, reasons := make([]state, len(r.Frontends)), []string{}
	var active, ready, soft, doubted []tenant.Frontend
	coming := 0
	for i, f := range r.Frontends {
		var why string
		states[i], why = s.assess(r, be, f, lagging)
		switch st := states[i]; {
		case st == good && !f.Draining:
			active = append(active, f)
		case st == good:
			ready = append(ready, f)
		case st == loading || st == recovering:
			coming++
		case st == doubtful:
			doubted, reasons = append(doubted, f), append(reasons, why)
		case !f.Draining:
			reasons = append(reasons, why)
			if st == replace {
				soft = append(soft, f)
			}
		}
	}
	use := slices.Concat(active, ready, soft, doubted)
	use = use[:powerOfTwo(min(len(use), want))]
	if s.result.InDoubt {
		return len(doubted) > 0 && len(use) == len(r.Active()) && s.exchange(r, use, nil, reasons)
	}
	missing := want - len(active) - len(ready) - coming
	if len(active)+len(soft) >= want && age < s.limits.Dwell {
		missing = 0 // nothing is lost
	}
	var added []tenant.Frontend
	if missing > 0 {
		var why string
		d := demand{min(missing, tenant.MaxFrontends-len(r.Frontends)), 1, s.share(be, r), false}
		if added, why = s.choose(r.Key(), be, d, r.Frontends); why != "" {
			s.problem(r.Key(), "%d of %d frontends: %s", len(active)+len(soft), want, why)
		}
	}
	if len(use) == 0 && coming == 0 && len(added) == 0 && r.Phase != tenant.OffloadReturning {
		s.change(r, Change{Kind: Stop, Phase: StopPhase(r.Phase), Urgent: true},
			"no frontend is left (%s), and no other fits", strings.Join(reasons, "; "))
		return true
	}
	return s.exchange(r, use, added, reasons) || s.clean(r, states, len(active) >= want)
}

// exchange emits the change to other active frontends, and of frontends that are added.
func (s *step) exchange(r *Record, use, added []tenant.Frontend, reasons []string) bool {
	kind, names, urgent := Add, []string{}, false
	all := slices.Clone(r.Frontends)
	for i, f := range all {
		used := len(use) == 0 && !f.Draining || contains(use, f.Node) // without any, they stay until others are ready
		if used && f.Draining {
			kind, names = Activate, append(names, f.Node)
		} else if !used && !f.Draining && kind == Add {
			kind = Drain
		}
		all[i].Draining = !used
		urgent = urgent || !used && !f.Draining && s.lost(r.Key(), f.Node)
	}
	if slices.Equal(all, r.Frontends) && len(added) == 0 {
		return false
	}
	reason := strings.Join(reasons, "; ")
	if len(names) > 0 {
		reason = join(reason, some(names)+" ready")
	}
	if len(added) > 0 {
		reason = join(reason, "added "+some(nodesOf(added)))
	}
	s.change(r, Change{Kind: kind, Frontends: append(all, added...), Urgent: urgent}, "%s",
		join(reason, fmt.Sprintf("%d active", len(activeOf(all)))))
	return true
}

// clean removes frontends that have drained: all if the offload has enough without them, otherwise those that will not
// be used again. A lost one stays while it may be needed, because the backend probes only its frontends.
func (s *step) clean(r *Record, states []state, enough bool) bool {
	if s.now.Sub(r.Changed) < s.limits.Drain {
		return false
	}
	var keep []tenant.Frontend
	var gone []string
	crowded := len(r.Frontends) > tenant.MaxFrontends-r.want()
	for i, f := range r.Frontends {
		useless := states[i] == replace || states[i] == unfit || states[i] == lost && crowded
		if !f.Draining || !enough && !useless {
			keep = append(keep, f)
			continue
		}
		gone = append(gone, f.Node)
		if states[i] == lost || useless {
			s.avoid[pair{r.Key(), f.Node}] = s.now.Add(s.limits.Avoid)
		}
	}
	if len(gone) == 0 {
		return false
	}
	s.change(r, Change{Kind: Remove, Frontends: keep}, "%s drained", some(gone))
	return true
}

// lagging reports whether frontends whose policies are behind should be replaced: not if most are, because then the
// cause is not theirs.
func (s *step) lagging(r *Record) bool {
	active, behind := r.Active(), 0
	for _, f := range active {
		if fe := s.node(f.Node); fe != nil {
			if h := fe.Tenants[r.Tenant]; h.Lag > s.limits.Lag || h.Unenforced != "" {
				behind++
			}
		}
	}
	if behind > 1 && 2*behind > len(active) {
		s.problem(r.Key(), "%d of %d frontends have policies that are behind; none is replaced", behind, len(active))
		return false
	}
	return true
}

// observe notes which frontends the backends report as lost, and whether that can be.
//
// If it is more than half of all, the cause is more likely the network or the probes (Nezha C.2). But a lost frontend
// without a stream is gone, whatever happens to the probes: it does not count. And a backend that some frontend answers
// is able to probe, so the doubt needs two backends that lost some, or one that lost all.
func (s *step) observe() {
	total, gone := 0, 0
	counts := map[string][2]int{} // by backend: its frontends that are lost, and all
	for i := range s.in.Records {
		r := &s.in.Records[i]
		k, be := r.Key(), s.node(r.Node)
		_, seen := s.known[k]
		s.known[k] = s.round
		for _, f := range r.Frontends {
			g := s.sights[pair{k, f.Node}]
			if g == nil {
				g = &sight{}
				if !seen && f.Draining && r.Phase != tenant.OffloadPreparing {
					g.lastLost = s.now // perhaps another orchestrator saw a loss
				}
				s.sights[pair{k, f.Node}] = g
			}
			g.round = s.round
			if be == nil || !be.Connected || r.Phase == tenant.OffloadEnding {
				continue
			}
			missed, fe := slices.Contains(be.Tenants[r.Tenant].Lost, f.Node), s.node(f.Node)
			if !missed || fe != nil && fe.Connected {
				of := counts[r.Node]
				counts[r.Node] = [2]int{of[0] + number(missed), of[1] + 1}
				total, gone = total+1, gone+number(missed)
			}
			if !missed {
				g.lostSince = time.Time{}
				continue
			}
			s.suspect[f.Node] = true
			if g.lostSince.IsZero() {
				if s.now.Sub(g.lastLost) > s.limits.Avoid {
					g.times = 0
				}
				g.lostSince = s.now
				g.times++
			}
			g.lastLost = s.now
			s.wake(max(s.limits.Confirm, time.Millisecond))
		}
	}
	backends, blind := 0, false
	for _, of := range counts {
		backends += min(of[0], 1)
		blind = blind || of[0] == of[1]
	}
	if s.result.InDoubt = 2*gone > total && (backends > 1 || blind); s.result.InDoubt {
		s.problem(Key{}, "backends report %d of %d frontends as lost; more than half at once: none is removed; if "+
			"the nodes are dead, `pilaster offload stop` returns the rules", gone, total)
	}
}

// lost reports whether the backend has reported a frontend as lost for long enough.
func (s *step) lost(k Key, node string) bool {
	g := s.sights[pair{k, node}]
	return g != nil && !g.lostSince.IsZero() && s.now.Sub(g.lostSince) >= s.limits.Confirm
}

// powerOfTwo is the largest power of two that is not above n, and 0 for 0.
func powerOfTwo(n int) int {
	if n <= 0 {
		return 0
	}
	return 1 << (bits.Len(uint(n)) - 1)
}

func contains(all []tenant.Frontend, node string) bool {
	return slices.ContainsFunc(all, func(f tenant.Frontend) bool { return f.Node == node })
}

func nodesOf(all []tenant.Frontend) (names []string) {
	for _, f := range all {
		names = append(names, f.Node)
	}
	return names
}

func activeOf(all []tenant.Frontend) []tenant.Frontend {
	return tenant.Offload{Frontends: all}.Active()
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}
