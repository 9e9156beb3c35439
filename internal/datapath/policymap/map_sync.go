package policymap

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
)

// policyMap is one of the kernel's maps of policies.
type policyMap interface {
	change(policyChange) (mapChange, error)
	// usage is how many entries of it these tenants have.
	usage(tenants []*dpapi.TenantPolicies, room int) dpapi.Entries
}

// mapChange is the difference between a map and its wanted content.
type mapChange interface {
	checkCapacity(tenant string, room int) error // fails if there is no room
	write() error                                // writes what the map lacks
	deleteStale() error                          // deletes what the map no longer needs
}

// policyChange is a change of one tenant's policies, or of none if the maps are to hold only what the others have.
type policyChange struct {
	had, next dpapi.TenantPolicies
	others    []*dpapi.TenantPolicies // in force
	changing  []tenantChange          // of other tenants, at the same time
	pending   map[uint32]bool         // ids of tenants whose entries stay as they are
	synced    bool                    // the maps hold exactly what the others have and what this tenant had
}

// MapSync keeps one map in step with the tenants' policies: one entry for each entry of a tenant's own Go map. It
// computes entries when they are needed, so that no copy is kept.
type MapSync[K comparable, V any, Key, Value comparable] struct {
	Name, what string // for messages
	Kernel     *ebpf.Map
	EntriesOf  func(*dpapi.TenantPolicies) map[K]V
	size       func(*dpapi.TenantPolicies) int // of that
	Entry      func(K, V) (Key, Value)
	mayShare   func(a, b *dpapi.TenantPolicies) bool // whether two tenants may share entries; nil: never
	tenantIDOf func(Key) uint32                      // the tenant of an entry; nil: unknown
	Read       func(*ebpf.Map, map[Key]Value) error
	write      func(*ebpf.Map, []Key, []Value) error
}

func newMapSync[K comparable, V any, Key, Value comparable](
	name, what string,
	m *ebpf.Map,
	of func(*dpapi.TenantPolicies) map[K]V,
	entry func(K, V) (Key, Value),
) *MapSync[K, V, Key, Value] {
	return &MapSync[K, V, Key, Value]{
		Name:      name,
		what:      what,
		Kernel:    m,
		EntriesOf: of,
		size:      func(t *dpapi.TenantPolicies) int { return len(of(t)) },
		Entry:     entry,
		Read:      bpfobj.ReadEntries[Key, Value],
		write:     bpfobj.WriteEntries[Key, Value],
	}
}

func (r *MapSync[K, V, Key, Value]) usage(tenants []*dpapi.TenantPolicies, room int) dpapi.Entries {
	return dpapi.Entries{Table: r.Name, Used: r.count(tenants), Capacity: room}
}

// count returns the sum of the tenants' entries. An entry that two tenants share counts once for each of them.
func (r *MapSync[K, V, Key, Value]) count(tenants []*dpapi.TenantPolicies) (n int) {
	for _, t := range tenants {
		n += r.size(t)
	}
	return n
}

// growth is how many entries tenants will have more than now.
func (r *MapSync[K, V, Key, Value]) growth(changing []tenantChange) (n int) {
	for _, t := range changing {
		n += max(0, r.size(&t.next)-r.size(&t.had))
	}
	return n
}

func (r *MapSync[K, V, Key, Value]) change(c policyChange) (mapChange, error) { return r.compare(c) }

// compare computes how the map has to change. It reads the kernel only if its content is unknown.
func (r *MapSync[K, V, Key, Value]) compare(c policyChange) (*mapDiff[Key, Value], error) {
	d := &mapDiff[Key, Value]{
		what:   r.what,
		kernel: r.Kernel,
		put:    r.write,
		had:    r.size(&c.had),
		next:   r.size(&c.next),
		others: r.count(c.others) + r.growth(c.changing),
	}
	if c.synced {
		r.diffTenant(c, d)
		return d, nil
	}
	return d, r.diffKernel(c, d)
}

// diffTenant looks only at one tenant's entries, unless another tenant may share them.
func (r *MapSync[K, V, Key, Value]) diffTenant(c policyChange, d *mapDiff[Key, Value]) {
	had, next := r.EntriesOf(&c.had), r.EntriesOf(&c.next)
	var theirs []map[K]V
	for _, o := range c.others {
		if r.mayShare != nil && (r.mayShare(&c.had, o) || r.mayShare(&c.next, o)) {
			theirs = append(theirs, r.EntriesOf(o))
		}
	}
	d.before = d.had + d.others
	for k, v := range next {
		key, value := r.Entry(k, v)
		old, there := had[k]
		if !there {
			old, there = lookupFirst(theirs, k)
		}
		if !there {
			d.added.add(key, value)
		} else if _, is := r.Entry(k, old); is != value {
			d.changed.add(key, value)
		}
	}
	for k, v := range had {
		if _, stays := next[k]; stays {
			continue
		}
		key, is := r.Entry(k, v)
		if other, stays := lookupFirst(theirs, k); !stays {
			d.stale = append(d.stale, key)
		} else if _, value := r.Entry(k, other); is != value {
			d.changed.add(key, value)
		}
	}
}

