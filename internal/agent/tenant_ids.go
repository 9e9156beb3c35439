package agent

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

func appToProto(tenant string, a App) *pilasterv1.App {
	return &pilasterv1.App{Tenant: tenant, Id: uint32(a.ID), Labels: a.Labels}
}

// tenantToProto converts a tenant without its ids.
func tenantToProto(t tenant.Tenant) *pilasterv1.Tenant {
	out := &pilasterv1.Tenant{
		Name:       t.Name,
		Addressing: pilasterv1.Addressing_ADDRESSING_ENCRYPTED,
		Changes:    t.Changes,
		Network:    t.Network,
		Leaving:    t.Leaving,
	}
	if !t.Created.IsZero() {
		out.Created = timestamppb.New(t.Created)
	}
	switch t.Addressing {
	case tenant.Clear:
		out.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
	case tenant.Own:
		out.Addressing = pilasterv1.Addressing_ADDRESSING_OWN
	}
	for _, o := range t.Overlays {
		out.Overlays = append(out.Overlays, &pilasterv1.Overlay{Cidr: o.CIDR.String(), NodeBits: uint32(o.NodeBits)})
	}
	return out
}

// MergeIDs merges a list of ids, unless it is older than the known one, together with the tenant's networks, overlays
// and retiring apps. Ids that endpoints here use always stay.
func (k *TenantState) MergeIDs(newer TenantState, used func(address.TenantID) bool) error {
	update := newer.Tenant
	if len(update.IDs) == 0 || update.Changes < k.Tenant.Changes {
		return nil
	}
	ids := slices.Clone(update.IDs)
	for _, had := range k.Tenant.IDs {
		i := slices.IndexFunc(ids, func(id tenant.ID) bool { return id.ID == had.ID })
		if i >= 0 && ids[i].Key != had.Key {
			return fmt.Errorf(
				"tenant %s: id %d has one key here and another in the cluster\n  nothing was changed; remove this "+
					"node's containers of the tenant, or restore a newer backup of the cluster's store",
				k.Tenant.Name,
				had.ID,
			)
		}
		if i < 0 && used(had.ID) {
			ids = slices.Insert(ids, 0, had)
		}
	}
	k.Tenant.IDs, k.Tenant.Changes, k.Retiring = ids, update.Changes, newer.Retiring
	k.Tenant.Network, k.Tenant.Leaving = update.Network, update.Leaving
	k.Tenant.Addressing, k.Tenant.Overlays = update.Addressing, update.Overlays
	k.Tenant.UnderlayServices, k.Tenant.Publications = update.UnderlayServices, update.Publications
	k.Tenant.Regions, k.Tenant.Offloads = update.Regions, update.Offloads
	k.Tenant.Egress, k.Tenant.Nodes, k.Tenant.Protected = update.Egress, update.Nodes, update.Protected
	k.Tenant.ServicesNumber, k.Tenant.Exposed = update.ServicesNumber, update.Exposed
	return nil
}

// holds reports whether endpoints here use the id, or the next endpoint will: allocation from the current id needs no
// request.
func (h *hosted) holds(id tenant.ID) bool {
	return h.endpoints[id.ID] > 0 || id == h.Tenant.Current()
}

// forgetIndexesEvery is the interval at which the node removes state of tenant ids that it does not have any more.
const forgetIndexesEvery = time.Minute

