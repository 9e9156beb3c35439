package scenario

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/evpn"
	"pilaster.io/pilaster/internal/network/evpn/tables"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
)

// Scenarios of NIMITZ have a tenant with node CIDRs on two nodes. Each node has a real switch, which is filled as by an
// agent.

// nimitzEBPF forwards with our programs, and a VXLAN device of the kernel unless the variant has a direct tunnel.
func nimitzEBPF(v Variant) func(w *Wire) (Pair, error) {
	v.device = endpoint.Veth
	return func(w *Wire) (Pair, error) {
		var paths []*datapath.Datapath
		p, err := w.onNimitz(v, func(_ *Node, d *datapath.Datapath) (nimitz.Switch, error) {
			paths = append(paths, d)
			return d.Nimitz()
		})
		p.Runs = func() (datapath.ProgStats, error) { return sumProgramStats(paths) }
		return p, err
	}
}

// nimitzOVS forwards with an Open vSwitch on each node, with its userspace datapath.
func nimitzOVS(w *Wire) (Pair, error) {
	var all []*ovs.Daemons
	p, err := w.onNimitz(Variant{device: endpoint.Veth}, func(n *Node, d *datapath.Datapath) (nimitz.Switch, error) {
		s, daemons, err := n.OpenOVS(d)
		all = append(all, daemons)
		return s, err
	})
	if err != nil {
		return p, err
	}
	for _, d := range all {
		pid, err := d.SwitchPID()
		if err != nil {
			return p, err
		}
		p.Processes = append(p.Processes, pid)
	}
	p.Fresh = func() (err error) {
		for _, d := range all {
			err = errors.Join(err, d.Purge(context.Background()))
		}
		return err
	}
	p.Work = func(ctx context.Context) (sum ovs.Work, err error) {
		for _, d := range all {
			is, err := d.Work(ctx)
			if err != nil {
				return sum, err
			}
			sum = sum.Plus(is)
		}
		return sum, nil
	}
	return p, nil
}

func (n *Node) OpenOVS(d *datapath.Datapath) (*ovs.Switch, *ovs.Daemons, error) {
	ctx, cancel := context.WithTimeout(context.Background(), peerTimeout)
	defer cancel()
	// Kernels before 6.17 cannot enable forwarding on two devices only.
	if err := n.NS.Do(func() error { return sysctl("net/ipv6/conf/all/forwarding", "1") }); err != nil {
		return nil, nil, err
	}
	taps, err := d.OVSPorts()
	if err != nil {
		return nil, nil, err
	}
	daemons, err := ovs.Start(ctx, n.NS, filepath.Join(n.Wire.Dir, n.name+"-ovs"))
	if err != nil {
		return nil, nil, err
	}
	n.Wire.OnClose(daemons.Stop)
	s, err := ovs.Open(ctx, ovs.Config{
		RunDir: daemons.Dir(), Netns: n.NS, Uplinks: []string{"eth0"}, Node: n.Prefix,
		Region: address.DefaultPlan().Base, OVSPorts: taps, Mark: taps.Mark(),
	})
	return s, daemons, err
}

// onNimitz adds a container to each node, behind the switch that open creates on the node.
func (w *Wire) onNimitz(v Variant, open func(*Node, *datapath.Datapath) (nimitz.Switch, error)) (Pair, error) {
	return w.onMappings(v, NewCluster(true, 1), func(n *Node, d *datapath.Datapath, m *Member) (mapped, error) {
		s, err := open(n, d)
		if err != nil {
			return nil, err
		}
		return nimitz.New(nimitz.Config{
			Plan: address.DefaultPlan(), Node: n.Prefix, Indexes: m, Cluster: m, Switch: s,
		}), nil
	})
}

// mapped is a network whose nodes have mappings.
type mapped interface {
	network.Network
	network.MappingSink
}

// onMappings adds a container to each node, on the network that open opens there.
func (w *Wire) onMappings(
	v Variant,
	c *Cluster,
	open func(*Node, *datapath.Datapath, *Member) (mapped, error),
) (p Pair, err error) {
	var ends []*netns.Namespace
	for i, n := range w.Nodes {
		d, err := n.OpenDatapath(v)
		if err != nil {
			return p, err
		}
		m := &Member{Cluster: c, number: i}
		on, err := open(n, d, m)
		if err != nil {
			return p, err
		}
		if err := on.PutTenant(context.Background(), m.Tenant); err != nil {
			return p, err
		}
		if err := StartDatapath(d, on); err != nil {
			return p, err
		}
		end, a, err := n.addMapped(d, on, m, len(w.Nodes))
		if err != nil {
			return p, err
		}
		ends, p.Target = append(ends, end), a
	}
	p.Client, p.Server = ends[0], ends[1]
	return p, nil
}

// addMapped adds a container, and the mappings of the given number of nodes.
func (n *Node) addMapped(
	d *datapath.Datapath,
	on mapped,
	m *Member,
	nodes int,
) (_ *netns.Namespace, a netip.Addr, err error) {
	ctx := context.Background()
	c, err := n.Wire.Namespace(n.name + "-container")
	if err != nil {
		return nil, a, err
	}
	record := endpoint.Record{
		ID: 1, ContainerID: n.name, Interface: "eth0", Netns: c.Path(), Tenant: m.Tenant.Name,
		TenantID: m.Tenant.Current().ID, App: 1,
	}
	if record.Attachments, err = on.Prepare(ctx, m.Tenant, record.App, record); err != nil {
		return nil, a, err
	}
	if record.Device, err = d.CreateDevice(ctx, record); err != nil {
		return nil, a, err
	}
	err = errors.Join(
		on.Replace(ctx, m.Tenant.Name, m.Mappings(nodes)),
		d.Attach(record),
		on.Activate(ctx, record),
	)
	if err != nil {
		return nil, a, fmt.Errorf("add a container on network %s: %w", m.Tenant.Network, err)
	}
	return c, record.Attachments[0].Address, nil
}

// OVSMissing returns the reason why this machine cannot run Open vSwitch; nil if it can.
func OVSMissing() error {
	for _, name := range []string{"ovsdb-tool", "ovsdb-server", "ovs-vswitchd"} {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("%w; install Open vSwitch (Debian: openvswitch-switch)", err)
		}
	}
	return nil
}

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
