package egress_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/tenant"
)

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

// change is a change of the cluster, which the model predicts as if it was in force.
type change struct {
	kind, what    string
	adds, removes string // containers
	make          func(context.Context) error
}

// choose chooses a change.
func (m *model) choose() change {
	name := m.one("blue", "glass")
	switch kind := m.random.IntN(100); {
	case kind < 40:
		return m.setRule(name)
	case kind < 58:
		return m.deleteRule(name)
	case kind < 68:
		return m.switchPolicy(name)
	case kind < 77:
		return m.setNodes(name)
	case kind < 86:
		return m.addContainer(name)
	case kind < 94:
		return m.removeContainer(name)
	case kind < 98:
		return m.switchGateway(m.one("n3", "n4"))
	}
	node := m.one(m.NodeNames()...)
	return change{kind: "agents", what: "kill the agent of " + node, make: func(ctx context.Context) error {
		_, err := m.Kill(ctx, lab.AgentProcess(node))
		return err
	}}
}

func (m *model) one(of ...string) string { return of[m.random.IntN(len(of))] }

// gateways are the nodes that rules name: one with containers, and two without, whose tunnels may end.
var gateways = []string{"n1", "n3", "n4"}

func (m *model) setRule(name string) change {
	rule := lab.EgressRule{To: destinations[m.random.IntN(len(destinations))], Action: lab.AllowEgress}
	switch m.random.IntN(4) {
	case 0:
		rule.Action = lab.DenyEgress
	case 1:
		rule.Via = []string{m.one(gateways...)}
	case 2:
		without := m.one(gateways...)
		rule.Via = slices.DeleteFunc(slices.Clone(gateways), func(node string) bool { return node == without })
	}
	m.rules[name][rule.To] = rule
	return change{kind: "rules", what: fmt.Sprintf("rule of %s to %v: %s %v", name, rule.To, rule.Action, rule.Via),
		make: func(ctx context.Context) error { return m.SetEgress(ctx, name, rule) }}
}

func (m *model) deleteRule(name string) change {
	to := destinations[m.random.IntN(len(destinations))]
	if _, has := m.rules[name][to]; !has {
		return m.setRule(name)
	}
	delete(m.rules[name], to)
	return change{kind: "rules", what: fmt.Sprintf("delete the rule of %s to %v", name, to),
		make: func(ctx context.Context) error { return m.DeleteEgress(ctx, name, to) }}
}

func (m *model) switchPolicy(name string) change {
	policy := m.one("in", "out")
	applies, documents := !m.policies[name][policy], []string{modelPolicies[policy]}
	m.policies[name][policy] = applies
	return change{kind: "policies", what: fmt.Sprintf("policy %s of %s: %v", policy, name, applies),
		make: func(ctx context.Context) (err error) {
			if applies {
				_, err = m.Operator().ApplyPolicies(ctx, connect.NewRequest(
					&pilasterv1.ApplyPoliciesRequest{Tenant: name, Documents: documents}))
			} else {
				_, err = m.Operator().DeletePolicies(ctx, connect.NewRequest(
					&pilasterv1.DeletePoliciesRequest{Tenant: name, Documents: documents}))
			}
			return err
		}}
}

func (m *model) setNodes(name string) change {
	prefix, err := m.Prefix(m.one("n1", "n2", "n3"))
	must(m.T, err)
	nodes := m.one("allow", "deny", prefix.String())
	m.nodes[name] = nodes
	return change{kind: "nodes", what: fmt.Sprintf("nodes of %s: %s", name, nodes),
		make: func(ctx context.Context) error { return m.SetNodes(ctx, name, nodes) }}
}

// switchGateway has the router drop what is for the tunnel of a gateway, or not any more.
func (m *model) switchGateway(node string) change {
	prefix, err := m.Prefix(node)
	must(m.T, err)
	dies, tunnel := !m.dead[node], tenant.EgressTunnel(prefix)
	m.dead[node] = dies
	return change{kind: "tunnels", what: fmt.Sprintf("dead gateway %s: %v", node, dies),
		make: func(context.Context) error { return m.drop(netip.PrefixFrom(tunnel, 128), dies) }}
}

// Containers that are added have names of their own. So the others stay.
const (
	addedPrefix = "c"
	mostAdded   = 3
)

func (m *model) extra() (all []string) {
	for _, c := range m.present {
		if strings.HasPrefix(c.Name, addedPrefix) {
			all = append(all, c.Name)
		}
	}
	return all
}

func (m *model) addContainer(name string) change {
	if len(m.extra()) >= mostAdded {
		return m.removeContainer(name)
	}
	m.added++
	c := lab.Container{Name: fmt.Sprint(addedPrefix, m.added), Node: m.one("n1", "n2"), Tenant: name,
		Labels: map[string]string{"app": m.one("web", "db")}}
	return change{kind: "containers", adds: c.Name, what: fmt.Sprintf("add %s of %s on %s", c.Name, name, c.Node),
		make: func(ctx context.Context) error { return m.AddContainer(ctx, c) }}
}

func (m *model) removeContainer(name string) change {
	all := m.extra()
	if len(all) == 0 {
		return m.addContainer(name)
	}
	gone := m.one(all...)
	return change{kind: "containers", removes: gone, what: "remove " + gone,
		make: func(ctx context.Context) error { return m.RemoveContainer(ctx, gone) }}
}
