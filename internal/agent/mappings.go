package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// mappers are the networks that are told a tenant's mappings: of the one that it is on and the one that it leaves those
// that keep any.
type mappers []network.MappingSink

func (c *Core) mappers(t tenant.Tenant) (all mappers) {
	for _, name := range []string{networkOf(t), t.Leaving} {
		if m, ok := c.networks[name].(network.MappingSink); ok {
			all = append(all, m)
		}
	}
	return all
}

func (all mappers) Replace(ctx context.Context, tenant string, list []network.Mapping) error {
	var errs []error
	for _, m := range all {
		errs = append(errs, m.Replace(ctx, tenant, list))
	}
	return errors.Join(errs...)
}

func (all mappers) Apply(ctx context.Context, tenant string, add, remove []network.Mapping) error {
	var errs []error
	for _, m := range all {
		errs = append(errs, m.Apply(ctx, tenant, add, remove))
	}
	return errors.Join(errs...)
}

// news is what happened to a tenant's mappings at one revision of the store.
type news struct {
	revision    int64
	add, remove []network.Mapping
}

// mapped is one tenant's mappings on their way from the orchestrator to its networks: a list, and what changes after
// it.
type mapped struct {
	tenant string
	to     mappers
	stop   context.CancelFunc // of the goroutine that lists

	mu       sync.Mutex
	listed   bool
	revision int64  // of the list
	waiting  []news // that came before the list was told
}

// maxWaiting is how many changes are kept while a list does not come.
const maxWaiting = 1 << 14

// hear tells a change, or keeps it until the list is told.
func (m *mapped) hear(ctx context.Context, n news) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.listed {
		if len(m.waiting) == maxWaiting {
			return fmt.Errorf("%d changes wait for a list of tenant %s, and no more can", maxWaiting, m.tenant)
		}
		m.waiting = append(m.waiting, n)
		return nil
	}
	if n.revision <= m.revision {
		return nil // it is in the list, which another orchestrator may have given
	}
	return m.to.Apply(ctx, m.tenant, n.add, n.remove)
}

// tell tells a list of one revision, and then what came while it was read and told: what is older is in it.
func (m *mapped) tell(ctx context.Context, list []network.Mapping, revision int64) error {
	first := true
	for {
		waiting, listed := m.take(first, revision)
		waiting = slices.DeleteFunc(waiting, func(n news) bool { return n.revision <= revision })
		if listed {
			return nil
		}
		if first {
			if err := m.to.Replace(ctx, m.tenant, with(list, waiting)); err != nil {
				return err
			}
			first = false
			continue
		}
		for _, n := range waiting {
			if err := m.to.Apply(ctx, m.tenant, n.add, n.remove); err != nil {
				return err
			}
		}
	}
}

// take is what waits; when that is nothing, and the list has been told, changes need not wait any more.
func (m *mapped) take(first bool, revision int64) (waiting []news, listed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	waiting, m.waiting = m.waiting, nil
	m.listed, m.revision = !first && len(waiting) == 0, revision
	return waiting, m.listed
}

// with is a list after changes.
func with(list []network.Mapping, changes []news) []network.Mapping {
	if len(changes) == 0 {
		return list
	}
	all := make(map[netip.Prefix]network.Mapping, len(list))
	for _, has := range list {
		all[has.To] = has
	}
	for _, n := range changes {
		n.into(all)
	}
	return slices.Collect(maps.Values(all))
}

func (n news) into(all map[netip.Prefix]network.Mapping) {
	for _, gone := range n.remove {
		delete(all, gone.To)
	}
	for _, has := range n.add {
		all[has.To] = has
	}
}

// newsOf sorts an event's mappings by tenant.
func newsOf(event *pilasterv1.FollowResponse) (map[string]news, error) {
	by := map[string]news{}
	for _, m := range event.GetDelta().GetMappings() {
		has, err := MappingFromProto(m)
		if err != nil {
			return nil, err
		}
		n := by[has.Tenant]
		n.add = append(n.add, has)
		by[has.Tenant] = n
	}
	for _, m := range event.GetDelta().GetEndedMappings() {
		to, err := netip.ParsePrefix(m.To)
		if err != nil {
			return nil, fmt.Errorf("mapping %v of tenant %s: %w", m.To, m.Tenant, err)
		}
		n := by[m.Tenant]
		n.remove = append(n.remove, network.Mapping{Tenant: m.Tenant, To: to})
		by[m.Tenant] = n
	}
	for name, n := range by {
		n.revision = event.Revision
		by[name] = n
	}
	return by, nil
}

// MappingFromProto reads what the orchestrator says of where a subnet or an address is.
func MappingFromProto(m *pilasterv1.Mapping) (network.Mapping, error) {
	to, err := netip.ParsePrefix(m.To)
	if err != nil || to != to.Masked() || to.Addr().Is4In6() {
		return network.Mapping{}, fmt.Errorf("tenant %s has a mapping of %q, which is no prefix", m.Tenant, m.To)
	}
	node, err := netip.ParsePrefix(m.Node)
	if err != nil || node != node.Masked() || node.Bits() != address.NodeBits || !node.Addr().Is6() {
		return network.Mapping{}, fmt.Errorf("tenant %s has %v on %q, which is no node", m.Tenant, to, m.Node)
	}
	return network.Mapping{Tenant: m.Tenant, To: to, Node: node}, nil
}

// listWait is how long an ADD of a tenant that was not hosted here waits for where the rest of the tenant is: packets
// there are dropped before.
const listWait = 5 * time.Second

// expectLists has ADDs of such tenants wait.
func (t *Tenants) expectLists(isMapped func(tenant.Tenant) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.isMapped = isMapped
}

func (t *Tenants) setListed(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && h.listed != nil {
		close(h.listed)
		h.listed = nil
	}
}

// awaitList waits a moment for the first list of a tenant's mappings since this node hosts it.
func (c *Core) awaitList(ctx context.Context, name string) {
	c.tenants.mu.Lock()
	h := c.tenants.m[name]
	var listed <-chan struct{}
	if h != nil {
		listed = h.listed
	}
	c.tenants.mu.Unlock()
	if listed == nil {
		return
	}
	select {
	case <-listed:
	case <-ctx.Done():
	case <-time.After(listWait):
		c.log.Warn(
			"an endpoint is there before this node knows where the rest of its tenant is; packets to that are dropped until it does",
			"tenant",
			name,
			"waited",
			listWait,
		)
	}
}
