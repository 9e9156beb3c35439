package store

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// HostingResult is the result of RecordHosting.
type HostingResult struct {
	Overtaken []string           // tenants whose record is from a later message; they were not changed
	Refused   map[string][]error // rejected overrides, by tenant
}

// RecordHosting records what a node reports about tenants that it hosts, and deletes the records of tenants that it no
// longer hosts. The sequence number orders a node's messages. Tenants that do not exist are skipped.
func (s *Store) RecordHosting(
	ctx context.Context,
	n pki.Node,
	sequence uint64,
	add []*pilasterv1.Hosting,
	remove []string,
) (noted HostingResult, err error) {
	if len(add)+len(remove) == 0 {
		return noted, nil
	}
	keys := nodeKeys(n)
	for _, said := range add {
		keys = append(keys, hostingKey(said.Tenant, n.Name), dirTenants+said.Tenant)
	}
	for _, tenant := range remove {
		keys = append(keys, hostingKey(tenant, n.Name), dirTenants+tenant)
	}
	err = s.changeQueued(ctx, func(t *txn) (err error) {
		if err := t.fetch(keys...); err != nil {
			return err
		}
		noted, err = s.recordHosting(t, n, sequence, add, remove)
		return err
	}, weight{}, keys...)
	return noted, err
}

func (s *Store) recordHosting(
	t *txn,
	n pki.Node,
	sequence uint64,
	add []*pilasterv1.Hosting,
	remove []string,
) (is HostingResult, err error) {
	node, err := t.member(n)
	if err != nil {
		return is, err
	}
	is.Refused = map[string][]error{}
	for _, said := range add {
		noted, exists, err := t.hosting(said.Tenant, n.Name)
		if err != nil {
			return is, err
		}
		if noted.Sequence > sequence {
			is.Overtaken = append(is.Overtaken, said.Tenant)
			continue
		}
		found := new(pilasterv1.Tenant)
		if known, err := t.load(dirTenants+said.Tenant, found); err != nil {
			return is, err
		} else if !known {
			continue
		}
		overrides, refused := ownOverrides(node, found, said.Overrides)
		if refused != nil {
			is.Refused[said.Tenant] = refused
		}
		// With a single id a report does not become outdated, so it needs no later sequence.
		same := slices.Equal(noted.Accepts, said.Accepts) && slices.Equal(noted.Holds, said.Holds) &&
			proto.Equal(noted.Moving, said.Moving) &&
			slices.EqualFunc(
				noted.Overrides,
				overrides,
				func(a, b *pilasterv1.Override) bool { return proto.Equal(a, b) },
			) &&
			noted.HeardRound == said.HeardRound &&
			slices.Equal(noted.KeepsApps, said.KeepsApps) &&
			noted.Unenforced == said.Unenforced
		if exists &&
			(len(found.Ids) == 1 && found.Leaving == "" && found.RetiringApps == nil || noted.Sequence == sequence) &&
			same {
			continue
		}
		record := &pilasterv1.Hosting{
			Accepts: said.Accepts, Holds: said.Holds, Moving: said.Moving, Overrides: overrides,
			HeardRound: said.HeardRound, KeepsApps: said.KeepsApps, Unenforced: said.Unenforced, Sequence: sequence,
		}
		if err := t.save(hostingKey(said.Tenant, n.Name), record); err != nil {
			return is, err
		}
	}
	for _, tenant := range remove {
		noted, exists, err := t.hosting(tenant, n.Name)
		if err != nil {
			return is, err
		}
		if !exists || noted.Sequence > sequence {
			continue
		}
		if err := s.releaseAll(t, n, tenant); err != nil {
			return is, err
		}
		t.delete(hostingKey(tenant, n.Name))
	}
	return is, nil
}

// ownOverrides drops overrides of containers that are not the node's, so that a wrong report cannot affect other nodes.
func ownOverrides(
	n *pilasterv1.Node,
	of *pilasterv1.Tenant,
	overrides []*pilasterv1.Override,
) (own []*pilasterv1.Override, refused []error) {
	said := map[string]bool{}
	for _, o := range overrides {
		if err := checkOverride(n, of, o); err != nil {
			refused = append(refused, err)
		} else if said[o.Address] {
			refused = append(refused, refuse(Invalid, "node %s reports two apps for %s of tenant %s; the first was "+
				"recorded", n.Name, o.Address, of.Name))
		} else {
			said[o.Address], own = true, append(own, o)
		}
	}
	return own, refused
}

