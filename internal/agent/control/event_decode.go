package control

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/policies"
)

// reassemble joins an event that comes in several messages: the first may be a snapshot, the others are deltas, and the
// last has the revision. whole is nil until the last message.
func reassemble(begun, next *pilasterv1.FollowResponse) (whole, rest *pilasterv1.FollowResponse) {
	if begun == nil {
		if next.More {
			return nil, next
		}
		return next, nil
	}
	switch e := begun.Event.(type) {
	case *pilasterv1.FollowResponse_Delta:
		proto.Merge(e.Delta, next.GetDelta())
	case *pilasterv1.FollowResponse_Snapshot:
		d := next.GetDelta()
		e.Snapshot.Tenants = append(e.Snapshot.Tenants, d.GetTenants()...)
		e.Snapshot.Apps = append(e.Snapshot.Apps, d.GetApps()...)
		e.Snapshot.Policies = append(e.Snapshot.Policies, d.GetPolicies()...)
		e.Snapshot.Overrides = append(e.Snapshot.Overrides, d.GetOverrides()...)
		e.Snapshot.WholePolicies = append(e.Snapshot.WholePolicies, d.GetWholePolicies()...)
		e.Snapshot.Services = append(e.Snapshot.Services, d.GetServices()...)
		e.Snapshot.Slices = append(e.Snapshot.Slices, d.GetSlices()...)
		e.Snapshot.WholeServices = append(e.Snapshot.WholeServices, d.GetWholeServices()...)
	}
	begun.Revision, begun.SpreadMs = next.Revision, next.SpreadMs
	begun.WithPolicies, begun.WithServices = next.WithPolicies, next.WithServices
	if next.More {
		return nil, begun
	}
	return begun, nil
}

// policiesFromProto returns the policy updates of an event, by tenant.
func policiesFromProto(event *pilasterv1.FollowResponse, received time.Time) ([]policies.Update, error) {
	d := event.GetDelta()
	if s := event.GetSnapshot(); s != nil {
		d = &pilasterv1.Delta{Policies: s.Policies, Overrides: s.Overrides, WholePolicies: s.WholePolicies}
	}
	by := map[string]*policies.Update{}
	of := func(tenant string) *policies.Update {
		if by[tenant] == nil {
			by[tenant] = &policies.Update{
				Tenant: tenant, Revision: event.Revision, Received: received, Overrides: map[netip.Addr]address.AppID{},
			}
		}
		return by[tenant]
	}
	for _, name := range d.GetWholePolicies() {
		of(name).Whole = true
	}
	for _, p := range d.GetPolicies() {
		n := of(p.Tenant)
		n.Documents = append(n.Documents,
			policies.Document{Kind: p.Kind, Namespace: p.Namespace, Name: p.Name, Text: p.Document})
	}
	for _, p := range d.GetEndedPolicies() {
		n := of(p.Tenant)
		n.Removed = append(n.Removed, policies.Document{Kind: p.Kind, Namespace: p.Namespace, Name: p.Name})
	}
	for _, o := range d.GetOverrides() {
		a, err := netip.ParseAddr(o.Address)
		if err != nil || o.App == 0 || o.App >= uint32(address.FirstReservedApp) {
			return nil, fmt.Errorf("override of address %q with app %#x is invalid", o.Address, o.App)
		}
		of(o.Tenant).Overrides[a] = address.AppID(o.App)
	}
	for _, o := range d.GetEndedOverrides() {
		a, err := netip.ParseAddr(o.Address)
		if err != nil {
			return nil, fmt.Errorf("ended override of address %q is invalid", o.Address)
		}
		of(o.Tenant).EndedOverrides = append(of(o.Tenant).EndedOverrides, a)
	}
	all := make([]policies.Update, 0, len(by))
	for _, n := range by {
		all = append(all, *n)
	}
	slices.SortFunc(all, func(a, b policies.Update) int { return cmp.Compare(a.Tenant, b.Tenant) })
	return all, nil
}
