package services

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// tenantServices are the services of one tenant.
type tenantServices struct {
	whole    bool // all services and slices were received: before, nothing is written or reported
	services map[service.Name]service.Service
	others   map[service.Name]map[string]service.Slice // fixed slices, and those of other nodes, by name
	stored   map[SliceName]service.Slice               // those of this node, as the orchestrator has them
	own      map[SliceName]service.Slice               // those of this node, as its containers are
	reported map[SliceName]attempt
	ids      []tenant.ID // with which backends were computed
	number   uint32      // of the tenant for services, with which exposed frontends were computed

	addresses Addresses // of this node; the caller must not change them

	dirty   map[service.Name]bool // their frontends may have changed
	unswept bool                  // the packet path may have frontends of services that are gone
	written map[service.Name]map[dpapi.FrontendKey]dpapi.Frontend
	unknown map[service.Name]int // endpoints under tenant ids that this node does not have
	// node ports that are not exposed here, and why
	unexposed map[service.Name][]string
	failures  int       // of consecutive writes
	retryAt   time.Time // no write before
	err       error     // why the last write failed; nil if it did not
}

func newTenantServices() *tenantServices {
	return &tenantServices{
		services: map[service.Name]service.Service{}, others: map[service.Name]map[string]service.Slice{},
		stored: map[SliceName]service.Slice{}, own: map[SliceName]service.Slice{}, reported: map[SliceName]attempt{},
		dirty:   map[service.Name]bool{},
		written: map[service.Name]map[dpapi.FrontendKey]dpapi.Frontend{}, unknown: map[service.Name]int{},
		unexposed: map[service.Name][]string{},
	}
}

// apply applies an update.
func (t *tenantServices) apply(u Update, node string) {
	if u.Whole {
		for name := range t.services {
			t.dirty[name] = true
		}
		clear(t.services)
		clear(t.others)
		clear(t.stored)
		clear(t.reported)
		t.whole, t.unswept = true, true
	}
	for _, name := range u.Ended {
		delete(t.services, name)
		delete(t.others, name)
		maps.DeleteFunc(t.stored, func(of SliceName, _ service.Slice) bool { return of.Service == name })
		maps.DeleteFunc(t.reported, func(of SliceName, _ attempt) bool { return of.Service == name })
		t.dirty[name] = true
	}
	for _, of := range u.EndedSlices {
		delete(t.others[of.Service], of.Name)
		delete(t.stored, of)
		t.dirty[of.Service] = true
	}
	for _, s := range u.Services {
		t.services[s.Name] = s
		t.dirty[s.Name] = true
	}
	for _, s := range u.Slices {
		if s.Node == node {
			t.stored[SliceName{s.Service, s.Name}] = s
			continue
		}
		if t.others[s.Service] == nil {
			t.others[s.Service] = map[string]service.Slice{}
		}
		t.others[s.Service][s.Name] = s
		t.dirty[s.Service] = true
	}
	t.retryAt = time.Time{} // it may fit now
}

// slicesOf returns the slices of a service: those of this node as its containers are now.
func (t *tenantServices) slicesOf(name service.Name, node string) []service.Slice {
	all := slices.SortedFunc(maps.Values(t.others[name]), func(a, b service.Slice) int {
		return cmp.Compare(a.Name, b.Name)
	})
	for k := 0; ; k++ {
		own, ok := t.own[SliceName{name, ownName(node, k)}]
		if !ok {
			return all
		}
		all = append(all, own)
	}
}

// setAddresses sets the addresses of this node.
func (t *tenantServices) setAddresses(addresses Addresses) {
	if t.addresses.equal(addresses) {
		return
	}
	t.addresses = addresses
	for name, s := range t.services {
		if s.IsExposed() {
			t.dirty[name] = true
		}
	}
}

// work is what has to change in the packet path for one tenant.
type work struct {
	is      map[service.Name]map[dpapi.FrontendKey]dpapi.Frontend // of the services that are written
	puts    []dpapi.Frontend
	deletes []dpapi.FrontendKey
	prefix  netip.Prefix // whose other frontends go; zero: none
	keys    []dpapi.FrontendKey
}

func (w work) isEmpty() bool { return len(w.puts)+len(w.deletes) == 0 && !w.prefix.IsValid() }

