package store

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/tenant"
)

// Underlay services and publications are part of their tenant's record. In addition each gateway has a mark: indexes of
// publications increase and are never reused, because a disconnected gateway may still publish the old ones.

// CreateUnderlayService creates a virtual address at which the tenant's containers reach a server on the underlay.
func (s *Store) CreateUnderlayService(
	ctx context.Context,
	name string,
	is tenant.UnderlayService,
) (*pilasterv1.UnderlayService, error) {
	if err := checkReal(s.cluster.Plan, is.Real); err != nil {
		return nil, err
	}
	made := &pilasterv1.UnderlayService{Name: is.Name, Virtual: is.Virtual.String(), Real: is.Real.String()}
	err := s.changeOverlaid(ctx, name, func(t *txn, found *pilasterv1.Tenant) error {
		if err := s.notReserved(t, "real address", netip.PrefixFrom(is.Real, is.Real.BitLen())); err != nil {
			return err
		}
		switch {
		case underlayServiceIndex(found, is.Name) >= 0:
			return refuse(
				Exists,
				"tenant %s has an underlay service %s already; nothing was changed: delete it first, or choose "+
					"another name",
				name,
				is.Name,
			)
		case len(found.UnderlayServices) >= tenant.MaxUnderlayServices:
			return refuse(
				Full,
				"tenant %s has %d underlay services, which is the maximum; nothing was changed: delete one first",
				name,
				len(found.UnderlayServices),
			)
		}
		found.UnderlayServices = append(found.UnderlayServices, made)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// checkReal refuses a new underlay service at an address that is reserved for nodes, even if no node or publication has
// it now. It is not part of CheckNorthSouth, which nodes also run: an existing one at such an address would then stop
// the tenant's containers.
func checkReal(plan address.Plan, real netip.Addr) error {
	if !plan.Base.Contains(real) || address.Split(real).Tenant != 0 {
		return nil
	}
	switch at := address.Split(real); {
	case at.App == address.GatewayApp:
		return refuse(
			Invalid,
			"real address %v belongs to a node's gateway, and one gateway cannot forward to another; nothing was "+
				"changed",
			real,
		)
	case real == tenant.NodeAddress(at.Node), real == tenant.TunnelAddress(at.Node):
		return refuse(
			Invalid,
			"real address %v is reserved for the node; nothing was changed: use a separate address for the "+
				"underlay service",
			real,
		)
	}
	return nil
}

// DeleteUnderlayService deletes an underlay service.
func (s *Store) DeleteUnderlayService(ctx context.Context, name, service string) error {
	if err := tenant.CheckUnderlayServiceName(service); err != nil {
		return refuse(Invalid, "%v; nothing was changed", err)
	}
	return s.changeNorthSouth(ctx, name, func(_ *txn, found *pilasterv1.Tenant) error {
		i := underlayServiceIndex(found, service)
		if i < 0 {
			return refuse(
				NotFound,
				"tenant %s has no underlay service %q; `pilaster underlay service list --tenant %s` lists its own",
				name,
				service,
				name,
			)
		}
		found.UnderlayServices = slices.Delete(found.UnderlayServices, i, i+1)
		return nil
	})
}

// underlayServiceIndex returns the position of an underlay service in its tenant's record; -1 if it is not there.
func underlayServiceIndex(of *pilasterv1.Tenant, name string) int {
	return slices.IndexFunc(of.UnderlayServices, func(s *pilasterv1.UnderlayService) bool { return s.Name == name })
}

// CreatePublication creates an underlay address at a node's gateway for a container.
func (s *Store) CreatePublication(
	ctx context.Context,
	name, publication string,
	container netip.Addr,
	node string,
) (*pilasterv1.Publication, error) {
	var made *pilasterv1.Publication
	err := s.changeOverlaid(ctx, name, func(t *txn, found *pilasterv1.Tenant) error {
		switch {
		case slices.ContainsFunc(
			found.Publications,
			func(p *pilasterv1.Publication) bool { return p.Name == publication },
		):
			return refuse(
				Exists,
				"tenant %s has a publication %s already; nothing was changed: delete it first, or choose another name",
				name,
				publication,
			)
		case len(found.Publications) >= tenant.MaxPublications:
			return refuse(
				Full,
				"tenant %s has %d publications, which is the maximum; nothing was changed: delete one first",
				name,
				len(found.Publications),
			)
		}
		gateway, err := t.gateway(node)
		if err != nil {
			return err
		}
		i, err := t.nextIndex(node)
		if err != nil {
			return err
		}
		made = &pilasterv1.Publication{
			Name:      publication,
			Container: container.String(),
			Node:      node,
			Gateway:   gateway.String(),
			Underlay:  tenant.UnderlayAddress(gateway, i).String(),
		}
		found.Publications = append(found.Publications, made)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// DeletePublication deletes a publication. Its address is not reused.
func (s *Store) DeletePublication(ctx context.Context, name, publication string) error {
	if err := tenant.CheckPublicationName(publication); err != nil {
		return refuse(Invalid, "%v; nothing was changed", err)
	}
	return s.changeNorthSouth(ctx, name, func(_ *txn, found *pilasterv1.Tenant) error {
		i := slices.IndexFunc(found.Publications, func(p *pilasterv1.Publication) bool { return p.Name == publication })
		if i < 0 {
			return refuse(
				NotFound,
				"tenant %s has no publication %q; `pilaster underlay publication list --tenant %s` lists its "+
					"publications",
				name,
				publication,
				name,
			)
		}
		found.Publications = slices.Delete(found.Publications, i, i+1)
		return nil
	})
}

// changeOverlaid changes underlay services or publications of a tenant and checks the result.
func (s *Store) changeOverlaid(ctx context.Context, name string, change func(*txn, *pilasterv1.Tenant) error) error {
	return s.changeNorthSouth(ctx, name, func(t *txn, found *pilasterv1.Tenant) error {
		if tenant.KeepsAddresses(found.Network, found.Leaving) {
			return refuse(
				Refused,
				"tenant %s moves between networks %s and %s; nothing was changed: finish the migration first "+
					"(`pilaster tenant get %s`)",
				name, found.Network, found.Leaving, name,
			)
		}
		if !tenant.NetworkHas(found.Network, tenant.NorthSouth) {
			return refuse(
				Refused,
				"tenant %s is on network %s, and only tenants with CIDRs of their own have underlay services and "+
					"publications; nothing was changed",
				name,
				found.Network,
			)
		}
		if err := change(t, found); err != nil {
			return err
		}
		is, err := readNorthSouth(found)
		if err != nil {
			return refuse(Invalid, "%v; nothing was changed", err)
		}
		regions, err := t.regions()
		if err != nil {
			return err
		}
		if is.Regions, err = cidrsIn(regions, name); err != nil {
			return err
		}
		err = is.CheckNorthSouth(s.cluster.Plan)
		if _, unfit := errors.AsType[tenant.Unfit](err); unfit {
			return refuse(Refused, "%v; nothing was changed", err)
		}
		if err != nil {
			return refuse(Invalid, "%v; nothing was changed", err)
		}
		return nil
	})
}

// readNorthSouth returns the fields of a tenant that CheckNorthSouth reads, except other regions.
func readNorthSouth(of *pilasterv1.Tenant) (tenant.Tenant, error) {
	is := tenant.Tenant{Name: of.Name}
	var err error
	if is.Overlays, err = tenant.ParseOverlays(of.Overlays); err != nil {
		return is, err
	}
	if is.UnderlayServices, err = tenant.ParseUnderlayServices(of.UnderlayServices); err != nil {
		return is, err
	}
	is.Publications, err = tenant.ParsePublications(of.Publications)
	return is, err
}

func (s *Store) changeNorthSouth(ctx context.Context, name string, change func(*txn, *pilasterv1.Tenant) error) error {
	if err := checkTenant(name); err != nil {
		return err
	}
	return s.change(ctx, func(t *txn) error {
		found := new(pilasterv1.Tenant)
		if err := t.loadTenant(name, found); err != nil {
			return err
		}
		if err := change(t, found); err != nil {
			return err
		}
		return t.saveChanged(found)
	})
}

// gateway returns the prefix of a node that has a gateway and is not being deleted.
func (t *txn) gateway(node string) (netip.Prefix, error) {
	at := new(pilasterv1.Node)
	exists, err := t.load(dirNodes+node, at)
	deleted := ""
	if exists {
		deleted, err = t.get(dirDeleted + at.Uuid)
	}
	switch {
	case err != nil:
		return netip.Prefix{}, err
	case !exists || deleted != "":
		return netip.Prefix{}, refuse(
			NotFound,
			"there is no node %q; nothing was changed: `pilaster node list` lists the nodes",
			node,
		)
	case !at.Gateway:
		return netip.Prefix{}, refuse(
			Refused,
			"node %s has no gateway; nothing was changed: start its agent with --%s, run `pilaster status` there "+
				"to see why, or use another node",
			node,
			tenant.NetworksWith(tenant.NorthSouth),
		)
	}
	prefix, err := netip.ParsePrefix(at.Prefix)
	if err != nil {
		return prefix, fmt.Errorf("the store's node %s is not readable: %w", node, err)
	}
	return prefix, nil
}

// publishing returns the tenants with publications at a node's gateway.
func (t *txn) publishing(node string) (all []*pilasterv1.Tenant, err error) {
	resp, err := t.list(dirTenants)
	if err != nil {
		return nil, err
	}
	for _, kv := range resp.Kvs {
		key, found := string(kv.Key), new(pilasterv1.Tenant)
		if err := decode(key, kv.Value, found); err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(found.Publications, func(p *pilasterv1.Publication) bool { return p.Node == node }) {
			continue
		}
		if _, known := t.readings[key]; !known {
			t.readings[key] = readingOf([]*mvccpb.KeyValue{kv})
		}
		if _, err := t.get(key); err != nil { // compare the key: the comparison of the list does not detect deletions
			return nil, err
		}
		all = append(all, found)
	}
	return all, nil
}

// nextIndex allocates the next index at a node's gateway. It also reads the publications, because an orchestrator of an
// earlier build may have allocated an index above the mark.
func (t *txn) nextIndex(node string) (address.Index, error) {
	next, err := t.mark(dirPublishedMarks + node)
	if err != nil {
		return 0, err
	}
	tenants, err := t.publishing(node)
	if err != nil {
		return 0, err
	}
	for _, of := range tenants {
		highest, err := highestIndexes(of)
		if err != nil {
			return 0, err
		}
		next = max(next, uint64(highest[node])+1)
	}
	next = max(next, uint64(tenant.FirstPublished))
	if next > uint64(address.MaxIndex) {
		return 0, refuse(
			Full,
			"all %d addresses for publications at the gateway of node %s have been allocated, and they are never "+
				"reused; nothing was changed: use another node",
			address.MaxIndex-tenant.FirstPublished+1,
			node,
		)
	}
	t.setMark(dirPublishedMarks+node, next+1)
	return address.Index(next), nil
}

// highestIndexes returns the highest index of a tenant's publications at each node.
func highestIndexes(of *pilasterv1.Tenant) (map[string]address.Index, error) {
	published, err := tenant.ParsePublications(of.Publications)
	if err != nil {
		return nil, fmt.Errorf("the store's tenant %s is not readable: %w", of.Name, err)
	}
	highest := map[string]address.Index{}
	for i, p := range published {
		node, index := of.Publications[i].Node, address.Split(p.Underlay).Index
		highest[node] = max(highest[node], index)
	}
	return highest, nil
}

// adoptIndexes replaces the keys of earlier builds, which had one per index, by marks.
func (t *txn) adoptIndexes() error {
	for _, dir := range []string{dirPublished, dirWithdrawn} {
		names, err := t.names(dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			node, text, _ := strings.Cut(name, "/")
			i, err := strconv.ParseUint(text, 10, 32)
			if err != nil {
				return fmt.Errorf("the store's %s%s is not readable: %w", dir, name, err)
			}
			if err := t.reclaimPublished(node, uint32(i)); err != nil {
				return err
			}
		}
	}
	for _, dir := range []string{dirPublished, dirWithdrawn} {
		if names, err := t.names(dir); err != nil {
			return err
		} else if len(names) > 0 {
			t.deleteAll(dir)
		}
	}
	return nil
}

// deletePublished deletes the publications at a node's gateway. Without force it refuses if there are any.
func (t *txn) deletePublished(node string, force bool) error {
	tenants, err := t.publishing(node)
	if err != nil {
		return err
	}
	ended := 0
	for _, found := range tenants {
		has := len(found.Publications)
		found.Publications = slices.DeleteFunc(
			found.Publications,
			func(p *pilasterv1.Publication) bool { return p.Node == node },
		)
		ended += has - len(found.Publications)
		if err := t.saveChanged(found); err != nil {
			return err
		}
	}
	if ended > 0 && !force {
		return refuse(
			Refused,
			"the gateway of node %s publishes %s, so the node was not deleted: delete the publications first "+
				"(`pilaster underlay publication list` shows them), or use --force, which deletes them",
			node,
			humanize.Of(ended, "container", "containers"),
		)
	}
	t.delete(dirPublishedMarks + node)
	return nil
}

// reclaimPublished raises the mark above an index that a node's gateway has in use.
func (t *txn) reclaimPublished(node string, to uint32) error {
	if to == 0 {
		return nil
	}
	if to > uint32(address.MaxIndex) {
		return refuse(
			Invalid,
			"this node reports that its gateway publishes at index %d, and the highest is %d",
			to,
			address.MaxIndex,
		)
	}
	next, err := t.mark(dirPublishedMarks + node)
	if err != nil || uint64(to) < next {
		return err
	}
	t.setMark(dirPublishedMarks+node, uint64(to)+1)
	return nil
}
