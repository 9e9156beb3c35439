package services_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

const (
	// inForce bounds the time from the end of changes' calls until all nodes do as they say, also on a busy machine.
	inForce = 5 * time.Second
	// changesInCI is the number of changes without PILASTER_SERVICES_CHANGES.
	changesInCI = 300
	// mostAtOnce is the maximum number of changes between two rounds of probes.
	mostAtOnce = 6
	// probesOfRound is the number of probes of a round, and rounds how many must be as predicted one after the other:
	// many after each change of number thorough.
	probesOfRound, rounds, thoroughRounds, thorough = 48, 2, 20, 50
	// coverage is the maximum number of connections until each backend has been seen that a client may get.
	coverage = 500
)

// placement is where the model's containers are. All are clients, and endpoints if services select them.
var placement = map[string][]string{
	"blue":  {"n1", "n1", "n2", "n2", "n3"},
	"glass": {"n1", "n2", "n3"},
}

// model is what the cluster should do, and a cluster.
type model struct {
	*bed
	state
	places *places
	random *rand.Rand
	seed   uint64

	connections, served, refused, denied int
	affine                               int // connections to one of several backends by affinity
	took                                 []time.Duration
	refuted                              map[rule]int

	kept   map[flowKey]string // backends by affinity
	keptBy map[flowKey]probe
}

// TestModel makes random changes of services, their endpoints, containers, policies and the setting for nodes. A model
// predicts which backends a new connection may get: of containers, by sockets that get their backend when they connect
// and by sockets whose packets are translated; of processes of nodes; and of a host outside. After some changes at
// once, rounds of connections must be as predicted, inForce after the last change at the latest; sometimes, each
// backend must be seen that a client may get. Each rule of the model must be needed: what is observed refutes the model
// without it.
// PILASTER_SERVICES_CHANGES is the number of changes; PILASTER_SERVICES_SEED repeats the choices of a run.
func TestModel(t *testing.T) {
	m := newModel(t)
	changes := int(labtest.Number(t, "PILASTER_SERVICES_CHANGES", changesInCI))
	defer m.report()
	for made := 0; made < changes || made < 4*changes && len(m.needless()) > 0; {
		var what []string
		before := made
		for range 1 + m.random.IntN(mostAtOnce) {
			made++
			what = append(what, m.change())
			m.forget()
		}
		deep := made/thorough > before/thorough
		m.settle(fmt.Sprintf("after change %d: %s", made, strings.Join(what, "; ")), deep)
		if t.Failed() {
			m.Fatalf("seed %d: the rest of the changes is left out", m.seed)
		}
	}
	for _, r := range m.needless() {
		t.Errorf("no connection has shown that the model needs the rule: %s", r)
	}
}

// needless are the rules without which the model would have predicted all that was observed.
func (m *model) needless() []rule {
	return slices.DeleteFunc(slices.Clone(rules), func(r rule) bool { return m.refuted[r] > 0 })
}

func newModel(t *testing.T) *model {
	s := lab.Spec{
		Nodes: []string{"n1", "n2", "n3"}, Device: labtest.Device(), Outside: []lab.OutsideHost{{Name: internet}},
		Racks: map[string]string{"n1": "near", "n2": "near", "n3": "far"},
	}
	m := &model{
		state: state{
			containers: map[string]*container{}, services: map[string]*modelService{},
			policies: map[string]*modelPolicy{}, nodes: map[string]string{}, ingress: map[string]string{},
			zones: s.Racks, address: map[string]netip.Addr{},
		},
		refuted: map[rule]int{}, kept: map[flowKey]string{}, keptBy: map[flowKey]probe{},
		seed: labtest.Number(t, "PILASTER_SERVICES_SEED", rand.Uint64()),
	}
	m.random = rand.New(rand.NewPCG(m.seed, 0))
	t.Logf("PILASTER_SERVICES_SEED=%d", m.seed)
	for _, name := range []string{"blue", "glass"} {
		m.nodes[name] = "allow" // from the start, so that the nodes have the route
		s.Tenants = append(s.Tenants, lab.Tenant{Name: name, Nodes: "allow"})
		for i, node := range placement[name] {
			c := &container{name: fmt.Sprint(name, i+1), tenant: name, node: node, app: m.one(apps...)}
			m.containers[c.name] = c
			s.Containers = append(s.Containers, lab.Container{Name: c.name, Node: node, Tenant: name,
				Labels: map[string]string{"app": c.app}})
		}
	}
	// A round has dozens of new sessions.
	room := func(o *lab.Options) { o.AgentArgs = []string{"--max-sessions", "2000000"} }
	m.bed = &bed{Lab: labtest.New(t, s, room), T: t}
	for _, c := range sorted(m.containers) {
		m.enter(c)
	}
	for _, name := range append(m.NodeNames(), internet) {
		a, err := m.Address(name)
		must(t, err)
		m.address[name] = a
	}
	for number, name := range []string{"blue", "glass"} {
		for i := range servicesOfTenant {
			is := &modelService{tenant: name, name: fmt.Sprint("s", i+1),
				external: netip.MustParseAddr(fmt.Sprintf("2001:db8:7:%d::%d", number+1, i+1))}
			m.services[name+"/"+is.name] = is
			m.routeTo(is, m.one(m.NodeNames()...))
		}
	}
	m.Cleanup(func() {
		for _, c := range m.containers {
			for _, end := range c.end {
				end()
			}
		}
	})
	m.places = newPlaces(m.bed)
	return m
}

