package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/policy"
)

// rulings is what the tables of policies hold, or are to: an entry each for an entry.
type rulings struct {
	subjects  map[pilasterSubjectKey]pilasterSubject
	apps      map[pilasterAppKey]pilasterAppRules
	blocks    map[pilasterBlockKey]pilasterBlockRules
	ports     map[pilasterPortKey]pilasterPortRules
	ranges    map[pilasterRangeKey]pilasterRangeRules
	overrides map[pilasterAddr]uint32
	hits      map[uint32]struct{}
}

func noRulings() *rulings {
	return &rulings{map[pilasterSubjectKey]pilasterSubject{}, map[pilasterAppKey]pilasterAppRules{}, map[pilasterBlockKey]pilasterBlockRules{},
		map[pilasterPortKey]pilasterPortRules{}, map[pilasterRangeKey]pilasterRangeRules{}, map[pilasterAddr]uint32{}, map[uint32]struct{}{}}
}

// add renders a tenant's policies.
func (r *rulings) add(of agent.TenantPolicies) {
	for app, s := range of.Tables.Subjects {
		for _, id := range of.IDs {
			r.subjects[pilasterSubjectKey{Tenant: uint32(id), App: uint32(app)}] = pilasterSubject{Sets: byWay(s.Sets), Audits: byWay(s.Audit)}
		}
	}
	for k, p := range of.Tables.Peers {
		r.apps[pilasterAppKey{Set: uint64(k.Set), App: uint32(k.App)}] = pilasterAppRules{Table: uint64(p.Table), Blocks: oneIf(p.Blocks)}
	}
	for k, table := range of.Tables.Blocks {
		key := pilasterBlockKey{Bits: 64 + uint32(k.Prefix.Bits()), Set: uint64(k.Set), Address: words(k.Prefix.Addr())}
		r.blocks[key] = pilasterBlockRules{Bits: key.Bits, Table: uint64(table)}
	}
	for k, e := range of.Tables.Ports {
		key := pilasterPortKey{Table: uint64(k.Table), Port: networkOrder(k.Port), Proto: k.Protocol, Scope: uint8(k.Scope)}
		r.ports[key] = pilasterPortRules{Ruling: rulingOf(e.Verdict), Ranges: oneIf(e.Ranges)}
	}
	for k, v := range of.Tables.Ranges {
		key := pilasterRangeKey{Bits: 64 + 8 + uint32(k.Bits), Table: uint64(k.Table), Proto: k.Protocol, Port: networkOrder(k.Port)}
		r.ranges[key] = pilasterRangeRules{Bits: key.Bits, Ruling: rulingOf(v)}
	}
	for a, app := range of.Overrides {
		r.overrides[words(a)] = uint32(app)
	}
	for number := range of.Tables.Names {
		r.hits[number] = struct{}{}
	}
}

// byWay is what holds for packets out of a container and into it, in that order.
func byWay(sets [2]policy.ID) [2]uint64 {
	return [2]uint64{uint64(sets[policy.Egress]), uint64(sets[policy.Ingress])}
}

func rulingOf(v policy.Verdict) pilasterRuling { return pilasterRuling{Rules: v.Tiers, Ranks: v.Rank} }

// networkOrder is a number whose bytes in memory are those of a port in a packet.
func networkOrder(port uint16) uint16 { return port<<8 | port>>8 }

func oneIf(is bool) uint32 {
	if is {
		return 1
	}
	return 0
}

// rulings is what the tables hold: as this process has left them, or read from the kernel.
func (d *Datapath) rulings() (*rulings, error) {
	if d.policed != nil {
		return d.policed, nil
	}
	r, o := noRulings(), &d.objects
	return r, errors.Join(read(o.PolSubjectsV1, r.subjects), read(o.PolAppsV1, r.apps), read(o.PolBlocksV1, r.blocks), read(o.PolPortsV1, r.ports),
		read(o.PolRangesV1, r.ranges), read(o.PolOverridesV1, r.overrides), r.readHits(o.PolHitsV1))
}

// entriesAtOnce are read with one call.
const entriesAtOnce = 4096

// read takes all of a table that nobody else writes to.
func read[K comparable, V any](m *ebpf.Map, into map[K]V) error {
	return eachBatch(m, make([]K, entriesAtOnce), make([]V, entriesAtOnce), func(k []K, v []V) {
		for i := range k {
			into[k[i]] = v[i]
		}
	})
}

func (r *rulings) readHits(m *ebpf.Map) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	return eachBatch(m, make([]uint32, entriesAtOnce), make([]uint64, entriesAtOnce*cpus), func(rules []uint32, _ []uint64) {
		for _, rule := range rules {
			r.hits[rule] = struct{}{}
		}
	})
}

func eachBatch[K, V any](m *ebpf.Map, keys []K, values []V, do func([]K, []V)) error {
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

// fit refuses what the tables have no room for beside what they hold until then.
func (r *rulings) fit(had *rulings, room int) error {
	for _, t := range []struct {
		what string
		n    int
	}{
		{"apps of containers", union(had.subjects, r.subjects)}, {"apps of peers", union(had.apps, r.apps)}, {"blocks of addresses", union(had.blocks, r.blocks)},
		{"ports", union(had.ports, r.ports)}, {"ranges of ports", union(had.ranges, r.ranges)}, {"identities that have changed", union(had.overrides, r.overrides)},
		{"rules", union(had.hits, r.hits)},
	} {
		if t.n > room {
			return fmt.Errorf("policies need %d entries for %s, with those that are in force until then, and the node has room for %d; nothing was changed: start the agent with a higher --max-rules, or change fewer policies at once", t.n, t.what, room)
		}
	}
	return nil
}

func union[K comparable, V any](a, b map[K]V) int {
	n := len(a)
	for k := range b {
		if _, both := a[k]; !both {
			n++
		}
	}
	return n
}

// putAll writes what is not there yet, or is there and says something else.
func putAll[K, V comparable](m *ebpf.Map, had, want map[K]V) error {
	for k, v := range want {
		if is, there := had[k]; there && is == v {
			continue
		}
		if err := m.Put(k, v); err != nil {
			return fmt.Errorf("%v: %w", m, err)
		}
	}
	return nil
}

// removeOld takes away what was there and is to be no more.
func removeOld[K comparable, V any](m *ebpf.Map, had, want map[K]V) error {
	for k := range had {
		if _, stays := want[k]; stays {
			continue
		}
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("%v: %w", m, err)
		}
	}
	return nil
}

// marksOnlyOf is tenants that have policies by the first and none by the second.
func marksOnlyOf(a, b map[pilasterSubjectKey]pilasterSubject) map[uint32]bool {
	only := map[uint32]bool{}
	for k := range a {
		if _, both := b[k]; !both && k.App == uint32(policy.AnyApp) {
			only[k.Tenant] = true
		}
	}
	return only
}
