package services

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// A host port is an exposed frontend at addresses of this node whose only backend is a container of it. It is written
// and deleted within ADD and DEL; Run repeats what has failed, and follows the addresses of the node. A container keeps
// its host port as long as it lives: a service that gets the same node port is not exposed by it on this node.

// publisher is a container with host ports.
type publisher struct {
	record    endpoint.Record
	published bool // the container is reachable: its frontends are written
	leaving   bool // it gives its host ports free as soon as its frontends are deleted
	// what the packet path has, as far as known; the zero Frontend: perhaps something
	written map[dpapi.FrontendKey]dpapi.Frontend
	err     error // why some are not in the packet path; nil if all are
}

func (p *publisher) owner() owner { return owner{tenant: p.record.Tenant, endpoint: p.record.ID} }

// name is what operators call a container.
func (p *publisher) name() string {
	return fmt.Sprintf("container %s (endpoint %d)", cmp.Or(p.record.Pod, p.record.ContainerID), p.record.ID)
}

// owner is who has an exposed frontend: services of a tenant or, with an endpoint, the host port of a container.
type owner struct {
	tenant   string
	endpoint endpoint.ID
}

// publishers are the containers of this node with host ports. If two have the same, the first one has the frontend.
type publishers struct {
	all      []*publisher
	by       map[portNumber][]*publisher
	changed  bool // frontends may have to be written
	failures int  // of consecutive writes
	retryAt  time.Time
}

// portNumber is a port of the node at any address.
type portNumber struct {
	number   uint16
	protocol string
}

func (all *publishers) add(p *publisher) {
	all.all = append(all.all, p)
	for _, port := range p.record.HostPorts {
		at := portNumber{port.Host, port.Protocol}
		all.by[at] = append(all.by[at], p)
	}
	all.changed = true
}

func (all *publishers) remove(p *publisher) {
	isIt := func(q *publisher) bool { return q == p }
	all.all = slices.DeleteFunc(all.all, isIt)
	for _, port := range p.record.HostPorts {
		at := portNumber{port.Host, port.Protocol}
		if all.by[at] = slices.DeleteFunc(all.by[at], isIt); len(all.by[at]) == 0 {
			delete(all.by, at)
		}
	}
	all.changed = true
}

func (all *publishers) find(id endpoint.ID) *publisher {
	i := slices.IndexFunc(all.all, func(p *publisher) bool { return p.record.ID == id })
	if i < 0 {
		return nil
	}
	return all.all[i]
}

// holder returns the first container whose host ports include or exclude one.
func (all *publishers) holder(of endpoint.HostPort) *publisher {
	for _, p := range all.by[portNumber{of.Host, of.Protocol}] {
		if slices.ContainsFunc(p.record.HostPorts, of.Overlaps) {
			return p
		}
	}
	return nil
}

// hostPortOf is the host port that has exactly one frontend.
func hostPortOf(key dpapi.FrontendKey) endpoint.HostPort {
	return endpoint.HostPort{
		Host: key.Address.Port(), Address: key.Address.Addr(), Protocol: service.Protocol(key.Protocol).String(),
	}
}

// keysOf returns the frontends of a host port. It fails for an address that is not of this node.
func (a Addresses) keysOf(p endpoint.HostPort) (keys []dpapi.FrontendKey, err error) {
	protocol, err := service.ParseProtocol(p.Protocol)
	if err != nil {
		return nil, fmt.Errorf("host port %s: %w", p.At(), err)
	}
	at := a.Ports
	if p.Address.IsValid() {
		if !slices.Contains(a.Own, p.Address) && !slices.Contains(a.Ports, p.Address) {
			return nil, fmt.Errorf("host port %s: this node does not have the address", p.At())
		}
		at = []netip.Addr{p.Address}
	}
	for _, address := range at {
		keys = append(keys, dpapi.FrontendKey{
			Address: netip.AddrPortFrom(address, p.Host), Protocol: uint8(protocol),
		})
	}
	return keys, nil
}

// restore enters the containers that an earlier process has recorded. Their frontends may be in the packet path.
func (m *Manager) restore(records []endpoint.Record) {
	records = slices.DeleteFunc(slices.Clone(records), func(r endpoint.Record) bool {
		return len(r.HostPorts) == 0 || r.State == endpoint.Lost
	})
	alive := func(r endpoint.Record) bool { return r.State == endpoint.Active }
	slices.SortFunc(records, func(a, b endpoint.Record) int {
		switch {
		case alive(a) != alive(b) && alive(a):
			return -1
		case alive(a) != alive(b):
			return 1
		}
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID))
	})
	for _, r := range records {
		p := &publisher{record: r, published: alive(r), written: map[dpapi.FrontendKey]dpapi.Frontend{}}
		m.hosts.add(p)
		for _, port := range r.HostPorts {
			keys, _ := m.addresses.keysOf(port)
			for _, key := range keys {
				if m.hosts.holder(hostPortOf(key)) == p {
					p.written[key] = dpapi.Frontend{}
				}
			}
		}
	}
}