func lookupFirst[K comparable, V any](in []map[K]V, k K) (v V, found bool) {
	for _, m := range in {
		if v, found = m[k]; found {
			return v, true
		}
	}
	return v, false
}

// diffKernel compares all entries with the kernel's.
func (r *MapSync[K, V, Key, Value]) diffKernel(c policyChange, d *mapDiff[Key, Value]) error {
	tenants, had := append([]*dpapi.TenantPolicies{&c.next}, c.others...), map[Key]Value{}
	if err := r.Read(r.Kernel, had); err != nil {
		return err
	}
	d.before = len(had)
	for _, t := range tenants {
		for k, v := range r.EntriesOf(t) {
			key, value := r.Entry(k, v)
			if is, there := had[key]; !there {
				d.added.add(key, value)
			} else if is != value {
				d.changed.add(key, value)
			}
			had[key] = value
		}
	}
	for _, t := range tenants {
		for k, v := range r.EntriesOf(t) {
			key, _ := r.Entry(k, v)
			delete(had, key)
		}
	}
	stays := r.isPending(c)
	for key := range had {
		if !stays(key) {
			d.stale = append(d.stale, key)
		}
	}
	return nil
}

// isPending returns a function that reports whether an entry that no tenant has may belong to a pending tenant.
func (r *MapSync[K, V, Key, Value]) isPending(c policyChange) func(Key) bool {
	if len(c.pending) == 0 {
		return func(Key) bool { return false }
	}
	if r.tenantIDOf != nil {
		return func(key Key) bool { return c.pending[r.tenantIDOf(key)] }
	}
	own := map[Key]bool{}
	if r.mayShare == nil {
		for k, v := range r.EntriesOf(&c.had) {
			key, _ := r.Entry(k, v)
			own[key] = true
		}
	}
	return func(key Key) bool { return !own[key] }
}

// mapDiff is what a map lacks, and what it has in excess.
type mapDiff[Key, Value any] struct {
	what   string
	kernel *ebpf.Map
	put    func(*ebpf.Map, []Key, []Value) error

	added, changed entries[Key, Value]
	stale          []Key

	before            int // entries of the map
	had, next, others int // of these: before and after the change, and of other tenants
}

type entries[Key, Value any] struct {
	keys   []Key
	values []Value
}

func (e *entries[Key, Value]) add(k Key, v Value) {
	e.keys, e.values = append(e.keys, k), append(e.values, v)
}

// checkCapacity returns an error if the map has no room, or if a tenant wants more than it leaves free: so one tenant
// alone gets at most half of the room, and there is always some left for others. A tenant that already has more keeps
// it. The kernel's maps have twice that room, so that old and new entries fit at the same time.
func (d *mapDiff[Key, Value]) checkCapacity(tenant string, room int) error {
	if free := room - d.others - d.next; d.next > d.had && d.next > free {
		return fmt.Errorf(
			"policies of tenant %s need %d entries for %s; a tenant may use at most half of what others leave of "+
				"the node's %d, and others use %d; nothing was changed: raise the agent's --max-rules, or simplify "+
				"the tenant's policies",
			tenant,
			d.next,
			d.what,
			room,
			d.others,
		)
	}
	most := d.before + len(d.added.keys)
	if n := most - len(d.stale); n > room {
		return fmt.Errorf(
			"policies need %d entries for %s, and the node has room for %d; nothing was changed: raise the agent's "+
				"--max-rules, or simplify policies",
			n,
			d.what,
			room,
		)
	}
	if both := int(d.kernel.MaxEntries()); most > both {
		return fmt.Errorf(
			"policies need %d entries for %s, including the ones in force until then, and there are %d; nothing "+
				"was changed: raise the agent's --max-rules, or change fewer policies at once",
			most,
			d.what,
			both,
		)
	}
	return nil
}

func (d *mapDiff[Key, Value]) write() error {
	return errors.Join(d.put(d.kernel, d.added.keys, d.added.values), d.put(d.kernel, d.changed.keys, d.changed.values))
}

func (d *mapDiff[Key, Value]) deleteStale() error { return bpfobj.DeleteKeys(d.kernel, d.stale) }
