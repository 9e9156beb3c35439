package orchestrator

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/tenant"
)

// hotWorld is a cluster of simulated agents: node n<i> has the containers of tenant t<i>, for as many tenants as there
// are. An offload moves half of a tenant's load to its frontends.
type hotWorld struct {
	*testing.T
	s      *Server
	agents []*offloadAgent
	hot    int
	dead   map[string]bool // nodes that have crashed
	part   map[string]bool // nodes that are or were frontends
	all    bool            // no backend sees a frontend
	demand func(hot int) float64
}

const movedPart = 0.5

func newHotWorld(t *testing.T, nodes, hot int) *hotWorld {
	t.Helper()
	c := testConfig(t)
	c.Limits = admission.Limits{Joins: 1 << 20, Connections: 4 * nodes}
	c.offload = offload.DefaultLimits()
	for _, d := range []*time.Duration{ // ten times as fast as real ones
		&c.offload.OffloadFor, &c.offload.ScaleFor, &c.offload.Dwell, &c.offload.GoodFor,
	} {
		*d /= 10
	}
	c.offload.FallBackFor = 3 * time.Second
	c.offload.MinGain = 0.1 // the tenants have few policies
	w := &hotWorld{T: t, s: start(t, c), hot: hot, dead: map[string]bool{}, part: map[string]bool{}}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	for i := range nodes {
		a := &offloadAgent{
			name: testNode(i).Name, client: canOffload(t, w.s, i, fmt.Sprint("rack", i%20)), hosts: map[string]bool{},
		}
		if i < hot {
			name := fmt.Sprint("t", i)
			createNimitz(t, w.s, name, &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
			resolve(t, a.client, name, "web")
			address := netip.MustParsePrefix(allocate(t, a.client, name, "c1/eth0")).Addr()
			a.backend, a.own, a.hosts[name] = true, map[string][]byte{name: address.AsSlice()}, true
			apply(t, w.s, name, netpol("a", "  ingress: [{}]\n"))
		}
		ctx, leave := context.WithCancel(ctx)
		a.leave = leave
		w.agents = append(w.agents, a)
		running.Go(func() { a.run(ctx) })
	}
	until(t, "streams of all nodes", func() bool { return w.s.cache.Size().Streams == nodes })
	return w
}

// offloads returns the offloads of all tenants, by tenant.
func (w *hotWorld) offloads() map[string]*pilasterv1.Offload {
	w.s.cache.Mu.RLock()
	defer w.s.cache.Mu.RUnlock()
	all := map[string]*pilasterv1.Offload{}
	for name := range w.s.cache.Offloaded {
		for _, o := range w.s.cache.Tenants[name].Offloads {
			all[name] = o
		}
	}
	return all
}

// report reports the loads of backends and frontends, and the frontends that backends miss.
func (w *hotWorld) report() {
	w.Helper()
	loads := map[string]*pilasterv1.NodeLoad{}
	load := func(node string) *pilasterv1.NodeLoad {
		if loads[node] == nil {
			loads[node] = &pilasterv1.NodeLoad{Measured: true, Budget: 1, Own: 0.05, Rules: 100, RulesCapacity: 10_000}
		}
		return loads[node]
	}
	all := w.offloads()
	for i := range w.hot {
		name, a := fmt.Sprint("t", i), w.agents[i]
		d, o, lost := w.demand(i), all[name], []string(nil)
		var active []string
		for _, f := range o.GetFrontends() {
			if !f.Draining {
				active = append(active, f.Node)
			}
			w.part[f.Node] = true
			load(f.Node)
			if w.all || w.dead[f.Node] {
				lost = append(lost, f.Node)
			}
		}
		if o != nil && tenant.OffloadPhases[o.Phase].Fronted() {
			for _, node := range active {
				l := load(node)
				l.Fronting = append(l.Fronting, &pilasterv1.FrontingLoad{
					Tenant: name, Backend: a.name, Load: d * movedPart / float64(len(active)),
				})
			}
			d *= 1 - movedPart
		}
		l := load(a.name)
		l.Own += d
		l.Tenants = []*pilasterv1.TenantLoad{{Tenant: name, Load: d, Rules: 100}}
		if !slices.Equal(a.lost, lost) {
			a.change(w.T, func() { a.lost = lost })
		}
	}
	for _, node := range w.unknown(50) {
		load(node) // else it is no frontend
	}
	for i, a := range w.agents {
		if l := loads[a.name]; l != nil && !w.dead[a.name] {
			req := connect.NewRequest(&pilasterv1.ReportLoadRequest{Load: l})
			if _, err := w.agents[i].client.ReportLoad(w.Context(), req); err != nil {
				w.Fatal(err)
			}
		}
	}
}

// unknown returns at most n live nodes whose load is not recorded. Agents report again until it is, because an
// orchestrator records so many reports a second.
func (w *hotWorld) unknown(n int) (nodes []string) {
	w.s.cache.Mu.RLock()
	defer w.s.cache.Mu.RUnlock()
	for _, a := range w.agents {
		if w.s.cache.Loads[a.name].NodeLoad == nil && !w.dead[a.name] && len(nodes) < n {
			nodes = append(nodes, a.name)
		}
	}
	return nodes
}

// run reports in steps until a condition holds, and returns how long that took.
func (w *hotWorld) run(what string, limit time.Duration, ok func() bool) time.Duration {
	w.Helper()
	began := time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Since(began) > limit {
			w.Fatalf("after %v: not %s; %d offloads; problems %v", limit, what, len(w.offloads()),
				w.s.offloads.Describe(nil))
		}
		w.report()
		<-tick.C
	}
	return time.Since(began)
}

