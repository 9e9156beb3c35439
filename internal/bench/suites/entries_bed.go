package suites

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// entriesBed is a node of a simulated cluster, with a real switch and a device for each container, but without
// containers.
type entriesBed struct {
	node    *scenario.Node
	beyond  *netns.Namespace // has the devices' other ends
	member  *scenario.Member
	network *nimitz.Network
	sw      nimitz.Switch
	records []endpoint.Record
}

// newEntriesBed creates a bed with room for the given number of mappings.
func newEntriesBed(
	ctx context.Context,
	w *scenario.Wire,
	kind string,
	m *scenario.Member,
	mappings int,
) (*entriesBed, error) {
	b := &entriesBed{node: w.Nodes[0], member: m}
	var err error
	if b.beyond, err = w.Namespace("beyond"); err != nil {
		return nil, err
	}
	const spare = 4096 // for entries of this node
	d, err := b.node.OpenDatapath(scenario.Variant{Endpoints: m.Density + 1, Mappings: mappings + spare})
	if err != nil {
		return nil, err
	}
	switch kind {
	case onEBPF:
		b.sw, err = d.Nimitz()
	default:
		b.sw, _, err = b.node.OpenOVS(d)
	}
	if err != nil {
		return nil, err
	}
	if err := b.device(gatewayDevice); err != nil {
		return nil, err
	}
	b.network = nimitz.New(nimitz.Config{
		Plan: address.DefaultPlan(), Node: b.node.Prefix, Indexes: m, Cluster: m, Switch: b.sw, Gateway: nullGateway{},
		MaxMappings: mappings + spare,
	})
	if err := b.network.PutTenant(ctx, m.Tenant); err != nil {
		return nil, err
	}
	return b, scenario.StartDatapath(d, b.network)
}

// device creates the device of a port.
func (b *entriesBed) device(name string) error {
	if err := b.node.Wire.Link(b.node.NS, name, b.beyond, name); err != nil {
		return err
	}
	return scenario.OnDevice(b.node.NS, name, func(h *netlink.Handle, d netlink.Link) error { return h.LinkSetUp(d) })
}

// fill adds containers until the node has the given number.
func (b *entriesBed) fill(ctx context.Context, containers int) error {
	for i := len(b.records) + 1; i <= containers; i++ {
		t := b.member.Tenant
		r := endpoint.Record{
			ID: endpoint.ID(
				i,
			), ContainerID: fmt.Sprint("c", i), Interface: "eth0", Tenant: t.Name, TenantID: t.Current().ID, App: 1,
			Device: endpoint.Device{HostName: fmt.Sprint("c", i)},
		}
		var err error
		if r.Attachments, err = b.network.Prepare(ctx, t, r.App, r); err != nil {
			return err
		}
		if err := b.device(r.Device.HostName); err != nil {
			return err
		}
		if err := b.network.Activate(ctx, r); err != nil {
			return err
		}
		b.records = append(b.records, r)
	}
	return nil
}

// read counts the entries of the switch when the tenant has the given number of services.
func (b *entriesBed) read(ctx context.Context, services int) (c Counts, err error) {
	t := b.member.Tenant
	for i := range services {
		virtual, real := service(i)
		t.UnderlayServices = append(
			slices.Clip(t.UnderlayServices),
			tenant.UnderlayService{Name: fmt.Sprint("s", i), Virtual: virtual, Real: real},
		)
	}
	if err := b.network.PutTenant(ctx, t); err != nil {
		return c, err
	}
	entries, err := b.sw.Entries(ctx)
	return countsOf(entries), err
}

const gatewayDevice = "gateway"

// nullGateway is a gateway without connections, because the number of entries does not depend on connections.
type nullGateway struct{}

func (nullGateway) Device() pipeline.Device {
	return pipeline.Device{Name: gatewayDevice}
}
func (nullGateway) Addresses() (own, virtual netip.Addr)                     { return }
func (nullGateway) SetMTU(int) error                                         { return nil }
func (nullGateway) Publish(context.Context, map[netip.Addr]netip.Addr) error { return nil }
func (nullGateway) Keep(context.Context, map[netip.Addr]netip.Addr, map[netip.Addr]bool) error {
	return nil
}
