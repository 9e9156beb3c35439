package store

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/tenant"
)

// A mapping allocates a subnet of a tenant's overlay to a node, or an address to an endpoint. It exists until the node
// releases it, stops hosting the tenant, or is deleted. Then its prefix is quarantined. Allocation takes the next
// higher free prefix and wraps around.

// maxKey is the maximum length of an endpoint's key in bytes.
const maxKey = 512

// ofNode replaces an endpoint's key in allocations of the node itself.
const ofNode = "node"

// Allocate returns the node's subnet of each overlay of a tenant that the node hosts. If the overlays have no subnets,
// it returns an address of each for an endpoint, whose mapping then has the app. A repeated call returns the same
// prefixes, with the app of the last call.
func (s *Store) Allocate(
	ctx context.Context,
	n pki.Node,
	name, key string,
	app uint32,
) (prefixes []netip.Prefix, err error) {
	is, err := s.AllocateFor(ctx, n, name, Endpoint{Key: key, App: app})
	return is.Prefixes, err
}

func checkAllocation(name, key string) error {
	if len(key) > maxKey {
		return refuse(
			Invalid,
			"the key of an endpoint has %d bytes, and the maximum is %d; nothing more was allocated or accepted",
			len(key),
			maxKey,
		)
	}
	return checkTenant(name)
}

func (s *Store) allocate(t *txn, n pki.Node, name string, of Endpoint, from hints) (is Allocation, err error) {
	key := of.Key
	keys := append(nodeKeys(n), dirTenants+name, hostingKey(name, n.Name), allocationKey(name, n.Name, key))
	if err := t.fetch(keys...); err != nil {
		return is, err
	}
	record, err := t.member(n)
	if err != nil {
		return is, err
	}
	overlays, err := t.overlays(name)
	if err != nil {
		return is, err
	}
	if overlays == nil {
		return is, refuse(
			Refused,
			"tenant %s has no CIDRs of its own, or does not exist; nothing was changed",
			name,
		)
	}
	found := new(pilasterv1.Tenant) // compared at the commit: an allocation must not outlive its overlay
	if _, err := t.load(dirTenants+name, found); err != nil {
		return is, err
	}
	if found.Leaving != "" && !tenant.KeepsAddresses(found.Network, found.Leaving) {
		return is, refuse(
			Refused,
			"tenant %s is migrating from network %s, so no more of its addresses are allocated; nothing was changed",
			name,
			found.Leaving,
		)
	}
	if of.AddressKey != "" {
		on := tenant.Tenant{Name: name, Network: found.Network, Leaving: found.Leaving, Overlays: overlays}
		if err := cmp.Or(tenant.CheckKeyed(name, on.OnNetwork(), of.AddressKey), on.CheckKeyable()); err != nil {
			return is, refuse(Invalid, "%v", err)
		}
	}
	if has := overlays[0].NodeBits != 0; has != (key == "") {
		return is, refuse(
			Invalid,
			"tenant %s: nodes have subnets: %v, request has a key: %v; nothing was changed",
			name,
			has,
			key != "",
		)
	}
	if _, hosts, err := t.hosting(name, n.Name); err != nil {
		return is, err
	} else if !hosts {
		return is, refuse(Refused, "node %s does not host tenant %s; nothing was changed: resolve it "+
			"first", n.Name, name)
	}
	network := tenant.Tenant{Network: found.Network}
	if (of.App != 0) != network.HasIdentifiers() || of.App >= uint32(address.FirstReservedApp) {
		return is, refuse(Invalid, "tenant %s: app %#x in a request for an address; nothing was changed", name, of.App)
	}
	if of.AddressKey == "" {
		is.Prefixes, err = s.complete(t, n, record, network, name, of, overlays, from)
		return is, err
	}
	if !network.HasIdentifiers() {
		if err := s.checkGateway(record, overlays[0]); err != nil {
			return is, err
		}
	}
	return s.completeKeyed(t, n, record, name, of, overlays[0], from)
}

