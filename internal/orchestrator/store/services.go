package store

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

// A service is a record, and each slice of its endpoints is one. At its first service a tenant gets a number, and so
// the /64 of the addresses of its services. Neither the number nor an address that was allocated is used again.

// maxServiceAddress is the last 64 bits of a tenant's highest address of a service. 0 is reserved: a container that
// reaches itself by a service has this address as its peer.
const maxServiceAddress = 1<<32 - 1

// ApplyingServices are the options of ApplyServices.
type ApplyingServices struct {
	New    bool // refuse services that exist
	DryRun bool // return the changes, but write nothing
	// Occupied are addresses of machines that no service may get, and what has them.
	Occupied map[netip.Addr]string
}

// Actions of AppliedServices.
const (
	ServiceCreated    = "created"
	ServiceConfigured = "configured"
	ServiceUnchanged  = "unchanged"
)

// ApplyServices creates or changes services of a tenant and their fixed endpoints: all of them, or none. Addresses of
// endpoints are those that containers of the tenant see, or plaintext. It returns the services, also those of which
// only endpoints were given.
func (s *Store) ApplyServices(
	ctx context.Context,
	name string,
	services []service.Service,
	fixed []service.Slice,
	how ApplyingServices,
) (applied []*pilasterv1.AppliedService, err error) {
	keys, err := applyKeys(name, services, fixed)
	if err != nil {
		return nil, err
	}
	// A new service is two records, and more if hosts outside reach it. The transaction also compares the cluster, the
	// tenant, two marks, and the directories that checks read.
	n, claims, most := len(keys)+len(services), claimsOf(services), s.committer.maxBatch-8
	if n <= most && n+claims > most {
		return nil, refuse(Full, "the services have %d load-balancer and external addresses and node ports, and the "+
			"store changes %d records at once, which are 2 for a service, and 1 for such an address, a node port, or "+
			"a slice of endpoints; nothing was changed: use several steps", claims, most)
	}
	if n > most {
		return nil, refuse(Full, "%d services and %d slices of endpoints are more than the store changes at once, "+
			"which is %d services or %d slices; nothing was changed: use several steps", len(services), len(fixed),
			most/2, most)
	}
	err = s.change(ctx, func(t *txn) error {
		if err := t.fetch(append(keys, keyCluster, dirTenants+name, keyServicesMark)...); err != nil {
			return err
		}
		found := new(pilasterv1.Tenant)
		if err := t.loadTenant(name, found); err != nil {
			return err
		}
		a := applying{txn: t, of: found, how: how}
		if err := a.begin(); err != nil {
			return err
		}
		exposed, err := a.expose(services)
		if err != nil {
			return err
		}
		for _, is := range exposed {
			if err := a.apply(is); err != nil {
				return err
			}
		}
		for _, is := range fixed {
			if err := a.applyFixed(is); err != nil {
				return err
			}
		}
		t.indivisible = true
		if w := t.weight(); !w.fits(s.committer.maxBatch) {
			return refuse(Full, "the services and endpoints are %d records of %d KiB, with those that they free, and "+
				"the store changes %d of %d KiB at once; nothing was changed: use several steps", w.writes, w.bytes>>10,
				s.committer.maxBatch-8, maxBytes>>10)
		}
		if applied = a.applied; how.DryRun {
			t.writes, t.index = nil, map[string]int{}
		}
		return nil
	})
	return applied, err
}

// applyKeys checks all objects by themselves, and returns their keys.
func applyKeys(name string, services []service.Service, fixed []service.Slice) (keys []string, err error) {
	if err := checkTenant(name); err != nil {
		return nil, err
	}
	add := func(what, key string, err error) error {
		switch {
		case err != nil:
			return refuse(Invalid, "%v; nothing was changed", err)
		case slices.Contains(keys, key):
			return refuse(Invalid, "%s is there twice; nothing was changed", what)
		}
		keys = append(keys, key)
		return nil
	}
	for _, is := range services {
		if err := add(fmt.Sprintf("service %s", is.Name), serviceKey(name, is.Name), is.Check()); err != nil {
			return nil, err
		}
	}
	for _, is := range fixed {
		is.Node = "" // of what operators give
		what := fmt.Sprintf("endpoints %s of service %s", is.Name, is.Service)
		if err := add(what, sliceKey(name, is.Service, is.Name), is.Check()); err != nil {
			return nil, err
		}
	}
	if len(keys) == 0 {
		return nil, refuse(Invalid, "there is no service; nothing was changed")
	}
	return keys, nil
}

