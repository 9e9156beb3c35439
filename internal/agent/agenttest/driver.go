package agenttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/netpila"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	// NodePrefix is the prefix of the node.
	NodePrefix = netip.MustParsePrefix("fd70:696c:6100:1::/64")
	// ErrFake is the error of calls that a test makes fail.
	ErrFake = errors.New("made to fail")
	// BlueKey is the key of tenant blue.
	BlueKey = address.Key{1}
)

// Driver is a fake data path: it records its calls, and fails at the calls in Fail.
type Driver struct {
	*Frontends
	Mu           sync.Mutex
	Tenants      map[string]tenant.Tenant
	Devices      map[endpoint.ID]endpoint.Record
	Active       map[endpoint.ID]endpoint.Record
	Calls        []string
	Fail         map[string]error // by the name of a call
	Lost         map[string]error // what Restore says of containers
	During       func(call string, r endpoint.Record)
	Looked       func([]endpoint.Record)       // for their devices
	Moved        func(was, is endpoint.Record) // by Readdress
	Health       dpapi.Status
	SessionTable dpapi.Sessions
	Used         []dpapi.Entries
	LinkMTU      int
	OldMAC       bool // devices have the MAC of older builds
	Emit         chan dpapi.Event
	VXLAN        *Switch // its part of network nimitz
	Outside      Outside
	Policies     map[string]dpapi.TenantPolicies
	RuleRoom     int // entries that a table of rules takes of a tenant; 0: any number
	Hits         map[uint32]uint64
	Access       map[address.TenantID][]dpapi.AccessEntry
}

// NewDriver returns an empty, healthy driver.
func NewDriver() *Driver {
	return &Driver{
		Frontends: NewFrontends(), Tenants: map[string]tenant.Tenant{}, Devices: map[endpoint.ID]endpoint.Record{},
		Active:   map[endpoint.ID]endpoint.Record{},
		Policies: map[string]dpapi.TenantPolicies{}, Fail: map[string]error{}, Lost: map[string]error{},
		Emit: make(chan dpapi.Event), VXLAN: NewSwitch(), Outside: newOutside(), LinkMTU: 1500,
		Health: dpapi.Status{Healthy: true, FirstInChain: true},
	}
}

