package bpfobj

import (
	"unsafe"

	"github.com/cilium/ebpf"
)

// connectionEntries is the capacity of a table of connections: two entries a connection.
const connectionEntries = 1 << 16

// NewConnections returns a table of connections, as the maps of maps pil_gwnat_v1 and pil_exconns_v1 have them. The
// least recently used one is evicted first.
func NewConnections() (*ebpf.Map, error) {
	return ebpf.NewMap(&ebpf.MapSpec{
		Name: "pil_gwconn", Type: ebpf.LRUHash, MaxEntries: connectionEntries,
		KeySize: uint32(unsafe.Sizeof(PilasterNatKey{})), ValueSize: uint32(unsafe.Sizeof(PilasterNatEntry{})),
	})
}
