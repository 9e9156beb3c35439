// Package agent is the core of a node's agent: it adds, keeps and removes the node's endpoints, and keeps the state of
// the tenants that they belong to. It is not on the packet path: it writes its decisions through a Driver, and packets
// flow without it. Package policies enforces the tenants' policies, package services keeps their services, package
// networks calls the node's networks, package control is the client of the orchestrator, package api serves the CNI
// plugin and operators, and package daemon starts all of them.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/networks"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/egress"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// removeTimeout limits the rollback of an ADD, which may outlive the call.
const removeTimeout = 30 * time.Second

// Core is the agent without sockets, streams and kernel access: it writes its decisions to the store and through the
// driver. All methods are safe for concurrent use; calls for the same container and interface are serialised.
type Core struct {
	store    *endpoint.Store
	tenants  *Tenants
	policies *policies.Manager
	services *services.Manager
	networks *networks.Set
	driver   dpapi.Driver
	resolver Resolver
	egress   *egress.Addresses
	plan     address.Plan
	edge     bool

	mtuReserve int // bytes by which the containers' MTU is smaller than the uplink's
	max        int
	now        func() time.Time
	log        *slog.Logger

	byKey    refusal.KeyLocks // container id and interface
	byTenant refusal.KeyLocks

	mu       sync.Mutex
	ids      map[endpoint.ID]bool // in use, including endpoints being created
	creating map[endpoint.ID]bool // those being created
	lastID   endpoint.ID

	staged sessionStage // sessions of containers that move here

	offloadsChanged, loadDue wakeup // this node became or was a member of an offload that has changed
	gatewaysChanged          wakeup // egress gateways of tenants here may have changed

	migrationDue wakeup               // endpoints may have to migrate, or to get or lose egress addresses
	migrated     map[endpoint.ID]bool // endpoints on two networks whose new attachment this process has verified
	settling     map[endpoint.ID]bool // endpoints whose record has egress that their device or entries may lack
	unsettled    map[string]error     // by tenant: why an endpoint does not have the egress that its tenant requires
}

// Config has the parts and limits of a Core.
type Config struct {
	Store     *endpoint.Store
	Tenants   *Tenants
	Networks  map[string]Network // by name
	Absent    map[string]string  // by name of a network that this node lacks: the option that enables it
	Driver    dpapi.Driver
	Resolver  Resolver
	Reporter  services.Reporter  // of endpoints of services; nil: they are not reported
	Addresses services.Addresses // of this node at the start; see SetAddresses
	Egress    *egress.Addresses  // those that the networks allocate
	// closed after the first contact with the orchestrator, or a bounded time without one; nil: do not wait
	Tried        <-chan struct{}
	Plan         address.Plan
	Name, Zone   string           // of this node; the zone may be empty
	Node         netip.Prefix     // of this node
	Edge         bool             // the node is an Edge Switch and rejects endpoints
	MTUReserve   int              // bytes by which the containers' MTU is smaller than the uplink's
	MaxEndpoints int              // 0 means DefaultMaxEndpoints
	MaxTenantIDs int              // sum over hosted tenants; 0 means DefaultMaxTenantIDs
	Now          func() time.Time // nil means time.Now
	Log          *slog.Logger
}

