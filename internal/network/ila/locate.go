package ila

import (
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/network"
)

// Locate reads the entries of an address from the tables in the kernel.
func (n *Network) Locate(a netip.Addr) (network.Location, bool, error) {
	here, err := n.config.Tables.Locals()
	if err != nil {
		return network.Location{}, false, err
	}
	if l, ok := here[a]; ok {
		node, _ := n.config.ILA.Node(n.config.Locator)
		return network.Location{
			Device: l.Device, Endpoint: l.Endpoint, Locator: n.config.Locator, Node: node,
			Entry: fmt.Sprintf("%s-locals: endpoint %d, app %d", Name, l.Endpoint, l.App),
		}, true, nil
	}
	peers, err := n.config.Tables.Peers()
	if err != nil {
		return network.Location{}, false, err
	}
	p, ok := peers[a]
	node, _ := n.config.ILA.Node(p.Locator)
	return network.Location{
		Locator: p.Locator, Node: node, Entry: fmt.Sprintf("%s-mappings: locator %v, app %d", Name, p.Locator, p.App),
	}, ok, nil
}

// OnWire returns the addresses of a packet on the fabric.
func (n *Network) OnWire(src, dst netip.Addr, from, to netip.Prefix) (wireSrc, wireDst netip.Addr) {
	if !n.config.SourceStays {
		src = n.config.ILA.ToWire(src, from)
	}
	return src, n.config.ILA.ToWire(dst, to)
}
