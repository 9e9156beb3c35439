package offload

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

// small is a cluster with a backend be and other nodes f1, f2, …, all in one rack. Its endpoint needs load of be's
// budget and 1,000 rules.
func small(tb testing.TB, others int, load float64) (*world, Key) {
	w := newWorld(tb, DefaultLimits())
	w.addNode("be", "a", 1, constant(0.05))
	for i := range others {
		w.addNode(fmt.Sprint("f", i+1), "a", 1, constant(0.1))
	}
	return w, w.addEndpoint("red", "be", 1000, constant(load))
}

// offload brings the endpoint to a phase as an operator does.
func (w *world) offload(k Key, frontends int, until tenant.OffloadPhase) *Record {
	w.Helper()
	w.report()
	chosen, err := w.c.Choose(w.now, w.in, k, frontends)
	if err != nil {
		w.Fatal(err)
	}
	w.apply(Change{
		Key: k, Kind: Start, Phase: tenant.OffloadPreparing, Frontends: chosen, Want: frontends, Reason: "operator",
	})
	w.record(k).Automatic = false
	for range 5 {
		if w.record(k).Phase == until {
			break
		}
		w.step(50 * time.Millisecond)
	}
	if r := w.record(k); r == nil || r.Phase != until {
		w.Fatalf("record %+v, want phase %s", r, until)
	}
	return w.record(k)
}

// only fails unless the changes are of these kinds; it returns the last one.
func (w *world) only(changes []Change, kinds ...Kind) (last Change) {
	w.Helper()
	var got []Kind
	for _, c := range changes {
		got, last = append(got, c.Kind), c
	}
	if !slices.Equal(got, kinds) {
		w.Fatalf("changes %+v, want %v; problems %+v", changes, kinds, w.last.Problems)
	}
	return last
}

func (w *world) problems() string {
	var all []string
	for _, p := range w.last.Problems {
		all = append(all, p.Text)
	}
	return strings.Join(all, "\n")
}

func (w *world) wantProblem(text string) {
	w.Helper()
	if !strings.Contains(w.problems(), text) {
		w.Errorf("problems %q, want one with %q", w.problems(), text)
	}
}

func (w *world) wantActive(k Key, nodes ...string) {
	w.Helper()
	got := nodesOf(w.record(k).Active())
	slices.Sort(got)
	if !slices.Equal(got, nodes) {
		w.Errorf("active frontends %v, want %v; all %+v", got, nodes, w.record(k).Frontends)
	}
}

// TestPhases has the phases of an activation and of a fallback (Nezha §4.2).
func TestPhases(t *testing.T) {
	const (
		ms        = time.Millisecond
		preparing = tenant.OffloadPreparing
		dual      = tenant.OffloadDual
		active    = tenant.OffloadActive
		returning = tenant.OffloadReturning
		ending    = tenant.OffloadEnding
	)
	for name, c := range map[string]struct {
		from   tenant.OffloadPhase
		mute   []string // agents that do not acknowledge what follows
		gone   bool     // the nodes in mute are not connected either
		before time.Duration
		at     time.Duration // when the next change comes, and not before
		to     tenant.OffloadPhase

		draining bool // all frontends
	}{
		"the backend acknowledges":         {from: preparing, at: 50 * ms, to: preparing, draining: true},
		"the backend does not":             {preparing, []string{"be"}, false, 7950 * ms, 8000 * ms, ending, true},
		"frontends acknowledge":            {from: preparing, at: 50 * ms, to: dual},
		"senders do not matter yet":        {preparing, []string{"f6"}, false, 0, 50 * ms, dual, false},
		"a frontend does not load":         {preparing, []string{"f1"}, false, 7950 * ms, 8000 * ms, ending, false},
		"a frontend goes":                  {preparing, []string{"f1"}, true, 7950 * ms, 8000 * ms, ending, false},
		"all nodes acknowledge":            {from: dual, at: 50 * ms, to: active},
		"a sender is slow":                 {dual, []string{"f6"}, false, 150 * ms, 200 * ms, active, false},
		"a sender is gone":                 {dual, []string{"f6"}, true, 0, 50 * ms, active, false},
		"the backend is slow":              {dual, []string{"be"}, false, 1950 * ms, 2000 * ms, active, false},
		"the backend has its rules":        {from: returning, at: 50 * ms, to: ending},
		"the backend loads for long":       {returning, []string{"be"}, false, time.Minute, 0, "", false},
		"all nodes send to the backend":    {from: ending, at: 50 * ms},
		"a sender is slow at the end":      {ending, []string{"f6"}, false, 1950 * ms, 2000 * ms, "", false},
		"a sender is gone at the end":      {ending, []string{"f6"}, true, 4950 * ms, 5000 * ms, "", false},
		"a stop while frontends load":      {from: preparing, at: -1, to: ending},
		"a stop while both have the rules": {from: dual, at: -1, to: ending},
		"a stop":                           {from: active, at: -1, to: returning},
		"a second stop":                    {from: ending, at: -1, to: ending},
	} {
		t.Run(name, func(t *testing.T) {
			if c.at < 0 {
				if got := StopPhase(c.from); got != c.to {
					t.Errorf("stopped in %s: %s, want %s", c.from, got, c.to)
				}
				return
			}
			w, k := small(t, 6, 0.2)
			w.node("f6").Tenants["red"] = Hosted{Containers: 1, Rules: 1000}
			w.node("f6").Own, w.base[6] = 0.35, constant(0.35) // it only sends
			r := w.offload(k, 4, preparing)
			r.Phase = c.from
			for i := range r.Frontends {
				r.Frontends[i].Draining = c.draining
			}
			w.changes++
			r.Since = w.changes
			for _, n := range c.mute {
				h := w.node(n).Tenants["red"]
				h.Applied = r.Since - 1
				w.node(n).Tenants["red"] = h
			}
			// Nodes that do not acknowledge are connected, unlike w.mute's.
			decide := func(after time.Duration) Result {
				w.now = r.Changed.Add(after)
				w.report()
				for _, n := range c.mute {
					h := w.node(n).Tenants["red"]
					h.Applied = r.Since - 1
					w.node(n).Tenants["red"], w.node(n).Connected = h, !c.gone
				}
				w.last = w.c.Step(w.now, w.in)
				return w.last
			}
			if c.before > 0 {
				w.only(decide(c.before).Changes)
			}
			if c.at == 0 {
				w.wantProblem("the backend has not loaded its rules for 1m0s")
				return
			}
			kind := Advance
			switch {
			case c.to == "":
				kind = End
			case c.from == preparing && c.to == ending:
				kind = Stop
			case c.draining:
				kind = Activate
			}
			first := w.only(decide(c.at).Changes, kind)
			if first.Phase != c.to || first.Since != r.Since || first.Reason == "" {
				t.Errorf("%+v", first)
			}
			if again := w.only(decide(c.at).Changes, kind); again.Phase != first.Phase || again.Reason != first.Reason {
				t.Errorf("repeated: %+v, first %+v", again, first)
			}
		})
	}
}