func (c *Core) runForgetIndexes(ctx context.Context) {
	tick := time.NewTicker(forgetIndexesEvery)
	defer tick.Stop()
	for {
		if err := c.forgetIndexes(); err != nil {
			c.log.Warn(
				"removing index cursors of retired tenant ids failed; retrying",
				"error",
				err,
				"next_try",
				forgetIndexesEvery,
			)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// forgetIndexes removes state of retired ids and removed tenants from disk.
func (c *Core) forgetIndexes() error {
	has := map[address.TenantID]bool{}
	for _, known := range c.tenants.All() {
		for _, id := range known.Tenant.IDs {
			has[id.ID] = true
		}
	}
	return c.store.Forget(func(id address.TenantID) bool { return has[id] })
}

// Report fills in what a node reports of its tenants on its stream; on a new stream nothing has been requested yet.
func (t *Tenants) Report(to *pilasterv1.FollowRequest, newStream bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	to.HostedTenants = nil
	overrides, room := t.appOverrides(), tenant.MaxOffloaded
	to.ResolvingTenants = slices.Sorted(maps.Keys(t.resolving))
	for _, name := range slices.Sorted(maps.Keys(t.m)) {
		h := t.m[name]
		whole := h.Whole && (!t.hosts(name) || h.synced &&
			(h.servicesSynced || !tenant.NetworkHas(h.Tenant.Network, tenant.Services)))
		if !whole && (newStream || !h.requested) {
			h.requested = true
			to.IncompleteTenants = append(to.IncompleteTenants, name)
		}
		if newStream && h.Whole && t.transit[name] {
			to.CarriedTenants = append(to.CarriedTenants, name)
		}
		if !t.hosts(name) {
			continue
		}
		to.HostedTenants = append(to.HostedTenants, name)
		out := &pilasterv1.Hosting{
			Tenant:     name,
			Moving:     h.migration,
			Overrides:  overrides[name],
			HeardRound: h.ackedRound,
			KeepsApps:  t.retained(name),
			Unenforced: h.policyProblem,
		}
		for _, id := range h.installed.IDs {
			out.Accepts = append(out.Accepts, uint32(id.ID))
		}
		for _, id := range h.Tenant.IDs {
			if h.holds(id) {
				out.Holds = append(out.Holds, uint32(id.ID))
			}
		}
		room = t.reportOffloads(h, out, room)
		to.Hosting = append(to.Hosting, out)
	}
}

// markResolving marks a tenant as being resolved until done is called.
func (t *Tenants) markResolving(name string) (done func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resolving[name]++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.resolving[name]--; t.resolving[name] == 0 {
			delete(t.resolving, name)
		}
		t.signal() // the orchestrator's store has the resolved tenant, the last report did not
	}
}

// Held is what this node, with this prefix, uses, without keys.
func (t *Tenants) Held(node netip.Prefix) *pilasterv1.Held {
	t.mu.Lock()
	defer t.mu.Unlock()
	held := &pilasterv1.Held{}
	for _, name := range slices.Sorted(maps.Keys(t.m)) {
		h := t.m[name]
		if h.lost != nil {
			continue
		}
		out := tenantToProto(h.Tenant)
		for _, p := range h.Tenant.Publications {
			if p.Gateway == node {
				i, _ := p.Index()
				held.Published = max(held.Published, uint32(i))
			}
		}
		if !t.hosts(name) {
			held.Tenants = append(held.Tenants, heldTransit(out))
			continue
		}
		for _, id := range h.Tenant.IDs {
			out.Ids = append(out.Ids, &pilasterv1.TenantId{Id: uint32(id.ID), OnlyAccepted: !h.holds(id)})
		}
		held.Tenants = append(held.Tenants, out)
		for _, subnet := range h.subnets {
			held.Mappings = append(held.Mappings, &pilasterv1.Mapping{Tenant: name, To: subnet.String()})
		}
		for _, a := range h.Apps {
			held.Apps = append(held.Apps, appToProto(name, a))
		}
	}
	return held
}

// count changes the number of endpoints of a tenant's id and returns the number of the tenant.
func (t *Tenants) count(name string, id address.TenantID, by int) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.m[name]
	if h.endpoints[id] += by; h.endpoints[id] == 0 {
		delete(h.endpoints, id)
		t.signal()
	}
	if by < 0 {
		t.signalUses(name)
	}
	return h.count()
}

func (t *Tenants) endpoints(name string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil {
		return h.count()
	}
	return 0
}

func (h *hosted) count() (n int) {
	for _, of := range h.endpoints {
		n += of
	}
	return n
}

// installed returns what networks know of a tenant, and which networks.
func (t *Tenants) installed(name string) (tenant.Tenant, []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.m[name].installed, t.m[name].installedOn
}

func (t *Tenants) setInstalled(name string, put tenant.Tenant, on []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.m[name].installed, t.m[name].installedOn = put, on
	t.signal()
}
