package store

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// The record of another region is its export, reduced to the imported tenants. From this record, the Edge Switch and
// the local tenants, package cache derives what nodes receive.

// maxRegion, in bytes, keeps a record below etcd's request limit.
const maxRegion = 1 << 20

// ImportRegion imports or updates another region. It imports the tenants in only. If only is empty, it imports the
// tenants of the previous import; at the first import, or with all, it imports every tenant. So a new tenant of the
// other region is not joined to a local tenant of the same name unless an administrator selects it. ImportRegion
// refuses the whole region if any part conflicts with existing state. own is the name of this region.
func (s *Store) ImportRegion(
	ctx context.Context,
	own string,
	r *pilasterv1.Region,
	only []string,
	all bool,
) (kept *pilasterv1.Region, err error) {
	if r.GetName() == own {
		return nil, refuse(Invalid, "this is region %s itself; nothing was changed: import it in another region", own)
	}
	if err := tenant.CheckRegionName(r.GetName()); err != nil {
		return nil, refuse(Invalid, "%v; nothing was changed", err)
	}
	err = s.change(ctx, func(t *txn) error {
		before := new(pilasterv1.Region)
		if found, err := t.load(dirRegions+r.Name, before); err != nil {
			return err
		} else if !found {
			before = nil
		}
		if kept, err = chosen(r, before, only, all); err != nil {
			return err
		}
		if len(only) > 0 || all {
			before = nil
		}
		cidrs, err := s.checkRegion(kept)
		if err != nil {
			return err
		}
		if edge, err := t.get(keyEdge); err != nil {
			return err
		} else if edge == "" {
			return refuse(Refused, "this region has no Edge Switch, through which its nodes would reach another; "+
				"nothing was changed: start an agent with --edge, then import")
		}
		base := netip.MustParsePrefix(kept.BasePrefix) // checkRegion has parsed it
		if err := s.notReserved(t, "base prefix", base); err != nil {
			return err
		}
		if err := t.checkExposed(func(what string, is netip.Prefix) error {
			if !is.Overlaps(base) {
				return nil
			}
			return refuse(Refused, "base prefix %v of region %s overlaps %v, %s here; nothing was changed: remove it "+
				"first", base, kept.Name, is, what)
		}); err != nil {
			return err
		}
		if err := t.checkBeside(s.cluster.Plan, kept, before, cidrs); err != nil {
			return err
		}
		if err := fits(kept); err != nil { // again, with the field Joined that checkBeside has set
			return err
		}
		return t.save(dirRegions+kept.Name, kept)
	})
	if err != nil {
		return nil, err
	}
	return kept, nil
}

// chosen returns a region with the tenants to import; see ImportRegion.
func chosen(r, before *pilasterv1.Region, only []string, all bool) (*pilasterv1.Region, error) {
	for _, name := range only {
		if err := checkTenant(name); err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(r.Tenants, func(t *pilasterv1.Region_Tenant) bool { return t.Name == name }) {
			return nil, refuse(NotFound, "region %s exports no tenant %q; nothing was changed", r.Name, name)
		}
	}
	kept := proto.CloneOf(r)
	if all || len(only) == 0 && before == nil {
		return kept, nil
	}
	if len(only) == 0 {
		for _, t := range before.Tenants {
			only = append(only, t.Name)
		}
	}
	kept.Tenants = slices.DeleteFunc(
		kept.Tenants,
		func(t *pilasterv1.Region_Tenant) bool { return !slices.Contains(only, t.Name) },
	)
	return kept, nil
}

// fits refuses a region whose record is too large for etcd.
func fits(r *pilasterv1.Region) error {
	text, err := protojson.Marshal(r)
	switch {
	case err != nil:
		return refuse(Invalid, "region %s: %v; nothing was changed", r.Name, err)
	case len(text) > maxRegion:
		return refuse(
			Full,
			"region %s with %d tenants has %d bytes, and the maximum is %d; nothing was changed: select tenants with "+
				"--tenant",
			r.Name,
			len(r.Tenants),
			len(text),
			maxRegion,
		)
	}
	return nil
}

