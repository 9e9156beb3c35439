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
	Overtaken []string           // tenants whose record has a later sequence number, so it was not changed
	Refused   map[string][]error // why overrides were not recorded, by tenant
}

// RecordHosting records a node's reports about the tenants that it hosts, and deletes the records of tenants that it no
// longer hosts. The sequence number orders the messages of a node. RecordHosting skips tenants that do not exist.
func (s *Store) RecordHosting(
	ctx context.Context,
	n pki.Node,
	sequence uint64,
	add []*pilasterv1.Hosting,
	remove []string,
) (result HostingResult, err error) {
	if len(add)+len(remove) == 0 {
		return result, nil
	}
	keys := nodeKeys(n)
	for _, report := range add {
		keys = append(keys, hostingKey(report.Tenant, n.Name), dirTenants+report.Tenant)
	}
	for _, tenant := range remove {
		keys = append(keys, hostingKey(tenant, n.Name), dirTenants+tenant)
	}
	err = s.changeQueued(ctx, func(t *txn) (err error) {
		if err := t.fetch(keys...); err != nil {
			return err
		}
		result, err = s.recordHosting(t, n, sequence, add, remove)
		return err
	}, weight{}, keys...)
	return result, err
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
	for _, report := range add {
		recorded, exists, err := t.hosting(report.Tenant, n.Name)
		if err != nil {
			return is, err
		}
		if recorded.Sequence > sequence {
			is.Overtaken = append(is.Overtaken, report.Tenant)
			continue
		}
		found := new(pilasterv1.Tenant)
		if known, err := t.load(dirTenants+report.Tenant, found); err != nil {
			return is, err
		} else if !known {
			continue
		}
		overrides, refused := ownOverrides(node, found, report.Overrides)
		if refused != nil {
			is.Refused[report.Tenant] = refused
		}
		// An equal report needs no later sequence number unless the tenant is in transition: rotation, migration, a
		// retirement round or an offload.
		same := slices.Equal(recorded.Accepts, report.Accepts) && slices.Equal(recorded.Holds, report.Holds) &&
			proto.Equal(recorded.Moving, report.Moving) &&
			slices.EqualFunc(
				recorded.Overrides,
				overrides,
				func(a, b *pilasterv1.Override) bool { return proto.Equal(a, b) },
			) &&
			recorded.HeardRound == report.HeardRound &&
			slices.Equal(recorded.KeepsApps, report.KeepsApps) &&
			recorded.Unenforced == report.Unenforced && sameOffloading(recorded, report)
		stable := len(found.Ids) == 1 && found.Leaving == "" && found.RetiringApps == nil && len(found.Offloads) == 0
		if exists && same && (stable || recorded.Sequence == sequence) {
			continue
		}
		record := &pilasterv1.Hosting{
			Accepts: report.Accepts, Holds: report.Holds, Moving: report.Moving, Overrides: overrides,
			HeardRound: report.HeardRound, KeepsApps: report.KeepsApps, Unenforced: report.Unenforced,
			AppliedChanges: report.AppliedChanges, PoliciesRevision: report.PoliciesRevision,
			Offloaded: report.Offloaded, LostFrontends: report.LostFrontends,
			AnsweringFrontends: report.AnsweringFrontends, Sequence: sequence,
		}
		if err := t.save(hostingKey(report.Tenant, n.Name), record); err != nil {
			return is, err
		}
	}
	for _, tenant := range remove {
		recorded, exists, err := t.hosting(tenant, n.Name)
		if err != nil {
			return is, err
		}
		if !exists || recorded.Sequence > sequence {
			continue
		}
		if err := s.releaseAll(t, n, tenant); err != nil {
			return is, err
		}
		if err := t.endHosting(tenant, n.Name); err != nil {
			return is, err
		}
	}
	return is, nil
}

// ownOverrides drops overrides of addresses that cannot be the node's, so that a wrong report cannot affect other
// nodes.
func ownOverrides(
	n *pilasterv1.Node,
	of *pilasterv1.Tenant,
	overrides []*pilasterv1.Override,
) (own []*pilasterv1.Override, refused []error) {
	seen := map[string]bool{}
	for _, o := range overrides {
		if err := checkOverride(n, of, o); err != nil {
			refused = append(refused, err)
		} else if seen[o.Address] {
			refused = append(refused, refuse(Invalid, "node %s reports two apps for %s of tenant %s; the first was "+
				"recorded", n.Name, o.Address, of.Name))
		} else {
			seen[o.Address], own = true, append(own, o)
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

// beginHosting records that a node hosts a tenant. A new record accepts all ids of the tenant, and holds the id for new
// containers. An existing record only gets the new sequence number. A node
// that would not enforce the tenant's policies is refused.
func (t *txn) beginHosting(n pki.Node, sequence uint64, found *pilasterv1.Tenant) error {
	node, err := t.member(n)
	if err != nil {
		return err
	}
	if err := t.mayHost(node, found); err != nil {
		return err
	}
	recorded, exists, err := t.hosting(found.Name, n.Name)
	if err != nil || exists && recorded.Sequence >= sequence {
		return err
	}
	record := &pilasterv1.Hosting{
		Accepts:    recorded.Accepts,
		Holds:      recorded.Holds,
		Moving:     recorded.Moving,
		Overrides:  recorded.Overrides,
		HeardRound: recorded.HeardRound,
		KeepsApps:  recorded.KeepsApps,
		Unenforced: recorded.Unenforced,
		Sequence:   sequence,

		AppliedChanges: recorded.AppliedChanges, PoliciesRevision: recorded.PoliciesRevision,
		Offloaded: recorded.Offloaded, LostFrontends: recorded.LostFrontends,
		AnsweringFrontends: recorded.AnsweringFrontends,
	}
	if !exists {
		for _, id := range found.Ids {
			record.Accepts = append(record.Accepts, id.Id)
			if !id.OnlyAccepted {
				record.Holds = []uint32{id.Id}
			}
		}
	}
	return t.save(hostingKey(found.Name, n.Name), record)
}

// hosting returns the hosting record of a node and a tenant, an empty one if there is none.
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

// hostedBy returns the tenants that a node hosts, and fetches their records. A node that is shut out cannot start to
// host other tenants, so with shutOut the commit does not compare the keys of tenants that the node does not host.
// hostedBy reads one key per tenant: a list of all hosting records would grow with the number of nodes.
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

// endHosting deletes the endpoints of services that a node has of a tenant, and the hosting record.
func (t *txn) endHosting(name, node string) error {
	of := new(pilasterv1.Tenant)
	if _, err := t.load(dirTenants+name, of); err != nil {
		return err
	}
	if of.ServicesNumber != 0 {
		if err := t.deleteSlices(name, node); err != nil {
			return err
		}
	}
	t.delete(hostingKey(name, node)) // last: an interrupted deletion of a node goes on with what it hosts
	return nil
}

func hostingKey(tenant, node string) string { return dirHosting + tenant + "/" + node }

// decodeHosting also reads records of old builds, which have only a UUID and no report.
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
