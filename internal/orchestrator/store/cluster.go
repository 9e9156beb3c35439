package store

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/tenant"
)

// Cluster has the decisions of the first start. Only a restore changes it. The join token is not part of it, because
// administrators can rotate the token.
type Cluster struct {
	UUID      string
	Plan      address.Plan
	Authority *pki.Authority
	From      int64 // offset of revisions; a restore raises it above all earlier revisions
}

// clusterRecord is the stored form of Cluster.
type clusterRecord struct {
	UUID          string       `json:"uuid"`
	BasePrefix    netip.Prefix `json:"basePrefix"`
	PrivatePrefix netip.Prefix `json:"privatePrefix"`
	Created       time.Time    `json:"created"`
	CA            []byte       `json:"ca"`
	CAKey         []byte       `json:"caKey"`
	JoinSecret    []byte       `json:"joinSecret"`
	From          int64        `json:"revisionsFrom,omitempty"`

	Gateways *gatewayRecord `json:"gateways,omitempty"`    // nil in a cluster of a build without gateway prefixes
	VTEPs    netip.Prefix   `json:"vteps,omitzero"`        // see UseVTEPs
	Egress   netip.Prefix   `json:"egressPrefix,omitzero"` // see useEgressPrefix

	Identifiers bool `json:"identifiers,omitempty"` // see reserveIdentifiers
	Services    bool `json:"services,omitempty"`    // see reserveServices
}

type gatewayRecord struct {
	V4 netip.Prefix `json:"v4"`
	V6 netip.Prefix `json:"v6"`
}

// plan returns the plan of the record. An older cluster has the default gateway prefixes that do not overlap its plan.
func (r clusterRecord) plan() address.Plan {
	plan := address.Plan{Base: r.BasePrefix, Private: r.PrivatePrefix}
	if r.Gateways != nil {
		plan.Gateway4, plan.Gateway6 = r.Gateways.V4, r.Gateways.V6
	} else {
		plan.Gateway4, plan.Gateway6 = address.DefaultPlan().Gateway4, address.DefaultPlan().Gateway6
		if plan.Validate() != nil {
			plan.Gateway6 = netip.Prefix{}
		}
	}
	plan.Egress = r.Egress
	return plan
}

// Open reads the cluster from etcd, or creates it. A zero prefix in wanted means the prefix of the cluster, or the
// default for a new cluster. Other prefixes must equal those of the cluster.
func Open(ctx context.Context, etcd *clientv3.Client, wanted address.Plan, log *slog.Logger) (*Store, error) {
	s := &Store{
		etcd:      etcd,
		log:       log,
		appLimit:  MaxApps,
		rewound:   make(chan struct{}, 1),
		committer: committer{maxWaiting: maxWaiting, maxBatch: maxBatchOf(etcd)},
	}
	var r clusterRecord
	made := false
	err := s.change(ctx, func(t *txn) error {
		made = false
		value, err := t.get(keyCluster)
		if err != nil {
			return err
		}
		if value != "" {
			if r, err = t.clusterRecord(); err != nil || !wanted.Egress.IsValid() || r.Egress.IsValid() {
				return err
			}
			return s.useEgressPrefix(t, &r, wanted.Egress)
		}
		if r, err = newCluster(wanted); err != nil {
			return err
		}
		made = true
		return t.saveCluster(r)
	})
	if err != nil {
		return nil, err
	}
	for _, p := range []struct {
		flag        string
		wanted, has netip.Prefix
	}{
		{"--base-prefix", wanted.Base, r.BasePrefix}, {"--private-prefix", wanted.Private, r.PrivatePrefix},
		{"--gateway-prefix", wanted.Gateway4, r.plan().Gateway4},
		{"--gateway-prefix", wanted.Gateway6, r.plan().Gateway6},
		{"--egress-prefix", wanted.Egress, r.Egress},
	} {
		if p.wanted.IsValid() && p.wanted != p.has {
			return nil, refuse(
				Refused,
				"this cluster was made with %s %v and cannot change to %v; nothing was changed: leave the flag out, "+
					"or start a new cluster with another --data-dir",
				p.flag,
				p.has,
				p.wanted,
			)
		}
	}
	if s.cluster, err = r.cluster(); err != nil {
		return nil, err
	}
	if made {
		log.Warn("the store was empty: a new cluster was created, with a new join token; nodes of an earlier cluster "+
			"are refused until its backup is restored", "cluster", s.cluster.UUID)
	}
	if err := s.change(ctx, (*txn).adoptIndexes); err != nil {
		return nil, err
	}
	return s, s.grant(ctx)
}

