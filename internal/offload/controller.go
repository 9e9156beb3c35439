package offload

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

// Limits are the controller's thresholds. Loads and occupancies are parts of a node's room, 0..1.
type Limits struct {
	OffloadAt  float64       // packet load or rule table of a backend at which it is relieved (Nezha §4.2.1)
	OffloadFor time.Duration // for so long without interruption
	MinGain    float64       // of an automatic offload by packet load
	MinShare   float64       // a tenant with less of the node's load is not worth an automatic offload

	ScaleAt  float64       // load of a frontend at which frontends are added, or it is replaced (§4.3)
	ScaleFor time.Duration // for so long
	ChooseAt float64       // a node's own load above which it is not chosen; below ScaleAt, so that it may stay

	FallBackBelow float64       // the backend's load with its rules back, below which they return (§4.2.2)
	FallBackFor   time.Duration // for so long; doubled with each return of an offload that started again
	MaxDoublings  int           // of FallBackFor
	Forget        time.Duration // after which a return no longer counts

	Dwell    time.Duration // between two changes of an offload's frontends, and of a return and a new start
	Avoid    time.Duration // a frontend that was replaced is not chosen again for this offload
	Confirm  time.Duration // a report of a lost frontend is acted on after this time, in which others may arrive
	GoodFor  time.Duration // a lost frontend answers for so long before packets are sent to it again
	Drain    time.Duration // a frontend without new packets keeps its rules
	Lag      time.Duration // by which a frontend's policies may be behind
	Load     time.Duration // a frontend has to load the rules in this time, or it is replaced
	Learn    time.Duration // senders learn of frontends in this time (§4.2.1)
	MaxPhase time.Duration // senders that do not acknowledge are awaited for so long
	Away     time.Duration // at the end, nodes that are not connected are awaited for so long
}

// MinShare is DefaultLimits().MinShare. A tenant with less of a node's packet budget and of its rule table need not be
// known.
const MinShare = 0.05

// DefaultLimits are those of the paper where it has them.
func DefaultLimits() Limits {
	return Limits{
		OffloadAt: 0.7, OffloadFor: 3 * time.Second, MinShare: MinShare, MinGain: 1.2,
		ScaleAt: 0.4, ScaleFor: 3 * time.Second, ChooseAt: 0.3,
		FallBackBelow: 0.5, FallBackFor: time.Minute, MaxDoublings: 6, Forget: 6 * time.Hour,
		Dwell: 10 * time.Second, Avoid: 10 * time.Minute, Confirm: 50 * time.Millisecond, GoodFor: 5 * time.Second,
		Drain: 2 * time.Second, Lag: time.Second, Load: 8 * time.Second,
		Learn: 200 * time.Millisecond, MaxPhase: 2 * time.Second, Away: 5 * time.Second,
	}
}

// DefaultFrontends are those of a new offload (Nezha B.2).
const DefaultFrontends = 4

// pair is a frontend of an offload.
type pair struct {
	Key
	frontend string
}

type sight struct {
	lostSince time.Time // zero while it answers
	lastLost  time.Time // zero if never
	times     int       // losses that follow one another
	round     uint64
}

// condition is something that must last.
type condition struct{ what, node, tenant string }

// timer has the time when a condition became true.
type timer struct {
	from  time.Time
	round uint64
}

// returned counts the automatic returns of an offload, and since the last one the starts that were undone.
type returned struct {
	times, undone int
	at            time.Time // of the last one
	epoch         uint32    // of that offload
}

// Controller decides about offloads. Its memory has times only: since when something lasts, and until when something
// must not be repeated. An orchestrator that starts with an empty one waits longer, at most.
type Controller struct {
	limits  Limits
	round   uint64
	known   map[Key]uint64 // offloads of the last round
	sights  map[pair]*sight
	since   map[condition]*timer // of conditions that are true
	avoid   map[pair]time.Time   // until then
	history map[Key]returned
	refused map[string]string // hot backends: why nothing was started
	names   []string          // of the last input's nodes
	index   map[string]int    // of these names
}

// New makes a controller without memory.
func New(limits Limits) *Controller {
	return &Controller{
		limits: limits, known: map[Key]uint64{}, sights: map[pair]*sight{}, since: map[condition]*timer{},
		avoid: map[pair]time.Time{}, history: map[Key]returned{}, refused: map[string]string{},
	}
}

// step is one call of Step.
type step struct {
	*Controller
	now     time.Time
	in      Input
	suspect map[string]bool    // frontends that any backend reports as lost
	rules   map[string]int     // rules that a node is about to load
	loads   map[string]float64 // load that a node is about to get
	serves  map[Key]bool       // nodes that are frontends of a tenant, and so have its rules
	served  map[string]int     // number of offloads that a node is frontend of
	wants   map[Key]int        // of the offloads
	result  Result

	able     []*Node        // by sift: nodes that can be frontends of some offload
	unfit    []string       // by index: why a node cannot; nil before sift
	refusals map[string]int // number of nodes by this text
}

