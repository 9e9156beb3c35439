package policymap

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/bits"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/keymutex"
	"pilaster.io/pilaster/internal/policy"
)

// Policies writes the tenants' compiled policies to the kernel's maps.
type Policies struct {
	host     *host.Host
	MaxRules int // entries of each map; the kernel's maps have twice that room

	// A tenant has one change at a time. Changes of several tenants, which hold allMaps for reading, run at once: sets
	// and tables belong to one tenant. A change that compares with the kernel's maps holds allMaps for writing.
	byTenant keymutex.Locks
	allMaps  sync.RWMutex

	policyMu         sync.Mutex                       // held for moments only, while allMaps is held for reading
	tenantPolicies   map[string]*dpapi.TenantPolicies // policies in force by tenant name; the values do not change
	changing         map[string]tenantChange          // by tenant name: they are not in force yet
	pendingTenants   map[string]*dpapi.TenantPolicies // tenants under the policies that an earlier process left
	PolicyMapsSynced bool                             // the kernel's maps hold exactly tenantPolicies and changing
}

// tenantChange is a change of a tenant's policies.
type tenantChange struct{ had, next dpapi.TenantPolicies }

// NewPolicies makes the manager of the policy maps.
func NewPolicies(h *host.Host, maxRules int) *Policies {
	return &Policies{host: h, MaxRules: maxRules}
}

// RestorePolicies applies these tenants' policies to their containers. Pending tenants keep the policies that the
// kernel holds until SetPolicies is called for them; if it holds none, they are isolated. Policies of all other tenants
// are removed. After an error nothing has changed.
func (d *Policies) RestorePolicies(tenants, held []dpapi.TenantPolicies) error {
	d.allMaps.Lock()
	defer d.allMaps.Unlock()
	d.policyMu.Lock()
	defer d.policyMu.Unlock()
	all, holding := map[string]*dpapi.TenantPolicies{}, map[string]*dpapi.TenantPolicies{}
	for _, t := range tenants {
		all[t.Tenant] = &t
	}
	for _, t := range held {
		if t.Lost {
			// Its other ids are unknown: any that no known tenant has may belong to it.
			more, err := d.idsWithout(slices.Concat(tenants, held))
			if err != nil {
				return fmt.Errorf("tenant %s: %w", t.Tenant, err)
			}
			t.IDs = slices.Concat(t.IDs, more)
		}
		has, err := d.hasPolicies(t.IDs)
		if err != nil {
			return fmt.Errorf("tenant %s: %w", t.Tenant, err)
		}
		if has || t.Lost {
			holding[t.Tenant] = &t
		} else {
			t.Tables = policy.Isolating()
			all[t.Tenant] = &t
		}
	}
	if err := d.applyPolicies(policyChange{others: slices.Collect(maps.Values(all)),
		pending: idsOf(holding)}); err != nil {
		return err
	}
	d.tenantPolicies, d.pendingTenants = all, holding
	return nil
}

// idsWithout returns the tenant ids that have policies in the kernel and belong to none of these tenants.
func (d *Policies) idsWithout(tenants []dpapi.TenantPolicies) (ids []address.TenantID, err error) {
	keys, err := bpfobj.MapKeys[bpfobj.PilasterPolTargetKey](d.host.Objects.PolSubjectsV1)
	for _, key := range keys {
		id := address.TenantID(key.Tenant)
		has := func(t dpapi.TenantPolicies) bool { return slices.Contains(t.IDs, id) }
		if !slices.Contains(ids, id) && !slices.ContainsFunc(tenants, has) {
			ids = append(ids, id)
		}
	}
	return ids, err
}

// hasPolicies reports whether the kernel has policies for one of these ids. It returns an error if they are in maps of
// another size: packets will soon use the new maps, which do not have them.
func (d *Policies) hasPolicies(ids []address.TenantID) (is bool, err error) {
	if is, err = hasTarget(d.host.Objects.PolSubjectsV1, ids); is || err != nil {
		return is, err
	}
	pins, err := filepath.Glob(filepath.Join(d.host.MapsDir(), bpfobj.PinPolSubjects+"_*"))
	for _, pin := range pins {
		if err == nil && !is {
			err = bpfobj.ReadPinned(pin, func(m *ebpf.Map) (err error) { is, err = hasTarget(m, ids); return err })
		}
	}
	if is {
		return false, errors.New("its policies cannot be enforced now, and the ones in force are in maps of another " +
			"size; " +
			"packets flow as before: start the previous build with its --max-rules, or a higher --max-rules")
	}
	return false, err
}

