package scenario

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/network/ila/tables"
	"pilaster.io/pilaster/internal/tenant"
)

// ilaTenant is the tenant of the two containers.
const ilaTenant = address.TenantID(1)

// onILA has a container of network ila on each node.
func onILA(w *Wire) (p Pair, err error) {
	use, err := address.DefaultPlan().ILA()
	if err != nil {
		return p, err
	}
	var ends []*netns.Namespace
	var paths []*datapath.Datapath
	for i, n := range w.Nodes {
		peer := w.Nodes[1-i]
		d, err := n.OpenDatapath(Variant{device: endpoint.Veth, identifiers: true})
		if err != nil {
			return p, err
		}
		far, err := use.Locator(peer.Prefix)
		if err != nil {
			return p, err
		}
		if err := n.routeTo(far, peer); err != nil {
			return p, err
		}
		end, a, err := n.addILA(d, ilaNode{use: use, number: i}, peer)
		if err != nil {
			return p, fmt.Errorf("add a container on network %s: %w", ila.Name, err)
		}
		ends, paths, p.Target = append(ends, end), append(paths, d), a
	}
	p.Client, p.Server = ends[0], ends[1]
	return p.on(paths), nil
}

// ilaAddress is the address of the container of the i-th node.
func ilaAddress(use address.ILA, i int) netip.Addr {
	b := use.Range(ilaTenant).Addr().As16()
	b[15] = byte(i + 1)
	return netip.AddrFrom16(b)
}

// given is a cluster in which every node has one address.
type given struct {
	network.Cluster
	address netip.Addr
}

func (g given) Allocate(context.Context, string, string, address.AppID) ([]netip.Addr, error) {
	return []netip.Addr{g.address}, nil
}

// routeTo adds the route of a prefix that the fabric routes to the other node.
func (n *Node) routeTo(far netip.Prefix, peer *Node) error {
	return OnDevice(n.NS, "eth0", func(h *netlink.Handle, _ netlink.Link) error {
		return h.RouteAdd(&netlink.Route{Dst: IPNet(far), Gw: peer.Underlay.AsSlice()})
	})
}

// ilaNode is how a node has network ila.
type ilaNode struct {
	use         address.ILA
	number      int // of the node, from 0
	sourceStays bool
}

// addILA adds the container of a node, and the mapping of the other one.
func (n *Node) addILA(d *datapath.Datapath, of ilaNode, peer *Node) (_ *netns.Namespace, a netip.Addr, err error) {
	ctx, use, i := context.Background(), of.use, of.number
	locator, err := use.Locator(n.Prefix)
	if err != nil {
		return nil, a, err
	}
	maps, err := tables.Open(d, tables.Config{
		ILA: use, Locator: locator, Endpoints: 10, Mappings: 10, SourceStays: of.sourceStays,
	})
	if err != nil {
		return nil, a, err
	}
	n.Wire.OnClose(maps.Close)
	a = ilaAddress(use, i)
	on := ila.New(ila.Config{ILA: use, Locator: locator, Cluster: given{address: a}, Tables: maps})
	t := tenant.Tenant{
		Name: "silver", Network: ila.Name, Addressing: tenant.Clear, IDs: []tenant.ID{{ID: ilaTenant}},
		Overlays: []tenant.Overlay{{CIDR: use.Range(ilaTenant)}},
	}
	if err := on.PutTenant(ctx, t); err != nil {
		return nil, a, err
	}
	if err := StartDatapath(d, on); err != nil {
		return nil, a, err
	}
	far := network.Mapping{
		Tenant: t.Name, To: netip.PrefixFrom(ilaAddress(use, 1-i), 128), Node: peer.Prefix, App: 1,
	}
	if err := on.Replace(ctx, t.Name, []network.Mapping{far}); err != nil {
		return nil, a, err
	}
	c, err := n.Wire.Namespace(n.name + "-container")
	if err != nil {
		return nil, a, err
	}
	record := endpoint.Record{
		ID: 1, ContainerID: n.name, Interface: "eth0", Netns: c.Path(), Tenant: t.Name, TenantID: ilaTenant, App: 1,
	}
	if record.Attachments, err = on.Prepare(ctx, t, record.App, record); err != nil {
		return nil, a, err
	}
	if record.Device, err = d.CreateDevice(ctx, record); err != nil {
		return nil, a, err
	}
	if err := d.Attach(record); err != nil {
		return nil, a, err
	}
	return c, a, on.Activate(ctx, record)
}
