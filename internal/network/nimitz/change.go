package nimitz

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// A change sets the wanted entries first, and then applies the difference to the switch. So the next change of the same
// entries repairs what a failed change has left.

// change makes the switch hold the wanted entries for some of a tenant's matches. The caller holds the lock, as for all
// functions in this file.
func (n *Network) change(ctx context.Context, h *hosted, matches []any) error {
	if !n.repaired {
		return nil // Repair installs everything at once.
	}
	remove, add := h.difference(matches)
	if err := n.apply(ctx, remove, add); err != nil {
		return err
	}
	h.have(remove, add)
	return nil
}

func (h *hosted) difference(matches []any) (remove, add []pipeline.Entry) {
	seen := make(map[any]bool, len(matches))
	for _, match := range matches {
		if seen[match] {
			continue
		}
		seen[match] = true
		want, has := h.wanted(match), h.installed[match]
		if want == has {
			continue
		}
		if has != nil {
			remove = append(remove, has)
		}
		if want != nil {
			add = append(add, want)
		}
	}
	return remove, add
}

func (h *hosted) have(remove, add []pipeline.Entry) {
	for _, e := range remove {
		delete(h.installed, e.Match())
	}
	for _, e := range add {
		h.installed[e.Match()] = e
	}
}

// apply changes the switch. If the change would exceed a limit, it returns an error and changes nothing.
func (n *Network) apply(ctx context.Context, remove, add []pipeline.Entry) error {
	if len(remove)+len(add) == 0 {
		return nil
	}
	more := pipeline.Count(add)[pipeline.Forwarding] - pipeline.Count(remove)[pipeline.Forwarding]
	if err := n.fits(more); err != nil {
		return err
	}
	if err := n.config.Switch.Apply(ctx, remove, add); err != nil {
		return err
	}
	n.forwards += more
	return nil
}

// fits returns an error if more forwarding entries exceed the limit. Installed entries may stay.
func (n *Network) fits(more int) error {
	if more <= 0 || n.forwards+more <= n.config.MaxMappings {
		return nil
	}
	largest, most := "", 0
	for _, name := range slices.Sorted(maps.Keys(n.tenants)) {
		if has := n.tenants[name].forwards(); has > most {
			largest, most = name, has
		}
	}
	return fmt.Errorf(
		"%w: this node has no room for %d more mappings: %d of %d are in use, %d of them by tenant %s, the largest "+
			"user\n  nothing was changed; use another node, raise --max-mappings, or give tenants node CIDRs",
		endpoint.ErrExhausted,
		more,
		n.forwards,
		n.config.MaxMappings,
		most,
		largest,
	)
}

// room returns an error if the entries of an endpoint's addresses exceed the limit, before it allocates addresses.
func (n *Network) room(addresses int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.fits(addresses)
}

// PutTenant installs entries that drop packets to all of the tenant's addresses until mappings or containers replace
// them.
func (n *Network) PutTenant(ctx context.Context, t tenant.Tenant) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := errors.Join(n.checkNorthSouth(t), n.checkRegions(t)); err != nil {
		return fmt.Errorf("%w: %w", network.ErrConflict, err)
	}
	h, known := n.tenants[t.Name]
	if !known {
		h = cmp.Or(n.leaving[vniOf(t)], newHosted())
		delete(n.leaving, vniOf(t))
		h.sealed = n.sealed[t.Name]
		if n.config.SharesLoad {
			h.node = n.config.Node
		}
		n.tenants[t.Name] = h
	}
	was := *h
	h.set(n.config.Underlay, t)
	err := n.reconcile(ctx, h)
	if errors.Is(err, endpoint.ErrExhausted) || errors.Is(err, network.ErrConflict) { // before the switch was changed
		if *h = was; !known {
			delete(n.tenants, t.Name)
			n.keepRelays(h)
		}
		n.renew(h)
		n.renewRegion()
	}
	return err
}

// DeleteTenant removes the tenant, if t has the id that is its VNI.
func (n *Network) DeleteTenant(ctx context.Context, t tenant.Tenant) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[t.Name]
	if !ok || !slices.ContainsFunc(t.IDs, func(id tenant.ID) bool { return pipeline.VNI(id.ID) == h.vni }) {
		return nil
	}
	gone := h.onlyRelays()
	delete(n.tenants, t.Name)
	if err := n.reconcile(ctx, gone); err != nil {
		n.tenants[t.Name] = h
		return err
	}
	n.keepRelays(gone)
	return nil
}

// Replace sets all mappings of a tenant. Of a tenant that is not hosted here any more, it sets those of addresses to
// which this node forwards.
func (n *Network) Replace(ctx context.Context, name string, all []network.Mapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.receiver(name)
	if h == nil {
		return nil
	}
	all = h.concerning(all)
	change, err := n.differ(h).Replace(h.remote, all)
	if err != nil {
		return err
	}
	matches := h.allMatches()
	h.place(change)
	h.synced = !h.former
	return n.change(ctx, h, append(matches, h.allMatches()...))
}

// HasMappings reports whether the cluster has sent all mappings of a tenant.
func (n *Network) HasMappings(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	h, ok := n.tenants[name]
	return ok && h.synced
}

// Apply changes the mappings: removals, by prefix alone, before additions. As in Replace, the tenant's last container
// may have left before.
func (n *Network) Apply(ctx context.Context, name string, add, remove []network.Mapping) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.receiver(name)
	if h == nil {
		return nil
	}
	if !h.synced && !h.former {
		return network.BeforeList(name)
	}
	add, remove = h.concerning(add), h.concerning(remove)
	change, err := n.differ(h).Apply(add, remove)
	if err != nil {
		return err
	}
	var matches []any
	for _, m := range slices.Concat(remove, add) {
		matches = append(matches, h.remoteMatches(m.To)...)
	}
	h.place(change)
	for _, m := range add {
		matches = append(matches, h.remoteMatches(m.To)...)
	}
	return n.change(ctx, h, matches)
}

