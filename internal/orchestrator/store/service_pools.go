package store

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// A load-balancer address is one of a pool, with the claim of an external address (exposed.go).

// allocateAddress claims a free load-balancer address of the first pool that has one. Where the search begins follows
// from the service, as for node ports.
func (a *applying) allocateAddress(of service.Service) (netip.Addr, error) {
	pools, err := a.servicePools()
	if err != nil {
		return netip.Addr{}, err
	}
	underlay := map[netip.Addr]bool{} // a node may get an address of a pool later
	err = a.checkUnderlay(func(_ string, is netip.Prefix) error {
		underlay[is.Addr()] = true
		return nil
	})
	if err != nil {
		return netip.Addr{}, err
	}
	hash := fnv.New64a()
	fmt.Fprint(hash, ownerOf(a.of.Name, of.Name))
	for _, pool := range pools {
		count, address := addressesOf(pool, hash.Sum64())
		key := func(i int) string { return externalKey(address(i)) }
		for i := 0; ; i++ {
			if i, err = a.firstFree(i, count, key); err != nil {
				return netip.Addr{}, err
			}
			if i == count {
				break
			}
			if !underlay[address(i)] && a.how.Occupied[address(i)] == "" {
				return address(i), a.claimAddress(of, address(i))
			}
		}
	}
	return netip.Addr{}, refuse(Full, "all addresses of the pools of load-balancer addresses are taken, and service "+
		"%s needs one; nothing was changed: add a pool with `pilaster service pool add PREFIX`, or delete "+
		"services with such addresses that are not needed", of.Name)
}

// addressesOf returns the addresses of a pool from some number on, and how many to try: services have fewer in all.
func addressesOf(pool netip.Prefix, first uint64) (count int, address func(int) netip.Addr) {
	const most = service.MaxServices * (service.MaxExternalIPs + 2)
	low := lowHalf(pool.Addr())
	mask := ^uint64(0) >> (pool.Bits() - 64) // of the bits that the pool leaves open
	return int(min(mask, most-1)) + 1, func(i int) netip.Addr {
		return at(pool, low|(first+uint64(i))&mask)
	}
}

// inPools refuses load-balancer addresses that operators chose and that are in no pool, and load balancers without
// pools.
func (a *applying) inPools(services []service.Service) error {
	for _, is := range services {
		if !is.LoadBalancer {
			continue
		}
		pools, err := a.servicePools()
		if err != nil {
			return err
		}
		if len(pools) == 0 {
			return refuse(Refused, "service %s needs a load-balancer address, and the cluster has no pool of them; "+
				"nothing was changed: add one with `pilaster service pool add PREFIX`", is.Name)
		}
		if is.LoadBalancerIP.IsValid() && !inAny(pools, is.LoadBalancerIP) {
			return refuse(Invalid, "load-balancer address %v of service %s is in no pool; nothing was changed: choose "+
				"one of a pool that `pilaster service pool list` lists, or none", is.LoadBalancerIP, is.Name)
		}
	}
	return nil
}

func inAny(pools []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(pools, func(p netip.Prefix) bool { return p.Contains(a) })
}

// servicePools reads the pools of load-balancer addresses.
func (t *txn) servicePools() (all []netip.Prefix, err error) {
	text, err := t.get(keyServicePools)
	if err != nil || text == "" {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("the store's %s is not readable: %w", keyServicePools, err)
	}
	return all, nil
}

// ChangeServicePools adds and removes pools of load-balancer addresses: all of them, or none. It returns all pools with
// the number of addresses that services have. occupied are addresses of machines that no service may get.
func (s *Store) ChangeServicePools(
	ctx context.Context,
	add, remove []netip.Prefix,
	occupied map[netip.Addr]string,
) (all []*pilasterv1.ServicePool, err error) {
	err = s.change(ctx, func(t *txn) error {
		pools, err := t.servicePools()
		if err != nil {
			return err
		}
		for _, p := range remove {
			i := slices.Index(pools, p)
			if i < 0 {
				return refuse(NotFound, "there is no pool %v; nothing was changed: `pilaster service pool list` lists "+
					"the pools", p)
			}
			pools = slices.Delete(pools, i, i+1)
		}
		for _, p := range add {
			if err := t.mayAddPool(pools, p); err != nil {
				return err
			}
			for _, a := range slices.SortedFunc(maps.Keys(occupied), netip.Addr.Compare) {
				if p.Contains(a) {
					return refuse(Refused, "pool %v contains %v, the address of %s, which hosts would no longer "+
						"reach; nothing was changed: choose another", p, a, occupied[a])
				}
			}
			pools = append(pools, p)
		}
		if len(pools) > service.MaxPools {
			return refuse(Full, "the cluster would have %d pools of load-balancer addresses, and the maximum is %d; "+
				"nothing was changed: remove some first", len(pools), service.MaxPools)
		}
		if err := t.mayRemovePools(remove, pools); err != nil {
			return err
		}
		slices.SortFunc(pools, netip.Prefix.Compare)
		if all, err = t.viewPools(pools); err != nil || len(add)+len(remove) == 0 {
			return err
		}
		text, err := json.Marshal(pools)
		t.put(keyServicePools, string(text))
		return err
	})
	return all, err
}

