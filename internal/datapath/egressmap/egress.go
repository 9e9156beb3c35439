package egressmap

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// Tables are the maps of egress of one node.
type Tables struct {
	host *host.Host

	mu      sync.Mutex
	entries map[bpfobj.PilasterAccessKey]bpfobj.PilasterAccessRule // of pil_access_v1; nil before they were read
	own     []netip.Addr

	gateways sync.Mutex // held while gateways change
}

// New returns the tables of a node. Nothing is read before the maps are loaded.
func New(h *host.Host) *Tables { return &Tables{host: h} }

func (d *Tables) objects() *bpfobj.PilasterObjects { return &d.host.Objects }

// Actions of enum access_action.
const (
	accessDeny    = uint32(dpapi.AccessDeny)
	accessOutside = uint32(dpapi.AccessOutside)
	accessGateway = uint32(dpapi.AccessGateway)
	accessNode    = uint32(dpapi.AccessNode)
)

// allTenants takes the place of a tenant id: prefixes that no rule of any tenant leads to.
const allTenants address.TenantID = 0

func accessKey(id address.TenantID, p netip.Prefix) bpfobj.PilasterAccessKey {
	return bpfobj.PilasterAccessKey{
		Bits: 32 + uint32(p.Bits()), Tenant: uint32(id), Address: bpfobj.ToAddr(p.Masked().Addr()),
	}
}

// accessRules returns the entries of one tenant id: the nodes that the tenant reaches, and its egress rules. Without
// egress rules it has none for hosts outside, and with some of them a last rule denies the rest.
func accessRules(t tenant.Tenant) map[netip.Prefix]bpfobj.PilasterAccessRule {
	all := map[netip.Prefix]bpfobj.PilasterAccessRule{}
	if len(t.Egress) > 0 {
		all[endpoint.DefaultRoute] = bpfobj.PilasterAccessRule{Action: accessDeny}
		for _, p := range t.Protected {
			all[p] = bpfobj.PilasterAccessRule{Action: accessDeny}
		}
	}
	for _, r := range t.Egress {
		rule := bpfobj.PilasterAccessRule{Action: accessDeny}
		if r.Allow {
			rule.Action = accessOutside
		}
		for i, g := range r.Via {
			rule.Action = accessGateway
			rule.Gateways[i] = bpfobj.ToAddr(g.Prefix.Addr()).Hi
		}
		all[r.To] = rule
	}
	for _, p := range t.Nodes {
		all[p] = bpfobj.PilasterAccessRule{Action: accessNode}
	}
	return all
}

// read reads the entries from the kernel, once. The caller holds the lock.
func (d *Tables) read() error {
	if d.entries != nil {
		return nil
	}
	all := map[bpfobj.PilasterAccessKey]bpfobj.PilasterAccessRule{}
	err := bpfobj.ForEachEntry(d.objects().PilAccessV1,
		func(k bpfobj.PilasterAccessKey, v bpfobj.PilasterAccessRule) { all[k] = v })
	if err != nil {
		return fmt.Errorf("read the egress rules: %w", err)
	}
	d.entries = all
	return nil
}

// setAccess makes the entries of one tenant id what they should be. Of two states that differ in several prefixes,
// packets meet a mixture that allows no more than both do: denials are written first and removed last.
func (d *Tables) setAccess(id address.TenantID, rules map[netip.Prefix]bpfobj.PilasterAccessRule) (changed bool,
	err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.read(); err != nil {
		return false, err
	}
	wanted := map[bpfobj.PilasterAccessKey]bpfobj.PilasterAccessRule{}
	for p, r := range rules {
		wanted[accessKey(id, p)] = r
	}
	var more, less []bpfobj.PilasterAccessKey
	for k, r := range wanted {
		if had, ok := d.entries[k]; !ok || had != r {
			more = append(more, k)
		}
	}
	for k := range d.entries {
		if _, stays := wanted[k]; k.Tenant == uint32(id) && !stays {
			less = append(less, k)
		}
	}
	denials := func(of map[bpfobj.PilasterAccessKey]bpfobj.PilasterAccessRule, sign int) func(a,
		b bpfobj.PilasterAccessKey) int {
		return func(a, b bpfobj.PilasterAccessKey) int {
			isDenial := func(k bpfobj.PilasterAccessKey) bool { return of[k].Action == accessDeny }
			return -sign * cmp.Compare(bpfobj.BoolToUint32(isDenial(a)), bpfobj.BoolToUint32(isDenial(b)))
		}
	}
	slices.SortFunc(more, denials(wanted, 1))
	slices.SortFunc(less, denials(d.entries, -1))
	for _, k := range more {
		if err := d.objects().PilAccessV1.Put(k, wanted[k]); err != nil {
			return true, d.accessFull(err)
		}
		d.entries[k] = wanted[k]
	}
	for _, k := range less {
		if err := bpfobj.Delete(d.objects().PilAccessV1, k); err != nil {
			return true, fmt.Errorf("remove an egress rule: %w", err)
		}
		delete(d.entries, k)
	}
	return len(more)+len(less) > 0, nil
}