// ClaimHostPorts reserves the host ports of a container that is being created, until ReleaseHostPorts. It refuses those
// that another container or a service of this node has, and those at addresses that this node does not have.
func (m *Manager) ClaimHostPorts(r endpoint.Record) error {
	if len(r.HostPorts) == 0 {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, port := range r.HostPorts {
		keys, err := m.addresses.keysOf(port)
		if err != nil {
			return refusal.New(refusal.ErrInvalid, "%w\n  nothing was changed; leave the address out, or use one of "+
				"%v", err, m.addresses.Ports)
		}
		by, err := m.takenBy(port, keys)
		if err != nil {
			return err
		}
		if by != "" {
			return refusal.New(refusal.ErrExhausted, "host port %s of this node is that of %s\n  nothing was changed; "+
				"use another host port or another node", port.At(), by)
		}
	}
	m.hosts.add(&publisher{record: r})
	return nil
}

// takenBy returns who has a host port, or "". Until the services of a tenant are known, those that an earlier process
// wrote have their node ports. The caller holds the lock.
func (m *Manager) takenBy(port endpoint.HostPort, keys []dpapi.FrontendKey) (string, error) {
	if p := m.hosts.holder(port); p != nil {
		return p.name(), nil
	}
	for _, key := range keys {
		if !slices.Contains(m.addresses.Ports, key.Address.Addr()) {
			continue
		}
		for name, t := range m.tenants {
			if s, ok := t.withNodePort(key); ok {
				return fmt.Sprintf("service %s of tenant %s, as its node port", s.Name, name), nil
			}
		}
	}
	for _, key := range keys {
		if _, known := m.exposed[key]; known {
			continue // it is about to be deleted
		}
		_, found, err := m.config.Driver.LookupService(key)
		if err != nil {
			return "", fmt.Errorf("host port %s: %w\n  nothing was changed", port.At(), err)
		}
		if found {
			return "a service that the agent knew before it started; the orchestrator has not sent it since", nil
		}
	}
	return "", nil
}

// withNodePort returns the service that has a node port.
func (t *tenantServices) withNodePort(key dpapi.FrontendKey) (service.Service, bool) {
	for _, s := range t.services {
		if s.NodePorts && s.Address.IsValid() && slices.ContainsFunc(s.Ports, func(p service.Port) bool {
			return p.NodePort == key.Address.Port() && uint8(p.Protocol) == key.Protocol
		}) {
			return s, true
		}
	}
	return service.Service{}, false
}

// PublishHostPorts writes the host ports of a container that is reachable now.
func (m *Manager) PublishHostPorts(r endpoint.Record) error {
	if len(r.HostPorts) == 0 {
		return nil
	}
	m.writing.Lock()
	defer m.writing.Unlock()
	m.mu.Lock()
	p := m.hosts.find(r.ID)
	p.record, p.published, p.leaving = r, true, false
	m.mu.Unlock()
	if err := m.publish(p); errors.Is(err, endpoint.ErrExhausted) {
		return refusal.New(refusal.ErrExhausted, "host ports: %w", err)
	}
	return p.err
}

// RestoreHostPorts claims the host ports of a container again that was lost. If they are taken meanwhile, Status says
// so.
func (m *Manager) RestoreHostPorts(r endpoint.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(r.HostPorts) == 0 {
		return
	}
	if p := m.hosts.find(r.ID); p == nil {
		m.hosts.add(&publisher{record: r, published: true})
	} else { // they are not free yet
		p.published, p.leaving, m.hosts.changed = true, false, true
	}
	m.wake()
}

// ReleaseHostPorts deletes the host ports of a container and gives them free. After an error they stay until Run, or
// the next call, has deleted them.
func (m *Manager) ReleaseHostPorts(r endpoint.Record) error {
	if len(r.HostPorts) == 0 {
		return nil
	}
	m.writing.Lock()
	defer m.writing.Unlock()
	m.mu.Lock()
	p := m.hosts.find(r.ID)
	if p == nil {
		m.mu.Unlock()
		return nil
	}
	p.published, p.leaving = false, true
	m.mu.Unlock()
	if err := m.publish(p); err != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.hosts.changed = true
		m.wake()
		return fmt.Errorf("delete host ports: %w", err)
	}
	return nil
}

// free gives the host ports of a container free, whose frontends are deleted. The caller holds the lock.
func (m *Manager) free(p *publisher) {
	m.hosts.remove(p)
	for _, t := range m.tenants { // services that had to leave these ports out
		for name := range t.unexposed {
			t.dirty[name] = true
		}
	}
	m.wake()
}

