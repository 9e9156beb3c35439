package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
)

// Ports of services and of their endpoints.
const (
	servicePort = 80
	targetPort  = 8080
)

// createServices creates the services of all tenants. Each service selects all containers of its tenant. The next
// tenant waits until the former is done: if all nodes reported at the same time, each would receive hundreds of
// messages.
func (w *world) createServices(ctx context.Context) error {
	for _, name := range w.tenants {
		wanted := &pilasterv1.ApplyServicesRequest{Tenant: name}
		for i := range w.scenario.Services {
			wanted.Services = append(wanted.Services, &pilasterv1.Service{
				Tenant: name, Name: fmt.Sprintf("s%d", i+1), Selector: w.labels, Ports: []*pilasterv1.ServicePort{
					{Protocol: service.TCP.String(), Port: servicePort, Target: targetPort},
				},
			})
		}
		applied, err := w.operator.ApplyServices(ctx, connect.NewRequest(wanted))
		if err != nil {
			return fmt.Errorf("create services of tenant %s: %w", name, err)
		}
		for _, m := range applied.Msg.Services {
			addr, err := netip.ParseAddr(m.Service.GetAddress())
			if err != nil {
				return fmt.Errorf("service %s of tenant %s: %w", m.Service.GetName(), name, err)
			}
			w.services[name] = append(w.services[name], dpapi.FrontendKey{
				Address: netip.AddrPortFrom(addr, servicePort), Protocol: uint8(service.TCP),
			})
		}
		if err := w.awaitServices(ctx, name); err != nil {
			return fmt.Errorf("services of tenant %s: %w", name, err)
		}
	}
	return nil
}

// awaitServices waits until all nodes that host a tenant have as many backends of its services as it has containers.
func (w *world) awaitServices(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	hosts, containers := w.hosting(name), 0
	for n := range hosts {
		for _, c := range n.running {
			if c.tenant == name {
				containers++
			}
		}
	}
	for n := range hosts {
		for !n.driver.haveBackends(w.services[name], containers) {
			if err := pause(ctx, noticeEvery); err != nil {
				return fmt.Errorf("node %s does not have all %d endpoints: %w", n.name, containers, err)
			}
		}
	}
	return nil
}

// haveBackends reports whether each frontend has so many backends.
func (t *serviceTables) haveBackends(keys []dpapi.FrontendKey, many int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !slices.ContainsFunc(keys, func(k dpapi.FrontendKey) bool { return len(t.frontends[k].Backends) != many })
}

// spareContainers is how many nodes change at a time, and the most containers that changeEndpoints may leave behind.
const spareContainers = 10

// changeEndpoints changes endpoints of the first tenant's services, in turn on the nodes that host it. On one node, a
// container becomes not ready, and ready again later; on the next node, one more container starts, and ends later. Each
// change waits until the former change of its node is in force.
func (w *world) changeEndpoints(ctx context.Context, e Event) error {
	name := w.tenants[0]
	c := w.beginChanges(endpointChanges, name)
	if len(c.hosts) == 0 {
		return fmt.Errorf("no node hosts tenant %s", name)
	}
	hosts := slices.SortedFunc(maps.Keys(c.hosts), func(a, b *node) int { return a.number - b.number })
	random := rand.New(rand.NewPCG(w.scenario.Seed, 1))
	random.Shuffle(len(hosts), func(i, j int) { hosts[i], hosts[j] = hosts[j], hosts[i] })
	busy := make([]sync.Mutex, len(hosts))
	for _, n := range hosts {
		n.driver.observe(true)
		defer n.driver.observe(false)
	}
	changing, ctx := errgroup.WithContext(ctx)
	every := time.Duration(0)
	if e.PerSecond > 0 {
		every = time.Second / time.Duration(e.PerSecond)
	} else {
		changing.SetLimit(1)
	}
	began := time.Now()
	for i := range e.Times {
		if every > 0 && inUse() > 2*c.live {
			began = began.Add(c.collectBetween(busy))
		}
		if err := pause(ctx, time.Until(began.Add(time.Duration(i)*every))); err != nil {
			return cmp.Or(changing.Wait(), err)
		}
		at, change := turn(i, len(hosts))
		busy[at].Lock()
		changing.Go(func() error {
			defer busy[at].Unlock()
			if every == 0 {
				c.collectIfDue()
			}
			if err := w.changeEndpoint(ctx, c, hosts[at], change); err != nil {
				return fmt.Errorf("endpoint change %d: %w", i+1, err)
			}
			return nil
		})
	}
	return changing.Wait()
}

// collectBetween waits until no change is in progress, and collects garbage. It returns how long that took.
func (c *changes) collectBetween(busy []sync.Mutex) time.Duration {
	began := time.Now()
	for i := range busy {
		busy[i].Lock()
		defer busy[i].Unlock()
	}
	c.collect()
	return time.Since(began)
}

