package datapath

import (
	"fmt"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/reason"
)

// Status reads from the kernel what it holds and counts now.
func (d *Datapath) Status() (agent.Status, error) {
	missing, notFirst, err := d.uplinkProblems()
	if err != nil {
		return agent.Status{}, err
	}
	entries, err := d.entries()
	if err != nil {
		return agent.Status{}, err
	}
	drops, err := d.drops()
	if err != nil {
		return agent.Status{}, err
	}
	return agent.Status{
		DeviceKind:   "veth",
		Programs:     d.version,
		Healthy:      len(missing) == 0,
		FirstInChain: len(missing) == 0 && len(notFirst) == 0,
		Problems:     append(missing, notFirst...),
		Entries:      entries,
		Drops:        drops,
	}, nil
}

func (d *Datapath) entries() ([]agent.Entries, error) {
	var all []agent.Entries
	for _, t := range []struct {
		name string
		m    *ebpf.Map
		used func() (int, error)
	}{
		{"locals", d.objects.PilLocalsV1, func() (int, error) { return used[uint64](d.objects.PilLocalsV1) }},
		{"sources", d.objects.PilSourcesV1, func() (int, error) { return used[pilasterSourceKey](d.objects.PilSourcesV1) }},
		{"tenants", d.objects.PilTenantsV2, func() (int, error) { return used[uint32](d.objects.PilTenantsV2) }},
		{"keys", d.objects.PilKeysV1, func() (int, error) { return used[uint32](d.objects.PilKeysV1) }},
	} {
		n, err := t.used()
		if err != nil {
			return nil, fmt.Errorf("count the entries of %s: %w", t.name, err)
		}
		all = append(all, agent.Entries{Table: t.name, Used: n, Capacity: int(t.m.MaxEntries())})
	}
	slots, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, err
	}
	flows := int(d.objects.PilFlows.MaxEntries()) * slots
	return append(all, agent.Entries{Table: "flows", Used: flows, Capacity: flows, Cache: true}), nil
}

func used[K comparable](m *ebpf.Map) (int, error) {
	keys, err := mapKeys[K](m)
	return len(keys), err
}

// drops adds up what the CPUs counted, exact whatever became of the events.
func (d *Datapath) drops() ([]agent.Drops, error) {
	var all []agent.Drops
	for _, r := range reason.All() {
		var states []pilasterDropState
		if err := d.objects.PilDropsV1.Lookup(uint32(r), &states); err != nil {
			return nil, fmt.Errorf("read the drops for %s: %w", r, err)
		}
		sum := agent.Drops{Reason: r.String()}
		for _, s := range states {
			sum.Packets += s.Packets
		}
		all = append(all, sum)
	}
	return all, nil
}
