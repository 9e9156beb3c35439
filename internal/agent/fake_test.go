package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/netpila"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	nodePrefix = netip.MustParsePrefix("fd70:696c:6100:1::/64")
	errFake    = errors.New("made to fail")
	blueKey    = address.Key{1}
)

// fakeDriver is a kernel that records its calls and fails at the calls in fail.
type fakeDriver struct {
	mu       sync.Mutex
	tenants  map[string]tenant.Tenant
	devices  map[endpoint.ID]endpoint.Record
	active   map[endpoint.ID]endpoint.Record
	calls    []string
	fail     map[string]error // by the name of a call
	lost     map[string]error // what Restore says of containers
	during   func(call string, r endpoint.Record)
	looked   func([]endpoint.Record) // for their devices
	status   dpapi.Status
	sessions dpapi.Sessions
	entries  []dpapi.Entries
	mtu      int
	events   chan dpapi.Event
	vxlan    *fakeSwitch // its part of network nimitz
	policies map[string]dpapi.TenantPolicies
	hits     map[uint32]uint64
}

func newFakeDriver() *fakeDriver {
	return &fakeDriver{
		tenants: map[string]tenant.Tenant{}, devices: map[endpoint.ID]endpoint.Record{},
		active:   map[endpoint.ID]endpoint.Record{},
		policies: map[string]dpapi.TenantPolicies{}, fail: map[string]error{}, lost: map[string]error{},
		events: make(chan dpapi.Event), vxlan: newFakeSwitch(), mtu: 1500,
		status: dpapi.Status{Healthy: true, FirstInChain: true},
	}
}

func (d *fakeDriver) call(name string, r endpoint.Record) error {
	if d.during != nil {
		d.during(name, r)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, name)
	return d.fail[name]
}

// fakePath is a network's part of that kernel.
type fakePath struct{ *fakeDriver }

// opener is of network netpila in it.
func (d *fakeDriver) opener() network.Factory {
	return network.Factory{Name: netpila.Name, Open: func(n network.Node) (Network, error) {
		return netpila.New(n.Plan, n.Prefix, n.Indexes, fakePath{d})
	}}
}

func (d fakePath) PutTenant(_ context.Context, t tenant.Tenant) error {
	if err := d.call("PutTenant", endpoint.Record{Tenant: t.Name}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, had := range d.tenants[t.Name].IDs {
		if !t.Has(had.ID) {
			t.IDs = append(slices.Clone(t.IDs), had) // stays until DeleteTenant
		}
	}
	d.tenants[t.Name] = t
	return nil
}

func (d fakePath) DeleteTenant(_ context.Context, t tenant.Tenant) error {
	if err := d.call("DeleteTenant", endpoint.Record{Tenant: t.Name}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	left := d.tenants[t.Name]
	left.IDs = slices.DeleteFunc(slices.Clone(left.IDs), func(id tenant.ID) bool { return t.Has(id.ID) })
	if d.tenants[t.Name] = left; len(left.IDs) == 0 {
		delete(d.tenants, t.Name)
	}
	return nil
}

func (d *fakeDriver) CreateDevice(_ context.Context, r endpoint.Record) (endpoint.Device, error) {
	// A device may be there although the call failed.
	d.mu.Lock()
	d.devices[r.ID] = r
	d.mu.Unlock()
	if err := d.call("CreateDevice", r); err != nil {
		return endpoint.Device{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return endpoint.Device{
		HostName: fmt.Sprintf("pil%d", r.ID), HostIfindex: 100 + int(r.ID), MTU: d.mtu - r.Overhead(),
		HostMAC: net.HardwareAddr{2, 0x70, 0x69, 0x6c, 0, 1}, ContainerMAC: net.HardwareAddr{2, 0x70, 0x69, 0x6c, 0, 2},
	}, nil
}

func (d *fakeDriver) Readdress(_ context.Context, was, is endpoint.Record) error {
	if err := d.call("Readdress", is); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.devices[is.ID] = is
	return nil
}

func (d *fakeDriver) CanReaddress(_, is endpoint.Record) error { return d.call("CanReaddress", is) }

func (d *fakeDriver) Attach(r endpoint.Record) error { return d.call("Attach", r) }

func (d fakePath) Activate(_ context.Context, r endpoint.Record) error {
	if err := d.call("Activate", r); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.tenants[r.Tenant]; !ok {
		return fmt.Errorf("tenant %s is not known", r.Tenant)
	}
	d.active[r.ID] = r
	return nil
}

func (d fakePath) Deactivate(_ context.Context, r endpoint.Record) error {
	if err := d.call("Deactivate", r); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.active, r.ID)
	return nil
}

func (d fakePath) Check(_ context.Context, r endpoint.Record) error { return d.call("CheckEntries", r) }

func (d fakePath) Repair(_ context.Context, _, found []endpoint.Record) error {
	if err := d.call("Repair", endpoint.Record{}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.active)
	for _, r := range found {
		d.active[r.ID] = r
	}
	return nil
}

func (d fakePath) Entries(context.Context) ([]dpapi.Entries, error) {
	return d.entries, d.call("Entries", endpoint.Record{})
}

func (d *fakeDriver) RemoveDevice(_ context.Context, r endpoint.Record) error {
	if err := d.call("Remove", r); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.devices, r.ID)
	return nil
}

func (d *fakeDriver) Check(_ context.Context, r endpoint.Record) error { return d.call("Check", r) }

func (d *fakeDriver) Attached() ([]endpoint.ID, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.active)), nil
}

