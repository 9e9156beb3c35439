package offload

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

// fallBack returns the rules if the backend would have room for them.
func (s *step) fallBack(r *Record, be *Node) {
	name := condition{"cool", r.Node, r.Tenant}
	after, known := be.load(), be.Connected && be.Measured
	for _, f := range r.Frontends {
		fe := s.node(f.Node)
		if fe == nil || !fe.Connected || !fe.Measured { // its load is unknown
			known = false
			break
		}
		after += fe.Fronting[r.Key()] * fe.budget() / be.budget()
	}
	rules := Table{be.Rules.Used + be.Tenants[r.Tenant].Rules, be.Rules.Capacity}.load()
	past := s.history[r.Key()]
	earlier := past.times
	if past.epoch == r.Epoch { // decided before, but not stored yet
		earlier--
	}
	hold := s.limits.FallBackFor << min(earlier, s.limits.MaxDoublings)
	cool := r.Automatic && known && max(after, rules) < s.limits.FallBackBelow
	if !s.lasting(cool, name, hold) || s.now.Sub(r.Changed) < s.limits.Dwell {
		return
	}
	s.history[r.Key()] = returned{times: earlier + 1, at: s.now, epoch: r.Epoch}
	s.change(r, Change{Kind: Stop, Phase: StopPhase(r.Phase)},
		"with its rules the backend would be at %s of its packet budget and %s of its rule table, for %v",
		percent(after), percent(rules), hold)
}

// start begins offloads of backends without room.
func (s *step) start() {
	busy := map[string]bool{} // backends with an offload on its way
	for i := range s.in.Records {
		if r := &s.in.Records[i]; r.Phase != tenant.OffloadActive {
			busy[r.Node] = true
		}
	}
	var small []string // any node may get containers of the tenant later
	for i := range s.in.Nodes {
		if n := &s.in.Nodes[i]; n.Connected && n.NoReserve {
			small = append(small, n.Name)
		}
	}
	for i := range s.in.Nodes {
		n := &s.in.Nodes[i]
		load, rules := n.load(), n.Rules.load()
		if !n.Measured {
			load = 0
		}
		hot := n.Connected && n.Offloads && max(load, rules) >= s.limits.OffloadAt
		if hot && busy[n.Name] {
			hot = false // its load changes now; the time counts anew afterwards
		}
		if n.Connected && n.Sessions.load() >= s.limits.OffloadAt {
			s.problem(Key{"", n.Name}, "the session table is at %s; sessions stay at their node, so that an offload "+
				"would give no room", percent(n.Sessions.load()))
		}
		name := condition{"hot", n.Name, ""}
		if !s.lasting(hot, name, s.limits.OffloadFor) {
			if !hot {
				delete(s.refused, n.Name)
			} else if text := s.refused[n.Name]; text != "" {
				s.problem(Key{"", n.Name}, "%s", text)
			}
			continue
		}
		s.since[name].from = s.now // the next one, or another try
		why := fmt.Sprintf("packet load %s, rule table %s for %v", percent(load), percent(rules), s.limits.OffloadFor)
		text := fmt.Sprintf("start the agents of all nodes with --mtu-reserve %d; not so: %s", tenant.OffloadOverhead,
			some(small))
		if small == nil {
			text = s.relieve(n, load >= s.limits.OffloadAt, why)
		}
		if text != "" {
			s.refused[n.Name] = why + "; no offload: " + text
			s.problem(Key{"", n.Name}, "%s", s.refused[n.Name])
		} else {
			delete(s.refused, n.Name)
		}
	}
}

// relieve starts an offload of the tenant that needs most of what the node lacks, or says why not.
func (s *step) relieve(n *Node, packets bool, why string) string {
	type candidate struct {
		tenant string
		share  float64
	}
	var all []candidate
	reasons := []string{}
	for name, h := range n.Tenants {
		share := float64(h.Rules) / float64(max(1, n.Rules.Capacity))
		if packets {
			share = h.Load
		}
		switch past := s.history[Key{name, n.Name}]; {
		case h.Containers == 0 || share < s.limits.MinShare || s.offloaded(Key{name, n.Name}):
		case h.Refusal != "":
			reasons = append(reasons, name+": "+h.Refusal)
		case packets && h.Gain < s.limits.MinGain:
			reasons = append(reasons, fmt.Sprintf("%s: the estimated gain is %.1f", name, h.Gain))
		case past.undone > 0 && s.now.Sub(past.at) < s.limits.Dwell<<min(past.undone, s.limits.MaxDoublings):
			reasons = append(reasons, fmt.Sprintf("%s: the start was undone just now, %d times", name, past.undone))
		case past.times > 0 && s.now.Sub(past.at) < s.limits.Dwell:
			reasons = append(reasons, name+": returned just now")
		default:
			all = append(all, candidate{name, share})
		}
	}
	slices.SortFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.share, a.share), strings.Compare(a.tenant, b.tenant))
	})
	for _, c := range all {
		k := Key{c.tenant, n.Name}
		d := demand{DefaultFrontends, DefaultFrontends, s.expected(k, n, DefaultFrontends), true}
		chosen, text := s.choose(k, n, d, nil)
		if text != "" {
			reasons = append(reasons, c.tenant+": "+text)
			continue
		}
		s.result.Changes = append(s.result.Changes, Change{
			Key: k, Kind: Start, Phase: tenant.OffloadPreparing, Frontends: chosen, Want: DefaultFrontends,
			Reason: fmt.Sprintf("%s; the tenant needs %s, the estimated gain is %.1f", why, percent(c.share),
				n.Tenants[c.tenant].Gain),
		})
		s.wake(100 * time.Millisecond)
		return ""
	}
	if len(reasons) == 0 {
		return fmt.Sprintf("no tenant without one needs %s or more", percent(s.limits.MinShare))
	}
	slices.Sort(reasons)
	return strings.Join(reasons, "; ")
}

func (s *step) offloaded(k Key) bool {
	return s.known[k] == s.round
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