// applying is a transaction that changes services of a tenant.
type applying struct {
	*txn
	of      *pilasterv1.Tenant
	plan    address.Plan
	prefix  netip.Prefix // of the tenant's services
	how     ApplyingServices
	applied []*pilasterv1.AppliedService
}

// begin refuses tenants that cannot have services, and allocates the tenant's number at its first service.
func (a *applying) begin() (err error) {
	if !tenant.NetworkHas(a.of.Network, tenant.Services) {
		return refuse(Refused, "tenant %s is on network %s, and only tenants of network %s have services; nothing was "+
			"changed", a.of.Name, tenant.Tenant{Network: a.of.Network}.OnNetwork(),
			tenant.NetworksWith(tenant.Services))
	}
	if a.plan, err = a.txn.plan(); err != nil {
		return err
	}
	all, err := a.plan.ServicePrefix()
	if err != nil {
		return refuse(Refused, "%v; nothing was changed", err)
	}
	if err := a.number(a.of, all); err != nil {
		return err
	}
	a.prefix, err = a.plan.TenantServices(a.of.ServicesNumber)
	return err
}

// number gives a tenant its number for services, if it has none.
func (t *txn) number(of *pilasterv1.Tenant, all netip.Prefix) error {
	if of.ServicesNumber != 0 {
		return nil
	}
	n, err := t.mark(keyServicesMark)
	if err != nil {
		return err
	}
	if n > address.MaxServicesNumber {
		return refuse(Full, "%d tenants have had services, which is the maximum; nothing was changed",
			address.MaxServicesNumber)
	}
	if err := t.reserveServices(all); err != nil {
		return err
	}
	t.setMark(keyServicesMark, n+1)
	of.ServicesNumber = uint32(n)
	return t.saveChanged(of)
}

// numberFor gives a tenant its number for services because of host ports. Nothing happens on a network without
// services: the node refuses the container.
func (t *txn) numberFor(of *pilasterv1.Tenant) error {
	if !tenant.NetworkHas(of.Network, tenant.Services) {
		return nil
	}
	plan, err := t.plan()
	if err != nil {
		return err
	}
	all, err := plan.ServicePrefix()
	if err == nil {
		err = t.number(of, all)
	}
	var refused *Error
	if errors.As(err, &refused) && refused.Reason != Refused {
		return err
	}
	if err != nil {
		return refuse(Invalid, "host ports need a number for services of tenant %s: %v", of.Name, err)
	}
	return nil
}

// reserveServices reserves the prefix of services at the first service of the cluster, unless something is in it that
// was there before this build, whose notReserved refuses it.
func (t *txn) reserveServices(all netip.Prefix) error {
	r, err := t.clusterRecord()
	if err != nil || r.Services {
		return err
	}
	// Without addresses for hosts outside, and their pools: these are never in it.
	err = t.checkFabric(func(what string, is netip.Prefix) error {
		if !is.Overlaps(all) {
			return nil
		}
		return refuse(Refused, "services have addresses of %v, which overlaps %v, %s; nothing was changed: remove "+
			"that first", all, is, what)
	})
	if err != nil {
		return err
	}
	r.Services = true
	return t.saveCluster(r)
}

func (a *applying) apply(is service.Service) error {
	key, was := serviceKey(a.of.Name, is.Name), new(pilasterv1.Service)
	exists, err := a.load(key, was)
	if err != nil {
		return err
	}
	is.Tenant = ""
	switch {
	case exists && a.how.New:
		return refuse(Exists, "tenant %s has service %s already; nothing was changed: use `pilaster service apply` to "+
			"change it, or choose another name", a.of.Name, is.Name)
	case exists && is.Headless != was.Headless:
		return refuse(Refused, "service %s cannot become headless, or stop being so; nothing was changed: delete it "+
			"first", is.Name)
	case exists && is.Address.IsValid() && is.Address.String() != was.Address:
		return refuse(Refused, "service %s has address %s and cannot change to %v; nothing was changed: leave the "+
			"address out, or delete the service first", is.Name, was.Address, is.Address)
	case exists:
		if is.Created = was.Created.AsTime(); was.Address != "" {
			if is.Address, err = netip.ParseAddr(was.Address); err != nil {
				return fmt.Errorf("the store's %s is not readable: %w", key, err)
			}
		}
	default:
		if is.Created = time.Now(); !is.Headless {
			if is.Address, err = a.address(is); err != nil {
				return err
			}
		}
	}
	record, action := is.Proto(), ServiceCreated
	record.Namespace, record.Name = "", ""
	switch {
	case exists && proto.Equal(record, was):
		action = ServiceUnchanged
	case exists:
		action = ServiceConfigured
	}
	if action != ServiceUnchanged {
		if err := a.save(key, record); err != nil {
			return err
		}
	}
	is.Tenant = a.of.Name
	a.applied = append(a.applied, &pilasterv1.AppliedService{Service: is.Proto(), Action: action})
	return nil
}

