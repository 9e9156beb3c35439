package egress_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// inForce bounds the time from the end of a change's call until all nodes do as it says, also on a busy machine. They
// learn about it from the orchestrator's stream, in milliseconds; that a gateway is dead, from 0.7 s of silence.
const inForce = 3 * time.Second

// changesInCI is the number of changes without PILASTER_EGRESS_CHANGES.
const changesInCI = 60

// TestModel makes random changes of egress rules, gateways, policies, containers and the settings for nodes, and kills
// agents. Containers, processes of nodes and hosts outside send to each other, and a model predicts which datagrams
// arrive and are answered, and as whom the sender is seen: before each change, during it, and after it. Each round has
// for each pair of places a flow that is new, and one that continues.
//   - What the change does not concern must be as predicted in every round, also during the change: nothing is lost
//     that stays allowed by the same way, and nothing arrives that stays denied.
//   - The rest is as it was, or is lost, or is as predicted; and as predicted inForce after the call at the latest.
//
// PILASTER_EGRESS_CHANGES is the number of changes; PILASTER_EGRESS_SEED repeats the choices of a run.
func TestModel(t *testing.T) {
	s := spec()
	s.Nodes, s.Device = []string{"n1", "n2", "n3", "n4"}, labtest.Device()
	// A node gets thousands of new flows a second, more than the default table of sessions is for: a tenant at its
	// share of a bucket would lose some (session-limit).
	room := func(o *lab.Options) { o.AgentArgs = []string{"--max-sessions", "2000000"} }
	b := bed{labtest.New(t, s, room), t}
	m := &model{
		bed: b, prober: newProber(b), present: b.Containers(), rules: map[string]map[netip.Prefix]lab.EgressRule{},
		policies: map[string]map[string]bool{}, nodes: map[string]string{}, dead: map[string]bool{},
		seen: map[netip.Addr]string{}, aliases: map[string]netip.Addr{},
		took: map[string][]time.Duration{}, seed: labtest.Number(t, "PILASTER_EGRESS_SEED", rand.Uint64()),
	}
	m.random = rand.New(rand.NewPCG(m.seed, 0))
	t.Logf("PILASTER_EGRESS_SEED=%d", m.seed)
	for name := range tenants {
		m.rules[name], m.policies[name] = map[netip.Prefix]lab.EgressRule{}, map[string]bool{}
	}
	defer m.report()
	for i := range labtest.Number(t, "PILASTER_EGRESS_CHANGES", changesInCI) {
		before := kernelDrops(t)
		m.step(int(i) + 1)
		if t.Failed() {
			m.showDrops()
			t.Logf("packets that the kernel lost, before and after the change: %v, %v", before, kernelDrops(t))
			t.Fatalf("seed %d: the rest of the changes is left out", m.seed)
		}
	}
	if m.answered == 0 || m.unanswered == 0 {
		t.Error("the datagrams were all answered, or none")
	}
}

// showDrops logs what the nodes last dropped of the datagrams.
func (m *model) showDrops() {
	for _, node := range m.NodeNames() {
		recent, err := m.Agent(node).RecentEvents(m.Context(), connect.NewRequest(&pilasterv1.RecentEventsRequest{}))
		if err != nil {
			m.Logf("drops of %s: %v", node, err)
			continue
		}
		for _, e := range recent.Msg.Events {
			m.Logf("drop by %s: %v %s at %s: %s port %d to %s port %d", node, e.Time.AsTime().Format(time.StampMicro),
				e.Reason, e.Hook, e.Source, e.SourcePort, e.Destination, e.DestinationPort)
		}
	}
}