func checkOverride(n *pilasterv1.Node, of *pilasterv1.Tenant, o *pilasterv1.Override) error {
	a, err := netip.ParseAddr(o.Address)
	if err != nil || !a.Is6() || a.Zone() != "" || a.String() != o.Address || o.Tenant != "" {
		return refuse(
			Invalid,
			"node %s reports another app for %.50q of tenant %s, which is not a canonical address; it was not recorded",
			n.Name,
			o.Address,
			of.Name,
		)
	}
	at := address.Split(a)
	has := func(id *pilasterv1.TenantId) bool { return id.Id == uint32(at.Tenant) }
	switch {
	case at.Node.String() != n.Prefix || !slices.ContainsFunc(of.Ids, has) || at.App >= address.FirstReservedApp:
		return refuse(
			Refused,
			"node %s reports another app for %v of tenant %s, which cannot be the address of its container; it was "+
				"not recorded",
			n.Name,
			a,
			of.Name,
		)
	case o.App == 0 || o.App >= uint32(address.FirstReservedApp):
		return refuse(
			Invalid,
			"node %s reports for %v of tenant %s app %d, which is out of range; it was not recorded",
			n.Name,
			a,
			of.Name,
			o.App,
		)
	}
	return nil
}

// beginHosting records that a node hosts a tenant. The record says that the node accepts all ids, before the node
// allocates from the current id. A node that would not enforce the tenant's policies is refused. An existing record
// keeps its content; earlier messages no longer count.
func (t *txn) beginHosting(n pki.Node, sequence uint64, found *pilasterv1.Tenant) error {
	record, err := t.member(n)
	if err != nil {
		return err
	}
	if err := t.mayHost(record, found); err != nil {
		return err
	}
	noted, exists, err := t.hosting(found.Name, n.Name)
	if err != nil || exists && noted.Sequence >= sequence {
		return err
	}
	said := &pilasterv1.Hosting{
		Accepts:    noted.Accepts,
		Holds:      noted.Holds,
		Moving:     noted.Moving,
		Overrides:  noted.Overrides,
		HeardRound: noted.HeardRound,
		KeepsApps:  noted.KeepsApps,
		Unenforced: noted.Unenforced,
		Sequence:   sequence,
	}
	if !exists {
		for _, id := range found.Ids {
			said.Accepts = append(said.Accepts, id.Id)
			if !id.OnlyAccepted {
				said.Holds = []uint32{id.Id}
			}
		}
	}
	return t.save(hostingKey(found.Name, n.Name), said)
}

// hosting returns the record of a node and a tenant; an empty one if there is none.
func (t *txn) hosting(tenant, node string) (h *pilasterv1.Hosting, exists bool, err error) {
	value, err := t.get(hostingKey(tenant, node))
	if err != nil || value == "" {
		return new(pilasterv1.Hosting), false, err
	}
	h, err = decodeHosting(hostingKey(tenant, node), []byte(value))
	return h, true, err
}

// hostingOf returns the records of the nodes that host a tenant, by node.
func (t *txn) hostingOf(name string) ([]*pilasterv1.Hosting, error) {
	dir := dirHosting + name + "/"
	resp, err := t.list(dir)
	if err != nil {
		return nil, err
	}
	var all []*pilasterv1.Hosting
	for _, kv := range resp.Kvs {
		h, err := decodeHosting(string(kv.Key), kv.Value)
		if err != nil {
			return nil, err
		}
		all = append(all, h)
	}
	return all, nil
}

// hostedBy returns the tenants that a node hosts, and fetches their records. A node that is shut out can host no more.
// It reads one key per tenant: a list of all hosting records would grow with the number of nodes.
func (t *txn) hostedBy(node string, shutOut bool) (hosted []string, err error) {
	tenants, err := t.names(dirTenants)
	if err != nil {
		return nil, err
	}
	var keys []string
	for _, name := range tenants {
		keys = append(keys, hostingKey(name, node))
	}
	if err := t.fetch(keys...); err != nil {
		return nil, err
	}
	keys = nil
	for _, name := range tenants {
		key := hostingKey(name, node)
		if !shutOut {
			t.compared[key] = true
		}
		if t.readings[key].value != "" {
			hosted, keys = append(hosted, name), append(keys, dirTenants+name)
		}
	}
	return hosted, t.fetch(keys...)
}

func hostingKey(tenant, node string) string { return dirHosting + tenant + "/" + node }

// decodeHosting also reads records of old builds that have only a UUID: such a node has reported nothing.
func decodeHosting(key string, value []byte) (*pilasterv1.Hosting, error) {
	h := new(pilasterv1.Hosting)
	if strings.HasPrefix(string(value), "{") {
		if err := decode(key, value, h); err != nil {
			return nil, err
		}
	}
	h.Tenant, h.Node, _ = strings.Cut(strings.TrimPrefix(key, dirHosting), "/")
	return h, nil
}
