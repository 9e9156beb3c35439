package tables

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/network/evpn"
	"pilaster.io/pilaster/internal/network/evpn/traced"
	"pilaster.io/pilaster/internal/network/nimitz"
)

// Config has the sizes of the tables.
type Config struct {
	Endpoints int // maximum of containers
	Mappings  int // maximum of forwarding entries, and of other speakers' sources
}

// Symbols of the object file.
const (
	sendersMap = "evpn_senders_v1"
	foreignMap = "evpn_foreign_v1"
	forwardMap = "evpn_forward_v1"
	vtepsMap   = "evpn_vteps_v1"
	entry      = "pil_evpn"
	fromTunnel = "pil_evpn_in"
)

// Switch is the switch of network evpn, whose maps are pinned and outlive this process.
type Switch struct {
	*datapath.Nimitz
	objects *ebpf.Collection
}

var _ nimitz.Switch = (*Switch)(nil)

// Open loads the programs, and makes them those of the network's containers and of packets from its tunnels.
func Open(path *datapath.Datapath, c Config) (*Switch, error) {
	spec, err := loadObject()
	if err != nil {
		return nil, fmt.Errorf("read the programs of network %s: %w", evpn.Name, err)
	}
	return open(path, spec, c)
}

func open(path *datapath.Datapath, spec *ebpf.CollectionSpec, c Config) (*Switch, error) {
	own, ok := path.OwnVTEP4()
	if !ok {
		return nil, fmt.Errorf("the prefix of --%s has no tunnel address for this node, whose number is too high; "+
			"nothing was changed: use a shorter prefix", evpn.Name)
	}
	if err := spec.Variables["own_vtep4"].Set(binary.NativeEndian.Uint32(own.AsSlice())); err != nil {
		return nil, fmt.Errorf("set own_vtep4: %w", err)
	}
	spec.Maps[sendersMap].MaxEntries = uint32(2 * c.Endpoints) // an address of each family
	spec.Maps[foreignMap].MaxEntries = uint32(2 * c.Mappings)  // routed and bridged
	spec.Maps[forwardMap].MaxEntries = uint32(c.Mappings)
	spec.Maps[vtepsMap].MaxEntries = uint32(c.Endpoints) // as many tenants
	objects, err := path.LoadNetwork(spec)
	if err != nil {
		return nil, err
	}
	n, err := path.Switch4(
		evpn.Name, device.EntryProgram{Program: objects.Programs[entry], Name: entry}, objects.Programs[fromTunnel],
		datapath.TunnelTables{
			Senders: objects.Maps[sendersMap], Foreign: objects.Maps[foreignMap], Forward: objects.Maps[forwardMap],
			Replication: objects.Maps[vtepsMap],
		},
	)
	if err != nil {
		objects.Close()
		return nil, err
	}
	path.AddTraced(traced.Spec)
	return &Switch{n, objects}, nil
}

// Close releases this process's handles; packets keep flowing.
func (s *Switch) Close() error {
	s.objects.Close()
	return nil
}

// Programs returns the programs of containers and of packets from the tunnels, for tests.
func (s *Switch) Programs() (container, tunnel *ebpf.Program) {
	return s.objects.Programs[entry], s.objects.Programs[fromTunnel]
}