func (d *fakeDriver) Restore(
	_ context.Context,
	keep []endpoint.Record,
	fill func([]endpoint.Record) error,
) (map[endpoint.ID]error, error) {
	if err := d.call("Restore", endpoint.Record{}); err != nil {
		return nil, err
	}
	kept, lost, found := map[endpoint.ID]bool{}, map[endpoint.ID]error{}, []endpoint.Record(nil)
	d.mu.Lock()
	for _, r := range keep {
		kept[r.ID] = true
		if err := d.lost[r.ContainerID]; err != nil {
			lost[r.ID] = err
		} else if r.Lives() {
			found = append(found, r)
		}
	}
	maps.DeleteFunc(d.devices, func(id endpoint.ID, _ endpoint.Record) bool { return !kept[id] })
	d.mu.Unlock()
	return lost, fill(found)
}

func (d *fakeDriver) MTU() (int, error) {
	err := d.call("MTU", endpoint.Record{})
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mtu, err
}

func (d *fakeDriver) SetMTU(r endpoint.Record, mtu int) error {
	r.Device.MTU = mtu
	return d.call("SetMTU", r)
}

func (d *fakeDriver) MissingDevices(records []endpoint.Record) (map[endpoint.ID]error, error) {
	if err := d.call("Lost", endpoint.Record{}); err != nil {
		return nil, err
	}
	if d.looked != nil {
		d.looked(records)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	lost := map[endpoint.ID]error{}
	for _, r := range records {
		if err := d.lost[r.ContainerID]; err != nil {
			lost[r.ID] = err
		}
	}
	return lost, nil
}

func (d *fakeDriver) RemoveRoutes(r endpoint.Record) error { return d.call("Lose", r) }

func (d *fakeDriver) RestorePolicies(all, held []dpapi.TenantPolicies) error {
	if err := d.call("RestorePolicies", endpoint.Record{}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	had := d.policies
	d.policies = map[string]dpapi.TenantPolicies{}
	for _, t := range all {
		d.policies[t.Tenant] = t
	}
	for _, t := range held {
		d.policies[t.Tenant] = had[t.Tenant]
	}
	return nil
}

func (d *fakeDriver) SetPolicies(t dpapi.TenantPolicies) error {
	if err := d.call("SetPolicies", endpoint.Record{}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.policies[t.Tenant] = t; len(t.Tables.Subjects)+len(t.Overrides) == 0 {
		delete(d.policies, t.Tenant)
	}
	return nil
}

// LookupPolicy answers from the tables that were given last.
func (d *fakeDriver) LookupPolicy(q dpapi.PolicyQuery) (dpapi.PolicyVerdict, error) {
	if err := d.call("Why", endpoint.Record{}); err != nil {
		return dpapi.PolicyVerdict{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	a := dpapi.PolicyVerdict{LocalApp: q.LocalApp, RemoteApp: q.RemoteApp, Allowed: [2]bool{true, true}}
	for _, of := range d.policies {
		if slices.Contains(of.IDs, q.Tenant) {
			for direction, port := range [2]uint16{policy.Ingress: q.LocalPort, policy.Egress: q.RemotePort} {
				said := of.Tables.Decide(
					q.LocalApp,
					policy.Direction(direction),
					q.RemoteApp,
					q.Remote,
					q.Protocol,
					port,
				)
				a.Allowed[direction], a.Rules[direction] = said.Allowed, said.Rule
			}
		}
	}
	return a, nil
}

func (d *fakeDriver) Sessions() (dpapi.Sessions, error) {
	return d.sessions, d.call("Sessions", endpoint.Record{})
}

func (d *fakeDriver) PolicyEntries() []dpapi.Entries {
	return []dpapi.Entries{{Table: "policy-ports", Used: 7, Capacity: 100}}
}

func (d *fakeDriver) RuleHits() (map[uint32]uint64, error) {
	return d.hits, d.call("RuleHits", endpoint.Record{})
}

func (d *fakeDriver) ReconcileSettings() error { return d.call("KeepSettings", endpoint.Record{}) }

func (d *fakeDriver) GuardInterfaces(netlink.Link) error {
	return d.call("GuardEdge", endpoint.Record{})
}

func (d *fakeDriver) Status() (dpapi.Status, error) {
	return d.status, d.call("Status", endpoint.Record{})
}

func (d *fakeDriver) Events(ctx context.Context) (<-chan dpapi.Event, error) {
	out := make(chan dpapi.Event)
	go func() {
		defer close(out)
		for {
			select {
			case e := <-d.events:
				out <- e
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

// empty tells what is left of endpoints and tenants.
func (d *fakeDriver) empty() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.devices)+len(d.active)+len(d.tenants) > 0 {
		return fmt.Errorf("left in the kernel: devices %v, active %v, tenants %v", d.devices, d.active, d.tenants)
	}
	return nil
}

// fakeOrchestrator knows tenants and gives each label set an app.
type fakeOrchestrator struct {
	mu       sync.Mutex
	tenants  map[string]tenant.Tenant
	apps     map[string]address.AppID
	calls    int
	err      error
	policies map[string]bool // tenants that have some
}

func newFakeOrchestrator() *fakeOrchestrator {
	return &fakeOrchestrator{
		tenants: map[string]tenant.Tenant{
			"blue": {Name: "blue", Addressing: tenant.Encrypted, IDs: []tenant.ID{{ID: 1, Key: blueKey}}},
			"red":  {Name: "red", Addressing: tenant.Clear, IDs: []tenant.ID{{ID: 2, Key: address.Key{2}}}},
		},
		apps: map[string]address.AppID{}, policies: map[string]bool{},
	}
}

func (o *fakeOrchestrator) Resolve(_ context.Context, name string, identity map[string]string) (Resolved, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.calls++
	if o.err != nil {
		return Resolved{}, o.err
	}
	t, ok := o.tenants[name]
	if !ok {
		return Resolved{}, refusal.New(refusal.ErrNotFound, "tenant %s does not exist", name)
	}
	set := name + " " + tenant.Canonical(identity)
	if o.apps[set] == 0 {
		o.apps[set] = address.AppID(len(o.apps) + 1)
	}
	return Resolved{t, o.apps[set], o.policies[name], Retiring{}}, nil
}

// bed is a core between a fake kernel and a fake orchestrator, on a disk that outlives it.
type bed struct {
	t            *testing.T
	dir          string
	driver       *fakeDriver
	orchestrator *fakeOrchestrator
	max, maxIDs  int
	now          time.Time
	nimitz       *fakeSwitch // nil: the node does not have it
	edge         bool
	maxMappings  int // 0: as many as the network takes by itself
	*Core
}

func newBed(t *testing.T) *bed {
	t.Helper()
	b := &bed{
		t:            t,
		dir:          t.TempDir(),
		driver:       newFakeDriver(),
		orchestrator: newFakeOrchestrator(),
		now:          time.Unix(1e9, 0),
	}
	b.reopen()
	return b
}

// reopen is what a new process does: it knows the disk and finds the kernel as it is.
func (b *bed) reopen() {
	b.t.Helper()
	if err := b.tryReopen(); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bed) tryReopen() error {
	store, err := endpoint.OpenStore(endpoint.StoreConfig{Dir: b.dir, Now: func() time.Time { return b.now }})
	if err != nil {
		return err
	}
	tenants, err := OpenTenants(b.dir)
	if err != nil {
		return err
	}
	own, err := netpila.New(address.DefaultPlan(), nodePrefix, store, fakePath{b.driver})
	if err != nil {
		return err
	}
	networks := map[string]Network{netpila.Name: own}
	if b.nimitz != nil {
		networks[nimitz.Name] = nimitz.New(
			nimitz.Config{
				Plan:        address.DefaultPlan(),
				Node:        nodePrefix,
				Edge:        b.edge,
				MaxMappings: b.maxMappings,
				Indexes:     store,
				Cluster:     b.nimitz,
				Switch:      b.nimitz,
				Kind:        "fake",
			},
		)
	}
	b.Core, err = New(Config{
		Store: store, Tenants: tenants, Networks: networks, Absent: map[string]string{nimitz.Name: "--some switch"},
		Driver: b.driver, Resolver: b.orchestrator,
		Plan: address.DefaultPlan(), Edge: b.edge, MaxEndpoints: b.max, MaxTenantIDs: b.maxIDs,
		Now: func() time.Time { return b.now }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	return b.Start(b.t.Context())
}

func (b *bed) request(container string) AddRequest {
	return AddRequest{
		ContainerID: container, Interface: "eth0", Netns: "/run/netns/" + container, OpenNetns: "/proc/self/fd/9",
		Tenant: "blue", Labels: map[string]string{"app": "web", "pod-template-hash": container}, Pod: "default/" +
			container, CNINetwork: "pilaster",
	}
}

func (b *bed) add(container string) endpoint.Record {
	b.t.Helper()
	r, err := b.Add(b.t.Context(), b.request(container))
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

// clean fails when anything of any endpoint or tenant is left.
func (b *bed) clean() {
	b.t.Helper()
	if err := b.driver.empty(); err != nil {
		b.t.Error(err)
	}
	if records := b.Endpoints(); len(records) > 0 {
		b.t.Errorf("records are left: %+v", records)
	}
	if names := b.tenants.Names(); len(names) > 0 {
		b.t.Errorf("tenants are left: %v", names)
	}
	if len(b.ids) > 0 {
		b.t.Errorf("ids are left: %v", b.ids)
	}
}

// ids are those of a tenant that the kernel knows.
func (d *fakeDriver) ids(name string) []tenant.ID {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.tenants[name].IDs
}
