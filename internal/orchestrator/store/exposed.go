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

// Hosts outside of the cluster reach a service at external addresses, which belong to one tenant while any of its
// services has them, and at node ports, which are unique in the cluster. Both are claimed in the transaction of the
// service, and free as soon as no service has them. A load-balancer address is one of a pool, with the claim of an
// external address.

// externalAddress is the record of an external or load-balancer address.
type externalAddress struct {
	Tenant string            `json:"tenant"`
	Ports  map[string]string `json:"ports"` // name of the service, by portName
}

func externalKey(a netip.Addr) string { return dirExternal + a.String() }

func nodePortKey(p service.Protocol, n uint16) string {
	return fmt.Sprintf("%s%v/%d", dirNodePorts, p, n)
}

func portName(n uint16, p service.Protocol) string { return fmt.Sprintf("%d/%v", n, p) }

// ownerOf is the value of the claim on a node port.
func ownerOf(tenant string, of service.Name) string { return tenant + " " + of.String() }

// claimsOf returns how many claims services need for hosts outside of the cluster.
func claimsOf(services []service.Service) (n int) {
	for _, is := range services {
		if n += len(is.ExternalIPs); is.NodePorts {
			n += len(is.Ports)
		}
		if is.LoadBalancer {
			n++
		}
	}
	return n
}

// external reads an external address. It has no tenant if it is free.
func (t *txn) external(a netip.Addr) (is externalAddress, err error) {
	text, err := t.get(externalKey(a))
	if err != nil {
		return is, err
	}
	return parseExternal(externalKey(a), text)
}

func parseExternal(key, text string) (is externalAddress, err error) {
	if text != "" {
		if err = json.Unmarshal([]byte(text), &is); err != nil {
			err = fmt.Errorf("the store's %s is not readable: %w", key, err)
		}
	}
	if is.Ports == nil {
		is.Ports = map[string]string{}
	}
	return is, err
}

// saveExternal writes an external address, or deletes it if no service has a port of it.
func (t *txn) saveExternal(a netip.Addr, is externalAddress) error {
	if len(is.Ports) == 0 {
		t.delete(externalKey(a))
		return nil
	}
	text, err := json.Marshal(is)
	if err != nil {
		return fmt.Errorf("encode %s: %w", externalKey(a), err)
	}
	t.put(externalKey(a), string(text))
	return nil
}

// expose claims the addresses and node ports of services for hosts outside, and frees those that they had and have no
// longer. It returns the services with their load-balancer addresses and the numbers of their node ports. They keep
// those that the request leaves open.
func (a *applying) expose(services []service.Service) ([]service.Service, error) {
	all := slices.Clone(services) // a change may be decided several times
	if claimsOf(services) > 0 {
		if err := a.fetch(a.claimKeys(services)...); err != nil {
			return nil, err
		}
		if err := a.inPools(services); err != nil {
			return nil, err
		}
		if err := a.mayExpose(services); err != nil {
			return nil, err
		}
		if !a.of.Exposed { // containers get a way for their answers
			a.of.Exposed = true
			if err := a.saveChanged(a.of); err != nil {
				return nil, err
			}
		}
	}
	for i := range all {
		all[i].Ports = slices.Clone(all[i].Ports)
		before, exists, err := a.service(a.of.Name, all[i].Name)
		if err != nil {
			return nil, err
		}
		if !exists {
			continue
		}
		was, err := service.FromProto(before)
		if err != nil {
			return nil, fmt.Errorf("the store's %s is not readable: %w", serviceKey(a.of.Name, all[i].Name), err)
		}
		keepNodePorts(was, &all[i])
		if all[i].LoadBalancer && !all[i].LoadBalancerIP.IsValid() {
			all[i].LoadBalancerIP = was.LoadBalancerIP
		}
		// Before any claim, so that services of one call can swap what they have.
		if err := a.release(a.of.Name, was, all[i]); err != nil {
			return nil, err
		}
	}
	for _, is := range all {
		if err := a.claim(is); err != nil {
			return nil, err
		}
	}
	for i, is := range all { // after the claims of what operators chose
		if is.LoadBalancer && !is.LoadBalancerIP.IsValid() {
			address, err := a.allocateAddress(is)
			if err != nil {
				return nil, err
			}
			all[i].LoadBalancerIP = address
		}
		for i, p := range is.Ports {
			if !is.NodePorts || p.NodePort != 0 {
				continue
			}
			n, err := a.allocateNodePort(is.Name, p)
			if err != nil {
				return nil, err
			}
			is.Ports[i].NodePort = n
		}
	}
	return all, nil
}

