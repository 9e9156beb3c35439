package egress_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
)

// changesInCI is the number of changes without PILASTER_EGRESS_CHANGES.
const changesInCI = 60

// TestModel makes random changes of egress rules, gateways, policies, containers and the settings for nodes. Before and
// after each change, containers, processes of nodes and hosts outside send to each other, and a model predicts which
// packets are answered, and as whom the sender is seen. PILASTER_EGRESS_CHANGES is the number of changes;
// PILASTER_EGRESS_SEED repeats the choices of a run.
func TestModel(t *testing.T) {
	s := spec()
	s.Nodes = []string{"n1", "n2", "n3", "n4"}
	m := &model{
		bed: newBed(t, s), rules: map[string]map[netip.Prefix]lab.EgressRule{}, policies: map[string]map[string]bool{},
		nodes: map[string]string{}, aliases: map[string]netip.Addr{}, ends: map[string]func(){},
		seed: number(t, "PILASTER_EGRESS_SEED", rand.Uint64()),
	}
	m.random = rand.New(rand.NewPCG(m.seed, 0))
	t.Logf("PILASTER_EGRESS_SEED=%d", m.seed)
	for name := range tenants {
		m.rules[name], m.policies[name] = map[netip.Prefix]lab.EgressRule{}, map[string]bool{}
	}
	done := map[string]int{}
	for i := range number(t, "PILASTER_EGRESS_CHANGES", changesInCI) {
		ctx, cancel := context.WithTimeout(t.Context(), labtest.Patience)
		if wrong := m.disagreements(); len(wrong) > 0 {
			t.Errorf("before change %d: %s", i+1, strings.Join(wrong, "; "))
		}
		what := m.change(ctx)
		done[strings.Fields(what)[0]]++
		t.Logf("change %d: %s", i+1, what)
		m.converge(fmt.Sprintf("change %d, %s", i+1, what))
		cancel()
		if t.Failed() {
			t.Fatalf("seed %d: the rest of the changes is left out", m.seed)
		}
	}
	t.Logf("changes: %v; answered as predicted: %d, not answered as predicted: %d", done, m.answered, m.unanswered)
	if m.answered == 0 || m.unanswered == 0 {
		t.Error("the probes were all answered, or none")
	}
}

func number(t *testing.T, variable string, usual uint64) uint64 {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return usual
	}
	n, err := strconv.ParseUint(text, 10, 64)
	must(t, err)
	return n
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
	ends     map[string]func()                          // of the servers of containers that were added
	added    int

	answered, unanswered int
}

// destinations of rules: the widest, one in between, and the hosts.
var destinations = []netip.Prefix{
	everywhere, netip.MustParsePrefix("2001:db8:f00d::/48"), netip.MustParsePrefix("2001:db8:f00d::/64"),
	netip.MustParsePrefix("2001:db8:f00d::2/128"), netip.MustParsePrefix("2001:db8:f00d:1::2/128"),
}

// policies by name: one lets databases send to one host outside only; the other lets web servers receive only from
// containers of their tenant, and so not from nodes other than their own.
var modelPolicies = map[string]string{
	"out": `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "out"},
		"spec": {"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Egress"],
			"egress": [{"to": [{"ipBlock": {"cidr": "2001:db8:f00d::2/128"}}]}]}}`,
	"in": `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "in"},
		"spec": {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
			"ingress": [{"from": [{"podSelector": {}}]}]}}`,
}

// selects reports whether a policy in force selects a container.
func (m *model) selects(policy string, c lab.ContainerStatus) bool {
	app := map[string]string{"out": "db", "in": "web"}[policy]
	return m.policies[c.Tenant][policy] && c.Labels["app"] == app
}

// change makes one random change and says which.
func (m *model) change(ctx context.Context) string {
	name := []string{"blue", "glass"}[m.random.IntN(2)]
	switch kind := m.random.IntN(10); {
	case kind < 4:
		return m.setRule(ctx, name)
	case kind < 6:
		to := destinations[m.random.IntN(len(destinations))]
		if _, has := m.rules[name][to]; !has {
			return m.setRule(ctx, name)
		}
		must(m.T, m.DeleteEgress(ctx, name, to))
		delete(m.rules[name], to)
		return fmt.Sprintf("delete the rule of %s to %v", name, to)
	case kind < 7:
		policy := []string{"in", "out"}[m.random.IntN(2)]
		if m.policies[name][policy] = !m.policies[name][policy]; m.policies[name][policy] {
			m.apply(ctx, name, modelPolicies[policy])
		} else {
			m.unapply(ctx, name, modelPolicies[policy])
		}
		return fmt.Sprintf("policy %s of %s: %v", policy, name, m.policies[name][policy])
	case kind < 8:
		prefix, err := m.Prefix([]string{"n1", "n2", "n3"}[m.random.IntN(3)])
		must(m.T, err)
		m.nodes[name] = []string{"allow", "deny", prefix.String()}[m.random.IntN(3)]
		must(m.T, m.SetNodes(ctx, name, m.nodes[name]))
		return fmt.Sprintf("nodes of %s: %s", name, m.nodes[name])
	}
	if m.random.IntN(2) == 0 && len(m.ends) > 0 {
		gone := slices.Sorted(maps.Keys(m.ends))[m.random.IntN(len(m.ends))]
		m.ends[gone]()
		delete(m.ends, gone)
		must(m.T, m.RemoveContainer(ctx, gone))
		return "remove " + gone
	}
	if len(m.ends) >= 3 {
		return m.setRule(ctx, name)
	}
	m.added++
	c := lab.Container{Name: fmt.Sprint("c", m.added), Node: []string{"n1", "n2"}[m.random.IntN(2)], Tenant: name,
		Labels: map[string]string{"app": []string{"web", "db"}[m.random.IntN(2)]}}
	must(m.T, m.AddContainer(ctx, c))
	m.ends[c.Name] = m.serve(c.Name)
	return fmt.Sprintf("add %s of %s on %s", c.Name, name, c.Node)
}

