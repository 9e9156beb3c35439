package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"syscall"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// egressPrefix returns the /64 with this node's egress addresses. Registration refuses a node without one.
func (d *Datapath) egressPrefix() netip.Prefix {
	if p, ok := d.config.Plan.EgressNode(d.config.NodePrefix); ok {
		return p
	}
	return d.config.NodePrefix
}

// Actions of enum access_action.
const (
	accessDeny    = uint32(dpapi.AccessDeny)
	accessOutside = uint32(dpapi.AccessOutside)
	accessGateway = uint32(dpapi.AccessGateway)
	accessNode    = uint32(dpapi.AccessNode)
)

// everybody stands for all tenants: prefixes that are protected from all of them.
const everybody address.TenantID = 0

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

// accessTable is the content of pil_access_v1, read from the kernel once. The caller holds its lock.
type accessTable map[bpfobj.PilasterAccessKey]bpfobj.PilasterAccessRule

func (d *Datapath) loadAccess() error {
	if d.access != nil {
		return nil
	}
	all := accessTable{}
	err := bpfobj.ForEachEntry(d.Objects.PilAccessV1,
		func(k bpfobj.PilasterAccessKey, v bpfobj.PilasterAccessRule) { all[k] = v })
	if err != nil {
		return fmt.Errorf("read the egress rules: %w", err)
	}
	d.access = all
	return nil
}

// setAccess makes the entries of one tenant id what they should be. Of two states that differ in several prefixes,
// packets meet a mixture that allows no more than both do: denials are written first and removed last.
func (d *Datapath) setAccess(id address.TenantID, rules map[netip.Prefix]bpfobj.PilasterAccessRule) (changed bool,
	err error) {
	d.accessLock.Lock()
	defer d.accessLock.Unlock()
	if err := d.loadAccess(); err != nil {
		return false, err
	}
	wanted := map[bpfobj.PilasterAccessKey]bpfobj.PilasterAccessRule{}
	for p, r := range rules {
		wanted[accessKey(id, p)] = r
	}
	var more, less []bpfobj.PilasterAccessKey
	for k, r := range wanted {
		if had, ok := d.access[k]; !ok || had != r {
			more = append(more, k)
		}
	}
	for k := range d.access {
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
	slices.SortFunc(less, denials(d.access, -1))
	for _, k := range more {
		if err := d.Objects.PilAccessV1.Put(k, wanted[k]); err != nil {
			return true, d.accessFull(err)
		}
		d.access[k] = wanted[k]
	}
	for _, k := range less {
		if err := d.Objects.PilAccessV1.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return true, fmt.Errorf("remove an egress rule: %w", err)
		}
		delete(d.access, k)
	}
	return len(more)+len(less) > 0, nil
}

func (d *Datapath) accessFull(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.E2BIG) {
		return fmt.Errorf("%w: the table of egress rules has %d entries, and all are in use; start the agent with a "+
			"higher --max-rules", endpoint.ErrExhausted, d.Objects.PilAccessV1.MaxEntries())
	}
	return fmt.Errorf("write an egress rule: %w", err)
}

// setProtected writes the prefixes that no rule leads to: those of the cluster, and the addresses of this node. They
// are there before any rule of a tenant is.
func (d *Datapath) setProtected(own []netip.Addr) error {
	all := map[netip.Prefix]bpfobj.PilasterAccessRule{}
	for _, p := range tenant.AlwaysProtected(d.config.Plan) {
		all[p] = bpfobj.PilasterAccessRule{Action: accessDeny}
	}
	for _, a := range own {
		if a.Is6() && !a.Is4In6() {
			all[netip.PrefixFrom(a.WithZone(""), a.BitLen())] = bpfobj.PilasterAccessRule{Action: accessDeny}
		}
	}
	if _, err := d.setAccess(everybody, all); err != nil {
		return fmt.Errorf("protected prefixes: %w", err)
	}
	return nil
}

var _ dpapi.EgressPath = (*Datapath)(nil)

// SetOwnAddresses sets the addresses of this node, which no egress rule leads to.
func (d *Datapath) SetOwnAddresses(own []netip.Addr) error {
	d.ownAddresses.Store(&own)
	if err := d.setProtected(own); err != nil {
		return err
	}
	return d.InvalidateFlows()
}

