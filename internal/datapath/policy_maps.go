package datapath

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/policy"
)

// policyMaps are the kernel's tables of policies. The first two lead containers to their rules; what the others hold
// never changes its meaning.
type policyMaps struct {
	targets   *mapSync[pilasterPolTargetKey, pilasterPolTarget, pilasterPolTargetKey, pilasterPolTarget]
	overrides *mapSync[netip.Addr, address.AppID, pilasterAddr, uint32]
	apps      *mapSync[policy.PeerKey, policy.Peer, pilasterAppKey, pilasterAppRules]
	cidrs     *mapSync[policy.BlockKey, policy.ID, pilasterCidrKey, pilasterCidrRules]
	ports     *mapSync[policy.PortKey, policy.PortEntry, pilasterPortKey, pilasterPortRules]
	ranges    *mapSync[policy.RangeKey, policy.Verdict, pilasterRangeKey, pilasterRangeRules]
	hits      *mapSync[uint32, policy.RuleName, uint32, struct{}]
}

func (d *Datapath) policyMaps() *policyMaps {
	o := &d.objects
	t := &policyMaps{
		targets: newMapSync("policy-subjects", "apps of containers", o.PolSubjectsV1, targetsOf, targetEntry),
		overrides: newMapSync(
			"policy-overrides",
			"identities that have changed",
			o.PolOverridesV1,
			overridesOf,
			overrideEntry,
		),
		apps:   newMapSync("policy-peers", "apps of peers", o.PolAppsV1, peersOf, appEntry),
		cidrs:  newMapSync("policy-blocks", "blocks of addresses", o.PolBlocksV1, cidrsOf, cidrEntry),
		ports:  newMapSync("policy-ports", "ports", o.PolPortsV1, portsOf, portEntry),
		ranges: newMapSync("policy-ranges", "ranges of ports", o.PolRangesV1, rangesOf, rangeEntry),
		hits:   newMapSync("policy-rules", "rules", o.PolHitsV1, namesOf, hitEntry),
	}
	// Names of sets and tables are made with the tenant's. Ids and addresses should be one tenant's, but the cluster
	// says so and not the node; numbers of rules are one's own within a tenant.
	t.targets.size, t.targets.mayShare = func(t *dpapi.TenantPolicies) int { return len(t.IDs) * len(t.Tables.Subjects) }, shareTenantID
	t.targets.tenantIDOf = func(k pilasterPolTargetKey) uint32 { return k.Tenant }
	t.overrides.tenantIDOf = func(a pilasterAddr) uint32 { return uint32(address.Split(a.netip()).Tenant) }
	t.overrides.mayShare = func(a, b *dpapi.TenantPolicies) bool { return len(a.Overrides) > 0 && len(b.Overrides) > 0 }
	t.hits.mayShare = func(_, _ *dpapi.TenantPolicies) bool { return true }
	t.hits.read, t.hits.write = readHits, writeHits
	return t
}

// all are in the order in which they are shown.
func (t *policyMaps) all() []policyMap {
	return []policyMap{t.targets, t.apps, t.cidrs, t.ports, t.ranges, t.overrides, t.hits}
}

// checkAndRepair says how they are to change: those that lead, and the rules, in the order in which they are written.
func (t *policyMaps) compare(
	c policyChange,
) (subjects *mapDiff[pilasterPolTargetKey, pilasterPolTarget], overrides mapChange, rules []mapChange, err error) {
	if subjects, err = t.targets.compare(c); err != nil {
		return nil, nil, nil, err
	}
	if overrides, err = t.overrides.compare(c); err != nil {
		return nil, nil, nil, err
	}
	for _, table := range []policyMap{t.hits, t.ports, t.ranges, t.cidrs, t.apps} {
		change, err := table.change(c)
		if err != nil {
			return nil, nil, nil, err
		}
		rules = append(rules, change)
	}
	return subjects, overrides, rules, nil
}

func overridesOf(t *dpapi.TenantPolicies) map[netip.Addr]address.AppID    { return t.Overrides }
func peersOf(t *dpapi.TenantPolicies) map[policy.PeerKey]policy.Peer      { return t.Tables.Peers }
func cidrsOf(t *dpapi.TenantPolicies) map[policy.BlockKey]policy.ID       { return t.Tables.Blocks }
func portsOf(t *dpapi.TenantPolicies) map[policy.PortKey]policy.PortEntry { return t.Tables.Ports }
func rangesOf(t *dpapi.TenantPolicies) map[policy.RangeKey]policy.Verdict { return t.Tables.Ranges }
func namesOf(t *dpapi.TenantPolicies) map[uint32]policy.RuleName          { return t.Tables.Names }