// complete returns the prefixes of an endpoint, one per overlay, and allocates those that it lacks: usually all or
// none.
func (s *Store) complete(
	t *txn,
	n pki.Node,
	record *pilasterv1.Node,
	on tenant.Tenant,
	name string,
	of Endpoint,
	overlays []tenant.Overlay,
	from hints,
) ([]netip.Prefix, error) {
	key := of.Key
	has, err := t.allocated(name, n.Name, key)
	if err != nil {
		return nil, err
	}
	var previous []netip.Prefix
	if key == "" && has == nil { // a deleted endpoint never exists again, but a node may host the tenant again
		if previous, err = t.quarantinedOf(name, n); err != nil {
			return nil, err
		}
	}
	var all, added []netip.Prefix
	for _, o := range overlays {
		if i := slices.IndexFunc(has, func(p netip.Prefix) bool { return o.CIDR.Contains(p.Addr()) }); i >= 0 {
			all = append(all, has[i])
			continue
		}
		if !on.HasIdentifiers() {
			if err := s.checkGateway(record, o); err != nil {
				return nil, err
			}
		}
		to, err := t.allocatePrefix(name, o, previous, from)
		if err != nil {
			return nil, err
		}
		all, added = append(all, to), append(added, to)
	}
	if added == nil {
		return all, t.setApp(name, of, all)
	}
	return all, t.recordAllocation(record, name, of, all, added)
}

// checkGateway refuses a node whose gateway has no virtual addresses in the family of the overlay.
func (s *Store) checkGateway(node *pilasterv1.Node, o tenant.Overlay) error {
	prefix, err := netip.ParsePrefix(node.Prefix)
	if err != nil {
		return err
	}
	plan, is4 := s.cluster.Plan, o.CIDR.Addr().Is4()
	if _, ok := plan.GatewayBlock(prefix, is4); ok {
		return nil
	}
	family, gateway := "IPv6", plan.Gateway6
	if is4 {
		family, gateway = "IPv4", plan.Gateway4
	}
	if !gateway.IsValid() {
		return refuse(
			Refused,
			"this cluster has no %s gateway prefix, so no node can host a tenant with %v; nothing was changed: use "+
				"CIDRs of the other family",
			family,
			o.CIDR,
		)
	}
	return refuse(
		Full,
		"node %s has number %d, and gateway prefix %v has virtual addresses for the %d nodes below that; nothing was "+
			"changed: use a node with a lower prefix, or CIDRs of the other family",
		node.Name,
		plan.NodeNumber(prefix),
		gateway,
		plan.GatewayBlocks(is4),
	)
}

// member returns the record of a registered node.
func (t *txn) member(n pki.Node) (*pilasterv1.Node, error) {
	record, err := t.identify(n)
	if err == nil && record == nil {
		err = refuse(Refused, "node %s is not registered", n.Name)
	}
	return record, err
}

// overlays returns a tenant's overlays; nil if it has none or does not exist. They are not compared at the commit.
func (t *txn) overlays(name string) ([]tenant.Overlay, error) {
	key := dirTenants + name
	if err := t.fetch(key); err != nil {
		return nil, err
	}
	value := t.readings[key].value
	if value == "" {
		return nil, nil
	}
	found := new(pilasterv1.Tenant)
	if err := decode(key, []byte(value), found); err != nil {
		return nil, err
	}
	return tenant.ParseOverlays(found.Overlays)
}

// recordAllocation writes the prefixes of a key, and then the mappings of the new ones: a reader that finds a mapping
// also finds the allocation.
func (t *txn) recordAllocation(node *pilasterv1.Node, name string, of Endpoint, all, added []netip.Prefix) error {
	t.put(allocationKey(name, node.Name, of.Key), joinPrefixes(all))
	for _, to := range added {
		m := &pilasterv1.Mapping{Node: node.Prefix, Name: node.Name, Key: of.Key, App: of.App}
		if of.AddressKey != "" {
			m.AddressKey, m.Sequence = of.AddressKey, of.Sequence
			t.put(addressKeyKey(name, of.AddressKey), keyedAddress{to, of.Sequence}.String())
		}
		if err := t.save(mappingKey(name, to), m); err != nil {
			return err
		}
	}
	return nil
}

// setApp changes the app in the mappings of an endpoint, whose labels may have changed.
func (t *txn) setApp(name string, of Endpoint, all []netip.Prefix) error {
	for _, to := range all {
		is := new(pilasterv1.Mapping)
		if exists, err := t.load(mappingKey(name, to), is); err != nil || !exists || is.App == of.App {
			return err
		}
		is.App = of.App
		if err := t.save(mappingKey(name, to), is); err != nil {
			return err
		}
	}
	return nil
}

