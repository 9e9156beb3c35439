package agent_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// newBedThatMoves has containers c1 and c2 of green, which is on nimitz.
func newBedThatMoves(t *testing.T) *bed {
	t.Helper()
	b := newBedOfTwo(t)
	for _, c := range []string{"c1", "c2"} {
		if _, err := b.Add(t.Context(), b.Green(c)); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// step delivers the first step of green's migration to this node, or the second.
func (b *bed) step(n uint64) {
	b.T.Helper()
	b.Orchestrator.Mu.Lock()
	green := b.Orchestrator.Tenants["green"]
	green.Network, green.Leaving, green.Addressing, green.Changes = tenant.Netpila, tenant.Nimitz, tenant.Encrypted, n
	if n > 1 {
		green.Leaving, green.Overlays = "", nil
	}
	b.Orchestrator.Tenants["green"] = green
	b.Orchestrator.Mu.Unlock()
	if err := b.Apply(b.T.Context(), []agent.TenantState{{Tenant: green}}, nil); err != nil {
		b.T.Fatal(err)
	}
}

func (b *bed) movesAll() {
	b.T.Helper()
	if !b.MigrateAll(b.T.Context()) {
		b.T.Errorf("not all is done: %v", b.Tenants.MigrationProblems())
	}
}

// migrationReport is what the node reports of green: "moved/endpoints problem", or "-".
func (b *bed) migrationReport() string {
	report := &pilasterv1.FollowRequest{}
	b.Tenants.Report(report, false)
	for _, h := range report.Hosting {
		if m := h.Moving; h.Tenant == "green" && m != nil {
			return strings.TrimSpace(fmt.Sprintf("%d/%d %s", m.Moved, m.Endpoints, m.Problem))
		}
	}
	return "-"
}

// on fails unless an endpoint's record, its container and the networks all have it on exactly these networks.
func (b *bed) on(container string, networks ...string) endpoint.Record {
	b.T.Helper()
	r, ok := b.Store.Find(container, "eth0")
	if !ok || !slices.Equal(r.Networks(), networks) {
		b.T.Fatalf("%s is on %v, want %v", container, r.Networks(), networks)
	}
	inside := b.Driver.Devices[r.ID]
	if !slices.Equal(inside.Addresses(), r.Addresses()) {
		b.T.Errorf("%s has %v inside, and its record %v", container, inside.Addresses(), r.Addresses())
	}
	active, on := b.Driver.Active[r.ID], slices.Contains(networks, tenant.Netpila)
	if (len(active.Attachments) == 1) != on ||
		on && active.Attachments[0].Address != r.On(tenant.Netpila).Attachments[0].Address {
		b.T.Errorf("netpila has %+v of %s", active, container)
	}
	_, plugged := b.Nimitz.Ports[pipeline.Port(r.ID)]
	sender := slices.ContainsFunc(b.senders(), func(s pipeline.Sender) bool { return s.Port == pipeline.Port(r.ID) })
	if has := slices.Contains(networks, nimitz.Name); plugged != has || sender != has {
		b.T.Errorf("nimitz has a port of %s: %v, a sender: %v", container, plugged, sender)
	}
	if r.Device.MTU != 1500-r.Overhead() {
		b.T.Errorf("%s has an MTU of %d", container, r.Device.MTU)
	}
	q := agent.CheckRequest{ContainerID: container, Interface: "eth0", Netns: "/run/netns/" + container}
	for _, a := range append(r.Addresses(), r.Left...) { // as the runtime remembers it from the ADD
		q.Addresses = append(q.Addresses, netip.PrefixFrom(a, a.BitLen()))
	}
	if err := b.Check(b.T.Context(), q); err != nil {
		b.T.Error(err)
	}
	return r
}

func (b *bed) senders() (all []pipeline.Sender) {
	for _, e := range b.Nimitz.Has {
		if s, ok := e.(pipeline.Sender); ok {
			all = append(all, s)
		}
	}
	return all
}

// ended deletes all containers and fails if state is left.
func (b *bed) ended(containers ...string) {
	b.T.Helper()
	for _, c := range containers {
		if err := b.Delete(b.T.Context(), c, "eth0"); err != nil {
			b.T.Fatal(err)
		}
	}
	b.CheckClean()
	if len(b.Nimitz.Ports)+len(b.senders()) > 0 || len(b.Migrated()) > 0 {
		b.T.Errorf("left: %v, %v, %v", b.Nimitz.Ports, b.senders(), b.Migrated())
	}
}

// TestMove: running containers get addresses of netpila, and lose those of nimitz when the migration is finished.
// Containers that start afterwards only have addresses of netpila.
func TestMove(t *testing.T) {
	b := newBedThatMoves(t)
	old := b.on("c1", nimitz.Name)
	if b.movesAll(); b.migrationReport() != "-" {
		t.Errorf("before anything moves: %s", b.migrationReport())
	}
	b.step(1)
	if b.migrationReport() != "-" {
		t.Errorf("it is said before it is done: %s", b.migrationReport())
	}
	b.movesAll()
	moved := b.on("c1", tenant.Netpila, nimitz.Name)
	if moved.Attachments[0].Address != old.Attachments[0].Address || moved.TenantID != old.TenantID {
		t.Errorf("moved: %+v", moved)
	}
	b.on("c2", tenant.Netpila, nimitz.Name)
	if _, err := b.Add(t.Context(), b.Green("c3")); err != nil {
		t.Fatal(err)
	}
	b.on("c3", tenant.Netpila)
	if b.migrationReport() != "2/2" {
		t.Errorf("moved, as is said: %s", b.migrationReport())
	}
	// The next agent verifies the endpoints before it reports them as migrated.
	b.Orchestrator.Err = agenttest.ErrFake
	if b.Reopen(); b.migrationReport() != "-" {
		t.Errorf("at a start: %s", b.migrationReport())
	}
	if b.movesAll(); b.migrationReport() != "2/2" ||
		b.on("c1", tenant.Netpila, nimitz.Name).Addresses()[1] != moved.Addresses()[1] {
		t.Errorf("after a start: %s, %v", b.migrationReport(), b.on("c1", tenant.Netpila, nimitz.Name))
	}
	// A container ends meanwhile.
	if err := b.Delete(t.Context(), "c2", "eth0"); err != nil {
		t.Fatal(err)
	}
	if len(b.MigrationDue()) != 1 {
		t.Error("no new count is due")
	}
	if b.movesAll(); b.migrationReport() != "1/1" {
		t.Errorf("with one less: %s", b.migrationReport())
	}

	b.step(2)
	b.movesAll()
	if r := b.on("c1", tenant.Netpila); r.Addresses()[0] != moved.On(tenant.Netpila).Addresses()[0] ||
		!slices.Equal(r.Left, old.Addresses()) {
		t.Errorf("at last: %+v", r)
	}
	if b.migrationReport() != "-" || len(b.Nimitz.Has) != 1 { // who encapsulates, which is no tenant's
		t.Errorf("at last: %s, and nimitz has %v", b.migrationReport(), b.Nimitz.Has)
	}
	b.Reopen()
	b.on("c1", tenant.Netpila)
	b.ended("c1", "c3")
}

// TestMoveOfOneThatHearsLate: a node that receives only the second step of a migration performs both, in an order in
// which a container always has a network.
func TestMoveOfOneThatHearsLate(t *testing.T) {
	b := newBedThatMoves(t)
	b.step(2)
	var calls []string
	b.Driver.During = func(call string, r endpoint.Record) {
		if r.ContainerID == "c1" && call == "Activate" {
			calls = append(calls, call)
		}
	}
	b.Nimitz.During = func(call string) { calls = append(calls, call) }
	b.movesAll()
	if !slices.Equal(calls[:2], []string{"Activate", "Apply"}) {
		t.Errorf("calls: %v", calls)
	}
	b.on("c1", tenant.Netpila)
	b.on("c2", tenant.Netpila)
	b.ended("c1", "c2")
}

// TestMoveThatFails: a failed migration leaves the endpoint unchanged, and is retried.
func TestMoveThatFails(t *testing.T) {
	for _, call := range []string{"CanReaddress", "Readdress", "Activate"} {
		b := newBedThatMoves(t)
		b.step(1)
		old := b.on("c1", nimitz.Name)
		path := b.Store.RecordPath(old.ID)
		before, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		failed := 0
		b.Driver.During = func(name string, r endpoint.Record) {
			b.Driver.Mu.Lock()
			defer b.Driver.Mu.Unlock()
			delete(b.Driver.Fail, call)
			if name == call && r.ContainerID == "c1" && failed == 0 {
				failed++
				b.Driver.Fail[call] = agenttest.ErrFake
			}
		}
		if b.MigrateAll(t.Context()) || failed != 1 {
			t.Errorf("%s: all is done, though it failed", call)
		}
		if r := b.on("c1", nimitz.Name); !slices.Equal(r.Addresses(), old.Addresses()) {
			t.Errorf("%s: it has %v", call, r.Addresses())
		}
		if after, err := os.Stat(path); call == "CanReaddress" && (err != nil || !os.SameFile(before, after)) {
			t.Errorf("a move that is refused was written: %v", err)
		}
		b.on("c2", tenant.Netpila, nimitz.Name)
		if said := b.migrationReport(); !strings.HasPrefix(said, "1/2 endpoint 1: made to fail") ||
			len(b.Tenants.MigrationProblems()) != 1 {
			t.Errorf("%s: said %s, %v", call, said, b.Tenants.MigrationProblems())
		}
		if b.movesAll(); b.migrationReport() != "2/2" || len(b.Tenants.MigrationProblems()) != 0 {
			t.Errorf("%s: at last %s", call, b.migrationReport())
		}
		b.on("c1", tenant.Netpila, nimitz.Name)
		b.ended("c1", "c2")
	}
}

// TestMoveThatFailsAfterARestart: a failure after a restart does not remove attachments that the previous agent added.
func TestMoveThatFailsAfterARestart(t *testing.T) {
	for _, call := range []string{"Readdress", "Activate"} {
		b := newBedThatMoves(t)
		b.step(1)
		b.movesAll()
		was := b.on("c1", tenant.Netpila, nimitz.Name)
		b.Reopen()
		b.Driver.Fail[call] = agenttest.ErrFake
		if b.MigrateAll(t.Context()) || len(b.Tenants.MigrationProblems()) != 1 {
			t.Errorf("%s: all is done, though it failed", call)
		}
		delete(b.Driver.Fail, call)
		if r := b.on("c1", tenant.Netpila, nimitz.Name); !slices.Equal(r.Addresses(), was.Addresses()) {
			t.Errorf("%s: it has %v, and had %v", call, r.Addresses(), was.Addresses())
		}
		if b.movesAll(); b.migrationReport() != "2/2" {
			t.Errorf("%s: at last %s", call, b.migrationReport())
		}
		b.ended("c1", "c2")
	}
}

// A failure to change the MTU does not block a migration.
func TestMoveOfOneWhoseMTUStays(t *testing.T) {
	b := newBedThatMoves(t)
	b.Driver.LinkMTU = 1400 // FollowMTU has not run yet
	b.Driver.Fail["SetMTU"] = agenttest.ErrFake
	b.step(1)
	if b.movesAll(); b.migrationReport() != "2/2" {
		t.Errorf("said %s", b.migrationReport())
	}
	delete(b.Driver.Fail, "SetMTU")
	b.ended("c1", "c2")
}

// TestMoveCutOff stops the agent at each call of both steps; the next agent continues the migration.
func TestMoveCutOff(t *testing.T) {
	for step := uint64(1); step <= 2; step++ {
		for n, calls := 1, 0; ; n, calls = n+1, 0 {
			b := newBedThatMoves(t)
			if step == 2 {
				b.step(1)
				b.movesAll()
			}
			b.step(step)
			killed := ""
			kill := func(call string) {
				if calls++; calls == n {
					killed = call
					runtime.Goexit()
				}
			}
			b.Driver.During = func(call string, _ endpoint.Record) { kill(call) }
			b.Nimitz.During = kill
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				b.MigrateAll(t.Context())
			}()
			<-ended
			b.Driver.During, b.Nimitz.During = nil, nil
			if killed == "" {
				if n < 7 {
					t.Errorf("step %d makes %d calls", step, n)
				}
				break
			}
			b.Orchestrator.Err = agenttest.ErrFake // no request is needed
			b.Reopen()
			b.movesAll()
			if err := b.FollowMTU(t.Context()); err != nil { // as at any start
				t.Fatal(err)
			}
			want := []string{tenant.Netpila, nimitz.Name}[:3-step]
			for _, c := range []string{"c1", "c2"} {
				b.on(c, want...)
			}
			if said := map[uint64]string{1: "2/2", 2: "-"}[step]; b.migrationReport() != said {
				t.Errorf("step %d, ended at call %d (%s): said %s", step, n, killed, b.migrationReport())
			}
			b.ended("c1", "c2")
			if t.Failed() {
				t.Fatalf("step %d, ended at call %d (%s)", step, n, killed)
			}
		}
	}
}

// TestMoveBesideOthers: an ADD from before the migration and a DEL during it end as usual, and a lost container does
// not block the migration.
func TestMoveBesideOthers(t *testing.T) {
	b := newBedThatMoves(t)
	b.Driver.During = func(call string, r endpoint.Record) {
		if call == "CreateDevice" && r.ContainerID == "c3" { // which has its addresses
			b.step(1)
			if b.MigrateAll(t.Context()); b.migrationReport() != "2/3" {
				t.Errorf("with one that is being made: %s", b.migrationReport())
			}
			<-b.MigrationDue()
		}
	}
	if _, err := b.Add(t.Context(), b.Green("c3")); err != nil {
		t.Fatal(err)
	}
	if len(b.MigrationDue()) != 1 {
		t.Error("no migration is due for a container that came late")
	}
	deleted := make(chan error, 1)
	b.Driver.During = func(call string, r endpoint.Record) {
		if call == "Readdress" && r.ContainerID == "c3" {
			go func() { deleted <- b.Delete(t.Context(), "c3", "eth0") }()
		}
	}
	b.movesAll()
	if err := <-deleted; err != nil {
		t.Error(err)
	}
	r, _ := b.Store.Find("c2", "eth0")
	r.State = endpoint.Lost
	if err := b.Store.Put(r); err != nil {
		t.Fatal(err)
	}
	b.SignalMigration(r)
	if b.movesAll(); b.migrationReport() != "1/1" {
		t.Errorf("said %s", b.migrationReport())
	}
	b.ended("c1", "c2")
}

// If one network fails to release an endpoint, the others still do.
func TestDeleteOfOneThatMovesThatFails(t *testing.T) {
	b := newBedThatMoves(t)
	b.step(1)
	b.movesAll()
	b.Driver.Fail["Deactivate"] = agenttest.ErrFake
	if err := b.Delete(t.Context(), "c1", "eth0"); !errors.Is(err, agenttest.ErrFake) {
		t.Errorf("deleted: %v", err)
	}
	delete(b.Driver.Fail, "Deactivate")
	if got := b.senders(); len(got) != 1 {
		t.Errorf("nimitz has %v", got)
	}
	b.ended("c1", "c2")
}

// A node that hosts a tenant but has no containers of it reports that; otherwise the migration could not be finished.
func TestMoveOfNone(t *testing.T) {
	b := newBedOfTwo(t)
	if _, err := b.Tenants.Merge(agent.TenantState{Tenant: b.Orchestrator.Tenants["green"]}); err != nil {
		t.Fatal(err)
	}
	b.step(1)
	if b.movesAll(); b.migrationReport() != "0/0" {
		t.Errorf("said %s", b.migrationReport())
	}
	b.step(2)
	if b.movesAll(); b.migrationReport() != "-" {
		t.Errorf("at last %s", b.migrationReport())
	}
}

// The pause between retries of a migration grows.
func TestMoveRests(t *testing.T) {
	for failures, want := range map[int]time.Duration{0: 10 * time.Second, 1: 20 * time.Second, 4: 160 * time.Second,
		5: 5 * time.Minute, 1 << 30: 5 * time.Minute} {
		if got := agent.RetryPause(failures); got != want {
			t.Errorf("after %d failures %v, want %v", failures, got, want)
		}
	}
}

// A node does not go back to the old network, and reports an unknown network as an error.
func TestMoveIsNotTakenBack(t *testing.T) {
	b := newBedThatMoves(t)
	green := b.Orchestrator.Tenants["green"]
	b.step(1)
	b.movesAll()
	if err := b.Apply(t.Context(), []agent.TenantState{{Tenant: green}}, nil); err != nil {
		t.Fatal(err)
	}
	b.movesAll()
	b.on("c1", tenant.Netpila, nimitz.Name)
	b.ended("c1", "c2")
}