// kernelDrops returns how many packets the kernel has dropped before any program saw them, in all namespaces: those
// that waited for a neighbour, and those for which a CPU's backlog had no room.
func kernelDrops(t *testing.T) (lost [2]uint64) {
	for i, of := range []struct {
		file   string
		column int
	}{{"/proc/net/stat/ndisc_cache", 11}, {"/proc/net/softnet_stat", 1}} {
		text, err := os.ReadFile(of.file)
		must(t, err)
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if n, err := strconv.ParseUint(fields[of.column], 16, 64); err == nil { // else it is the heading
				lost[i] += n
			}
		}
	}
	return lost
}

// report logs how long after the calls of changes the first round began that was as predicted.
func (m *model) report() {
	for kind, took := range m.took {
		slices.Sort(took)
		at := func(share float64) time.Duration {
			return took[int(share*float64(len(took)-1))].Round(time.Microsecond)
		}
		m.Logf("%d changes of %s are in force after their call: P50 %v, P99 %v, at most %v", len(took), kind, at(.5),
			at(.99), at(1))
	}
	m.Logf("%d rounds; answered as predicted: %d, not answered as predicted: %d, neither yet or still: %d",
		m.prober.rounds, m.answered, m.unanswered, m.between)
}

// step is one change, and the rounds around it.
func (m *model) step(i int) {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.Context(), labtest.Patience)
	defer cancel()
	before := m.probes()
	m.judge(fmt.Sprintf("before change %d", i), between(before, before))
	c := m.choose()
	m.Logf("change %d: %s", i, c.what)
	if c.removes != "" {
		m.present = slices.DeleteFunc(m.present, func(s lab.ContainerStatus) bool { return s.Name == c.removes })
		m.prober.leave(c.removes)
	}
	during, when := between(before, m.probes()), fmt.Sprintf("during change %d, %s", i, c.what)
	var returned time.Time
	made := make(chan error, 1)
	go func() {
		err := c.make(ctx)
		returned = time.Now()
		made <- err
	}()
	for making := true; making; {
		select {
		case err := <-made:
			must(m.T, err)
			making = false
		default:
			m.judge(when, during)
		}
	}
	if c.adds != "" {
		added, err := m.Container(c.adds)
		must(m.T, err)
		m.present = append(m.present, added)
		m.prober.enter(c.adds)
	}
	after, when := between(before, m.probes()), fmt.Sprintf("after change %d, %s", i, c.what)
	m.took[c.kind] = append(m.took[c.kind], m.await(returned, when, after))
}

// await has rounds until they are as predicted, and returns how long after the end of the call the first such round
// began. With two gateways, chance decides about each flow: one round does not show that both do as predicted.
func (m *model) await(returned time.Time, when string, after []expectation) (took time.Duration) {
	m.Helper()
	enough := 1
	if slices.ContainsFunc(after, func(e expectation) bool { return !e.stays() && len(e.after.via) > 1 }) {
		enough = 30
	}
	for agreed := 0; agreed < enough && !m.Failed(); {
		began := time.Since(returned)
		open := m.judge(when, after)
		switch {
		case len(open) == 0:
			if agreed++; agreed == 1 {
				took = began
			}
		case began > inForce:
			m.Errorf("%v %s: %s", began, when, strings.Join(open, "; "))
		default:
			agreed = 0
		}
	}
	return took
}

// model is what the cluster should do.
type model struct {
	bed
	random *rand.Rand
	seed   uint64

	rules    map[string]map[netip.Prefix]lab.EgressRule // by tenant and prefix
	policies map[string]map[string]bool                 // by tenant: names of those in force
	nodes    map[string]string                          // by tenant: as of SetNodes; empty: deny
	aliases  map[string]netip.Addr                      // by node and tenant, as its containers have seen it
	seen     map[netip.Addr]string                      // egress addresses, and what they are
	dead     map[string]bool                            // gateways whose tunnel the router drops
	present  []lab.ContainerStatus
	added    int

	prober                        *prober
	answered, unanswered, between int
	took                          map[string][]time.Duration // by kind of change
}

// expectation is a probe before a change and after it. Before a container was added, nothing reached it.
type expectation struct{ before, after probe }

