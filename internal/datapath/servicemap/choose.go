package servicemap

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
)

// LookupExposed reads from the kernel whether an address has exposed ports.
func (d *Tables) LookupExposed(a netip.Addr) (node, found bool, err error) {
	kind, found, err := bpfobj.Lookup[uint32](d.objects().PilExposedV1, bpfobj.ToAddr(a))
	return kind == exposedNode, found, err
}

// LookupTarget reads from the kernel whether a port of a container is a backend of an exposed port.
func (d *Tables) LookupTarget(port netip.AddrPort, protocol uint8) (bool, error) {
	key := keyOf(dpapi.FrontendKey{Address: port, Protocol: protocol})
	_, found, err := bpfobj.Lookup[uint32](d.objects().PilExtargetsV1, key)
	return found, err
}

// ChooseBackend does with the tables what exposed_connection (exposed_nat.h) does with the first packet of a
// connection. It does not look for other connections that have the client's port at the same backend.
func (d *Tables) ChooseBackend(key dpapi.FrontendKey, client netip.AddrPort) (c dpapi.Choice, ok bool, err error) {
	o, at := d.objects(), keyOf(key)
	is, found, err := bpfobj.Lookup[bpfobj.PilasterSvc](o.PilSvcV1, at)
	if err != nil || !found || is.Exposed == 0 {
		return c, false, err
	}
	of := bpfobj.PilasterNatKey{
		Local: at.Address, Remote: bpfobj.ToAddr(client.Addr()), LocalPort: at.Port,
		RemotePort: networkOrder(client.Port()), Proto: at.Proto,
	}
	b, connected, err := d.connected(is, of)
	if err != nil || connected {
		return dpapi.Choice{Backend: backendOf(b), Connected: true}, connected, err
	}
	if is.Count == 0 {
		return c, false, nil
	}
	c.Slot = uint32(maglevHash(of, is.Affinity != 0)) % is.Count
	slots := uint32(partSlots)
	part, _, err := bpfobj.Lookup[bpfobj.PilasterMaglevPart](o.PilMaglevV1, bpfobj.PilasterSvcMember{
		Set: is.Set, Index: c.Slot / slots,
	})
	if err != nil {
		return c, false, fmt.Errorf("read a table of endpoints: %w", err)
	}
	b, found, err = bpfobj.Lookup[bpfobj.PilasterSvcBackend](o.PilSvcbacksV1, part.Backends[c.Slot%slots])
	c.Backend = backendOf(b)
	return c, found, err
}

// connected returns the backend of a connection that its next first segment keeps.
func (d *Tables) connected(is bpfobj.PilasterSvc, of bpfobj.PilasterNatKey) (
	b bpfobj.PilasterSvcBackend, ok bool, err error,
) {
	var id uint32
	if err := d.objects().PilExconnsV1.Lookup(is.Exposed, &id); errors.Is(err, ebpf.ErrKeyNotExist) {
		return b, false, nil
	} else if err != nil {
		return b, false, fmt.Errorf("read the connections to exposed ports: %w", err)
	}
	m, err := ebpf.NewMapFromID(ebpf.MapID(id))
	if err != nil {
		return b, false, fmt.Errorf("read the connections to exposed ports: %w", err)
	}
	defer m.Close()
	known, found, err := bpfobj.Lookup[bpfobj.PilasterNatEntry](m, of)
	if err != nil || !found {
		return b, false, err
	}
	b, found, err = bpfobj.Lookup[bpfobj.PilasterSvcBackend](d.objects().PilSvcbacksV1, known.Backend)
	return b, found && b.Frontend == is.Frontend && b.Draining == 0, err
}

// maglevHash is maglev_hash of exposed_nat.h.
func maglevHash(client bpfobj.PilasterNatKey, affinity bool) uint64 {
	h := client.Remote.Hi * 0x9e3779b97f4a7c15
	h = (h ^ h>>29 ^ client.Remote.Lo) * 0xc2b2ae3d27d4eb4f
	if !affinity {
		h ^= uint64(client.RemotePort)<<32 | uint64(client.LocalPort)<<16 | uint64(client.Proto)
		h = (h ^ h>>31 ^ client.Local.Hi ^ client.Local.Lo) * 0xc2b2ae3d27d4eb4f
	}
	h = (h ^ h>>31) * 0x9e3779b97f4a7c15
	return h ^ h>>32
}
