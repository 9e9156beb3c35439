package bpfobj

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
)

// connectionEntries is the capacity of a table of connections: two entries a connection.
const connectionEntries = 1 << 16

// AddConnections gives a key of a map of maps (pil_gwnat_v1, pil_exconns_v1) a table of connections, unless it has one.
// The least recently used connection is evicted first.
func AddConnections[K any](of *ebpf.Map, key K) error {
	var id uint32
	err := of.Lookup(key, &id)
	if !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	connections, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "pil_gwconn", Type: ebpf.LRUHash, MaxEntries: connectionEntries,
		KeySize: uint32(unsafe.Sizeof(PilasterNatKey{})), ValueSize: uint32(unsafe.Sizeof(PilasterNatEntry{})),
	})
	if err != nil {
		return fmt.Errorf("make a table of connections: %w", err)
	}
	defer connections.Close()
	if err := of.Put(key, connections); err != nil {
		return fmt.Errorf("add a table of connections: %w; a node has %d at most", err, of.MaxEntries())
	}
	return nil
}