// address returns the address that a new service wants, or the next one.
func (a *applying) address(of service.Service) (netip.Addr, error) {
	if wanted := of.Address; wanted.IsValid() {
		n := lowHalf(wanted)
		if !a.prefix.Contains(wanted) || n == 0 || n > maxServiceAddress {
			return wanted, refuse(Invalid, "address %v of service %s is none of the tenant's for services, which are "+
				"%v to %v; nothing was changed: choose one of these, or none", wanted, of.Name, at(a.prefix, 1),
				at(a.prefix, maxServiceAddress))
		}
		other, err := a.get(serviceClaim(a.of.Name, wanted))
		if err != nil {
			return wanted, err
		}
		if other != "" {
			return wanted, refuse(Exists, "service %s has address %v already; nothing was changed: choose another for "+
				"%s", other, wanted, of.Name)
		}
		a.put(serviceClaim(a.of.Name, wanted), of.Name.String())
		return wanted, nil
	}
	mark := dirServiceMarks + a.of.Name
	n, err := a.mark(mark)
	if err != nil {
		return netip.Addr{}, err
	}
	ahead := 8
	for ; n <= maxServiceAddress; n++ {
		next := at(a.prefix, n)
		claim := serviceClaim(a.of.Name, next)
		if _, known := a.readings[claim]; !known {
			if err := a.fetchClaims(n, ahead); err != nil {
				return next, err
			}
			ahead = min(2*ahead, maxOps)
		}
		// The commit compares only the claim that is free: more may be taken than a transaction compares.
		if other, _, err := a.peek(claim); err == nil && other != "" {
			continue
		}
		if _, err := a.get(claim); err != nil {
			return next, err
		}
		a.setMark(mark, n+1)
		a.put(claim, of.Name.String())
		return next, nil
	}
	return netip.Addr{}, refuse(Full, "all addresses of tenant %s for services have been allocated, and they are "+
		"never reused; nothing was changed: choose an address that no service has", a.of.Name)
}

// fetchClaims reads the claims of addresses from number n.
func (a *applying) fetchClaims(n uint64, count int) error {
	var keys []string
	for i := n; i <= maxServiceAddress && len(keys) < count; i++ {
		keys = append(keys, serviceClaim(a.of.Name, at(a.prefix, i)))
	}
	return a.fetch(keys...)
}

func lowHalf(a netip.Addr) uint64 {
	b := a.As16()
	return binary.BigEndian.Uint64(b[8:])
}

// at returns an address of a /64.
func at(prefix netip.Prefix, low uint64) netip.Addr {
	b := prefix.Addr().As16()
	binary.BigEndian.PutUint64(b[8:], low)
	return netip.AddrFrom16(b)
}

// applyFixed writes a slice of fixed endpoints. One without endpoints is deleted.
func (a *applying) applyFixed(is service.Slice) error {
	of, exists, err := a.service(a.of.Name, is.Service)
	if err != nil {
		return err
	}
	if !exists {
		return refuse(NotFound, "endpoints %s: tenant %s has no service %s; nothing was changed: create it first, or "+
			"put it in the same file", is.Name, a.of.Name, is.Service)
	}
	is.Tenant, is.Node, is.Zone, is.Unreachable = "", "", "", false
	for i, e := range is.Endpoints {
		if is.Endpoints[i].Address, err = plaintextOf(a.plan, a.of, e.Address); err != nil {
			return refuse(Invalid, "endpoints %s of service %s: %v; nothing was changed", is.Name, is.Service, err)
		}
		plain := is.Endpoints[i].Address
		if slices.ContainsFunc(is.Endpoints[:i], func(o service.Endpoint) bool { return o.Address == plain }) {
			return refuse(Invalid, "endpoints %s of service %s: %v and an endpoint before it are the same container; "+
				"nothing was changed", is.Name, is.Service, e.Address)
		}
	}
	changed, err := a.putSlice(a.of.Name, is)
	if err != nil {
		return err
	}
	isIt := func(p *pilasterv1.AppliedService) bool {
		return p.Service.Name == is.Service.Name && p.Service.Namespace == is.Service.Namespace
	}
	i := slices.IndexFunc(a.applied, isIt)
	if i < 0 {
		i = len(a.applied)
		a.applied = append(a.applied, &pilasterv1.AppliedService{Service: of, Action: ServiceUnchanged})
	}
	if changed && a.applied[i].Action == ServiceUnchanged {
		a.applied[i].Action = ServiceConfigured
	}
	return nil
}

