package device

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/endpoint"
)

// macEntry returns the map entry with an endpoint's MAC, or false for a macvlan, whose MAC follows from its number.
func macEntry(r endpoint.Record) (device uint32, value bpfobj.PilasterDevMac, has bool) {
	n := copy(value.Mac[:], r.Device.ContainerMAC)
	return uint32(r.Device.HostIfindex), value, n == len(value.Mac) && r.Device.Kind != endpoint.Macvlan
}

// PutMAC writes the MAC that the programs give to packets to the endpoint. Flows that are cached keep the one before.
func (d *Devices) PutMAC(r endpoint.Record) error {
	device, value, has := macEntry(r)
	if !has {
		return nil
	}
	if err := d.Objects.PilMacsV1.Put(device, value); err != nil {
		return fmt.Errorf("endpoint %d: write its MAC: %w", r.ID, err)
	}
	return nil
}

func (d *Devices) deleteMAC(r endpoint.Record) error {
	device, _, has := macEntry(r)
	if !has {
		return nil
	}
	if err := d.Objects.PilMacsV1.Delete(device); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("endpoint %d: remove the entry of its MAC: %w", r.ID, err)
	}
	return nil
}

// RestoreMACs makes the map hold the MACs of these endpoints and no others.
func (d *Devices) RestoreMACs(found []endpoint.Record) error {
	devices := map[uint32]bool{}
	for _, r := range found {
		if err := d.PutMAC(r); err != nil {
			return err
		}
		devices[uint32(r.Device.HostIfindex)] = true
	}
	return bpfobj.DeleteOthers(d.Objects.PilMacsV1, devices)
}

func (d *Devices) checkMAC(r endpoint.Record) error {
	device, want, has := macEntry(r)
	if !has {
		return nil
	}
	var is bpfobj.PilasterDevMac
	if err := d.Objects.PilMacsV1.Lookup(device, &is); err != nil {
		return fmt.Errorf("map entry %s of device %d: %w", bpfobj.PinMacs, device, err)
	}
	if is != want {
		return fmt.Errorf("map entry %s of device %d is %x, not %x", bpfobj.PinMacs, device, is.Mac, want.Mac)
	}
	return nil
}
