package policy

import (
	"maps"
	"math/bits"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// appSet is apps by their places in the index.
type appSet []uint64

func (b appSet) has(i int) bool { return b[i/64]>>(i%64)&1 != 0 }
func (b appSet) add(i int)      { b[i/64] |= 1 << (i % 64) }
func (b appSet) or(o appSet) {
	for i := range b {
		b[i] |= o[i]
	}
}
func (b appSet) and(o appSet) {
	for i := range b {
		b[i] &= o[i]
	}
}
func (b appSet) minus(o appSet) {
	for i := range b {
		b[i] &^= o[i]
	}
}

// values are the apps that have a label, by its value.
type values map[string]appSet

// index knows which apps have which labels, so that a selector does not have to ask each. Behind the apps that are
// known there are two places more: that of AnyApp, and that of Outside.
type index struct {
	apps       []address.AppID // in order
	ids        []tenant.Identity
	words      int
	known      appSet
	everyone   appSet
	none       appSet
	stranger   appSet // who is not known
	pods       map[string]values
	namespaces map[string]values // by the labels of namespaces
	names      values            // by the names of namespaces
	ports      map[string]map[tenant.Port]appSet
}

func newIndex(apps map[address.AppID]map[string]string) *index {
	ix := &index{
		apps: slices.Sorted(maps.Keys(apps)), words: (len(apps) + 2 + 63) / 64,
		pods: map[string]values{}, namespaces: map[string]values{}, names: values{}, ports: map[string]map[tenant.Port]appSet{},
	}
	ix.known, ix.everyone, ix.none, ix.stranger = ix.empty(), ix.empty(), ix.empty(), ix.empty()
	ix.stranger.add(ix.unknown())
	for i := range len(apps) + 2 {
		ix.everyone.add(i)
	}
	for i, app := range ix.apps {
		id := tenant.ReadIdentity(apps[app])
		ix.ids = append(ix.ids, id)
		ix.known.add(i)
		put(ix, ix.names, id.Namespace, i)
		for k, v := range id.Pod {
			put(ix, in(ix.pods, k), v, i)
		}
		for k, v := range id.NamespaceLabels {
			put(ix, in(ix.namespaces, k), v, i)
		}
		for name, port := range id.Ports {
			put(ix, in(ix.ports, name), port, i)
		}
	}
	return ix
}

// in is the map at a key, made where there is none.
func in[K, V comparable, M ~map[V]appSet](m map[K]M, key K) M {
	if m[key] == nil {
		m[key] = M{}
	}
	return m[key]
}

func put[V comparable, M ~map[V]appSet](ix *index, m M, value V, i int) {
	if m[value] == nil {
		m[value] = ix.empty()
	}
	m[value].add(i)
}

func (ix *index) empty() appSet { return make(appSet, ix.words) }
func (ix *index) unknown() int  { return len(ix.apps) }
func (ix *index) outside() int  { return len(ix.apps) + 1 }

// identity is that of a place; who is not known, or outside, has none.
func (ix *index) identity(i int) tenant.Identity {
	if i < len(ix.ids) {
		return ix.ids[i]
	}
	return tenant.Identity{}
}

// selected are the apps that Pods select.
func (ix *index) selected(p Pods) appSet {
	out := slices.Clone(ix.known)
	if p.all() {
		out.add(ix.unknown())
		return out
	}
	if p.Namespace != "" {
		out.and(ix.having(ix.names, p.Namespace))
	}
	ix.narrow(out, p.Namespaces, ix.namespaces)
	ix.narrow(out, p.Labels, ix.pods)
	return out
}

// narrow takes away the apps whose labels do not fulfil each requirement.
func (ix *index) narrow(out appSet, s Selector, labels map[string]values) {
	for _, r := range s {
		those := labels[r.Key]
		if r.Operator == In && len(r.Values) == 1 {
			out.and(ix.having(those, r.Values[0]))
			continue
		}
		have := ix.empty()
		if r.Operator == In || r.Operator == NotIn {
			for _, v := range r.Values {
				have.or(ix.having(those, v))
			}
		} else {
			for _, b := range those {
				have.or(b)
			}
		}
		if r.Operator == In || r.Operator == Exists {
			out.and(have)
		} else {
			out.minus(have)
		}
	}
}

func (ix *index) having(v values, value string) appSet {
	if b := v[value]; b != nil {
		return b
	}
	return ix.none
}

// each yields the places in a set, in order.
func (b appSet) each(yield func(int) bool) {
	for w, word := range b {
		for ; word != 0; word &= word - 1 {
			if !yield(w*64 + bits.TrailingZeros64(word)) {
				return
			}
		}
	}
}
