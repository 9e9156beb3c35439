package services_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// rule is a rule of the model. A prediction without it must be refuted by what is observed; else the probes would not
// notice that the rule is broken.
type rule string

const (
	byLabels       rule = "the selector selects by labels"
	byReadiness    rule = "containers that are not ready get nothing"
	byTermination  rule = "terminating containers get nothing if others are ready"
	byLastResort   rule = "terminating containers serve if no other is ready"
	byPublishing   rule = "publishNotReady uses containers that are not ready"
	byDistribution rule = "a distribution prefers near containers"
	byLocal        rule = "policy Local stays on the node"
	byNodes        rule = "nodes reach the containers of other nodes only if the tenant allows it"
	byIngress      rule = "policies for ingress"
	byEgress       rule = "policies for egress"
	byPort         rule = "ports in policies"
	byTarget       rule = "the target of a port"
)

var rules = []rule{byLabels, byReadiness, byTermination, byLastResort, byPublishing, byDistribution, byLocal, byNodes,
	byIngress, byEgress, byPort, byTarget}

// state is what the model knows of the cluster.
type state struct {
	containers map[string]*container
	services   map[string]*modelService // by name; the tenant's is in front
	policies   map[string]*modelPolicy  // likewise
	nodes      map[string]string        // by tenant: as of SetNodes
	ingress    map[string]string        // node that the fabric routes a service's external address to
	zones      map[string]string        // by node
	address    map[string]netip.Addr    // of nodes and of the host outside
}

type container struct {
	name, tenant, node, app string
	plaintext               netip.Addr
	notReady, terminating   bool
	end                     []func() // its servers
}

// modelService is a service. One without an address is deleted.
type modelService struct {
	tenant, name     string
	app              string // of its selector; empty: fixed endpoints
	fixed            []fixedEndpoint
	ports            map[portKey]servicePorts
	affinity         bool
	publishNotReady  bool
	distribution     string
	local            bool // traffic policy
	exposed          bool // it has its external address
	external         netip.Addr
	address, deleted netip.Addr
}

func (is *modelService) String() string {
	return fmt.Sprintf("%s/%s at %v (before %v), app %q, fixed %+v, ports %+v, affinity %v, publishes %v, "+
		"distribution %q, exposed at %v %v, local %v", is.tenant, is.name, is.address, is.deleted, is.app, is.fixed,
		is.ports, is.affinity, is.publishNotReady, is.distribution, is.external, is.exposed, is.local)
}

func (c *container) String() string {
	return fmt.Sprintf("%s of %s on %s, app %s, %v, not ready %v, terminating %v", c.name, c.tenant, c.node, c.app,
		c.plaintext, c.notReady, c.terminating)
}

type fixedEndpoint struct {
	container             string
	address               netip.Addr
	host                  string // node that has the address
	notReady, terminating bool
}

func (f fixedEndpoint) String() string {
	return fmt.Sprintf("%s at %v of %s, not ready %v, terminating %v", f.container, f.address, f.host, f.notReady,
		f.terminating)
}

type portKey struct {
	protocol string
	port     uint16
}

type servicePorts struct{ target, node uint16 }

// modelPolicy is a policy. One that selects no app selects all containers.
type modelPolicy struct {
	tenant, name, selects string
	egress                bool
	rules                 []policyRule
}

func (p *modelPolicy) String() string {
	return fmt.Sprintf("%s/%s selects app %q, egress %v, rules %v", p.tenant, p.name, p.selects, p.egress, p.rules)
}

func (r policyRule) String() string {
	return fmt.Sprintf("apps %q, %v, port %v", r.pods, r.blocks, r.port)
}

// policyRule allows all of its peers, at one port or at all.
type policyRule struct {
	pods   []string // apps; empty text: all
	blocks []netip.Addr
	port   portKey
}

// end is an end of a connection: a container, or an address without labels.
type end struct {
	*container
	node    string // of a client on it
	address netip.Addr
}

// expected is what may come of an attempt.
type expected struct {
	names   []string // of servers, sorted
	denied  bool     // a policy denies one of the backends: silence
	gone    bool     // one of the backends is a fixed endpoint, and is no more
	refused bool
	nothing bool // no server, for whatever reason
	rarely  bool // the refusal may be left out
}

// predict returns what may come of a probe. without is a rule that it leaves out.
func (s *state) predict(p probe, without rule) expected {
	is := p.service
	port, has := is.ports[p.port]
	switch {
	case p.from.container != nil && p.from.container.tenant != is.tenant:
		return expected{nothing: true}
	case !is.address.IsValid() || !has:
		// Other ports of an external address are not those of services for processes of nodes: their packets leave.
		external := p.at == atExternal && is.address.IsValid() && is.exposed && p.from.isOutside()
		refuses := p.at == atOwn || external
		return expected{refused: refuses, nothing: !refuses}
	case p.at == atExternal && !is.exposed, p.at == atNodePort && port.node == 0:
		return expected{nothing: true}
	}
	node := p.from.node
	if p.from.container != nil {
		node = p.from.container.node
	}
	if p.from.isOutside() {
		node = p.node
	}
	var e expected
	var reached bool
	target := port.target
	if without == byTarget {
		target = p.port.port
	}
	for _, to := range s.active(is, node, p.at != atOwn, without) {
		b := s.containers[to.container]
		if !s.nodeReaches(p.from, b.tenant, to.host) && without != byNodes {
			continue
		}
		reached = true
		if to.address != b.plaintext {
			e.gone = true
		} else if s.allows(p.from, b, portKey{p.port.protocol, target}, without) {
			e.names = append(e.names, serverName(b.name, target))
		} else {
			e.denied = true
		}
	}
	slices.Sort(e.names)
	e.refused = !reached
	return e
}