// checkRegion refuses an invalid region, or one that conflicts with the cluster's plan. It returns the CIDRs, per
// tenant.
func (s *Store) checkRegion(r *pilasterv1.Region) (cidrs [][]netip.Prefix, err error) {
	invalid := func(format string, args ...any) error {
		return refuse(Invalid, format+"; nothing was changed", args...)
	}
	if err := fits(r); err != nil {
		return nil, err
	}
	base, err := tenant.ParsePrefixes([]string{r.BasePrefix, r.Edge})
	if err != nil {
		return nil, invalid("region %s: base prefix or edge: %v", r.Name, err)
	}
	plan, theirs := s.cluster.Plan, s.cluster.Plan
	if theirs.Base = base[0]; theirs.Base.Overlaps(plan.Base) {
		return nil, refuse(
			Refused,
			"base prefix %v of region %s overlaps this region's %v, so prefixes of nodes would be ambiguous; nothing "+
				"was changed: create one of the two regions again with another --base-prefix",
			theirs.Base,
			r.Name,
			plan.Base,
		)
	}
	if err := theirs.Validate(); err != nil { // their base prefix with the private and gateway prefixes of this cluster
		return nil, invalid("region %s: %v", r.Name, err)
	}
	if !theirs.ContainsNode(base[1]) {
		return nil, invalid("region %s: edge %v is not a /64 inside the base prefix %v", r.Name, base[1], theirs.Base)
	}
	names, vnis := map[string]bool{}, map[uint32]string{uint32(tenant.GatewayID): "that of gateways"}
	for _, t := range r.Tenants {
		if err := tenant.CheckName(t.Name); err != nil {
			return nil, invalid("region %s: %v", r.Name, err)
		}
		if names[t.Name] {
			return nil, invalid("region %s: tenant %s is there twice", r.Name, t.Name)
		}
		if other := vnis[t.Vni]; other != "" || t.Vni < 1 || t.Vni > uint32(address.MaxTenantID) {
			return nil, invalid(
				"region %s: VNI %d of tenant %s is %s",
				r.Name,
				t.Vni,
				t.Name,
				cmp.Or(other, fmt.Sprintf("not in 1..%d", address.MaxTenantID)),
			)
		}
		names[t.Name], vnis[t.Vni] = true, "also that of tenant "+t.Name
		has, err := tenant.ParsePrefixes(t.Cidrs)
		if err != nil {
			return nil, invalid("region %s: tenant %s: CIDR %v", r.Name, t.Name, err)
		}
		var overlays []tenant.Overlay
		for _, cidr := range has {
			overlays = append(overlays, tenant.Overlay{CIDR: cidr})
		}
		if err := tenant.CheckOverlays(plan, overlays); err != nil {
			return nil, invalid("region %s: tenant %s: %v", r.Name, t.Name, err)
		}
		cidrs = append(cidrs, has)
	}
	return cidrs, nil
}

