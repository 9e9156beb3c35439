package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"syscall"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/servicemap"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

func netpilaPart() networkPart {
	return networkPart{
		maps: func(c Config) []pinnedMap {
			ids := c.MaxTenantIDs + 1 // one more for verifyCipher, also on a full node
			return []pinnedMap{
				{bpfobj.PilasterMapPilSourcesV2, bpfobj.PinSources, c.MaxEndpoints},
				{bpfobj.PilasterMapPilLocalsV1, bpfobj.PinLocals, c.MaxEndpoints},
				{bpfobj.PilasterMapPilTenantsV2, bpfobj.PinTenants, ids},
				{bpfobj.PilasterMapPilKeysV1, bpfobj.PinKeys, ids},
				{bpfobj.PilasterMapPilAccessV1, bpfobj.PinAccess, c.MaxRules},
				{bpfobj.PilasterMapPilEsourcesV1, bpfobj.PinEgressSources, c.MaxEndpoints},
				{bpfobj.PilasterMapPilElocalsV1, bpfobj.PinEgressLocals, c.MaxEndpoints},
				{bpfobj.PilasterMapPilGwtenantsV1, bpfobj.PinGatewayTenants, 0},
				{bpfobj.PilasterMapPilGwnatV1, bpfobj.PinGatewayNAT, 0},
				{bpfobj.PilasterMapPilGwsilentV1, bpfobj.PinGatewaySilent, 0},
				{bpfobj.PilasterMapPilSvcV1, bpfobj.PinServices, servicemap.MaxFrontends},
				{bpfobj.PilasterMapPilSvcfrontsV1, bpfobj.PinServiceFronts, servicemap.MaxFrontends},
				{bpfobj.PilasterMapPilSvcsetsV1, bpfobj.PinServiceSets, servicemap.MaxMembers},
				{bpfobj.PilasterMapPilSvcbacksV1, bpfobj.PinServiceBacks, servicemap.MaxBackends},
				{bpfobj.PilasterMapPilSvcpeersV1, bpfobj.PinServicePeers, servicemap.MaxBackends},
				{bpfobj.PilasterMapPilSvcpairsV1, bpfobj.PinServicePairs, 0},
				{bpfobj.PilasterMapPilSvcclientsV1, bpfobj.PinServiceClients, 0},
				{bpfobj.PilasterMapPilSvcnetnsV1, bpfobj.PinServiceNetns, c.MaxEndpoints},
				{bpfobj.PilasterMapPilSvcsocketsV1, bpfobj.PinServiceSockets, 0},
				{bpfobj.PilasterMapPilSvcudpV1, bpfobj.PinServiceDatagrams, 0},
				{bpfobj.PilasterMapPilExposedV1, bpfobj.PinExposed, servicemap.MaxAddresses},
				{bpfobj.PilasterMapPilExtargetsV1, bpfobj.PinExposedTargets, servicemap.MaxTargets},
				{bpfobj.PilasterMapPilMaglevV1, bpfobj.PinMaglev, servicemap.MaxParts},
				{bpfobj.PilasterMapPilExconnsV1, bpfobj.PinExposedConnections, 0},
				{bpfobj.PilasterMapPilServicesV1, bpfobj.PinServicePrograms, 0},
			}
		},
		constants: func(d *Datapath) map[string]any {
			own, _ := prefixWords(d.egressPrefix())
			all := map[string]any{
				bpfobj.PilasterVarClearDscp: d.config.ClearDSCP, bpfobj.PilasterVarOwnEgress: own,
			}
			if p, err := d.config.Plan.ServicePrefix(); err == nil {
				all[bpfobj.PilasterVarServicePrefix], all[bpfobj.PilasterVarServiceMask] = prefixWords(p)
			}
			if p := d.config.Plan.Egress; p.IsValid() {
				all[bpfobj.PilasterVarEgressPrefix], all[bpfobj.PilasterVarEgressMask] = prefixWords(p)
			}
			return all
		},
	}
}

// netpilaMaps are the maps of network netpila: two entries for each attachment and for each tenant id.
type netpilaMaps struct{ *Datapath }

// Netpila returns the data path of network netpila.
func (d *Datapath) Netpila() network.Dataplane { return netpilaMaps{d} }

