package policymap

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
)

// policyMaps are the kernel's maps of policies. The first two point containers to their rules; the content of the
// others never changes under its id.
type policyMaps struct {
	Targets *MapSync[bpfobj.PilasterPolTargetKey, bpfobj.PilasterPolTarget, bpfobj.PilasterPolTargetKey,
		bpfobj.PilasterPolTarget]
	Overrides *MapSync[netip.Addr, address.AppID, bpfobj.PilasterAddr, uint32]
	Apps      *MapSync[policy.PeerKey, policy.Peer, bpfobj.PilasterAppKey, bpfobj.PilasterAppRules]
	Cidrs     *MapSync[policy.BlockKey, policy.ID, bpfobj.PilasterCidrKey, bpfobj.PilasterCidrRules]
	Ports     *MapSync[policy.PortKey, policy.PortEntry, bpfobj.PilasterPortKey, bpfobj.PilasterPortRules]
	Ranges    *MapSync[policy.RangeKey, policy.Verdict, bpfobj.PilasterRangeKey, bpfobj.PilasterRangeRules]
	Hits      *MapSync[uint32, policy.RuleName, uint32, struct{}]
}

func (d *Policies) PolicyMaps() *policyMaps {
	o := &d.host.Objects
	t := &policyMaps{
		Targets: newMapSync("policy-subjects", "apps of containers", o.PolSubjectsV1, targetsOf, targetEntry),
		Overrides: newMapSync(
			"policy-overrides",
			"identities that have changed",
			o.PolOverridesV1,
			overridesOf,
			overrideEntry,
		),
		Apps:   newMapSync("policy-peers", "apps of peers", o.PolAppsV1, peersOf, appEntry),
		Cidrs:  newMapSync("policy-blocks", "blocks of addresses", o.PolBlocksV1, cidrsOf, cidrEntry),
		Ports:  newMapSync("policy-ports", "ports", o.PolPortsV1, portsOf, portEntry),
		Ranges: newMapSync("policy-ranges", "ranges of ports", o.PolRangesV1, rangesOf, rangeEntry),
		Hits:   newMapSync("policy-rules", "rules", o.PolHitsV1, namesOf, hitEntry),
	}
	// Ids of sets and tables include the tenant's. Tenant ids and addresses should belong to one tenant, but the
	// cluster ensures that and not the node; numbers of rules are unique within a tenant only.
	t.Targets.size = func(t *dpapi.TenantPolicies) int { return len(t.IDs) * len(t.Tables.Subjects) }
	t.Targets.mayShare = shareTenantID
	t.Targets.tenantIDOf = func(k bpfobj.PilasterPolTargetKey) uint32 { return k.Tenant }
	t.Overrides.tenantIDOf = func(a bpfobj.PilasterAddr) uint32 { return uint32(address.Split(a.Addr()).Tenant) }
	t.Overrides.mayShare = func(a, b *dpapi.TenantPolicies) bool { return len(a.Overrides) > 0 && len(b.Overrides) > 0 }
	t.Hits.mayShare = func(_, _ *dpapi.TenantPolicies) bool { return true }
	t.Hits.Read, t.Hits.write = readHits, writeHits
	return t
}

// all returns the maps in the order in which they are reported.
func (t *policyMaps) all() []policyMap {
	return []policyMap{t.Targets, t.Apps, t.Cidrs, t.Ports, t.Ranges, t.Overrides, t.Hits}
}

// mapChanges are the changes of all maps.
type mapChanges struct {
	subjects  *mapDiff[bpfobj.PilasterPolTargetKey, bpfobj.PilasterPolTarget]
	overrides mapChange
	hits      *mapDiff[uint32, struct{}]
	rules     []mapChange // sets and tables, in the order in which they are written
}

func (t *policyMaps) compare(c policyChange) (m mapChanges, err error) {
	if m, err = t.comparePointers(c); err != nil {
		return m, err
	}
	if m.hits, err = t.Hits.compare(c); err != nil {
		return m, err
	}
	for _, table := range []policyMap{t.Ports, t.Ranges, t.Cidrs, t.Apps} {
		change, err := table.change(c)
		if err != nil {
			return m, err
		}
		m.rules = append(m.rules, change)
	}
	return m, nil
}

// comparePointers computes the changes of the maps that point containers to their rules.
func (t *policyMaps) comparePointers(c policyChange) (m mapChanges, err error) {
	if m.subjects, err = t.Targets.compare(c); err != nil {
		return m, err
	}
	m.overrides, err = t.Overrides.compare(c)
	return m, err
}

func (m mapChanges) checkCapacity(tenant string, room int) error {
	for _, table := range append([]mapChange{m.subjects, m.overrides, m.hits}, m.rules...) {
		if err := table.checkCapacity(tenant, room); err != nil {
			return err
		}
	}
	return nil
}

func (m mapChanges) writeRules() (err error) {
	for _, table := range m.rules {
		err = errors.Join(err, table.write())
	}
	return err
}

func (m mapChanges) deleteRules() (err error) {
	for _, table := range slices.Backward(m.rules) {
		err = errors.Join(err, table.deleteStale())
	}
	return err
}

func overridesOf(t *dpapi.TenantPolicies) map[netip.Addr]address.AppID    { return t.Overrides }
func peersOf(t *dpapi.TenantPolicies) map[policy.PeerKey]policy.Peer      { return t.Tables.Peers }
func cidrsOf(t *dpapi.TenantPolicies) map[policy.BlockKey]policy.ID       { return t.Tables.Blocks }
func portsOf(t *dpapi.TenantPolicies) map[policy.PortKey]policy.PortEntry { return t.Tables.Ports }
func rangesOf(t *dpapi.TenantPolicies) map[policy.RangeKey]policy.Verdict { return t.Tables.Ranges }
func namesOf(t *dpapi.TenantPolicies) map[uint32]policy.RuleName          { return t.Tables.Names }

