package store

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/tenant"
)

// While a tenant has policies that are not in audit, only nodes that enforce policies on all networks of the tenant may
// host it. Nodes report the networks on which they enforce policies. The change that starts hosting reads the policies,
// and the change that adds the first policy reads the hosting nodes. So if both run concurrently, one of them reads the
// other's writes, and is refused.

// mayHost refuses a node that would not enforce the tenant's policies.
func (t *txn) mayHost(n *pilasterv1.Node, of *pilasterv1.Tenant) error {
	without := unenforced(n, of)
	if without == "" {
		return nil
	}
	if tenant.KeepsAddresses(of.Network, of.Leaving) {
		return refuse(
			Refused,
			"tenant %s moves between networks %s and %s, and node %s does not have network %s; nothing was changed: "+
				"use another node, or finish the migration first (`pilaster tenant get %s`)",
			of.Name, of.Network, of.Leaving, n.Name, without, of.Name,
		)
	}
	has, err := t.enforced(of.Name)
	if err != nil || !has {
		return err
	}
	advice := fmt.Sprintf("use another node; `pilaster status` on %s shows the reason", n.Name)
	if len(n.Enforces) == 0 {
		advice = fmt.Sprintf("upgrade its agent, which is build %s, or use another node", cmp.Or(n.Version, "unknown"))
	}
	return refuse(
		Refused,
		"tenant %s has policies, and node %s enforces none on network %s; nothing was changed: %s",
		of.Name,
		n.Name,
		without,
		advice,
	)
}

// mayEnforce refuses the tenant's first policy that is not in audit if a node that hosts the tenant would not enforce
// it. Later policies need no check: mayHost has checked later nodes, and an administrator may have forced the first
// policy.
func (t *txn) mayEnforce(of *pilasterv1.Tenant) error {
	if has, err := t.enforced(of.Name); err != nil || has {
		return err
	}
	nodes, err := t.hostingNodes(of.Name)
	if err != nil {
		return err
	}
	var without []string
	for _, n := range nodes {
		if network := unenforced(n, of); network != "" {
			without = append(
				without,
				fmt.Sprintf("%s (build %s, on network %s)", n.Name, cmp.Or(n.Version, "unknown"), network),
			)
		}
	}
	if without == nil {
		return nil
	}
	return refuse(
		Refused,
		"tenant %s has containers on %s: %s; nothing was changed: upgrade their agents, move its containers to other "+
			"nodes, put the policies in audit, or use --force: builds without policies then allow everything there, "+
			"and others isolate its containers",
		of.Name,
		humanize.Of(len(without), "node that would not enforce policies", "nodes that would not enforce policies"),
		someOf(without),
	)
}

// hostingNodes returns the nodes that host a tenant, by name. The commit does not compare their records, because there
// may be thousands. A node may change its report right after the commit anyway.
func (t *txn) hostingNodes(name string) (all []*pilasterv1.Node, err error) {
	hosting, err := t.hostingOf(name)
	if err != nil {
		return nil, err
	}
	var keys []string
	for _, h := range hosting {
		keys = append(keys, dirNodes+h.Node)
	}
	if err := t.fetch(keys...); err != nil {
		return nil, err
	}
	for _, key := range slices.Sorted(slices.Values(keys)) {
		n := &pilasterv1.Node{}
		if value := t.readings[key].value; value != "" {
			if err := decode(key, []byte(value), n); err != nil {
				return nil, err
			}
		}
		n.Name = strings.TrimPrefix(key, dirNodes)
		all = append(all, n)
	}
	return all, nil
}

// unenforced returns a network of the tenant on which the node enforces no policies, "" if there is none.
func unenforced(n *pilasterv1.Node, of *pilasterv1.Tenant) string {
	for _, network := range tenantNetworks(of) {
		if !slices.Contains(n.Enforces, network) {
			return network
		}
	}
	return ""
}

// tenantNetworks returns the networks on which the tenant's containers have addresses.
func tenantNetworks(of *pilasterv1.Tenant) []string {
	network := cmp.Or(of.Network, tenant.DefaultNetwork)
	if of.Leaving == "" {
		return []string{network}
	}
	return []string{network, of.Leaving}
}

// enforced reports whether the tenant has policies that are not in audit. It ignores the writes of this change.
func (t *txn) enforced(name string) (bool, error) {
	dir := dirPolicies + name + "/"
	for from, more := dir, true; more; {
		resp, err := t.read(from, clientv3.WithRange(clientv3.GetPrefixRangeEnd(dir)), clientv3.WithLimit(policiesPage))
		if err != nil {
			return false, err
		}
		t.listed[dir] = true
		for _, kv := range resp.Kvs {
			p, err := decodePolicy(string(kv.Key), kv.Value, kv.ModRevision)
			if err != nil {
				return false, err
			}
			if !p.Audit {
				return true, nil
			}
			from = string(kv.Key) + "\x00"
		}
		more = resp.More
	}
	return false, nil
}

// policiesPage is the number of policies per read. Usually the first page has one that is not in audit.
const policiesPage = 16

// mostNamed is how many nodes a refusal lists.
const mostNamed = 10

func someOf(all []string) string {
	if more := len(all) - mostNamed; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(all[:mostNamed], ", "), more)
	}
	return strings.Join(all, ", ")
}
