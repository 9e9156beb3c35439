package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/mobility"
)

// mappingSinks are the networks that receive a tenant's mappings: its own and the one that it leaves, if they use
// mappings.
type mappingSinks []network.MappingSink

func (all mappingSinks) Replace(ctx context.Context, tenant string, list []network.Mapping) error {
	var errs []error
	for _, m := range all {
		errs = append(errs, m.Replace(ctx, tenant, list))
	}
	return errors.Join(errs...)
}

func (all mappingSinks) Apply(ctx context.Context, tenant string, add, remove []network.Mapping) error {
	var errs []error
	for _, m := range all {
		errs = append(errs, m.Apply(ctx, tenant, add, remove))
	}
	return errors.Join(errs...)
}

// divide separates the networks that subscribe to mappings from those that receive a list of all, and then each change.
func (all mappingSinks) divide() (pulling, listed mappingSinks) {
	for _, m := range all {
		if p, ok := m.(network.MappingPuller); ok && p.Pulls() {
			pulling = append(pulling, m)
		} else {
			listed = append(listed, m)
		}
	}
	return pulling, listed
}

// pull reports whether all networks subscribe to mappings. Then the node lists its own allocations only.
func (all mappingSinks) pull() bool {
	pulling, listed := all.divide()
	return len(pulling) > 0 && len(listed) == 0
}

// mappingUpdate is the change of a tenant's mappings at one store revision.
type mappingUpdate struct {
	revision    int64
	add, remove []network.Mapping
}

// mappingList delivers one tenant's mappings from the orchestrator to its networks: a list, then changes.
type mappingList struct {
	tenant string
	sinks  mappingSinks
	stop   context.CancelFunc // ends the listing goroutine
	pulled bool               // all networks subscribe to mappings: there is no list to deliver
	gone   time.Time          // when the node was first seen not to host the tenant any more

	mu       sync.Mutex
	listed   bool
	revision int64           // of the list
	pending  []mappingUpdate // received before the list was delivered
}

// lately reports whether the node has hosted the tenant until lately. It then forwards to containers that have moved,
// whose mappings may still be on their way.
func (m *mappingList) lately() bool {
	if m.gone.IsZero() {
		m.gone = time.Now()
	}
	return time.Since(m.gone) < mobility.FormerTime
}

// maxPending is the number of changes kept while a list is outstanding.
const maxPending = 1 << 14

// handleUpdate delivers a change: to networks that subscribe at once, to the others after the list.
func (m *mappingList) handleUpdate(ctx context.Context, n mappingUpdate) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	pulling, listed := m.sinks.divide()
	err := pulling.Apply(ctx, m.tenant, n.add, n.remove)
	if m.pulled {
		return err
	}
	return errors.Join(err, m.afterList(ctx, listed, n))
}

// afterList delivers a change to networks that receive a list, or keeps it until the list is delivered.
func (m *mappingList) afterList(ctx context.Context, to mappingSinks, n mappingUpdate) error {
	if !m.listed {
		if len(m.pending) == maxPending {
			return fmt.Errorf("%d changes are pending for the list of tenant %s, which is the maximum", maxPending,
				m.tenant)
		}
		m.pending = append(m.pending, n)
		return nil
	}
	if n.revision <= m.revision {
		return nil // the list, which may come from another replica, contains it
	}
	return to.Apply(ctx, m.tenant, n.add, n.remove)
}

// replaceAll delivers a list of one revision, then the pending changes with a later revision.
func (m *mappingList) replaceAll(ctx context.Context, list []network.Mapping, revision int64) error {
	_, to := m.sinks.divide()
	first := !m.pulled
	for {
		waiting, listed := m.drainPending(first, revision)
		waiting = slices.DeleteFunc(waiting, func(n mappingUpdate) bool { return n.revision <= revision })
		if listed {
			return nil
		}
		if first {
			if err := to.Replace(ctx, m.tenant, merged(list, waiting)); err != nil {
				return err
			}
			first = false
			continue
		}
		for _, n := range waiting {
			if err := to.Apply(ctx, m.tenant, n.add, n.remove); err != nil {
				return err
			}
		}
	}
}

// drainPending returns the pending changes. If there are none and the list was delivered, later changes are delivered
// directly.
func (m *mappingList) drainPending(first bool, revision int64) (waiting []mappingUpdate, listed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	waiting, m.pending = m.pending, nil
	m.listed, m.revision = !first && len(waiting) == 0, revision
	return waiting, m.listed
}

// merged is a list with changes applied.
func merged(list []network.Mapping, changes []mappingUpdate) []network.Mapping {
	if len(changes) == 0 {
		return list
	}
	all := make(map[netip.Prefix]network.Mapping, len(list))
	for _, has := range list {
		all[has.To] = has
	}
	for _, n := range changes {
		n.applyTo(all)
	}
	return slices.Collect(maps.Values(all))
}

func (n mappingUpdate) applyTo(all map[netip.Prefix]network.Mapping) {
	for _, gone := range n.remove {
		delete(all, gone.To)
	}
	for _, has := range n.add {
		all[has.To] = has
	}
}

// mappingUpdates groups an event's mappings by tenant.
func mappingUpdates(event *pilasterv1.FollowResponse) (map[string]mappingUpdate, error) {
	by := map[string]mappingUpdate{}
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

// MappingFromProto decodes a mapping.
func MappingFromProto(m *pilasterv1.Mapping) (network.Mapping, error) {
	to, err := netip.ParsePrefix(m.To)
	if err != nil || to != to.Masked() || to.Addr().Is4In6() {
		return network.Mapping{}, fmt.Errorf("tenant %s has a mapping of %q, which is not a prefix", m.Tenant, m.To)
	}
	is := network.Mapping{
		Tenant: m.Tenant, To: to, App: address.AppID(m.App), Sequence: m.Sequence, Origin: m.Origin,
	}
	for _, s := range m.NextHops {
		hop, err := address.ParseAny(s)
		if err != nil {
			return network.Mapping{}, fmt.Errorf("tenant %s has %v behind %q: %w", m.Tenant, to, s, err)
		}
		is.NextHops = append(is.NextHops, hop)
	}
	if m.Node != "" || len(is.NextHops) == 0 {
		if is.Node, err = parseNodePrefix(m.Node); err != nil {
			return network.Mapping{}, fmt.Errorf("tenant %s has %v on %w", m.Tenant, to, err)
		}
	}
	if m.Locator != "" {
		if is.Locator, err = parseNodePrefix(m.Locator); err != nil {
			return network.Mapping{}, fmt.Errorf("tenant %s has %v with the locator %w", m.Tenant, to, err)
		}
	}
	if m.App >= uint32(address.FirstReservedApp) {
		return network.Mapping{}, fmt.Errorf("tenant %s has %v with app %#x, which is reserved", m.Tenant, to, m.App)
	}
	if m.Mac != "" {
		if is.MAC, err = net.ParseMAC(m.Mac); err != nil || len(is.MAC) != 6 {
			return network.Mapping{}, fmt.Errorf("tenant %s has %v with MAC %q, which is invalid", m.Tenant, to, m.Mac)
		}
	}
	return is, nil
}

// parseNodePrefix reads an IPv6 /64.
func parseNodePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil || p != p.Masked() || p.Bits() != address.NodeBits || !p.Addr().Is6() {
		return netip.Prefix{}, fmt.Errorf("%q, which is not a node prefix", s)
	}
	return p, nil
}
