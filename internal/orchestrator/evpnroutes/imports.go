package evpnroutes

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// An importer is the orchestrator that writes what it imports into the store, from where nodes receive it as they
// receive the cluster's own mappings. All orchestrators import the same routes, so any can be it.

const (
	// importInterval is the minimum between two comparisons of the records with the store.
	importInterval = 200 * time.Millisecond
	// importRetry is how often an orchestrator tries to become the importer, and its pause after an error.
	importRetry = time.Second
	// importPatience is how long an orchestrator with a lost peer lets others become the importer.
	importPatience = 5 * time.Second
)

// importer has the state of this orchestrator; only runImports uses it.
type importer struct {
	is        bool
	flaps     uint64    // of peers, when it became the importer
	candidate time.Time // since when it waits
	done      compared  // what was compared last
}

// compared is what a comparison depends on.
type compared struct {
	revision int64
	version  uint64
	complete bool
}

// runImports keeps the imported mappings in the store as the records are, until ctx ends.
func (c *Control) runImports(ctx context.Context) {
	im := importer{candidate: time.Now()}
	for ctx.Err() == nil {
		began, pause := time.Now(), importInterval
		if err := c.importOnce(ctx, &im); err != nil {
			if !errors.Is(err, store.ErrNotImporter) && ctx.Err() == nil {
				c.log.Warn("writing imported routes failed; retrying", "error", err)
			}
			im.is, pause = false, importRetry
		} else if !im.is {
			pause = importRetry
		}
		select {
		case <-time.After(max(pause, idleFactor*time.Since(began))):
		case <-ctx.Done():
		}
	}
	if im.is {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), importPatience)
		defer cancel()
		if err := c.store.ResignImporter(ctx, c.self); err != nil {
			c.log.Warn("another orchestrator imports routes only after this one's sessions expired", "error", err)
		}
	}
}

// importOnce does one step. Until the records are complete, it deletes nothing.
func (c *Control) importOnce(ctx context.Context, im *importer) error {
	state := c.speaker.State()
	if im.is && state.Flaps != im.flaps && !state.AllUp {
		im.is, im.candidate = false, time.Now()
		return c.store.ResignImporter(ctx, c.self)
	}
	if !im.is {
		if !state.AllUp && time.Since(im.candidate) < importPatience {
			return nil
		}
		is, err := c.store.BecomeImporter(ctx, c.self)
		if !is || err != nil {
			return err
		}
		im.is, im.flaps, im.done = true, state.Flaps, compared{}
	}
	now := compared{c.cache.CurrentRevision(), state.Version, state.Complete}
	if now == im.done {
		return nil
	}
	tenants, _ := c.cache.Placements(isAnnounced)
	put, remove := importChanges(tenants, wantedImports(c.speaker.RecordsNow(), tenants))
	if !state.Complete {
		remove = nil
	}
	if len(put)+len(remove) > 0 {
		if err := c.store.Import(ctx, c.self, put, remove); err != nil {
			return err
		}
	}
	im.done = now
	return nil
}

// wantedImports returns the mappings of the records of existing tenants. A tenant's members share the mapping of
// tenant.Broadcast.
func wantedImports(records []evpn.Record, tenants []cache.Placement) map[mappingName]*pilasterv1.Mapping {
	cidrs := map[string][]netip.Prefix{}
	for _, p := range tenants {
		overlays, err := tenant.ParseOverlays(p.Tenant.Overlays)
		if err != nil {
			continue
		}
		cidrs[p.Tenant.Name] = nil
		for _, o := range overlays {
			cidrs[p.Tenant.Name] = append(cidrs[p.Tenant.Name], o.CIDR)
		}
	}
	wanted := map[mappingName]*pilasterv1.Mapping{}
	for _, r := range records {
		own, exists := cidrs[r.Tenant]
		switch m := Mapping(r, own); {
		case !exists:
		case r.Kind == evpn.RecordMember:
			name := mappingName{r.Tenant, tenant.Broadcast.String()}
			all := wanted[name]
			if all == nil {
				all = &pilasterv1.Mapping{Tenant: name.tenant, To: name.to, Origin: Origin}
				wanted[name] = all
			}
			all.NextHops = append(all.NextHops, r.VTEP.String())
		case m != nil:
			wanted[nameOf(m)] = m
		}
	}
	return wanted
}

type mappingName struct{ tenant, to string }

func nameOf(m *pilasterv1.Mapping) mappingName { return mappingName{m.Tenant, m.To} }

// importChanges compares the wanted mappings with those that the store has, in order.
func importChanges(tenants []cache.Placement, wanted map[mappingName]*pilasterv1.Mapping) (
	put, remove []*pilasterv1.Mapping) {
	for _, p := range tenants {
		for _, is := range p.Mappings {
			want := wanted[nameOf(is)]
			switch {
			case is.Origin == "": // allocated by the cluster
			case want == nil:
				remove = append(remove, is)
			case is.Mac == want.Mac && is.Sequence == want.Sequence && slices.Equal(is.NextHops, want.NextHops):
			default:
				continue
			}
			delete(wanted, nameOf(is))
		}
	}
	compare := func(a, b *pilasterv1.Mapping) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.To, b.To))
	}
	slices.SortFunc(remove, compare)
	return slices.SortedFunc(maps.Values(wanted), compare), remove
}

// Origin is the origin of mappings that follow from imported routes.
const Origin = "evpn"

// Mapping returns the mapping of an imported address or prefix of a tenant with some CIDRs. Packets to it go to the
// tunnel address, with the MAC of the host in the tenant's Ethernet segment, or of the router there if they are routed:
// to prefixes, and to addresses that are in none of the CIDRs. It is nil for a record that nodes do not use.
func Mapping(r evpn.Record, cidrs []netip.Prefix) *pilasterv1.Mapping {
	inSegment := slices.ContainsFunc(cidrs, func(p netip.Prefix) bool { return p.Contains(r.Prefix.Addr()) })
	mac := r.RouterMAC
	switch {
	case r.Kind == evpn.RecordHost && inSegment:
		mac = r.HostMAC
	case r.Kind == evpn.RecordHost && r.L3VNI == 0, r.Kind != evpn.RecordHost && r.Kind != evpn.RecordPrefix:
		return nil
	}
	return &pilasterv1.Mapping{
		Tenant: r.Tenant, To: r.Prefix.String(), NextHops: []string{r.VTEP.String()}, Mac: mac.String(),
		Sequence: uint64(r.Sequence), Origin: Origin,
	}
}
