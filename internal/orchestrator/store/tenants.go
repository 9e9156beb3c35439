package store

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/tenant"
)

// CreateTenant creates a tenant on the default network.
func (s *Store) CreateTenant(
	ctx context.Context,
	name string,
	addressing pilasterv1.Addressing,
) (*pilasterv1.Tenant, error) {
	return s.CreateTenantOn(ctx, tenant.DefaultNetwork, name, addressing, nil)
}

// addressings are the protobuf values of addressings.
var addressings = map[tenant.Addressing]pilasterv1.Addressing{
	tenant.Encrypted: pilasterv1.Addressing_ADDRESSING_ENCRYPTED,
	tenant.Clear:     pilasterv1.Addressing_ADDRESSING_CLEAR,
	tenant.Own:       pilasterv1.Addressing_ADDRESSING_OWN,
}

// CreateTenantOn creates a tenant on a network, with one id and a random key. On a network with overlays the id is the
// VNI; with identifiers the range of addresses follows from it.
func (s *Store) CreateTenantOn(
	ctx context.Context,
	network, name string,
	addressing pilasterv1.Addressing,
	overlays []tenant.Overlay,
) (*pilasterv1.Tenant, error) {
	if err := checkTenant(name); err != nil {
		return nil, err
	}
	on, known := tenant.TraitsOf(network)
	if !known {
		return nil, refuse(
			Invalid,
			"there is no network %q; nothing was changed: a tenant is on %s",
			network,
			tenant.OneOf(tenant.Networks()),
		)
	}
	if addressing == pilasterv1.Addressing_ADDRESSING_UNSPECIFIED {
		addressing = addressings[on.Addressings[0]]
	}
	if !slices.ContainsFunc(on.Addressings, func(a tenant.Addressing) bool { return addressings[a] == addressing }) {
		return nil, refuse(
			Invalid,
			"addressing %d is not one of network %s, which are %v; nothing was changed",
			addressing,
			network,
			on.Addressings,
		)
	}
	if !on.Has(tenant.OwnCIDRs) && len(overlays) > 0 {
		return nil, refuse(
			Invalid,
			"tenant %s is on network %s, which chooses the addresses, and has no CIDRs of its own; nothing was changed",
			name,
			network,
		)
	}
	if on.Has(tenant.Identifiers) {
		if _, err := s.cluster.Plan.ILA(); err != nil {
			return nil, refuse(Refused, "tenant %s: %v; nothing was changed", name, err)
		}
	}
	if on.Has(tenant.OwnCIDRs) {
		if err := tenant.CheckOverlays(s.cluster.Plan, overlays); err != nil {
			return nil, refuse(Invalid, "%v", err)
		}
	}
	made := &pilasterv1.Tenant{Name: name, Network: network, Addressing: addressing}
	for _, o := range overlays {
		made.Overlays = append(made.Overlays, &pilasterv1.Overlay{Cidr: o.CIDR.String(), NodeBits: uint32(o.NodeBits)})
	}
	return s.createTenant(ctx, made)
}