// allocated returns the prefixes of a key, nil if there are none.
func (t *txn) allocated(name, node, key string) ([]netip.Prefix, error) {
	value, err := t.get(allocationKey(name, node, key))
	if err != nil || value == "" {
		return nil, err
	}
	return splitPrefixes(value)
}

// Free releases an endpoint's addresses. It also succeeds if they are free already.
func (s *Store) Free(ctx context.Context, n pki.Node, name, key string) error {
	if err := checkAllocation(name, key); err != nil {
		return err
	}
	if key == "" {
		return refuse(Invalid, "a node keeps its subnets while it hosts tenant %s; nothing was changed", name)
	}
	return s.change(ctx, func(t *txn) error {
		if _, err := t.member(n); err != nil {
			return err
		}
		return s.release(t, n, name, allocationKey(name, n.Name, key))
	})
}

// releaseAll releases all prefixes of a tenant that a node has.
func (s *Store) releaseAll(t *txn, n pki.Node, name string) error {
	if overlays, err := t.overlays(name); err != nil || overlays == nil {
		return err
	}
	dir := allocationDir(name, n.Name)
	keys, err := t.names(dir)
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := s.release(t, n, name, dir+key); err != nil {
			return err
		}
	}
	return nil
}

// release quarantines the prefixes of one key.
func (s *Store) release(t *txn, n pki.Node, name, key string) error {
	value, err := t.get(key)
	if err != nil || value == "" {
		return err
	}
	prefixes, err := splitPrefixes(value)
	if err != nil {
		return err
	}
	for _, to := range prefixes {
		if err := s.quarantineMapping(t, n, name, to); err != nil {
			return err
		}
	}
	t.delete(key)
	return nil
}

func (s *Store) quarantineMapping(t *txn, n pki.Node, name string, to netip.Prefix) error {
	if err := s.reserveKeyed(t, name, to); err != nil {
		return err
	}
	t.delete(mappingKey(name, to))
	return s.quarantine(t, quarantineKey(name, to), n.UUID)
}

// reclaimMapping accepts a mapping that a node reports, and records it if the store has lost it.
func (s *Store) reclaimMapping(t *txn, node *pilasterv1.Node, n pki.Node, held *pilasterv1.Mapping) error {
	if err := checkAllocation(held.Tenant, held.Key); err != nil {
		return err
	}
	if err := checkAddressKey(Endpoint{AddressKey: held.AddressKey, Sequence: held.Sequence}); err != nil {
		return err
	}
	to, err := netip.ParsePrefix(held.To)
	if err != nil {
		return refuse(Invalid, "held prefix %.50q of tenant %s is invalid", held.To, held.Tenant)
	}
	at := mappingKey(held.Tenant, to)
	if is, err := decodeMapping(at, []byte(t.readings[at].value)); err == nil && is.Name == node.Name &&
		is.Key == held.Key && is.App == held.App && is.AddressKey == held.AddressKey {
		return nil // the store agrees; the commit need not compare the key
	}
	// Without the tenant there is no address to protect.
	found := new(pilasterv1.Tenant)
	if exists, err := t.load(dirTenants+held.Tenant, found); err != nil || !exists {
		return err
	}
	overlays, err := t.overlays(held.Tenant)
	if err != nil {
		return err
	}
	if overlays == nil {
		return nil // the tenant has migrated to another network, so its addresses are of no use
	}
	i := slices.IndexFunc(overlays, func(o tenant.Overlay) bool { _, ok := o.Contains(to); return ok })
	identifiers := tenant.NetworkHas(found.Network, tenant.Identifiers)
	if i < 0 || (overlays[i].NodeBits != 0) != (held.Key == "") || identifiers && !overlays[i].Usable(to) {
		return refuse(
			Refused,
			"this node holds %v of tenant %s, but in the cluster that is not a prefix of the tenant; %s",
			to,
			held.Tenant,
			heldAdvice,
		)
	}
	// Every node of the tenant reads the mapping, and refuses all of them with one that is invalid.
	if (held.App != 0) != identifiers || held.App >= uint32(address.FirstReservedApp) {
		return refuse(Refused, "this node holds %v of tenant %s with app %d, which no container can have; %s", to,
			held.Tenant, held.App, heldAdvice)
	}
	is := new(pilasterv1.Mapping)
	if _, err := t.load(at, is); err != nil {
		return err
	}
	switch {
	case is.Name != "" && is.Name != node.Name && is.AddressKey != "" && is.AddressKey == held.AddressKey:
		return t.reclaimKeyed(node, held, is, to)
	case is.Name != "" && is.Name != node.Name:
		return refuse(
			Refused,
			"this node holds %v of tenant %s, but in the cluster it belongs to node %s; %s",
			to,
			held.Tenant,
			is.Name,
			heldAdvice,
		)
	case is.Name != "" && is.Key == held.Key:
		return t.setApp(held.Tenant, Endpoint{Key: held.Key, App: held.App}, []netip.Prefix{to})
	case is.Name != "":
		// The node reports another endpoint for the prefix, so the one that the store has is deleted.
		if err := s.release(t, n, held.Tenant, allocationKey(held.Tenant, node.Name, is.Key)); err != nil {
			return err
		}
	}
	return s.claimMapping(t, node, n, held, overlays[i], to)
}

