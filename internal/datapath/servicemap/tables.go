package servicemap

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
)

// Capacity of the maps of a node: ports of services, and ports of endpoints. A set that is replaced and its successor
// exist at the same time.
const (
	MaxFrontends = 32_768
	MaxBackends  = 131_072
	MaxMembers   = 2 * MaxBackends
)

// reserveAhead is how many numbers are reserved by one write.
const reserveAhead = 4096

// Tables are the maps of services of one node.
type Tables struct {
	host       *host.Host
	invalidate func() error // ends all cached flows

	mu        sync.Mutex
	frontends map[bpfobj.PilasterSvcKey]*frontend // as the kernel has them; nil before they were read
	backends  int                                 // of all frontends
	peers     map[netip.Addr]uint32               // how many backends have a plaintext address
	exposed   exposure
	last      uint32 // number that was allocated last
	reserved  uint32 // numbers up to this one are marked as used in the kernel

	mustInvalidate bool // since the last successful invalidate an address has become one of a backend
}

// frontend is what the kernel has of a frontend.
type frontend struct {
	bpfobj.PilasterSvc
	members  []uint32 // of its set or its table of Maglev, sorted
	backends map[dpapi.Backend]*backend
}

type backend struct {
	number   uint32
	draining bool
}

// New returns the tables of a node. Nothing is read before the maps are loaded. A program that has cached a flow from
// an address does not see that the address has become one of a backend until invalidate.
func New(h *host.Host, invalidate func() error) *Tables {
	return &Tables{host: h, invalidate: invalidate}
}

func (d *Tables) objects() *bpfobj.PilasterObjects { return &d.host.Objects }

// Members of set 0, which no service has, hold the highest number that may have been allocated.
var counterKey = bpfobj.PilasterSvcMember{}

func backendOf(b bpfobj.PilasterSvcBackend) dpapi.Backend {
	return dpapi.Backend{Plain: b.Plain.Addr(), Seen: b.Seen.Addr(), Port: hostOrder(b.Port)}
}

func keyOf(k dpapi.FrontendKey) bpfobj.PilasterSvcKey {
	return bpfobj.PilasterSvcKey{
		Address: bpfobj.ToAddr(k.Address.Addr()), Port: networkOrder(k.Address.Port()), Proto: k.Protocol,
	}
}

func frontendKeyOf(k bpfobj.PilasterSvcKey) dpapi.FrontendKey {
	return dpapi.FrontendKey{Address: netip.AddrPortFrom(k.Address.Addr(), hostOrder(k.Port)), Protocol: k.Proto}
}

// networkOrder returns a port as the programs hold it.
func networkOrder(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

func hostOrder(port uint16) uint16 { return networkOrder(port) }

// allocate returns a number that none of the tables and no session has. The caller holds the lock.
func (d *Tables) allocate() (uint32, error) {
	if d.last == d.reserved {
		if d.reserved > 1<<32-1-reserveAhead {
			return 0, fmt.Errorf("all numbers of services were used; reset the node with `pilaster node reset`")
		}
		if err := d.objects().PilSvcsetsV1.Put(counterKey, d.reserved+reserveAhead); err != nil {
			return 0, fmt.Errorf("reserve numbers of services: %w", err)
		}
		d.reserved += reserveAhead
	}
	d.last++
	return d.last, nil
}

// PutServices creates or replaces frontends.
func (d *Tables) PutServices(frontends []dpapi.Frontend) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.read(); err != nil {
		return err
	}
	if err := d.fits(frontends); err != nil {
		return err
	}
	if err := d.deleteOfOthers(frontends); err != nil {
		d.frontends = nil
		return err
	}
	changes := make([]*change, 0, len(frontends))
	var err error
	for _, f := range frontends {
		c := &change{key: keyOf(f.FrontendKey), wanted: f}
		if err = d.prepare(c); err != nil {
			err = fmt.Errorf("service %v: %w", f.Address, err)
			break
		}
		changes = append(changes, c)
	}
	if d.mustInvalidate && err == nil { // before the first answer
		if err = d.invalidate(); err == nil {
			d.mustInvalidate = false
		}
	}
	for i := 0; i < len(changes) && err == nil; i++ {
		if err = d.commit(changes[i]); err != nil {
			err = fmt.Errorf("service %v: %w", changes[i].wanted.Address, err)
		}
	}
	if err != nil {
		// The next call reads the maps again. It removes new frontends and sets that are not in use; new backends of
		// an existing frontend stay until that frontend is replaced or deleted.
		d.frontends = nil
	}
	return err
}

// deleteOfOthers deletes the frontends that another tenant has exposed at the same addresses and ports, with all they
// have.
func (d *Tables) deleteOfOthers(frontends []dpapi.Frontend) error {
	for _, f := range frontends {
		key := keyOf(f.FrontendKey)
		if has := d.frontends[key]; has == nil || has.Exposed == f.Exposed.Services {
			continue
		}
		if err := d.delete(key); err != nil {
			return fmt.Errorf("delete the service that had address %v before: %w", f.Address, err)
		}
	}
	return nil
}