// service reads a service; false if it does not exist.
func (t *txn) service(name string, of service.Name) (*pilasterv1.Service, bool, error) {
	key := serviceKey(name, of)
	value, err := t.get(key)
	if err != nil || value == "" {
		return nil, false, err
	}
	is, err := decodeService(key, []byte(value))
	return is, err == nil, err
}

// putSlice writes a slice, or deletes it if it is empty. It returns whether that changes anything.
func (t *txn) putSlice(name string, is service.Slice) (changed bool, err error) {
	key, was := sliceKey(name, is.Service, is.Name), new(pilasterv1.EndpointSlice)
	exists, err := t.load(key, was)
	if err != nil {
		return false, err
	}
	if len(is.Endpoints) == 0 {
		if exists {
			t.delete(key)
		}
		return exists, nil
	}
	record := is.Proto()
	record.Tenant, record.Service, record.Name, record.Unreachable = "", "", "", false
	if exists && proto.Equal(record, was) {
		return false, nil
	}
	return true, t.save(key, record)
}

// plaintextOf returns the plaintext address of a container from one that containers of its tenant see. It accepts
// plaintext addresses, too.
func plaintextOf(plan address.Plan, of *pilasterv1.Tenant, a netip.Addr) (netip.Addr, error) {
	can := func(p address.Plain, id *pilasterv1.TenantId) bool {
		return plan.ContainsNode(p.Node) && uint32(p.Tenant) == id.Id && p.App != 0 &&
			p.App < address.FirstReservedApp && p.Index != 0
	}
	for _, id := range of.Ids {
		if can(address.Split(a), id) {
			return a, nil
		}
		if of.Addressing == pilasterv1.Addressing_ADDRESSING_CLEAR || len(id.Key) != len(address.Key{}) {
			continue
		}
		if plain := address.NewCipher(address.Key(id.Key)).Decrypt(a); can(address.Split(plain), id) {
			return plain, nil
		}
	}
	return a, fmt.Errorf("%v cannot be the address of a container of tenant %s", a, of.Name)
}

// DeleteService deletes a service and its endpoints.
func (s *Store) DeleteService(ctx context.Context, name string, of service.Name) error {
	if err := checkTenant(name); err != nil {
		return err
	}
	if err := of.Check(); err != nil {
		return refuse(Invalid, "%v; nothing was changed", err)
	}
	return s.change(ctx, func(t *txn) error {
		if err := t.loadTenant(name, new(pilasterv1.Tenant)); err != nil {
			return err
		}
		is, exists, err := t.service(name, of)
		if err != nil {
			return err
		}
		if !exists {
			return refuse(NotFound, "tenant %s has no service %s; nothing was changed: `pilaster service list "+
				"--tenant %s` lists its services", name, of, name)
		}
		was, err := service.FromProto(is)
		if err != nil {
			return fmt.Errorf("the store's %s is not readable: %w", serviceKey(name, of), err)
		}
		if err := t.release(name, was, service.Service{}); err != nil {
			return err
		}
		t.delete(serviceKey(name, of))
		if a, err := netip.ParseAddr(is.Address); err == nil {
			t.delete(serviceClaim(name, a))
		}
		t.deleteAll(sliceKey(name, of, ""))
		return nil
	})
}

