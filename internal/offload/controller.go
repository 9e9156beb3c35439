package offload

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
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

// Key names an offload: a tenant's containers on a node.
type Key struct{ Tenant, Node string }

// Record is an offload as the store has it.
type Record struct {
	Tenant string
	tenant.Offload
	Want      int       // active frontends that it should have: 1, 2, 4 or 8; 0 means as many as it has
	Automatic bool      // the controller started it and may end it
	Changed   time.Time // when this orchestrator first saw the record's Since: clocks of others may differ
}

// Key returns the record's key.
func (r *Record) Key() Key { return Key{r.Tenant, r.Node} }

func (r *Record) want() int {
	if r.Want > 0 {
		return min(r.Want, tenant.MaxActive)
	}
	if n := len(r.Active()); n > 0 {
		return n
	}
	return powerOfTwo(min(len(r.Frontends), tenant.MaxActive))
}

// Table is the occupancy of a node's table.
type Table struct{ Used, Capacity int }

func (t Table) free() int { return max(0, t.Capacity-t.Used) }

func (t Table) load() float64 {
	if t.Capacity == 0 {
		return 0
	}
	return float64(t.Used) / float64(t.Capacity)
}

// Node is what a node reports, and what the orchestrator knows of it.
type Node struct {
	Name      string
	Prefix    netip.Prefix
	Rack      string // empty: unknown
	Connected bool
	Offloads  bool              // it can take part in offloads
	Unfit     string            // why it cannot become a frontend; empty if it can
	NoReserve bool              // it leaves containers an MTU too large for those of offloaded tenants
	Measured  bool              // its packet load is known: of Own, Fronting and Hosted.Load
	Budget    float64           // its CPUs for packets; 0 counts as 1
	Own       float64           // packet load of its own containers, as a part of the budget
	Fronting  map[Key]float64   // packet load as a frontend, by offload
	Rules     Table             // entries of the rule table
	Sessions  Table             // entries of the session table
	Tenants   map[string]Hosted // with containers there, or fronted there
}

func (n *Node) budget() float64 {
	if n.Budget <= 0 {
		return 1
	}
	return n.Budget
}

func (n *Node) load() float64 {
	total := n.Own
	for _, l := range n.Fronting {
		total += l
	}
	return total
}

// Hosted is a tenant on a node.
type Hosted struct {
	Containers int
	Applied    uint64        // the tenant's changes that the node has acknowledged
	Unenforced string        // why the node does not enforce the tenant's policies; empty if it does
	Lag        time.Duration // age of the oldest change of the tenant's policies that the node has not acknowledged
	Lost       []string      // of a backend: frontends that do not answer its probes
	Answering  []string      // of a backend: frontends that have answered since they were last lost

	Load    float64 // part of Node.Own that the tenant's containers cause
	Rules   int     // entries that its policies need on a node
	Gain    float64 // Estimate.Gain(DefaultFrontends); 0 if unknown
	Moved   float64 // Estimate.Moved; 0 counts as 1
	Refusal string  // why the store refused an offload here just now; empty if it did not
}

// Input is the cluster at one time.
type Input struct {
	Auto    bool // `pilaster offload auto on`
	Nodes   []Node
	Records []Record
}

// Kind is the kind of a change.
type Kind string

// Kinds of changes.
const (
	Start    Kind = "start"    // a new record in phase preparing
	Advance  Kind = "advance"  // to the next phase
	Add      Kind = "add"      // frontends, draining: they load the rules and get no packets yet
	Activate Kind = "activate" // frontends that have loaded them, and drain those that they replace
	Drain    Kind = "drain"    // frontends: packets from them are accepted, none are sent to them
	Remove   Kind = "remove"   // frontends that have drained
	Stop     Kind = "stop"     // begin the way back
	End      Kind = "end"      // delete the record
)

// Kinds are all kinds of changes.
var Kinds = []Kind{Start, Advance, Add, Activate, Drain, Remove, Stop, End}

// Change is a change of a record. It applies only while the record's Since is the same (for Start: while there is no
// record), so that two orchestrators that decide at once do no harm.
type Change struct {
	Key
	Kind      Kind
	Since     uint64
	Phase     tenant.OffloadPhase // afterwards; empty for End
	Frontends []tenant.Frontend   // afterwards
	Want      int                 // afterwards
	Urgent    bool                // packets are lost until then
	Reason    string
}

// Problem is something that an operator should know. Tenant is empty for a node, both are empty for the cluster.
type Problem struct {
	Key
	Text string
}

// Result is what a step decided.
type Result struct {
	Changes  []Change
	Problems []Problem
	InDoubt  bool          // see observe: none is removed
	Next     time.Duration // the next step is due then, or when a report arrives
}

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