// TestWholeWay starts and stops an offload with an orchestrator that is replaced before each step: the phases need no
// memory.
func TestWholeWay(t *testing.T) {
	w, k := small(t, 5, 0.2)
	w.offload(k, 4, tenant.OffloadPreparing)
	var phases []tenant.OffloadPhase
	for i := range 10 {
		if i == 5 {
			r := w.record(k)
			w.changes++
			r.Phase, r.Since, r.Changed = StopPhase(r.Phase), w.changes, w.now
		}
		w.c = New(DefaultLimits())
		for _, c := range w.step(100 * time.Millisecond) {
			phases = append(phases, c.Phase)
		}
	}
	want := []tenant.OffloadPhase{
		tenant.OffloadPreparing, tenant.OffloadDual, tenant.OffloadActive, tenant.OffloadEnding, "",
	}
	if !slices.Equal(phases, want) {
		t.Errorf("phases %q, want %q", phases, want)
	}
	if len(w.in.Records) > 0 || w.node("f1").Tenants["red"].Applied != 0 || w.rules[w.index["f1"]] != 1000 {
		t.Errorf("left: %+v", w.in.Records)
	}
}

// TestNotEnforced: a frontend whose rules do not fit has acknowledged the change, but is not ready.
func TestNotEnforced(t *testing.T) {
	w, k := small(t, 5, 0.2)
	w.offload(k, 4, tenant.OffloadPreparing)
	w.node("f1").Tenants["red"] = Hosted{Unenforced: "no room"}
	w.only(w.run(8000*time.Millisecond, 50*time.Millisecond), Activate)
	const undone = "undone: in 8s these nodes did not load the rules, or did not answer the backend's probes: f1"
	if last := w.only(w.step(50*time.Millisecond), Stop); last.Reason != undone {
		t.Error(last.Reason)
	}
}

// TestUnheard: packets are sent only to frontends that have answered the backend.
func TestUnheard(t *testing.T) {
	w, k := small(t, 6, 0.2)
	w.offload(k, 4, tenant.OffloadPreparing)
	w.unheard["f1"] = true
	w.only(w.run(8000*time.Millisecond, 50*time.Millisecond), Activate)
	if last := w.only(w.step(50*time.Millisecond), Stop); !strings.HasSuffix(last.Reason, "probes: f1") {
		t.Error(last.Reason)
	}
	w, k = small(t, 6, 0.2)
	w.offload(k, 4, tenant.OffloadActive)
	w.dead["f1"], w.unheard["f5"] = true, true
	w.run(7*time.Second, 50*time.Millisecond)
	w.wantActive(k, "f2", "f3")
	w.mute["be"] = true // which of them answer now is not known
	w.run(7*time.Second, 50*time.Millisecond)
	w.wantActive(k, "f2", "f3")
	if r := w.record(k); contains(r.Frontends, "f6") {
		t.Errorf("f5 is replaced: %+v", r)
	}
	w.mute["be"] = false
	w.run(3*time.Second, 50*time.Millisecond)
	w.wantActive(k, "f2", "f3", "f4", "f6")
}