// clusterRecord reads the record; the commit fails if it has changed since.
func (t *txn) clusterRecord() (r clusterRecord, err error) {
	value, err := t.get(keyCluster)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(value), &r); err != nil {
		return r, fmt.Errorf("the store's cluster record is not readable: %w", err)
	}
	return r, nil
}

func (t *txn) saveCluster(r clusterRecord) error {
	text, err := json.Marshal(r)
	t.put(keyCluster, string(text))
	return err
}

func newCluster(wanted address.Plan) (clusterRecord, error) {
	plan := address.DefaultPlan()
	if wanted.Base.IsValid() {
		plan.Base = wanted.Base
	}
	if wanted.Private.IsValid() {
		plan.Private = wanted.Private
	}
	if wanted.Gateway4.IsValid() {
		plan.Gateway4 = wanted.Gateway4
	}
	if wanted.Gateway6.IsValid() {
		plan.Gateway6 = wanted.Gateway6
	}
	plan.Egress = wanted.Egress
	if err := plan.Validate(); err != nil {
		return clusterRecord{}, refuse(Invalid, "%v", err)
	}
	authority, err := pki.NewAuthority()
	if err != nil {
		return clusterRecord{}, err
	}
	r := clusterRecord{
		UUID:          join.NewUUID(),
		BasePrefix:    plan.Base,
		PrivatePrefix: plan.Private,
		Created:       time.Now().UTC(),
		JoinSecret:    make([]byte, 16),
	}
	r.Gateways, r.Egress = &gatewayRecord{plan.Gateway4, plan.Gateway6}, plan.Egress
	rand.Read(r.JoinSecret)
	r.CA, r.CAKey, err = authority.Marshal()
	return r, err
}

func (r clusterRecord) cluster() (Cluster, error) {
	authority, err := pki.ParseAuthority(r.CA, r.CAKey)
	if err != nil {
		return Cluster{}, fmt.Errorf("the store's cluster record: %w", err)
	}
	c := Cluster{UUID: r.UUID, Plan: r.plan(), Authority: authority, From: r.From}
	if err := c.Plan.Validate(); err != nil {
		return Cluster{}, fmt.Errorf("the store's cluster record: %w", err)
	}
	if !join.IsUUID(r.UUID) {
		return Cluster{}, fmt.Errorf("the store's cluster record: %q is not a UUID", r.UUID)
	}
	_, err = r.token(authority)
	return c, err
}

func (r clusterRecord) token(authority *pki.Authority) (join.Token, error) {
	t := join.Token{CA: authority.Sum()}
	if len(r.JoinSecret) != len(t.Secret) {
		return t, fmt.Errorf("the store's cluster record has no join secret")
	}
	copy(t.Secret[:], r.JoinSecret)
	return t, nil
}

// Token returns the current join token.
func (s *Store) Token(ctx context.Context) (join.Token, error) {
	return s.token(ctx, func(*txn, *clusterRecord) error { return nil })
}

// RotateToken replaces the join token and returns the new one. The old one is invalid from then on.
func (s *Store) RotateToken(ctx context.Context) (join.Token, error) {
	return s.token(ctx, func(t *txn, r *clusterRecord) error {
		r.JoinSecret = make([]byte, len(join.Token{}.Secret))
		rand.Read(r.JoinSecret)
		return t.saveCluster(*r)
	})
}

func (s *Store) token(ctx context.Context, change func(*txn, *clusterRecord) error) (join.Token, error) {
	var r clusterRecord
	err := s.change(ctx, func(t *txn) (err error) {
		if r, err = t.clusterRecord(); err != nil {
			return err
		}
		return change(t, &r)
	})
	if err != nil {
		return join.Token{}, err
	}
	return r.token(s.cluster.Authority)
}