// claimKeys returns the keys of claims that are known before any is allocated.
func (a *applying) claimKeys(services []service.Service) (keys []string) {
	for _, is := range services {
		if is.LoadBalancer {
			keys = append(keys, keyServicePools)
		}
		for _, address := range is.Outside() {
			keys = append(keys, externalKey(address))
		}
		for _, p := range is.Ports {
			if p.NodePort != 0 {
				keys = append(keys, nodePortKey(p.Protocol, p.NodePort))
			}
		}
	}
	return keys
}

// mayExpose refuses addresses for hosts outside that no service has yet and that are something else's.
func (a *applying) mayExpose(services []service.Service) error {
	fresh := map[netip.Addr]service.Name{}
	for _, is := range services {
		for _, address := range is.Outside() {
			was, err := a.external(address)
			if err != nil {
				return err
			}
			if was.Tenant != "" {
				continue
			}
			fresh[address] = is.Name
			if by, protected := alwaysProtected(a.plan, netip.PrefixFrom(address, address.BitLen())); protected {
				return refuse(Invalid, "external address %v of service %s is in %v, which has addresses of the "+
					"cluster, or none that a host outside reaches; nothing was changed: use an address that the "+
					"fabric routes to nodes", address, is.Name, by)
			}
			if err := a.notAnothersAddress("", "", address); err != nil {
				return err
			}
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	return a.checkFabric(func(what string, is netip.Prefix) error {
		for address, of := range fresh {
			if is.Contains(address) {
				return refuse(Refused, "external address %v of service %s is in %v, %s; nothing was changed: use "+
					"another", address, of, is, what)
			}
		}
		return nil
	})
}

// keepNodePorts gives the ports of a service that have no number yet those that they had.
func keepNodePorts(was service.Service, is *service.Service) {
	if !is.NodePorts {
		return
	}
	for i, p := range is.Ports {
		had := slices.IndexFunc(was.Ports, func(q service.Port) bool {
			return q.Protocol == p.Protocol && q.Port == p.Port
		})
		if p.NodePort != 0 || had < 0 {
			continue
		}
		if n := was.Ports[had].NodePort; !slices.ContainsFunc(is.Ports, func(q service.Port) bool {
			return q.Protocol == p.Protocol && q.NodePort == n
		}) {
			is.Ports[i].NodePort = n
		}
	}
}

// release frees what a service had for hosts outside of the cluster and has no longer.
func (t *txn) release(tenant string, was, is service.Service) error {
	stays := map[string]bool{}
	for _, p := range is.Ports {
		for _, a := range is.Outside() {
			stays[externalKey(a)+" "+portName(p.Port, p.Protocol)] = true
		}
		stays[nodePortKey(p.Protocol, p.NodePort)] = true
	}
	for _, a := range was.Outside() {
		record, err := t.external(a)
		if err != nil {
			return err
		}
		had := len(record.Ports)
		for _, p := range was.Ports {
			port := portName(p.Port, p.Protocol)
			if record.Tenant == tenant && record.Ports[port] == was.Name.String() && !stays[externalKey(a)+" "+port] {
				delete(record.Ports, port)
			}
		}
		if len(record.Ports) < had {
			if err := t.saveExternal(a, record); err != nil {
				return err
			}
		}
	}
	for _, p := range was.Ports {
		key := nodePortKey(p.Protocol, p.NodePort)
		if p.NodePort == 0 || stays[key] {
			continue
		}
		owner, err := t.get(key)
		if err != nil {
			return err
		}
		if owner == ownerOf(tenant, was.Name) {
			t.delete(key)
		}
	}
	return nil
}

// releaseAll frees what the services of a tenant have for hosts outside of the cluster.
func (t *txn) releaseAll(tenant string) error {
	resp, err := t.list(dirServices + tenant + "/")
	if err != nil {
		return err
	}
	for _, kv := range resp.Kvs {
		record, err := decodeService(string(kv.Key), kv.Value)
		if err != nil {
			return err
		}
		is, err := service.FromProto(record)
		if err != nil {
			return fmt.Errorf("the store's %s is not readable: %w", kv.Key, err)
		}
		if err := t.release(tenant, is, service.Service{}); err != nil {
			return err
		}
	}
	return nil
}

// claim claims the addresses of a service for hosts outside, and the node ports whose numbers are known.
func (a *applying) claim(is service.Service) error {
	for _, address := range is.Outside() {
		if err := a.claimAddress(is, address); err != nil {
			return err
		}
	}
	for _, p := range is.Ports {
		if p.NodePort == 0 {
			continue
		}
		key, own := nodePortKey(p.Protocol, p.NodePort), ownerOf(a.of.Name, is.Name)
		owner, err := a.get(key)
		if err != nil {
			return err
		}
		if owner != "" && owner != own {
			tenant, other, _ := strings.Cut(owner, " ")
			return refuse(Exists, "node port %s of service %s is that of service %s of tenant %s; nothing was "+
				"changed: use another, or leave the number out", portName(p.NodePort, p.Protocol), is.Name, other,
				tenant)
		}
		if owner == "" {
			a.put(key, own)
		}
	}
	return nil
}

func (a *applying) claimAddress(is service.Service, address netip.Addr) error {
	record, err := a.external(address)
	if err != nil {
		return err
	}
	if record.Tenant != "" && record.Tenant != a.of.Name {
		return refuse(Exists, "external address %v of service %s is that of services of tenant %s; nothing was "+
			"changed: use another", address, is.Name, record.Tenant)
	}
	record.Tenant = a.of.Name
	fresh := false
	for _, p := range is.Ports {
		port := portName(p.Port, p.Protocol)
		switch other := record.Ports[port]; other {
		case is.Name.String():
		case "":
			record.Ports[port], fresh = is.Name.String(), true
		default:
			return refuse(Exists, "service %s has port %s of external address %v already; nothing was changed: "+
				"use another port or another address for service %s", other, port, address, is.Name)
		}
	}
	if !fresh {
		return nil
	}
	return a.saveExternal(address, record)
}

// allocateNodePort claims a free node port. Where the search begins follows from the service, so that a dry run shows
// the number, and so that a number that became free is not the next one that another service gets.
func (a *applying) allocateNodePort(of service.Name, p service.Port) (uint16, error) {
	const count = service.LastNodePort - service.FirstNodePort + 1
	hash := fnv.New32a()
	fmt.Fprint(hash, ownerOf(a.of.Name, of), " ", portName(p.Port, p.Protocol))
	first := int(hash.Sum32() % count)
	at := func(i int) uint16 { return uint16(service.FirstNodePort + (first+i)%count) }
	key := func(i int) string { return nodePortKey(p.Protocol, at(i)) }
	i, err := a.firstFree(0, count, key)
	if err != nil {
		return 0, err
	}
	if i == count {
		return 0, refuse(Full, "all %d node ports of protocol %v are taken, and service %s needs one; nothing was "+
			"changed: delete services with node ports that are not needed", count, p.Protocol, of)
	}
	a.put(key(i), ownerOf(a.of.Name, of))
	return at(i), nil
}

// firstFree returns the first number from i on whose key has no claim, or count.
func (a *applying) firstFree(i, count int, key func(int) string) (int, error) {
	for ahead := 8; i < count; i++ {
		if _, known := a.readings[key(i)]; !known {
			var keys []string
			for j := i; j < min(i+ahead, count); j++ {
				keys = append(keys, key(j))
			}
			if err := a.fetch(keys...); err != nil {
				return i, err
			}
			ahead = min(2*ahead, maxOps)
		}
		// The commit compares only the claim that is free: more may be taken than a transaction compares.
		if other, _, err := a.peek(key(i)); err == nil && other != "" {
			continue
		}
		_, err := a.get(key(i))
		return i, err
	}
	return count, nil
}

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
			if !underlay[address(i)] {
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
// the number of addresses that services have.
func (s *Store) ChangeServicePools(
	ctx context.Context,
	add, remove []netip.Prefix,
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
