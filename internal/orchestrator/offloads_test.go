package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/store/storetest"
	"pilaster.io/pilaster/internal/tenant"
)

// phaseOf formats an offload as "phase frontend, frontend-", where "-" marks a frontend that is not active.
func phaseOf(o *pilasterv1.Offload) string {
	if o == nil {
		return "removed"
	}
	var frontends []string
	for _, f := range o.Frontends {
		mark := ""
		if f.Draining {
			mark = "-"
		}
		frontends = append(frontends, f.Node+mark)
	}
	phase := strings.ToLower(strings.TrimPrefix(o.Phase.String(), "OFFLOAD_PHASE_"))
	return strings.TrimSpace(phase + " " + strings.Join(frontends, ", "))
}

// offloadAgent is a simulated agent: it applies each tenant that it receives, and reports that.
type offloadAgent struct {
	name    string
	backend bool
	own     map[string][]byte // addresses of its containers, by tenant
	client  *join.Client
	leave   context.CancelFunc // ends its stream
	seen    chan string        // phases of the offload, as it applied them, with the number of containers

	mu       sync.Mutex // of what follows
	stream   *connect.BidiStreamForClient[pilasterv1.FollowRequest, pilasterv1.FollowResponse]
	hosts    map[string]bool
	applied  map[string]uint64
	policies map[string]int64
	stale    bool // it applies no policies
	sequence uint64
	lost     []string // frontends that do not answer; all others do

	frontends map[string][]string // of its offloads, by tenant
	mute      bool                // it acknowledges nothing
	updates   int                 // of tenants
}

// report sends what the agent has. The caller holds the lock.
func (a *offloadAgent) report() error {
	a.sequence++
	req := &pilasterv1.FollowRequest{HostedTenants: slices.Sorted(maps.Keys(a.hosts)), Sequence: a.sequence}
	for _, name := range req.HostedTenants {
		h := &pilasterv1.Hosting{Tenant: name, AppliedChanges: a.applied[name]}
		if h.AppliedChanges > 0 {
			h.PoliciesRevision = a.policies[name]
		}
		if own := a.own[name]; a.backend && own != nil && a.applied[name] > 0 {
			h.Offloaded = []*pilasterv1.OffloadedEndpoint{{Addresses: [][]byte{own}, App: 1}}
			h.LostFrontends = a.lost
			h.AnsweringFrontends = slices.DeleteFunc(slices.Clone(a.frontends[name]), func(node string) bool {
				return slices.Contains(a.lost, node)
			})
		}
		req.Hosting = append(req.Hosting, h)
	}
	return a.stream.Send(req)
}

// change changes what the agent does, and reports that.
func (a *offloadAgent) change(t *testing.T, change func()) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	change()
	if err := a.report(); err != nil {
		t.Fatal(err)
	}
}

// run reads the stream until the test ends. A frontend hosts the tenants of whose offloads it is a frontend.
func (a *offloadAgent) run(ctx context.Context) error {
	a.mu.Lock()
	a.stream, a.applied, a.sequence = a.client.Follow(ctx), map[string]uint64{}, 10
	a.policies, a.frontends = map[string]int64{}, map[string][]string{}
	err := a.report()
	a.mu.Unlock()
	defer func() { // as agents do
		a.stream.CloseRequest()
		a.stream.CloseResponse()
	}()
	for err == nil {
		var r *pilasterv1.FollowResponse
		if r, err = a.stream.Receive(); err == nil {
			err = a.apply(r)
		}
	}
	return err
}

