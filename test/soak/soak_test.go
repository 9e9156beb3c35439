// Package soak_test keeps a lab under churn and compares it with a model of what it must be.
package soak_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	containers = 8 // that may be up at once
	rounds     = 3 // at least
)

// churn is a lab and what it must be like.
type churn struct {
	*testing.T
	lab      *lab.Lab
	random   *rand.Rand
	up       map[string]lab.Container
	released map[string]netip.Addr // address of the container that last had the name
}

// TestSoak runs for PILASTER_SOAK (a Go duration; a few rounds without it), with the choices of
// PILASTER_SOAK_SEED.
func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(cmp.Or(os.Getenv("PILASTER_SOAK"), "0s"))
	if err != nil {
		t.Fatalf("PILASTER_SOAK: %v", err)
	}
	seed, err := strconv.ParseUint(cmp.Or(os.Getenv("PILASTER_SOAK_SEED"), fmt.Sprint(rand.Uint32())), 10, 64)
	if err != nil {
		t.Fatalf("PILASTER_SOAK_SEED: %v", err)
	}
	t.Logf("PILASTER_SOAK_SEED=%d", seed)
	c := &churn{
		T: t, random: rand.New(rand.NewPCG(seed, 0)),
		up: map[string]lab.Container{}, released: map[string]netip.Addr{},
		lab: labtest.New(t, lab.Spec{
			Nodes:   []string{"n1", "n2", "n3"},
			Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red"}, {Name: "glass", Addressing: tenant.Clear}},
		}),
	}
	end := time.Now().Add(length)
	for round := 1; !t.Failed() && (round <= rounds || time.Now().Before(end)); round++ {
		done := c.round()
		t.Logf("round %d: %s; %d containers are up", round, done, len(c.up))
	}
}

// round makes one change of each kind and compares.
func (c *churn) round() string {
	var done string
	for range 1 + c.random.IntN(3) {
		done += c.turnOver() + ", "
	}
	victims := []string{lab.Orchestrator, lab.AgentProcess("n1"), lab.AgentProcess("n2"), lab.AgentProcess("n3")}
	victim := victims[c.random.IntN(len(victims))]
	_, err := c.lab.Kill(c.Context(), victim)
	c.must(err)
	c.compareReach()
	c.compareReleased()
	c.compareEntries()
	return done + "killed " + victim
}

// turnOver picks a name: the container of that name goes, or comes.
func (c *churn) turnOver() string {
	name := fmt.Sprint("c", c.random.IntN(containers))
	if _, up := c.up[name]; up {
		status, err := c.lab.Container(name)
		c.must(err)
		c.must(c.lab.RemoveContainer(c.Context(), name))
		c.released[name] = status.Address
		delete(c.up, name)
		return "removed " + name
	}
	one := lab.Container{
		Name:   name,
		Node:   fmt.Sprint("n", 1+c.random.IntN(3)),
		Tenant: []string{"blue", "red", "glass"}[c.random.IntN(3)],
		Labels: map[string]string{"app": fmt.Sprint("app", c.random.IntN(4))},
	}
	c.must(c.lab.AddContainer(c.Context(), one))
	c.up[name] = one
	return fmt.Sprintf("added %s of %s on %s", name, one.Tenant, one.Node)
}

// compareReach pings between all containers: those of one tenant answer each other, and no others.
func (c *churn) compareReach() {
	echoes, err := c.lab.PingAll(c.Context(), packet.PingOptions{Timeout: time.Second})
	c.must(err)
	if want := len(c.up) * (len(c.up) - 1); len(echoes) != want {
		c.Errorf("%d pairs of containers, want %d", len(echoes), want)
	}
	for _, e := range echoes {
		if must := c.up[e.From].Tenant == c.up[e.To].Tenant; e.Reached() != must {
			c.Errorf("%+v reaches %+v: %v, must be %v", c.up[e.From], c.up[e.To], e.Reached(), must)
		}
	}
}

// compareReleased pings addresses that were given back. They rest for longer than a round takes.
func (c *churn) compareReleased() {
	for from := range c.up {
		ns, err := c.lab.Namespace(from)
		c.must(err)
		defer ns.Close()
		for name, a := range c.released {
			// A container of another addressing has no route there, which is as good.
			r, err := packet.Ping(c.Context(), ns, a, packet.PingOptions{Timeout: 50 * time.Millisecond})
			if err == nil && r.Received > 0 {
				c.Errorf("%s is answered by %v, which %s gave back", from, a, name)
			}
		}
		return // one container asks
	}
}

// compareEntries reads what nodes keep: as much as their own containers need (NP2, NP10).
func (c *churn) compareEntries() {
	for _, node := range []string{"n1", "n2", "n3"} {
		here := uint32(0)
		for _, one := range c.up {
			if one.Node == node {
				here++
			}
		}
		status, err := c.lab.Agent(node).Status(c.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
		c.must(err)
		if status.Msg.Endpoints != here {
			c.Errorf("%s has %d endpoints, want %d", node, status.Msg.Endpoints, here)
		}
		tables := map[string]uint32{}
		for _, e := range status.Msg.Datapath.Entries {
			tables[e.Table] = e.Used
		}
		for _, table := range []string{"sources", "locals"} {
			if used, ok := tables[table]; !ok || used != here {
				c.Errorf("%s keeps %d %s for %d containers; it has %v", node, used, table, here, tables)
			}
		}
	}
}

func (c *churn) must(err error) {
	c.Helper()
	if err != nil {
		c.Fatal(err)
	}
}