// New returns a core with the state of store and tenants. Call Start before any other method.
func New(c Config) (*Core, error) {
	core := &Core{
		store: c.Store, tenants: c.Tenants, policies: c.Tenants.policies, networks: networks.New(c.Networks, c.Absent),
		driver: c.Driver, resolver: c.Resolver, egress: c.Egress, settling: map[endpoint.ID]bool{},
		unsettled: map[string]error{},
		plan:      c.Plan, edge: c.Edge, mtuReserve: c.MTUReserve,
		max: cmp.Or(c.MaxEndpoints, dpapi.DefaultMaxEndpoints), now: c.Now, log: c.Log,
		ids: map[endpoint.ID]bool{}, lastID: c.Store.LastID(), migrated: map[endpoint.ID]bool{},
		creating:     map[endpoint.ID]bool{},
		migrationDue: newWakeup(), offloadsChanged: newWakeup(), loadDue: newWakeup(),
		gatewaysChanged: newWakeup(),
	}
	c.Tenants.node, c.Tenants.containers = c.Node, core.offloadedContainers
	c.Tenants.appOverrides = core.overrides
	c.Tenants.listed = core.migrationDue.wake
	core.policies.Connect(policies.Config{
		Tenants: c.Tenants, Endpoints: c.Store.List, Driver: c.Driver, Node: c.Node,
		Seal: core.networks.Seal, CheckGuards: core.networks.CheckGuards, Tried: c.Tried, Log: c.Log,
	})
	core.services = services.New(services.Config{
		Node: c.Name, Zone: c.Zone, Plan: c.Plan, Tenants: c.Tenants, Endpoints: core.created, Driver: c.Driver,
		Reporter: c.Reporter, Addresses: c.Addresses, Log: c.Log,
	})
	c.Tenants.usedApps = core.usedApps
	c.Tenants.maxIDs = cmp.Or(c.MaxTenantIDs, dpapi.DefaultMaxTenantIDs)
	if core.max < 1 || core.max > int(endpoint.MaxID) {
		return nil, fmt.Errorf("%d endpoints: choose 1 to %d", core.max, endpoint.MaxID)
	}
	if core.now == nil {
		core.now = time.Now
	}
	for _, r := range c.Store.List() {
		core.ids[r.ID] = true
		if err := core.validate(r); err != nil {
			return nil, err
		}
		if err := c.Tenants.countRecord(r); err != nil {
			return nil, err
		}
	}
	return core, c.Tenants.setLostAside()
}

// AddRequest describes the endpoint to create.
type AddRequest struct {
	ContainerID, Interface string
	Netns                  string // path in the caller's mount namespace; stored in the record
	OpenNetns              string // path that this process can open; empty means Netns
	Tenant                 string
	Labels                 map[string]string // stored: the caller must not modify them
	Pod                    string
	CNINetwork             string
	AddressKey             string // optional; networks with the capability AddressKeys keep the address for it
	HostPorts              []endpoint.HostPort
}

func (q AddRequest) validate() error {
	switch {
	case q.ContainerID == "":
		return refusal.New(refusal.ErrInvalid, "container id is missing")
	case q.Interface == "" || len(q.Interface) > 15 || strings.ContainsAny(q.Interface,
		"/ \t\n:%") || q.Interface == "." || q.Interface == "..":
		return refusal.New(refusal.ErrInvalid, "interface %q is not a valid device name", q.Interface)
	case !filepath.IsAbs(q.Netns):
		return refusal.New(refusal.ErrInvalid, "netns %q is not an absolute path", q.Netns)
	case q.Tenant == "":
		return refusal.New(
			refusal.ErrInvalid,
			"the tenant is missing\n  set \"tenant\" in the CNI configuration",
		)
	}
	if err := tenant.CheckName(q.Tenant); err != nil {
		return refusal.New(refusal.ErrInvalid, "%w", err)
	}
	if err := tenant.CheckLabels(q.Labels); err != nil {
		return refusal.New(refusal.ErrInvalid, "%w", err)
	}
	if err := tenant.CheckAddressKey(q.AddressKey); err != nil {
		return refusal.New(refusal.ErrInvalid, "%w", err)
	}
	return nil
}

// EndpointKey is the key by which the orchestrator knows the addresses of an endpoint.
func EndpointKey(containerID, iface string) string { return containerID + "/" + iface }