// Step decides what to change now. It returns at most one change an offload. Call it at each report, and after
// Result.Next. Steps are repeatable: until a change is applied, the same input gives the same decision.
func (c *Controller) Step(now time.Time, in Input) Result {
	s := c.begin(now, in)
	for i := range in.Records {
		s.decide(&in.Records[i])
	}
	if in.Auto && !s.result.InDoubt {
		s.start()
	}
	c.forget(now)
	return s.result
}

func (c *Controller) begin(now time.Time, in Input) *step {
	c.round++
	s := &step{
		Controller: c, now: now, in: in, suspect: map[string]bool{},
		rules: map[string]int{}, loads: map[string]float64{}, wants: map[Key]int{}, serves: map[Key]bool{},
		served: map[string]int{},
		result: Result{Next: time.Second},
	}
	if !slices.EqualFunc(c.names, in.Nodes, func(name string, n Node) bool { return name == n.Name }) {
		c.names, c.index = nil, make(map[string]int, len(in.Nodes))
		for i := range in.Nodes {
			c.names = append(c.names, in.Nodes[i].Name)
			c.index[in.Nodes[i].Name] = i
		}
	}
	for i := range in.Records {
		s.plan(&in.Records[i])
	}
	s.observe()
	return s
}

// node returns a node of the input, nil if it is unknown.
func (s *step) node(name string) *Node {
	if i, ok := s.index[name]; ok {
		return &s.in.Nodes[i]
	}
	return nil
}

// forget deletes what belongs to offloads that are gone.
func (c *Controller) forget(now time.Time) {
	maps.DeleteFunc(c.known, func(_ Key, round uint64) bool { return round != c.round })
	maps.DeleteFunc(c.sights, func(_ pair, s *sight) bool { return s.round != c.round })
	maps.DeleteFunc(c.since, func(_ condition, t *timer) bool { return t.round != c.round })
	maps.DeleteFunc(c.refused, func(node string, _ string) bool { return c.since[condition{"hot", node, ""}] == nil })
	maps.DeleteFunc(c.avoid, func(_ pair, until time.Time) bool { return now.After(until) })
	maps.DeleteFunc(c.history, func(_ Key, r returned) bool { return now.Sub(r.at) > c.limits.Forget })
}

// lasting reports whether a condition has been true for a time without interruption.
func (s *step) lasting(is bool, name condition, duration time.Duration) bool {
	if !is {
		delete(s.since, name)
		return false
	}
	t := s.since[name]
	if t == nil {
		t = &timer{from: s.now}
		s.since[name] = t
	}
	t.round = s.round
	return s.now.Sub(t.from) >= duration
}

func (s *step) problem(k Key, format string, args ...any) {
	s.result.Problems = append(s.result.Problems, Problem{k, fmt.Sprintf(format, args...)})
}

func (s *step) wake(d time.Duration) { s.result.Next = min(s.result.Next, d) }

// change emits a change of a record.
func (s *step) change(r *Record, c Change, format string, args ...any) {
	c.Key, c.Since, c.Reason = r.Key(), r.Since, fmt.Sprintf(format, args...)
	if c.Want == 0 {
		c.Want = r.want()
	}
	if c.Frontends == nil && c.Kind != End {
		c.Frontends = r.Frontends
	}
	if c.Phase == "" && c.Kind != End {
		c.Phase = r.Phase
	}
	s.result.Changes = append(s.result.Changes, c)
	s.wake(100 * time.Millisecond)
}

// acked reports whether a node has applied a record as it is, with the policies' rules.
func (s *step) acked(node string, r *Record) bool {
	n := s.node(node)
	return n != nil && n.lacks(r, true) == ""
}

// answers reports whether a frontend has answered the backend's probes: the packets of both reach each other.
func (s *step) answers(node string, r *Record) bool {
	be := s.node(r.Node)
	return be != nil && slices.Contains(be.Tenants[r.Tenant].Answering, node)
}

// decide takes one record a step further.
func (s *step) decide(r *Record) {
	be := s.node(r.Node)
	if be == nil {
		s.change(r, Change{Kind: End}, "the backend %s has left the cluster", r.Node)
		return
	}
	age := s.now.Sub(r.Changed)
	if r.Phase != tenant.OffloadActive {
		s.wake(50 * time.Millisecond)
	}
	if !be.Offloads && r.Phase != tenant.OffloadEnding { // registered again, with a build that keeps its rules
		s.change(r, Change{Kind: Stop, Phase: tenant.OffloadEnding}, "the backend can no longer take part in offloads")
		return
	}
	switch r.Phase {
	case tenant.OffloadPreparing:
		s.preparing(r, age)
	case tenant.OffloadDual:
		silent := func(f tenant.Frontend) bool { return s.lost(r.Key(), f.Node) }
		if active := r.Active(); len(active) > 0 && !slices.ContainsFunc(active, func(f tenant.Frontend) bool {
			return !silent(f)
		}) {
			s.change(r, Change{Kind: Stop, Phase: tenant.OffloadEnding, Urgent: true},
				"%s do not answer the backend's probes, and the backend still has its rules", some(nodesOf(active)))
			return
		}
		if !s.maintain(r, be) {
			s.dual(r, age)
		}
	case tenant.OffloadActive:
		if !s.maintain(r, be) && s.in.Auto && !s.result.InDoubt && !s.scaleOut(r, be) {
			s.fallBack(r, be)
		}
	case tenant.OffloadReturning:
		h, hosts := be.Tenants[r.Tenant]
		switch {
		case s.acked(r.Node, r):
			s.change(r, Change{Kind: Advance, Phase: tenant.OffloadEnding}, "the backend has loaded its rules")
		case !hosts:
			s.change(r, Change{Kind: Advance, Phase: tenant.OffloadEnding},
				"the backend has no containers of the tenant any more")
		case !s.maintain(r, be) && age >= s.limits.Load:
			s.problem(r.Key(), "the backend has not loaded its rules for %v %s", age.Round(time.Second),
				orElse(h.Unenforced, "and has not said why"))
		}
	case tenant.OffloadEnding:
		s.ending(r, age)
	}
}