func (a *offloadAgent) apply(r *pilasterv1.FollowResponse) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	tenants := append(r.GetSnapshot().GetTenants(), r.GetDelta().GetTenants()...)
	changed := set(slices.Concat(r.GetSnapshot().GetWholePolicies(), r.GetDelta().GetWholePolicies()))
	for _, p := range slices.Concat(r.GetDelta().GetPolicies(), r.GetDelta().GetEndedPolicies()) {
		changed[p.Tenant] = true
	}
	for name := range changed {
		if !a.stale {
			a.policies[name] = r.Revision
		}
	}
	for _, of := range tenants {
		is, applied := "none", uint64(0)
		a.hosts[of.Name] = a.own[of.Name] != nil
		a.updates++
		for _, o := range of.Offloads {
			is = fmt.Sprintf("%s, containers: %d", phaseOf(o), len(o.Endpoints))
			applied = of.Changes
			if o.Node == a.name {
				a.frontends[of.Name] = nil
				for _, f := range o.Frontends {
					a.frontends[of.Name] = append(a.frontends[of.Name], f.Node)
				}
			}
			a.hosts[of.Name] = a.hosts[of.Name] || o.Node == a.name || slices.ContainsFunc(
				o.Frontends, func(f *pilasterv1.Frontend) bool { return f.Node == a.name })
		}
		if a.applied[of.Name] = applied; a.mute {
			a.applied[of.Name] = 0
		}
		if !a.hosts[of.Name] {
			delete(a.hosts, of.Name)
		}
		if a.seen != nil {
			a.seen <- is
		}
	}
	if len(tenants)+len(changed) == 0 {
		return nil
	}
	return a.report()
}

func set(names []string) map[string]bool {
	all := map[string]bool{}
	for _, name := range names {
		all[name] = true
	}
	return all
}

// next waits until the agent has applied a state, and returns the states before it.
func (a *offloadAgent) next(t *testing.T, want string) (before []string) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case is := <-a.seen:
			if is == want {
				return before
			}
			before = append(before, is)
		case <-timeout:
			t.Fatalf("%s never applied %q, only %q", a.name, want, before)
		}
	}
}

// canOffload joins the cluster as a node that can take part in offloads.
func canOffload(t *testing.T, s *Server, n int, rack string) *join.Client {
	t.Helper()
	c := dial(t, s, testNode(n))
	if _, err := c.Register(t.Context(), connect.NewRequest(&pilasterv1.RegisterRequest{
		Version: "test", Enforces: []string{"netpila", "nimitz"}, Offloads: true, MtuReserve: tenant.OffloadOverhead,
		Rack: rack,
	})); err != nil {
		t.Fatal(err)
	}
	return c
}

// offloading is a cluster with tenant green, which has containers on n1 and n2.
type offloading struct {
	*testing.T
	s      *Server
	op     pilasterv1connect.OperatorServiceClient
	agents map[int]*offloadAgent
}

// newOffloading joins nodes n1, n2, … with these racks.
func newOffloading(t *testing.T, s *Server, racks ...string) *offloading {
	t.Helper()
	w := &offloading{T: t, s: s, op: operator(s.config.RunDir), agents: map[int]*offloadAgent{}}
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	for i, rack := range racks {
		n := i + 1
		a := &offloadAgent{
			name: testNode(n).Name, backend: n == 1, client: canOffload(t, s, n, rack),
			seen: make(chan string, 1000), hosts: map[string]bool{},
		}
		if n <= 2 { // with a container
			resolve(t, a.client, "green", "web")
			address := allocate(t, a.client, "green", "c1/eth0")
			a.own = map[string][]byte{"green": {10, 0, 0, address[len("10.0.0.")] - '0'}}
			a.hosts["green"] = true
		}
		w.agents[n] = a
		ctx, leave := context.WithCancel(ctx)
		a.leave = leave
		running.Go(func() { a.run(ctx) })
	}
	apply(t, s, "green", netpol("a", "  ingress: [{}]\n"))
	w.await("streams of all nodes", func() bool { return len(s.cache.Subscribers) == len(racks) })
	return w
}

// await waits for a condition of the cache.
func (w *offloading) await(what string, condition func() bool) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), 30*time.Second)
	defer cancel()
	if err := w.s.cache.Await(ctx, condition); err != nil {
		w.Fatalf("no %s; the offloads are %v", what, w.s.cache.Tenants["green"].Offloads)
	}
}

