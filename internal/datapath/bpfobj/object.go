package bpfobj

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"reflect"

	"github.com/cilium/ebpf"
)

// object is the ELF file with all programs and maps.
var object = _PilasterBytes

// Replace makes LoadSpec and Version use another build of bpf/. It is for tests, before they load anything.
func Replace(elf []byte) { object = elf }

// LoadSpec reads the programs and maps of this build.
func LoadSpec() (*ebpf.CollectionSpec, error) {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
	if err != nil {
		return nil, fmt.Errorf("read the programs built into this binary: %w", err)
	}
	return spec, nil
}

// Version identifies the programs of this build: 12 hexadecimal digits, the same on all nodes that run it.
func Version() string {
	sum := sha256.Sum256(object)
	return hex.EncodeToString(sum[:6])
}

// MapsBySymbol returns the loaded maps by their names in the object.
func MapsBySymbol(o *PilasterObjects) map[string]*ebpf.Map {
	all, maps := map[string]*ebpf.Map{}, reflect.ValueOf(o.PilasterMaps)
	for i := range maps.NumField() {
		symbol := maps.Type().Field(i).Tag.Get("ebpf")
		if m, ok := maps.Field(i).Interface().(*ebpf.Map); ok && symbol != "" {
			all[symbol] = m
		}
	}
	return all
}
