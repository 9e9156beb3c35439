package offload

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
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

// scaleOut adds as many frontends as there are, if one has too much to do because of them.
func (s *step) scaleOut(r *Record, be *Node) bool {
	want, active := r.want(), r.Active()
	var busy *Node
	for _, f := range active {
		fe := s.node(f.Node)
		if fe == nil {
			continue
		}
		total := fe.load()
		caused := total >= s.limits.ScaleAt && fe.Own < s.limits.ScaleAt && total-fe.Own > fe.Own
		if s.lasting(caused, condition{"busy", fe.Name, ""}, s.limits.ScaleFor) && s.largest(fe) == r.Key() {
			busy = fe
		}
	}
	if busy == nil || len(active) < want || len(r.Frontends) > len(active) || s.now.Sub(r.Changed) < s.limits.Dwell {
		return false
	}
	if want >= tenant.MaxActive {
		s.problem(r.Key(), "frontend %s is at %s; %d frontends are the most", busy.Name, percent(busy.load()), want)
		return false
	}
	added, why := s.choose(r.Key(), be, demand{want, want, s.share(be, r) / 2, true}, r.Frontends)
	if why != "" {
		s.problem(r.Key(), "frontend %s is at %s; not scaled out: %s", busy.Name, percent(busy.load()), why)
		return false
	}
	s.change(r, Change{Kind: Add, Frontends: slices.Concat(r.Frontends, added), Want: 2 * want},
		"frontend %s is at %s for %v, %s by its own containers; added %s", busy.Name, percent(busy.load()),
		s.limits.ScaleFor, percent(busy.Own), some(nodesOf(added)))
	return true
}

// largest is the offload that causes most of a frontend's load, of those that can have more frontends, or of all.
func (s *step) largest(fe *Node) (most Key) {
	room, load := false, -1.0
	for k, l := range fe.Fronting {
		grows := s.wants[k] > 0 && s.wants[k] < tenant.MaxActive
		if grows != room && !grows {
			continue
		}
		if grows != room || l > load || l == load && (k.Tenant+" "+k.Node < most.Tenant+" "+most.Node) {
			most, room, load = k, grows, l
		}
	}
	return most
}

// Choose returns the n best frontends for a new offload, as draining, or an error that says why fewer fit.
func (c *Controller) Choose(now time.Time, in Input, k Key, n int) ([]tenant.Frontend, error) {
	s := c.begin(now, in)
	be := s.node(k.Node)
	if be == nil {
		return nil, fmt.Errorf("node %s is unknown", k.Node)
	}
	chosen, why := s.choose(k, be, demand{n, n, s.expected(k, be, n), false}, nil)
	if why != "" {
		return nil, errors.New(why)
	}
	return chosen, nil
}

// demand is what frontends are chosen for.
type demand struct {
	count, least int     // of nodes; with fewer than least, none
	share        float64 // load that each gets, in CPUs
	measured     bool    // only nodes whose load is known
}

// choose returns nodes as draining frontends, and why there are fewer than asked for (Nezha §4.2.1, B.1): of the
// backend's rack first, then those that have the tenant's rules already, then alike in CPUs, then with the least load,
// then those that are frontends of the fewest offloads: most loads are unknown while nothing needs them. While all
// nodes should measure their loads, those with unknown loads are the last choice.
func (s *step) choose(k Key, be *Node, d demand, except []tenant.Frontend) (chosen []tenant.Frontend, why string) {
	type fit struct {
		node                 *Node
		unknown, away, alien bool
		unlike               int
		load                 float64
	}
	var all []fit
	s.sift()
	refused := maps.Clone(s.refusals)
	for _, name := range append(nodesOf(except), be.Name) {
		if i, known := s.index[name]; known && s.unfit[i] != "" {
			if refused[s.unfit[i]]--; refused[s.unfit[i]] == 0 {
				delete(refused, s.unfit[i])
			}
		}
	}
	for _, fe := range s.able {
		if fe.Name == be.Name || contains(except, fe.Name) {
			continue
		}
		if why := s.refuse(k, be, fe, d); why != "" {
			refused[why]++
			continue
		}
		all = append(all, fit{
			fe, s.in.Auto && !fe.Measured, be.Rack == "" || fe.Rack != be.Rack, !s.has(k.Tenant, fe),
			int(math.Abs(math.Round(math.Log2(fe.budget() / be.budget())))), fe.load() + s.loads[fe.Name],
		})
	}
	slices.SortFunc(all, func(a, b fit) int {
		return cmp.Or(number(a.unknown)-number(b.unknown), number(a.away)-number(b.away),
			number(a.alien)-number(b.alien), a.unlike-b.unlike,
			cmp.Compare(a.load, b.load), s.served[a.node.Name]-s.served[b.node.Name],
			strings.Compare(a.node.Name, b.node.Name))
	})
	if len(all) < d.count {
		var texts []string
		for text, count := range refused {
			texts = append(texts, fmt.Sprintf("%d %s", count, text))
		}
		slices.Sort(texts)
		why = fmt.Sprintf("%d nodes fit, %d are needed", len(all), d.count)
		if texts != nil {
			why += "; the others: " + strings.Join(texts, ", ")
		}
	}
	if len(all) < d.least {
		return nil, why
	}
	for _, f := range all[:min(len(all), d.count)] {
		chosen = append(chosen, tenant.Frontend{Node: f.node.Name, Prefix: f.node.Prefix, Draining: true})
		s.reserve(k.Tenant, be, f.node, d.share)
	}
	return chosen, why
}

