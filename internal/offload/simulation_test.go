package offload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

// Parts of an endpoint's load that remain at its backend, and that its frontends have together, when it is split.
const (
	atBackend   = 0.25
	atFrontends = 0.9
)

// endpoint is a tenant's containers on a node.
type endpoint struct {
	Key
	rules  int
	demand func(at time.Duration) float64 // of the node's packet budget, unsplit
}

// world is a model of a cluster: it applies the controller's changes and makes the nodes' reports.
type world struct {
	testing.TB
	limits    Limits
	c         *Controller
	start     time.Time
	now       time.Time
	in        Input
	index     map[string]int
	base      []func(at time.Duration) float64 // nodes' own load without the endpoints
	rules     []int                            // used, with those that a node is about to load
	endpoints []endpoint
	dead      map[string]bool // neither program nor agent work
	mute      map[string]bool // the agent does not work
	silent    func(be, fe string) bool
	unheard   map[string]bool // frontends that have never answered, and are not lost
	changes   uint64
	ids       uint32
	log       []logged
	last      Result
}

type logged struct {
	at time.Duration
	Change
}

func constant(x float64) func(time.Duration) float64 { return func(time.Duration) float64 { return x } }

func newWorld(tb testing.TB, limits Limits) *world {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return &world{
		TB: tb, limits: limits, c: New(limits), start: start, now: start, index: map[string]int{},
		dead: map[string]bool{}, mute: map[string]bool{}, unheard: map[string]bool{},
	}
}

func (w *world) addNode(name, rack string, budget float64, base func(time.Duration) float64) *Node {
	w.index[name] = len(w.in.Nodes)
	n := len(w.in.Nodes) + 1
	w.in.Nodes = append(w.in.Nodes, Node{
		Name: name, Rack: rack, Connected: true, Offloads: true, Measured: true, Budget: budget,
		Prefix: netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 6: byte(n >> 8), 7: byte(n)}), 64),
		Rules:  Table{1000, 10_000}, Sessions: Table{100, 10_000},
		Fronting: map[Key]float64{}, Tenants: map[string]Hosted{},
	})
	w.base, w.rules = append(w.base, base), append(w.rules, 1000)
	return &w.in.Nodes[n-1]
}

func (w *world) node(name string) *Node { return &w.in.Nodes[w.index[name]] }

func (w *world) addEndpoint(tenantID, node string, rules int, demand func(time.Duration) float64) Key {
	k := Key{tenantID, node}
	w.endpoints = append(w.endpoints, endpoint{k, rules, demand})
	w.node(node).Tenants[tenantID] = Hosted{Containers: 1, Rules: rules, Gain: 1 / atBackend, Moved: 1 - atBackend}
	return k
}

func (w *world) record(k Key) *Record {
	for i := range w.in.Records {
		if w.in.Records[i].Key() == k {
			return &w.in.Records[i]
		}
	}
	return nil
}

// report brings the nodes' reports up to date: loads, acknowledgements, lost frontends.
func (w *world) report() {
	at := w.now.Sub(w.start)
	for i := range w.in.Nodes {
		n := &w.in.Nodes[i]
		n.Connected = !w.dead[n.Name] && !w.mute[n.Name]
		n.Own = w.base[i](at)
		if len(n.Fronting) > 0 {
			clear(n.Fronting)
		}
		if !n.Connected {
			continue
		}
		n.Rules.Used = w.rules[i]
		for id, h := range n.Tenants {
			if h.Applied != w.changes {
				h.Applied = w.changes
				n.Tenants[id] = h
			}
		}
	}
	for _, e := range w.endpoints {
		be := w.node(e.Node)
		h, d := be.Tenants[e.Tenant], e.demand(at)
		h.Load, h.Lost = d, nil
		if be.Connected {
			h.Answering = nil
		}
		if r := w.record(e.Key); r != nil {
			if r.Phase.Fronted() {
				h.Load = d * atBackend
				active := r.Active()
				for _, f := range active {
					fe := w.node(f.Node)
					fe.Fronting[e.Key] = d * atFrontends * be.Budget / fe.Budget / float64(len(active))
				}
			}
			for _, f := range r.Frontends {
				if w.dead[f.Node] || w.silent != nil && w.silent(e.Node, f.Node) {
					h.Lost = append(h.Lost, f.Node)
				} else if be.Connected && !w.unheard[f.Node] {
					h.Answering = append(h.Answering, f.Node)
				}
			}
		}
		be.Own += h.Load
		be.Tenants[e.Tenant] = h
	}
}