// checkBeside refuses a region that conflicts with other regions or local tenants. It records to which local tenants
// the region's tenants are joined. before is the previous import, nil if the administrator selected the tenants.
func (t *txn) checkBeside(plan address.Plan, r, before *pilasterv1.Region, cidrs [][]netip.Prefix) error {
	regions, err := t.regions()
	if err != nil {
		return err
	}
	regions = slices.DeleteFunc(regions, func(other *pilasterv1.Region) bool { return other.Name == r.Name })
	if len(regions) >= tenant.MaxRegions {
		return refuse(
			Full,
			"this region has imported %d others, which is the maximum; nothing was changed: delete one with "+
				"`pilaster region delete`",
			len(regions),
		)
	}
	base := netip.MustParsePrefix(r.BasePrefix)
	for _, other := range regions {
		if has, err := netip.ParsePrefix(other.BasePrefix); err == nil && has.Overlaps(base) {
			return refuse(
				Refused,
				"base prefix %v of region %s overlaps %v of region %s; nothing was changed",
				base,
				r.Name,
				has,
				other.Name,
			)
		}
	}
	var keys []string
	for _, of := range r.Tenants {
		keys = append(keys, dirTenants+of.Name)
	}
	if err := t.fetch(keys...); err != nil {
		return err
	}
	for i, of := range r.Tenants {
		here := new(pilasterv1.Tenant)
		if _, err := t.load(dirTenants+of.Name, here); err != nil {
			return err
		}
		if err := joinTo(r.Name, of, here, before); err != nil {
			return err
		}
		if err := mayJoinRegion(r.Name, here); err != nil {
			return err
		}
		is, err := readNorthSouth(here)
		if err != nil {
			return err
		}
		for _, o := range is.Overlays {
			if err := apart(of.Name, "region "+r.Name, cidrs[i], "this region", []netip.Prefix{o.CIDR}); err != nil {
				return err
			}
		}
		if err := apartFrom(regions, of.Name, "region "+r.Name, cidrs[i]); err != nil {
			return err
		}
		is.Regions = []tenant.Region{{Name: r.Name, CIDRs: cidrs[i]}}
		if err := is.CheckNorthSouth(plan); err != nil {
			return refuse(
				Refused,
				"%v; nothing was changed: delete it with `pilaster underlay service delete`, or leave the tenant out "+
					"of the import with --tenant",
				err,
			)
		}
	}
	return nil
}

// joinTo records to which local tenant another region's tenant is joined. If a tenant was deleted and created again, in
// either region, joinTo does not join the new tenant only because it has the same name.
func joinTo(region string, of *pilasterv1.Region_Tenant, here *pilasterv1.Tenant, before *pilasterv1.Region) error {
	of.Joined = here.Created
	i := slices.IndexFunc(before.GetTenants(), func(was *pilasterv1.Region_Tenant) bool { return was.Name == of.Name })
	if i < 0 {
		return nil
	}
	was, where := before.Tenants[i], ""
	switch {
	case another(was.Created, of.Created):
		where = "in region " + region
	case another(was.Joined, here.Created):
		where = "here"
	case here.Created == nil:
		of.Joined = was.Joined
	}
	if where != "" {
		return refuse(
			Refused,
			"tenant %s was deleted and created again %s since region %s was imported, so it may be another tenant; "+
				"nothing was changed: name the tenants to join with --tenant, or use --all",
			of.Name,
			where,
			region,
		)
	}
	return nil
}

// mayJoinRegion refuses a tenant with CIDRs of its own that is on, or moves to or from, a network that reaches no other
// regions: its containers would not reach those of the region.
func mayJoinRegion(region string, here *pilasterv1.Tenant) error {
	for _, network := range []string{here.Network, here.Leaving} {
		if tenant.NetworkHas(network, tenant.OwnCIDRs) && !tenant.NetworkHas(network, tenant.Regions) {
			return refuse(
				Refused,
				"tenant %s of region %s has the name of a tenant here that is on network %s, or moves to or from it, "+
					"and that network does not reach other regions; nothing was changed: leave the tenant out of the "+
					"import with --tenant OTHERS",
				here.Name,
				region,
				network,
			)
		}
	}
	return nil
}

// another reports whether two creation times differ, so that they belong to different tenants of the same name. It
// returns false if one of them is unknown.
func another(was, is *timestamppb.Timestamp) bool {
	return was != nil && is != nil && !was.AsTime().Equal(is.AsTime())
}

// checkElsewhere refuses CIDRs of a new tenant that overlap its CIDRs in other regions.
func (t *txn) checkElsewhere(of *pilasterv1.Tenant) error {
	if len(of.Overlays) == 0 {
		return nil
	}
	regions, err := t.regions()
	if err != nil {
		return err
	}
	overlays, err := tenant.ParseOverlays(of.Overlays)
	if err != nil {
		return err
	}
	for _, o := range overlays {
		if err := apartFrom(regions, of.Name, "this region", []netip.Prefix{o.CIDR}); err != nil {
			return err
		}
	}
	return nil
}