// PutTenant writes the tenant's ids, each with all ids of the tenant, and gives their keys to the cipher.
func (d netpilaMaps) PutTenant(_ context.Context, t tenant.Tenant) error {
	var value bpfobj.PilasterTenant
	if len(t.IDs) == 0 || len(t.IDs) > len(value.Ids) {
		return fmt.Errorf(
			"tenant %s has %d ids, and a node supports 1 to %d of a tenant; nothing was changed: remove the "+
				"containers with the oldest id",
			t.Name,
			len(t.IDs),
			len(value.Ids),
		)
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
	value.Services = t.ServicesNumber
	// All keys before the first list that names them.
	for _, id := range t.IDs {
		if t.Addressing == tenant.Clear {
			break
		}
		if err := d.setKey(uint32(id.ID), id.Key); err != nil {
			return fmt.Errorf("tenant %s: %w", t.Name, err)
		}
	}
	was, known, err := bpfobj.Lookup[bpfobj.PilasterTenant](d.Objects.PilTenantsV2, uint32(t.IDs[0].ID))
	if err != nil {
		return fmt.Errorf("tenant %s: %w", t.Name, err)
	}
	for i, id := range t.IDs {
		value.Gateway = bpfobj.ToAddr(gateways[i])
		if err := d.Objects.PilTenantsV2.Put(uint32(id.ID), value); err != nil {
			return fmt.Errorf("tenant %s: write id %d: %w", t.Name, id.ID, err)
		}
		d.knownTenantIDs.Store(uint32(id.ID), true)
	}
	err = d.Egress.Put(t)
	if known && was.Services != value.Services {
		err = errors.Join(err, d.clients.SetTenant(t))
	}
	return errors.Join(err, d.InvalidateFlows())
}

// DeleteTenant removes the tenant's ids and keys. It leaves cached flows valid if none of the ids existed.
func (d netpilaMaps) DeleteTenant(_ context.Context, t tenant.Tenant) error {
	gone := false
	for _, id := range t.IDs {
		d.knownTenantIDs.Delete(uint32(id.ID))
		for _, m := range []*ebpf.Map{d.Objects.PilTenantsV2, d.Objects.PilKeysV1} {
			err := m.Delete(uint32(id.ID))
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return errors.Join(fmt.Errorf("tenant %s: remove id %d: %w", t.Name, id.ID, err), d.InvalidateFlows())
			}
			gone = gone || err == nil
		}
		some, err := d.Egress.Delete(id.ID)
		if err != nil {
			return errors.Join(fmt.Errorf("tenant %s: %w", t.Name, err), d.InvalidateFlows())
		}
		gone = gone || some
	}
	if !gone {
		return nil
	}
	return d.InvalidateFlows()
}

func (d *Datapath) setKey(id uint32, key address.Key) error {
	err := d.Objects.PilKeysV1.Update(id, make([]byte, d.Objects.PilKeysV1.ValueSize()), ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("make an entry for the key of tenant id %d: %w", id, err)
	}
	request := bpfobj.PilasterKeyRequest{TenantId: id, Key: key}
	if _, err := d.Objects.PilSetKey.Run(&ebpf.RunOptions{Context: &request, ContextOut: &request}); err != nil {
		return fmt.Errorf("give the kernel the key of tenant id %d: %w", id, err)
	}
	if request.Error != 0 {
		return fmt.Errorf(
			"the kernel refuses the key of tenant id %d: %w; it needs ecb(aes) (CONFIG_CRYPTO_ECB, CONFIG_CRYPTO_AES)",
			id,
			syscall.Errno(-request.Error),
		)
	}
	return nil
}

// Activate writes the endpoint's entries. From then on packets flow. After an error those of an endpoint that was
// active before stay as they are.
func (d netpilaMaps) Activate(ctx context.Context, r endpoint.Record) error {
	active := false
	for _, a := range r.Attachments {
		_, found, err := d.LookupSource(a.Address)
		if err != nil {
			return err
		}
		active = active || found
	}
	err := d.writeEntries(r)
	if err != nil && !active {
		return errors.Join(err, d.Deactivate(ctx, r))
	}
	return errors.Join(err, d.InvalidateFlows())
}

