package services_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
)

const (
	servicesOfTenant = 3
	policiesOfTenant = 2
)

// portKeys are ports that a service may have, and targets are ports at which each container serves.
var (
	portKeys = []portKey{{"TCP", 80}, {"TCP", 81}, {"UDP", 80}, {"UDP", 53}}
	targets  = []uint16{backendPort, backendPort + 1, 80}
)

// change makes a random change and returns what it is.
func (m *model) change() string {
	m.Helper()
	services, containers := sorted(m.services), sorted(m.containers)
	is, c := services[m.random.IntN(len(services))], containers[m.random.IntN(len(containers))]
	switch kind := m.random.IntN(100); {
	case kind < 30:
		return m.applyService(is)
	case kind < 36:
		return m.deleteService(is)
	case kind < 54:
		return m.setEndpoint(c)
	case kind < 66:
		return m.label(c)
	case kind < 68:
		return m.replace(c)
	case kind < 82:
		return m.applyPolicy(m.one("blue", "glass"))
	case kind < 92:
		return m.deletePolicy(m.one("blue", "glass"))
	case kind < 96:
		return m.setNodes(m.one("blue", "glass"))
	}
	node := m.one(m.NodeNames()...)
	m.routeTo(is, node)
	return fmt.Sprintf("the fabric routes %v to %s", is.external, node)
}

func (m *model) coin() bool { return m.random.IntN(2) == 0 }

// applyService creates a service, or changes it: everything about it is chosen again, but often its endpoints stay.
func (m *model) applyService(is *modelService) string {
	m.Helper()
	was := is.address
	if !was.IsValid() || m.random.IntN(3) == 0 {
		is.app, is.fixed = m.one("", "web", "web", "db", "client"), nil
		if is.app == "" {
			m.chooseFixed(is)
		}
	}
	is.affinity, is.publishNotReady = m.random.IntN(4) == 0, m.random.IntN(3) == 0
	is.distribution = m.one("", "", "PreferSameNode", "PreferSameZone")
	is.exposed = m.coin()
	nodePorts := m.coin()
	is.local = (is.exposed || nodePorts) && m.coin()
	s := &pilasterv1.Service{Tenant: is.tenant, Name: is.name, PublishNotReady: is.publishNotReady,
		Distribution: is.distribution, NodePorts: nodePorts}
	if is.app != "" {
		s.Selector = map[string]string{"app": is.app}
	}
	if is.affinity {
		s.AffinitySeconds = 3600
	}
	if is.local {
		s.TrafficPolicy = "Local"
	}
	if is.exposed {
		s.ExternalIps = []string{is.external.String()}
	}
	keep := portKeys[m.random.IntN(len(portKeys))]
	for _, k := range portKeys {
		if k == keep || m.random.IntN(4) > 0 {
			s.Ports = append(s.Ports, &pilasterv1.ServicePort{Name: fmt.Sprintf("p%d-%c", k.port, k.protocol[0]|0x20),
				Protocol: k.protocol, Port: uint32(k.port), Target: uint32(targets[m.random.IntN(2)])})
		}
	}
	slice := &pilasterv1.EndpointSlice{Tenant: is.tenant, Service: is.name, Name: "fixed"}
	for _, f := range is.fixed {
		slice.Endpoints = append(slice.Endpoints, &pilasterv1.ServiceEndpoint{
			Address: f.address.String(), NotReady: f.notReady, Terminating: f.terminating,
		})
	}
	applied, err := m.Operator().ApplyServices(m.Context(), connect.NewRequest(&pilasterv1.ApplyServicesRequest{
		Tenant: is.tenant, Services: []*pilasterv1.Service{s}, Slices: []*pilasterv1.EndpointSlice{slice},
	}))
	must(m.T, err)
	made := applied.Msg.Services[0].Service
	is.address, err = netip.ParseAddr(made.Address)
	must(m.T, err)
	if was.IsValid() && was != is.address {
		m.Errorf("%s/%s had address %v, and has %v now", is.tenant, is.name, was, is.address)
	}
	is.ports = map[portKey]servicePorts{}
	for _, p := range made.Ports {
		is.ports[portKey{p.Protocol, uint16(p.Port)}] = servicePorts{uint16(p.Target), uint16(p.NodePort)}
	}
	return fmt.Sprintf("%s %v", applied.Msg.Services[0].Action, is)
}

func (m *model) chooseFixed(is *modelService) {
	for _, c := range sorted(m.containers) {
		if c.tenant == is.tenant && m.coin() {
			notReady, terminating := m.random.IntN(4) == 0, m.random.IntN(4) == 0
			is.fixed = append(is.fixed, fixedEndpoint{c.name, c.plaintext, c.node, notReady, terminating})
		}
	}
}

func (m *model) deleteService(is *modelService) string {
	m.Helper()
	if !is.address.IsValid() {
		return m.applyService(is)
	}
	_, err := m.Operator().DeleteService(m.Context(), connect.NewRequest(&pilasterv1.DeleteServiceRequest{
		Tenant: is.tenant, Name: is.name,
	}))
	must(m.T, err)
	is.deleted, is.address, is.ports, is.exposed = is.address, netip.Addr{}, nil, false
	return fmt.Sprintf("delete %s/%s", is.tenant, is.name)
}

// setEndpoint sets whether a container is ready, and whether it is terminating.
func (m *model) setEndpoint(c *container) string {
	m.Helper()
	c.notReady, c.terminating = m.random.IntN(4) == 0, m.random.IntN(4) == 0
	ready := !c.notReady
	_, err := m.Agent(c.node).SetEndpoint(m.Context(), connect.NewRequest(&pilasterv1.SetEndpointRequest{
		Key: m.ContainerID(c.name), Ready: &ready, Terminating: &c.terminating,
	}))
	must(m.T, err)
	return fmt.Sprintf("%s: ready %v, terminating %v", c.name, ready, c.terminating)
}

