package network

import (
	"fmt"
	"slices"
)

// Differ finds what mappings from the cluster change in a tenant's mappings on a node. V is what the network stores for
// one, K its key.
type Differ[K comparable, V any] struct {
	// Key is the key of a mapping, of which only tenant and prefix are set.
	Key func(Mapping) K
	// Place returns what the network stores for a mapping; false for one to this node, whose containers have entries of
	// their own. With an error of one mapping, nothing is changed.
	Place func(Mapping) (V, bool, error)
}

// Difference is what changes. No key is in both parts.
type Difference[K comparable, V any] struct {
	Put  map[K]V // new, changed or the same as before
	Gone []K     // possibly unknown
}

// Replace compares the mappings that a node has with the whole list.
func (d Differ[K, V]) Replace(has map[K]V, all []Mapping) (Difference[K, V], error) {
	change, err := d.place(all)
	for k := range has {
		if _, stays := change.Put[k]; !stays {
			change.Gone = append(change.Gone, k)
		}
	}
	return change, err
}

// Apply reads a change: removals, by prefix alone, before additions. A mapping that is now to this node is gone.
func (d Differ[K, V]) Apply(add, remove []Mapping) (Difference[K, V], error) {
	change, err := d.place(add)
	for _, m := range slices.Concat(remove, add) {
		if k := d.Key(m); !has(change.Put, k) {
			change.Gone = append(change.Gone, k)
		}
	}
	return change, err
}

func has[K comparable, V any](all map[K]V, k K) bool { _, ok := all[k]; return ok }

func (d Differ[K, V]) place(all []Mapping) (Difference[K, V], error) {
	change := Difference[K, V]{Put: make(map[K]V, len(all))}
	for _, m := range all {
		v, elsewhere, err := d.Place(m)
		if err != nil {
			return change, err
		}
		if elsewhere {
			change.Put[d.Key(m)] = v
		} else {
			delete(change.Put, d.Key(m))
		}
	}
	return change, nil
}

// BeforeList is the error of Apply before the first Replace.
func BeforeList(tenant string) error {
	return fmt.Errorf("tenant %s: an update of mappings before their first list; nothing was changed", tenant)
}
