package store

import (
	"cmp"
	"net/netip"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/tenant"
)

// maxFetched, in bytes, is the maximum length of a key that is read in one request with keys of other calls. Keys with
// valid names are never longer.
const maxFetched = 1024

// heldKeys returns the keys on which reclaim depends. A node may hold thousands of ids, and usually the store agrees
// with all. Long keys of invalid names are left out, so that reading them costs only this node's call.
func (r Registration) heldKeys() (keys []string) {
	defer func() {
		keys = slices.DeleteFunc(keys, func(key string) bool { return len(key) > maxFetched })
	}()
	for _, held := range r.Tenants {
		keys = append(keys, keyTenantMark, dirTenants+held.Name)
		for _, id := range held.Ids {
			keys = append(keys, tenantIDKey(id.Id))
		}
	}
	for _, held := range r.Apps {
		keys = append(keys, appIDKey(held.Tenant, held.Id))
	}
	for _, held := range r.Mappings {
		if to, err := netip.ParsePrefix(held.To); err == nil {
			keys = append(keys, mappingKey(held.Tenant, to), allocationKey(held.Tenant, r.Node.Name, held.Key))
		}
	}
	return keys
}

// reclaim accepts the ids and prefixes that a node uses already. If a restore from a backup lost them, reclaim adds the
// claims and raises the marks, so that they are not allocated again. If the store contradicts the node, reclaim refuses
// the node.
func (s *Store) reclaim(t *txn, node *pilasterv1.Node, r Registration) error {
	for _, held := range r.Tenants {
		if err := t.reclaimTenant(r.Node, held); err != nil {
			return err
		}
	}
	if err := t.reclaimPublished(node.Name, r.Published); err != nil {
		return err
	}
	for _, held := range r.Apps {
		if err := t.reclaimApp(held); err != nil {
			return err
		}
	}
	for _, held := range r.Mappings {
		if err := s.reclaimMapping(t, node, r.Node, held); err != nil {
			return err
		}
	}
	return nil
}

const heldAdvice = "the store was probably restored from a backup or replaced; nothing more was accepted: restore a " +
	"newer backup, or remove this node's containers of the tenant"

func (t *txn) reclaimTenant(n pki.Node, held *pilasterv1.Tenant) error {
	if err := checkTenant(held.Name); err != nil {
		return err
	}
	known := new(pilasterv1.Tenant)
	exists, err := t.load(dirTenants+held.Name, known)
	if err != nil {
		return err
	}
	if exists && held.Created != nil && !held.Created.AsTime().Equal(known.Created.AsTime()) {
		return refuse(Refused, "this node holds a tenant %s created at %v, but the cluster's was created at %v; %s",
			held.Name, held.Created.AsTime(), known.Created.AsTime(), heldAdvice)
	}
	if exists && held.Changes > known.Changes+maxJump {
		return refuse(
			Refused,
			"this node has received %d changes of tenant %s, and the cluster's has had %d; %s",
			held.Changes,
			held.Name,
			known.Changes,
			heldAdvice,
		)
	}
	network := cmp.Or(known.Network, tenant.DefaultNetwork)
	// Between networks with the same addresses, the node follows the store, whichever has the older state.
	if exists && slices.Contains(tenant.MovesFrom(network), held.Network) &&
		!tenant.KeepsAddresses(network, held.Network) {
		return refuse(
			Refused,
			"this node has moved tenant %s to network %s, and in the cluster it is on %s; the store was probably "+
				"restored from a backup; nothing more was accepted: restore a newer backup, or repeat `pilaster "+
				"tenant migrate %s --to %s --addressing %s`",
			held.Name,
			held.Network,
			network,
			held.Name,
			held.Network,
			seenAs(held.Addressing),
		)
	}
	if exists && held.Network == network && seenAs(held.Addressing) != seenAs(known.Addressing) {
		return refuse(
			Refused,
			"this node holds tenant %s with %s addresses, and in the cluster they are %s; %s",
			held.Name,
			seenAs(held.Addressing),
			seenAs(known.Addressing),
			heldAdvice,
		)
	}
	mark, err := t.mark(keyTenantMark)
	if err != nil {
		return err
	}
	raised, claimed := mark, uint64(0)
	for _, id := range held.Ids {
		if id.Id == 0 || id.Id > uint32(address.MaxTenantID) {
			return refuse(Invalid, "held tenant id %d is out of range", id.Id)
		}
		owner, err := t.get(tenantIDKey(id.Id))
		if err != nil {
			return err
		}
		has := func(k *pilasterv1.TenantId) bool { return k.Id == id.Id }
		switch {
		case owner != "" && owner != held.Name:
			return refuse(
				Refused,
				"this node holds id %d of tenant %s, but in the cluster it belongs to tenant %s; %s",
				id.Id,
				held.Name,
				owner,
				heldAdvice,
			)
		case exists && !id.OnlyAccepted && !slices.ContainsFunc(known.Ids, has):
			return refuse(
				Refused,
				"this node holds id %d of tenant %s, but the cluster's tenant %s does not have it; %s",
				id.Id,
				held.Name,
				held.Name,
				heldAdvice,
			)
		case owner == "":
			t.put(tenantIDKey(id.Id), held.Name)
			claimed++
			if uint64(id.Id) < mark+maxJump {
				raised = max(raised, uint64(id.Id)+1)
			}
		}
	}
	if claimed > 0 {
		if err := t.chargeReclaimed(n, claimed+raised-mark); err != nil {
			return err
		}
		t.setMark(keyTenantMark, raised)
	}
	if exists && held.Changes > known.Changes {
		known.Changes = held.Changes // otherwise the node would ignore the next change as outdated
		return t.saveChanged(known)
	}
	return nil
}