// endpointChange changes an endpoint of a tenant on a node. It returns the endpoint's plaintext address, and whether
// services use the endpoint from now on.
type endpointChange func(ctx context.Context, n *node, w *world, tenant string) (plain netip.Addr, used bool, err error)

// turn returns the place of the node that a change concerns, and the change. Some nodes change one after the other, and
// the same nodes change back in the same order, before others do.
func turn(i, hosts int) (at int, _ endpointChange) {
	some := min(max(hosts/2, 1), spareContainers)
	at = (i/(2*some)*some + i%some) % hosts
	if i%some%2 == 0 {
		return at, changeReady
	}
	return at, changeContainers
}

// changeReady makes the first container of a tenant not ready, or ready if it is not.
func changeReady(ctx context.Context, n *node, _ *world, tenant string) (plain netip.Addr, used bool, err error) {
	i := slices.IndexFunc(n.running, func(c container) bool { return c.tenant == tenant })
	r, plain, err := n.record(n.running[i].id)
	if err != nil {
		return plain, false, err
	}
	used = r.Conditions.NotReady
	_, err = n.core.SetConditions(n.as(ctx), r.ContainerID, agent.ConditionChange{Ready: &used})
	return plain, used, err
}

// changeContainers starts one more container of a tenant, or ends it.
func changeContainers(ctx context.Context, n *node, w *world, tenant string) (plain netip.Addr, used bool, err error) {
	last := len(n.running)
	if last > w.scenario.ContainersPerNode {
		if _, plain, err = n.record(n.running[last-1].id); err != nil {
			return plain, false, err
		}
		return plain, false, n.removeAt(ctx, last-1)
	}
	if err := n.add(ctx, w, tenant); err != nil {
		return plain, false, err
	}
	_, plain, err = n.record(n.running[last].id)
	return plain, true, err
}

// record returns the record of a container, and its plaintext address.
func (n *node) record(id string) (r endpoint.Record, plain netip.Addr, err error) {
	r, ok := n.store.Find(id, containerInterface)
	if !ok || len(r.Attachments) != 1 {
		return r, plain, fmt.Errorf("node %s has no record of container %.12s with one address", n.name, id)
	}
	return r, r.Attachments[0].Plaintext, nil
}

// changeEndpoint changes an endpoint on a node, and waits until the packet paths of all nodes that host the tenant have
// the change.
func (w *world) changeEndpoint(ctx context.Context, c *changes, n *node, change endpointChange) error {
	began := c.begin()
	name := w.tenants[0]
	plain, used, err := change(ctx, n, w, name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	var last time.Duration
	for host := range c.hosts {
		since, err := host.driver.awaitBackend(ctx, w.services[name], plain, used)
		if err != nil {
			return fmt.Errorf("%v of node %s (used: %v) did not reach node %s: %w", plain, n.name, used, host.name, err)
		}
		took := since.Sub(began)
		c.each.note(took)
		last = max(last, took)
	}
	c.done(last)
	return nil
}

// serviceTables are the services of a packet path.
type serviceTables struct {
	mu        sync.Mutex
	frontends map[dpapi.FrontendKey]dpapi.Frontend
	since     map[netip.Addr]time.Time // when a backend of a frontend last came or went; nil: not observed
	next      chan struct{}            // closed at the next change; nil while no goroutine waits
}

// observe begins or ends to note when backends come and go.
func (t *serviceTables) observe(is bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.since = nil; is {
		t.since = map[netip.Addr]time.Time{}
	}
}

// PutServices implements dpapi.Services.
func (t *serviceTables) PutServices(all []dpapi.Frontend) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.frontends == nil {
		t.frontends = map[dpapi.FrontendKey]dpapi.Frontend{}
	}
	for _, f := range all {
		t.note(t.frontends[f.FrontendKey], f)
		t.frontends[f.FrontendKey] = f
	}
	t.changed()
	return nil
}

// DeleteServices implements dpapi.Services.
func (t *serviceTables) DeleteServices(keys []dpapi.FrontendKey) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, key := range keys {
		t.delete(key)
	}
	t.changed()
	return nil
}

// KeepServices implements dpapi.Services.
func (t *serviceTables) KeepServices(prefix netip.Prefix, keys []dpapi.FrontendKey) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key := range t.frontends {
		if prefix.Contains(key.Address.Addr()) && !slices.Contains(keys, key) {
			t.delete(key)
		}
	}
	t.changed()
	return nil
}

// delete requires the lock.
func (t *serviceTables) delete(key dpapi.FrontendKey) {
	t.note(t.frontends[key], dpapi.Frontend{})
	delete(t.frontends, key)
}

