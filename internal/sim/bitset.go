package sim

import (
	"math/bits"
	"slices"

	"pilaster.io/pilaster/internal/endpoint"
)

// bitset is a set of numbers.
type bitset []uint64

func (b *bitset) set(i int, is bool) {
	for i/64 >= len(*b) {
		*b = append(*b, 0)
	}
	if is {
		(*b)[i/64] |= 1 << (i % 64)
	} else {
		(*b)[i/64] &^= 1 << (i % 64)
	}
}

func (b bitset) has(i int) bool { return i/64 < len(b) && b[i/64]>>(i%64)&1 == 1 }

func (b bitset) count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}

// without returns the numbers that are not in other.
func (b bitset) without(other bitset) bitset {
	rest := slices.Clone(b)
	for i := range min(len(rest), len(other)) {
		rest[i] &^= other[i]
	}
	return rest
}

// active counts the endpoints that have entries.
type active struct {
	ids       bitset
	addresses int // of all these endpoints
}

func (a *active) add(r endpoint.Record) {
	if !a.ids.has(int(r.ID)) {
		a.ids.set(int(r.ID), true)
		a.addresses += len(r.Attachments)
	}
}

func (a *active) remove(r endpoint.Record) {
	if a.ids.has(int(r.ID)) {
		a.ids.set(int(r.ID), false)
		a.addresses -= len(r.Attachments)
	}
}