// list returns the offload of n1, nil if there is none, and what is known about all.
func (w *offloading) list() (*pilasterv1.OffloadStatus, *pilasterv1.ListOffloadsResponse) {
	w.Helper()
	resp, err := w.op.ListOffloads(w.Context(), connect.NewRequest(&pilasterv1.ListOffloadsRequest{Node: "n1"}))
	if err != nil {
		w.Fatal(err)
	}
	if len(resp.Msg.Offloads) == 0 {
		return nil, resp.Msg
	}
	return resp.Msg.Offloads[0], resp.Msg
}

// start starts an offload of n1, and waits until it has a state.
func (w *offloading) start(frontends uint32, state string) {
	w.Helper()
	start := &pilasterv1.StartOffloadRequest{Tenant: "green", Node: "n1", Count: frontends, Force: true}
	if _, err := w.op.StartOffload(w.Context(), connect.NewRequest(start)); err != nil {
		w.Fatal(err)
	}
	w.reaches(state)
}

// reaches waits until the offload of n1 has a state, as phaseOf formats it.
func (w *offloading) reaches(state string) {
	w.Helper()
	w.await(state, func() bool {
		all := w.s.cache.Tenants["green"].Offloads
		return len(all) == 0 && state == "removed" || len(all) > 0 && phaseOf(all[0]) == state
	})
}

// leave ends the stream of a node.
func (w *offloading) leave(n int) {
	w.Helper()
	w.agents[n].leave()
	until(w.T, "end of a stream", func() bool { return !w.s.cache.Node(testNode(n).Name).Connected })
}

func (w *offloading) stop(now bool) {
	w.Helper()
	stop := &pilasterv1.StopOffloadRequest{Tenant: "green", Node: "n1", Now: now}
	if _, err := w.op.StopOffload(w.Context(), connect.NewRequest(stop)); err != nil {
		w.Fatal(err)
	}
}

func (w *offloading) auto(on bool) {
	w.Helper()
	if _, err := w.op.SetOffloadAuto(
		w.Context(), connect.NewRequest(&pilasterv1.SetOffloadAutoRequest{On: on})); err != nil {
		w.Fatal(err)
	}
}

// load reports the load of a node.
func (w *offloading) load(n int, load *pilasterv1.NodeLoad) *pilasterv1.ReportLoadResponse {
	w.Helper()
	resp, err := w.agents[n].client.ReportLoad(
		w.Context(), connect.NewRequest(&pilasterv1.ReportLoadRequest{Load: load}))
	if err != nil {
		w.Fatal(err)
	}
	return resp.Msg
}

// TestOffload: an offload reaches phase active and ends, with agents that acknowledge. The frontends have the backend's
// containers before they are active, nodes without part in it receive nothing, and the chosen frontends are in its
// rack.
func TestOffload(t *testing.T) {
	t.Parallel()
	w := newOffloading(t, start(t, testConfig(t)), "a", "b", "a", "a", "b")
	start := &pilasterv1.StartOffloadRequest{Tenant: "green", Node: "n1", Count: 2, DryRun: true, Force: true}
	tried, err := w.op.StartOffload(t.Context(), connect.NewRequest(start))
	if err != nil || len(tried.Msg.Prefixes) != 1 || phaseOf(tried.Msg.Offload.Offload) != "preparing n3-, n4-" {
		t.Fatalf("dry run: got %v, %v; want frontends n3 and n4 of the same rack, and one container", tried, err)
	}
	w.s.offloads.mu.Lock()
	if w.s.offloads.result.Next != 0 {
		t.Error("the controller runs without offloads")
	}
	w.s.offloads.mu.Unlock()
	start.DryRun = false
	if _, err := w.op.StartOffload(t.Context(), connect.NewRequest(start)); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{3, 4} {
		before := w.agents[n].next(t, "active n3, n4, containers: 1")
		for _, is := range before {
			if strings.HasPrefix(is, "dual") && !strings.HasSuffix(is, "containers: 1") {
				t.Errorf("n%d: got %q, want the container before phase dual", n, before)
			}
		}
		if !slices.Contains(before, "preparing n3, n4, containers: 1") {
			t.Errorf("n%d: got %q, want the container in phase preparing", n, before)
		}
	}
	if before := w.agents[2].next(t, "active n3, n4, containers: 1"); !slices.Contains(
		before, "dual n3, n4, containers: 1") {
		t.Errorf("n2, which sends: got %q, want phase dual", before)
	}
	w.agents[1].next(t, "active n3, n4, containers: 1")
	is, all := w.list()
	if is == nil || is.Tenant != "green" || len(is.Awaited) != 0 || len(is.Offload.Endpoints) != 1 ||
		is.Offload.Wanted != 2 || is.LastChange != "advance: all nodes send to the frontends" || all.Problems != nil {
		t.Errorf("ListOffloads returned %v, want an active offload with one container", all)
	}
	for _, line := range []string{
		`pilaster_orchestrator_offloads{phase="active"} 1`, `pilaster_orchestrator_offloads{phase="dual"} 0`,
		`pilaster_orchestrator_offloads_in_doubt{} 0`,
	} {
		if text := metricsOf(t, w.s); !strings.Contains(text, line) {
			t.Errorf("no %s in\n%s", line, text)
		}
	}
	w.stop(false)
	if before := w.agents[1].next(t, "none"); !slices.Contains(before, "returning n3, n4, containers: 1") ||
		!slices.Contains(before, "ending n3, n4, containers: 1") {
		t.Errorf("n1: got %q, want phases returning and ending", before)
	}
	w.agents[2].next(t, "none")
	if is, _ := w.list(); is != nil {
		t.Errorf("ListOffloads returned %v, want none", is)
	}
	w.await("end of hosting by frontends", func() bool { return len(w.s.cache.Hosting["green"]) == 2 })
	select {
	case is := <-w.agents[5].seen:
		t.Errorf("n5, which has no part in it, received %q", is)
	default:
	}
}

