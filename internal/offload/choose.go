package offload

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

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

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}
