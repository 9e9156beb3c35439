package services

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// frontends computes what clients on this node, and hosts outside of the cluster, get of a service; nothing if it is
// headless or gone.
func (t *tenantServices) frontends(
	name service.Name, as *translator, hosts *publishers, c Config,
) map[dpapi.FrontendKey]dpapi.Frontend {
	delete(t.unknown, name)
	was := t.unexposed[name]
	delete(t.unexposed, name)
	s, ok := t.services[name]
	if !ok || !s.Address.IsValid() {
		return nil
	}
	f := fronts{service: s, all: make(map[dpapi.FrontendKey]dpapi.Frontend, len(s.Ports))}
	endpoints := t.slicesOf(name, c.Node)
	if lost := f.choose(service.Select(s, endpoints, c.Node, c.Zone), as); lost > 0 {
		t.unknown[name] = lost
	}
	for _, p := range s.Ports {
		f.add(s.Address, p.Port, p, dpapi.Exposed{})
	}
	if !s.IsExposed() || as.tenant.ServicesNumber == 0 {
		return f.all
	}
	f.choose(service.SelectExposed(s, endpoints, c.Node), as) // some of the above: those that are lost are counted
	// The store refuses addresses of uplinks, but a node may have others, or get one later.
	external := slices.DeleteFunc(slices.Clone(s.Outside()), func(a netip.Addr) bool {
		whose, remedy := t.addresses.forbid(a)
		if whose != "" {
			c.Log.Warn("an external address of a service is "+whose+", so it is not exposed here; "+remedy,
				"service", s.Name, "tenant", s.Tenant, "address", a)
		}
		return whose != ""
	})
	for _, p := range s.Ports {
		for _, a := range external {
			f.add(a, p.Port, p, dpapi.Exposed{Services: as.tenant.ServicesNumber})
		}
		if !s.NodePorts || p.NodePort == 0 {
			continue
		}
		for _, a := range t.addresses.Ports {
			at := endpoint.HostPort{Host: p.NodePort, Protocol: p.Protocol.String(), Address: a}
			if by := hosts.holder(at); by != nil {
				why := fmt.Sprintf("%s is a host port of %s", at.At(), by.name())
				t.unexposed[name] = append(t.unexposed[name], why)
				continue
			}
			f.add(a, p.NodePort, p, dpapi.Exposed{Services: as.tenant.ServicesNumber, Node: true})
		}
	}
	if now := t.unexposed[name]; len(now) > 0 && !slices.Equal(now, was) {
		c.Log.Warn("a node port of a service is not exposed on this node", "service", s.Name, "tenant", s.Tenant,
			"because", strings.Join(now, ", "))
	}
	return f.all
}

// fronts are the frontends of a service, and the endpoints of those that are added next.
type fronts struct {
	service                service.Service
	all                    map[dpapi.FrontendKey]dpapi.Frontend
	backends               []dpapi.Backend
	leaving, leavingForUDP []dpapi.Backend // UDP flows do not stay on nodes that do not answer
}

// choose sets the endpoints. It returns how many this node cannot reach.
func (f *fronts) choose(c service.Choice, as *translator) int {
	var lost, more int
	f.backends, lost = as.backends(c.Active)
	f.leaving, more = as.backends(c.Draining)
	f.leavingForUDP, _ = as.backends(slices.DeleteFunc(c.Draining, func(p service.Placed) bool {
		return p.Why == service.WhyUnreachable
	}))
	return lost + more
}

// add adds a frontend for a port of the service.
func (f *fronts) add(a netip.Addr, at uint16, p service.Port, is dpapi.Exposed) {
	key := dpapi.FrontendKey{Address: netip.AddrPortFrom(a, at), Protocol: uint8(p.Protocol)}
	target, leaving := cmp.Or(p.Target, p.Port), f.leaving
	if p.Protocol == service.UDP {
		leaving = f.leavingForUDP
	}
	f.all[key] = dpapi.Frontend{
		FrontendKey: key, Exposed: is, Affinity: f.service.Affinity,
		Backends: atPort(f.backends, target), Draining: atPort(leaving, target),
	}
}

func atPort(backends []dpapi.Backend, port uint16) []dpapi.Backend {
	all := slices.Clone(backends)
	for i := range all {
		all[i].Port = port
	}
	return all
}

func equal(a, b dpapi.Frontend) bool {
	return a.FrontendKey == b.FrontendKey && a.Exposed == b.Exposed && a.Affinity == b.Affinity &&
		slices.Equal(a.Backends, b.Backends) && slices.Equal(a.Draining, b.Draining)
}

// translator turns plaintext addresses into those that containers of a tenant see.
type translator struct {
	tenant  tenant.Tenant
	ciphers map[address.TenantID]*address.Cipher // nil: the tenant does not have the id
}

func newTranslator(t tenant.Tenant) *translator {
	return &translator{t, map[address.TenantID]*address.Cipher{}}
}

// backends returns the endpoints in the order of their addresses, and how many have an address under an id that the
// tenant does not have here.
func (e *translator) backends(endpoints []service.Placed) (all []dpapi.Backend, unknown int) {
	for _, of := range endpoints {
		seen, ok := e.seen(of.Address)
		if !ok {
			unknown++
			continue
		}
		all = append(all, dpapi.Backend{Plain: of.Address, Seen: seen})
	}
	slices.SortFunc(all, func(a, b dpapi.Backend) int { return a.Plain.Compare(b.Plain) })
	return slices.Compact(all), unknown
}

func (e *translator) seen(plain netip.Addr) (netip.Addr, bool) {
	id := address.Split(plain).Tenant
	cipher, known := e.ciphers[id]
	if !known {
		if e.tenant.Has(id) {
			cipher = address.NewCipher(e.tenant.Of(id).Key)
		}
		e.ciphers[id] = cipher
	}
	switch {
	case cipher == nil:
		return netip.Addr{}, false
	case e.tenant.Addressing == tenant.Clear:
		return plain, true
	}
	return cipher.Encrypt(plain), true
}