func (m *model) setRule(ctx context.Context, name string) string {
	rule := lab.EgressRule{To: destinations[m.random.IntN(len(destinations))], Action: lab.AllowEgress}
	switch m.random.IntN(4) {
	case 0:
		rule.Action = lab.DenyEgress
	case 1:
		rule.Via = []string{[]string{"n3", "n4"}[m.random.IntN(2)]}
	case 2:
		rule.Via = []string{"n3", "n4"}
	}
	must(m.T, m.SetEgress(ctx, name, rule))
	m.rules[name][rule.To] = rule
	return fmt.Sprintf("rule of %s to %v: %s %v", name, rule.To, rule.Action, rule.Via)
}

// probe is a datagram, and what the model predicts: an answer from a receiver that sees the sender as an address of
// one of the nodes' egress addresses, as a given address, or as any; or no answer.
type probe struct {
	from     string
	source   netip.Addr
	to       netip.Addr
	what     string
	reaches  bool
	egressOf []string
	seenAs   netip.Addr
	alias    string // key of model.aliases for what the receiver sees
}

// probes are all datagrams.
func (m *model) probes() (all []probe) {
	for _, c := range m.Containers() {
		for _, host := range m.OutsideNames() {
			all = append(all, m.outward(c, host), probe{from: host, to: c.Plaintext, what: host + " to " + c.Name})
		}
		for _, node := range m.NodeNames() {
			all = append(all, m.fromNode(c, node)...)
		}
	}
	return all
}

// outward is a datagram of a container to a host outside.
func (m *model) outward(c lab.ContainerStatus, host string) probe {
	p := probe{from: c.Name, to: m.address(host), what: c.Name + " to " + host}
	var best lab.EgressRule
	for to, rule := range m.rules[c.Tenant] {
		if to.Contains(p.to) && (!best.To.IsValid() || to.Bits() > best.To.Bits()) {
			best = rule
		}
	}
	p.reaches = best.Action == lab.AllowEgress && !(m.selects("out", c) && host != "internet")
	p.egressOf = best.Via
	if len(best.Via) == 0 {
		p.egressOf = []string{c.Node}
	}
	return p
}

// fromNode are the datagrams between a node's process and a container.
func (m *model) fromNode(c lab.ContainerStatus, node string) []probe {
	if node == c.Node {
		return []probe{{from: node, to: c.Address, what: node + " to its own " + c.Name, reaches: true}}
	}
	address, key := m.node(node), node+" "+c.Tenant
	allowed := m.nodes[c.Tenant] == "allow"
	if prefix, err := netip.ParsePrefix(m.nodes[c.Tenant]); err == nil {
		allowed = prefix.Contains(address)
	}
	all := []probe{{from: node, source: address, to: c.Plaintext, what: node + " to " + c.Name,
		reaches: allowed && !m.selects("in", c), seenAs: m.aliases[key], alias: key}}
	if alias := m.aliases[key]; alias.IsValid() {
		all = append(all, probe{from: c.Name, to: alias, what: c.Name + " to " + node,
			reaches: allowed && !m.selects("out", c), seenAs: c.Plaintext})
	}
	return all
}

// Timeouts of a probe: predicted to be answered, and not.
const (
	answerTime  = 3 * time.Second
	silenceTime = 150 * time.Millisecond
)

// disagreements sends all probes at once.
func (m *model) disagreements() (wrong []string) {
	m.Helper()
	var mu sync.Mutex
	var sending sync.WaitGroup
	for _, p := range m.probes() {
		sending.Go(func() {
			within := silenceTime
			if p.reaches {
				within = answerTime
			}
			seen, err := m.datagrams(p.from, p.source, p.to, within, within) // one, so that none may be lost
			mu.Lock()
			defer mu.Unlock()
			switch {
			case (err == nil) != p.reaches:
				wrong = append(wrong, fmt.Sprintf("%s, %v: %s, want reached: %v", p.what, p.to, outcomeOf(err),
					p.reaches))
				return
			case err != nil:
				m.unanswered++
				return
			}
			m.answered++
			if p.seenAs.IsValid() && seen != p.seenAs {
				wrong = append(wrong, fmt.Sprintf("%s is seen as %v, want %v", p.what, seen, p.seenAs))
			}
			if p.egressOf != nil && !m.isEgressOf(seen, p.egressOf) {
				wrong = append(wrong, fmt.Sprintf("%s is seen as %v, want an egress address of %v", p.what, seen,
					p.egressOf))
			}
			if p.alias != "" {
				m.aliases[p.alias] = seen
			}
		})
	}
	sending.Wait()
	return wrong
}

func (m *model) isEgressOf(seen netip.Addr, nodes []string) bool {
	return tenant.IsEgressAddress(seen) && slices.ContainsFunc(nodes, func(node string) bool {
		prefix, err := m.Prefix(node)
		return err == nil && prefix.Contains(seen)
	})
}

// converge waits until the cluster does what the model predicts.
func (m *model) converge(after string) {
	m.Helper()
	var wrong []string
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if wrong = m.disagreements(); len(wrong) == 0 {
			return
		}
	}
	m.Errorf("after %s: %s", after, strings.Join(wrong, "; "))
}