// note notes when backends of a frontend came or went. The caller holds the lock.
func (t *serviceTables) note(was, is dpapi.Frontend) {
	if t.since == nil {
		return
	}
	// Most backends stay, so the lists differ in the middle only.
	had, has := was.Backends, is.Backends
	for len(had) > 0 && len(has) > 0 && had[0] == has[0] {
		had, has = had[1:], has[1:]
	}
	for len(had) > 0 && len(has) > 0 && had[len(had)-1] == has[len(has)-1] {
		had, has = had[:len(had)-1], has[:len(has)-1]
	}
	now, gone := time.Now(), map[netip.Addr]bool{}
	for _, b := range had {
		gone[b.Plain] = true
	}
	for _, b := range has {
		if !gone[b.Plain] {
			t.since[b.Plain] = now
		}
		delete(gone, b.Plain)
	}
	for plain := range gone {
		t.since[plain] = now
	}
}

// changed requires the lock.
func (t *serviceTables) changed() {
	if t.next != nil {
		close(t.next)
		t.next = nil
	}
}

// awaitBackend waits until an address is a backend of all frontends, or of none, and returns since when.
func (t *serviceTables) awaitBackend(
	ctx context.Context, keys []dpapi.FrontendKey, plain netip.Addr, used bool,
) (since time.Time, err error) {
	for {
		t.mu.Lock()
		if t.next == nil {
			t.next = make(chan struct{})
		}
		using, next, since := t.using(keys, plain), t.next, t.since[plain]
		t.mu.Unlock()
		if want := map[bool]int{true: len(keys)}[used]; using == want && !since.IsZero() {
			return since, nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return since, ctx.Err()
		}
	}
}

// using counts the frontends with a backend. The caller holds the lock.
func (t *serviceTables) using(keys []dpapi.FrontendKey, plain netip.Addr) (n int) {
	for _, key := range keys {
		if slices.ContainsFunc(t.frontends[key].Backends, func(b dpapi.Backend) bool { return b.Plain == plain }) {
			n++
		}
	}
	return n
}

// LookupService implements dpapi.Services.
func (t *serviceTables) LookupService(key dpapi.FrontendKey) (dpapi.Frontend, bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f, ok := t.frontends[key]
	return f, ok, nil
}

// LookupExposed implements dpapi.Services.
func (t *serviceTables) LookupExposed(netip.Addr) (node, found bool, err error) {
	return false, false, nil
}

// LookupTarget implements dpapi.Services.
func (t *serviceTables) LookupTarget(netip.AddrPort, uint8) (bool, error) { return false, nil }

// ChooseBackend implements dpapi.Services.
func (t *serviceTables) ChooseBackend(dpapi.FrontendKey, netip.AddrPort) (dpapi.Choice, bool, error) {
	return dpapi.Choice{}, false, nil
}

// ServiceCounts implements dpapi.Services.
func (t *serviceTables) ServiceCounts() (map[dpapi.FrontendKey]dpapi.ServiceCounts, error) {
	return nil, errors.New("the simulated packet path has no packets")
}

// backends are the endpoints of a tenant as packet paths should have them, in the order of their addresses.
type backends struct{ active, draining []dpapi.Backend }

// checkServices compares the services of packet paths with the containers: nodes that host a tenant have its services
// with all ready containers, and other nodes have none of them.
func (w *world) checkServices(v *violations) {
	if w.scenario.Services == 0 {
		return
	}
	of := map[string]*backends{}
	for _, n := range w.nodes {
		for _, r := range n.store.List() {
			if of[r.Tenant] == nil {
				of[r.Tenant] = &backends{}
			}
			to := &of[r.Tenant].active
			if r.Conditions.NotReady {
				to = &of[r.Tenant].draining
			}
			for _, a := range r.Attachments {
				*to = append(*to, dpapi.Backend{Plain: a.Plaintext, Seen: a.Address, Port: targetPort})
			}
		}
	}
	for _, b := range of {
		slices.SortFunc(b.active, byAddress)
		slices.SortFunc(b.draining, byAddress)
	}
	for _, n := range w.nodes {
		w.checkServicesOf(v, n, of)
	}
}

func byAddress(a, b dpapi.Backend) int { return a.Plain.Compare(b.Plain) }

func (w *world) checkServicesOf(v *violations, n *node, of map[string]*backends) {
	hosted := map[string]bool{}
	for _, c := range n.running {
		hosted[c.tenant] = true
	}
	n.driver.serviceTables.mu.Lock()
	defer n.driver.serviceTables.mu.Unlock()
	want := 0
	for name := range hosted {
		want += len(w.services[name])
		for _, key := range w.services[name] {
			f, all := n.driver.frontends[key], cmp.Or(of[name], &backends{})
			if !slices.Equal(f.Backends, all.active) || !slices.Equal(f.Draining, all.draining) {
				v.add("a node has other endpoints of a service", "%s has %d and %d that drain for %v of tenant %s, "+
					"want %d and %d", n.name, len(f.Backends), len(f.Draining), key.Address, name, len(all.active),
					len(all.draining))
			}
		}
	}
	if has := len(n.driver.frontends); has != want {
		v.add("a node has services of other tenants, or lacks some", "%s has %d, want %d", n.name, has, want)
	}
}