// placed is an endpoint and its node, if it has one.
type placed struct {
	fixedEndpoint
	node string
}

// active returns the endpoints that get new connections of clients on a node, or, for an exposed port, of those that
// come in by it.
func (s *state) active(is *modelService, node string, exposed bool, without rule) []placed {
	var all []placed
	if is.app == "" {
		for _, f := range is.fixed {
			all = append(all, placed{f, ""})
		}
	} else {
		for _, c := range s.containers {
			if c.tenant == is.tenant && (c.app == is.app || without == byLabels) {
				all = append(all, placed{fixedEndpoint{c.name, c.plaintext, c.node, c.notReady, c.terminating}, c.node})
			}
		}
	}
	if exposed && is.local && without != byLocal {
		all = slices.DeleteFunc(all, func(p placed) bool { return p.node != node })
	}
	publishes := is.publishNotReady && without != byPublishing || without == byReadiness
	all = slices.DeleteFunc(all, func(p placed) bool { return p.notReady && !publishes })
	ends := func(p placed) bool { return p.terminating }
	stays := slices.ContainsFunc(all, func(p placed) bool { return !ends(p) })
	if stays && without != byTermination || !stays && without == byLastResort {
		all = slices.DeleteFunc(all, ends)
	}
	near := func(p placed) bool {
		return is.distribution == "PreferSameNode" && p.node == node ||
			is.distribution == "PreferSameZone" && s.zones[p.node] == s.zones[node]
	}
	if !exposed && without != byDistribution && slices.ContainsFunc(all, near) {
		all = slices.DeleteFunc(all, func(p placed) bool { return !near(p) })
	}
	return all
}

// isOutside reports whether an end is a host outside.
func (e end) isOutside() bool { return e.container == nil && e.node == "" }

// nodeReaches reports whether a node may open connections to containers of a tenant on a node, if the client is a
// process of a node.
func (s *state) nodeReaches(from end, tenant, node string) bool {
	if from.container != nil || from.isOutside() || from.node == node {
		return true
	}
	allowed := s.nodes[tenant]
	prefix, err := netip.ParsePrefix(allowed)
	return allowed == "allow" || err == nil && prefix.Contains(from.address)
}

// allows reports whether the policies allow a connection. None applies between a node and its own containers, or
// between a container and itself.
func (s *state) allows(from end, to *container, port portKey, without rule) bool {
	if from.container == to || from.container == nil && from.node == to.node {
		return true
	}
	if from.container != nil && without != byEgress && !s.policyAllows(from.container, true, end{container: to}, port,
		without) {
		return false
	}
	return without == byIngress || s.policyAllows(to, false, from, port, without)
}

func (s *state) policyAllows(of *container, egress bool, peer end, port portKey, without rule) bool {
	isolated := false
	for _, p := range s.policies {
		if p.tenant != of.tenant || p.egress != egress || p.selects != "" && p.selects != of.app {
			continue
		}
		isolated = true
		for _, r := range p.rules {
			if (r.port == portKey{} || r.port == port || without == byPort) && r.allows(of.tenant, peer) {
				return true
			}
		}
	}
	return !isolated
}

func (r policyRule) allows(tenant string, peer end) bool {
	if peer.container == nil {
		return slices.Contains(r.blocks, peer.address)
	}
	return peer.container.tenant == tenant &&
		(slices.Contains(r.pods, "") || slices.Contains(r.pods, peer.container.app))
}

// at is which of a service's addresses a probe uses.
type at string

const (
	atOwn      at = "its address"
	atExternal at = "its external address"
	atNodePort at = "a node port"
	atLoopback at = "a node port of ::1" // only by processes of nodes
)

// probe is a new connection from somewhere to a service.
type probe struct {
	from    end
	place   string // of its namespace
	cgroup  string // empty: none
	service *modelService
	at      at
	port    portKey
	node    string // that a packet from outside comes in by
	to      netip.AddrPort
}

// byCall reports whether a refusal is the result of the call that connects, and not a packet of the data path.
func (p probe) byCall() bool {
	_, has := p.service.ports[p.port]
	return p.cgroup != "" && (p.from.container == nil || p.port.protocol == "TCP" && has)
}

func (p probe) String() string {
	how := p.cgroup
	if how == "" {
		how = "no cgroup"
	}
	return fmt.Sprintf("%s (%s) to %s/%s, %s, port %d/%s, %v", p.place, how, p.service.tenant, p.service.name, p.at,
		p.port.port, p.port.protocol, p.to)
}

// agrees reports whether an outcome is as expected.
func (e expected) agrees(outcome string) bool {
	switch {
	case e.nothing:
		return !strings.Contains(outcome, ":")
	case e.refused:
		return outcome == refused || e.rarely && outcome == silent
	}
	return slices.Contains(e.names, outcome) || e.denied && (outcome == silent || outcome == denied) ||
		e.gone && !strings.Contains(outcome, ":")
}

// must reports whether there is always an answer or an error.
func (e expected) must() bool { return !e.nothing && !e.denied && !e.gone && !(e.refused && e.rarely) }

func (e expected) String() string {
	switch {
	case e.nothing:
		return "no server"
	case e.refused:
		return refused
	case e.denied, e.gone:
		return fmt.Sprintf("%v or denied (%v) or gone (%v)", e.names, e.denied, e.gone)
	}
	return fmt.Sprint(e.names)
}

// sorted are the values of a map in the order of their keys, so that a seed repeats the choices.
func sorted[V any](m map[string]V) (all []V) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		all = append(all, m[k])
	}
	return all
}