// differ reads mappings that the underlay accepts. This node's own come from its containers.
func (n *Network) differ(h *hosted) network.Differ[netip.Prefix, Place] {
	return network.Differ[netip.Prefix, Place]{
		Key: func(m network.Mapping) netip.Prefix { return m.To },
		Place: func(m network.Mapping) (Place, bool, error) {
			if !n.config.Underlay.Accepts(h.overlays, m) {
				return Place{}, false, fmt.Errorf(
					"tenant %s: a mapping of %v to node %v cannot be used; nothing was changed", m.Tenant, m.To, m.Node)
			}
			p, elsewhere := n.config.Underlay.Place(h.overlays, m)
			return p, elsewhere, nil
		},
	}
}

func (h *hosted) place(change network.Difference[netip.Prefix, Place]) {
	for _, to := range change.Gone {
		delete(h.remote, to)
	}
	maps.Copy(h.remote, change.Put)
}

// Repair makes the switch hold the wanted entries and no others. Until the first mappings come from the cluster, it
// keeps the entries for other nodes, so a restart loses no packet even if the orchestrator is unreachable.
func (n *Network) Repair(ctx context.Context, _, found []endpoint.Record) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	there, err := n.config.Switch.Entries(ctx)
	if err != nil {
		return fmt.Errorf("read the switch: %w", err)
	}
	for _, r := range found {
		h, ok := n.tenants[r.Tenant]
		if !ok {
			return fmt.Errorf("endpoint %d: tenant %s is not known to network %s", r.ID, r.Tenant, n.config.Name)
		}
		h.add(r)
	}
	n.adopt(there)
	n.forwards = pipeline.Count(there)[pipeline.Forwarding]
	if err := n.plug(ctx, found); err != nil {
		return err
	}
	n.repaired = true
	err = n.reconcile(ctx, slices.Collect(maps.Values(n.tenants))...)
	if err == nil {
		err = n.unplugOthers(ctx, there, found)
	}
	n.repaired = err == nil
	return err
}

// Run reinstalls all entries each time that the switch has lost them, and ends forwarding to containers that have
// moved, until ctx ends.
func (n *Network) Run(ctx context.Context, log *slog.Logger) {
	var relays sync.WaitGroup
	relays.Go(func() { n.expireRelays(ctx, log) })
	defer relays.Wait()
	s, ok := n.config.Switch.(Forgetful)
	for ok && s.Forgets(ctx) == nil {
		if err := n.refill(ctx); err != nil {
			log.Error("the switch lacks entries", "network", n.config.Name, "error", err)
			continue
		}
		log.Warn("the switch restarted and has its entries again", "network", n.config.Name)
	}
}

func (n *Network) refill(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := slices.Collect(maps.Values(n.region.installed))
	for h := range n.known() {
		all = slices.AppendSeq(all, maps.Values(h.installed))
	}
	return n.config.Switch.Apply(ctx, nil, all)
}

// adopt takes over the switch's entries, each into its tenant.
func (n *Network) adopt(there []pipeline.Entry) {
	byVNI := map[pipeline.VNI]*hosted{n.region.vni: n.region} // The region's entries have no VNI.
	clear(n.region.installed)
	for h := range n.known() {
		clear(h.installed)
		byVNI[h.vni] = h
	}
	for _, e := range there {
		of := n.region
		switch own := e.(type) {
		case pipeline.Sender:
			of = byVNI[own.VNI]
		case pipeline.Foreign:
			of = byVNI[own.VNI]
		case pipeline.NorthSouth:
			of = byVNI[own.VNI]
		case pipeline.DNAT:
			of = byVNI[own.RealVNI]
		case pipeline.SNAT:
			of = byVNI[own.VNI]
		case pipeline.Forward:
			if byVNI[own.VNI] == nil && own.Relays {
				byVNI[own.VNI] = n.adoptLeft(own.VNI)
			}
			of = byVNI[own.VNI]
		case pipeline.Replication:
			of = byVNI[own.VNI]
		case pipeline.Offload:
			of = byVNI[own.VNI]
		case pipeline.Backend:
			of = byVNI[own.VNI]
		case pipeline.Fronted:
			of = byVNI[own.VNI]
		}
		if of == nil {
			of = n.region
		}
		of.adopt(n.config.Underlay, e)
	}
}

// plug adds the gateway, and a port for the device of each endpoint in found.
func (n *Network) plug(ctx context.Context, found []endpoint.Record) error {
	for _, r := range found {
		if err := n.config.Switch.Plug(ctx, pipeline.Port(r.ID), deviceOf(r)); err != nil {
			return fmt.Errorf("endpoint %d: %w", r.ID, err)
		}
	}
	return n.plugGateway(ctx)
}

// unplugOthers removes the ports of endpoints that are not in found, and of a gateway that is gone. No entry leads to
// them any more.
func (n *Network) unplugOthers(ctx context.Context, there []pipeline.Entry, found []endpoint.Record) error {
	ports := map[pipeline.Port]bool{}
	for _, r := range found {
		ports[pipeline.Port(r.ID)] = true
	}
	for _, e := range there {
		s, ok := e.(pipeline.Sender)
		if !ok || ports[s.Port] {
			continue
		}
		ports[s.Port] = true
		if err := n.config.Switch.Unplug(ctx, s.Port); err != nil {
			return fmt.Errorf("%v without an endpoint: %w", s.Port, err)
		}
	}
	if n.config.Gateway == nil {
		return n.config.Switch.Unplug(ctx, pipeline.Gateway)
	}
	return nil
}