// fits refuses frontends for which the maps have no room, before anything changes.
func (d *Tables) fits(frontends []dpapi.Frontend) error {
	fronts, backends, parts := len(d.frontends), d.backends, d.exposed.parts
	addresses := map[bpfobj.PilasterAddr]bool{} // that are new
	for _, f := range frontends {
		if has := d.frontends[keyOf(f.FrontendKey)]; has == nil {
			fronts++
		} else {
			backends -= len(has.backends)
			if has.Exposed != 0 {
				parts -= partsOf(int(has.Count))
			}
		}
		backends += len(f.Backends) + len(f.Draining)
		if f.Exposed.Services == 0 {
			continue
		}
		if a := bpfobj.ToAddr(f.Address.Addr()); d.exposed.addresses[a] == 0 {
			addresses[a] = true
		}
		if len(f.Backends) > 0 {
			parts += partsOf(service.MaglevSize(len(f.Backends)))
		}
	}
	if fronts > MaxFrontends || backends > MaxBackends {
		return fmt.Errorf("%w: the services of this node's tenants would have %d ports and %d endpoints, and a node "+
			"has room for %d and %d; nothing was changed", endpoint.ErrExhausted, fronts, backends, MaxFrontends,
			MaxBackends)
	}
	if n := len(d.exposed.addresses) + len(addresses); n > MaxAddresses {
		return fmt.Errorf("%w: the services of this node's tenants would have %d addresses for hosts outside, and a "+
			"node has room for %d; nothing was changed", endpoint.ErrExhausted, n, MaxAddresses)
	}
	if parts > usedParts {
		return fmt.Errorf("%w: the exposed ports of this node's tenants would have tables of %d slots, and a node has "+
			"room for %d; nothing was changed: expose fewer services here", endpoint.ErrExhausted, parts*partSlots,
			usedParts*partSlots)
	}
	return nil
}

// change is a change of one frontend.
type change struct {
	wanted dpapi.Frontend
	key    bpfobj.PilasterSvcKey
	was    *frontend // nil: it is new
	is     *frontend
}

// prepare writes number, new backends and set of a frontend, which no packet uses yet.
func (d *Tables) prepare(c *change) error {
	o := d.objects()
	c.was = d.frontends[c.key]
	c.is = &frontend{backends: map[dpapi.Backend]*backend{}}
	had := map[dpapi.Backend]*backend{}
	if c.was != nil {
		c.is.PilasterSvc, had = c.was.PilasterSvc, c.was.backends
	} else {
		number, err := d.allocate()
		if err != nil {
			return err
		}
		c.is.Frontend = number
		if err := o.PilSvcfrontsV1.Put(number, bpfobj.PilasterSvcFrontend{Key: c.key}); err != nil {
			return fmt.Errorf("write its number: %w", err)
		}
	}
	for _, b := range slices.Concat(c.wanted.Backends, c.wanted.Draining) {
		if c.is.backends[b] != nil {
			continue
		}
		if c.is.backends[b] = had[b]; had[b] != nil {
			continue
		}
		number, err := d.allocate()
		if err == nil {
			err = d.addPeer(b.Plain)
		}
		if err == nil {
			err = o.PilSvcbacksV1.Put(number, entryOf(b, c.is.Frontend, false))
		}
		if err != nil {
			return fmt.Errorf("write endpoint %v: %w", b.Plain, err)
		}
		c.is.backends[b] = &backend{number: number}
		d.backends++
	}
	for _, b := range c.wanted.Backends {
		c.is.members = append(c.is.members, c.is.backends[b].number)
	}
	slices.Sort(c.is.members)
	c.is.members = slices.Compact(c.is.members)
	c.is.Affinity, c.is.Exposed = uint32(c.wanted.Affinity.Seconds()), c.wanted.Exposed.Services
	if c.was != nil && slices.Equal(c.was.members, c.is.members) {
		return nil
	}
	set, err := d.allocate()
	if err != nil {
		return err
	}
	if c.is.Exposed != 0 {
		slots := maglevNumbers(c.wanted.Backends, c.is.backends)
		c.is.Set, c.is.Count = set, uint32(len(slots))
		return d.writeMaglev(set, slots)
	}
	c.is.Set, c.is.Count = set, uint32(len(c.is.members))
	if err := bpfobj.WriteEntries(o.PilSvcsetsV1, keysOf(set, len(c.is.members)), c.is.members); err != nil {
		return fmt.Errorf("write a set of endpoints: %w", err)
	}
	return nil
}

// keysOf returns the keys of n members or parts of a set.
func keysOf(set uint32, n int) []bpfobj.PilasterSvcMember {
	keys := make([]bpfobj.PilasterSvcMember, n)
	for i := range keys {
		keys[i] = bpfobj.PilasterSvcMember{Set: set, Index: uint32(i)}
	}
	return keys
}