// TestFailover (Nezha §4.4, C): a lost frontend is replaced. If all are lost, none is removed, the status says so, and
// the offload can be stopped.
func TestFailover(t *testing.T) {
	t.Parallel()
	w := newOffloading(t, start(t, testConfig(t)), "", "", "", "", "")
	w.start(2, "active n2, n3") // n2 has the tenant's rules already
	w.agents[1].change(t, func() { w.agents[1].lost = []string{"n3"} })
	w.reaches("active n2, n3-, n4")
	is, _ := w.list()
	if !slices.Equal(is.LostFrontends, []string{"n3"}) || !strings.HasPrefix(is.LastChange, "activate: ") {
		t.Errorf("got %v, want the lost frontend and the last change", is)
	}
	w.reaches("active n2, n4") // n3 has drained
	w.agents[1].change(t, func() { w.agents[1].lost = []string{"n2", "n4"} })
	const doubt = "backends report 2 of 2 frontends as lost; more than half at once: none is removed; if the " +
		"nodes are dead, `pilaster offload stop` returns the rules"
	until(t, doubt, func() bool {
		_, all := w.list()
		return slices.Contains(all.Problems, doubt)
	})
	if text := metricsOf(t, w.s); !strings.Contains(text, "pilaster_orchestrator_offloads_in_doubt{} 1\n") {
		t.Errorf("not in doubt:\n%s", text)
	}
	other := &pilasterv1.StartOffloadRequest{Tenant: "green", Node: "n2", Frontends: []string{"n5"}}
	if _, err := w.op.StartOffload(t.Context(), connect.NewRequest(other)); connect.CodeOf(err) !=
		connect.CodeFailedPrecondition || !strings.Contains(err.Error(), doubt+"; no offload starts meanwhile") {
		t.Errorf("start in doubt: got %v, want the reason", err)
	}
	is, _ = w.list()
	if got := phaseOf(is.Offload); got != "active n2, n4" {
		t.Errorf("in doubt: %s, want active n2, n4", got)
	}
	w.stop(false)
	w.reaches("removed")
}