// putEgress writes rules and gateway of a tenant. PutTenant invalidates the flows.
func (d *Datapath) putEgress(t tenant.Tenant) error {
	rules := accessRules(t)
	if len(rules) > 0 {
		var own []netip.Addr
		if known := d.ownAddresses.Load(); known != nil {
			own = *known
		}
		if err := d.setProtected(own); err != nil {
			return err
		}
	}
	address := gatewayAddress(t, d.config.NodePrefix)
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

func (d *Datapath) deleteEgress(id address.TenantID) (gone bool, err error) {
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
func (d *Datapath) putGateway(t tenant.Tenant, address netip.Addr) error {
	key := bpfobj.ToAddr(address)
	var id uint32
	err := d.Objects.PilGwnatV1.Lookup(key, &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		connections, err := ebpf.NewMap(&ebpf.MapSpec{
			Name: "pil_gwconn", Type: ebpf.LRUHash, KeySize: natKeySize, ValueSize: natEntrySize,
			MaxEntries: gatewayEntries,
		})
		if err != nil {
			return fmt.Errorf("make the table of connections of gateway %v: %w", address, err)
		}
		defer connections.Close()
		if err := d.Objects.PilGwnatV1.Put(key, connections); err != nil {
			return fmt.Errorf("add gateway %v: %w; a node has %d at most", address, err,
				d.Objects.PilGwnatV1.MaxEntries())
		}
	} else if err != nil {
		return fmt.Errorf("read gateway %v: %w", address, err)
	}
	for _, own := range t.IDs {
		var had bpfobj.PilasterAddr
		err := d.Objects.PilGwtenantsV1.Lookup(uint32(own.ID), &had)
		if err == nil && had == key {
			continue
		}
		if err := d.Objects.PilGwtenantsV1.Put(uint32(own.ID), key); err != nil {
			return fmt.Errorf("gateway of tenant id %d: %w", own.ID, err)
		}
	}
	return d.sweepGateways()
}

// deleteGateway removes the gateway of a tenant id, and its connections if no other id has it.
func (d *Datapath) deleteGateway(id address.TenantID) error {
	err := d.Objects.PilGwtenantsV1.Delete(uint32(id))
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove the gateway of tenant id %d: %w", id, err)
	}
	return d.sweepGateways()
}

// sweepGateways removes connections of addresses that no tenant id has.
func (d *Datapath) sweepGateways() error {
	used := map[bpfobj.PilasterAddr]bool{}
	err := bpfobj.ForEachEntry(d.Objects.PilGwtenantsV1, func(_ uint32, a bpfobj.PilasterAddr) { used[a] = true })
	if err != nil {
		return fmt.Errorf("read the gateways: %w", err)
	}
	return bpfobj.DeleteOthers(d.Objects.PilGwnatV1, used)
}

// Sizes of nat_key and nat_entry, and entries of a gateway's table: two a connection.
const (
	natKeySize     = 40
	natEntrySize   = 24
	gatewayEntries = 1 << 16
)

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

func (d *Datapath) writeEgress(r endpoint.Record, a endpoint.Attachment) error {
	if !a.Egress.IsValid() {
		return d.removeEgress(r)
	}
	src, dst := egressEntries(r, a)
	err := d.Objects.PilElocalsV1.Put(bpfobj.ToAddr(a.Egress).Lo, dst)
	if err == nil {
		err = d.Objects.PilEsourcesV1.Put(uint32(r.ID), src)
	}
	if err != nil {
		return fmt.Errorf("endpoint %d: write its egress address: %w", r.ID, err)
	}
	return nil
}

// removeEgress removes the egress address of an endpoint, whatever it is.
func (d *Datapath) removeEgress(r endpoint.Record) error {
	was, found, err := lookup[bpfobj.PilasterEgressSrc](d.Objects.PilEsourcesV1, uint32(r.ID))
	if !found || err != nil {
		return err
	}
	err = errors.Join(d.Objects.PilEsourcesV1.Delete(uint32(r.ID)), ignoreMissing(d.Objects.PilElocalsV1.Delete(
		was.Address.Lo)))
	if err != nil {
		return fmt.Errorf("endpoint %d: remove its egress address: %w", r.ID, err)
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// checkEgress compares the entries of an attachment.
func (d *Datapath) checkEgress(r endpoint.Record, a endpoint.Attachment) error {
	if !a.Egress.IsValid() {
		return nil
	}
	src, dst := egressEntries(r, a)
	gotDst, _, err := lookup[bpfobj.PilasterEgressDst](d.Objects.PilElocalsV1, bpfobj.ToAddr(a.Egress).Lo)
	if err != nil {
		return err
	}
	gotSrc, _, err := lookup[bpfobj.PilasterEgressSrc](d.Objects.PilEsourcesV1, uint32(r.ID))
	if err != nil {
		return err
	}
	if gotSrc != src || gotDst != dst {
		return fmt.Errorf("endpoint %d: map entries %s and %s do not say that it has the egress address %v", r.ID,
			bpfobj.PinEgressSources, bpfobj.PinEgressLocals, a.Egress)
	}
	return nil
}

// repairEgress removes egress addresses that no record has, and rules of tenants that are not here.
func (d *Datapath) repairEgress(found []endpoint.Record, ids map[uint32]bool) error {
	sources, locals := map[uint32]bool{}, map[uint64]bool{}
	for _, r := range found {
		for _, a := range r.Attachments {
			if a.Egress.IsValid() {
				sources[uint32(r.ID)], locals[bpfobj.ToAddr(a.Egress).Lo] = true, true
			}
		}
	}
	err := errors.Join(
		bpfobj.DeleteOthers(d.Objects.PilEsourcesV1, sources),
		bpfobj.DeleteOthers(d.Objects.PilElocalsV1, locals),
		bpfobj.DeleteOthers(d.Objects.PilGwtenantsV1, ids),
		d.sweepGateways(),
	)
	if err != nil {
		return err
	}
	stale := map[uint32]bool{}
	d.accessLock.Lock()
	err = d.loadAccess()
	for k := range d.access {
		if k.Tenant != uint32(everybody) && !ids[k.Tenant] {
			stale[k.Tenant] = true
		}
	}
	d.accessLock.Unlock()
	for _, id := range slices.Sorted(maps.Keys(stale)) {
		if err == nil {
			_, err = d.setAccess(address.TenantID(id), nil)
		}
	}
	return err
}

// SetGatewayAlive says whether new connections use a gateway if their rule has another one.
func (d *Datapath) SetGatewayAlive(node netip.Prefix, alive bool) error {
	key := bpfobj.ToAddr(node.Addr()).Hi
	if alive {
		return ignoreMissing(d.Objects.PilGwsilentV1.Delete(key))
	}
	return d.Objects.PilGwsilentV1.Put(key, uint8(1))
}

// LookupAccess finds the entry in pil_access_v1. The kernel's lookup does not say which prefix it has found.
func (d *Datapath) LookupAccess(id address.TenantID, to netip.Addr) (found dpapi.AccessEntry, ok bool, err error) {
	var rule bpfobj.PilasterAccessRule
	err = bpfobj.ForEachEntry(d.Objects.PilAccessV1,
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
		_, silent, err := lookup[uint8](d.Objects.PilGwsilentV1, node)
		if err != nil {
			return found, false, err
		}
		prefix := netip.PrefixFrom(bpfobj.PilasterAddr{Hi: node}.Addr(), address.NodeBits)
		found.Gateways = append(found.Gateways, dpapi.GatewayEntry{Node: prefix, Silent: silent})
	}
	return found, true, nil
}

// LookupEgress reads the egress address of an endpoint.
func (d *Datapath) LookupEgress(id endpoint.ID) (netip.Addr, bool, error) {
	v, found, err := lookup[bpfobj.PilasterEgressSrc](d.Objects.PilEsourcesV1, uint32(id))
	return v.Address.Addr(), found, err
}

// LookupGateway reads the address of this node as an egress gateway of a tenant id.
func (d *Datapath) LookupGateway(id address.TenantID) (netip.Addr, bool, error) {
	v, found, err := lookup[bpfobj.PilasterAddr](d.Objects.PilGwtenantsV1, uint32(id))
	return v.Addr(), found, err
}