func (m *model) label(c *container) string {
	m.Helper()
	c.app = m.one(apps...)
	_, err := m.Agent(c.node).LabelEndpoint(m.Context(), connect.NewRequest(&pilasterv1.LabelEndpointRequest{
		Key: m.ContainerID(c.name), Set: map[string]string{"app": c.app},
	}))
	must(m.T, err)
	return fmt.Sprintf("%s: app %s", c.name, c.app)
}

// replace removes a container and adds another one in its place, with another address; also on another node, if its
// tenant has a container left there. All nodes host all tenants, except meanwhile.
func (m *model) replace(c *container) string {
	m.Helper()
	m.places.leave(c.name)
	for _, end := range c.end {
		end()
	}
	must(m.T, m.RemoveContainer(m.Context(), c.name))
	for _, other := range m.containers {
		if other != c && other.tenant == c.tenant && other.node == c.node {
			c.node = m.one(m.NodeNames()...)
			break
		}
	}
	c.app, c.notReady, c.terminating = m.one(apps...), false, false
	must(m.T, m.AddContainer(m.Context(), lab.Container{Name: c.name, Node: c.node, Tenant: c.tenant,
		Labels: map[string]string{"app": c.app}}))
	m.enter(c)
	m.places.enter(c.name)
	for key, backend := range m.kept {
		if key.place == c.name || strings.HasPrefix(backend, c.name+":") {
			delete(m.kept, key)
		}
	}
	return fmt.Sprintf("new container %v", c)
}

// enter notes the address of a container, and runs its servers.
func (m *model) enter(c *container) {
	m.Helper()
	is, err := m.Container(c.name)
	must(m.T, err)
	c.plaintext, c.end = is.Plaintext, nil
	for _, port := range targets {
		c.end = append(c.end, m.serveAt(c.name, port))
	}
}

func (m *model) setNodes(tenant string) string {
	m.Helper()
	prefix, err := m.Prefix(m.one(m.NodeNames()...))
	must(m.T, err)
	m.nodes[tenant] = m.one("allow", "deny", prefix.String())
	must(m.T, m.SetNodes(m.Context(), tenant, m.nodes[tenant]))
	return fmt.Sprintf("nodes of %s: %s", tenant, m.nodes[tenant])
}

// routeTo makes the fabric send packets for the external address of a service to a node.
func (m *model) routeTo(is *modelService, node string) {
	m.Helper()
	must(m.T, m.Route(is.external, node))
	m.ingress[is.tenant+"/"+is.name] = node
}

func (m *model) applyPolicy(tenant string) string {
	m.Helper()
	p := &modelPolicy{tenant: tenant, name: fmt.Sprint("p", m.random.IntN(policiesOfTenant)+1),
		selects: m.one(append(apps, "")...), egress: m.random.IntN(3) == 0}
	for range m.random.IntN(3) {
		var r policyRule
		for _, app := range append(apps, "") {
			if m.random.IntN(3) == 0 {
				r.pods = append(r.pods, app)
			}
		}
		for _, block := range sorted(m.address) {
			if m.random.IntN(3) == 0 {
				r.blocks = append(r.blocks, block)
			}
		}
		if len(r.pods)+len(r.blocks) == 0 {
			r.pods = []string{""} // a rule without peers would allow all
		}
		if m.random.IntN(3) == 0 {
			r.port = portKey{m.one("TCP", "UDP"), targets[m.random.IntN(2)]}
		}
		p.rules = append(p.rules, r)
	}
	m.policies[tenant+"/"+p.name] = p
	_, err := m.Operator().ApplyPolicies(m.Context(), connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{
		Tenant: tenant, Documents: []string{p.document()},
	}))
	must(m.T, err)
	return fmt.Sprintf("policy %v", p)
}

func (m *model) deletePolicy(tenant string) string {
	m.Helper()
	all := slices.DeleteFunc(sorted(m.policies), func(p *modelPolicy) bool { return p.tenant != tenant })
	if len(all) == 0 {
		return m.applyPolicy(tenant)
	}
	p := all[m.random.IntN(len(all))]
	_, err := m.Operator().DeletePolicies(m.Context(), connect.NewRequest(&pilasterv1.DeletePoliciesRequest{
		Tenant: tenant, Documents: []string{p.document()},
	}))
	must(m.T, err)
	delete(m.policies, tenant+"/"+p.name)
	return fmt.Sprintf("delete policy %s/%s", tenant, p.name)
}

// document is the policy as a document of Kubernetes.
func (p *modelPolicy) document() string {
	type object = map[string]any
	selector := func(app string) object {
		if app == "" {
			return object{}
		}
		return object{"matchLabels": object{"app": app}}
	}
	direction, peers, list := "Ingress", "from", "ingress"
	if p.egress {
		direction, peers, list = "Egress", "to", "egress"
	}
	all := []object{}
	for _, r := range p.rules {
		var of []object
		for _, app := range r.pods {
			of = append(of, object{"podSelector": selector(app)})
		}
		for _, block := range r.blocks {
			of = append(of, object{"ipBlock": object{"cidr": netip.PrefixFrom(block, 128).String()}})
		}
		rule := object{peers: of}
		if r.port != (portKey{}) {
			rule["ports"] = []object{{"protocol": r.port.protocol, "port": r.port.port}}
		}
		all = append(all, rule)
	}
	text, err := json.Marshal(object{
		"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": object{"name": p.name},
		"spec": object{"podSelector": selector(p.selects), "policyTypes": []string{direction}, list: all},
	})
	if err != nil {
		panic(err) // there are only texts and numbers
	}
	return string(text)
}
