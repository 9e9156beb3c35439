package policies

import (
	"maps"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
)

// MergeByTenant merges updates of the same tenant, in order.
func MergeByTenant(updates []Update) (all []Update) {
	of := map[string][]Update{}
	var names []string
	for _, n := range updates {
		if of[n.Tenant] == nil {
			names = append(names, n.Tenant)
		}
		of[n.Tenant] = append(of[n.Tenant], n)
	}
	for _, name := range names {
		all = append(all, mergeUpdates(of[name]))
	}
	return all
}

// mergeUpdates merges successive updates of one tenant.
func mergeUpdates(updates []Update) Update {
	if len(updates) == 1 {
		return updates[0]
	}
	documents := map[documentName]*Document{} // nil for a removed one
	apps := map[netip.Addr]address.AppID{}    // 0 for the app in the address
	all := Update{
		Tenant:    updates[0].Tenant,
		Received:  updates[0].Received,
		Overrides: map[netip.Addr]address.AppID{},
	}
	for _, n := range updates {
		all.Revision = max(all.Revision, n.Revision)
		if n.Whole {
			all.Whole = true
			clear(documents)
			clear(apps)
		}
		for _, d := range n.Removed {
			documents[d.name()] = nil
		}
		for _, d := range n.Documents {
			documents[d.name()] = &d
		}
		for _, a := range n.EndedOverrides {
			apps[a] = 0
		}
		maps.Copy(apps, n.Overrides)
	}
	for name, d := range documents {
		if d == nil {
			all.Removed = append(all.Removed, Document{Kind: name.Kind, Namespace: name.Namespace, Name: name.Name})
		} else {
			all.Documents = append(all.Documents, *d)
		}
	}
	for a, app := range apps {
		if app == 0 {
			all.EndedOverrides = append(all.EndedOverrides, a)
		} else {
			all.Overrides[a] = app
		}
	}
	return all
}