func hasTarget(subjects *ebpf.Map, ids []address.TenantID) (bool, error) {
	for _, id := range ids {
		err := subjects.Lookup(
			bpfobj.PilasterPolTargetKey{Tenant: uint32(id), App: uint32(policy.AnyApp)},
			new(bpfobj.PilasterPolTarget),
		)
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err == nil, err
		}
	}
	return false, nil
}

// ForEachWithoutPolicies calls do for each of these tenant ids or VNIs for which the kernel has no policies. No policy
// changes meanwhile.
func (d *Policies) ForEachWithoutPolicies(ids iter.Seq[uint32], do func(id uint32) error) error {
	d.policyMu.Lock()
	defer d.policyMu.Unlock()
	for id := range ids {
		has, err := hasTarget(d.host.Objects.PolSubjectsV1, []address.TenantID{address.TenantID(id)})
		if err == nil && !has {
			err = do(id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func idsOf(tenants map[string]*dpapi.TenantPolicies) map[uint32]bool {
	ids := map[uint32]bool{}
	for _, t := range tenants {
		for _, id := range t.IDs {
			ids[uint32(id)] = true
		}
	}
	return ids
}

// SetPolicies replaces a tenant's policies. Those of other tenants stay. After an error nothing has changed, unless the
// error says otherwise. A change of many entries delays no change of another tenant, unless the maps' content is
// unknown because a change failed, or because a tenant's policies are those of an earlier process.
func (d *Policies) SetPolicies(next dpapi.TenantPolicies) error {
	unlock, err := d.byTenant.Lock(context.Background(), next.Tenant)
	if err != nil {
		return err
	}
	defer unlock()
	if done, err := d.setOne(next); done {
		return err
	}
	return d.setComparing(next)
}

// setComparing compares all maps with the kernel's content.
func (d *Policies) setComparing(next dpapi.TenantPolicies) error {
	d.allMaps.Lock()
	defer d.allMaps.Unlock()
	d.policyMu.Lock()
	defer d.policyMu.Unlock()
	holding := maps.Clone(d.pendingTenants)
	delete(holding, next.Tenant)
	c := d.changeTo(next)
	c.pending = idsOf(holding)
	if err := d.applyPolicies(c); err != nil {
		return err
	}
	d.pendingTenants = holding
	d.keep(next)
	return nil
}

// changeTo returns the change to a tenant's next policies. The caller holds policyMu.
func (d *Policies) changeTo(next dpapi.TenantPolicies) policyChange {
	c := policyChange{next: next, synced: d.PolicyMapsSynced}
	for name, t := range d.tenantPolicies {
		if name == next.Tenant {
			c.had = *t
		} else {
			c.others = append(c.others, t)
		}
	}
	for name, t := range d.changing {
		if name != next.Tenant {
			c.changing = append(c.changing, t)
		}
	}
	return c
}

// keep records policies that are in force. The caller holds policyMu.
func (d *Policies) keep(next dpapi.TenantPolicies) {
	if d.tenantPolicies == nil {
		d.tenantPolicies = map[string]*dpapi.TenantPolicies{}
	}
	if d.tenantPolicies[next.Tenant] = &next; len(next.Tables.Subjects)+len(next.Overrides) == 0 {
		delete(d.tenantPolicies, next.Tenant)
	}
}

// setOne changes only entries of one tenant, in the order of applyPolicies. It computes the changes, and writes and
// deletes sets and tables, without policyMu. Other tenants may have the numbers of rules, and should not but could have
// the targets and overrides, so it compares these again under policyMu: the numbers, which may be many, in parts. It is
// not done, and has changed nothing, if the content of the maps is unknown.
func (d *Policies) setOne(next dpapi.TenantPolicies) (done bool, err error) {
	d.allMaps.RLock()
	defer d.allMaps.RUnlock()
	c, ok := d.begin(next)
	if !ok {
		return false, nil
	}
	m, err := d.PolicyMaps().compare(c)
	if err == nil {
		err = m.checkCapacity(next.Tenant, d.MaxRules)
	}
	if err != nil {
		return true, errors.Join(err, d.cancel(c))
	}
	if err := errors.Join(d.startCounting(m.hits.added.keys), m.writeRules()); err != nil {
		d.policyMu.Lock()
		defer d.policyMu.Unlock()
		delete(d.changing, next.Tenant)
		d.PolicyMapsSynced = false
		return true, fmt.Errorf("write policies: %w; the previous ones stay in force", err)
	}
	ended, err := d.lead(next)
	if err != nil {
		return true, err
	}
	// m.hits may miss rules that another tenant has dropped since.
	unused := rulesWithout(c.had, c.next)
	if err := errors.Join(m.deleteRules(), d.stopCounting(unused), d.endPickup(ended)); err != nil {
		d.policyMu.Lock()
		defer d.policyMu.Unlock()
		d.PolicyMapsSynced = false
		return true, fmt.Errorf("remove unused policies: %w; the new ones are in force", err)
	}
	return true, nil
}

// cancel gives up a change that has written nothing. Meanwhile other tenants may have kept the numbers of its rules.
func (d *Policies) cancel(c policyChange) error {
	d.policyMu.Lock()
	delete(d.changing, c.next.Tenant)
	d.policyMu.Unlock()
	err := d.stopCounting(rulesWithout(c.next, c.had))
	if err != nil {
		d.policyMu.Lock()
		defer d.policyMu.Unlock()
		d.PolicyMapsSynced = false
	}
	return err
}

// rulesWithout returns the numbers of rules that a has and b does not have.
func rulesWithout(a, b dpapi.TenantPolicies) (rules []uint32) {
	for rule := range a.Tables.Names {
		if _, has := b.Tables.Names[rule]; !has {
			rules = append(rules, rule)
		}
	}
	return rules
}

// countedAtOnce is for how many numbers of rules policyMu is held.
const countedAtOnce = 512

// startCounting adds numbers of rules that no other tenant has in force: what is counted for it stays.
func (d *Policies) startCounting(rules []uint32) error {
	return d.inParts(rules, d.isInForce, func(some []uint32) error {
		return writeHits(d.host.Objects.PolHitsV1, some, nil)
	})
}

// stopCounting deletes numbers of rules that no tenant has, or will have.
func (d *Policies) stopCounting(rules []uint32) error {
	needed := func(rule uint32) bool {
		for _, t := range d.changing {
			if _, has := t.next.Tables.Names[rule]; has {
				return true
			}
		}
		return d.isInForce(rule)
	}
	return d.inParts(rules, needed, func(some []uint32) error {
		return bpfobj.DeleteKeys(d.host.Objects.PolHitsV1, some)
	})
}

// inParts calls do for numbers of rules, without those to skip, and releases policyMu between the calls.
func (d *Policies) inParts(rules []uint32, skip func(uint32) bool, do func([]uint32) error) (err error) {
	for some := range slices.Chunk(rules, countedAtOnce) {
		d.policyMu.Lock()
		err = errors.Join(err, do(slices.DeleteFunc(slices.Clone(some), skip)))
		d.policyMu.Unlock()
	}
	return err
}

func (d *Policies) isInForce(rule uint32) bool {
	for _, t := range d.tenantPolicies {
		if _, has := t.Tables.Names[rule]; has {
			return true
		}
	}
	return false
}

// begin reserves room for a tenant's next policies.
func (d *Policies) begin(next dpapi.TenantPolicies) (c policyChange, ok bool) {
	d.policyMu.Lock()
	defer d.policyMu.Unlock()
	if !d.PolicyMapsSynced {
		return c, false
	}
	c = d.changeTo(next)
	if d.changing == nil {
		d.changing = map[string]tenantChange{}
	}
	d.changing[next.Tenant] = tenantChange{c.had, next}
	return c, true
}

// lead leads containers of a tenant to the next policies, whose rules are written. It returns the tenant ids that have
// no policies any more.
func (d *Policies) lead(next dpapi.TenantPolicies) (ended map[uint32]bool, err error) {
	d.policyMu.Lock()
	defer d.policyMu.Unlock()
	delete(d.changing, next.Tenant)
	c := d.changeTo(next)
	c.synced = true // what others' failed changes have left is not this tenant's
	m, err := d.PolicyMaps().comparePointers(c)
	if err == nil {
		ended, err = d.point(m, false)
	}
	if err != nil {
		d.PolicyMapsSynced = false
		return nil, err
	}
	d.keep(next)
	return ended, nil
}

// applyPolicies changes the maps. The content of a set or table never changes under its id, so new sets and tables are
// written first; then the targets, one by one, point to them; then unused ones are deleted. Established sessions that
// the new rules allow continue. The caller holds allMaps for writing, and policyMu.
func (d *Policies) applyPolicies(c policyChange) error {
	m, err := d.PolicyMaps().compare(c)
	if err == nil {
		err = m.checkCapacity(c.next.Tenant, d.MaxRules)
	}
	if err != nil {
		return err
	}
	d.PolicyMapsSynced = false // until all maps are written
	if err := errors.Join(m.hits.write(), m.writeRules()); err != nil {
		return fmt.Errorf("write policies: %w; the previous ones stay in force", err)
	}
	ended, err := d.point(m, !c.synced)
	if err != nil {
		return err
	}
	if err := errors.Join(m.deleteRules(), m.hits.deleteStale(), d.endPickup(ended)); err != nil {
		return fmt.Errorf("remove unused policies: %w; the new ones are in force", err)
	}
	d.PolicyMapsSynced = len(c.pending) == 0
	return nil
}

// point points containers to their rules. invalidate makes the programs ignore cached flows in any case.
func (d *Policies) point(m mapChanges, invalidate bool) (ended map[uint32]bool, err error) {
	begun := TenantsWithPolicies(slices.Values(m.subjects.added.keys))
	ended = TenantsWithPolicies(slices.Values(m.subjects.stale))
	if err := d.StartPickup(begun); err != nil {
		return nil, fmt.Errorf("write policies: %w; the previous ones stay in force", err)
	}
	err = errors.Join(m.overrides.write(), m.subjects.write(), m.subjects.deleteStale(), m.overrides.deleteStale())
	err = errors.Join(
		err,
		d.host.BumpGeneration(d.host.Objects.PolGenerationV1),
	) // also after an error: some targets have changed
	if invalidate || len(begun)+len(ended) > 0 {
		err = errors.Join(err, d.host.InvalidateFlows()) // cached flows hold whether their tenants have policies
	}
	if err != nil {
		return nil, fmt.Errorf(
			"apply policies to containers: %w; some have the new ones, the others the previous ones",
			err,
		)
	}
	return ended, nil
}

func (d *Policies) endPickup(tenants map[uint32]bool) error {
	return bpfobj.DeleteKeys(d.host.Objects.PolAdoptionsV1, slices.Collect(maps.Keys(tenants)))
}

// PolicyEntries counts the entries that are in force; entries that two tenants share count twice. It returns nil
// if the last write failed.
func (d *Policies) PolicyEntries() (all []dpapi.Entries) {
	d.policyMu.Lock()
	defer d.policyMu.Unlock()
	if !d.PolicyMapsSynced {
		return nil
	}
	for _, table := range d.PolicyMaps().all() {
		all = append(all, table.usage(slices.Collect(maps.Values(d.tenantPolicies)), d.MaxRules))
	}
	return all
}

// RuleHits returns how many packets each rule has denied, or would have denied if its policy were not in audit mode.
func (d *Policies) RuleHits() (map[uint32]uint64, error) {
	hits := map[uint32]uint64{}
	var rule uint32
	var each []uint64
	all := d.host.Objects.PolHitsV1.Iterate()
	for all.Next(&rule, &each) {
		for _, n := range each {
			hits[rule] += n
		}
	}
	return hits, all.Err()
}

// LookupPolicy runs the program that packets use for a policy lookup.
func (d *Policies) LookupPolicy(q dpapi.PolicyQuery) (dpapi.PolicyVerdict, error) {
	r := bpfobj.PilasterWhyRequest{
		Tuple: bpfobj.PilasterFlowTuple{
			Local:      bpfobj.ToAddr(q.Local),
			Remote:     bpfobj.ToAddr(q.Remote),
			Tenant:     uint32(q.Tenant),
			LocalApp:   uint32(q.LocalApp),
			RemoteApp:  uint32(q.RemoteApp),
			LocalPort:  networkOrder(q.LocalPort),
			RemotePort: networkOrder(q.RemotePort),
			Proto:      q.Protocol,
		},
	}
	if err := bpfobj.RunRequest(d.host.Objects.PilWhy, &r); err != nil {
		return dpapi.PolicyVerdict{}, fmt.Errorf("look up the policy of a session: %w", err)
	}
	a := dpapi.PolicyVerdict{LocalApp: address.AppID(r.Tuple.LocalApp), RemoteApp: address.AppID(r.Tuple.RemoteApp)}
	for way, direction := range [2]policy.Direction{policy.Egress, policy.Ingress} {
		a.Allowed[direction] = r.Pre.Verdicts[way] == 1
		a.Rules[direction], a.Audits[direction] = bits.ReverseBytes32(
			r.Pre.Rules[way],
		), bits.ReverseBytes32(
			r.Pre.Audits[way],
		)
	}
	return a, nil
}

// pickupTime is how long connections of a tenant may pass although the session table does not have them.
const pickupTime = time.Minute

// StartPickup allows connections that are older than the tenants' first policies, or older than the session table. It
// is unknown which end opened them, so the rules of either end may allow them.
func (d *Policies) StartPickup(tenants map[uint32]bool) error {
	now, err := host.Monotonic()
	for id := range tenants {
		if err == nil {
			err = d.host.Objects.PolAdoptionsV1.Put(id, now+uint64(pickupTime))
		}
	}
	return err
}