// TestUndone: a frontend that does not load the rules is the reason of the end, which is known afterwards. An offload
// that an operator stopped has no such reason.
func TestUndone(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.offload = offload.DefaultLimits()
	c.offload.Load = 300 * time.Millisecond
	w := newOffloading(t, start(t, c), "", "", "")
	w.agents[2].change(t, func() { w.agents[2].mute = true })
	w.start(1, "removed")
	_, all := w.list()
	if len(all.Ended) != 1 || all.Ended[0].Id == 0 || all.Ended[0].Tenant+" "+all.Ended[0].Node != "green n1" ||
		all.Ended[0].Reason != "undone: in 300ms these nodes did not load the rules, or "+
			"did not answer the backend's probes: n2" {
		t.Errorf("ended: got %v, want the offload of n1 and n2 as the reason", all.Ended)
	}
	w.agents[2].change(t, func() { w.agents[2].mute = false })
	w.start(1, "active n3") // n2 was replaced just now
	is, _ := w.list()
	if n := len(is.Changes); n != 3 || is.Changes[n-1].Text != is.LastChange || is.Changes[n-1].At == nil {
		t.Errorf("changes: got %v, want those of this offload, with times", is.Changes)
	}
	w.stop(false)
	w.reaches("removed")
	if _, all := w.list(); len(all.Ended) != 1 || all.Ended[0].Reason != "" {
		t.Errorf("ended: got %v, want no reason of the controller", all.Ended)
	}
}

// TestStopNow: packets go to the backend at once. A node that has no stream, and may send to the frontends still, is
// awaited, but not without limit.
func TestStopNow(t *testing.T) {
	t.Parallel()
	w := newOffloading(t, start(t, testConfig(t)), "", "", "", "")
	w.start(1, "active n2")
	w.stop(true)
	w.reaches("removed")
	w.start(1, "active n2")
	began := time.Now()
	w.leave(2)
	w.stop(true)
	w.reaches("ending n2")
	until(t, "waiting for n2 alone", func() bool {
		is, _ := w.list()
		return is != nil && len(is.Awaited) == 1 && is.Awaited[0].Node == "n2" &&
			is.Awaited[0].Reason == "is not connected"
	})
	w.reaches("removed")
	if took := time.Since(began); took < 4*time.Second {
		t.Errorf("it waited for %v only", took)
	}
}

// TestPoliciesBehind: a frontend that lacks a change for a second, because its agent is slow or away, is replaced.
func TestPoliciesBehind(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.offload = offload.DefaultLimits()
	c.offload.Dwell, c.offload.Load = 0, time.Second
	w := newOffloading(t, start(t, c), "", "", "", "", "", "")
	w.start(1, "active n2")
	w.agents[2].change(t, func() { w.agents[2].applied["green"], w.agents[2].mute = 0, true })
	w.reaches("active n2-, n3")
	w.reaches("active n3")
	w.leave(3)
	apply(t, w.s, "green", netpol("b", "  ingress: [{}]\n"))
	w.reaches("active n4") // n2 has containers, so it is chosen first, and loads nothing
	w.agents[4].change(t, func() { w.agents[4].stale = true })
	apply(t, w.s, "green", netpol("c", "  ingress: [{}]\n"))
	w.reaches("active n5") // n4 is connected, and acknowledges all but the policies
}

// TestLateRegistration: a node that registers again without offloads, as with another build, leaves them.
func TestLateRegistration(t *testing.T) {
	t.Parallel()
	w := newOffloading(t, start(t, testConfig(t)), "", "", "", "")
	w.start(2, "active n2, n3")
	again := &pilasterv1.RegisterRequest{Version: "other", Enforces: []string{"netpila", "nimitz"}}
	if _, err := w.agents[3].client.Register(t.Context(), connect.NewRequest(again)); err != nil {
		t.Fatal(err)
	}
	w.reaches("active n2, n3-, n4")
	if _, err := w.agents[1].client.Register(t.Context(), connect.NewRequest(again)); err != nil {
		t.Fatal(err)
	}
	w.reaches("removed")
}

