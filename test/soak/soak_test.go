// Package soak_test applies random churn, kills, key rotations, flaps, partitions, resets and attacks to a lab. It
// compares the lab with a model: which containers reach each other, which entries nodes have, which IDs tenants have,
// and which drops are counted.
//
// A seed determines the events: equal seeds give equal events in the same order.
package soak_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
)

const (
	containers = 8                // maximum number at one time
	rounds     = 3                // minimum
	long       = 5 * time.Minute  // if a run is at least this long, every kind of event must occur
	patience   = 90 * time.Second // for asynchronous changes, such as reconnections of agents
	remembered = 40               // events printed with a failure
)

var (
	nodes   = []string{"n1", "n2", "n3"}
	tenants = []string{"blue", "glass", "red"} // glass is clear

	// The model is that of the tenants' network, by PILASTER_TEST_NETWORK.
	onILA  = labtest.Network() == tenant.ILA
	onEVPN = labtest.Network() == tenant.EVPN
	// hasMappings: the cluster allocates addresses, tenants have no keys, and nodes have mappings of other nodes'
	// containers.
	hasMappings = tenant.NetworkHas(labtest.Network(), tenant.Mappings)
)

// soak is a lab with its model.
type soak struct {
	*testing.T
	lab    *lab.Lab
	random *rand.Rand
	seed   uint64
	binary string
	start  time.Time

	up       map[string]*container
	released map[string]netip.Addr // by name, the address of the last container with that name, as its tenant sees it
	gone     map[string]removed    // by name, its last container
	current  map[string]uint32     // by tenant, the ID for allocations
	live     map[string][]uint32   // by tenant, IDs in the order of their creation
	retired  map[string][]uint32
	dropped  []string // nodes whose packets the fabric drops
	down     []string // nodes whose uplink is down
	away     []string // nodes that cannot reach the orchestrator

	history       []string
	events        map[string]int
	disagreements int
	answers       map[string]int
}

// container is a running container.
type container struct {
	lab.ContainerStatus
	id   uint32     // of its tenant
	node netip.Addr // the address that the container sees as its node's address
}

type removed struct {
	node, tenant string
	plaintext    netip.Addr // on networks with mappings the address that containers see
}

// TestSoak runs for PILASTER_SOAK (a Go duration; by default a few rounds), with random choices by PILASTER_SOAK_SEED.
func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(cmp.Or(os.Getenv("PILASTER_SOAK"), "0s"))
	if err != nil {
		t.Fatalf("PILASTER_SOAK: %v", err)
	}
	seed, err := strconv.ParseUint(cmp.Or(os.Getenv("PILASTER_SOAK_SEED"), fmt.Sprint(rand.Uint32())), 10, 64)
	if err != nil {
		t.Fatalf("PILASTER_SOAK_SEED: %v", err)
	}
	t.Logf("SEED=%d", seed)
	s := &soak{
		T: t, random: rand.New(rand.NewPCG(seed, 0)), seed: seed, start: time.Now(), binary: labtest.Binary(t),
		up: map[string]*container{}, released: map[string]netip.Addr{}, gone: map[string]removed{},
		current: map[string]uint32{}, live: map[string][]uint32{}, retired: map[string][]uint32{},
		events: map[string]int{}, answers: map[string]int{},
		lab: labtest.New(t, lab.Spec{
			Nodes:   nodes,
			Tenants: specTenants(),
		}),
	}
	t.Cleanup(func() { s.report(length) })
	for _, name := range tenants {
		s.live[name] = []uint32{s.tenant(name).Tenant.Ids[0].Id}
		s.current[name] = s.live[name][0]
	}
	for round := 1; !t.Failed() && (round <= rounds || time.Since(s.start) < length); round++ {
		s.round()
	}
	for _, kind := range kinds() {
		if length >= long && s.events[kind] == 0 {
			t.Errorf("no event of kind %q occurred", kind)
		}
	}
}

func specTenants() []lab.Tenant {
	if hasMappings {
		var all []lab.Tenant
		for i, name := range tenants {
			all = append(all, labtest.Tenant(name, byte(i)))
		}
		return all
	}
	return []lab.Tenant{{Name: "blue"}, {Name: "red"}, {Name: "glass", Addressing: tenant.Clear}}
}

// round makes some changes, then compares.
func (s *soak) round() {
	for range 1 + s.random.IntN(3) {
		s.turnOver()
	}
	s.compareMappings()
	s.happen()
	s.compare()
}

// happen picks an event: slow events have a lower probability.
func (s *soak) happen() {
	choices := []struct {
		weight int
		event  func()
	}{
		{6, s.killAgent}, {3, s.killOrchestrator}, {5, s.rotate}, {8, s.attack},
		{2, s.flap}, {2, s.cutOff}, {2, s.partition}, {1, s.exhaust}, {1, s.reset},
	}
	if hasMappings { // tenants have no keys
		choices[2].weight, choices[7].weight = 0, 0
	}
	sum := 0
	for _, c := range choices {
		sum += c.weight
	}
	at := s.random.IntN(sum)
	for _, c := range choices {
		if at -= c.weight; at < 0 {
			c.event()
			return
		}
	}
}

// did records an event of a kind.
func (s *soak) did(kind, format string, args ...any) {
	s.events[kind]++
	line := fmt.Sprintf("%v: %s: ", time.Since(s.start).Round(time.Millisecond), kind) + fmt.Sprintf(format, args...)
	if s.history = append(s.history, line); len(s.history) > remembered {
		s.history = s.history[1:]
	}
}

// answered compares a result with the model.
func (s *soak) answered(kind string, got, want any, format string, args ...any) {
	s.Helper()
	s.answers[kind]++
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.disagreements++
		s.Errorf("%s: got %v, want %v by the model: %s", kind, got, want, fmt.Sprintf(format, args...))
	}
}

// kinds are the kinds of events that must occur in a long run.
func kinds() []string {
	all := []string{
		"add", "remove", "kill agent", "kill orchestrator", "flap", "cut off", "partition", "reset",
		"attack: another tenant", "attack: own prefix", "attack: released address", "attack: stolen source",
	}
	switch {
	case onILA:
		return append(all, "attack: another locator")
	case onEVPN:
		return append(all, "attack: stranger")
	}
	return append(all, "rotate", "rotate refused", "rotate delayed", "id retired", "attack: retired id")
}

// report logs the events at the end and, after a failure, how to reproduce the run.
func (s *soak) report(length time.Duration) {
	count := func(of map[string]int) string {
		var words []string
		for _, kind := range slices.Sorted(maps.Keys(of)) {
			words = append(words, fmt.Sprintf("%d %s", of[kind], kind))
		}
		return cmp.Or(strings.Join(words, ", "), "none")
	}
	s.Logf("SEED=%d, %v; events: %s; comparisons: %s; failures: %d", s.seed,
		time.Since(s.start).Round(time.Second), count(s.events), count(s.answers), s.disagreements)
	if s.Failed() {
		// A longer run begins with the same events.
		s.Logf("the last events:\n%s\nthe same events again: make soak SOAK=%v SEED=%d", strings.Join(s.history, "\n"),
			max(length, time.Since(s.start).Round(time.Second)), s.seed)
	}
}

func (s *soak) pick(from []string) string { return from[s.random.IntN(len(from))] }

// names returns the sorted names of the containers for which is returns true.
func (s *soak) names(is func(*container) bool) []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(s.up)) {
		if is(s.up[name]) {
			names = append(names, name)
		}
	}
	return names
}

func (s *soak) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}