func (m *model) one(of ...string) string { return of[m.random.IntN(len(of))] }

// report logs what was observed.
func (m *model) report() {
	slices.Sort(m.took)
	if len(m.took) == 0 {
		return
	}
	at := func(share float64) time.Duration {
		return m.took[int(share*float64(len(m.took)-1))].Round(time.Millisecond)
	}
	m.Logf("%d connections in the rounds as predicted: served %d, refused %d, denied or without service %d; with "+
		"affinity %d; changes are in force: P50 %v, P99 %v, at most %v", m.connections, m.served, m.refused, m.denied,
		m.affine, at(.5), at(.99), at(1))
	for _, r := range rules {
		m.Logf("without the rule %q, the model is wrong about %d", r, m.refuted[r])
	}
}

// settle has rounds of probes until enough are as predicted one after the other.
func (m *model) settle(when string, deep bool) {
	m.Helper()
	probes, enough := m.probes(probesOfRound), rounds
	if deep {
		enough = thoroughRounds
	}
	returned := time.Now()
	var observed [][]string
	for len(observed) < enough {
		began := time.Since(returned)
		outcomes, wrong := m.round(probes, began, len(observed))
		switch {
		case len(wrong) == 0:
			if len(observed) == 0 {
				m.took = append(m.took, began)
			}
			observed = append(observed, outcomes)
		case began > inForce:
			m.Errorf("%v %s:\n%s", began, when, strings.Join(wrong, "\n"))
			m.explain()
			return
		default:
			observed = nil
		}
	}
	for _, outcomes := range observed {
		m.count(probes, outcomes)
	}
	if deep {
		m.compare(probes)
		m.cover(when, probes)
	}
}

// compare counts the rules without which a client could get further backends: in many connections, none got one.
func (m *model) compare(probes []probe) {
	for _, p := range probes {
		is := m.predict(p, "")
		for _, r := range rules {
			more := func(name string) bool { return !slices.Contains(is.names, name) }
			if !p.service.affinity && slices.ContainsFunc(m.predict(p, r).names, more) {
				m.refuted[r]++
			}
		}
	}
}

// round makes a connection for each probe, and returns what is not as predicted.
func (m *model) round(probes []probe, since time.Duration, before int) (outcomes, wrong []string) {
	m.Helper()
	expect := make([]expected, len(probes))
	attempts, cgroups := make([]Attempt, len(probes)), make([]string, len(probes))
	for i, p := range probes {
		expect[i] = m.predict(p, "")
		// Resets and errors that are packets of the data path come at a limited rate.
		expect[i].rarely = before >= rounds && !p.byCall()
		attempts[i] = Attempt{m.places.path(p.place), p.port.protocol, p.to, expect[i].must()}
		cgroups[i] = p.cgroup
	}
	// Right after a change, a connection without an answer is one that the change has not reached yet.
	outcomes = m.places.connect(attempts, cgroups, min(max(100*time.Millisecond, since), 3*time.Second))
	for i, p := range probes {
		if p.service.affinity && m.kept[p.key()] != "" && len(expect[i].names) > 1 {
			m.affine++
		}
		switch {
		case !expect[i].agrees(outcomes[i]):
			wrong = append(wrong, fmt.Sprintf("%v: %s, must be %v", p, outcomes[i], expect[i]))
		case p.service.affinity && m.kept[p.key()] != "" && outcomes[i] != m.kept[p.key()]:
			wrong = append(wrong, fmt.Sprintf("%v: %s, by affinity before: %s", p, outcomes[i], m.kept[p.key()]))
		}
	}
	m.keep(probes, outcomes)
	return outcomes, wrong
}

// flowKey is what the affinity of a connection depends on.
type flowKey struct {
	place string
	to    netip.AddrPort
	portKey
}

func (p probe) key() flowKey { return flowKey{p.place, p.to, p.port} }