// seenAs names an addressing of a network without own CIDRs in messages.
func seenAs(a pilasterv1.Addressing) string {
	if a == pilasterv1.Addressing_ADDRESSING_CLEAR {
		return "clear"
	}
	return "encrypted"
}

// chargeReclaimed limits the tenant ids that a node's claims use up. Otherwise a node could invent claims until no ids
// are left.
func (t *txn) chargeReclaimed(n pki.Node, ids uint64) error {
	key := dirReclaimed + n.UUID
	spent, err := t.mark(key)
	if err != nil {
		return err
	}
	if spent+ids > maxReclaimed {
		return refuse(
			Refused,
			"node %s has claimed more tenant ids unknown to this cluster than a node can hold; nothing more was "+
				"accepted: find out what it runs, and run `pilaster node delete %s`",
			n.Name,
			n.Name,
		)
	}
	t.setMark(key, spent+ids)
	return nil
}

func (t *txn) reclaimApp(held *pilasterv1.App) error {
	if err := checkTenant(held.Tenant); err != nil {
		return err
	}
	hash, err := hashLabels(held.Labels)
	if err != nil {
		return err
	}
	if t.readings[appIDKey(held.Tenant, held.Id)].value == hash {
		// An app does not end before all nodes have confirmed that they deleted it, so the commit need not compare the
		// key.
		return nil
	}
	if held.Id == 0 || held.Id >= uint32(address.FirstReservedApp) {
		return refuse(Invalid, "held app %d of tenant %s is out of range", held.Id, held.Tenant)
	}
	// Without the tenant there is no app to protect: a new tenant with the name has another id.
	if tenant, err := t.get(dirTenants + held.Tenant); err != nil || tenant == "" {
		return err
	}
	known := new(pilasterv1.App)
	found, err := t.load(dirApps+held.Tenant+"/"+hash, known)
	if err != nil {
		return err
	}
	if found && known.Id != held.Id {
		return refuse(
			Refused,
			"this node holds app %d of tenant %s for labels %v, but in the cluster they are app %d; %s",
			held.Id,
			held.Tenant,
			held.Labels,
			known.Id,
			heldAdvice,
		)
	}
	owner, err := t.get(appIDKey(held.Tenant, held.Id))
	if err != nil {
		return err
	}
	if owner != "" && owner != hash {
		return refuse(
			Refused,
			"this node holds app %d of tenant %s for labels %v, but in the cluster other labels are that app; %s",
			held.Id,
			held.Tenant,
			held.Labels,
			heldAdvice,
		)
	}
	mark, err := t.mark(dirAppMarks + held.Tenant)
	if err != nil {
		return err
	}
	if uint64(held.Id) < mark+maxAppJump {
		mark = max(mark, uint64(held.Id)+1)
	}
	return t.putApp(&pilasterv1.App{Tenant: held.Tenant, Id: held.Id, Labels: held.Labels}, hash, mark)
}
