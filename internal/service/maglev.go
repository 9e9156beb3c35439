package service

import (
	"crypto/sha256"
	"encoding/binary"
)

// maglevSizes are prime sizes of tables.
var maglevSizes = []int{251, 509, 1021, 2039, 4093, 8191, 16381, 32749, MaxMaglev}

// MaxMaglev is the size of the largest table.
const MaxMaglev = 65521

// MaglevSize returns the size of the table for a number of backends: at least 400 slots a backend, as far as the
// largest table allows. With the 100 of Maglev §5.3, the loss of one of 100 backends would move 2.5 % of the slots;
// with 400 it moves 1.6 %.
func MaglevSize(backends int) int {
	for _, size := range maglevSizes {
		if size >= 400*backends {
			return size
		}
	}
	return MaxMaglev
}

// Maglev fills a table of slots with backends, given by their names: the index of one in each slot (Eisenbud et al.,
// NSDI 2016, §3.4). The same names in the same order give the same table on every node, and a change of one backend
// changes few slots of the others. The size is a prime.
func Maglev(names []string, size int) []int {
	type preference struct{ next, step int }
	prefers := make([]preference, len(names))
	for i, name := range names {
		sum := sha256.Sum256([]byte(name))
		prefers[i] = preference{
			next: int(binary.BigEndian.Uint64(sum[:]) % uint64(size)),
			step: int(binary.BigEndian.Uint64(sum[8:])%uint64(size-1)) + 1,
		}
	}
	slots := make([]int, size)
	for i := range slots {
		slots[i] = -1
	}
	for filled := 0; len(names) > 0; {
		for i := range prefers {
			p := &prefers[i]
			for slots[p.next] >= 0 {
				p.next = (p.next + p.step) % size
			}
			slots[p.next] = i
			if filled++; filled == size {
				return slots
			}
		}
	}
	return nil
}