func (d *Tables) accessFull(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.E2BIG) {
		return fmt.Errorf("%w: the table of egress rules has %d entries, and all are in use; start the agent with a "+
			"higher --max-rules", endpoint.ErrExhausted, d.objects().PilAccessV1.MaxEntries())
	}
	return fmt.Errorf("write an egress rule: %w", err)
}

// protect writes the prefixes that no rule leads to: those of the cluster, and the addresses of this node. They are
// there before any rule of a tenant is.
func (d *Tables) protect() error {
	d.mu.Lock()
	own := d.own
	d.mu.Unlock()
	all := map[netip.Prefix]bpfobj.PilasterAccessRule{}
	for _, p := range tenant.AlwaysProtected(d.host.Plan) {
		all[p] = bpfobj.PilasterAccessRule{Action: accessDeny}
	}
	if own == nil { // not known yet: those that an earlier process has written stay
		for _, p := range d.hostEntries() {
			all[p] = bpfobj.PilasterAccessRule{Action: accessDeny}
		}
	}
	for _, a := range own {
		if a.Is6() && !a.Is4In6() {
			all[netip.PrefixFrom(a.WithZone(""), a.BitLen())] = bpfobj.PilasterAccessRule{Action: accessDeny}
		}
	}
	if _, err := d.setAccess(allTenants, all); err != nil {
		return fmt.Errorf("protected prefixes: %w", err)
	}
	return nil
}

// hostEntries returns the single addresses that are protected from all tenants.
func (d *Tables) hostEntries() (all []netip.Prefix) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.read(); err != nil {
		return nil // setAccess reads again, and reports it
	}
	for k := range d.entries {
		if k.Tenant == uint32(allTenants) && k.Bits == 32+128 {
			all = append(all, netip.PrefixFrom(k.Address.Addr(), 128))
		}
	}
	return all
}

// SetOwnAddresses sets the addresses of this node, which no egress rule leads to. The caller invalidates the flows.
func (d *Tables) SetOwnAddresses(own []netip.Addr) error {
	d.mu.Lock()
	d.own = append([]netip.Addr{}, own...) // not nil
	d.mu.Unlock()
	return d.protect()
}

// Put writes rules and gateway of a tenant. The caller invalidates the flows.
func (d *Tables) Put(t tenant.Tenant) error {
	rules := accessRules(t)
	if len(rules) > 0 {
		if err := d.protect(); err != nil {
			return err
		}
	}
	address := gatewayAddress(t, d.host.NodePrefix)
	if address.IsValid() {
		if err := d.putGateway(t, address); err != nil {
			return fmt.Errorf("tenant %s: %w", t.Name, err)
		}
	}
	for _, id := range t.IDs {
		if _, err := d.setAccess(id.ID, rules); err != nil {
			return fmt.Errorf("tenant %s: %w", t.Name, err)
		}
		if address.IsValid() {
			continue
		}
		if err := d.deleteGateway(id.ID); err != nil {
			return fmt.Errorf("tenant %s: %w", t.Name, err)
		}
	}
	return nil
}

// Delete removes rules and gateway of a tenant id, and reports whether it had rules.
func (d *Tables) Delete(id address.TenantID) (gone bool, err error) {
	gone, err = d.setAccess(id, nil)
	return gone, errors.Join(err, d.deleteGateway(id))
}

// gatewayAddress returns the address of a node as a gateway of the tenant; invalid if it is none.
func gatewayAddress(t tenant.Tenant, node netip.Prefix) netip.Addr {
	for _, r := range t.Egress {
		for _, g := range r.Via {
			if g.Prefix == node {
				return g.Address
			}
		}
	}
	return netip.Addr{}
}

// putGateway makes this node a gateway of a tenant: a table of connections, and then the address of its ids.
func (d *Tables) putGateway(t tenant.Tenant, address netip.Addr) error {
	d.gateways.Lock()
	defer d.gateways.Unlock()
	key := bpfobj.ToAddr(address)
	if err := bpfobj.AddConnections(d.objects().PilGwnatV1, key); err != nil {
		return fmt.Errorf("gateway %v: %w", address, err)
	}
	for _, own := range t.IDs {
		had, found, err := bpfobj.Lookup[bpfobj.PilasterAddr](d.objects().PilGwtenantsV1, uint32(own.ID))
		if err == nil && found && had == key {
			continue
		}
		if err == nil {
			err = d.objects().PilGwtenantsV1.Put(uint32(own.ID), key)
		}
		if err == nil && found {
			err = d.deleteUnused(had)
		}
		if err != nil {
			return fmt.Errorf("gateway of tenant id %d: %w", own.ID, err)
		}
	}
	return nil
}