// Add creates an endpoint and returns it active. After an error nothing of it remains.
func (c *Core) Add(ctx context.Context, q AddRequest) (endpoint.Record, error) {
	if err := q.validate(); err != nil {
		return endpoint.Record{}, err
	}
	var err error
	if q.HostPorts, err = endpoint.CheckHostPorts(q.HostPorts); err != nil {
		return endpoint.Record{}, refusal.New(refusal.ErrInvalid, "%w", err)
	}
	if c.edge {
		return endpoint.Record{}, refusal.New(
			refusal.ErrNever,
			"this node is an Edge Switch, which forwards packets between regions and runs no containers\n  nothing "+
				"was changed; use another node of the region",
		)
	}
	unlock, err := c.byKey.Lock(ctx, EndpointKey(q.ContainerID, q.Interface))
	if err != nil {
		return endpoint.Record{}, err
	}
	defer unlock()

	if r, ok := c.store.Find(q.ContainerID, q.Interface); ok {
		if r.State != endpoint.Deleting {
			return endpoint.Record{}, refusal.New(
				refusal.ErrExists,
				"container %s already has interface %s, as endpoint %d\n  nothing was changed; DEL it first",
				q.ContainerID,
				q.Interface,
				r.ID,
			)
		}
		if err := c.remove(ctx, r); err != nil {
			return endpoint.Record{}, err
		}
	}
	// First: a full node sends no request and has nothing to roll back.
	id, err := c.allocateID()
	if err != nil {
		return endpoint.Record{}, err
	}
	r := endpoint.Record{
		ID: id, ContainerID: q.ContainerID, Interface: q.Interface, Netns: q.Netns, CNINetwork: q.CNINetwork,
		Pod: q.Pod, Tenant: q.Tenant, Labels: q.Labels, State: endpoint.Preparing, Created: c.now().UTC(),
		AddressKey: q.AddressKey, HostPorts: q.HostPorts,
	}
	if err := c.services.ClaimHostPorts(r); err != nil {
		c.releaseID(id)
		return endpoint.Record{}, err
	}
	t, app, err := c.acquire(ctx, q.Tenant, tenant.IdentityLabels(q.Labels), len(q.HostPorts) > 0)
	if err != nil {
		c.releaseID(id)
		return endpoint.Record{}, errors.Join(err, c.services.ReleaseHostPorts(r))
	}
	defer c.tenants.unclaim(q.Tenant, app)
	r.TenantID, r.App = t.Current().ID, app
	if r.Attachments, err = c.prepare(ctx, t, r); err != nil {
		c.releaseID(id)
		c.release(ctx, q.Tenant, t.Current().ID)
		return endpoint.Record{}, errors.Join(err, c.services.ReleaseHostPorts(r))
	}
	if err := c.build(ctx, &r, q); err != nil {
		// The rollback runs even if the caller has cancelled.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		return endpoint.Record{}, errors.Join(err, c.remove(undo, r))
	}
	c.setCreated(r)
	c.tenants.signalContainers(r.Tenant)
	c.awaitList(ctx, r.Tenant)
	if !c.services.Await(ctx, r.Tenant) {
		c.log.Warn("an endpoint is active before the services of its tenant arrived", "tenant", r.Tenant)
	}
	c.signalMigration(r) // its tenant may have migrated meanwhile
	c.signalEgress(r)
	c.signalGateways(t)
	c.log.Info(
		"endpoint added",
		"endpoint",
		r.ID,
		"container",
		r.ContainerID,
		"pod",
		r.Pod,
		"tenant",
		r.Tenant,
		"app",
		r.App,
		"addresses",
		r.Addresses(),
	)
	return r, nil
}

// prepare allocates addresses and holds the record with them. After an error nothing is allocated.
func (c *Core) prepare(ctx context.Context, t tenant.Tenant, r endpoint.Record) (_ []endpoint.Attachment, err error) {
	if err := c.checkReserve(t); err != nil {
		return nil, fmt.Errorf("%w\n  nothing was changed", err)
	}
	if r.Attachments, err = c.networks.Prepare(ctx, t, r.App, r); err != nil {
		return nil, err
	}
	if err := c.store.Hold(r); err != nil {
		return nil, errors.Join(err, c.releaseAddresses(ctx, r))
	}
	return r.Attachments, nil
}