func (d *Driver) call(name string, r endpoint.Record) error {
	if d.During != nil {
		d.During(name, r)
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	d.Calls = append(d.Calls, name)
	return d.Fail[name]
}

// Path is the part of a Driver that network netpila writes.
type Path struct{ *Driver }

// Path returns the part of network netpila.
func (d *Driver) Path() Path { return Path{d} }

// Factory opens network netpila on the driver.
func (d *Driver) Factory() network.Factory {
	return network.Factory{Name: netpila.Name, Open: func(n network.Node) (agent.Network, error) {
		return netpila.New(n, d.Path())
	}}
}

func (d Path) PutTenant(_ context.Context, t tenant.Tenant) error {
	if err := d.call("PutTenant", endpoint.Record{Tenant: t.Name}); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	for _, had := range d.Tenants[t.Name].IDs {
		if !t.Has(had.ID) {
			t.IDs = append(slices.Clone(t.IDs), had) // stays until DeleteTenant
		}
	}
	d.Tenants[t.Name] = t
	return nil
}

func (d Path) DeleteTenant(_ context.Context, t tenant.Tenant) error {
	if err := d.call("DeleteTenant", endpoint.Record{Tenant: t.Name}); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	left := d.Tenants[t.Name]
	left.IDs = slices.DeleteFunc(slices.Clone(left.IDs), func(id tenant.ID) bool { return t.Has(id.ID) })
	if d.Tenants[t.Name] = left; len(left.IDs) == 0 {
		delete(d.Tenants, t.Name)
	}
	return nil
}

func (d *Driver) CreateDevice(_ context.Context, r endpoint.Record) (endpoint.Device, error) {
	// A device may be there although the call failed.
	d.Mu.Lock()
	d.Devices[r.ID] = r
	d.Mu.Unlock()
	if err := d.call("CreateDevice", r); err != nil {
		return endpoint.Device{}, err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	mac := net.HardwareAddr{2, 0x70, 0x69, 0x6c, 0, 2}
	if tenant.NetworkHas(r.Attachments[0].Network, tenant.OwnCIDRs) && !d.OldMAC {
		mac = r.SegmentMAC()
	}
	return endpoint.Device{
		HostName: fmt.Sprintf("pil%d", r.ID), HostIfindex: 100 + int(r.ID), MTU: d.LinkMTU - r.Overhead(),
		HostMAC: net.HardwareAddr{2, 0x70, 0x69, 0x6c, 0, 1}, ContainerMAC: mac,
	}, nil
}

func (d *Driver) Readdress(_ context.Context, was, is endpoint.Record) error {
	if err := d.call("Readdress", is); err != nil {
		return err
	}
	if d.Moved != nil {
		d.Moved(was, is)
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	d.Devices[is.ID] = is
	return nil
}

func (d *Driver) CanReaddress(_, is endpoint.Record) error { return d.call("CanReaddress", is) }

func (d *Driver) Attach(r endpoint.Record) error { return d.call("Attach", r) }

func (d Path) Activate(_ context.Context, r endpoint.Record) error {
	if err := d.call("Activate", r); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	if _, ok := d.Tenants[r.Tenant]; !ok {
		return fmt.Errorf("tenant %s is not known", r.Tenant)
	}
	d.Active[r.ID] = r
	return nil
}

func (d Path) Deactivate(_ context.Context, r endpoint.Record) error {
	if err := d.call("Deactivate", r); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	delete(d.Active, r.ID)
	return nil
}

func (d Path) Check(_ context.Context, r endpoint.Record) error { return d.call("CheckEntries", r) }

func (d Path) Repair(_ context.Context, _, found []endpoint.Record) error {
	if err := d.call("Repair", endpoint.Record{}); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	clear(d.Active)
	for _, r := range found {
		d.Active[r.ID] = r
	}
	return nil
}

func (d Path) Entries(context.Context) ([]dpapi.Entries, error) {
	return d.Used, d.call("Entries", endpoint.Record{})
}

func (d *Driver) RemoveDevice(_ context.Context, r endpoint.Record) error {
	if err := d.call("Remove", r); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	delete(d.Devices, r.ID)
	return nil
}

func (d *Driver) Check(_ context.Context, r endpoint.Record) error { return d.call("Check", r) }

func (d *Driver) Attached() ([]endpoint.ID, error) {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	return slices.Collect(maps.Keys(d.Active)), nil
}

func (d *Driver) Restore(
	_ context.Context,
	keep []endpoint.Record,
	fill func([]endpoint.Record) error,
) (map[endpoint.ID]error, error) {
	if err := d.call("Restore", endpoint.Record{}); err != nil {
		return nil, err
	}
	kept, lost, found := map[endpoint.ID]bool{}, map[endpoint.ID]error{}, []endpoint.Record(nil)
	d.Mu.Lock()
	for _, r := range keep {
		kept[r.ID] = true
		if err := d.Lost[r.ContainerID]; err != nil {
			lost[r.ID] = err
		} else if r.Lives() {
			found = append(found, r)
			d.Devices[r.ID] = r // as repaired
		}
	}
	maps.DeleteFunc(d.Devices, func(id endpoint.ID, _ endpoint.Record) bool { return !kept[id] })
	d.Mu.Unlock()
	return lost, fill(found)
}

func (d *Driver) MTU() (int, error) {
	err := d.call("MTU", endpoint.Record{})
	d.Mu.Lock()
	defer d.Mu.Unlock()
	return d.LinkMTU, err
}

func (d *Driver) SetMTU(r endpoint.Record, mtu int) error {
	r.Device.MTU = mtu
	return d.call("SetMTU", r)
}

func (d *Driver) MissingDevices(records []endpoint.Record) (map[endpoint.ID]error, error) {
	if err := d.call("Lost", endpoint.Record{}); err != nil {
		return nil, err
	}
	if d.Looked != nil {
		d.Looked(records)
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	lost := map[endpoint.ID]error{}
	for _, r := range records {
		if err := d.Lost[r.ContainerID]; err != nil {
			lost[r.ID] = err
		}
	}
	return lost, nil
}

func (d *Driver) RemoveRoutes(r endpoint.Record) error { return d.call("Lose", r) }

func (d *Driver) RestorePolicies(all, held []dpapi.TenantPolicies) error {
	if err := d.call("RestorePolicies", endpoint.Record{}); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	had := d.Policies
	d.Policies = map[string]dpapi.TenantPolicies{}
	for _, t := range all {
		d.Policies[t.Tenant] = t
	}
	for _, t := range held {
		d.Policies[t.Tenant] = had[t.Tenant]
	}
	return nil
}

func (d *Driver) SetPolicies(t dpapi.TenantPolicies) error {
	if err := d.call("SetPolicies", endpoint.Record{}); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	if n := t.Tables.Largest(); d.RuleRoom > 0 && n > d.RuleRoom {
		return fmt.Errorf("no room for %d entries", n)
	}
	if d.Policies[t.Tenant] = t; len(t.Tables.Subjects)+len(t.Overrides) == 0 {
		delete(d.Policies, t.Tenant)
	}
	return nil
}

// LookupPolicy decides by the tables of the last SetPolicies.
func (d *Driver) LookupPolicy(q dpapi.PolicyQuery) (dpapi.PolicyVerdict, error) {
	if err := d.call("Why", endpoint.Record{}); err != nil {
		return dpapi.PolicyVerdict{}, err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	a := dpapi.PolicyVerdict{LocalApp: q.LocalApp, RemoteApp: q.RemoteApp, Allowed: [2]bool{true, true}}
	for _, of := range d.Policies {
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

// LookupAccess finds the entry in Access.
func (d *Driver) LookupAccess(id address.TenantID, to netip.Addr) (found dpapi.AccessEntry, ok bool, err error) {
	for _, e := range d.Access[id] {
		if e.To.Contains(to) && (!ok || e.To.Bits() > found.To.Bits()) {
			found, ok = e, true
		}
	}
	return found, ok, nil
}

func (d *Driver) Sessions() (dpapi.Sessions, error) {
	return d.SessionTable, d.call("Sessions", endpoint.Record{})
}

func (d *Driver) PolicyEntries() []dpapi.Entries {
	return []dpapi.Entries{{Table: "policy-ports", Used: 7, Capacity: 100}}
}

func (d *Driver) RuleHits() (map[uint32]uint64, error) {
	return d.Hits, d.call("RuleHits", endpoint.Record{})
}

func (d *Driver) ReconcileSettings() error { return d.call("KeepSettings", endpoint.Record{}) }

func (d *Driver) GuardInterfaces(netlink.Link) error {
	return d.call("GuardEdge", endpoint.Record{})
}

func (d *Driver) Status() (dpapi.Status, error) {
	return d.Health, d.call("Status", endpoint.Record{})
}

func (d *Driver) Events(ctx context.Context) (<-chan dpapi.Event, error) {
	out := make(chan dpapi.Event)
	go func() {
		defer close(out)
		for {
			select {
			case e := <-d.Emit:
				out <- e
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

// Empty returns an error if entries of endpoints or tenants remain.
func (d *Driver) Empty() error {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	if len(d.Devices)+len(d.Active)+len(d.Tenants) > 0 {
		return fmt.Errorf("left in the kernel: devices %v, active %v, tenants %v", d.Devices, d.Active, d.Tenants)
	}
	return nil
}

// IDs are the ids of a tenant that the driver has.
func (d *Driver) IDs(name string) []tenant.ID {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	return d.Tenants[name].IDs
}