// apartFrom refuses CIDRs of a tenant that overlap its CIDRs in other regions.
func apartFrom(regions []*pilasterv1.Region, name, where string, cidrs []netip.Prefix) error {
	there, err := cidrsIn(regions, name)
	if err != nil {
		return err
	}
	for _, r := range there {
		if err := apart(name, where, cidrs, "region "+r.Name, r.CIDRs); err != nil {
			return err
		}
	}
	return nil
}

// cidrsIn returns the CIDRs of a tenant in each region that has it.
func cidrsIn(regions []*pilasterv1.Region, name string) (there []tenant.Region, err error) {
	for _, r := range regions {
		for _, t := range r.Tenants {
			if t.Name != name {
				continue
			}
			cidrs, err := tenant.ParsePrefixes(t.Cidrs)
			if err != nil {
				return nil, err
			}
			there = append(there, tenant.Region{Name: r.Name, CIDRs: cidrs})
		}
	}
	return there, nil
}

// apart refuses a tenant's CIDRs at one place (where) that overlap its CIDRs at another place (there).
func apart(name, where string, cidrs []netip.Prefix, there string, others []netip.Prefix) error {
	for _, cidr := range cidrs {
		for _, other := range others {
			if cidr.Overlaps(other) {
				return refuse(
					Refused,
					"tenant %s has %v in %s and %v in %s, which overlap, so addresses of containers would be "+
						"ambiguous; nothing was changed: choose another CIDR, or leave the tenant out of the import "+
						"with --tenant",
					name,
					cidr,
					where,
					other,
					there,
				)
			}
		}
	}
	return nil
}

// regions returns all other regions.
func (t *txn) regions() ([]*pilasterv1.Region, error) {
	resp, err := t.list(dirRegions)
	if err != nil {
		return nil, err
	}
	var regions []*pilasterv1.Region
	for _, kv := range resp.Kvs {
		r := new(pilasterv1.Region)
		if err := decode(string(kv.Key), kv.Value, r); err != nil {
			return nil, err
		}
		regions = append(regions, r)
	}
	return regions, nil
}

// DeleteRegion deletes another region: nodes then send no packets to it and accept none from it.
func (s *Store) DeleteRegion(ctx context.Context, name string) error {
	if err := tenant.CheckRegionName(name); err != nil {
		return refuse(Invalid, "%v; nothing was changed", err)
	}
	return s.change(ctx, func(t *txn) error {
		if value, err := t.get(dirRegions + name); err != nil {
			return err
		} else if value == "" {
			return refuse(NotFound, "there is no other region %q; `pilaster region list` lists the regions", name)
		}
		t.delete(dirRegions + name)
		return nil
	})
}

// setEdge makes a new node the region's Edge Switch.
func (t *txn) setEdge(name string) error {
	is, err := t.get(keyEdge)
	if err != nil {
		return err
	}
	if is != "" {
		return refuse(
			Refused,
			"node %s is already this region's Edge Switch, and a region has only one; nothing was changed: start this "+
				"agent without --edge, or run `pilaster node delete %s` first",
			is,
			is,
		)
	}
	t.put(keyEdge, name)
	return nil
}

// unsetEdge removes a deleted node as the Edge Switch. Other regions are then unreachable, so without force it refuses
// if there are any.
func (t *txn) unsetEdge(name string, force bool) error {
	is, err := t.get(keyEdge)
	if err != nil || is != name {
		return err
	}
	regions, err := t.regions()
	if err != nil {
		return err
	}
	if len(regions) > 0 && !force {
		var names []string
		for _, r := range regions {
			names = append(names, r.Name)
		}
		return refuse(
			Refused,
			"node %s is the Edge Switch, through which this region reaches %s; it was not deleted: delete these with "+
				"`pilaster region delete` first, or use --force: they are then unreachable until another node has "+
				"joined with --edge and they have imported this region again",
			name,
			strings.Join(names, ", "),
		)
	}
	t.delete(keyEdge)
	return nil
}
