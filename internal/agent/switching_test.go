package agent_test

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// newBedThatSwitches has networks nimitz and evpn, and containers c1 and c2 of green, which is on nimitz.
func newBedThatSwitches(t *testing.T) *bed {
	t.Helper()
	b := newBedOfTwo(t)
	b.EVPN = agenttest.NewSwitch()
	b.Reopen()
	for _, c := range []string{"c1", "c2"} {
		if _, err := b.Add(t.Context(), b.Green(c)); err != nil {
			t.Fatal(err)
		}
	}
	b.listed()
	return b
}

// now says that green sends by one network and receives by another too.
func (b *bed) now(network, other string) {
	b.T.Helper()
	b.Orchestrator.Mu.Lock()
	green := b.Orchestrator.Tenants["green"]
	green.Network, green.Leaving, green.Changes = network, other, green.Changes+1
	b.Orchestrator.Tenants["green"] = green
	b.Orchestrator.Mu.Unlock()
	if err := b.Apply(b.T.Context(), []agent.TenantState{{Tenant: green}}, nil); err != nil {
		b.T.Fatal(err)
	}
}

// listed delivers the mappings of green, which are none, to the networks that have it.
func (b *bed) listed() {
	b.T.Helper()
	for _, name := range []string{tenant.EVPN, tenant.Nimitz} {
		if n, ok := b.Networks[name].(network.MappingSink); ok {
			if err := n.Replace(b.T.Context(), "green", nil); err != nil {
				b.T.Fatal(err)
			}
		}
	}
	b.Tenants.SetListed("green")
}

// carries fails unless a container sends by one network and receives by the others, and is in the tables of these only.
func (b *bed) carries(container, by string, also ...string) endpoint.Record {
	b.T.Helper()
	r, ok := b.Store.Find(container, "eth0")
	all := append([]string{by}, also...)
	slices.Sort(all)
	if !ok || !slices.Equal(r.SendsBy(), []string{by}) || !slices.Equal(r.Networks(), all) {
		b.T.Fatalf("%s sends by %v and is on %v, want %s and %v", container, r.SendsBy(), r.Networks(), by, all)
	}
	if on := b.Driver.Devices[r.ID]; !slices.Equal(on.SendsBy(), r.SendsBy()) {
		b.T.Errorf("the device of %s sends by %v", container, on.SendsBy())
	}
	for name, s := range map[string]*agenttest.Switch{tenant.Nimitz: b.Nimitz, tenant.EVPN: b.EVPN} {
		if has := sends(s, r.ID); has != slices.Contains(all, name) {
			b.T.Errorf("%s is in the tables of network %s: %v", container, name, has)
		}
	}
	return r
}

func sends(s *agenttest.Switch, id endpoint.ID) bool {
	for _, e := range s.Has {
		if from, ok := e.(pipeline.Sender); ok && from.Port == pipeline.Port(id) {
			return true
		}
	}
	return false
}

// TestSwitch: containers keep their addresses, send by the tenant's network and receive by the other one, also those
// that start meanwhile. A report is about the tenant's present state, and only complete with all mappings.
func TestSwitch(t *testing.T) {
	b := newBedThatSwitches(t)
	old := b.carries("c1", tenant.Nimitz)
	b.now(tenant.Nimitz, tenant.EVPN)
	if b.MigrateAll(t.Context()) || !strings.HasPrefix(b.migrationReport(), "2/2 the mappings of network evpn have") {
		t.Errorf("without mappings: %s", b.migrationReport())
	}
	if b.listed(); len(b.MigrationDue()) != 1 {
		t.Error("no report is due when the mappings have arrived")
	}
	if b.movesAll(); b.migrationReport() != "2/2" {
		t.Errorf("both receive by both: %s", b.migrationReport())
	}
	b.carries("c1", tenant.Nimitz, tenant.EVPN)
	if _, err := b.Add(t.Context(), b.Green("c3")); err != nil {
		t.Fatal(err)
	}
	b.carries("c3", tenant.Nimitz, tenant.EVPN)
	if b.movesAll(); b.migrationReport() != "3/3" {
		t.Errorf("with another one: %s", b.migrationReport())
	}
	b.now(tenant.EVPN, tenant.Nimitz)
	b.movesAll()
	for _, c := range []string{"c1", "c2", "c3"} {
		b.carries(c, tenant.EVPN, tenant.Nimitz)
	}
	b.Reopen()
	b.carries("c1", tenant.EVPN, tenant.Nimitz)
	b.listed()
	if b.movesAll(); b.migrationReport() != "3/3" {
		t.Errorf("after a start: %s", b.migrationReport())
	}
	b.now(tenant.EVPN, "")
	if b.movesAll(); b.migrationReport() != "-" {
		t.Errorf("finally: %s", b.migrationReport())
	}
	if is := b.carries("c1", tenant.EVPN); !slices.Equal(is.Addresses(), old.Addresses()) || is.Left != nil {
		t.Errorf("c1 had %v, and has %v; it has left %v", old.Addresses(), is.Addresses(), is.Left)
	}

	// The way back, and on to netpila.
	for _, at := range [][2]string{{tenant.EVPN, tenant.Nimitz}, {tenant.Nimitz, tenant.EVPN}, {tenant.Nimitz, ""}} {
		b.now(at[0], at[1])
		b.listed()
		b.movesAll()
	}
	b.carries("c1", tenant.Nimitz)
	b.step(100)
	b.movesAll()
	if r := b.on("c1", tenant.Netpila); !slices.Equal(r.Left, old.Addresses()) {
		t.Errorf("c1 on netpila has left %v", r.Left)
	}
	b.ended("c1", "c2", "c3")
}