// TestSilentInDual: if no frontend answers in phase dual, packets go back to the backend, which has its rules.
func TestSilentInDual(t *testing.T) {
	w, k := small(t, 9, 0.2)
	w.offload(k, 4, tenant.OffloadDual)
	w.silence("f1", "f2", "f3")
	for _, c := range w.run(200*time.Millisecond, 20*time.Millisecond) {
		if c.Kind == Stop {
			t.Errorf("with one frontend: %+v", c)
		}
	}
	w, k = small(t, 9, 0.2)
	w.offload(k, 4, tenant.OffloadDual)
	w.silence("f1", "f2", "f3", "f4")
	w.step(time.Millisecond)
	changes := w.run(60*time.Millisecond, 60*time.Millisecond, Stop)
	if len(changes) == 0 || changes[0].Phase != tenant.OffloadEnding || !w.last.InDoubt {
		t.Errorf("%+v", changes)
	}
}

// silence makes frontends answer no backend; those that were silent do again.
func (w *world) silence(nodes ...string) {
	w.silent = func(_, fe string) bool { return slices.Contains(nodes, fe) }
}

func TestReturnWithoutContainers(t *testing.T) {
	w, k := small(t, 5, 0.2)
	r := w.offload(k, 4, tenant.OffloadActive)
	r.Phase = tenant.OffloadReturning
	w.report()
	delete(w.node("be").Tenants, "red")
	if last := w.only(w.c.Step(w.now, w.in).Changes, Advance); last.Phase != tenant.OffloadEnding {
		t.Errorf("%+v", last)
	}
}

func TestBackendLeaves(t *testing.T) {
	w, k := small(t, 5, 0.2)
	w.offload(k, 4, tenant.OffloadActive)
	w.report()
	in := w.in
	in.Nodes = slices.Clone(w.in.Nodes[1:])
	last := w.only(w.c.Step(w.now, in).Changes, End)
	if !strings.Contains(last.Reason, "left the cluster") {
		t.Error(last.Reason)
	}
}

// TestChoice has the order in which frontends are chosen (Nezha §4.2.1, B.1), and what excludes a node.
func TestChoice(t *testing.T) {
	set := func(name string, change func(n *Node)) func(w *world) {
		return func(w *world) { change(w.node(name)) }
	}
	for name, c := range map[string]struct {
		change func(w *world)
		want   string // of two frontends; or a part of the error
	}{
		"by load, then by name":  {set("f1", func(n *Node) { n.Own = 0.2 }), "f2 f3"},
		"the backend's rack":     {set("f1", func(n *Node) { n.Rack = "b" }), "f2 f3"},
		"rack before load":       {set("f1", func(n *Node) { n.Own = 0.25 }), "f2 f3"},
		"rack before the tenant": {func(w *world) { w.node("f1").Rack = "b"; host(w.node("f1")) }, "f2 f3"},
		"the tenant before load": {func(w *world) { w.node("f3").Own = 0.25; host(w.node("f3")) }, "f3 f1"},
		"alike before load":      {func(w *world) { w.node("f1").Budget = 4; w.node("f3").Own = 0.15 }, "f2 f3"},
		"another rack if needed": {
			func(w *world) { w.node("f1").Rack, w.node("f2").Rack, w.node("f2").Own = "b", "b", 0 }, "f3 f2",
		},
		"racks unknown":      {func(w *world) { w.node("be").Rack, w.node("f1").Own = "", 0.2 }, "f2 f3"},
		"half of free rules": {set("f1", func(n *Node) { n.Rules = Table{1000, 3000} }), "f1 f2"},
		"more than half":     {set("f1", func(n *Node) { n.Rules = Table{1001, 3000} }), "f2 f3"},
		"a node with the tenant loads none": {
			func(w *world) { host(w.node("f3")); w.node("f3").Rules = Table{3000, 3000} }, "f3 f1",
		},
		"not connected":    {set("f1", func(n *Node) { n.Connected = false }), "f2 f3"},
		"without offloads": {set("f1", func(n *Node) { n.Offloads = false }), "f2 f3"},
		"too busy":         {set("f1", func(n *Node) { host(n); n.Own = 0.31 }), "f2 f3"},
		"too busy as a frontend": {
			set("f1", func(n *Node) { host(n); n.Fronting = map[Key]float64{{"x", "y"}: 0.23} }), "f2 f3",
		},
		"busy enough to take its share": {
			set("f1", func(n *Node) { host(n); n.Fronting = map[Key]float64{{"x", "y"}: 0.22} }), "f1 f2",
		},
		"policies behind": {
			func(w *world) { host(w.node("f1")); lag(w, 1001*time.Millisecond, "f1") }, "f2 f3",
		},
		"an unknown load": {func(w *world) { w.node("f1").Measured, w.node("f1").Own = false, 0 }, "f1 f2"},
		"an unknown load, with auto": {
			func(w *world) { w.in.Auto, w.node("f1").Measured, w.node("f1").Own = true, false, 0 }, "f2 f3",
		},
		"unknown loads, with auto": {
			func(w *world) { w.in.Auto, w.node("f1").Measured, w.node("f3").Measured = true, false, false }, "f2 f1",
		},
		"none fits": {func(w *world) {
			w.node("f1").Connected, w.node("f2").Own = false, 0.5
			w.node("f3").Rules = Table{9000, 10_000}
		}, "0 nodes fit, 2 are needed; the others: 1 not connected, " +
			"1 with own load above 30 %, 1 without twice the room for 1000 rules"},
	} {
		t.Run(name, func(t *testing.T) {
			w, k := small(t, 3, 0.2)
			w.report()
			c.change(w)
			chosen, err := w.c.Choose(w.now, w.in, k, 2)
			got := strings.Join(nodesOf(chosen), " ")
			if err != nil {
				got = err.Error()
			}
			if got != c.want {
				t.Errorf("chosen %q, want %q", got, c.want)
			}
		})
	}
}