func targetsOf(of *dpapi.TenantPolicies) map[bpfobj.PilasterPolTargetKey]bpfobj.PilasterPolTarget {
	all := make(map[bpfobj.PilasterPolTargetKey]bpfobj.PilasterPolTarget, len(of.IDs)*len(of.Tables.Subjects))
	for app, s := range of.Tables.Subjects {
		for _, id := range of.IDs {
			all[bpfobj.PilasterPolTargetKey{Tenant: uint32(id), App: uint32(app)}] = bpfobj.PilasterPolTarget{
				Sets:   byDirection(s.Sets),
				Audits: byDirection(s.Audit),
			}
		}
	}
	return all
}

func shareTenantID(a, b *dpapi.TenantPolicies) bool {
	return slices.ContainsFunc(a.IDs, func(id address.TenantID) bool { return slices.Contains(b.IDs, id) })
}

func targetEntry(
	k bpfobj.PilasterPolTargetKey,
	s bpfobj.PilasterPolTarget,
) (bpfobj.PilasterPolTargetKey, bpfobj.PilasterPolTarget) {
	return k, s
}

// byDirection returns the values for packets out of a container and into it, in that order.
func byDirection(sets [2]policy.ID) [2]uint64 {
	return [2]uint64{uint64(sets[policy.Egress]), uint64(sets[policy.Ingress])}
}

func appEntry(k policy.PeerKey, p policy.Peer) (bpfobj.PilasterAppKey, bpfobj.PilasterAppRules) {
	return bpfobj.PilasterAppKey{
			Set: uint64(k.Set),
			App: uint32(k.App),
		}, bpfobj.PilasterAppRules{
			Table: uint64(p.Table),
			Cidrs: bpfobj.BoolToUint32(p.Blocks),
		}
}

func cidrEntry(k policy.BlockKey, table policy.ID) (bpfobj.PilasterCidrKey, bpfobj.PilasterCidrRules) {
	key := bpfobj.PilasterCidrKey{
		Bits:    64 + uint32(k.Prefix.Bits()),
		Set:     uint64(k.Set),
		Address: bpfobj.ToAddr(k.Prefix.Addr()),
	}
	return key, bpfobj.PilasterCidrRules{Bits: key.Bits, Table: uint64(table)}
}

func portEntry(k policy.PortKey, e policy.PortEntry) (bpfobj.PilasterPortKey, bpfobj.PilasterPortRules) {
	return bpfobj.PilasterPortKey{
			Table: uint64(k.Table),
			Port:  networkOrder(k.Port),
			Proto: k.Protocol,
			Scope: uint8(k.Scope),
		},
		bpfobj.PilasterPortRules{
			Verdict: ruleVerdict(e.Verdict),
			Ranges:  bpfobj.BoolToUint32(e.Ranges),
		}
}

func rangeEntry(k policy.RangeKey, v policy.Verdict) (bpfobj.PilasterRangeKey, bpfobj.PilasterRangeRules) {
	key := bpfobj.PilasterRangeKey{
		Bits:  64 + 8 + uint32(k.Bits),
		Table: uint64(k.Table),
		Proto: k.Protocol,
		Port:  networkOrder(k.Port),
	}
	return key, bpfobj.PilasterRangeRules{Bits: key.Bits, Verdict: ruleVerdict(v)}
}

func overrideEntry(a netip.Addr, app address.AppID) (bpfobj.PilasterAddr, uint32) {
	return bpfobj.ToAddr(a), uint32(app)
}

func hitEntry(rule uint32, _ policy.RuleName) (uint32, struct{}) { return rule, struct{}{} }

func ruleVerdict(v policy.Verdict) bpfobj.PilasterRuleVerdict {
	return bpfobj.PilasterRuleVerdict{Rules: v.Tiers, Ranks: v.Rank}
}

// networkOrder returns a number whose bytes in memory are those of a port in a packet.
func networkOrder(port uint16) uint16 { return port<<8 | port>>8 }

// readHits reads the numbers of the counted rules, not the counts.
func readHits(m *ebpf.Map, into map[uint32]struct{}) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	return bpfobj.ForEachBatch(
		m,
		make([]uint32, bpfobj.BatchSize),
		make([]uint64, bpfobj.BatchSize*cpus),
		func(rules []uint32, _ []uint64) {
			for _, rule := range rules {
				into[rule] = struct{}{}
			}
		},
	)
}

// writeHits starts to count new rules.
func writeHits(m *ebpf.Map, rules []uint32, _ []struct{}) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	for some := range slices.Chunk(rules, bpfobj.BatchSize) {
		if _, err := m.BatchUpdate(some, make([]uint64, len(some)*cpus), nil); err != nil {
			return fmt.Errorf("%v: %w", m, err)
		}
	}
	return nil
}

// TenantsWithPolicies returns the tenant ids that have policies according to these entries.
func TenantsWithPolicies(subjects iter.Seq[bpfobj.PilasterPolTargetKey]) map[uint32]bool {
	ids := map[uint32]bool{}
	for k := range subjects {
		if k.App == uint32(policy.AnyApp) {
			ids[k.Tenant] = true
		}
	}
	return ids
}