func targetsOf(of *dpapi.TenantPolicies) map[pilasterPolTargetKey]pilasterPolTarget {
	all := make(map[pilasterPolTargetKey]pilasterPolTarget, len(of.IDs)*len(of.Tables.Subjects))
	for app, s := range of.Tables.Subjects {
		for _, id := range of.IDs {
			all[pilasterPolTargetKey{Tenant: uint32(id), App: uint32(app)}] = pilasterPolTarget{
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

func targetEntry(k pilasterPolTargetKey, s pilasterPolTarget) (pilasterPolTargetKey, pilasterPolTarget) {
	return k, s
}

// byDirection is what holds for packets out of a container and into it, in that order.
func byDirection(sets [2]policy.ID) [2]uint64 {
	return [2]uint64{uint64(sets[policy.Egress]), uint64(sets[policy.Ingress])}
}

func appEntry(k policy.PeerKey, p policy.Peer) (pilasterAppKey, pilasterAppRules) {
	return pilasterAppKey{
			Set: uint64(k.Set),
			App: uint32(k.App),
		}, pilasterAppRules{
			Table: uint64(p.Table),
			Cidrs: boolToUint32(p.Blocks),
		}
}

func cidrEntry(k policy.BlockKey, table policy.ID) (pilasterCidrKey, pilasterCidrRules) {
	key := pilasterCidrKey{Bits: 64 + uint32(k.Prefix.Bits()), Set: uint64(k.Set), Address: toAddr(k.Prefix.Addr())}
	return key, pilasterCidrRules{Bits: key.Bits, Table: uint64(table)}
}

func portEntry(k policy.PortKey, e policy.PortEntry) (pilasterPortKey, pilasterPortRules) {
	return pilasterPortKey{
			Table: uint64(k.Table),
			Port:  networkOrder(k.Port),
			Proto: k.Protocol,
			Scope: uint8(k.Scope),
		},
		pilasterPortRules{
			Verdict: ruleVerdict(e.Verdict),
			Ranges:  boolToUint32(e.Ranges),
		}
}

func rangeEntry(k policy.RangeKey, v policy.Verdict) (pilasterRangeKey, pilasterRangeRules) {
	key := pilasterRangeKey{
		Bits:  64 + 8 + uint32(k.Bits),
		Table: uint64(k.Table),
		Proto: k.Protocol,
		Port:  networkOrder(k.Port),
	}
	return key, pilasterRangeRules{Bits: key.Bits, Verdict: ruleVerdict(v)}
}

func overrideEntry(a netip.Addr, app address.AppID) (pilasterAddr, uint32) {
	return toAddr(a), uint32(app)
}

func hitEntry(rule uint32, _ policy.RuleName) (uint32, struct{}) { return rule, struct{}{} }

func ruleVerdict(v policy.Verdict) pilasterRuleVerdict {
	return pilasterRuleVerdict{Rules: v.Tiers, Ranks: v.Rank}
}

// networkOrder is a number whose bytes in memory are those of a port in a packet.
func networkOrder(port uint16) uint16 { return port<<8 | port>>8 }

func boolToUint32(is bool) uint32 {
	if is {
		return 1
	}
	return 0
}

// readHits leaves out what was counted.
func readHits(m *ebpf.Map, into map[uint32]struct{}) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	return forEachBatch(
		m,
		make([]uint32, batchSize),
		make([]uint64, batchSize*cpus),
		func(rules []uint32, _ []uint64) {
			for _, rule := range rules {
				into[rule] = struct{}{}
			}
		},
	)
}

// writeHits begins to count rules that are new.
func writeHits(m *ebpf.Map, rules []uint32, _ []struct{}) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	for some := range slices.Chunk(rules, batchSize) {
		if _, err := m.BatchUpdate(some, make([]uint64, len(some)*cpus), nil); err != nil {
			return fmt.Errorf("%v: %w", m, err)
		}
	}
	return nil
}

// batchSize are read or written with one call.
const batchSize = 4096

// readEntries takes all of a table that nobody else writes to.
func readEntries[K comparable, V any](m *ebpf.Map, into map[K]V) error {
	return forEachBatch(m, make([]K, batchSize), make([]V, batchSize), func(k []K, v []V) {
		for i := range k {
			into[k[i]] = v[i]
		}
	})
}

func forEachBatch[K, V any](m *ebpf.Map, keys []K, values []V, do func([]K, []V)) error {
	each := len(values) / len(keys)
	for cursor := new(ebpf.MapBatchCursor); ; {
		n, err := m.BatchLookup(cursor, keys, values, nil)
		do(keys[:n], values[:n*each])
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read %v: %w", m, err)
		}
	}
}

func writeEntries[K, V any](m *ebpf.Map, keys []K, values []V) error {
	for len(keys) > 0 {
		n := min(len(keys), batchSize)
		if _, err := m.BatchUpdate(keys[:n], values[:n], nil); err != nil {
			return fmt.Errorf("%v: %w", m, err)
		}
		keys, values = keys[n:], values[n:]
	}
	return nil
}

// deleteKeys takes away what may be gone already.
func deleteKeys[K any](m *ebpf.Map, keys []K) error {
	for len(keys) > 0 {
		n, err := m.BatchDelete(keys[:min(len(keys), batchSize)], nil)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			n, err = n+1, nil
		}
		if err != nil {
			return fmt.Errorf("%v: %w", m, err)
		}
		keys = keys[n:]
	}
	return nil
}

// tenantsWithPolicies are the tenant ids of which these entries say that they have policies.
func tenantsWithPolicies(subjects iter.Seq[pilasterPolTargetKey]) map[uint32]bool {
	ids := map[uint32]bool{}
	for k := range subjects {
		if k.App == uint32(policy.AnyApp) {
			ids[k.Tenant] = true
		}
	}
	return ids
}
