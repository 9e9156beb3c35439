package agenttest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
)

// Frontends are the tables of services of a fake data path.
type Frontends struct {
	mu     sync.Mutex
	has    map[dpapi.FrontendKey]dpapi.Frontend
	counts map[dpapi.FrontendKey]dpapi.ServiceCounts
	writes int
	room   int // the most backends; 0: any number
	fail   error
}

// ErrTableFull is the error of a table without room.
var ErrTableFull = errors.New("table pil_backends_v1 is full")

// NewFrontends returns empty tables.
func NewFrontends() *Frontends {
	return &Frontends{
		has: map[dpapi.FrontendKey]dpapi.Frontend{}, counts: map[dpapi.FrontendKey]dpapi.ServiceCounts{},
	}
}

func (f *Frontends) PutServices(frontends []dpapi.Frontend) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		return f.fail
	}
	f.writes += len(frontends)
	for _, is := range frontends {
		was, had := f.has[is.FrontendKey]
		f.has[is.FrontendKey] = is
		if f.room > 0 && f.backends() > f.room {
			if delete(f.has, is.FrontendKey); had {
				f.has[is.FrontendKey] = was
			}
			return fmt.Errorf("%w: %d entries", ErrTableFull, f.room)
		}
	}
	return nil
}

func (f *Frontends) backends() (n int) {
	for _, is := range f.has {
		n += len(is.Backends) + len(is.Draining)
	}
	return n
}

func (f *Frontends) DeleteServices(keys []dpapi.FrontendKey) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.writes += len(keys)
	for _, key := range keys {
		delete(f.has, key)
	}
	return f.fail
}

func (f *Frontends) KeepServices(prefix netip.Prefix, keys []dpapi.FrontendKey) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	of := prefix.Addr().As16()
	number := uint32(of[5])<<16 | uint32(of[6])<<8 | uint32(of[7])
	maps.DeleteFunc(f.has, func(key dpapi.FrontendKey, is dpapi.Frontend) bool {
		exposed := is.Exposed.Services != 0 && is.Exposed.Services == number
		return (prefix.Contains(key.Address.Addr()) || exposed) && !slices.Contains(keys, key)
	})
	return f.fail
}

func (f *Frontends) LookupService(key dpapi.FrontendKey) (dpapi.Frontend, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	is, ok := f.has[key]
	return is, ok, f.fail
}

func (f *Frontends) LookupExposed(a netip.Addr) (node, found bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, is := range f.has {
		if key.Address.Addr() == a && is.Exposed.Services != 0 {
			return is.Exposed.Node, true, f.fail
		}
	}
	return false, false, f.fail
}

func (f *Frontends) LookupTarget(port netip.AddrPort, protocol uint8) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, is := range f.has {
		for _, b := range slices.Concat(is.Backends, is.Draining) {
			if is.Exposed.Services != 0 && key.Protocol == protocol && netip.AddrPortFrom(b.Seen, b.Port) == port {
				return true, f.fail
			}
		}
	}
	return false, f.fail
}

// ChooseBackend chooses by the client's port, or, with affinity, the first one.
func (f *Frontends) ChooseBackend(key dpapi.FrontendKey, client netip.AddrPort) (c dpapi.Choice, ok bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	is := f.has[key]
	if len(is.Backends) == 0 {
		return c, false, f.fail
	}
	if is.Affinity == 0 {
		c.Slot = uint32(client.Port()) % uint32(len(is.Backends))
	}
	c.Backend = is.Backends[c.Slot]
	return c, true, f.fail
}

func (f *Frontends) ServiceCounts() (map[dpapi.FrontendKey]dpapi.ServiceCounts, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.counts), f.fail
}

// All returns the frontends in the tables.
func (f *Frontends) All() map[dpapi.FrontendKey]dpapi.Frontend {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.has)
}

// Writes returns how many frontends were written or deleted one by one.
func (f *Frontends) Writes() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.writes
}

// Limit sets the most backends that the tables take; 0: any number.
func (f *Frontends) Limit(backends int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.room = backends
}

// SetFail makes all calls fail, or, with nil, succeed.
func (f *Frontends) SetFail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = err
}

// Count sets what clients have done with a frontend.
func (f *Frontends) Count(key dpapi.FrontendKey, n dpapi.ServiceCounts) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[key] = n
}

// Reports takes the endpoints that a node reports.
type Reports struct {
	Taken  func(service.Slice) // called after each; may be nil
	mu     sync.Mutex
	stored map[string]service.Slice
}

func (r *Reports) PutEndpoints(_ context.Context, all []service.Slice) error {
	r.store(all)
	if r.Taken != nil {
		for _, s := range all {
			r.Taken(s)
		}
	}
	return nil
}

func (r *Reports) store(all []service.Slice) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stored == nil {
		r.stored = map[string]service.Slice{}
	}
	for _, s := range all {
		key := fmt.Sprint(s.Tenant, " ", s.Service, " ", s.Name)
		if r.stored[key] = s; len(s.Endpoints) == 0 {
			delete(r.stored, key)
		}
	}
}

// All returns the slices that were reported last, in order.
func (r *Reports) All() []service.Slice {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Values(r.stored), func(a, b service.Slice) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Service.String(), b.Service.String()),
			cmp.Compare(a.Name, b.Name))
	})
}
