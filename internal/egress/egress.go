package egress

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// Folder is the name of the folder with the log, in the state directory.
const Folder = "egress"

// MaxLog is the size in bytes of both files of the log together. The addresses in use, which each file begins with,
// come in addition.
const MaxLog = 64 << 20

// draws is how many random addresses are tried. A node has at most 65,535 endpoints and 16,711,680 addresses, so that
// the first is free with a probability of 99.6 % or more, apart from quarantined addresses.
const draws = 1000

// Addresses allocates the egress addresses of a node. Its methods may be called concurrently.
type Addresses struct {
	own, node  netip.Prefix
	services   netip.Prefix // the cluster's prefix of services; zero: it has none
	quarantine time.Duration
	now        func() time.Time
	pick       func() address.Index
	log        *logFile

	mu     sync.Mutex
	used   map[address.Index]Entry
	ended  map[address.Index]Entry // released ones, until their quarantine is over
	checks int                     // released addresses, for sweepEvery
}

// Entry says who has or had an address.
type Entry struct {
	Address   netip.Addr `json:"address"`
	Container string     `json:"container"`
	Interface string     `json:"interface"`
	Pod       string     `json:"pod,omitempty"`
	Tenant    string     `json:"tenant"`
	From      time.Time  `json:"from"`
	Until     time.Time  `json:"until,omitzero"` // zero: it still has it
}

// Had reports whether the container had the address at a time.
func (e Entry) Had(at time.Time) bool {
	return !at.Before(e.From) && (e.Until.IsZero() || at.Before(e.Until))
}

// same reports whether two entries are of one allocation.
func (e Entry) same(other Entry) bool {
	return e.Address == other.Address && e.Container == other.Container && e.Interface == other.Interface &&
		e.From.Equal(other.From)
}

// Config has what Open needs.
type Config struct {
	Dir  string         // the agent's state directory
	Disk statefile.Disk // the file system of Dir
	Plan address.Plan
	Node netip.Prefix // its /64
	// what endpoints have: entries of others end, and an address without an entry gets one
	Records []endpoint.Record
	Now     func() time.Time     // nil means time.Now
	Pick    func() address.Index // chooses an index; nil means at random
	MaxLog  int                  // 0 means MaxLog
	Log     *slog.Logger
}

// Open reads the log and reconciles it with the records.
func Open(c Config) (*Addresses, error) {
	a := &Addresses{
		own: c.Node, quarantine: endpoint.MinQuarantine, now: c.Now, pick: c.Pick,
		used: map[address.Index]Entry{}, ended: map[address.Index]Entry{},
	}
	a.services, _ = c.Plan.ServicePrefix() // an error means that the cluster cannot have services
	a.node, _ = c.Plan.EgressNode(c.Node)  // if its number is beyond the egress prefix, it has none
	if a.now == nil {
		a.now = time.Now
	}
	if a.pick == nil {
		a.pick = func() address.Index {
			return tenant.FirstEgressIndex + address.Index(rand.N(uint32(address.MaxIndex-tenant.FirstEgressIndex+1)))
		}
	}
	var err error
	if a.log, err = openLog(c.Disk, c.Dir, cmp.Or(c.MaxLog, MaxLog)/2, c.Log, a.note); err != nil {
		return nil, err
	}
	return a, a.reconcile(c.Records)
}

// note keeps an entry in memory.
func (a *Addresses) note(e Entry) {
	i := address.Split(e.Address).Index
	if e.Until.IsZero() {
		a.used[i] = e
		delete(a.ended, i)
		return
	}
	if has, ok := a.used[i]; ok && has.same(e) {
		delete(a.used, i)
	}
	if a.isQuarantined(e) {
		a.ended[i] = e
	}
}

func (a *Addresses) isQuarantined(e Entry) bool { return a.now().Sub(e.Until) < a.quarantine }

// reconcile ends the entries of endpoints that are gone, after a crash, and adds those that a damaged log lacks.
func (a *Addresses) reconcile(records []endpoint.Record) error {
	has := map[netip.Addr]endpoint.Record{}
	for _, r := range records {
		for _, at := range r.Attachments {
			if at.Egress.IsValid() {
				has[at.Egress] = r
			}
		}
	}
	for _, e := range sorted(a.used) {
		r, ok := has[e.Address]
		if ok && r.ContainerID == e.Container && r.Interface == e.Interface {
			delete(has, e.Address)
			continue
		}
		if err := a.end(e); err != nil {
			return err
		}
	}
	for addr, r := range has {
		if err := a.begin(addr, r); err != nil {
			return err
		}
	}
	return a.log.sync()
}

func sorted(used map[address.Index]Entry) []Entry {
	var all []Entry
	for _, e := range used {
		all = append(all, e)
	}
	slices.SortFunc(all, func(x, y Entry) int { return x.Address.Compare(y.Address) })
	return all
}

func (a *Addresses) begin(addr netip.Addr, r endpoint.Record) error {
	return a.write(Entry{
		Address: addr, Container: r.ContainerID, Interface: r.Interface, Pod: r.Pod, Tenant: r.Tenant,
		From: a.now().UTC(),
	})
}

func (a *Addresses) end(e Entry) error {
	e.Until = a.now().UTC()
	return a.write(e)
}

