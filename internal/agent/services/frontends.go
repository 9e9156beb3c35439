package services

import (
	"cmp"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// frontends computes what clients on this node get of a service; nothing if it is headless or gone.
func (t *tenantServices) frontends(name service.Name, as *eyes, c Config) map[dpapi.FrontendKey]dpapi.Frontend {
	delete(t.unknown, name)
	s, ok := t.services[name]
	if !ok || !s.Address.IsValid() {
		return nil
	}
	choice := service.Select(s, t.slicesOf(name, c.Node), c.Node, c.Zone)
	backends, lost := as.backends(choice.Active)
	leaving, more := as.backends(choice.Draining)
	if lost+more > 0 {
		t.unknown[name] = lost + more
	}
	all := make(map[dpapi.FrontendKey]dpapi.Frontend, len(s.Ports))
	for _, p := range s.Ports {
		key := dpapi.FrontendKey{Address: netip.AddrPortFrom(s.Address, p.Port), Protocol: uint8(p.Protocol)}
		target := cmp.Or(p.Target, p.Port)
		all[key] = dpapi.Frontend{
			FrontendKey: key, Affinity: s.Affinity,
			Backends: atPort(backends, target), Draining: atPort(leaving, target),
		}
	}
	return all
}

func atPort(backends []dpapi.Backend, port uint16) []dpapi.Backend {
	all := slices.Clone(backends)
	for i := range all {
		all[i].Port = port
	}
	return all
}

func equal(a, b dpapi.Frontend) bool {
	return a.FrontendKey == b.FrontendKey && a.Affinity == b.Affinity && slices.Equal(a.Backends, b.Backends) &&
		slices.Equal(a.Draining, b.Draining)
}

// eyes translates plaintext addresses to those that containers of a tenant see.
type eyes struct {
	tenant  tenant.Tenant
	ciphers map[address.TenantID]*address.Cipher // nil: the tenant does not have the id
}

func newEyes(t tenant.Tenant) *eyes { return &eyes{t, map[address.TenantID]*address.Cipher{}} }

// backends returns the endpoints in the order of their addresses, and how many have an address under an id that the
// tenant does not have here.
func (e *eyes) backends(endpoints []service.Placed) (all []dpapi.Backend, unknown int) {
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

func (e *eyes) seen(plain netip.Addr) (netip.Addr, bool) {
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