// between pairs the probes before a change and after it. The result has no probes of containers that are gone.
func between(before, after []probe) (all []expectation) {
	was := map[flowKey]probe{}
	for _, p := range before {
		was[p.key()] = p
	}
	for _, p := range after {
		e := expectation{before: p, after: p}
		e.before.reaches = false
		if b, has := was[p.key()]; has {
			e.before = b
		}
		all = append(all, e)
	}
	return all
}

// stays reports whether a change does not concern a probe. When a first policy selects a container, an answer that is
// under way from or to another node belongs to no session: sessions begin with the policy, and only those of TCP are
// adopted.
func (e expectation) stays() bool {
	return e.before.reaches == e.after.reaches && (e.before.policed || !e.after.policed || !e.after.reaches) &&
		(!e.after.reaches || slices.Equal(e.before.via, e.after.via) &&
			slices.Equal(e.before.egressOf, e.after.egressOf))
}

// judge has a round of probes. Something else than what was before the change, silence, and what is predicted is an
// error, and so is everything but the latter for what stays. judge returns what is not as predicted yet.
func (m *model) judge(when string, expected []expectation) (open []string) {
	m.Helper()
	var all []attempt
	for _, keep := range []bool{false, true} {
		for _, e := range expected {
			all = append(all, attempt{probe: e.after, keep: keep, must: e.stays() && e.after.reaches,
				never: e.stays() && !e.after.reaches})
		}
	}
	m.prober.round(all)
	for _, late := range m.prober.late {
		m.Errorf("%s: %s", when, late)
	}
	for i, a := range all {
		e := expected[i%len(expected)]
		wrong := m.disagrees(a, e.after)
		switch {
		case wrong == "" && a.outcome == reached:
			m.answered++
			if a.alias != "" {
				m.aliases[a.alias] = a.seen
			}
			if a.egressOf != nil {
				m.keepSeen(a)
			}
		case wrong == "":
			m.unanswered++
		case e.stays() || m.disagrees(a, e.before) != "" && !a.unanswered():
			m.Errorf("%s: %s", when, wrong)
		default:
			m.between++
			open = append(open, wrong)
		}
	}
	return open
}

// keepSeen notes an egress address for later probes. The former ones go when they are too many.
func (m *model) keepSeen(a attempt) {
	const most = 16
	if _, known := m.seen[a.seen]; !known && len(m.seen) == most {
		clear(m.seen)
	}
	m.seen[a.seen] = "the egress address of " + a.from
}

// unanswered reports whether neither an answer nor an error has come that only the destination sends.
func (a attempt) unanswered() bool {
	return slices.Contains([]outcome{denied, silent, routeless}, a.outcome)
}

// disagrees says what in an attempt is not as in a prediction.
func (m *model) disagrees(a attempt, p probe) string {
	what := fmt.Sprintf("%s, %v", p.what, p.to)
	if a.keep {
		what += " (continued)"
	} else {
		what += fmt.Sprintf(" (port %d)", m.prober.newPort())
	}
	switch {
	case !p.reaches && a.arrived:
		return fmt.Sprintf("%s: arrived (%s), must be dropped", what, a.outcome)
	case !p.reaches && !a.unanswered(), p.reaches && a.outcome != reached:
		return fmt.Sprintf("%s: %s (arrived: %v), must be reached: %v", what, a.outcome, a.arrived, p.reaches)
	case p.reaches && p.seenAs.IsValid() && a.seen != p.seenAs:
		return fmt.Sprintf("%s: is seen as %v, must be as %v", what, a.seen, p.seenAs)
	case p.reaches && p.egressOf != nil && !m.isEgressOf(a.seen, p.egressOf, len(p.via) > 0):
		return fmt.Sprintf("%s: is seen as %v, must be as an egress address of %v, by gateway: %v", what, a.seen,
			p.egressOf, len(p.via) > 0)
	}
	return ""
}
