package scenario

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// UnusedMap is a map that no program reads. Before a first packet of netpila, the run writes netpila's generations. In
// a scenario without a cache, it writes this map instead, so that it disturbs all compared scenarios equally.
type UnusedMap struct{ *ebpf.Map }

func NewUnusedMap() (*UnusedMap, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("create the unused map: %w", err)
	}
	return &UnusedMap{m}, nil
}

// Write increments a counter, once for each node.
func (t *UnusedMap) Write() error {
	for range len(Wire{}.Nodes) {
		var count uint32
		if err := t.Lookup(uint32(0), &count); err != nil {
			return err
		}
		if err := t.Put(uint32(0), count+1); err != nil {
			return err
		}
	}
	return nil
}

// Close accepts nil.
func (t *UnusedMap) Close() error {
	if t == nil {
		return nil
	}
	return t.Map.Close()
}