// step lets a time pass and the controller decide, and applies the changes.
func (w *world) step(d time.Duration) []Change {
	w.now = w.now.Add(d)
	w.report()
	w.last = w.c.Step(w.now, w.in)
	for _, c := range w.last.Changes {
		w.apply(c)
	}
	return w.last.Changes
}

// run lets a time pass in steps, until a change of a kind.
func (w *world) run(d, each time.Duration, until ...Kind) (changes []Change) {
	for end := w.now.Add(d); w.now.Before(end); {
		for _, c := range w.step(each) {
			changes = append(changes, c)
			if slices.Contains(until, c.Kind) {
				return changes
			}
		}
	}
	return changes
}

// apply changes a record as the store does, and fails the test if the change is not allowed.
func (w *world) apply(c Change) {
	w.Helper()
	w.log = append(w.log, logged{w.now.Sub(w.start), c})
	if c.Reason == "" {
		w.Fatalf("change without reason: %+v", c)
	}
	w.changes++
	r := w.record(c.Key)
	if c.Kind == Start {
		if r != nil {
			w.Fatalf("%v starts twice", c.Key)
		}
		w.ids++
		w.in.Records = append(w.in.Records, Record{Tenant: c.Tenant, Automatic: true, Offload: tenant.Offload{
			ID: w.ids, Node: c.Node, Prefix: w.node(c.Node).Prefix, Epoch: w.ids,
		}})
		r = &w.in.Records[len(w.in.Records)-1]
	} else if r == nil || r.Since != c.Since {
		w.Fatalf("a change for another state of %v: %+v", c.Key, c)
	}
	before := r.Frontends
	r.Phase, r.Frontends, r.Want, r.Since, r.Changed = c.Phase, c.Frontends, c.Want, w.changes, w.now
	if c.Kind != End {
		if err := r.Check(); err != nil {
			w.Fatalf("%+v: %v", c, err)
		}
	}
	tenantID, be, rules := c.Tenant, w.node(c.Node), w.node(c.Node).Tenants[c.Tenant].Rules
	for _, f := range r.Frontends {
		if i := w.index[f.Node]; !contains(before, f.Node) {
			if w.serving(tenantID, f.Node) > 1 || w.in.Nodes[i].Tenants[tenantID].Containers > 0 {
				continue
			}
			if free := w.in.Nodes[i].Rules.Capacity - w.rules[i]; rules > free/2 {
				w.Fatalf("%v: %d rules on %s, which has room for %d", c.Key, rules, f.Node, free)
			}
			w.rules[i] += rules
			w.in.Nodes[i].Tenants[tenantID] = Hosted{}
		}
	}
	if c.Kind == End {
		w.in.Records = slices.DeleteFunc(w.in.Records, func(r Record) bool { return r.Key() == c.Key })
	}
	for _, f := range before {
		if i := w.index[f.Node]; !contains(c.Frontends, f.Node) && w.serving(tenantID, f.Node) == 0 &&
			w.in.Nodes[i].Tenants[tenantID].Containers == 0 {
			w.rules[i] -= rules
			delete(w.in.Nodes[i].Tenants, tenantID)
		}
	}
	switch {
	case c.Kind == Advance && c.Phase == tenant.OffloadActive:
		w.rules[w.index[be.Name]] -= rules
	case c.Phase == tenant.OffloadReturning && c.Kind == Stop:
		w.rules[w.index[be.Name]] += rules
	}
}

// serving counts the offloads of a tenant that a node is frontend of.
func (w *world) serving(tenantID, node string) (count int) {
	for i := range w.in.Records {
		if r := &w.in.Records[i]; r.Tenant == tenantID && contains(r.Frontends, node) {
			count++
		}
	}
	return count
}

// Kinds of hot endpoints: the endpoint's number modulo kinds.
const (
	ramp = iota
	square
	noise
	threshold
	growing
	kinds
)