// CheckHostPorts compares the host ports of a container with the packet path.
func (m *Manager) CheckHostPorts(r endpoint.Record) error {
	if len(r.HostPorts) == 0 {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.hosts.find(r.ID)
	if p == nil {
		return fmt.Errorf("host port %s is not in the packet path", r.HostPorts[0].At())
	}
	wanted, err := m.wanted(p)
	if err != nil {
		return err
	}
	for key, is := range wanted {
		has, found, err := m.config.Driver.LookupService(key)
		switch {
		case err != nil:
			return err
		case !found:
			return fmt.Errorf("host port %v: the entry of the packet path is missing", key.Address)
		case !equal(has, is):
			return fmt.Errorf("host port %v: the packet path has %+v, not %+v", key.Address, has, is)
		}
	}
	return nil
}

// errNumber means that the tenant's number for services is unknown, because its keys were lost.
var errNumber = errors.New("the number for services of its tenant is not known; what the packet path has stays")

// wanted returns the frontends that a container should have. The error names the first host port that has none. The
// caller holds the lock.
func (m *Manager) wanted(p *publisher) (all map[dpapi.FrontendKey]dpapi.Frontend, problem error) {
	if !p.published {
		return nil, nil
	}
	of, _ := m.config.Tenants.Tenant(p.record.Tenant)
	if of.ServicesNumber == 0 {
		return nil, errNumber
	}
	all = map[dpapi.FrontendKey]dpapi.Frontend{}
	for _, port := range p.record.HostPorts {
		keys, err := m.addresses.keysOf(port)
		problem = cmp.Or(problem, err)
		for _, key := range keys {
			if first := m.hosts.holder(hostPortOf(key)); first != p {
				problem = cmp.Or(problem, fmt.Errorf("host port %s is that of %s", port.At(), first.name()))
				continue
			}
			f := dpapi.Frontend{
				FrontendKey: key, Exposed: dpapi.Exposed{Services: of.ServicesNumber, Node: true},
			}
			for _, a := range p.record.Attachments {
				if a.Plaintext.IsValid() && tenant.NetworkHas(a.Network, tenant.Services) {
					f.Backends = append(f.Backends, dpapi.Backend{
						Plain: a.Plaintext, Seen: a.Address, Port: port.Container,
					})
				}
			}
			all[key] = f
		}
	}
	return all, problem
}

// publish writes what a container should have, and returns why the packet path did not take it. One that is leaving
// then goes. The caller holds m.writing.
func (m *Manager) publish(p *publisher) error {
	m.mu.Lock()
	is, problem := m.wanted(p)
	if errors.Is(problem, errNumber) {
		p.err = problem
		m.mu.Unlock()
		return nil
	}
	w := work{is: map[service.Name]map[dpapi.FrontendKey]dpapi.Frontend{}}
	w.add(service.Name{}, is, p.written)
	w.leaveOthers(p.owner(), m.exposed)
	m.mu.Unlock()
	err := w.write(m.config.Driver)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		p.written = is
		w.noteExposed(p.owner(), m.exposed)
	} else {
		p.written = unknown(is, p.written)
	}
	if p.err = cmp.Or(err, problem); err == nil && p.leaving {
		m.free(p)
	}
	return err
}

// publishAll writes what has changed, and returns when a failed write has to be repeated; never is the zero Time. The
// caller holds m.writing.
func (m *Manager) publishAll() (next time.Time) {
	m.mu.Lock()
	due := m.hosts.changed && !m.config.Now().Before(m.hosts.retryAt)
	next = m.hosts.retryAt
	some := slices.Clone(m.hosts.all)
	if due {
		m.hosts.changed = false
	}
	m.mu.Unlock()
	if !due {
		return next
	}
	var failed error
	for _, p := range some {
		before := p.err
		failed = cmp.Or(failed, m.publish(p))
		if p.err != nil && (before == nil || before.Error() != p.err.Error()) {
			m.config.Log.Error("a host port of a container is not as it should be", "endpoint", p.record.ID,
				"container", p.record.ContainerID, "pod", p.record.Pod, "error", p.err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if failed == nil {
		m.hosts.failures, m.hosts.retryAt = 0, time.Time{}
		return time.Time{}
	}
	m.hosts.changed = true
	m.hosts.retryAt = m.config.Now().Add(pause(m.hosts.failures))
	m.hosts.failures++
	return m.hosts.retryAt
}

// hostPortKeys returns the frontends that containers may have. The caller holds the lock.
func (m *Manager) hostPortKeys() (all []dpapi.FrontendKey) {
	for _, p := range m.hosts.all {
		all = slices.AppendSeq(all, maps.Keys(p.written))
	}
	return all
}
