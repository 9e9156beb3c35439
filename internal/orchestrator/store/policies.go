package store

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// The store keeps policies as documents, one per key, and does not interpret them. Its callers have validated them.

// Limits of a tenant's policies. Each node that hosts the tenant has all of them in memory.
const (
	maxPolicies  = 10_000
	maxDocuments = 16 << 20 // bytes of all documents
)

// Applying are the options of ApplyPolicies.
type Applying struct {
	DryRun bool // return the changes, but write nothing
	Force  bool // even if nodes that host the tenant would not enforce them
}

// Applied is the result for one policy.
type Applied struct {
	Change   pilasterv1.PolicyChange
	Changed  *timestamppb.Timestamp
	Revision int64 // of the store, after the change; 0 for a dry run
}

// ApplyPolicies creates or changes policies of a tenant, all or none, and returns the result for each. It does not
// write policies that are equal already.
func (s *Store) ApplyPolicies(
	ctx context.Context,
	name string,
	policies []*pilasterv1.Policy,
	how Applying,
) (all []Applied, err error) {
	revision, err := s.changePolicies(ctx, name, policies, how.DryRun, func(of *pilasterv1.Tenant, t *txn) (err error) {
		all, err = t.applyPolicies(of, policies, how.Force)
		return err
	})
	if err != nil {
		return nil, err
	}
	for i := range all {
		switch {
		case all[i].Change != pilasterv1.PolicyChange_POLICY_CHANGE_UNCHANGED && how.DryRun:
		case all[i].Change != pilasterv1.PolicyChange_POLICY_CHANGE_UNCHANGED:
			all[i].Revision = s.cluster.From + revision
		default:
			all[i].Revision += s.cluster.From
		}
	}
	return all, nil
}

func (t *txn) applyPolicies(
	of *pilasterv1.Tenant,
	policies []*pilasterv1.Policy,
	force bool,
) (all []Applied, err error) {
	name := of.Name
	now, created, grown, enforced := timestamppb.New(time.Now()), 0, 0, false
	for _, p := range policies {
		was := new(pilasterv1.Policy)
		exists, err := t.load(policyKey(name, p), was)
		if err != nil {
			return nil, err
		}
		switch {
		case exists && was.Document == p.Document:
			all = append(
				all,
				Applied{
					pilasterv1.PolicyChange_POLICY_CHANGE_UNCHANGED,
					was.Changed,
					t.readings[policyKey(name, p)].revision,
				},
			)
			continue
		case exists:
			all = append(all, Applied{Change: pilasterv1.PolicyChange_POLICY_CHANGE_CONFIGURED, Changed: now})
		default:
			created++
			all = append(all, Applied{Change: pilasterv1.PolicyChange_POLICY_CHANGE_CREATED, Changed: now})
		}
		record := &pilasterv1.Policy{Document: p.Document, Audit: p.Audit, Rules: p.Rules, Changed: now}
		if err := t.save(policyKey(name, p), record); err != nil {
			return nil, err
		}
		grown += len(p.Document) - len(was.Document)
		enforced = enforced || !p.Audit
	}
	if enforced && !force {
		if err := t.mayEnforce(of); err != nil {
			return nil, err
		}
	}
	return all, t.checkPolicies(name, created, grown)
}

// checkPolicies refuses a change that exceeds a tenant's limits. A tenant that exceeds a limit already may shrink.
func (t *txn) checkPolicies(name string, created, grown int) error {
	if created == 0 && grown <= 0 {
		return nil
	}
	resp, err := t.list(dirPolicies + name + "/")
	if err != nil {
		return err
	}
	bytes := 0 // stored size, little more than the documents
	for _, kv := range resp.Kvs {
		bytes += len(kv.Value)
	}
	switch has := len(resp.Kvs); {
	case created > 0 && has+created > maxPolicies:
		return refuse(
			Full,
			"tenant %s has %d policies, %d more are new, and the maximum is %d; nothing was changed: delete some "+
				"first, or merge several into one",
			name,
			has,
			created,
			maxPolicies,
		)
	case grown > 0 && bytes+grown > maxDocuments:
		return refuse(
			Full,
			"the policies of tenant %s have %d KiB, %d KiB more are new, and the maximum is %d KiB, because each node "+
				"that hosts the tenant has all of them; nothing was changed: delete some first, or select by fewer "+
				"labels and CIDRs",
			name,
			bytes>>10,
			(grown+1023)>>10,
			maxDocuments>>10,
		)
	}
	return nil
}

// DeletePolicies deletes policies of a tenant, all or none.
func (s *Store) DeletePolicies(ctx context.Context, name string, policies []*pilasterv1.Policy) error {
	_, err := s.changePolicies(ctx, name, policies, false, func(of *pilasterv1.Tenant, t *txn) error {
		if err := t.mayEndPolicies(of, policies); err != nil {
			return err
		}
		for _, p := range policies {
			key := policyKey(name, p)
			if value, err := t.get(key); err != nil {
				return err
			} else if value == "" {
				return refuse(NotFound, "tenant %s has no policy %s; nothing was changed: `pilaster policy list "+
					"--tenant %s` lists its policies", name, PolicyName(p), name)
			}
			t.delete(key)
		}
		return nil
	})
	return err
}