// PutEndpoints replaces slices that a node has written: all of them, or none. Those without endpoints are deleted. It
// ignores slices of services that do not exist, and of tenants that the node does not host: the node has not received
// these changes yet.
func (s *Store) PutEndpoints(ctx context.Context, n pki.Node, all []service.Slice) error {
	keys := nodeKeys(n)
	for i, is := range all {
		all[i].Node = n.Name
		err := checkTenant(is.Tenant)
		if err == nil {
			err = all[i].Check()
		}
		if err != nil {
			return refuse(Invalid, "%v; nothing was changed", err)
		}
		keys = append(keys, dirTenants+is.Tenant, hostingKey(is.Tenant, n.Name), serviceKey(is.Tenant, is.Service),
			sliceKey(is.Tenant, is.Service, is.Name))
	}
	estimate := weight{writes: len(all), compares: len(keys)}
	return s.changeQueued(ctx, func(t *txn) error {
		if err := t.fetch(keys...); err != nil {
			return err
		}
		node, err := t.member(n)
		if err != nil {
			return err
		}
		for _, is := range all {
			if err := t.putEndpoints(node, is); err != nil {
				return err
			}
		}
		if w := t.weight(); !w.fits(s.committer.maxBatch) {
			return refuse(Full, "the endpoints have %d KiB, more than the %d KiB that the store changes at once; "+
				"nothing was changed: send fewer slices at once", w.bytes>>10, maxBytes>>10)
		}
		t.indivisible = true
		return nil
	}, estimate, keys...)
}

func (t *txn) putEndpoints(node *pilasterv1.Node, is service.Slice) error {
	if _, exists, err := t.service(is.Tenant, is.Service); err != nil || !exists {
		return err
	}
	if _, hosts, err := t.hosting(is.Tenant, node.Name); err != nil || !hosts {
		return err
	}
	of := new(pilasterv1.Tenant)
	if err := t.loadTenant(is.Tenant, of); err != nil {
		return err
	}
	for _, e := range is.Endpoints {
		p := address.Split(e.Address)
		has := func(id *pilasterv1.TenantId) bool { return id.Id == uint32(p.Tenant) }
		if p.Node.String() != node.Prefix || !slices.ContainsFunc(of.Ids, has) || p.App >= address.FirstReservedApp {
			return refuse(Refused, "node %s reports endpoint %v of service %s, which cannot be the address of its "+
				"container of tenant %s; nothing was changed", node.Name, e.Address, is.Service, of.Name)
		}
	}
	is.Zone, is.Unreachable = cmp.Or(is.Zone, node.Rack), false
	_, err := t.putSlice(is.Tenant, is)
	return err
}

// deleteSlices deletes the endpoints that a node has of a tenant's services.
func (t *txn) deleteSlices(name, node string) error {
	names, err := t.names(dirEndpoints + name + "/")
	if err != nil {
		return err
	}
	for _, key := range names {
		is, err := decodeSlice(dirEndpoints+name+"/"+key, nil)
		if err != nil {
			return err
		}
		if (service.Slice{Name: is.Name}).IsOf(node) {
			t.delete(dirEndpoints + name + "/" + key)
		}
	}
	return nil
}

func serviceKey(tenant string, of service.Name) string {
	return dirServices + strings.Join([]string{tenant, of.Namespace, of.Name}, "/")
}

func serviceClaim(tenant string, a netip.Addr) string {
	return dirServiceClaims + tenant + "/" + a.String()
}

func sliceKey(tenant string, of service.Name, slice string) string {
	return dirEndpoints + strings.Join([]string{tenant, of.Namespace, of.Name, slice}, "/")
}

// decodeService decodes a service, or the key of a deleted one without value.
func decodeService(key string, value []byte) (*pilasterv1.Service, error) {
	is := new(pilasterv1.Service)
	if len(value) > 0 {
		if err := decode(key, value, is); err != nil {
			return nil, err
		}
	}
	words := strings.Split(strings.TrimPrefix(key, dirServices), "/")
	if len(words) != 3 {
		return nil, fmt.Errorf("the store's %s is not readable: it names no service", key)
	}
	is.Tenant, is.Namespace, is.Name = words[0], words[1], words[2]
	return is, nil
}

// decodeSlice decodes a slice, or the key of a deleted one without value.
func decodeSlice(key string, value []byte) (*pilasterv1.EndpointSlice, error) {
	is := new(pilasterv1.EndpointSlice)
	if len(value) > 0 {
		if err := decode(key, value, is); err != nil {
			return nil, err
		}
	}
	words := strings.Split(strings.TrimPrefix(key, dirEndpoints), "/")
	if len(words) != 4 {
		return nil, fmt.Errorf("the store's %s is not readable: it names no endpoints", key)
	}
	is.Tenant, is.Service, is.Name = words[0], service.Name{Namespace: words[1], Name: words[2]}.String(), words[3]
	return is, nil
}
