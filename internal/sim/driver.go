package sim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
)

// uplinkMTU is the MTU of every node's uplink, in bytes.
const uplinkMTU = 1500

// driver replaces the kernel datapath: it records which endpoints have devices, the ports of policies and the backends
// of services, and never fails.
type driver struct {
	names    *deviceNames
	mu       sync.Mutex
	devices  bitset                     // by endpoint ID
	attached bitset                     // those with a program attached
	ports    map[string]map[uint16]bool // ports that the tenant's rules name, by tenant
	enforced enforced

	serviceTables
}

var _ dpapi.Driver = (*driver)(nil)

// deviceNames caches devices. All nodes share the cache: equal endpoint IDs have equal devices on every node.
type deviceNames struct{ sync.Map } // endpoint.ID to endpoint.Device

func (n *deviceNames) of(id endpoint.ID) endpoint.Device {
	d, ok := n.Load(id)
	if !ok {
		d, _ = n.LoadOrStore(id, endpoint.Device{
			Kind: "veth", HostName: fmt.Sprintf("pil%d", id), HostIfindex: 100 + int(id),
			HostMAC: net.HardwareAddr{
				2,
				0x70,
				0x69,
				0x6c,
				0,
				1,
			}, ContainerMAC: net.HardwareAddr{2, 0x70, 0x69, byte(id >> 16), byte(id >> 8), byte(id)},
		})
	}
	return d.(endpoint.Device)
}

func (d *driver) CreateDevice(_ context.Context, r endpoint.Record) (endpoint.Device, error) {
	d.mu.Lock()
	d.devices.set(int(r.ID), true)
	d.mu.Unlock()
	device := d.names.of(r.ID)
	device.MTU = uplinkMTU - r.Overhead()
	return device, nil
}

func (d *driver) Attach(r endpoint.Record) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.attached.set(int(r.ID), true)
	return nil
}

func (d *driver) RemoveDevice(_ context.Context, r endpoint.Record) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.devices.set(int(r.ID), false)
	d.attached.set(int(r.ID), false)
	return nil
}

// Restore finds every device, because containers keep running while the agent restarts.
func (d *driver) Restore(
	_ context.Context,
	keep []endpoint.Record,
	fill func([]endpoint.Record) error,
) (map[endpoint.ID]error, error) {
	return nil, fill(keep)
}

func (d *driver) Attached() ([]endpoint.ID, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []endpoint.ID
	for id := range 64 * len(d.attached) {
		if d.attached.has(id) {
			all = append(all, endpoint.ID(id))
		}
	}
	return all, nil
}

func (d *driver) CanReaddress(_, _ endpoint.Record) error                           { return nil }
func (d *driver) Readdress(context.Context, endpoint.Record, endpoint.Record) error { return nil }
func (d *driver) MTU() (int, error)                                                 { return uplinkMTU, nil }
func (d *driver) SetMTU(endpoint.Record, int) error                                 { return nil }
func (d *driver) Check(context.Context, endpoint.Record) error                      { return nil }
func (d *driver) MissingDevices([]endpoint.Record) (map[endpoint.ID]error, error)   { return nil, nil }
func (d *driver) RemoveRoutes(endpoint.Record) error                                { return nil }
func (d *driver) LookupPolicy(dpapi.PolicyQuery) (dpapi.PolicyVerdict, error) {
	return dpapi.PolicyVerdict{}, errors.New("the simulated packet path has no policy verdicts")
}
func (d *driver) LookupAccess(address.TenantID, netip.Addr) (found dpapi.AccessEntry, ok bool, err error) {
	return found, false, errors.New("the simulated packet path has no egress rules")
}
func (d *driver) RuleHits() (map[uint32]uint64, error) { return nil, nil }
func (d *driver) Sessions() (dpapi.Sessions, error)    { return dpapi.Sessions{}, nil }
func (d *driver) PolicyEntries() []dpapi.Entries       { return nil }
func (d *driver) ReconcileSettings() error             { return nil }
func (d *driver) GuardInterfaces(netlink.Link) error   { return nil }
func (d *driver) Status() (dpapi.Status, error)        { return dpapi.Status{Healthy: true}, nil }
func (d *driver) Events(ctx context.Context) (<-chan dpapi.Event, error) {
	return nil, fmt.Errorf("the simulated packet path has no events")
}