// keep notes the backends that clients keep by affinity: those that they got last. Connections of a round are
// concurrent, so of different ones neither is known to be the last.
func (m *model) keep(probes []probe, outcomes []string) {
	last := map[flowKey]string{}
	for i, p := range probes {
		if !p.service.affinity {
			continue
		}
		got, twice := last[p.key()]
		if last[p.key()] = outcomes[i]; twice && got != outcomes[i] || !strings.Contains(outcomes[i], ":") {
			last[p.key()] = "" // not known
		}
		m.kept[p.key()], m.keptBy[p.key()] = last[p.key()], p
	}
}

// forget drops the backends that a change takes from clients: they may get another one, also if it comes back.
func (m *model) forget() {
	for key, p := range m.keptBy {
		if !p.service.affinity || p.from.isOutside() || !slices.Contains(m.predict(p, "").names, m.kept[key]) {
			delete(m.kept, key)
			delete(m.keptBy, key)
		}
	}
}

// count counts outcomes, and the rules without which they would not be as predicted.
func (m *model) count(probes []probe, outcomes []string) {
	for i, p := range probes {
		m.connections++
		switch {
		case strings.Contains(outcomes[i], ":"):
			m.served++
		case outcomes[i] == refused:
			m.refused++
		default:
			m.denied++
		}
		if !m.predict(p, "").agrees(outcomes[i]) {
			continue // a refusal was left out
		}
		for _, r := range rules {
			if !m.predict(p, r).agrees(outcomes[i]) {
				m.refuted[r]++
			}
		}
	}
}

// cover connects by one of the probes until each backend that its client may get has been seen.
func (m *model) cover(when string, probes []probe) {
	m.Helper()
	for _, p := range probes {
		e := m.predict(p, "")
		if p.service.affinity || len(e.names) < 2 {
			continue
		}
		seen := map[string]bool{}
		many := slices.Repeat([]probe{p}, 20)
		for n := 0; n < coverage && len(seen) < len(e.names); n += len(many) {
			outcomes, wrong := m.round(many, inForce, rounds)
			if len(wrong) > 0 {
				m.Errorf("%s: %s", when, wrong[0])
				return
			}
			for _, o := range outcomes {
				if slices.Contains(e.names, o) {
					seen[o] = true
				}
			}
		}
		if len(seen) < len(e.names) {
			m.Errorf("%s: %v: of %v only %v were seen", when, p, e.names, seen)
		}
		return
	}
}

// explain logs what the model knows.
func (m *model) explain() {
	for _, c := range sorted(m.containers) {
		m.Logf("container %v", c)
	}
	for _, is := range sorted(m.services) {
		m.Logf("service %v", is)
	}
	for _, p := range sorted(m.policies) {
		m.Logf("policy %v", p)
	}
	m.Logf("nodes %v, external addresses by %v", m.nodes, m.ingress)
}

// probes chooses probes.
func (m *model) probes(n int) (all []probe) {
	for len(all) < n {
		if p, ok := m.probe(); ok {
			all = append(all, p)
		}
	}
	return all
}

func (m *model) probe() (probe, bool) {
	services, containers := sorted(m.services), sorted(m.containers)
	p := probe{service: services[m.random.IntN(len(services))]}
	p.port = portKeys[m.random.IntN(len(portKeys))]
	is := p.service
	own := is.address
	if !own.IsValid() {
		own = is.deleted
	}
	node := m.one(m.NodeNames()...)
	switch kind := m.random.IntN(10); {
	case kind < 6:
		c := containers[m.random.IntN(len(containers))]
		if c.tenant != is.tenant && m.random.IntN(10) > 0 {
			return p, false
		}
		p.from, p.place, p.at = end{container: c}, c.name, atOwn
		if m.random.IntN(2) == 0 {
			p.cgroup = c.node
		}
	case kind < 8:
		p.from, p.place, p.cgroup = end{node: node, address: m.address[node]}, node, node
		p.at = at(m.one(string(atOwn), string(atExternal), string(atNodePort), string(atLoopback)))
	default:
		p.from, p.place = end{address: m.address[internet]}, internet
		p.at = at(m.one(string(atExternal), string(atNodePort)))
	}
	switch p.at {
	case atOwn:
		p.to = netip.AddrPortFrom(own, p.port.port)
		return p, own.IsValid()
	case atExternal:
		p.node, p.to = m.ingress[is.tenant+"/"+is.name], netip.AddrPortFrom(is.external, p.port.port)
		// Where the address is not exposed, packets of a node leave the cluster.
		return p, p.from.isOutside() || is.exposed
	}
	p.node = node
	p.to = netip.AddrPortFrom(m.address[node], is.ports[p.port].node)
	if p.at == atLoopback {
		p.to = netip.AddrPortFrom(netip.IPv6Loopback(), p.to.Port())
	}
	return p, p.to.Port() != 0
}

// apps are values of the label that selectors of services and policies use.
var apps = []string{"web", "db", "client"}