// mayEndPolicies refuses to delete the last policies of a tenant with offloads: a frontend without rules drops.
func (t *txn) mayEndPolicies(of *pilasterv1.Tenant, deleted []*pilasterv1.Policy) error {
	if len(of.Offloads) == 0 {
		return nil
	}
	ends := map[string]bool{}
	for _, p := range deleted {
		ends[policyKey(of.Name, p)] = true
	}
	names, err := t.names(dirPolicies + of.Name + "/")
	for _, name := range names {
		key := dirPolicies + of.Name + "/" + name
		if ends[key] {
			continue
		}
		// get, because the commit then fails if another deletion has this one.
		if value, err := t.get(key); err != nil || value != "" {
			return err
		}
	}
	if err != nil {
		return err
	}
	return refuse(Refused, "tenant %s has offloads, whose frontends need at least one policy; nothing was changed: "+
		"stop them first with `pilaster offload stop %s --node %s`", of.Name, of.Name, of.Offloads[0].Node)
}

// HasPolicies reports whether the tenant has policies now.
func (s *Store) HasPolicies(ctx context.Context, name string) (has bool, err error) {
	err = s.change(ctx, func(t *txn) error {
		resp, err := t.read(dirPolicies+name+"/", clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(1))
		has = err == nil && len(resp.Kvs) > 0
		return err
	})
	return has, err
}

// changePolicies changes policies in one transaction or not at all. It returns etcd's revision of the transaction.
func (s *Store) changePolicies(
	ctx context.Context,
	name string,
	policies []*pilasterv1.Policy,
	dryRun bool,
	decide func(*pilasterv1.Tenant, *txn) error,
) (revision int64, err error) {
	if err := checkTenant(name); err != nil {
		return 0, err
	}
	// The transaction compares each policy, the tenant, the directory of policies and the hosting nodes.
	if most := s.committer.maxBatch - 3; len(policies) > most {
		return 0, refuse(
			Full,
			"%d policies are more than the %d that the store changes at once; nothing was changed: use several steps, "+
				"in an order in which each step is correct by itself",
			len(policies),
			most,
		)
	}
	keys := []string{dirTenants + name}
	for _, p := range policies {
		if len(policyKey(name, p)) > maxFetched {
			return 0, refuse(
				Invalid,
				"the name of policy %.100q is too long; nothing was changed",
				p.Name,
			)
		}
		keys = append(keys, policyKey(name, p))
	}
	var last *txn
	err = s.change(ctx, func(t *txn) error {
		last = t
		if err := t.fetch(keys...); err != nil {
			return err
		}
		of := new(pilasterv1.Tenant)
		if err := t.loadTenant(name, of); err != nil {
			return err
		}
		if err := decide(of, t); err != nil {
			return err
		}
		t.indivisible = true
		if w := t.weight(); !w.fits(s.committer.maxBatch) {
			return refuse(
				Full,
				"the policies have %d KiB, more than the %d KiB that the store changes at once; nothing was changed: "+
					"use several steps, in an order in which each step is correct by itself",
				w.bytes>>10,
				maxBytes>>10,
			)
		}
		if dryRun {
			t.writes, t.index = nil, map[string]int{}
		}
		return nil
	})
	if err != nil || last.group == nil {
		return 0, err
	}
	return last.group.revision, nil
}

// PolicyName is a policy's name in messages: "networkpolicy/shop/web", "clusternetworkpolicy/base".
func PolicyName(p *pilasterv1.Policy) string {
	words := []string{strings.ToLower(p.Kind), p.Namespace, p.Name}
	return strings.Join(slices.DeleteFunc(words, func(word string) bool { return word == "" }), "/")
}

func policyKey(tenant string, p *pilasterv1.Policy) string {
	return dirPolicies + strings.Join([]string{tenant, p.Kind, p.Namespace, p.Name}, "/")
}

// decodePolicy decodes a policy, or the key of a deleted policy without value. The revision is etcd's.
func decodePolicy(key string, value []byte, revision int64) (*pilasterv1.Policy, error) {
	p := new(pilasterv1.Policy)
	if len(value) > 0 {
		if err := decode(key, value, p); err != nil {
			return nil, err
		}
		p.Revision = revision
	}
	words := strings.Split(strings.TrimPrefix(key, dirPolicies), "/")
	if len(words) != 4 {
		return nil, fmt.Errorf("the store's %s is not readable: it names no policy", key)
	}
	p.Tenant, p.Kind, p.Namespace, p.Name = words[0], words[1], words[2], words[3]
	return p, nil
}