// viewPools counts the claimed addresses of pools.
func (t *txn) viewPools(pools []netip.Prefix) (all []*pilasterv1.ServicePool, err error) {
	claimed, err := t.names(dirExternal)
	if err != nil {
		return nil, err
	}
	for _, p := range pools {
		is := &pilasterv1.ServicePool{Prefix: p.String()}
		for _, text := range claimed {
			if a, err := netip.ParseAddr(text); err == nil && p.Contains(a) {
				is.Allocated++
			}
		}
		all = append(all, is)
	}
	return all, nil
}

// mayAddPool refuses a pool that overlaps others or something else's addresses. External addresses may be in it.
func (t *txn) mayAddPool(pools []netip.Prefix, p netip.Prefix) error {
	if err := service.CheckPool(p); err != nil {
		return refuse(Invalid, "%v; nothing was changed", err)
	}
	for _, other := range pools {
		if other.Overlaps(p) {
			return refuse(Exists, "pool %v overlaps pool %v; nothing was changed: choose another", p, other)
		}
	}
	plan, err := t.plan()
	if err != nil {
		return err
	}
	for _, by := range tenant.AlwaysProtected(plan) {
		if by.Overlaps(p) {
			return refuse(Invalid, "pool %v overlaps %v, which has addresses of the cluster, or none that a host "+
				"outside reaches; nothing was changed: use a prefix that the fabric routes to nodes", p, by)
		}
	}
	err = t.eachGatewayAddress(func(tenant, node, address string) error {
		if a, err := netip.ParseAddr(address); err != nil || !p.Contains(a) {
			return nil
		}
		return refuse(Refused, "pool %v contains %s, the address of tenant %s at node %s; nothing was changed: choose "+
			"another", p, address, tenant, node)
	})
	if err != nil {
		return err
	}
	return t.checkFabric(func(what string, is netip.Prefix) error {
		if !is.Overlaps(p) {
			return nil
		}
		return refuse(Refused, "pool %v overlaps %v, %s; nothing was changed: choose another", p, is, what)
	})
}

// mayRemovePools refuses to remove pools with load-balancer addresses of services that no other pool contains.
func (t *txn) mayRemovePools(removed, others []netip.Prefix) error {
	if len(removed) == 0 {
		return nil
	}
	resp, err := t.list(dirExternal)
	if err != nil {
		return err
	}
	type use struct {
		address, tenant string
		of              service.Name
	}
	var uses []use
	var keys []string
	for _, kv := range resp.Kvs {
		text := strings.TrimPrefix(string(kv.Key), dirExternal)
		a, err := netip.ParseAddr(text)
		if err != nil || !inAny(removed, a) || inAny(others, a) {
			continue
		}
		record, err := parseExternal(string(kv.Key), string(kv.Value))
		if err != nil {
			return err
		}
		for _, name := range slices.Compact(slices.Sorted(maps.Values(record.Ports))) {
			of := service.ParseName(name)
			uses, keys = append(uses, use{text, record.Tenant, of}), append(keys, serviceKey(record.Tenant, of))
		}
	}
	if err := t.fetch(keys...); err != nil {
		return err
	}
	var named []string
	for _, u := range uses {
		is, exists, err := t.service(u.tenant, u.of)
		if err != nil {
			return err
		}
		if exists && is.LoadBalancerIp == u.address {
			named = append(named, fmt.Sprintf("service %s of tenant %s (%s)", u.of, u.tenant, u.address))
		}
	}
	if len(named) > 0 {
		return refuse(Refused, "services have load-balancer addresses of the pool: %s; nothing was changed: delete "+
			"these services, or give them addresses of other pools", fewOf(named))
	}
	return nil
}