// sift finds the nodes that can be frontends of some offload, once in a step.
func (s *step) sift() {
	if s.unfit != nil {
		return
	}
	s.unfit, s.refusals = make([]string, len(s.in.Nodes)), map[string]int{}
	own := "with own load above " + percent(s.limits.ChooseAt)
	load := "whose load would be above " + percent(s.limits.ScaleAt)
	for i := range s.in.Nodes {
		fe, why := &s.in.Nodes[i], ""
		switch {
		case !fe.Connected:
			why = "not connected"
		case !fe.Offloads:
			why = "without offloads"
		case fe.Unfit != "":
			why = fe.Unfit
		case s.suspect[fe.Name]:
			why = "lost for a backend"
		case fe.Own > s.limits.ChooseAt:
			why = own
		case fe.load() > s.limits.ScaleAt:
			why = load
		default:
			s.able = append(s.able, fe)
			continue
		}
		s.unfit[i] = why
		s.refusals[why]++
	}
}

// refuse says why a node that can be a frontend cannot be one of this offload; nodes with equal texts are counted.
func (s *step) refuse(k Key, be, fe *Node, d demand) string {
	h := fe.Tenants[k.Tenant]
	switch rules := s.need(k.Tenant, be, fe); {
	case s.now.Before(s.avoid[pair{k, fe.Name}]):
		return "replaced just now"
	case h.Lag > s.limits.Lag || h.Unenforced != "":
		return "with policies that are behind"
	case d.measured && !fe.Measured:
		return "whose load is not known"
	case fe.load()+s.loads[fe.Name]+d.share/fe.budget() > s.limits.ScaleAt:
		return "whose load would be above " + percent(s.limits.ScaleAt)
	case fe.Rules.Capacity > 0 && rules > max(0, fe.Rules.free()-s.rules[fe.Name])/2: // else its room is unknown
		return fmt.Sprintf("without twice the room for %d rules", rules)
	}
	return ""
}

// has reports whether a node has a tenant's rules, or is about to.
func (s *step) has(tenantID string, n *Node) bool {
	return n.Tenants[tenantID].Containers > 0 || s.serves[Key{tenantID, n.Name}]
}

// need is the number of rules that a frontend has to load.
func (s *step) need(tenantID string, be, fe *Node) int {
	if s.has(tenantID, fe) {
		return 0
	}
	return be.Tenants[tenantID].Rules
}

// reserve remembers in this step what a frontend is about to get.
func (s *step) reserve(tenantID string, be, fe *Node, share float64) {
	s.rules[fe.Name] += s.need(tenantID, be, fe)
	s.serves[Key{tenantID, fe.Name}] = true
	s.served[fe.Name]++
	s.loads[fe.Name] += share / fe.budget()
}

// plan remembers what the frontends of a record have not reported yet.
func (s *step) plan(r *Record) {
	s.wants[r.Key()] = r.want()
	be := s.node(r.Node)
	if be == nil || r.Phase == tenant.OffloadEnding {
		return
	}
	share := s.share(be, r)
	for _, f := range r.Frontends {
		fe := s.node(f.Node)
		if fe == nil {
			continue
		}
		if !s.acked(f.Node, r) {
			s.rules[fe.Name] += s.need(r.Tenant, be, fe)
		}
		if fe.Fronting[r.Key()] == 0 {
			s.loads[fe.Name] += share / fe.budget()
		}
		s.serves[Key{r.Tenant, fe.Name}] = true
		s.served[fe.Name]++
	}
}

// expected is the load, in CPUs, that each of n frontends of a new offload would get.
func (s *step) expected(k Key, be *Node, n int) float64 {
	h := be.Tenants[k.Tenant]
	if h.Moved <= 0 {
		h.Moved = 1
	}
	return h.Load * be.budget() * h.Moved / float64(max(1, n))
}

// share is the load of a frontend of an offload, in CPUs: as measured, otherwise as expected.
func (s *step) share(be *Node, r *Record) float64 {
	measured := 0.0
	for _, f := range r.Frontends {
		if fe := s.node(f.Node); fe != nil {
			measured += fe.Fronting[r.Key()] * fe.budget()
		}
	}
	if measured > 0 {
		return measured / float64(r.want())
	}
	return s.expected(r.Key(), be, r.want())
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

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}
