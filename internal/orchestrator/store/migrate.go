package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/tenant"
)

// A tenant migrates from one network to another in two steps. Between them its record has both: Network is the new one,
// Leaving the old one, and its containers have addresses of both. The tenant keeps its id: the VNI becomes the id of
// its addresses on the new network. If the addresses stay (tenant.KeepsAddresses), the first step has two parts; see
// switching.go.

// Migrate is the first step. A repeated call changes nothing, unless the second part of the step is due.
func (s *Store) Migrate(
	ctx context.Context,
	name, to string,
	addressing pilasterv1.Addressing,
) (*pilasterv1.Tenant, error) {
	if err := checkTenant(name); err != nil {
		return nil, err
	}
	on, known := tenant.TraitsOf(to)
	if !known || to == "" {
		return nil, refuse(Invalid, "there is no network %q; nothing was changed: `pilaster tenant migrate --help` "+
			"lists the possible moves", to)
	}
	if addressing != pilasterv1.Addressing_ADDRESSING_UNSPECIFIED && !slices.ContainsFunc(
		on.Addressings, func(a tenant.Addressing) bool { return addressings[a] == addressing },
	) {
		return nil, refuse(Invalid, "addressing %d is not one of network %s", addressing, to)
	}
	found := new(pilasterv1.Tenant)
	err := s.change(ctx, func(t *txn) error {
		if err := t.loadTenant(name, found); err != nil {
			return err
		}
		network := cmp.Or(found.Network, tenant.DefaultNetwork)
		_, targets := tenant.Migrations()
		switch rule := tenant.MoveOf(network, to); {
		case found.Joining && (to == found.Leaving || to == network):
			return t.continueJoining(found, to)
		case network == to && slices.Contains(targets, to):
			return hasMoved(found, addressing)
		case rule.KeepsAddresses && (found.Leaving == "" || found.Leaving == to):
			return t.joinNetwork(found, to)
		case found.Leaving != "":
			return refuse(Refused, "tenant %s is migrating from network %s to %s; nothing was changed: finish that "+
				"with `pilaster tenant migrate %s --finish`", name, found.Leaving, network, name)
		case network == to || rule.Refused != "":
			return refuse(
				Refused,
				"tenant %s is on network %s and cannot move to network %q: %s; nothing was changed: `pilaster tenant "+
					"migrate --help` lists the possible moves",
				name,
				network,
				to,
				cmp.Or(rule.Refused, "it is there already"),
			)
		}
		if err := t.mayMigrate(found, to); err != nil {
			return err
		}
		found.Network, found.Leaving, found.Addressing = to, network, addressing
		if addressing == pilasterv1.Addressing_ADDRESSING_UNSPECIFIED {
			found.Addressing = addressings[on.Addressings[0]]
		}
		return t.saveChanged(found)
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// mayMigrate refuses a tenant with offloads, and one with address keys, which the other network does not have.
func (t *txn) mayMigrate(of *pilasterv1.Tenant, to string) error {
	if err := notOffloaded(of); err != nil || tenant.NetworkHas(to, tenant.AddressKeys) {
		return err
	}
	keys, err := t.names(dirAddressKeys + of.Name + "/")
	if err != nil || len(keys) == 0 {
		return err
	}
	return refuse(
		Refused,
		"tenant %s cannot move to network %s, which has no address keys: it has %s; nothing was changed: remove the "+
			"containers with address keys, and wait until their addresses are no longer in quarantine",
		of.Name,
		to,
		humanize.Of(len(keys), "address key", "address keys"),
	)
}

// hasMoved refuses a repeated Migrate with other parameters, or after the migration has finished.
func hasMoved(t *pilasterv1.Tenant, addressing pilasterv1.Addressing) error {
	switch {
	case t.Leaving == "":
		return refuse(
			Refused,
			"tenant %s is on network %s and is not migrating; nothing was changed",
			t.Name,
			cmp.Or(t.Network, tenant.DefaultNetwork),
		)
	case addressing != pilasterv1.Addressing_ADDRESSING_UNSPECIFIED && addressing != t.Addressing:
		return refuse(
			Refused,
			"tenant %s is already migrating to network %s with another addressing, which cannot change; nothing was "+
				"changed: `pilaster tenant get %s` shows it",
			t.Name,
			t.Network,
			t.Name,
		)
	}
	return nil
}

// FinishMigration is the second step: it deletes the tenant's mappings and overlays of the old network. Without force
// it requires that the containers on all hosting nodes have addresses of the new network, and that no other region has
// imported the tenant. A repeated call changes nothing.
func (s *Store) FinishMigration(ctx context.Context, name string, force bool) (*pilasterv1.Tenant, error) {
	if err := checkTenant(name); err != nil {
		return nil, err
	}
	found := new(pilasterv1.Tenant)
	err := s.change(ctx, func(t *txn) error {
		if err := t.loadTenant(name, found); err != nil {
			return err
		}
		switch targets := tenant.MovesFrom(found.Network); {
		case found.Leaving == "" && len(targets) > 0:
			return refuse(
				Refused,
				"tenant %s is on network %s and is not migrating; nothing was changed: begin with `pilaster tenant "+
					"migrate %s --to %s`",
				name,
				found.Network,
				name,
				tenant.OneOf(targets),
			)
		case found.Leaving == "":
			return nil
		}
		if tenant.KeepsAddresses(found.Network, found.Leaving) {
			return t.finishSwitching(found, force)
		}
		hosting, err := t.hostingOf(name)
		if err != nil {
			return err
		}
		if late := Unmoved(found, hosting); len(late) > 0 && !force {
			return refuse(
				Refused,
				"containers of tenant %s have no address of network %s yet: %s; nothing was changed: wait for "+
					"these nodes, delete disconnected ones, or use --force: these containers then have no network "+
					"until they have an address",
				name,
				found.Network,
				strings.Join(late, ", "),
			)
		}
		regions, err := t.regions()
		if err != nil {
			return err
		}
		there, err := cidrsIn(regions, name)
		if err != nil {
			return err
		}
		if len(there) > 0 && !force {
			return refuse(
				Refused,
				"region %s reaches tenant %s by network %s, and would send to addresses that no longer exist; nothing "+
					"was changed: import that region's export with the other tenants alone (`pilaster region import "+
					"FILE --tenant OTHERS`), or if there are none run `pilaster region delete %s`, or use --force",
				there[0].Name,
				name,
				found.Leaving,
				there[0].Name,
			)
		}
		if services, published := len(found.UnderlayServices), len(found.Publications); services+published > 0 {
			return refuse(
				Refused,
				"tenant %s has %s and %s, which are of network %s; nothing was changed: delete them first (`pilaster "+
					"underlay service list --tenant %s`, `pilaster underlay publication list --tenant %s`)",
				name,
				humanize.Of(services, "underlay service", "underlay services"),
				humanize.Of(published, "publication", "publications"),
				found.Leaving,
				name,
				name,
			)
		}
		for _, dir := range []string{dirMappings, dirAllocations, dirQuarantine, dirOverlayMarks} {
			t.deleteAll(dir + name + "/")
		}
		found.Leaving, found.Overlays = "", nil
		return t.saveChanged(found)
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// HasReported reports whether a node has reported about the present step of a tenant's migration.
func HasReported(of *pilasterv1.Tenant, m *pilasterv1.Moving) bool {
	return m != nil && (!tenant.KeepsAddresses(of.Network, of.Leaving) || m.Changes == of.Changes)
}

// Unmoved returns the nodes on which containers have no address of the new network yet, or do not send and receive as
// the tenant's record says, with their progress.
func Unmoved(of *pilasterv1.Tenant, hosting []*pilasterv1.Hosting) (late []string) {
	for _, h := range hosting {
		switch m := h.Moving; {
		case !HasReported(of, m):
			late = append(late, h.Node+" (has not confirmed)")
		case m.Moved < m.Endpoints:
			late = append(late, fmt.Sprintf("%s (%d of %d have)", h.Node, m.Moved, m.Endpoints))
		case tenant.KeepsAddresses(of.Network, of.Leaving) && m.Problem != "":
			late = append(late, fmt.Sprintf("%s (%s)", h.Node, m.Problem))
		}
	}
	return late
}