// UseVTEPs records the prefix of the nodes' tunnel addresses at its first use. Later it must be the same, because a
// node's address follows from the prefix and the node's number.
func (s *Store) UseVTEPs(ctx context.Context, pool netip.Prefix) error {
	return s.change(ctx, func(t *txn) error {
		r, err := t.clusterRecord()
		if err != nil {
			return err
		}
		switch {
		case r.VTEPs == pool:
			return nil
		case r.VTEPs.IsValid():
			return refuse(
				Refused,
				"this cluster uses --evpn-vtep-pool %v and cannot change to %v, because its nodes have addresses of "+
					"it; nothing was changed: use %v",
				r.VTEPs,
				pool,
				r.VTEPs,
			)
		case pool.Overlaps(r.plan().Gateway4):
			return refuse(
				Invalid,
				"--evpn-vtep-pool %v overlaps the cluster's gateway prefix %v; nothing was changed: choose another",
				pool,
				r.plan().Gateway4,
			)
		}
		r.VTEPs = pool
		return t.saveCluster(r)
	})
}

// The prefix of identifiers and locators is reserved from the first tenant on that uses it, and for good: nodes then
// drop packets of all others with its addresses. Before that, regions and the underlay may use it.

// reserveIdentifiers reserves the prefix for a tenant, unless something of the cluster is in it.
func (s *Store) reserveIdentifiers(t *txn, name string) error {
	reserved, err := s.cluster.Plan.IdentifierPrefix()
	if err != nil {
		return err
	}
	r, err := t.clusterRecord()
	if err != nil || r.Identifiers {
		return err
	}
	inUse := func(what string, is netip.Prefix) error {
		if !is.Overlaps(reserved) {
			return nil
		}
		return refuse(
			Refused,
			"tenant %s: %v, which its network reserves because it follows from the base prefix %v, overlaps %v, %s; "+
				"nothing was changed: remove that, or use another network",
			name,
			reserved,
			s.cluster.Plan.Base,
			is,
			what,
		)
	}
	if err := t.checkOthers(inUse); err != nil {
		return err
	}
	r.Identifiers = true
	return t.saveCluster(r)
}

// useEgressPrefix records the egress prefix of a cluster that has none. Addresses that were allocated before stay.
func (s *Store) useEgressPrefix(t *txn, r *clusterRecord, wanted netip.Prefix) error {
	invalid := func(format string, args ...any) error {
		return refuse(Invalid, "--egress-prefix: "+format+"; nothing was changed", args...)
	}
	plan := r.plan()
	plan.Identifiers, plan.Egress = r.Identifiers, wanted
	if err := plan.Validate(); err != nil {
		return invalid("%v", err)
	}
	if services, err := r.plan().ServicePrefix(); err == nil && services.Overlaps(wanted) {
		return invalid("%v overlaps %v, which has the addresses of services", wanted, services)
	}
	apart := func(what string, is netip.Prefix) error {
		if !is.Overlaps(wanted) {
			return nil
		}
		return invalid("%v overlaps %v, %s", wanted, is, what)
	}
	if err := t.checkOthers(apart); err != nil {
		return err
	}
	nodes, err := t.list(dirNodes)
	if err != nil {
		return err
	}
	for _, kv := range nodes.Kvs {
		n := new(pilasterv1.Node)
		if err := decode(string(kv.Key), kv.Value, n); err != nil {
			return err
		}
		prefix, err := netip.ParsePrefix(n.Prefix)
		if err != nil {
			return fmt.Errorf("the store's node %s is not readable: %w", n.Name, err)
		}
		if err := hasEgressNode(plan, prefix); err != nil {
			return invalid("node %s: %v", n.Name, err)
		}
	}
	r.Egress = wanted
	return t.saveCluster(*r)
}

// hasEgressNode refuses a node whose number is beyond the egress prefix.
func hasEgressNode(plan address.Plan, node netip.Prefix) error {
	if _, ok := plan.EgressNode(node); ok {
		return nil
	}
	return fmt.Errorf("node prefix %v has number %d, and egress prefix %v has a /64 for numbers below %d",
		node, plan.NodeNumber(node), plan.Egress, egressNodes(plan))
}

