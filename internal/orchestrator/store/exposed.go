package store

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/service"
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
			if by := a.how.Occupied[address]; by != "" {
				return refuse(Refused, "external address %v of service %s is that of %s, which hosts would no longer "+
					"reach; nothing was changed: choose another", address, is.Name, by)
			}
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
