package bpfobj

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// DeleteOthers deletes the entries of a map whose keys are not in keep.
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

// MapKeys returns the keys of a hash map. It starts again if the map changes meanwhile.
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

// ForEachEntry calls show with the entries of a hash map. An entry that is deleted meanwhile is left out.
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

// RawEntries returns the keys and values of a map as bytes.
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

// BatchSize is how many entries one system call reads or writes.
const BatchSize = 4096

// ReadEntries reads all entries of a map that no other process changes.
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

// WriteEntries writes entries, and replaces those that exist.
func WriteEntries[K, V any](m *ebpf.Map, keys []K, values []V) error {
	for len(keys) > 0 {
		n := min(len(keys), BatchSize)
		if err := retryAllocation(func() error {
			_, err := m.BatchUpdate(keys[:n], values[:n], nil)
			return err
		}); err != nil {
			return fmt.Errorf("%v: %w", m, err)
		}
		keys, values = keys[n:], values[n:]
	}
	return nil
}

// The kernel takes the entries of maps with BPF_F_NO_PREALLOC from a small reserve of each CPU, which it refills in the
// background. A long batch can empty it, so a lack of memory is final only if it lasts.
const (
	maxAllocations = 50
	refillTime     = 2 * time.Millisecond
)

// retryAllocation repeats a write that the kernel refuses for lack of memory. The write must be idempotent.
func retryAllocation(write func() error) (err error) {
	for range maxAllocations {
		if err = write(); !errors.Is(err, unix.ENOMEM) {
			return err
		}
		time.Sleep(refillTime)
	}
	return err
}

// DeleteKeys deletes entries, which may be gone already.
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

// Delete deletes an entry, which may be gone already.
func Delete(m *ebpf.Map, key any) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("%v: %w", m, err)
	}
	return nil
}

// Lookup reads one entry of a map.
func Lookup[V any](m *ebpf.Map, key any) (value V, found bool, err error) {
	err = m.Lookup(key, &value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return value, false, nil
	}
	if err != nil {
		return value, false, fmt.Errorf("read %v: %w", m, err)
	}
	return value, true, nil
}