// TestSwitchCutOff stops the agent at each call of each step; the next agent continues. At each call a container's
// device sends by a network that has its entries, and is in the tables of both networks until no node needs one.
func TestSwitchCutOff(t *testing.T) {
	steps := [][2]string{{tenant.Nimitz, tenant.EVPN}, {tenant.EVPN, tenant.Nimitz}, {tenant.EVPN, ""}}
	late := [][2]string{steps[2]} // a node that has missed the other steps
	for _, before := range [][][2]string{steps[:1], steps[:2], steps, late} {
		last := before[len(before)-1]
		for n, calls := 1, 0; ; n, calls = n+1, 0 {
			b := newBedThatSwitches(t)
			for _, at := range before[:len(before)-1] {
				b.now(at[0], at[1])
				b.listed()
				b.movesAll()
			}
			old, _ := b.Store.Find("c1", "eth0")
			b.now(last[0], last[1])
			b.listed()
			killed := ""
			kill := func(call string) {
				for id, on := range b.Driver.Devices {
					by := map[string]*agenttest.Switch{tenant.Nimitz: b.Nimitz, tenant.EVPN: b.EVPN}[on.SendsBy()[0]]
					if !sends(by, id) {
						t.Errorf("to %v, at call %d (%s): endpoint %d sends by %v, which lacks entries", last, calls,
							call, id, on.SendsBy())
					}
				}
				if calls++; calls == n {
					killed = call
					runtime.Goexit()
				}
			}
			b.Driver.During = func(call string, _ endpoint.Record) { kill(call) }
			b.Nimitz.During, b.EVPN.During = kill, kill
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				b.MigrateAll(t.Context())
			}()
			<-ended
			b.Driver.During, b.Nimitz.During, b.EVPN.During = nil, nil, nil
			if killed != "" {
				b.Orchestrator.Err = agenttest.ErrFake // no request is needed
				b.Reopen()
				b.listed()
				b.movesAll()
			}
			for _, c := range []string{"c1", "c2"} {
				b.carries(c, last[0], slices.DeleteFunc([]string{last[1]}, func(s string) bool { return s == "" })...)
			}
			if is, _ := b.Store.Find("c1", "eth0"); !slices.Equal(is.Addresses(), old.Addresses()) {
				t.Errorf("c1 has %v, and had %v", is.Addresses(), old.Addresses())
			}
			if b.ended("c1", "c2"); len(b.EVPN.Ports) > 0 || slices.ContainsFunc([]endpoint.ID{1, 2},
				func(id endpoint.ID) bool { return sends(b.EVPN, id) }) {
				t.Errorf("network evpn has ports %v, %v", b.EVPN.Ports, b.EVPN.Has)
			}
			if killed == "" {
				if n < 3 {
					t.Errorf("to %v: only %d calls", last, n)
				}
				break
			}
		}
	}
}

// TestSwitchFails: an endpoint whose switch fails is not counted until a retry succeeds. One that cannot join a network
// stays as it was.
func TestSwitchFails(t *testing.T) {
	b := newBedThatSwitches(t)
	b.now(tenant.Nimitz, tenant.EVPN)
	b.listed()
	b.movesAll()
	b.now(tenant.EVPN, tenant.Nimitz)
	b.Driver.Fail["Readdress"] = agenttest.ErrFake
	if b.MigrateAll(t.Context()) || !strings.HasPrefix(b.migrationReport(), "0/2 endpoint 1: made to fail") {
		t.Errorf("without new programs: %s", b.migrationReport())
	}
	delete(b.Driver.Fail, "Readdress")
	if b.movesAll(); b.migrationReport() != "2/2" {
		t.Errorf("after a retry: %s", b.migrationReport())
	}
	b.carries("c1", tenant.EVPN, tenant.Nimitz)

	for why, prepare := range map[string]func(*bed){
		"start the agent with --some pool": func(b *bed) { b.Reopen() },
		"recreate the container": func(b *bed) {
			b.EVPN, b.Driver.OldMAC = agenttest.NewSwitch(), true
			b.Reopen()
		},
	} {
		b := newBedOfTwo(t)
		prepare(b)
		if _, err := b.Add(t.Context(), b.Green("c1")); err != nil {
			t.Fatal(err)
		}
		b.now(tenant.Nimitz, tenant.EVPN)
		b.listed()
		if b.MigrateAll(t.Context()) || !strings.HasPrefix(b.migrationReport(), "0/1 ") ||
			!strings.Contains(b.migrationReport(), why) {
			t.Errorf("got report %s, want one with %q", b.migrationReport(), why)
		}
		if r, _ := b.Store.Find("c1", "eth0"); fmt.Sprint(r.Networks()) != "[nimitz]" || !sends(b.Nimitz, r.ID) {
			t.Errorf("c1 is on %v", r.Networks())
		}
	}
}