// build creates the device, writes the record and activates the endpoint.
func (c *Core) build(ctx context.Context, r *endpoint.Record, q AddRequest) error {
	inside := *r
	inside.Netns = cmp.Or(q.OpenNetns, q.Netns)
	d, err := c.driver.CreateDevice(ctx, inside)
	if err != nil {
		return err
	}
	r.Device = d
	active := *r
	active.State, active.Netns = endpoint.Active, q.Netns
	active = c.onBoth(active)
	// The record is on disk before packets flow: after a crash, a device without a record has never carried a packet.
	if err := c.store.Put(active); err != nil {
		return err
	}
	*r = active
	if err := c.policies.EnforceFor(active); err != nil {
		return err
	}
	if err := c.driver.Attach(active); err != nil {
		return err
	}
	if err := c.keepStaged(active); err != nil {
		return err
	}
	err = c.networks.EachOf(active, func(n Network, r endpoint.Record) error { return n.Activate(ctx, r) })
	if err != nil {
		return err
	}
	return c.services.PublishHostPorts(active)
}

func (c *Core) deactivate(ctx context.Context, r endpoint.Record) error {
	return c.networks.EachOf(r, func(n Network, r endpoint.Record) error { return n.Deactivate(ctx, r) })
}

func (c *Core) releaseAddresses(ctx context.Context, r endpoint.Record) error {
	return c.networks.EachOf(r.Over("", ""), func(n Network, r endpoint.Record) error { return n.Release(ctx, r) })
}

// Delete removes an endpoint; it succeeds if there is none.
func (c *Core) Delete(ctx context.Context, containerID, iface string) error {
	unlock, err := c.byKey.Lock(ctx, EndpointKey(containerID, iface))
	if err != nil {
		return err
	}
	defer unlock()
	r, ok := c.store.Find(containerID, iface)
	if !ok {
		return nil
	}
	if err := c.remove(ctx, r); err != nil {
		return err
	}
	c.log.Info("endpoint removed", "endpoint", r.ID, "container", r.ContainerID, "pod", r.Pod)
	return nil
}

// remove removes an endpoint in any state. After an error the record is in state deleting, and the next call continues.
func (c *Core) remove(ctx context.Context, r endpoint.Record) error {
	if err := c.store.Mark(r); err != nil {
		// The mark matters only if the agent crashes below; without it the removal still continues.
		c.log.Warn("writing the deleting mark of an endpoint failed; it is removed anyway", "endpoint", r.ID, "error",
			err)
	}
	c.services.EndpointsChanged(r.Tenant)
	err := c.services.ReleaseHostPorts(r)
	if err == nil {
		err = c.deactivate(ctx, r)
	}
	if err == nil {
		err = c.driver.RemoveDevice(ctx, r)
	}
	if err != nil {
		return fmt.Errorf("%w\n  endpoint %d remains until a repeated DEL succeeds", err, r.ID)
	}
	if err := c.releaseAddresses(ctx, r); err != nil {
		// The addresses leak for now; they are never allocated twice.
		c.log.Warn("releasing addresses failed", "addresses", r.Addresses(), "error", err)
	}
	if err := c.store.Delete(r.ID); err != nil {
		return err
	}
	c.releaseID(r.ID)
	if r.AppNow != 0 {
		c.tenants.signal()
	}
	c.tenants.signalContainers(r.Tenant)
	known, _, _ := c.tenants.Get(r.Tenant)
	c.release(ctx, r.Tenant, r.TenantID)
	c.signalGateways(known.Tenant)
	c.policies.Retry(r.Tenant)
	c.signalMigration(r)
	return nil
}

// CollectGarbage removes the endpoints of a CNI network that are not valid and returns them. It skips endpoints that
// are being created: the caller's list cannot contain them yet.
func (c *Core) CollectGarbage(
	ctx context.Context,
	network string,
	valid func(containerID, iface string) bool,
) ([]endpoint.Record, error) {
	var removed []endpoint.Record
	var errs []error
	for _, r := range c.store.List() {
		if r.CNINetwork != network || r.State == endpoint.Preparing || valid(r.ContainerID, r.Interface) {
			continue
		}
		if err := c.Delete(ctx, r.ContainerID, r.Interface); err != nil {
			errs = append(errs, err)
			continue
		}
		removed = append(removed, r)
	}
	return removed, errors.Join(errs...)
}