func host(n *Node) { n.Tenants["red"] = Hosted{Containers: 1, Rules: 1000} }

// TestFailover has what happens to frontends of an active offload (Nezha §4.4).
func TestFailover(t *testing.T) {
	t.Run("lost and replaced", func(t *testing.T) {
		w, k := small(t, 5, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		w.dead["f2"] = true
		w.only(w.step(10 * time.Millisecond)) // others may be reported
		w.only(w.step(50*time.Millisecond), Drain)
		w.wantActive(k, "f1", "f3")
		if !contains(w.record(k).Frontends, "f5") || !contains(w.record(k).Frontends, "f4") {
			t.Fatalf("no reserve: %+v", w.record(k).Frontends)
		}
		w.only(w.step(50*time.Millisecond), Activate)
		w.wantActive(k, "f1", "f3", "f4", "f5")
		w.only(w.run(1950*time.Millisecond, 50*time.Millisecond))
		w.only(w.step(50*time.Millisecond), Remove)
		if len(w.record(k).Frontends) != 4 {
			t.Errorf("%+v", w.record(k).Frontends)
		}
		w.dead["f2"], w.dead["f1"] = false, true // f2 is not chosen again soon
		w.only(w.run(time.Minute, 50*time.Millisecond), Drain)
		w.wantProblem("1 replaced just now")
	})
	t.Run("lost and back", func(t *testing.T) {
		w, k := small(t, 4, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		w.dead["f2"] = true
		w.only(w.run(time.Second, 50*time.Millisecond), Drain)
		w.wantActive(k, "f1", "f3")
		w.wantProblem("2 of 4 frontends: 0 nodes fit, 1 are needed")
		delete(w.dead, "f2")
		w.step(50 * time.Millisecond)
		w.only(w.run(4900*time.Millisecond, 50*time.Millisecond)) // since it was last lost
		w.only(w.step(50*time.Millisecond), Activate)
		w.wantActive(k, "f1", "f2", "f3", "f4")
	})
	t.Run("an orchestrator without memory waits too", func(t *testing.T) {
		w, k := small(t, 4, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		w.dead["f2"] = true
		w.run(time.Second, 50*time.Millisecond)
		delete(w.dead, "f2")
		w.c = New(DefaultLimits())
		w.only(w.step(0))
		w.only(w.run(4950*time.Millisecond, 50*time.Millisecond))
		w.only(w.step(50*time.Millisecond), Activate)
	})
	t.Run("again and again", func(t *testing.T) {
		w, k := small(t, 4, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		for i := range 400 { // it answers for 8 of 10 s
			w.dead["f2"] = i%10 < 2
			w.step(time.Second)
		}
		if len(w.log) > 15 {
			t.Errorf("%d changes in 400 s", len(w.log))
		}
	})
	t.Run("two of four", func(t *testing.T) {
		w, k := small(t, 6, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		w.dead["f1"], w.dead["f2"] = true, true
		w.only(w.run(200*time.Millisecond, 50*time.Millisecond), Drain, Activate)
		w.wantActive(k, "f3", "f4", "f5", "f6")
	})
	t.Run("gone with their nodes", func(t *testing.T) {
		w, k := small(t, 4, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		for i := range w.in.Nodes {
			w.in.Nodes[i].Offloads = w.in.Nodes[i].Name == "be"
		}
		last := w.only(w.step(50*time.Millisecond), Stop)
		if last.Phase != tenant.OffloadReturning || !strings.Contains(last.Reason, "no frontend is left") {
			t.Errorf("%+v", last)
		}
	})
	t.Run("fewer than asked for are left alone", func(t *testing.T) {
		w, k := small(t, 5, 0.2)
		w.offload(k, 2, tenant.OffloadActive)
		w.only(w.run(time.Minute, time.Second))
		w.wantActive(k, "f1", "f2")
	})
	t.Run("policies behind", func(t *testing.T) {
		w, k := small(t, 5, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		lag(w, time.Second, "f1")
		w.only(w.run(time.Minute, 100*time.Millisecond))
		lag(w, 1001*time.Millisecond, "f1")
		w.only(w.run(time.Second, 100*time.Millisecond), Add, Activate)
		w.wantActive(k, "f2", "f3", "f4", "f5")
	})
	t.Run("the only one, with policies behind, not at once", func(t *testing.T) {
		w, k := small(t, 5, 0.2)
		w.offload(k, 1, tenant.OffloadActive)
		lag(w, time.Minute, "f1")
		w.only(w.run(9*time.Second, 100*time.Millisecond))
		w.only(w.run(2*time.Second, 100*time.Millisecond), Add, Activate)
		w.wantActive(k, "f2")
	})
	t.Run("policies not enforced", func(t *testing.T) {
		w, k := small(t, 5, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		w.node("f1").Tenants["red"] = Hosted{Unenforced: "no room"}
		w.only(w.run(11*time.Second, 100*time.Millisecond), Add, Activate)
		w.wantActive(k, "f2", "f3", "f4", "f5")
	})
	t.Run("policies behind everywhere", func(t *testing.T) {
		w, k := small(t, 5, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		lag(w, time.Minute, "f1", "f2", "f3")
		w.only(w.run(time.Minute, 100*time.Millisecond))
		w.wantProblem("3 of 4 frontends have policies that are behind; none is replaced")
	})
	t.Run("a replacement that does not load", func(t *testing.T) {
		w, k := small(t, 6, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		w.dead["f1"] = true
		w.run(100*time.Millisecond, 50*time.Millisecond)
		w.mute["f5"] = true
		w.run(10*time.Second, 100*time.Millisecond)
		w.wantActive(k, "f2", "f3", "f4", "f6")
	})
	t.Run("an agent that is away does no harm", func(t *testing.T) {
		w, k := small(t, 5, 0.2)
		w.offload(k, 4, tenant.OffloadActive)
		w.mute["f1"], w.mute["be"] = true, true
		w.only(w.run(time.Minute, time.Second))
	})
}

func lag(w *world, by time.Duration, nodes ...string) {
	for _, n := range nodes {
		h := w.node(n).Tenants["red"]
		h.Lag = by
		w.node(n).Tenants["red"] = h
	}
}

// TestMassFailure: if more than half of all frontends are in doubt, none is removed (Nezha C.2), also when the reports
// do not arrive at once.
func TestMassFailure(t *testing.T) {
	for name, c := range map[string]struct {
		lost  int // of 8 frontends of two backends
		after time.Duration
		doubt bool
	}{
		"half":                   {4, 0, false},
		"more than half":         {5, 0, true},
		"all":                    {8, 0, true},
		"all, one after another": {8, 5 * time.Millisecond, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, DefaultLimits())
			var keys []Key
			for i, be := range []string{"be1", "be2"} {
				w.addNode(be, fmt.Sprint(i), 1, constant(0.05))
				keys = append(keys, w.addEndpoint(fmt.Sprint("t", i), be, 100, constant(0.2)))
			}
			for i := range 16 {
				w.addNode(fmt.Sprint("f", i), fmt.Sprint(i%2), 1, constant(0.1))
			}
			var all []string
			for _, k := range keys {
				all = append(all, nodesOf(w.offload(k, 4, tenant.OffloadActive).Active())...)
			}
			for i := range c.lost {
				w.silence(all[:i+1]...)
				w.step(c.after)
			}
			changes := w.run(10*time.Second, 20*time.Millisecond)
			if w.last.InDoubt != c.doubt || c.doubt != (len(changes) == 0) {
				t.Errorf("in doubt %v, want %v; changes %+v", w.last.InDoubt, c.doubt, changes)
			}
			if c.doubt {
				w.wantProblem(fmt.Sprintf("%d of 8 frontends as lost; more than half at once: none is removed", c.lost))
				w.silence()
				w.only(w.run(time.Minute, time.Second))
			}
		})
	}
}

// TestCrashes: lost frontends that are not connected are no doubtful ones, so an offload survives the crash of a rack
// that has all of its frontends.
func TestCrashes(t *testing.T) {
	w, k := small(t, 8, 0.2)
	w.offload(k, 4, tenant.OffloadActive)
	for _, n := range []string{"f1", "f2", "f3", "f4"} {
		w.dead[n] = true
	}
	w.run(time.Second, 50*time.Millisecond)
	w.wantActive(k, "f5", "f6", "f7", "f8")
}

// TestDoubtOfOneBackend: a backend that one frontend answers is able to probe.
func TestDoubtOfOneBackend(t *testing.T) {
	w, k := small(t, 8, 0.2)
	w.offload(k, 4, tenant.OffloadActive)
	w.silence("f1", "f2", "f3")
	w.run(time.Second, 50*time.Millisecond)
	if w.last.InDoubt {
		t.Error("in doubt")
	}
	w.wantActive(k, "f4", "f5", "f6", "f7")
}

// TestDoubtWhileDraining: in a mass failure, none is removed, added or started, but one that was added before and
// answers takes the place of a lost one.
func TestDoubtWhileDraining(t *testing.T) {
	w, k := small(t, 9, 0.2)
	w.base[0] = constant(0.35)
	w.addNode("be2", "a", 1, constant(0.35))
	green := w.addEndpoint("green", "be2", 1000, constant(0.2))
	w.offload(k, 4, tenant.OffloadActive)
	w.offload(green, 4, tenant.OffloadActive)
	w.unheard["f9"] = true
	w.silence("f1")
	w.only(w.run(200*time.Millisecond, 50*time.Millisecond), Drain)
	w.wantActive(k, "f2", "f3")
	w.silence("f1", "f2", "f3", "f5", "f6", "f7")
	w.addEndpoint("blue", "be2", 100, constant(0.9))
	w.in.Auto = true
	w.only(w.run(5*time.Second, 50*time.Millisecond), Activate)
	w.wantProblem("6 of 9 frontends")
	w.wantActive(k, "f2", "f4")
	clear(w.unheard)
	w.only(w.run(time.Minute, 50*time.Millisecond), Activate)
	w.wantActive(k, "f4", "f9")
}

// TestTwoBackends: what one offload is about to need counts for the next, in the same step and later.
func TestTwoBackends(t *testing.T) {
	for _, c := range []struct {
		others, free int
		same         bool // both are hot at the same time
		starts       int
	}{{8, 9000, true, 2}, {4, 9000, false, 2}, {4, 2999, true, 1}, {4, 2999, false, 1}, {4, 4000, true, 2}} {
		w := newWorld(t, DefaultLimits())
		w.in.Auto = true
		for i := range 2 {
			be := fmt.Sprint("be", i)
			w.addNode(be, "a", 1, constant(0.05))
			w.addEndpoint(fmt.Sprint("t", i), be, 1000, func(at time.Duration) float64 {
				if i == 1 && !c.same && at < 101*time.Millisecond {
					return 0.1
				}
				return 0.65
			})
		}
		for i := range c.others {
			w.rules[w.index[w.addNode(fmt.Sprint("f", i), "a", 1, constant(0.1)).Name]] = 10_000 - c.free
			w.mute[fmt.Sprint("f", i)] = false
		}
		w.run(3200*time.Millisecond, 100*time.Millisecond)
		if len(w.in.Records) != c.starts {
			t.Fatalf("%+v: %d offloads", c, len(w.in.Records))
		}
		if c.others == 8 {
			for _, f := range w.in.Records[0].Frontends {
				if contains(w.in.Records[1].Frontends, f.Node) {
					t.Errorf("%s has two offloads, others have none", f.Node)
				}
			}
		}
	}
	w, k := small(t, 5, 0.2) // a node that one backend cannot reach is not chosen for another
	w.offload(k, 4, tenant.OffloadActive)
	w.dead["f1"] = true
	w.step(time.Millisecond)
	w.node("f1").Connected = true
	w.addNode("be2", "a", 1, constant(0.05))
	blue := w.addEndpoint("blue", "be2", 1000, constant(0.1))
	if chosen, err := w.c.Choose(w.now, w.in, blue, 4); err != nil || contains(chosen, "f1") {
		t.Errorf("chosen %v, error %v", chosen, err)
	}
}

// TestLargest: of a frontend's offloads the one that can have more frontends grows.
func TestLargest(t *testing.T) {
	full, small, tiny := Key{"a", "x"}, Key{"b", "x"}, Key{"c", "x"}
	s := &step{wants: map[Key]int{full: 8, small: 4, tiny: 4}}
	for range 20 { // in any order
		for _, c := range []struct {
			fronting map[Key]float64
			want     Key
		}{
			{map[Key]float64{full: 0.3, small: 0.2, tiny: 0.1}, small},
			{map[Key]float64{full: 0.3}, full},
			{map[Key]float64{small: 0.1, tiny: 0.1}, small},
		} {
			if got := s.largest(&Node{Fronting: c.fronting}); got != c.want {
				t.Fatalf("%v: %v, want %v", c.fronting, got, c.want)
			}
		}
	}
}

// TestAutomatic has when offloads begin, grow, shrink and end by themselves (Nezha §4.2.1, §4.2.2, §4.3).
func TestAutomatic(t *testing.T) {
	ready := func(t *testing.T, others int, load float64) (*world, Key) {
		w, k := small(t, others, load)
		w.in.Auto = true
		return w, k
	}
	t.Run("start after 3 s at 70 %", func(t *testing.T) {
		w, k := ready(t, 5, 0.65)
		w.only(w.run(3*time.Second, 100*time.Millisecond))
		c := w.only(w.step(100*time.Millisecond), Start)
		if c.Key != k || len(c.Frontends) != 4 || c.Phase != tenant.OffloadPreparing ||
			!strings.Contains(c.Reason, "packet load 70 %") || !strings.Contains(c.Reason, "gain is 4.0") {
			t.Errorf("%+v", c)
		}
		w.run(2*time.Second, 100*time.Millisecond)
		if w.record(k).Phase != tenant.OffloadActive {
			t.Errorf("%+v", w.record(k))
		}
	})
	t.Run("not below, not for less, not if off", func(t *testing.T) {
		w, _ := ready(t, 5, 0.64)
		w.only(w.run(time.Minute, time.Second))
		w.endpoints[0].demand = func(at time.Duration) float64 { // 2.9 of 3 s
			if at%(3*time.Second) == 0 {
				return 0.64
			}
			return 0.9
		}
		w.only(w.run(time.Minute, 100*time.Millisecond))
		w.in.Auto, w.endpoints[0].demand = false, constant(0.9)
		w.only(w.run(time.Minute, time.Second))
	})
	for name, c := range map[string]struct {
		change func(be *Node, h *Hosted)
		text   string
	}{
		"no gain":     {func(_ *Node, h *Hosted) { h.Gain = 1 }, "red: the estimated gain is 1.0"},
		"refused":     {func(_ *Node, h *Hosted) { h.Refusal = "no policies" }, "red: no policies"},
		"nothing big": {func(be *Node, h *Hosted) { h.Containers = 0 }, "no tenant without one needs 5 % or more"},
		"sessions":    {func(be *Node, _ *Hosted) { be.Sessions = Table{7000, 10_000} }, "session table is at 70 %"},
		"no reserve": {
			func(be *Node, _ *Hosted) { be.NoReserve = true },
			"no offload: start the agents of all nodes with --mtu-reserve 96; not so: be",
		},
		"no room": {func(_ *Node, h *Hosted) { h.Rules = 5000 }, "5 without twice the room for 5000 rules"},
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := ready(t, 5, 0.65)
			if name == "sessions" {
				w.endpoints[0].demand = constant(0.1)
			}
			h := w.node("be").Tenants["red"]
			c.change(w.node("be"), &h)
			w.node("be").Tenants["red"] = h
			w.only(w.run(5*time.Second, time.Second))
			w.wantProblem(c.text)
		})
	}
	t.Run("the rule table", func(t *testing.T) {
		w, k := ready(t, 5, 0.1)
		w.rules[0] = 7000
		w.addEndpoint("blue", "be", 2000, constant(0.1))
		if c := w.only(w.run(time.Minute, time.Second, Start), Start); c.Tenant != "blue" {
			t.Errorf("%+v: blue has more rules than %v", c, k)
		}
	})
	t.Run("the largest first, then the next", func(t *testing.T) {
		w, k := ready(t, 9, 1.5)
		blue := w.addEndpoint("blue", "be", 1000, constant(1.6))
		if c := w.only(w.run(time.Minute, 100*time.Millisecond, Start), Start); c.Key != blue {
			t.Errorf("%+v", c)
		}
		changes := w.run(time.Minute, 100*time.Millisecond, Start)
		if c := changes[len(changes)-1]; c.Key != k || w.record(blue).Phase != tenant.OffloadActive {
			t.Errorf("%+v", changes)
		}
	})
	t.Run("one at a time", func(t *testing.T) {
		w, _ := ready(t, 9, 1.5)
		w.addEndpoint("blue", "be", 1000, constant(1.6))
		c := w.only(w.run(time.Minute, 100*time.Millisecond, Start), Start)
		w.mute[c.Frontends[0].Node] = true
		w.only(w.run(7900*time.Millisecond, 100*time.Millisecond), Activate)
	})
	t.Run("no scaling out for a frontend's own load", func(t *testing.T) {
		w, k := ready(t, 9, 0.8)
		w.offload(k, 4, tenant.OffloadActive)
		w.base[w.index["f1"]] = constant(0.23) // and 18 %
		w.only(w.run(time.Minute, time.Second))
	})
	t.Run("scale out at 40 % of a frontend, by fronting", func(t *testing.T) {
		w, k := ready(t, 9, 0.9)
		w.offload(k, 4, tenant.OffloadActive)
		w.only(w.run(time.Minute, time.Second))
		w.endpoints[0].demand = constant(1.4) // 10 % and 31.5 %
		c := w.only(w.run(time.Minute, 100*time.Millisecond, Activate), Add, Activate)
		if len(w.record(k).Active()) != 8 || w.record(k).Want != 8 {
			t.Errorf("%+v", c)
		}
		w.endpoints[0].demand = constant(0.1) // not back, because that saves nothing (B.2)
		w.only(w.run(10*time.Minute, time.Second))
	})
	t.Run("no scaling out without four more", func(t *testing.T) {
		w, k := ready(t, 7, 1.4)
		w.offload(k, 4, tenant.OffloadActive)
		w.only(w.run(time.Minute, time.Second))
		w.wantProblem("not scaled out: 3 nodes fit, 4 are needed")
	})
	t.Run("scale in at 40 % of its own", func(t *testing.T) {
		w, k := ready(t, 5, 0.9)
		w.offload(k, 4, tenant.OffloadActive)
		w.base[w.index["f1"]] = constant(0.39)
		w.only(w.run(time.Minute, time.Second))
		w.base[w.index["f1"]] = constant(0.4)
		w.only(w.run(time.Minute, time.Second), Add, Activate, Remove)
		w.wantActive(k, "f2", "f3", "f4", "f5")
		w.base[w.index["f1"]] = constant(0.1) // not exchanged again
		w.only(w.run(10*time.Minute, time.Second))
	})
	t.Run("fallback after 60 s below 50 %", func(t *testing.T) {
		w, k := ready(t, 5, 0.9)
		w.offload(k, 4, tenant.OffloadActive)
		w.record(k).Automatic = true
		w.endpoints[0].demand = constant(0.4) // 5 % + 10 %, and 36 % at frontends
		w.only(w.run(10*time.Minute, time.Second))
		w.endpoints[0].demand = constant(0.38)
		w.only(w.run(60*time.Second, time.Second))
		c := w.only(w.step(time.Second), Stop)
		if c.Phase != tenant.OffloadReturning || !strings.Contains(c.Reason, "would be at 49 % of its packet budget") {
			t.Errorf("%+v", c)
		}
		w.only(w.run(time.Second, 100*time.Millisecond), Advance, End)
	})
	t.Run("no fallback without a frontend's load", func(t *testing.T) {
		w, k := ready(t, 5, 0.1)
		w.offload(k, 4, tenant.OffloadActive)
		w.record(k).Automatic = true
		w.mute["f1"] = true
		w.only(w.run(10*time.Minute, time.Second))
		w.mute["f1"] = false
		w.only(w.run(62*time.Second, time.Second, Stop), Stop)
	})
	t.Run("no start by an unknown load, nor on nodes with one", func(t *testing.T) {
		w, _ := ready(t, 5, 0.9)
		w.node("be").Measured = false
		w.only(w.run(10*time.Second, time.Second))
		w.node("be").Measured = true
		w.node("f1").Measured, w.node("f2").Measured = false, false
		w.only(w.run(10*time.Second, time.Second))
		w.wantProblem("3 nodes fit, 4 are needed; the others: 2 whose load is not known")
	})
	for _, unknown := range []string{"be", "f1"} {
		t.Run("no fallback while the load is unknown of "+unknown, func(t *testing.T) {
			w, k := ready(t, 5, 0.1)
			w.offload(k, 4, tenant.OffloadActive)
			w.record(k).Automatic = true
			w.node(unknown).Measured = false
			w.only(w.run(10*time.Minute, time.Second))
			w.node(unknown).Measured = true
			w.only(w.run(62*time.Second, time.Second, Stop), Stop)
		})
	}
	t.Run("after a start that was undone, the next ones wait, each for twice as long", func(t *testing.T) {
		w, k := ready(t, 30, 0.9)
		w.silent = func(string, string) bool { return true } // no frontend answers
		var starts []time.Duration
		for range 4 {
			w.run(10*time.Minute, 100*time.Millisecond, Start)
			starts = append(starts, w.now.Sub(w.start))
		}
		for i := 1; i < len(starts); i++ { // 8 s until it is undone
			least := 8*time.Second + w.limits.Dwell<<i
			if waited := starts[i] - starts[i-1]; waited < least || waited > least+5*time.Second {
				t.Errorf("start %d came after %v, want %v to 5 s more", i, waited, least)
			}
		}
		if h := w.c.history[k]; h.times != 0 || h.undone != 3 {
			t.Errorf("%+v", h)
		}
	})
	t.Run("repeated before it is stored, a fallback counts once", func(t *testing.T) {
		w, k := ready(t, 5, 0.1)
		w.offload(k, 4, tenant.OffloadActive)
		w.record(k).Automatic = true
		w.report()
		for i := range 65 {
			w.last = w.c.Step(w.now.Add(time.Duration(i)*time.Second), w.in)
		}
		w.only(w.last.Changes, Stop)
		if got := w.c.history[k].times; got != 1 {
			t.Errorf("%d returns", got)
		}
	})
	t.Run("no fallback without room, or of an operator's offload", func(t *testing.T) {
		w, k := ready(t, 5, 0.1)
		w.offload(k, 4, tenant.OffloadActive)
		w.only(w.run(10*time.Minute, time.Second))
		w.record(k).Automatic = true
		w.rules[0] = 4000 // and 1,000
		w.only(w.run(10*time.Minute, time.Second))
		w.rules[0] = 3999
		w.only(w.run(62*time.Second, time.Second, Stop), Stop)
	})
}

// TestEstimate compares the closed form with a search.
func TestEstimate(t *testing.T) {
	for name, c := range map[string]struct {
		times Times
		n     int
	}{
		"cheap frontends":  {Times{Session: 800, Forward: 1500, Backend: 400, Frontend: 900}, 4},
		"dear frontends":   {Times{Session: 800, Forward: 1500, Backend: 400, Frontend: 9000}, 4},
		"two":              {Times{Session: 300, Forward: 500, Backend: 600, Frontend: 700}, 2},
		"one":              {Times{Session: 300, Forward: 500, Backend: 100, Frontend: 700}, 1},
		"one, dear":        {Times{Session: 300, Forward: 500, Backend: 100, Frontend: 1700}, 1},
		"nothing is added": {Times{Session: 300, Forward: 500}, 8},
	} {
		e := Estimate{c.times}
		for _, gain := range []float64{0.5, 0.9, 1, 1.7, 2, 3.3, 4, 7.9} {
			got, ok := e.LookupFor(gain, c.n)
			first := math.NaN()
			for lookup := 0.0; lookup < 60_000; lookup++ {
				if e.Lookup = lookup; e.Gain(c.n) >= gain-1e-12 {
					first = lookup
					break
				}
			}
			if ok != !math.IsNaN(first) || ok && math.Abs(got-first) > 1 {
				t.Errorf("%s: gain %v with lookups of %v ns (%v), a search finds %v", name, gain, got, ok, first)
			}
		}
	}
	e := Estimate{Times{Lookup: 10_000, Session: 800, Forward: 1500, Backend: 400, Frontend: 900}}
	for n, want := range map[int]float64{
		0: 0, 1: 12_300. / 10_900, 2: 12_300. / 5450, 4: 12_300. / 2725, 8: 12_300. / 2700,
	} {
		if got := e.Gain(n); math.Abs(got-want) > 1e-9 {
			t.Errorf("gain of %d frontends %v, want %v", n, got, want)
		}
	}
	if got := e.Moved(); math.Abs(got-(1-2700./12_300)) > 1e-9 {
		t.Errorf("moved %v", got)
	}
	if got := (Estimate{}).Gain(4); got != 0 {
		t.Errorf("gain %v without times", got)
	}
}