func (d netpilaMaps) writeEntries(r endpoint.Record) error {
	for _, a := range r.Attachments {
		err := d.Objects.PilLocalsV1.Put(bpfobj.ToAddr(a.Plaintext).Lo, epDstEntry(r, a))
		if err == nil {
			err = d.Objects.PilSourcesV2.Put(bpfobj.ToAddr(a.Address), epSrcEntry(r, a))
		}
		if err != nil {
			return fmt.Errorf("endpoint %d: write its entries: %w", r.ID, err)
		}
		if err := d.Egress.Activate(r, a); err != nil {
			return err
		}
	}
	return d.writeClient(r)
}

// writeClient makes an endpoint known as a client of services. A namespace that cannot be read is no error: the packets
// of the endpoint are then translated.
func (d *Datapath) writeClient(r endpoint.Record) error {
	if d.config.CgroupRoot == "" || len(r.Attachments) == 0 {
		return nil
	}
	cookie, err := device.CookieOf(r.Netns)
	if err != nil {
		d.Log.Debug("sockets of an endpoint get no backends of services when they connect", "endpoint", r.ID,
			"error", err)
		return nil
	}
	return d.clients.Put(r.ID, r.TenantID, r.Attachments[0].Address, cookie)
}

func epDstEntry(r endpoint.Record, a endpoint.Attachment) bpfobj.PilasterEpDst {
	return bpfobj.PilasterEpDst{
		Address: bpfobj.ToAddr(a.Address), Ifindex: uint32(r.Device.HostIfindex), Endpoint: uint32(r.ID),
		Checksum: bpfobj.ChecksumDiff(a.Plaintext, a.Address),
	}
}

func epSrcEntry(r endpoint.Record, a endpoint.Attachment) bpfobj.PilasterEpSrc {
	return bpfobj.PilasterEpSrc{
		Plain: bpfobj.ToAddr(
			a.Plaintext,
		), Ifindex: uint32(r.Device.HostIfindex), Endpoint: uint32(r.ID), TenantId: uint32(r.TenantID),
		Checksum: bpfobj.ChecksumDiff(a.Address, a.Plaintext),
	}
}

// Deactivate removes the endpoint's entries. From then on its packets are dropped.
func (d netpilaMaps) Deactivate(_ context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		err := d.Objects.PilSourcesV2.Delete(bpfobj.ToAddr(a.Address))
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("endpoint %d: remove its source entry: %w", r.ID, err)
		}
		err = d.Objects.PilLocalsV1.Delete(bpfobj.ToAddr(a.Plaintext).Lo)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("endpoint %d: remove its entry: %w", r.ID, err)
		}
	}
	if err := errors.Join(d.Egress.Deactivate(r), d.clients.Delete(r.ID)); err != nil {
		return err
	}
	return d.InvalidateFlows()
}

// Repair makes the maps match the records.
func (d netpilaMaps) Repair(_ context.Context, recorded, found []endpoint.Record) error {
	sources, locals, ids := map[bpfobj.PilasterAddr]bool{}, map[uint64]bool{}, map[uint32]bool{}
	for _, r := range recorded {
		ids[uint32(r.TenantID)] = true
	}
	if err := d.addSiblingIDs(ids); err != nil {
		return err
	}
	d.knownTenantIDs.Range(func(id, _ any) bool { ids[id.(uint32)] = true; return true })
	for _, r := range found {
		if err := d.writeEntries(r); err != nil {
			return err
		}
		for _, a := range r.Attachments {
			sources[bpfobj.ToAddr(a.Address)] = true
			locals[bpfobj.ToAddr(a.Plaintext).Lo] = true
		}
	}
	err := errors.Join(
		bpfobj.DeleteOthers(d.Objects.PilSourcesV2, sources),
		bpfobj.DeleteOthers(d.Objects.PilLocalsV1, locals),
		bpfobj.DeleteOthers(d.Objects.PilTenantsV2, ids),
		bpfobj.DeleteOthers(d.Objects.PilKeysV1, ids),
		d.Egress.Repair(found, ids),
		d.clients.Keep(found),
	)
	if err != nil {
		return err
	}
	return d.InvalidateFlows()
}