// write adds an entry to the log. The caller holds the lock, or is Open.
func (a *Addresses) write(e Entry) error {
	carried := func() []Entry {
		a.sweep()
		return append(sorted(a.ended), sorted(a.used)...)
	}
	if err := a.log.append(e, a.now(), carried); err != nil {
		return fmt.Errorf("recording who has the egress address %v: %w", e.Address, err)
	}
	a.note(e)
	return nil
}

// Settle returns an attachment with the default route and the egress address that its host ports and its tenant's rules
// require, and without those that they do not. A new address is recorded on disk by then. The caller releases an
// address that the attachment had before. In a network with services the attachment gets the route to them, whether or
// not its tenant has some. It returns an attachment of a network with neither as it is.
func (a *Addresses) Settle(t tenant.Tenant, r endpoint.Record, at endpoint.Attachment) (endpoint.Attachment, error) {
	if a.lacksServices(at) {
		at.Routes = append(slices.Clone(at.Routes), a.services)
	}
	if !tenant.NetworkHas(at.Network, tenant.Egress) {
		return at, nil
	}
	at.Routes = slices.DeleteFunc(slices.Clone(at.Routes), func(p netip.Prefix) bool {
		return p == endpoint.DefaultRoute
	})
	if needsDefaultRoute(t, r) {
		at.Routes = append(at.Routes, endpoint.DefaultRoute)
	}
	switch {
	case !t.NeedsEgressAddress():
		at.Egress = netip.Addr{}
	case !at.Egress.IsValid() || !a.node.Contains(at.Egress):
		var err error
		if at.Egress, err = a.allocate(r); err != nil {
			return at, fmt.Errorf("egress address of a container of tenant %s: %w", t.Name, err)
		}
	}
	return at, nil
}

// needsDefaultRoute reports whether a container sends to hosts outside.
func needsDefaultRoute(t tenant.Tenant, r endpoint.Record) bool {
	return t.NeedsDefaultRoute() || len(r.HostPorts) > 0
}

// Settled reports whether an attachment has what Settle would give it, and nothing else. An address in the node's
// own /64 is replaced if the cluster has an egress prefix by now.
func (a *Addresses) Settled(t tenant.Tenant, r endpoint.Record, at endpoint.Attachment) bool {
	if a.lacksServices(at) {
		return false
	}
	if !tenant.NetworkHas(at.Network, tenant.Egress) {
		return true
	}
	return slices.Contains(at.Routes, endpoint.DefaultRoute) == needsDefaultRoute(t, r) &&
		at.Egress.IsValid() == t.NeedsEgressAddress() &&
		(!at.Egress.IsValid() || a != nil && a.node.Contains(at.Egress))
}

// lacksServices reports whether an attachment has to get the route to services.
func (a *Addresses) lacksServices(at endpoint.Attachment) bool {
	return a != nil && a.services.IsValid() && tenant.NetworkHas(at.Network, tenant.Services) &&
		!slices.Contains(at.Routes, a.services)
}

func (a *Addresses) allocate(r endpoint.Record) (netip.Addr, error) {
	if a == nil || !a.node.IsValid() {
		return netip.Addr{}, fmt.Errorf("this node has none, because its number is beyond the cluster's egress " +
			"prefix\n  nothing was changed; use another node, or egress gateways")
	}
	addr, err := a.draw(r)
	if err != nil {
		return addr, err
	}
	if err := a.log.sync(); err != nil {
		return netip.Addr{}, errors.Join(err, a.Release(addr))
	}
	return addr, nil
}

func (a *Addresses) draw(r endpoint.Record) (netip.Addr, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for range draws {
		i := a.pick()
		if _, used := a.used[i]; used {
			continue
		}
		if e, ended := a.ended[i]; ended && a.isQuarantined(e) {
			continue
		}
		addr := tenant.EgressAddress(a.node, i)
		return addr, a.begin(addr, r)
	}
	return netip.Addr{}, endpoint.ErrExhausted
}

// Release puts an address into quarantine. It does nothing if no endpoint has it.
func (a *Addresses) Release(addr netip.Addr) error {
	if a == nil || !addr.IsValid() {
		return nil
	}
	a.mu.Lock()
	e, ok := a.used[address.Split(addr).Index]
	var err error
	if ok = ok && e.Address == addr; ok {
		err = a.end(e)
		if a.checks++; a.checks%sweepEvery == 0 {
			a.sweep()
		}
	}
	a.mu.Unlock()
	if err != nil || !ok {
		return err
	}
	return a.log.sync()
}

// sweepEvery is after how many releases ended quarantines are removed from memory.
const sweepEvery = 1024

func (a *Addresses) sweep() {
	maps.DeleteFunc(a.ended, func(_ address.Index, e Entry) bool { return !a.isQuarantined(e) })
}

// Validate refuses an address that this node cannot have allocated.
func (a *Addresses) Validate(addr netip.Addr) error {
	if !addr.IsValid() {
		return nil
	}
	if a == nil || !a.node.Contains(addr) && !a.own.Contains(addr) || !tenant.IsEgressAddress(addr) ||
		address.Split(addr).Index < tenant.FirstEgressIndex {
		return fmt.Errorf("egress address %v is not one of this node", addr)
	}
	return nil
}

// Used returns how many addresses endpoints have.
func (a *Addresses) Used() int {
	if a == nil {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.used)
}

// Find returns who had an address, as far as the log goes back, oldest first, and since when it has all changes; zero
// if it is empty.
func (a *Addresses) Find(addr netip.Addr) (had []Entry, since time.Time, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.log.find(addr)
}
