package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/policy"
)

// Limits of policies and sessions, unless the configuration says others.
const (
	DefaultMaxRules    = 1 << 18
	DefaultMaxSessions = placesPerBucket << 15 // 16 MiB

	MaxMaxRules    = 1 << 22
	MaxMaxSessions = placesPerBucket << 20
)

// placesPerBucket is bpf/sessions.h's BUCKET_PLACES.
const placesPerBucket = len(pilasterSessionBucket{}.Places)

// sessionBuckets is a power of 2, for the programs to find one by a mask.
func (d *Datapath) sessionBuckets() int {
	return 1 << bits.Len(uint((d.config.MaxSessions-1)/placesPerBucket))
}

// SetPolicies has containers policed by what these tenants' policies say, and by nothing else; or it is refused, and all is as it was. What sets
// and tables hold never changes under their names, so they come first; then containers are led to them one by one, and what nobody is led to any
// more goes. Established sessions that the new rules let pass are not touched.
func (d *Datapath) SetPolicies(tenants []agent.TenantPolicies) error {
	d.policies.Lock()
	defer d.policies.Unlock()
	had, err := d.rulings()
	if err != nil {
		return err
	}
	want := noRulings()
	for _, t := range tenants {
		want.add(t)
	}
	if err := want.fit(had, d.config.MaxRules); err != nil {
		return err
	}
	o := &d.objects
	d.policed = nil // until all is done nobody knows what they hold
	begin, end := marksOnlyOf(want.subjects, had.subjects), marksOnlyOf(had.subjects, want.subjects)
	err = errors.Join(d.adopt(begin), putAll(o.PolPortsV1, had.ports, want.ports), putAll(o.PolRangesV1, had.ranges, want.ranges), putAll(o.PolBlocksV1, had.blocks, want.blocks),
		putAll(o.PolAppsV1, had.apps, want.apps), d.countHits(had.hits, want.hits))
	if err != nil {
		return fmt.Errorf("write policies: %w; those from before hold", err)
	}
	err = errors.Join(putAll(o.PolOverridesV1, had.overrides, want.overrides), putAll(o.PolSubjectsV1, had.subjects, want.subjects),
		removeOld(o.PolSubjectsV1, had.subjects, want.subjects), removeOld(o.PolOverridesV1, had.overrides, want.overrides))
	if err == nil {
		err = d.countUp(o.PolGenerationV1)
	}
	if err == nil && len(begin)+len(end) > 0 {
		err = d.Void() // flows say whether their tenants have policies
	}
	if err != nil {
		return fmt.Errorf("lead containers to their policies: %w; some are under the new ones, the others under those from before", err)
	}
	err = errors.Join(removeOld(o.PolAppsV1, had.apps, want.apps), removeOld(o.PolBlocksV1, had.blocks, want.blocks), removeOld(o.PolPortsV1, had.ports, want.ports),
		removeOld(o.PolRangesV1, had.ranges, want.ranges), removeOld(o.PolHitsV1, had.hits, want.hits), removeOld(o.PolAdoptionsV1, end, nil))
	if err != nil {
		return fmt.Errorf("remove policies that nobody needs any more: %w; the new ones hold", err)
	}
	d.policed = want
	return nil
}

func (d *Datapath) countHits(had, want map[uint32]struct{}) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	for rule := range want {
		if _, counted := had[rule]; counted {
			continue
		}
		if err := d.objects.PolHitsV1.Update(rule, make([]uint64, cpus), ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return err
		}
	}
	return nil
}

// PolicyEntries counts what was written last; nothing where that did not succeed.
func (d *Datapath) PolicyEntries() []agent.Entries {
	d.policies.Lock()
	defer d.policies.Unlock()
	r, room := d.policed, d.config.MaxRules
	if r == nil {
		return nil
	}
	return []agent.Entries{{Table: "policy-subjects", Used: len(r.subjects), Capacity: room}, {Table: "policy-peers", Used: len(r.apps), Capacity: room},
		{Table: "policy-blocks", Used: len(r.blocks), Capacity: room}, {Table: "policy-ports", Used: len(r.ports), Capacity: room},
		{Table: "policy-ranges", Used: len(r.ranges), Capacity: room}, {Table: "policy-overrides", Used: len(r.overrides), Capacity: room},
		{Table: "policy-rules", Used: len(r.hits), Capacity: room}}
}

// RuleHits is how many packets a rule has denied, or would have if its policy were not in audit.
func (d *Datapath) RuleHits() (map[uint32]uint64, error) {
	hits := map[uint32]uint64{}
	var rule uint32
	var each []uint64
	all := d.objects.PolHitsV1.Iterate()
	for all.Next(&rule, &each) {
		for _, n := range each {
			hits[rule] += n
		}
	}
	return hits, all.Err()
}

// Why asks the program that packets meet.
func (d *Datapath) Why(q agent.Question) (agent.Answer, error) {
	r := pilasterWhyRequest{Ends: pilasterEnds{Local: words(q.Local), Remote: words(q.Remote), Tenant: uint32(q.Tenant), LocalApp: uint32(q.LocalApp), RemoteApp: uint32(q.RemoteApp),
		LocalPort: networkOrder(q.LocalPort), RemotePort: networkOrder(q.RemotePort), Proto: q.Protocol}}
	// The question and its answer pass as a packet, behind an Ethernet header.
	frame, err := binary.Append(make([]byte, ethernetHeader), binary.NativeEndian, r)
	if err != nil {
		return agent.Answer{}, err
	}
	out := make([]byte, len(frame))
	result, err := d.objects.PilWhy.Run(&ebpf.RunOptions{Data: frame, DataOut: out})
	if err != nil || result != 0 {
		return agent.Answer{}, fmt.Errorf("ask the packet path about a session (result %d): %w", int32(result), err)
	}
	if _, err := binary.Decode(out[ethernetHeader:], binary.NativeEndian, &r); err != nil {
		return agent.Answer{}, err
	}
	a := agent.Answer{LocalApp: address.AppID(r.Ends.LocalApp), RemoteApp: address.AppID(r.Ends.RemoteApp)}
	for way, direction := range [2]policy.Direction{policy.Egress, policy.Ingress} {
		a.Allowed[direction] = r.Pre.Verdicts[way] == 1
		a.Rules[direction], a.Audits[direction] = bits.ReverseBytes32(r.Pre.Rules[way]), bits.ReverseBytes32(r.Pre.Audits[way])
	}
	return a, nil
}

const ethernetHeader = 14
