package store

import (
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/tenant"
)

// A migration that keeps the addresses (tenant.KeepsAddresses) loses no packet, because a node sends by a network only
// when all nodes that host the tenant receive by it. Network is the network by which containers send, Leaving the other
// one, by which they receive too.
//
//	join       Leaving is the new network, with Joining
//	switch     after all nodes have reported that: Network is the new network, Leaving the old one, without Joining
//	finish     after all nodes have reported that: only Network
//
// A node's report is about one value of Changes, so a report about an earlier step does not count.

// joinNetwork is the first part of a tenant's move to a network. It changes nothing for packets.
func (t *txn) joinNetwork(of *pilasterv1.Tenant, to string) error {
	if err := t.mayJoin(of, to); err != nil {
		return err
	}
	of.Leaving, of.Joining = to, true
	return t.saveChanged(of)
}

// continueJoining makes a tenant's containers send by the network that it joins, if all nodes receive by it, else it
// changes nothing. To its present network it cancels the move: then only FinishMigration is left, as after a move back.
func (t *txn) continueJoining(of *pilasterv1.Tenant, to string) error {
	if to == of.Leaving {
		hosting, err := t.hostingOf(of.Name)
		if err != nil || len(Unmoved(of, hosting)) > 0 {
			return err
		}
		if err := t.mayJoin(of, to); err != nil { // also what has changed since
			return err
		}
		of.Network, of.Leaving = to, of.Network
	}
	of.Joining = false
	return t.saveChanged(of)
}

// finishSwitching removes a tenant from its other network.
func (t *txn) finishSwitching(of *pilasterv1.Tenant, force bool) error {
	if of.Joining {
		return refuse(
			Refused,
			"tenant %s joins network %s, and its containers still send by network %s; nothing was changed: repeat "+
				"`pilaster tenant migrate %s --to %s`, or cancel the migration with --to %s",
			of.Name, of.Leaving, of.Network, of.Name, of.Leaving, of.Network,
		)
	}
	hosting, err := t.hostingOf(of.Name)
	if err != nil {
		return err
	}
	if late := Unmoved(of, hosting); len(late) > 0 && !force {
		return refuse(
			Refused,
			"not all containers of tenant %s send by network %s yet: %s; nothing was changed: wait for these nodes, "+
				"delete disconnected ones, or use --force: packets of these containers to other nodes are dropped "+
				"until they do",
			of.Name, of.Network, someOf(late),
		)
	}
	of.Leaving = ""
	return t.saveChanged(of)
}

// mayJoin refuses a tenant that uses what the network does not have, and one with containers on a node without it.
func (t *txn) mayJoin(of *pilasterv1.Tenant, to string) error {
	if err := t.mayMigrate(of, to); err != nil {
		return err
	}
	on, _ := tenant.TraitsOf(to)
	no := func(what, advice string) error {
		return refuse(Refused, "tenant %s cannot move to network %s: %s; nothing was changed: %s", of.Name, to, what,
			advice)
	}
	for _, id := range of.Ids {
		if on.Has(tenant.Announced) && id.Id > tenant.MaxAnnouncedID {
			return no(fmt.Sprintf("it has id %d, and the route distinguishers of BGP routes have room for ids up to %d",
				id.Id, tenant.MaxAnnouncedID), "ids are never reused, so create the tenant in another cluster, or let "+
				"it stay on network "+of.Network)
		}
	}
	services, published := len(of.UnderlayServices), len(of.Publications)
	if !on.Has(tenant.NorthSouth) && services+published > 0 {
		return no(fmt.Sprintf("that has no underlay services and publications, and it has %s and %s",
			humanize.Of(services, "underlay service", "underlay services"),
			humanize.Of(published, "publication", "publications")),
			fmt.Sprintf("delete them first (`pilaster underlay service list --tenant %s`, `pilaster underlay "+
				"publication list --tenant %s`)", of.Name, of.Name))
	}
	regions, err := t.regions()
	if err != nil {
		return err
	}
	there, err := cidrsIn(regions, of.Name)
	if err != nil {
		return err
	}
	if !on.Has(tenant.Regions) && len(there) > 0 {
		return no("that does not reach other regions, and it is in region "+there[0].Name,
			"import that region's export with the other tenants alone (`pilaster region import FILE --tenant "+
				"OTHERS`), or if there are none run `pilaster region delete "+there[0].Name+"`")
	}
	if tenant.NetworkHas(of.Network, tenant.Announced) && !on.Has(tenant.Announced) {
		imported, err := t.imported(of.Name)
		if err != nil {
			return err
		}
		if imported > 0 {
			return no(fmt.Sprintf("that does not reach other BGP speakers, of which it has %s",
				humanize.Of(imported, "address or prefix", "addresses and prefixes")),
				"make them withdraw their routes first")
		}
	}
	return t.haveNetwork(of, to, no)
}

// haveNetwork refuses a network that a node with containers of the tenant lacks.
func (t *txn) haveNetwork(of *pilasterv1.Tenant, to string, no func(what, advice string) error) error {
	nodes, err := t.hostingNodes(of.Name)
	if err != nil {
		return err
	}
	var without []string
	for _, n := range nodes {
		if !slices.Contains(n.Enforces, to) {
			without = append(without, n.Name)
		}
	}
	if without == nil {
		return nil
	}
	return no("it has containers on nodes without that network: "+someOf(without),
		"start their agents with it (`pilaster agent --help`; nodes with Open vSwitch have no other network with "+
			"tunnels), or move its containers to other nodes")
}

// imported counts the tenant's mappings of addresses outside of the cluster. The commit does not compare them, because
// there may be thousands.
func (t *txn) imported(name string) (n int, err error) {
	dir := dirMappings + name + "/"
	for from, more := dir, true; more; {
		resp, err := t.read(from, clientv3.WithRange(clientv3.GetPrefixRangeEnd(dir)), clientv3.WithLimit(mappingsRead))
		if err != nil {
			return 0, err
		}
		for _, kv := range resp.Kvs {
			m, err := decodeMapping(string(kv.Key), kv.Value)
			if err != nil {
				return 0, err
			}
			if m.Origin != "" {
				n++
			}
			from = string(kv.Key) + "\x00"
		}
		more = resp.More
	}
	return n, nil
}

// mappingsRead is the number of mappings per read.
const mappingsRead = 1000