// CheckRequest is what the runtime expects of an endpoint.
type CheckRequest struct {
	ContainerID, Interface string
	Netns, OpenNetns       string
	Addresses              []netip.Prefix       // empty: not checked
	HostPorts              *[]endpoint.HostPort // nil: not checked
}

// Check compares an endpoint with its record and with the request, and reports the first difference.
func (c *Core) Check(ctx context.Context, q CheckRequest) error {
	unlock, err := c.byKey.Lock(ctx, EndpointKey(q.ContainerID, q.Interface))
	if err != nil {
		return err
	}
	defer unlock()
	r, ok := c.store.Find(q.ContainerID, q.Interface)
	if !ok {
		return refusal.New(refusal.ErrNotFound, "container %s has no interface %s here", q.ContainerID, q.Interface)
	}
	if !r.Lives() {
		return refusal.New(refusal.ErrCheck, "endpoint %d is %s", r.ID, r.State)
	}
	if q.Netns != r.Netns {
		return refusal.New(refusal.ErrCheck, "netns: endpoint %d was created in %s, not in %s", r.ID, r.Netns, q.Netns)
	}
	for _, claimed := range q.Addresses {
		own := func(a netip.Addr) bool { return claimed == netip.PrefixFrom(a, a.BitLen()) }
		if !slices.ContainsFunc(append(r.Addresses(), r.Left...), own) {
			return refusal.New(refusal.ErrCheck, "address: endpoint %d does not have %v", r.ID, claimed)
		}
	}
	if q.HostPorts != nil {
		claimed, err := endpoint.CheckHostPorts(*q.HostPorts)
		if err != nil || len(claimed) != len(r.HostPorts) ||
			slices.ContainsFunc(claimed, func(p endpoint.HostPort) bool { return !slices.Contains(r.HostPorts, p) }) {
			return refusal.New(refusal.ErrCheck, "host ports: endpoint %d has %v, not %v", r.ID, r.HostPorts,
				*q.HostPorts)
		}
	}
	if q.OpenNetns != "" {
		r.Netns = q.OpenNetns
	}
	// For a lost endpoint the error says what is missing.
	err = c.driver.Check(ctx, r)
	if err == nil {
		err = c.networks.EachOf(r, func(n Network, r endpoint.Record) error { return n.Check(ctx, r) })
	}
	if err == nil && r.State == endpoint.Active {
		err = c.services.CheckHostPorts(r)
	}
	if err != nil {
		return refusal.New(refusal.ErrCheck, "%w", err)
	}
	if r.State != endpoint.Active {
		return refusal.New(
			refusal.ErrCheck,
			"endpoint %d is %s; delete the container and create it again",
			r.ID,
			r.State,
		)
	}
	return nil
}

// allocateID returns a free id. It goes round, so that the id released last is reused last, also after a restart.
func (c *Core) allocateID() (endpoint.ID, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ids) >= c.max {
		return 0, c.tenants.limitError(limitEndpoints, len(c.ids), c.max)
	}
	for {
		c.lastID = c.lastID%endpoint.ID(c.max) + 1
		if !c.ids[c.lastID] {
			c.ids[c.lastID], c.creating[c.lastID] = true, true
			if err := c.store.NoteLastID(c.lastID); err != nil {
				c.log.Warn(
					"writing the last allocated endpoint id failed; after a restart a recently released id may be "+
						"reused",
					"error",
					err,
				)
			}
			return c.lastID, nil
		}
	}
}

func (c *Core) releaseID(id endpoint.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ids, id)
	delete(c.creating, id)
	delete(c.migrated, id)
	delete(c.settling, id)
}

// setCreated notes that packets of an endpoint flow, so that services may use it.
func (c *Core) setCreated(r endpoint.Record) {
	c.mu.Lock()
	delete(c.creating, r.ID)
	c.mu.Unlock()
	c.services.EndpointsChanged(r.Tenant)
}

// created returns the records of all endpoints but those being created.
func (c *Core) created() []endpoint.Record {
	c.mu.Lock()
	creating := maps.Clone(c.creating)
	c.mu.Unlock()
	return slices.DeleteFunc(c.store.List(), func(r endpoint.Record) bool { return creating[r.ID] })
}