// preparing: no packet goes to frontends yet, so the start is undone if one does not load the rules. All frontends
// begin as draining, and load the rules. When the backend has reported its containers, some become active; as they
// acknowledge that, too, they know the containers before senders use them.
func (s *step) preparing(r *Record, age time.Duration) {
	var missing []string
	for _, a := range Awaited(r, s.in.Nodes) {
		missing = append(missing, a.Node)
	}
	switch {
	case len(missing) == 0 && len(r.Active()) > 0:
		s.change(r, Change{Kind: Advance, Phase: tenant.OffloadDual}, "all frontends have loaded the rules and answer")
	case len(missing) == 0 && len(r.Frontends) > 0:
		all := slices.Clone(r.Frontends)
		for i := range powerOfTwo(min(len(all), r.want())) {
			all[i].Draining = false
		}
		s.change(r, Change{Kind: Activate, Frontends: all}, "the backend has reported its containers")
	case age >= s.limits.Load || len(r.Frontends) == 0:
		for _, n := range missing {
			s.avoid[pair{r.Key(), n}] = s.now.Add(s.limits.Avoid)
		}
		if past := s.history[r.Key()]; r.Automatic && past.epoch != r.Epoch {
			s.history[r.Key()] = returned{past.times, past.undone + 1, s.now, r.Epoch}
		}
		s.change(r, Change{Kind: Stop, Phase: tenant.OffloadEnding},
			"undone: in %v these nodes did not load the rules, or did not answer the backend's probes: %s",
			s.limits.Load, orNone(some(missing)))
	}
}

// dual: the backend keeps its rules until no sender needs them there. A sender that does not know of the frontends
// yet loses no packet afterwards either, because the backend then asks a frontend.
func (s *step) dual(r *Record, age time.Duration) {
	if s.result.InDoubt {
		s.problem(r.Key(), "the backend keeps its rules, because most frontends are in doubt")
		return
	}
	next := Change{Kind: Advance, Phase: tenant.OffloadActive}
	awaited := Awaited(r, s.in.Nodes)
	needed := slices.ContainsFunc(awaited, func(a AwaitedNode) bool { return a.Needed })
	switch {
	case len(awaited) == 0:
		s.change(r, next, "all nodes send to the frontends")
	case !needed && age >= s.limits.Learn:
		s.change(r, next, "backend and frontends are ready, and %v have passed", s.limits.Learn)
	case age >= s.limits.MaxPhase:
		s.change(r, next, "%v have passed; not acknowledged by %s", s.limits.MaxPhase, some(namesOf(awaited)))
	}
}

// ending: frontends drop the rules when the record is gone. A node that still sends to them then loses packets, and one
// without connection to an orchestrator does, as its data path works on. So it is awaited, too: longer, because its
// agent may be restarting, but not without limit, because it may be dead.
func (s *step) ending(r *Record, age time.Duration) {
	awaited := Awaited(r, s.in.Nodes)
	still := slices.ContainsFunc(awaited, func(a AwaitedNode) bool {
		return age < s.limits.MaxPhase || !a.Connected && age < s.limits.Away
	})
	switch {
	case len(awaited) == 0:
		s.change(r, Change{Kind: End}, "all nodes send to the backend")
	case !still:
		s.change(r, Change{Kind: End}, "%v have passed; not acknowledged by %s", age.Round(time.Second),
			some(namesOf(awaited)))
	}
}

// StopPhase is the phase after a stop: the way back begins where packets go now. It is the phase itself if the way
// back has begun.
func StopPhase(p tenant.OffloadPhase) tenant.OffloadPhase {
	switch p {
	case tenant.OffloadPreparing, tenant.OffloadDual: // the backend has its rules
		return tenant.OffloadEnding
	case tenant.OffloadActive:
		return tenant.OffloadReturning
	}
	return p
}

func percent(part float64) string { return fmt.Sprintf("%.0f %%", 100*part) }

func orNone(text string) string { return cmp.Or(text, "no node") }

func orElse(text, other string) string {
	if text == "" {
		return other
	}
	return "(" + text + ")"
}

// some lists at most three names.
func some(names []string) string {
	if len(names) > 3 {
		return fmt.Sprintf("%s and %d others", strings.Join(names[:3], ", "), len(names)-3)
	}
	return strings.Join(names, ", ")
}