// work computes the frontends that may have changed.
func (t *tenantServices) work(known tenant.Tenant, hosts *publishers, c Config) work {
	w := work{is: map[service.Name]map[dpapi.FrontendKey]dpapi.Frontend{}}
	if !t.whole {
		return w
	}
	if !slices.Equal(t.ids, known.IDs) || t.number != known.ServicesNumber {
		for name := range t.services {
			t.dirty[name] = true
		}
		t.ids, t.number = slices.Clone(known.IDs), known.ServicesNumber
	}
	if len(t.dirty) > 0 {
		seen := newTranslator(known)
		for name := range t.dirty {
			w.add(name, t.frontends(name, seen, hosts, c), t.written[name])
		}
		clear(t.dirty)
	}
	if prefix, err := c.Plan.TenantServices(known.ServicesNumber); t.unswept && err == nil {
		w.prefix = prefix
		for name, of := range t.written {
			if _, changes := w.is[name]; !changes {
				w.keys = slices.AppendSeq(w.keys, maps.Keys(of))
			}
		}
		for _, of := range w.is {
			w.keys = slices.AppendSeq(w.keys, maps.Keys(of))
		}
	}
	return w
}

// add compares what a service should have with what was written last.
func (w *work) add(name service.Name, is, was map[dpapi.FrontendKey]dpapi.Frontend) {
	w.is[name] = is
	for key := range was {
		if _, stays := is[key]; !stays {
			w.deletes = append(w.deletes, key)
		}
	}
	for key, f := range is {
		if had, ok := was[key]; !ok || !equal(had, f) {
			w.puts = append(w.puts, f)
		}
	}
}

// leaveOthers takes the deletions of exposed frontends that another owner has meanwhile out of the work of one. of has
// the owner that wrote each last.
func (w *work) leaveOthers(by owner, of map[dpapi.FrontendKey]owner) {
	w.deletes = slices.DeleteFunc(w.deletes, func(key dpapi.FrontendKey) bool {
		is, exposed := of[key]
		return exposed && is != by
	})
}

// noteExposed notes which exposed frontends an owner has in the packet path.
func (w *work) noteExposed(by owner, of map[dpapi.FrontendKey]owner) {
	for _, key := range w.deletes {
		delete(of, key)
	}
	for _, f := range w.puts {
		if f.Exposed.Services != 0 {
			of[f.FrontendKey] = by
		}
	}
}

// write writes to the packet path. What goes makes room for what comes. If not all fits, as much as possible is
// written.
func (w work) write(to dpapi.Services) error {
	if w.prefix.IsValid() {
		if err := to.KeepServices(w.prefix, w.keys); err != nil {
			return err
		}
	}
	if len(w.deletes) > 0 {
		if err := to.DeleteServices(w.deletes); err != nil {
			return err
		}
	}
	if len(w.puts) == 0 {
		return nil
	}
	err := to.PutServices(w.puts)
	if err != nil && len(w.puts) > 1 {
		for i := range w.puts {
			if one := to.PutServices(w.puts[i : i+1]); one != nil {
				err = one
			}
		}
	}
	return err
}

// unknown returns what the packet path may have after a failed write.
func unknown(is, was map[dpapi.FrontendKey]dpapi.Frontend) map[dpapi.FrontendKey]dpapi.Frontend {
	some := map[dpapi.FrontendKey]dpapi.Frontend{}
	for _, of := range []map[dpapi.FrontendKey]dpapi.Frontend{is, was} {
		for key := range of {
			some[key] = dpapi.Frontend{}
		}
	}
	return some
}

// note records the result of a write. After an error it is unknown what the packet path has of the services.
func (t *tenantServices) note(w work, err error, now time.Time) {
	for name, is := range w.is {
		if err != nil {
			t.written[name], t.dirty[name] = unknown(is, t.written[name]), true
			continue
		}
		if t.written[name] = is; len(is) == 0 {
			delete(t.written, name)
		}
	}
	if t.err = err; err != nil {
		t.retryAt = now.Add(pause(t.failures))
		t.failures++
		return
	}
	t.failures, t.retryAt = 0, time.Time{}
	if w.prefix.IsValid() {
		t.unswept = false
	}
}