func entryOf(b dpapi.Backend, frontend uint32, draining bool) bpfobj.PilasterSvcBackend {
	return bpfobj.PilasterSvcBackend{
		Plain: bpfobj.ToAddr(b.Plain), Seen: bpfobj.ToAddr(b.Seen), Port: networkOrder(b.Port),
		Draining: uint8(bpfobj.BoolToUint32(draining)), Frontend: frontend,
	}
}

// commit makes packets use the frontend, and removes what it no longer has.
func (d *Tables) commit(c *change) error {
	o := d.objects()
	if err := d.expose(c.key, c.was, c.is); err != nil {
		return err
	}
	if c.was == nil || c.was.PilasterSvc != c.is.PilasterSvc {
		if err := o.PilSvcV1.Put(c.key, c.is.PilasterSvc); err != nil {
			return err
		}
	}
	d.frontends[c.key] = c.is
	drains := map[dpapi.Backend]bool{}
	for _, b := range c.wanted.Draining {
		drains[b] = true
	}
	for b, has := range c.is.backends {
		is := drains[b] && !slices.Contains(c.is.members, has.number)
		if is == has.draining {
			continue
		}
		if err := o.PilSvcbacksV1.Put(has.number, entryOf(b, c.is.Frontend, is)); err != nil {
			return fmt.Errorf("write endpoint %v: %w", b.Plain, err)
		}
		has.draining = is
	}
	if err := d.announce(c.key, c.was, c.is, c.wanted.Exposed.Node); err != nil || c.was == nil {
		return err
	}
	return d.remove(c.key, c.was, c.is)
}

// remove removes the set and the backends of a frontend that it no longer has; is is nil if the frontend is gone.
func (d *Tables) remove(key bpfobj.PilasterSvcKey, was, is *frontend) error {
	o := d.objects()
	if err := d.forget(key, was, is); err != nil {
		return err
	}
	if was.Exposed == 0 && (is == nil || is.Set != was.Set) {
		if err := bpfobj.DeleteKeys(o.PilSvcsetsV1, keysOf(was.Set, int(was.Count))); err != nil {
			return err
		}
	}
	for b, has := range was.backends {
		if is != nil && is.backends[b] == has {
			continue
		}
		if err := bpfobj.Delete(o.PilSvcbacksV1, has.number); err != nil {
			return fmt.Errorf("remove endpoint %v: %w", b.Plain, err)
		}
		d.backends--
		if err := d.removePeer(b.Plain); err != nil {
			return err
		}
	}
	return nil
}

func (d *Tables) addPeer(a netip.Addr) error {
	d.mustInvalidate = d.mustInvalidate || d.peers[a] == 0
	if err := d.objects().PilSvcpeersV1.Put(bpfobj.ToAddr(a), d.peers[a]+1); err != nil {
		return err
	}
	d.peers[a]++
	return nil
}

// removePeer leaves cached flows alone: they look for a session that no longer exists.
func (d *Tables) removePeer(a netip.Addr) error {
	d.peers[a]--
	if d.peers[a] > 0 {
		return d.objects().PilSvcpeersV1.Put(bpfobj.ToAddr(a), d.peers[a])
	}
	delete(d.peers, a)
	return bpfobj.Delete(d.objects().PilSvcpeersV1, bpfobj.ToAddr(a))
}

// DeleteServices deletes frontends.
func (d *Tables) DeleteServices(keys []dpapi.FrontendKey) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.read(); err != nil {
		return err
	}
	for _, k := range keys {
		if err := d.delete(keyOf(k)); err != nil {
			d.frontends = nil
			return fmt.Errorf("delete service %v: %w", k.Address, err)
		}
	}
	return nil
}

func (d *Tables) delete(k bpfobj.PilasterSvcKey) error {
	was := d.frontends[k]
	if was == nil {
		return nil
	}
	if err := d.conceal(k, was); err != nil {
		return err
	}
	if err := bpfobj.Delete(d.objects().PilSvcV1, k); err != nil {
		return err
	}
	delete(d.frontends, k)
	if err := d.remove(k, was, nil); err != nil {
		return err
	}
	return bpfobj.Delete(d.objects().PilSvcfrontsV1, was.Frontend)
}

// KeepServices deletes the frontends of a tenant that are not listed.
func (d *Tables) KeepServices(prefix netip.Prefix, keys []dpapi.FrontendKey) error {
	keep := map[dpapi.FrontendKey]bool{}
	for _, k := range keys {
		keep[k] = true
	}
	all, err := d.Services()
	if err != nil {
		return err
	}
	number := binary.BigEndian.Uint32(prefix.Addr().AsSlice()[4:]) & 0xffffff
	all = slices.DeleteFunc(all, func(k dpapi.FrontendKey) bool {
		return keep[k] || !prefix.Contains(k.Address.Addr()) && d.exposedBy(k) != number
	})
	return d.DeleteServices(all)
}
