package policy

import (
	"maps"
	"math/bits"
	"slices"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// appSet is a bitmap of apps: bit i is the app at place i of the index.
type appSet []uint64

func (b appSet) has(i int) bool { return b[i/64]>>(i%64)&1 != 0 }
func (b appSet) add(i int)      { b[i/64] |= 1 << (i % 64) }
func (b appSet) any() bool {
	return slices.ContainsFunc(b, func(word uint64) bool { return word != 0 })
}
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

// values holds, for each value of a label, the places of the apps with this value. The places are a list and no bitmap,
// because most values have few apps.
type values map[string][]int

// Index finds the apps of a tenant by their labels, so that a selector does not have to visit each app. It stays valid
// while the apps and their labels are the same. Each known app has a place, in the order of apps. Two places follow:
// one for AnyApp (unknown) and one for Outside (outside).
type Index struct {
	apps       []address.AppID          // sorted
	own        []map[string]tenant.Port // the named ports of each app, nil if it has none
	words      int
	known      appSet
	everyone   appSet
	stranger   appSet // the place of unknown apps alone
	pods       map[string]values
	namespaces map[string]values // by the labels of namespaces
	names      values            // by the names of namespaces
	ports      map[string]map[tenant.Port]appSet
}

// NewIndex indexes all known apps by their identity labels.
func NewIndex(apps map[address.AppID]map[string]string) *Index {
	ix := &Index{
		apps: slices.Sorted(maps.Keys(apps)), words: (len(apps) + 2 + 63) / 64,
		pods: map[string]values{}, namespaces: map[string]values{}, names: values{},
		ports: map[string]map[tenant.Port]appSet{},
	}
	ix.known, ix.everyone, ix.stranger = ix.empty(), ix.empty(), ix.empty()
	ix.stranger.add(ix.unknown())
	for i := range len(apps) + 2 {
		ix.everyone.add(i)
	}
	for i, app := range ix.apps {
		id := tenant.ReadIdentity(apps[app])
		if len(id.Ports) == 0 {
			id.Ports = nil
		}
		ix.own = append(ix.own, id.Ports)
		ix.known.add(i)
		ix.names[id.Namespace] = append(ix.names[id.Namespace], i)
		for k, v := range id.Pod {
			put(ix.pods, k, v, i)
		}
		for k, v := range id.NamespaceLabels {
			put(ix.namespaces, k, v, i)
		}
		for name, port := range id.Ports {
			of := ix.ports[name]
			if of == nil {
				of = map[tenant.Port]appSet{}
				ix.ports[name] = of
			}
			if of[port] == nil {
				of[port] = ix.empty()
			}
			of[port].add(i)
		}
	}
	return ix
}

func put(labels map[string]values, key, value string, i int) {
	if labels[key] == nil {
		labels[key] = values{}
	}
	labels[key][value] = append(labels[key][value], i)
}

func (ix *Index) empty() appSet { return make(appSet, ix.words) }
func (ix *Index) unknown() int  { return len(ix.apps) }
func (ix *Index) outside() int  { return len(ix.apps) + 1 }

// namedPorts returns the named ports of the app at a place; unknown apps and peers outside have none.
func (ix *Index) namedPorts(i int) map[string]tenant.Port {
	if i < len(ix.own) {
		return ix.own[i]
	}
	return nil
}

// selected returns the apps that p selects.
func (ix *Index) selected(p Pods) appSet {
	out := slices.Clone(ix.known)
	if p.all() {
		out.add(ix.unknown())
		return out
	}
	if p.Namespace != "" {
		out.and(ix.of(ix.names[p.Namespace]))
	}
	ix.narrow(out, p.Namespaces, ix.namespaces)
	ix.narrow(out, p.Labels, ix.pods)
	return out
}

// narrow removes the apps whose labels do not fulfil every requirement.
func (ix *Index) narrow(out appSet, s Selector, labels map[string]values) {
	for _, r := range s {
		those, have := labels[r.Key], ix.empty()
		if r.Operator == In || r.Operator == NotIn {
			for _, v := range r.Values {
				have.addAll(those[v])
			}
		} else {
			for _, places := range those {
				have.addAll(places)
			}
		}
		if r.Operator == In || r.Operator == Exists {
			out.and(have)
		} else {
			out.minus(have)
		}
	}
}

func (ix *Index) of(places []int) appSet {
	b := ix.empty()
	b.addAll(places)
	return b
}

func (b appSet) addAll(places []int) {
	for _, i := range places {
		b.add(i)
	}
}

// each yields the places in a set, in ascending order.
func (b appSet) each(yield func(int) bool) {
	for w, word := range b {
		for ; word != 0; word &= word - 1 {
			if !yield(w*64 + bits.TrailingZeros64(word)) {
				return
			}
		}
	}
}