// TestAutomaticOffload (Nezha §4.2, B.2): an offload begins on a hot node, gets more frontends if they are busy
// because of it, and ends when the node is cool.
func TestAutomaticOffload(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.offload = offload.DefaultLimits()
	c.offload.OffloadFor, c.offload.ScaleFor = 300*time.Millisecond, 300*time.Millisecond
	c.offload.FallBackFor = time.Second
	c.offload.Dwell = 0
	c.offload.MinGain = (offload.Modelled(0).Gain(4) + offload.Modelled(1000).Gain(4)) / 2
	w := newOffloading(t, start(t, c), make([]string, 10)...)
	blocks := []string{}
	for i := range 1000 { // lookups take long enough for a gain
		blocks = append(blocks, fmt.Sprintf("{ipBlock: {cidr: 10.%d.%d.0/24}}", i/250, i%250))
	}
	apply(t, w.s, "green", netpol("blocks", "  ingress: [{from: ["+strings.Join(blocks, ", ")+"]}]\n"))
	hot := &pilasterv1.NodeLoad{
		Measured: true, Budget: 1, Own: 0.9, Rules: 10, RulesCapacity: 1000,
		Tenants: []*pilasterv1.TenantLoad{{Tenant: "green", Load: 0.8, Rules: 10}},
	}
	if r := w.load(1, hot); r.Measure || r.NextMs != 60_000 || w.s.cache.Loads["n1"].NodeLoad != nil {
		t.Errorf("without auto: %v", r)
	}
	w.auto(true)
	for n := range w.agents {
		if n > 1 && n != 3 {
			w.load(n, &pilasterv1.NodeLoad{Measured: true, Budget: 1})
		}
	}
	if r := w.load(3, &pilasterv1.NodeLoad{Measured: true, Budget: 1, Own: 0.35}); !r.Measure || r.NextMs != 10_000 {
		t.Errorf("a node that is not busy: %v", r)
	}
	if r := w.load(1, hot); !r.Measure || r.NextMs != 1000 {
		t.Errorf("a hot node: %v", r)
	}
	w.reaches("active n2, n10, n4, n5") // n2 has the tenant, n3 too much to do
	is, all := w.list()
	if !is.Offload.Automatic || !all.Automatic || is.Offload.Wanted != 4 {
		t.Errorf("got %v", all)
	}
	hot.Own, hot.Tenants[0].Load = 0.5, 0.4
	w.load(1, hot)
	w.load(4, &pilasterv1.NodeLoad{
		Measured: true, Budget: 1, Own: 0.1,
		Fronting: []*pilasterv1.FrontingLoad{{Tenant: "green", Backend: "n1", Load: 0.4}},
	})
	w.await("8 frontends", func() bool {
		o := w.s.cache.Tenants["green"].Offloads
		return len(o) == 1 && o[0].Wanted == 8
	})
	hot.Own, hot.Tenants[0].Load = 0.1, 0.05
	w.load(1, hot)
	w.load(4, &pilasterv1.NodeLoad{Measured: true, Budget: 1, Own: 0.1})
	w.reaches("removed")

	w.auto(false)
	deleted := &pilasterv1.DeletePoliciesRequest{Tenant: "green", Policies: []*pilasterv1.Policy{
		{Kind: "NetworkPolicy", Namespace: "shop", Name: "blocks"},
	}}
	if _, err := w.op.DeletePolicies(t.Context(), connect.NewRequest(deleted)); err != nil {
		t.Fatal(err)
	}
	hot.Own, hot.Tenants[0].Load = 0.9, 0.8
	w.load(1, hot)
	if _, all := w.list(); all.Automatic || len(all.Offloads) > 0 || all.Problems != nil {
		t.Errorf("without auto: %v", all)
	}
	w.auto(true)
	w.load(1, hot)
	loss := "node n1: packet load 90 %, rule table 1 % for 300ms; no offload: green: the estimated gain is " +
		fmt.Sprintf("%.1f", offload.Modelled(0).Gain(offload.DefaultFrontends))
	until(t, loss, func() bool {
		_, all := w.list()
		return slices.Contains(all.Problems, loss)
	})
	start := &pilasterv1.StartOffloadRequest{Tenant: "green", Node: "n1", Count: 4, DryRun: true}
	gain := offload.Modelled(0).Gain(4)
	if resp, err := w.op.StartOffload(t.Context(), connect.NewRequest(start)); err != nil || resp.Msg.Gain != gain {
		t.Errorf("dry run: %v, %v", resp, err)
	}
}

