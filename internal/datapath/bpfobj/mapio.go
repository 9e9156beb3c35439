package bpfobj

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// deleteOthers removes the entries of a map whose keys are not among those to keep.
func DeleteOthers[K comparable](m *ebpf.Map, keep map[K]bool) error {
	keys, err := MapKeys[K](m)
	if err != nil {
		return err
	}
	for _, k := range keys {
		if keep[k] {
			continue
		}
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("sweep %v: %w", m, err)
		}
	}
	return nil
}

// mapKeys lists a hash map's keys. A map that changes meanwhile is listed again.
func MapKeys[K comparable](m *ebpf.Map) ([]K, error) {
	for {
		var keys []K
		var key K
		var value []byte
		entries := m.Iterate()
		for entries.Next(&key, &value) {
			keys = append(keys, key)
		}
		if err := entries.Err(); !errors.Is(err, ebpf.ErrIterationAborted) {
			return keys, err
		}
	}
}

func ReadPinned(pin string, read func(*ebpf.Map) error) error {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer m.Close()
	return read(m)
}

// forEachEntry shows the entries of a hash map. One that goes meanwhile is left out.
func ForEachEntry[K comparable, V any](m *ebpf.Map, show func(K, V)) error {
	keys, err := MapKeys[K](m)
	if err != nil {
		return err
	}
	for _, k := range keys {
		var v V
		err := m.Lookup(k, &v)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		show(k, v)
	}
	return nil
}

// rawEntries reads a table as it is.
func RawEntries(m *ebpf.Map) (keys, values [][]byte, err error) {
	for {
		keys, values = nil, nil
		var key, value []byte
		entries := m.Iterate()
		for entries.Next(&key, &value) {
			keys, values = append(keys, bytes.Clone(key)), append(values, bytes.Clone(value))
		}
		if err := entries.Err(); !errors.Is(err, ebpf.ErrIterationAborted) {
			return keys, values, err
		}
	}
}

// batchSize are read or written with one call.
const BatchSize = 4096

// readEntries takes all of a table that nobody else writes to.
func ReadEntries[K comparable, V any](m *ebpf.Map, into map[K]V) error {
	return ForEachBatch(m, make([]K, BatchSize), make([]V, BatchSize), func(k []K, v []V) {
		for i := range k {
			into[k[i]] = v[i]
		}
	})
}

func ForEachBatch[K, V any](m *ebpf.Map, keys []K, values []V, do func([]K, []V)) error {
	each := len(values) / len(keys)
	for cursor := new(ebpf.MapBatchCursor); ; {
		n, err := m.BatchLookup(cursor, keys, values, nil)
		do(keys[:n], values[:n*each])
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read %v: %w", m, err)
		}
	}
}

func WriteEntries[K, V any](m *ebpf.Map, keys []K, values []V) error {
	for len(keys) > 0 {
		n := min(len(keys), BatchSize)
		if _, err := m.BatchUpdate(keys[:n], values[:n], nil); err != nil {
			return fmt.Errorf("%v: %w", m, err)
		}
		keys, values = keys[n:], values[n:]
	}
	return nil
}

// deleteKeys takes away what may be gone already.
func DeleteKeys[K any](m *ebpf.Map, keys []K) error {
	for len(keys) > 0 {
		n, err := m.BatchDelete(keys[:min(len(keys), BatchSize)], nil)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			n, err = n+1, nil
		}
		if err != nil {
			return fmt.Errorf("%v: %w", m, err)
		}
		keys = keys[n:]
	}
	return nil
}