// addSiblingIDs adds the other ids of the tenants that own the given ones.
func (d netpilaMaps) addSiblingIDs(ids map[uint32]bool) error {
	for _, id := range slices.Collect(maps.Keys(ids)) {
		var t bpfobj.PilasterTenant
		err := d.Objects.PilTenantsV2.Lookup(id, &t)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read tenant id %d: %w", id, err)
		}
		for _, sibling := range t.Ids {
			ids[sibling] = true
		}
	}
	return nil
}

// Check compares the endpoint's and the tenant's entries.
func (d netpilaMaps) Check(_ context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		var local bpfobj.PilasterEpDst
		if err := d.Objects.PilLocalsV1.Lookup(bpfobj.ToAddr(a.Plaintext).Lo, &local); err != nil {
			return fmt.Errorf("endpoint %d: map entry %s of %v: %w", r.ID, bpfobj.PinLocals, a.Plaintext, err)
		}
		if local != epDstEntry(r, a) {
			return fmt.Errorf(
				"endpoint %d: map entry %s of %v says %v on device %d for endpoint %d",
				r.ID,
				bpfobj.PinLocals,
				a.Plaintext,
				local.Address.Addr(),
				local.Ifindex,
				local.Endpoint,
			)
		}
		var source bpfobj.PilasterEpSrc
		if err := d.Objects.PilSourcesV2.Lookup(bpfobj.ToAddr(a.Address), &source); err != nil {
			return fmt.Errorf("endpoint %d: map entry %s of %v: %w", r.ID, bpfobj.PinSources, a.Address, err)
		}
		if source != epSrcEntry(r, a) {
			return fmt.Errorf(
				"endpoint %d: map entry %s of %v says %v on device %d, tenant id %d, endpoint %d",
				r.ID,
				bpfobj.PinSources,
				a.Address,
				source.Plain.Addr(),
				source.Ifindex,
				source.TenantId,
				source.Endpoint,
			)
		}
	}
	for _, a := range r.Attachments {
		if err := d.Egress.Check(r, a); err != nil {
			return err
		}
	}
	var t bpfobj.PilasterTenant
	if err := d.Objects.PilTenantsV2.Lookup(uint32(r.TenantID), &t); err != nil {
		return fmt.Errorf("endpoint %d: map entry %s of tenant id %d: %w", r.ID, bpfobj.PinTenants, r.TenantID, err)
	}
	if t.Clear == 0 {
		if err := d.Objects.PilKeysV1.Lookup(uint32(r.TenantID), new([8]byte)); err != nil {
			return fmt.Errorf("endpoint %d: map entry %s of tenant id %d: %w", r.ID, bpfobj.PinKeys, r.TenantID, err)
		}
	}
	return nil
}

// Entries counts the entries in the kernel.
func (d netpilaMaps) Entries(context.Context) ([]network.Entries, error) {
	var all []network.Entries
	for _, t := range []struct {
		name string
		m    *ebpf.Map
		used func() (int, error)
	}{
		{"locals", d.Objects.PilLocalsV1, func() (int, error) { return countKeys[uint64](d.Objects.PilLocalsV1) }},
		{"sources", d.Objects.PilSourcesV2, func() (int,
			error) {
			return countKeys[bpfobj.PilasterAddr](d.Objects.PilSourcesV2)
		}},
		{"tenants", d.Objects.PilTenantsV2, func() (int, error) { return countKeys[uint32](d.Objects.PilTenantsV2) }},
		{"keys", d.Objects.PilKeysV1, func() (int, error) { return countKeys[uint32](d.Objects.PilKeysV1) }},
	} {
		n, err := t.used()
		if err != nil {
			return nil, fmt.Errorf("count the entries of %s: %w", t.name, err)
		}
		all = append(all, network.Entries{Table: t.name, Used: n, Capacity: int(t.m.MaxEntries())})
	}
	flows := int(d.Objects.PilFlows.MaxEntries())
	return append(all, network.Entries{Table: "flows", Used: flows, Capacity: flows, Cache: true}), nil
}

func countKeys[K comparable](m *ebpf.Map) (int, error) {
	keys, err := bpfobj.MapKeys[K](m)
	return len(keys), err
}