// changes counts the changes of a kind.
func (w *hotWorld) changes(kinds ...offload.Kind) (n int) {
	w.Helper()
	families, err := w.s.Gatherer().Gather()
	if err != nil {
		w.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "pilaster_orchestrator_offload_changes_total" {
			continue
		}
		for _, m := range f.Metric {
			if slices.Contains(kinds, offload.Kind(m.Label[0].GetValue())) {
				n += int(m.GetCounter().GetValue())
			}
		}
	}
	return n
}

// lastChanges returns what changed last, of each offload.
func (w *hotWorld) lastChanges() (all []string) {
	var of []*pilasterv1.OffloadStatus
	for name, o := range w.offloads() {
		of = append(of, &pilasterv1.OffloadStatus{Tenant: name, Offload: o})
	}
	w.s.offloads.Describe(of)
	for _, o := range of {
		if n := len(o.Changes); n > 0 {
			all = append(all, o.Tenant+": "+o.Changes[n-1].Text)
		}
	}
	return all
}

// whole reports whether each tenant has an active offload with as many live frontends as it should have.
func (w *hotWorld) whole() bool {
	all := w.offloads()
	for _, o := range all {
		active := 0
		for _, f := range o.Frontends {
			if !f.Draining && !w.dead[f.Node] {
				active++
			}
		}
		if o.Phase != pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE || active != int(o.Wanted) {
			return false
		}
	}
	return len(all) == w.hot
}

// TestOffloadSimulation: an orchestrator and simulated agents with its protocol. OFFLOAD_NODES is the number of
// nodes, of which OFFLOAD_HOT have a hot tenant. Ramps up and down, noise, crashes and a mass failure: each offload
// begins and ends once, and nodes without part in one receive nothing.
func TestOffloadSimulation(t *testing.T) {
	nodes, hot := 60, 5
	for name, to := range map[string]*int{"OFFLOAD_NODES": &nodes, "OFFLOAD_HOT": &hot} {
		if text := os.Getenv(name); text != "" {
			n, err := strconv.Atoi(text)
			if err != nil {
				t.Fatal(err)
			}
			*to = n
		}
	}
	w := newHotWorld(t, nodes, hot)
	op := operator(w.s.config.RunDir)
	if _, err := op.SetOffloadAuto(
		t.Context(), connect.NewRequest(&pilasterv1.SetOffloadAutoRequest{On: true})); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	w.demand = func(int) float64 { return min(1, time.Since(began).Seconds()/2) }
	up := w.run("offloaded", 3*time.Minute, w.whole)
	if n := w.changes(offload.Start); n != hot {
		t.Errorf("%d starts, want %d", n, hot)
	}

	// Noise around the thresholds of start and return.
	calm := w.changes(offload.Kinds...)
	w.demand = func(i int) float64 { return 1.05 + 0.25*math.Sin(float64(i)+10*time.Since(began).Seconds()) }
	end := time.Now().Add(4 * time.Second)
	w.run("over", time.Minute, func() bool { return time.Now().After(end) })
	// At most one scale-out of each, which is two changes.
	if n := w.changes(offload.Kinds...) - calm; n > 2*hot || w.changes(offload.Stop) > 0 {
		t.Errorf("%d changes by noise, for %d offloads: last %v", n, hot, w.lastChanges())
	}
	w.demand = func(int) float64 { return 1 }

	// One frontend of each of two offloads crashes.
	for _, name := range []string{"t0", "t1"} {
		for _, f := range w.offloads()[name].Frontends {
			if i := slices.IndexFunc(w.agents, func(a *offloadAgent) bool { return a.name == f.Node }); i >= hot {
				w.dead[f.Node] = true
				w.agents[i].leave()
				break
			}
		}
	}
	if len(w.dead) == 0 {
		t.Fatal("no frontend to crash")
	}
	replaced := w.run("replaced", time.Minute, w.whole)

	// All frontends are silent: none is removed.
	before := w.changes(offload.Kinds...)
	w.all = true
	w.run("in doubt", 10*time.Second, w.s.offloads.inDoubt)
	end = time.Now().Add(2 * time.Second)
	w.run("over", time.Minute, func() bool { return time.Now().After(end) })
	if n := w.changes(offload.Kinds...) - before; n != 0 || len(w.offloads()) != hot {
		t.Errorf("%d changes in doubt, and %d offloads", n, len(w.offloads()))
	}
	w.all = false
	w.run("whole again", time.Minute, func() bool { return w.whole() && !w.s.offloads.inDoubt() })

	w.demand = func(int) float64 { return 0.1 }
	down := w.run("returned", time.Minute, func() bool { return len(w.offloads()) == 0 })
	if starts, stops := w.changes(offload.Start), w.changes(offload.Stop); starts != hot || stops != hot {
		t.Errorf("%d starts and %d stops, want %d of each", starts, stops, hot)
	}
	updates, idle := 0, 0
	for i, a := range w.agents {
		a.mu.Lock()
		updates += a.updates
		if !w.part[a.name] && i >= hot {
			if idle++; a.updates > 0 {
				t.Errorf("%s, which has no part in an offload, received %d updates", a.name, a.updates)
			}
		}
		a.mu.Unlock()
	}
	changes := w.changes(offload.Kinds...)
	if most := (changes + 10*hot) * (1 + tenant.MaxFrontends); updates > most {
		t.Errorf("nodes received %d updates for %d changes, want at most %d", updates, changes, most)
	}
	if idle == 0 {
		t.Error("all nodes had a part in an offload: too few nodes for the last check")
	}
	t.Logf("%d nodes, %d hot: offloaded in %v, replaced in %v, returned in %v; %d changes, %d updates to %d nodes",
		nodes, hot, up, replaced, down, changes, updates, nodes-idle)
}
