package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// PutTenant makes the tenant's ids known, each with all of them beside it, and gives the cipher
// their keys.
func (d *Datapath) PutTenant(t tenant.Tenant) error {
	var value pilasterTenant
	if len(t.IDs) == 0 || len(t.IDs) > len(value.Ids) {
		return fmt.Errorf("tenant %s has %d ids, and a node takes 1 to %d of a tenant; nothing was changed: let the containers of the oldest end", t.Name, len(t.IDs), len(value.Ids))
	}
	gateways := make([]netip.Addr, len(t.IDs))
	for i, id := range t.IDs {
		value.Ids[i] = uint32(id.ID)
		guest, err := t.Gateway(d.config.Plan, d.config.NodePrefix, id)
		if err != nil {
			return err
		}
		gateways[i] = guest.Address
	}
	if t.Addressing == tenant.Clear {
		value.Clear = 1
	}
	// All keys before the first list that names them.
	for _, id := range t.IDs {
		if t.Addressing == tenant.Clear {
			break
		}
		if err := d.setKey(uint32(id.ID), id.Key); err != nil {
			return fmt.Errorf("tenant %s: %w", t.Name, err)
		}
	}
	for i, id := range t.IDs {
		value.Gateway = words(gateways[i])
		if err := d.objects.PilTenantsV2.Put(uint32(id.ID), value); err != nil {
			return fmt.Errorf("tenant %s: write id %d: %w", t.Name, id.ID, err)
		}
	}
	return d.Void()
}

// DeleteTenant forgets the tenant's ids and keys.
func (d *Datapath) DeleteTenant(t tenant.Tenant) error {
	for _, id := range t.IDs {
		for _, m := range []*ebpf.Map{d.objects.PilTenantsV2, d.objects.PilKeysV1} {
			if err := m.Delete(uint32(id.ID)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("tenant %s: remove id %d: %w", t.Name, id.ID, err)
			}
		}
	}
	return d.Void()
}

func (d *Datapath) setKey(id uint32, key address.Key) error {
	err := d.objects.PilKeysV1.Update(id, make([]byte, d.objects.PilKeysV1.ValueSize()), ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("room for the key of tenant id %d: %w", id, err)
	}
	request := pilasterKeyRequest{TenantId: id, Key: key}
	if _, err := d.objects.PilSetKey.Run(&ebpf.RunOptions{Context: &request, ContextOut: &request}); err != nil {
		return fmt.Errorf("give the kernel the key of tenant id %d: %w", id, err)
	}
	if request.Error != 0 {
		return fmt.Errorf("the kernel refuses the key of tenant id %d: %w; it must have ecb(aes) (CONFIG_CRYPTO_ECB, CONFIG_CRYPTO_AES)",
			id, syscall.Errno(-request.Error))
	}
	return nil
}

// Activate gives the endpoint's device its program and writes the map entries: from now on packets flow.
func (d *Datapath) Activate(r endpoint.Record) error {
	if err := d.kind(r).attach(r); err != nil {
		return err
	}
	if err := d.writeEntries(r); err != nil {
		return errors.Join(err, d.deactivate(r))
	}
	return d.Void()
}

func (d *Datapath) writeEntries(r endpoint.Record) error {
	d.owners.Store(uint32(r.Device.HostIfindex), r.ID)
	for _, a := range r.Attachments {
		err := d.objects.PilLocalsV1.Put(words(a.Plaintext).Lo, localEntry(r, a))
		if err == nil {
			err = d.objects.PilSourcesV2.Put(words(a.Address), sourceEntry(r, a))
		}
		if err == nil {
			err = d.addNodeRoute(a)
		}
		if err != nil {
			return fmt.Errorf("endpoint %d: write its entries: %w", r.ID, err)
		}
	}
	return nil
}

// eachLocal reads the containers' entries.
func (d *Datapath) eachLocal(f func(pilasterLocal)) error {
	var key uint64
	var local pilasterLocal
	entries := d.objects.PilLocalsV1.Iterate()
	for entries.Next(&key, &local) {
		f(local)
	}
	if err := entries.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("list the containers' entries: %w", err)
	}
	return nil
}

func localEntry(r endpoint.Record, a endpoint.Attachment) pilasterLocal {
	return pilasterLocal{
		Address: words(a.Address), Ifindex: uint32(r.Device.HostIfindex), Endpoint: uint32(r.ID),
		Checksum: difference(a.Plaintext, a.Address),
	}
}

func sourceEntry(r endpoint.Record, a endpoint.Attachment) pilasterSource {
	return pilasterSource{
		Plain: words(a.Plaintext), Ifindex: uint32(r.Device.HostIfindex), Endpoint: uint32(r.ID), TenantId: uint32(r.TenantID),
		Checksum: difference(a.Address, a.Plaintext),
	}
}

// deactivate takes the endpoint's entries and routes away.
func (d *Datapath) deactivate(r endpoint.Record) error {
	errs := []error{d.withdraw(r)}
	for _, dst := range routesTo(r) {
		errs = append(errs, d.deleteNodeRoute(dst))
	}
	return errors.Join(errs...)
}

func routesTo(r endpoint.Record) []*net.IPNet {
	routes := make([]*net.IPNet, len(r.Attachments))
	for i, a := range r.Attachments {
		routes[i] = hostNet(a.Address)
	}
	return routes
}

// withdraw takes the endpoint's map entries away: from now on nothing flows.
func (d *Datapath) withdraw(r endpoint.Record) error {
	for _, a := range r.Attachments {
		err := d.objects.PilSourcesV2.Delete(words(a.Address))
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("endpoint %d: remove its source entry: %w", r.ID, err)
		}
		err = d.objects.PilLocalsV1.Delete(words(a.Plaintext).Lo)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("endpoint %d: remove its entry: %w", r.ID, err)
		}
	}
	return d.Void()
}

// Lost looks for the devices of active endpoints, and says of those that are gone why they cannot be brought back.
func (d *Datapath) Lost(records []endpoint.Record) (gone map[endpoint.ID]error, err error) {
	gone = map[endpoint.ID]error{}
	var errs []error
	for id, lost := range d.lost(records) {
		var notFound netlink.LinkNotFoundError
		if errors.As(lost, &notFound) || errors.Is(lost, agent.ErrNoNamespace) {
			gone[id] = lost
		} else {
			errs = append(errs, lost) // it is there, or could not be looked for
		}
	}
	return gone, errors.Join(errs...)
}

// Lose takes away the entries of an endpoint whose device is gone.
func (d *Datapath) Lose(r endpoint.Record) error { return d.deactivate(r) }

// Remove takes away the entries first, then routes and device.
func (d *Datapath) Remove(_ context.Context, r endpoint.Record) error {
	if err := d.withdraw(r); err != nil {
		return err
	}
	if err := d.kind(r).remove(r, routesTo(r)...); err != nil {
		return err
	}
	d.owners.CompareAndDelete(uint32(r.Device.HostIfindex), r.ID)
	return nil
}