// TableNames returns the names of the pins.
func (d *Datapath) TableNames() dpapi.TableNames {
	return dpapi.TableNames{
		Sources: bpfobj.PinSources, Locals: bpfobj.PinLocals, Tenants: bpfobj.PinTenants, Keys: bpfobj.PinKeys,
		Access: bpfobj.PinAccess, Egress: bpfobj.PinEgressSources, Gateways: bpfobj.PinGatewayTenants,
		Services: bpfobj.PinServices, Backends: bpfobj.PinServiceBacks,
	}
}

// LookupSource reads the entry of a source address, as the container sees it.
func (d *Datapath) LookupSource(a netip.Addr) (dpapi.SourceEntry, bool, error) {
	v, found, err := bpfobj.Lookup[bpfobj.PilasterEpSrc](d.Objects.PilSourcesV2, bpfobj.ToAddr(a))
	if !found {
		return dpapi.SourceEntry{}, false, err
	}
	return dpapi.SourceEntry{
		Plaintext: v.Plain.Addr(), Device: v.Ifindex, Endpoint: endpoint.ID(v.Endpoint),
		TenantID: address.TenantID(v.TenantId),
	}, true, nil
}

// LookupLocal reads the entry of a plaintext address of this node.
func (d *Datapath) LookupLocal(plain netip.Addr) (dpapi.LocalEntry, bool, error) {
	v, found, err := bpfobj.Lookup[bpfobj.PilasterEpDst](d.Objects.PilLocalsV1, bpfobj.ToAddr(plain).Lo)
	if !found {
		return dpapi.LocalEntry{}, false, err
	}
	return dpapi.LocalEntry{Address: v.Address.Addr(), Device: v.Ifindex, Endpoint: endpoint.ID(v.Endpoint)}, true, nil
}

// LookupTenantID reads the entry of a tenant id.
func (d *Datapath) LookupTenantID(id address.TenantID) (dpapi.TenantEntry, bool, error) {
	v, found, err := bpfobj.Lookup[bpfobj.PilasterTenant](d.Objects.PilTenantsV2, uint32(id))
	if !found {
		return dpapi.TenantEntry{}, false, err
	}
	_, hasKey, err := bpfobj.Lookup[[8]byte](d.Objects.PilKeysV1, uint32(id))
	e := dpapi.TenantEntry{Clear: v.Clear != 0, Gateway: v.Gateway.Addr(), HasKey: hasKey}
	for _, id := range v.Ids {
		if id != 0 {
			e.IDs = append(e.IDs, address.TenantID(id))
		}
	}
	return e, true, err
}

// egressPrefix returns the /64 with this node's egress addresses. Registration refuses a node without one.
func (d *Datapath) egressPrefix() netip.Prefix {
	if p, ok := d.config.Plan.EgressNode(d.config.NodePrefix); ok {
		return p
	}
	return d.config.NodePrefix
}

var _ dpapi.EgressPath = (*Datapath)(nil)

// SetOwnAddresses sets the addresses of this node, which no egress rule leads to.
func (d *Datapath) SetOwnAddresses(own []netip.Addr) error {
	return errors.Join(d.Egress.SetOwnAddresses(own), d.InvalidateFlows())
}

// SetGatewayAlive says whether new connections use a gateway if their rule has another one.
func (d *Datapath) SetGatewayAlive(node netip.Prefix, alive bool) error {
	return d.Egress.SetGatewayAlive(node, alive)
}

// LookupAccess reads the entry with the longest prefix that contains an address.
func (d *Datapath) LookupAccess(id address.TenantID, to netip.Addr) (dpapi.AccessEntry, bool, error) {
	return d.Egress.Access(id, to)
}

// LookupEgress reads the egress address of an endpoint.
func (d *Datapath) LookupEgress(id endpoint.ID) (netip.Addr, bool, error) {
	return d.Egress.AddressOf(id)
}

// LookupGateway reads the address of this node as an egress gateway of a tenant id.
func (d *Datapath) LookupGateway(id address.TenantID) (netip.Addr, bool, error) {
	return d.Egress.GatewayOf(id)
}