// deleteGateway removes the gateway of a tenant id, and its connections if no other id has it.
func (d *Tables) deleteGateway(id address.TenantID) error {
	d.gateways.Lock()
	defer d.gateways.Unlock()
	had, found, err := bpfobj.Lookup[bpfobj.PilasterAddr](d.objects().PilGwtenantsV1, uint32(id))
	if !found || err != nil {
		return err
	}
	if err := d.objects().PilGwtenantsV1.Delete(uint32(id)); err != nil {
		return fmt.Errorf("remove the gateway of tenant id %d: %w", id, err)
	}
	return d.deleteUnused(had)
}

// deleteUnused removes the connections of an address that no tenant has any more. Connections of other addresses stay:
// at a start their tenants may not be known yet.
func (d *Tables) deleteUnused(address bpfobj.PilasterAddr) error {
	used := false
	err := bpfobj.ForEachEntry(d.objects().PilGwtenantsV1,
		func(_ uint32, a bpfobj.PilasterAddr) { used = used || a == address })
	if err == nil && !used {
		err = bpfobj.Delete(d.objects().PilGwnatV1, address)
	}
	if err != nil {
		return fmt.Errorf("remove the connections of gateway %v: %w", address.Addr(), err)
	}
	return nil
}

// sweepGateways removes connections of addresses that no tenant id has. The caller holds the lock of gateways: a table
// of connections is there before its first id.
func (d *Tables) sweepGateways() error {
	used := map[bpfobj.PilasterAddr]bool{}
	err := bpfobj.ForEachEntry(d.objects().PilGwtenantsV1, func(_ uint32, a bpfobj.PilasterAddr) { used[a] = true })
	if err != nil {
		return fmt.Errorf("read the gateways: %w", err)
	}
	return bpfobj.DeleteOthers(d.objects().PilGwnatV1, used)
}

// egressEntries returns the entries of an attachment with an egress address.
func egressEntries(r endpoint.Record, a endpoint.Attachment) (bpfobj.PilasterEgressSrc, bpfobj.PilasterEgressDst) {
	return bpfobj.PilasterEgressSrc{
			Address: bpfobj.ToAddr(a.Egress), Checksum: bpfobj.ChecksumDiff(a.Address, a.Egress),
		}, bpfobj.PilasterEgressDst{
			Address: bpfobj.ToAddr(a.Address), Plain: bpfobj.ToAddr(a.Plaintext).Lo,
			Ifindex: uint32(r.Device.HostIfindex), Endpoint: uint32(r.ID),
			Checksum: bpfobj.ChecksumDiff(a.Egress, a.Address),
		}
}

// Activate writes the egress address of an attachment, and removes another one of the endpoint.
func (d *Tables) Activate(r endpoint.Record, a endpoint.Attachment) error {
	if !a.Egress.IsValid() {
		return d.Deactivate(r)
	}
	src, dst := egressEntries(r, a)
	was, found, err := bpfobj.Lookup[bpfobj.PilasterEgressSrc](d.objects().PilEsourcesV1, uint32(r.ID))
	if err == nil && found && was.Address != src.Address {
		err = d.Deactivate(r)
	}
	if err == nil {
		err = d.objects().PilElocalsV1.Put(bpfobj.ToAddr(a.Egress).Lo, dst)
	}
	if err == nil {
		err = d.objects().PilEsourcesV1.Put(uint32(r.ID), src)
	}
	if err != nil {
		return fmt.Errorf("endpoint %d: write its egress address: %w", r.ID, err)
	}
	return nil
}

// Deactivate removes the egress address of an endpoint, whatever it is.
func (d *Tables) Deactivate(r endpoint.Record) error {
	was, found, err := bpfobj.Lookup[bpfobj.PilasterEgressSrc](d.objects().PilEsourcesV1, uint32(r.ID))
	if !found || err != nil {
		return err
	}
	err = errors.Join(d.objects().PilEsourcesV1.Delete(uint32(r.ID)),
		bpfobj.Delete(d.objects().PilElocalsV1, was.Address.Lo))
	if err != nil {
		return fmt.Errorf("endpoint %d: remove its egress address: %w", r.ID, err)
	}
	return nil
}