// createTenant allocates the id and writes the record.
func (s *Store) createTenant(ctx context.Context, made *pilasterv1.Tenant) (*pilasterv1.Tenant, error) {
	err := s.change(ctx, func(t *txn) error {
		if value, err := t.get(dirTenants + made.Name); err != nil {
			return err
		} else if value != "" {
			return refuse(Exists, "tenant %s exists already; nothing was changed", made.Name)
		}
		if err := t.checkElsewhere(made); err != nil {
			return err
		}
		id, err := t.newTenantID(made.Name)
		if err != nil {
			return err
		}
		if tenant.NetworkHas(made.Network, tenant.Announced) && id.Id > tenant.MaxAnnouncedID {
			return refuse(
				Full,
				"tenant %s would have id %d, and tenants of network %s have ids up to %d: the route distinguishers "+
					"of their BGP routes have no room for higher ones (RFC 7432 §7.9), and ids are never reused; "+
					"nothing was changed: create the tenant on another network or in another cluster",
				made.Name,
				id.Id,
				made.Network,
				tenant.MaxAnnouncedID,
			)
		}
		made.Ids, made.Created, made.Changes = []*pilasterv1.TenantId{id}, timestamppb.New(time.Now()), 0
		if tenant.NetworkHas(made.Network, tenant.Identifiers) {
			if err := s.reserveIdentifiers(t, made.Name); err != nil {
				return err
			}
			o, err := tenant.IdentifierRange(s.cluster.Plan, address.TenantID(id.Id))
			if err != nil {
				return err
			}
			made.Overlays = []*pilasterv1.Overlay{{Cidr: o.CIDR.String()}}
		}
		return t.saveChanged(made)
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

func (t *txn) allocateTenantID(owner string) (uint32, error) {
	n, err := t.mark(keyTenantMark)
	if err != nil {
		return 0, err
	}
	for ; n <= uint64(address.MaxTenantID); n++ {
		claimed, err := t.get(tenantIDKey(uint32(n)))
		if err != nil {
			return 0, err
		}
		if claimed == "" && n != uint64(tenant.GatewayID) {
			t.setMark(keyTenantMark, n+1)
			t.put(tenantIDKey(uint32(n)), owner)
			return uint32(n), nil
		}
	}
	return 0, refuse(Full, "all %d tenant ids have been allocated, and ids are never reused", address.MaxTenantID)
}

func tenantIDKey(id uint32) string { return fmt.Sprintf("%s%d", dirTenantIDs, id) }

// DeleteTenant deletes a tenant that no node hosts, with its publications. The claims on its ids remain.
func (s *Store) DeleteTenant(ctx context.Context, name string) error {
	if err := checkTenant(name); err != nil {
		return err
	}
	return s.change(ctx, func(t *txn) error { return t.deleteTenant(name) })
}

func (t *txn) deleteTenant(name string) error {
	found := new(pilasterv1.Tenant)
	if err := t.loadTenant(name, found); err != nil {
		return err
	}
	if err := notOffloaded(found); err != nil {
		return err
	}
	hosts, err := t.names(dirHosting + name + "/")
	if err != nil {
		return err
	}
	if len(hosts) > 0 {
		return refuse(
			Refused,
			"tenant %s has containers on %s; it was not deleted: delete them first (and nodes that are gone, with "+
				"`pilaster node delete`)",
			name,
			strings.Join(hosts, ", "),
		)
	}
	// First: if these are more than a transaction has, the tenant is there until all are free, and decided again.
	if err := t.releaseAll(name); err != nil {
		return err
	}
	t.delete(dirTenants + name)
	t.deleteAll(dirApps + name + "/")
	t.deleteAll(dirAppIDs + name + "/")
	t.delete(dirAppMarks + name)
	t.delete(dirRoundMarks + name)
	t.delete(dirServiceMarks + name)
	for _, dir := range []string{
		dirAppQuarantine, dirPolicies, dirMappings, dirAllocations, dirAddressKeys, dirQuarantine,
		dirOverlayMarks, dirServices, dirServiceClaims, dirEndpoints,
	} {
		t.deleteAll(dir + name + "/")
	}
	return nil
}

// Resolve returns a tenant and the app of a label set. It creates the app if the label set is new. It also records that
// the node hosts the tenant, so the node can create a container without another call.
func (s *Store) Resolve(
	ctx context.Context,
	n pki.Node,
	sequence uint64,
	name string,
	labels map[string]string,
) (*pilasterv1.Tenant, *pilasterv1.App, error) {
	return s.resolve(ctx, n, sequence, name, labels, false)
}

// ResolveExposing is Resolve for a container with host ports: its tenant gets a number for services, by which the
// packet path finds its connections.
func (s *Store) ResolveExposing(
	ctx context.Context,
	n pki.Node,
	sequence uint64,
	name string,
	labels map[string]string,
) (*pilasterv1.Tenant, *pilasterv1.App, error) {
	return s.resolve(ctx, n, sequence, name, labels, true)
}

func (s *Store) resolve(
	ctx context.Context,
	n pki.Node,
	sequence uint64,
	name string,
	labels map[string]string,
	exposes bool,
) (*pilasterv1.Tenant, *pilasterv1.App, error) {
	if err := checkTenant(name); err != nil {
		return nil, nil, err
	}
	hash, err := hashLabels(labels)
	if err != nil {
		return nil, nil, err
	}
	found, app := new(pilasterv1.Tenant), new(pilasterv1.App)
	err = s.change(ctx, func(t *txn) error {
		keys := append(nodeKeys(n), dirTenants+name, hostingKey(name, n.Name), dirApps+name+"/"+hash)
		if err := t.fetch(keys...); err != nil {
			return err
		}
		if exists, err := t.load(dirTenants+name, found); err != nil {
			return err
		} else if !exists {
			return refuse(NotFound, "there is no tenant %q; create it with `pilaster tenant create %s`", name, name)
		}
		if err := t.beginHosting(n, sequence, found); err != nil {
			return err
		}
		if exposes {
			if err := t.numberFor(found); err != nil {
				return err
			}
		}
		if exists, err := t.load(dirApps+name+"/"+hash, app); err != nil {
			return err
		} else if exists {
			return t.keepApp(found, app, hash)
		}
		n, err := s.freeApp(t, found)
		if err != nil {
			return err
		}
		app = &pilasterv1.App{Tenant: name, Id: n, Labels: labels}
		return t.putApp(app, hash, uint64(n)+1)
	})
	if err != nil {
		return nil, nil, err
	}
	return found, app, nil
}

// checkTenant refuses an invalid name.
func checkTenant(name string) error {
	if err := tenant.CheckName(name); err != nil {
		return refuse(Invalid, "%v", err)
	}
	return nil
}