// hotCluster has nodes in 50 racks, each with a hot endpoint whose load changes in a way that invites oscillation.
func hotCluster(tb testing.TB, limits Limits, nodes int, seed uint64) (*world, *rand.Rand) {
	rng, rack := rand.New(rand.NewPCG(seed, 24)), nodes/50
	w := newWorld(tb, limits)
	w.in.Auto = true
	for i := range nodes {
		level, drift := 0.03+0.17*rng.Float64(), 0.0
		if rng.IntN(25) == 0 {
			drift = 0.35 // needs its budget for itself, from time to time
		}
		period, phase := 2400+1200*rng.Float64(), rng.Float64()
		n := w.addNode(fmt.Sprintf("n%03d", i), fmt.Sprint("r", i/rack), float64(int(1)<<(rng.IntN(5)/4)),
			func(at time.Duration) float64 {
				if drift == 0 {
					return level
				}
				return level + drift*max(0, math.Sin(2*math.Pi*(at.Seconds()/period+phase)))
			})
		n.Rules.Used = 1000 + rng.IntN(6000)
		w.rules[i] = n.Rules.Used
	}
	for i := range 50 {
		tenantID := fmt.Sprint("t", i/2)
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		phase := rng.Float64()
		wave := func(at, period time.Duration) float64 {
			return math.Sin(2 * math.Pi * (at.Seconds()/period.Seconds() + phase))
		}
		demand := []func(at time.Duration) float64{
			func(at time.Duration) float64 { // a ramp up and down
				return 0.1 + 0.8*min(1, max(0, 2-math.Abs(at.Minutes()-45)/20))
			},
			func(at time.Duration) float64 { return 0.5 + math.Copysign(0.3, wave(at, 6*time.Minute)) },
			func(time.Duration) float64 { return 0.35 + 0.5*random.Float64() },
			func(at time.Duration) float64 { return 0.62 + 0.1*wave(at, 4*time.Minute) }, // 57 to 77 %
			func(at time.Duration) float64 { return min(1.9, 0.2+at.Minutes()/25) },      // wants more frontends
		}[i%kinds]
		node := rack*i + rng.IntN(rack)
		w.base[node] = constant(0.05)
		w.in.Nodes[node].Budget = 1
		w.addEndpoint(tenantID, w.in.Nodes[node].Name, 200+rng.IntN(1200), demand)
		for range 20 {
			other := &w.in.Nodes[rng.IntN(len(w.in.Nodes))]
			if _, has := other.Tenants[tenantID]; !has {
				other.Tenants[tenantID] = Hosted{Containers: 1, Rules: 200}
			}
		}
	}
	return w, rng
}

// outcome is what a simulation counts.
type outcome struct {
	starts  map[Key]int
	changes map[Key]int // of frontends
	faults  map[Key]int // crashes of frontends, and frontends that needed their budget
	kinds   map[Kind]int
}

// most is the highest number of starts of one endpoint of a kind.
func (w *world) most(o outcome, kind int) (starts int) {
	for i := kind; i < len(w.endpoints); i += kinds {
		starts = max(starts, o.starts[w.endpoints[i].Key])
	}
	return starts
}

// simulate runs the cluster for a time: a frontend crashes every two minutes, an orchestrator is replaced after an
// hour, and after 70 minutes backends report 80 % of all frontends as lost for 46 s.
func simulate(w *world, rng *rand.Rand, length time.Duration) outcome {
	o := outcome{map[Key]int{}, map[Key]int{}, map[Key]int{}, map[Kind]int{}}
	const tick, mass, massEnds = 2 * time.Second, 70 * time.Minute, 70*time.Minute + 46*time.Second
	crashes := map[string]time.Duration{} // ends
	needs := map[string]bool{}            // nodes that need their budget for themselves
	fault := func(node string) {
		for i := range w.in.Records {
			if contains(w.in.Records[i].Frontends, node) {
				o.faults[w.in.Records[i].Key()]++
			}
		}
	}
	silent := map[string]bool{}
	w.silent = func(_, fe string) bool { return silent[fe] }
	for at := time.Duration(0); at < length; at += tick {
		var fronts []string
		if at == mass || at%(2*time.Minute) == 0 {
			seen := map[string]bool{}
			for i := range w.in.Records {
				for _, f := range w.in.Records[i].Frontends {
					if !seen[f.Node] {
						seen[f.Node] = true
						fronts = append(fronts, f.Node)
					}
				}
			}
		}
		switch {
		case at == mass:
			for _, n := range fronts {
				if rng.Float64() < 0.8 {
					silent[n] = true
				}
			}
		case at == massEnds:
			clear(silent)
		case at%(2*time.Minute) == 0 && len(fronts) > 0:
			n := fronts[rng.IntN(len(fronts))]
			w.dead[n], crashes[n] = true, at+time.Duration(60+rng.IntN(240))*time.Second
			fault(n)
		}
		for n, end := range crashes {
			if at >= end {
				delete(w.dead, n)
				delete(crashes, n)
			}
		}
		if at == time.Hour {
			w.c = New(w.limits)
		}
		for i, base := range w.base {
			n := w.in.Nodes[i].Name
			if is := base(at) >= w.limits.ScaleAt; is == needs[n] {
				continue
			} else if needs[n] = is; is {
				fault(n)
			}
		}
		for _, c := range w.step(tick) {
			o.kinds[c.Kind]++
			switch c.Kind {
			case Start:
				o.starts[c.Key]++
			case Add, Activate, Drain, Remove:
				o.changes[c.Key]++
			}
			if len(silent) > 0 && (c.Kind == Start || c.Phase == tenant.OffloadActive && c.Kind != Advance) {
				w.Fatalf("a change of frontends while most are in doubt: %+v", c)
			}
		}
		if at == mass+tick && !w.last.InDoubt {
			w.Fatal("the mass failure is not noticed")
		}
	}
	return o
}

