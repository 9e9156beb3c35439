package scenario

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// UnusedMap is a map that no program reads. Where a scenario has nothing to forget before a first packet, it is written
// as netpila's generations are, or this process would have disturbed the machine for one of two that are compared.
type UnusedMap struct{ *ebpf.Map }

func NewUnusedMap() (*UnusedMap, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("a map that nothing reads: %w", err)
	}
	return &UnusedMap{m}, nil
}

// Write counts, once for each node.
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

// Close does nothing to a table that was never made.
func (t *UnusedMap) Close() error {
	if t == nil {
		return nil
	}
	return t.Map.Close()
}