// TestReportLoad: reports that no agent sends are refused.
func TestReportLoad(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	c := canOffload(t, s, 1, "")
	for _, l := range []*pilasterv1.NodeLoad{
		{Own: -1}, {Budget: 1e9}, {Tenants: []*pilasterv1.TenantLoad{{Tenant: "Green"}}},
		{Tenants: []*pilasterv1.TenantLoad{{Tenant: "green", Load: -2}}},
		{Fronting: []*pilasterv1.FrontingLoad{{Tenant: "green", Backend: "n1", Load: -1}}},
		{Fronting: []*pilasterv1.FrontingLoad{{Tenant: "green", Backend: "N 1"}}},
	} {
		if _, err := c.ReportLoad(t.Context(), connect.NewRequest(&pilasterv1.ReportLoadRequest{Load: l})); err == nil {
			t.Errorf("%v is accepted", l)
		}
	}
	if _, err := c.ReportLoad(t.Context(), connect.NewRequest(&pilasterv1.ReportLoadRequest{})); err != nil {
		t.Error(err)
	}
}

// TestChangesOfManyOffloads: urgent changes are written first, at most eight at once, and one that fails delays no
// other.
func TestChangesOfManyOffloads(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	o := newOffloads(s.store, s.cache, offload.DefaultLimits(), s.config.Log, func(offload.Kind) {})
	var changes []offload.Change
	for i := range 3 * offloadWrites {
		changes = append(changes, offload.Change{Key: offload.Key{Tenant: fmt.Sprint("t", i)}, Kind: offload.Drain,
			Urgent: i >= 2*offloadWrites})
	}
	var mu sync.Mutex
	var calls []offload.Change
	var once sync.Once
	full := make(chan struct{}) // as many calls at once as there may be
	o.change = func(ctx context.Context, c offload.Change) (bool, error) {
		mu.Lock()
		if calls = append(calls, c); len(calls) == offloadWrites {
			once.Do(func() { close(full) })
		}
		mu.Unlock()
		select {
		case <-full:
		case <-ctx.Done():
		}
		if c.Tenant == "t0" {
			return false, errors.New("it failed")
		}
		return true, ctx.Err()
	}
	o.applyAll(t.Context(), time.Now(), changes)
	if len(calls) != len(changes) {
		t.Fatalf("%d of %d changes", len(calls), len(changes))
	}
	for i, c := range calls[:offloadWrites] {
		if !c.Urgent {
			t.Errorf("change %d is that of %s, which is not urgent", i, c.Tenant)
		}
	}
	calls = nil
	o.applyAll(t.Context(), time.Now(), changes)
	if len(calls) != len(changes)-1 {
		t.Errorf("%d changes directly after a failure, want %d", len(calls), len(changes)-1)
	}
	calls = nil
	o.applyAll(t.Context(), time.Now().Add(offloadRetry), changes)
	if len(calls) != len(changes) {
		t.Errorf("%d changes a second after a failure, want %d", len(calls), len(changes))
	}
}

// TestOffloadTakeover: another orchestrator performs the steps of an offload, and each change is applied once.
func TestOffloadTakeover(t *testing.T) {
	t.Parallel()
	etcd := storetest.Debian(t)
	first, second := testConfig(t), testConfig(t)
	first.Etcd, second.Etcd = etcd, etcd
	a, stopFirst := startAndStop(t, first)
	w := newOffloading(t, start(t, second), "", "", "", "")
	w.agents[2].change(t, func() { w.agents[2].mute = true })
	w.start(1, "preparing n2")
	await(t, a, func() bool { return len(a.cache.Tenants["green"].GetOffloads()) == 1 })
	w.op = operator(first.RunDir)
	w.stop(false)
	w.reaches("removed")
	w.op = operator(second.RunDir)
	w.start(1, "preparing n2")
	stopFirst()
	of, _, _ := w.s.cache.Tenant("green")
	w.agents[2].change(t, func() { w.agents[2].mute, w.agents[2].applied["green"] = false, of.Changes })
	w.reaches("active n2")
}