// claimMapping records a reported mapping. A node has one subnet of an overlay, so claimMapping quarantines a different
// subnet that the store has for the node. A report about an endpoint may be older than the endpoint's current prefixes,
// so claimMapping keeps the current ones until the endpoint is deleted.
func (s *Store) claimMapping(
	t *txn,
	node *pilasterv1.Node,
	n pki.Node,
	held *pilasterv1.Mapping,
	o tenant.Overlay,
	to netip.Prefix,
) error {
	has, err := t.allocated(held.Tenant, node.Name, held.Key)
	if err != nil {
		return err
	}
	var claimed []netip.Prefix
	for _, p := range has {
		if p == to {
			continue
		}
		if held.Key != "" || !o.CIDR.Contains(p.Addr()) {
			claimed = append(claimed, p)
		} else if err := s.quarantineMapping(t, n, held.Tenant, p); err != nil {
			return err
		}
	}
	claimed = append(claimed, to)
	mark, err := t.mark(overlayMark(held.Tenant, o))
	if err != nil {
		return err
	}
	first, count := o.Given()
	if n, _ := o.Contains(to); n-first >= mark && n-first-mark < maxJump {
		t.setMark(overlayMark(held.Tenant, o), (n-first+1)%count)
	}
	// A mapping without a hosting record would never be released. The node reports its ids later.
	if _, hosts, err := t.hosting(held.Tenant, node.Name); err != nil {
		return err
	} else if !hosts {
		if err := t.save(hostingKey(held.Tenant, node.Name), &pilasterv1.Hosting{}); err != nil {
			return err
		}
	}
	of, err := t.claimKey(held, to)
	if err != nil {
		return err
	}
	return t.recordAllocation(node, held.Tenant, of, claimed, []netip.Prefix{to})
}

// RaiseSequence records the mobility sequence of an address (RFC 7432 §15), if it is higher than the recorded one. It
// also succeeds if the address is free meanwhile.
func (s *Store) RaiseSequence(ctx context.Context, tenant string, to netip.Prefix, sequence uint64) error {
	return s.change(ctx, func(t *txn) error {
		key := mappingKey(tenant, to)
		m := new(pilasterv1.Mapping)
		if exists, err := t.load(key, m); err != nil || !exists || m.Sequence >= sequence {
			return err
		}
		m.Sequence = sequence
		return t.save(key, m)
	})
}

func allocationDir(tenant, node string) string { return dirAllocations + tenant + "/" + node + "/" }

func allocationKey(tenant, node, key string) string {
	if key == "" {
		return allocationDir(tenant, node) + ofNode
	}
	return allocationDir(tenant, node) + fmt.Sprintf("%x", sha256.Sum256([]byte(key)))
}

func overlayMark(tenant string, o tenant.Overlay) string {
	if o.CIDR.Addr().Is4() {
		return dirOverlayMarks + tenant + "/4"
	}
	return dirOverlayMarks + tenant + "/6"
}

func joinPrefixes(prefixes []netip.Prefix) string {
	var words []string
	for _, p := range prefixes {
		words = append(words, p.String())
	}
	return strings.Join(words, " ")
}

func splitPrefixes(text string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	for word := range strings.FieldsSeq(text) {
		p, err := netip.ParsePrefix(word)
		if err != nil {
			return nil, fmt.Errorf("the store's list of allocations is not readable: %w", err)
		}
		prefixes = append(prefixes, p)
	}
	return prefixes, nil
}