// TestSimulation runs hours of a cluster of 1,000 nodes. apply checks the number of frontends and their room at each
// change.
func TestSimulation(t *testing.T) {
	t.Parallel()
	w, rng := hotCluster(t, DefaultLimits(), 1000, 1)
	o := simulate(w, rng, 2*time.Hour)
	t.Log(o.kinds)
	if len(o.starts) < 40 {
		t.Errorf("only %d of 50 hot endpoints were offloaded", len(o.starts))
	}
	for _, kind := range []Kind{Start, Advance, Add, Activate, Drain, Remove, Stop, End} {
		if o.kinds[kind] == 0 {
			t.Errorf("no change of kind %q: the simulation does not show it", kind)
		}
	}
	if wide := slices.ContainsFunc(w.in.Records, func(r Record) bool { return len(r.Active()) == 8 }); !wide {
		t.Error("no offload was scaled out")
	}
	for k, n := range o.starts {
		if n > mostStarts {
			t.Errorf("%v started %d times in 2 hours", k, n)
		}
		// A start needs no change of frontends, and scaling out four. A fault needs three (drain and add, activate,
		// remove), and three more if the replacement fails too.
		if most := 6*o.faults[k] + 4*n; o.changes[k] > most {
			t.Errorf("%v: %d changes of frontends with %d faults and %d starts", k, o.changes[k], o.faults[k], n)
		}
	}
}

// mostStarts of one offload in 2 hours, with one orchestrator that forgets the returns.
const mostStarts = 6

// TestOscillationWithoutHysteresis shows that TestSimulation would notice it if one of the measures were missing.
func TestOscillationWithoutHysteresis(t *testing.T) {
	t.Parallel()
	noDoubling := func(l *Limits) { l.MaxDoublings = 0 }
	for name, c := range map[string]struct {
		change        func(*Limits)
		more, notMore []int // kinds of endpoints
	}{
		"no doubling": {noDoubling, []int{square}, []int{ramp, noise, threshold, growing}},
		"one threshold": {func(l *Limits) {
			noDoubling(l) // which would hide it; without it alone, these endpoints do not oscillate
			l.FallBackBelow = l.OffloadAt
		}, []int{threshold}, []int{ramp, growing}},
		"no durations": {func(l *Limits) { l.OffloadFor, l.FallBackFor, l.Dwell = 0, 0, 0 }, []int{noise}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limits := DefaultLimits()
			c.change(&limits)
			w, rng := hotCluster(t, limits, 400, 1)
			o := simulate(w, rng, time.Hour)
			for _, kind := range c.more {
				if n := w.most(o, kind); n <= mostStarts {
					t.Errorf("endpoints of kind %d: at most %d starts in an hour", kind, n)
				}
			}
			for _, kind := range c.notMore {
				if n := w.most(o, kind); n > mostStarts {
					t.Errorf("endpoints of kind %d: %d starts in an hour, without a reason", kind, n)
				}
			}
		})
	}
}
