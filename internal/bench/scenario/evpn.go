package scenario

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/evpn"
	"pilaster.io/pilaster/internal/network/evpn/tables"
)

// tunnelPool has the nodes' IPv4 tunnel addresses.
var tunnelPool = netip.MustParsePrefix("10.71.0.0/24")

// onEVPN has a container of network evpn on each node. Their mappings are as the orchestrators send them; no BGP runs.
func onEVPN(w *Wire) (Pair, error) {
	c := NewCluster(true, 1)
	c.Tenant.Network = evpn.Name
	v := Variant{device: endpoint.Veth, pool: tunnelPool}
	var paths []*datapath.Datapath
	p, err := w.onMappings(v, c, func(n *Node, d *datapath.Datapath, m *Member) (mapped, error) {
		paths = append(paths, d)
		if err := n.routeTunnel(w.Nodes[1-m.number]); err != nil {
			return nil, err
		}
		s, err := tables.Open(d, tables.Config{Endpoints: 10, Mappings: 10})
		if err != nil {
			return nil, err
		}
		w.OnClose(s.Close)
		return evpn.New(evpn.Config{
			Node: network.Node{Plan: address.DefaultPlan(), Prefix: n.Prefix, Indexes: m, Cluster: m},
			Pool: tunnelPool, Switch: s,
		}), nil
	})
	p.Runs = func() (datapath.ProgStats, error) { return sumProgramStats(paths) }
	return p, err
}

// routeTunnel adds the route of the other node's tunnel address.
func (n *Node) routeTunnel(peer *Node) error {
	far, ok := address.VTEP4(tunnelPool, address.DefaultPlan().NodeNumber(peer.Prefix))
	if !ok {
		return fmt.Errorf("%v has no tunnel address for node %v", tunnelPool, peer.Prefix)
	}
	return OnDevice(n.NS, "eth0", func(h *netlink.Handle, _ netlink.Link) error {
		return h.RouteAdd(&netlink.Route{Dst: IPNet(netip.PrefixFrom(far, 32)), Gw: peer.Underlay4.AsSlice()})
	})
}