// Check compares the entries of an attachment.
func (d *Tables) Check(r endpoint.Record, a endpoint.Attachment) error {
	if !a.Egress.IsValid() {
		return nil
	}
	src, dst := egressEntries(r, a)
	gotDst, _, err := bpfobj.Lookup[bpfobj.PilasterEgressDst](d.objects().PilElocalsV1, bpfobj.ToAddr(a.Egress).Lo)
	if err != nil {
		return err
	}
	gotSrc, _, err := bpfobj.Lookup[bpfobj.PilasterEgressSrc](d.objects().PilEsourcesV1, uint32(r.ID))
	if err != nil {
		return err
	}
	if gotSrc != src || gotDst != dst {
		return fmt.Errorf("endpoint %d: map entries %s and %s do not say that it has the egress address %v", r.ID,
			bpfobj.PinEgressSources, bpfobj.PinEgressLocals, a.Egress)
	}
	return nil
}

// Repair removes egress addresses that no record has, and rules of tenants that are not here.
func (d *Tables) Repair(found []endpoint.Record, ids map[uint32]bool) error {
	sources, locals := map[uint32]bool{}, map[uint64]bool{}
	for _, r := range found {
		for _, a := range r.Attachments {
			if a.Egress.IsValid() {
				sources[uint32(r.ID)], locals[bpfobj.ToAddr(a.Egress).Lo] = true, true
			}
		}
	}
	d.gateways.Lock()
	err := errors.Join(
		bpfobj.DeleteOthers(d.objects().PilEsourcesV1, sources),
		bpfobj.DeleteOthers(d.objects().PilElocalsV1, locals),
		bpfobj.DeleteOthers(d.objects().PilGwtenantsV1, ids),
		d.sweepGateways(),
	)
	d.gateways.Unlock()
	if err != nil {
		return err
	}
	stale := map[uint32]bool{}
	d.mu.Lock()
	err = d.read()
	for k := range d.entries {
		if k.Tenant != uint32(allTenants) && !ids[k.Tenant] {
			stale[k.Tenant] = true
		}
	}
	d.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(stale)) {
		if err == nil {
			_, err = d.setAccess(address.TenantID(id), nil)
		}
	}
	return err
}

// SetGatewayAlive says whether new connections use a gateway if their rule has another one.
func (d *Tables) SetGatewayAlive(node netip.Prefix, alive bool) error {
	key := bpfobj.ToAddr(node.Addr()).Hi
	if alive {
		return bpfobj.Delete(d.objects().PilGwsilentV1, key)
	}
	return d.objects().PilGwsilentV1.Put(key, uint8(1))
}

// Access finds the entry in pil_access_v1. The kernel's lookup does not say which prefix it has found.
func (d *Tables) Access(id address.TenantID, to netip.Addr) (found dpapi.AccessEntry, ok bool, err error) {
	var rule bpfobj.PilasterAccessRule
	err = bpfobj.ForEachEntry(d.objects().PilAccessV1,
		func(k bpfobj.PilasterAccessKey, v bpfobj.PilasterAccessRule) {
			p := netip.PrefixFrom(k.Address.Addr(), int(k.Bits)-32)
			if k.Tenant == uint32(id) && p.Contains(to) && (!ok || p.Bits() > found.To.Bits()) {
				found.To, rule, ok = p, v, true
			}
		})
	if err != nil || !ok {
		return found, false, err
	}
	found.Action = dpapi.AccessAction(rule.Action)
	for _, node := range rule.Gateways {
		if node == 0 {
			continue
		}
		_, silent, err := bpfobj.Lookup[uint8](d.objects().PilGwsilentV1, node)
		if err != nil {
			return found, false, err
		}
		prefix := netip.PrefixFrom(bpfobj.PilasterAddr{Hi: node}.Addr(), address.NodeBits)
		found.Gateways = append(found.Gateways, dpapi.GatewayEntry{Node: prefix, Silent: silent})
	}
	return found, true, nil
}

// AddressOf reads the egress address of an endpoint.
func (d *Tables) AddressOf(id endpoint.ID) (netip.Addr, bool, error) {
	v, found, err := bpfobj.Lookup[bpfobj.PilasterEgressSrc](d.objects().PilEsourcesV1, uint32(id))
	return v.Address.Addr(), found, err
}

// GatewayOf reads the address of this node as an egress gateway of a tenant id.
func (d *Tables) GatewayOf(id address.TenantID) (netip.Addr, bool, error) {
	v, found, err := bpfobj.Lookup[bpfobj.PilasterAddr](d.objects().PilGwtenantsV1, uint32(id))
	return v.Addr(), found, err
}