// egressNodes returns the number of nodes that have egress addresses, those from 0 on.
func egressNodes(plan address.Plan) uint64 {
	if !plan.Egress.IsValid() {
		return plan.Nodes()
	}
	return min(plan.Nodes(), 1<<(address.NodeBits-plan.Egress.Bits()))
}

// checkOthers calls check for what a prefix of the cluster must not overlap: other regions, the underlay, and addresses
// of services for hosts outside.
func (t *txn) checkOthers(check func(what string, is netip.Prefix) error) error {
	if err := t.checkFabric(check); err != nil {
		return err
	}
	return t.checkExposed(check)
}

// checkFabric calls check for the base prefixes of other regions, and for the underlay.
func (t *txn) checkFabric(check func(what string, is netip.Prefix) error) error {
	regions, err := t.regions()
	if err != nil {
		return err
	}
	for _, other := range regions {
		if base, err := netip.ParsePrefix(other.BasePrefix); err == nil {
			if err := check("the base prefix of region "+other.Name, base); err != nil {
				return err
			}
		}
	}
	return t.checkUnderlay(check)
}

// checkUnderlay calls check for the addresses of the underlay that the store knows: of nodes and of underlay services.
func (t *txn) checkUnderlay(check func(what string, is netip.Prefix) error) error {
	nodes, err := t.list(dirNodes)
	if err != nil {
		return err
	}
	for _, kv := range nodes.Kvs {
		n := new(pilasterv1.Node)
		if err := decode(string(kv.Key), kv.Value, n); err != nil {
			return err
		}
		for _, text := range n.UplinkAddresses {
			if err := checkAddress(check, "an address of node "+n.Name, text); err != nil {
				return err
			}
		}
	}
	tenants, err := t.list(dirTenants)
	if err != nil {
		return err
	}
	for _, kv := range tenants.Kvs {
		of := new(pilasterv1.Tenant)
		if err := decode(string(kv.Key), kv.Value, of); err != nil {
			return err
		}
		for _, s := range of.UnderlayServices {
			what := fmt.Sprintf("the real address of underlay service %s/%s", of.Name, s.Name)
			if err := checkAddress(check, what, s.Real); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkExposed calls check for the addresses at which hosts outside reach services, and for the pools of such ones.
func (t *txn) checkExposed(check func(what string, is netip.Prefix) error) error {
	external, err := t.names(dirExternal)
	if err != nil {
		return err
	}
	for _, text := range external {
		if err := checkAddress(check, "an external address of services", text); err != nil {
			return err
		}
	}
	pools, err := t.servicePools()
	if err != nil {
		return err
	}
	for _, p := range pools {
		if err := check("a pool of load-balancer addresses", p); err != nil {
			return err
		}
	}
	return nil
}

func checkAddress(check func(what string, is netip.Prefix) error, what, text string) error {
	a, err := netip.ParseAddr(text)
	if err != nil || !a.Is6() {
		return nil
	}
	return check(what, netip.PrefixFrom(a, a.BitLen()))
}

// notReserved refuses a prefix or an address of something else if it is in the prefix of services, or in the reserved
// prefix of identifiers.
func (s *Store) notReserved(t *txn, what string, is netip.Prefix) error {
	if services, err := s.cluster.Plan.ServicePrefix(); err == nil && is.Overlaps(services) {
		return refuse(
			Refused,
			"%s %v overlaps %v, which has the addresses of services; nothing was changed: choose another",
			what,
			is,
			services,
		)
	}
	reserved, err := s.cluster.Plan.IdentifierPrefix()
	if err != nil || !is.Overlaps(reserved) {
		return nil
	}
	r, err := t.clusterRecord()
	if err != nil || !r.Identifiers {
		return err
	}
	return refuse(
		Refused,
		"%s %v overlaps %v, which this cluster reserves for tenants on network %s; nothing was changed: choose another",
		what,
		is,
		reserved,
		tenant.NetworksWith(tenant.Identifiers),
	)
}
