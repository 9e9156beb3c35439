package egress_test

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/tenant"
)

// probe is a datagram, and what the model predicts: an answer from a receiver that sees the sender as an address of
// one of the nodes' egress addresses, as a given address, or as any; or no answer.
type probe struct {
	from     string
	source   netip.Addr
	to       netip.Addr
	what     string
	reaches  bool
	via      []string // gateways of the rule, dead or alive
	egressOf []string
	seenAs   netip.Addr
	alias    string // key of model.aliases for what the receiver sees
	policed  bool   // with another node: a policy selects the container
}

// probes are all datagrams.
func (m *model) probes() (all []probe) {
	for _, c := range m.present {
		for _, host := range m.OutsideNames() {
			all = append(all, m.outward(c, host), probe{from: host, to: c.Plaintext, what: host + " to " + c.Name})
		}
		for _, node := range m.NodeNames() {
			all = append(all, m.fromNode(c, node)...)
		}
	}
	for _, host := range m.OutsideNames() {
		for seen, as := range m.seen {
			all = append(all, probe{from: host, to: seen, what: fmt.Sprintf("%s to %s", host, as)})
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
	p.via, p.egressOf = best.Via, []string{c.Node}
	if len(best.Via) > 0 {
		p.egressOf = slices.DeleteFunc(slices.Clone(best.Via), func(node string) bool { return m.dead[node] })
		p.reaches = p.reaches && len(p.egressOf) > 0
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
	policed := m.selects("in", c) || m.selects("out", c)
	all := []probe{{from: node, source: address, to: c.Plaintext, what: node + " to " + c.Name, policed: policed,
		reaches: allowed && !m.selects("in", c), seenAs: m.aliases[key], alias: key}}
	if alias := m.aliases[key]; alias.IsValid() {
		all = append(all, probe{from: c.Name, to: alias, what: c.Name + " to " + node, policed: policed,
			reaches: allowed && !m.selects("out", c), seenAs: c.Plaintext})
	}
	return all
}

// isEgressOf reports whether an address is an egress address of one of the nodes, of one container or of a gateway.
func (m *model) isEgressOf(seen netip.Addr, nodes []string, gateway bool) bool {
	return tenant.IsEgressAddress(seen) && gateway == (address.Split(seen).Index < tenant.FirstEgressIndex) &&
		slices.ContainsFunc(nodes, func(node string) bool {
			prefix, err := m.Prefix(node)
			return err == nil && prefix.Contains(seen)
		})
}
