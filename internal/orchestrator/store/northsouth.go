package store

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/numeral"
	"pilaster.io/pilaster/internal/tenant"
)

// Services and publications are in their tenant's record. What a publication has beyond it is an index at a gateway: the lowest that no other has there,
// and none had a moment ago.

// CreateService gives something on the underlay an address that the tenant's containers reach it by.
func (s *Store) CreateService(ctx context.Context, name string, is tenant.Service) (*pilasterv1.Service, error) {
	made := &pilasterv1.Service{Name: is.Name, Virtual: is.Virtual.String(), Real: is.Real.String()}
	err := s.changeNimitz(ctx, name, func(t *txn, found *pilasterv1.Tenant) error {
		switch {
		case slices.ContainsFunc(found.Services, func(s *pilasterv1.Service) bool { return s.Name == is.Name }):
			return refuse(Exists, "tenant %s has a service %s already; nothing was changed: delete it first, or choose another name", name, is.Name)
		case len(found.Services) >= tenant.MaxServices:
			return refuse(Full, "tenant %s has %d services, and a tenant has no more; nothing was changed: delete one first", name, len(found.Services))
		}
		found.Services = append(found.Services, made)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// DeleteService ends it.
func (s *Store) DeleteService(ctx context.Context, name, service string) error {
	return s.changeNorthSouth(ctx, name, func(_ *txn, found *pilasterv1.Tenant) error {
		i := slices.IndexFunc(found.Services, func(s *pilasterv1.Service) bool { return s.Name == service })
		if i < 0 {
			return refuse(NotFound, "tenant %s has no service %q; `pilaster service list --tenant %s` shows those it has", name, service, name)
		}
		found.Services = slices.Delete(found.Services, i, i+1)
		return nil
	})
}

// CreatePublication gives a tenant's container an address at a node's gateway.
func (s *Store) CreatePublication(ctx context.Context, name, publication string, container netip.Addr, node string) (*pilasterv1.Publication, error) {
	var made *pilasterv1.Publication
	err := s.changeNimitz(ctx, name, func(t *txn, found *pilasterv1.Tenant) error {
		switch {
		case slices.ContainsFunc(found.Publications, func(p *pilasterv1.Publication) bool { return p.Name == publication }):
			return refuse(Exists, "tenant %s has a publication %s already; nothing was changed: delete it first, or choose another name", name, publication)
		case len(found.Publications) >= tenant.MaxPublications:
			return refuse(Full, "tenant %s has %d publications, and a tenant has no more; nothing was changed: delete one first", name, len(found.Publications))
		}
		gateway, err := t.gateway(node)
		if err != nil {
			return err
		}
		i, err := t.freeIndex(node)
		if err != nil {
			return err
		}
		made = &pilasterv1.Publication{Name: publication, Container: container.String(), Node: node, Gateway: gateway.String(), Underlay: tenant.UnderlayAddress(gateway, i).String()}
		found.Publications = append(found.Publications, made)
		t.put(publishedKey(node, i), name)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// DeletePublication ends it. Nobody else gets its address for some minutes.
func (s *Store) DeletePublication(ctx context.Context, name, publication string) error {
	return s.changeNorthSouth(ctx, name, func(t *txn, found *pilasterv1.Tenant) error {
		i := slices.IndexFunc(found.Publications, func(p *pilasterv1.Publication) bool { return p.Name == publication })
		if i < 0 {
			return refuse(NotFound, "tenant %s has no publication %q; `pilaster publication list --tenant %s` shows those it has", name, publication, name)
		}
		ended := found.Publications[i]
		found.Publications = slices.Delete(found.Publications, i, i+1)
		return s.withdraw(t, ended)
	})
}

// changeNimitz has a tenant have more, if that is right.
func (s *Store) changeNimitz(ctx context.Context, name string, change func(*txn, *pilasterv1.Tenant) error) error {
	return s.changeNorthSouth(ctx, name, func(t *txn, found *pilasterv1.Tenant) error {
		if found.Network != tenant.Nimitz {
			return refuse(Refused, "tenant %s is on network %s, and services and publications are of network nimitz; nothing was changed", name, found.Network)
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
		if err := is.CheckNorthSouth(s.cluster.Plan); err != nil {
			return refuse(Invalid, "%v; nothing was changed", err)
		}
		return nil
	})
}

// readNorthSouth is as much of a tenant as CheckNorthSouth looks at, but for other regions.
func readNorthSouth(of *pilasterv1.Tenant) (tenant.Tenant, error) {
	is := tenant.Tenant{Name: of.Name}
	var err error
	if is.Overlays, err = tenant.ParseOverlays(of.Overlays); err != nil {
		return is, err
	}
	if is.Services, err = tenant.ParseServices(of.Services); err != nil {
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

// gateway is the prefix of a node that is not being deleted.
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
		return netip.Prefix{}, refuse(NotFound, "there is no node %q; nothing was changed: `pilaster node list` shows those there are", node)
	}
	prefix, err := netip.ParsePrefix(at.Prefix)
	if err != nil {
		return prefix, fmt.Errorf("the store's node %s is not readable: %w", node, err)
	}
	return prefix, nil
}

// freeIndex is the lowest at a node's gateway that nothing has and nothing had a moment ago.
func (t *txn) freeIndex(node string) (address.Index, error) {
	taken := map[address.Index]bool{}
	for _, dir := range []string{dirPublished, dirWithdrawn} {
		names, err := t.names(dir + node + "/")
		if err != nil {
			return 0, err
		}
		for _, name := range names {
			i, err := parseIndex(name)
			if err != nil {
				return 0, fmt.Errorf("the store's %s%s/%s is not readable: %w", dir, node, name, err)
			}
			taken[i] = true
		}
	}
	from, err := t.mark(dirPublishedMarks + node)
	if err != nil {
		return 0, err
	}
	for i := max(uint64(tenant.FirstPublished), from); i <= uint64(address.MaxIndex); i++ {
		if !taken[address.Index(i)] {
			return address.Index(i), nil
		}
	}
	return 0, refuse(Full, "all addresses for publications at the gateway of node %s are used, or were until a moment ago; nothing was changed: use another node's", node)
}

// withdraw has the address of a publication that ends rest.
func (s *Store) withdraw(t *txn, p *pilasterv1.Publication) error {
	i, err := indexOf(p)
	if err != nil {
		return err
	}
	t.delete(publishedKey(p.Node, i))
	return s.rest(t, withdrawnKey(p.Node, i), p.Underlay)
}

func indexOf(p *pilasterv1.Publication) (address.Index, error) {
	parsed, err := tenant.ParsePublications([]*pilasterv1.Publication{p})
	if err != nil {
		return 0, err
	}
	i, ok := parsed[0].Index()
	if !ok {
		return 0, fmt.Errorf("publication %.80q: %v is none of the gateway's addresses for publications", p.Name, p.Underlay)
	}
	return i, nil
}

// endTogether is how many of a tenant's publications end in one transaction, with two writes each.
const endTogether = 50

// endSome ends some of what is published of a tenant, and reports whether that is all.
func (s *Store) endSome(t *txn, found *pilasterv1.Tenant) (all bool, err error) {
	left := max(len(found.Publications)-endTogether, 0)
	for _, p := range found.Publications[left:] {
		if err := s.withdraw(t, p); err != nil {
			return false, err
		}
	}
	found.Publications = found.Publications[:left]
	return left == 0, nil
}

// endPublished ends what a node's gateway publishes, where that is meant. The node's prefix never comes back, so nothing needs to rest.
func (t *txn) endPublished(node string, meant bool) error {
	resp, err := t.list(dirPublished + node + "/")
	if err != nil {
		return err
	}
	if n := len(resp.Kvs); n > 0 && !meant {
		return refuse(Refused, "the gateway of node %s publishes %s; it was left as it was: delete them first (`pilaster publication list` shows them), or take --force, which ends them",
			node, numeral.Of(n, "container", "containers"))
	}
	tenants := map[string]bool{}
	var keys []string
	for _, kv := range resp.Kvs {
		if name := string(kv.Value); !tenants[name] {
			tenants[name] = true
			keys = append(keys, dirTenants+name)
		}
	}
	if err := t.fetch(keys); err != nil {
		return err
	}
	for _, key := range keys {
		found := new(pilasterv1.Tenant)
		exists, err := t.load(key, found)
		if err != nil {
			return err
		}
		has := len(found.Publications)
		found.Publications = slices.DeleteFunc(found.Publications, func(p *pilasterv1.Publication) bool { return p.Node == node })
		if exists && len(found.Publications) < has {
			if err := t.saveChanged(found); err != nil {
				return err
			}
		}
	}
	t.deleteAll(dirPublished + node + "/")
	t.deleteAll(dirWithdrawn + node + "/")
	t.delete(dirPublishedMarks + node)
	return nil
}

// recallPublications has addresses rest that a node's gateway has published until now, and that the store knows nothing of.
func (s *Store) recallPublications(t *txn, node *pilasterv1.Node, held []*pilasterv1.Publication) error {
	for _, p := range held {
		if p.Gateway != node.Prefix {
			continue
		}
		i, err := indexOf(p)
		if err != nil {
			return refuse(Invalid, "what this node holds cannot be used: %v; nothing was changed", err)
		}
		claimed, err := t.get(publishedKey(node.Name, i))
		if err != nil {
			return err
		}
		rests, err := t.get(withdrawnKey(node.Name, i))
		if err != nil {
			return err
		}
		if claimed == "" && rests == "" {
			if err := s.rest(t, withdrawnKey(node.Name, i), p.Underlay); err != nil {
				return err
			}
		}
	}
	return nil
}

func publishedKey(node string, i address.Index) string { return indexKey(dirPublished, node, i) }
func withdrawnKey(node string, i address.Index) string { return indexKey(dirWithdrawn, node, i) }
func indexKey(dir, node string, i address.Index) string {
	return fmt.Sprintf("%s%s/%d", dir, node, i)
}

func parseIndex(text string) (address.Index, error) {
	i, err := strconv.ParseUint(text, 10, 32)
	if err != nil || i > uint64(address.MaxIndex) {
		return 0, fmt.Errorf("%.20q is no index of an address", text)
	}
	return address.Index(i), nil
}
