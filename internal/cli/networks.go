package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/agent/daemon"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/netpila"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/gateway"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// Switches of network nimitz.
const (
	nimitzNone = "none"
	nimitzEBPF = "ebpf"
	nimitzOVS  = "ovs"
)

var nimitzSwitches = []string{nimitzNone, nimitzEBPF, nimitzOVS} // the default first

// networkFlags are the agent's flags for its networks.
type networkFlags struct {
	nimitz, ovsRunDir, gatewayNetns string
	looseDeletes                    bool
	maxMappings                     int
}

func (n *networkFlags) bind(c *cobra.Command) {
	bindChoice(
		c,
		&n.nimitz,
		"nimitz",
		"switch for tenants of network nimitz: none, the node then hosts no such tenants; ebpf; or ovs, "+
			"an Open vSwitch that already runs",
		nimitzSwitches,
	)
	bindOVSRunDir(c, &n.ovsRunDir)
	bindGatewayNetns(c, &n.gatewayNetns)
	c.Flags().
		BoolVar(&n.looseDeletes, "loose-deletes", false, "delete Open vSwitch flows by a loose match, as the "+
			"NIMITZ paper does: slower with more flows")
	c.Flags().
		IntVar(&n.maxMappings, "max-mappings", nimitz.DefaultMaxMappings, "maximum location mappings (subnets "+
			"and addresses) of tenants on network nimitz, this node's own containers included")
}

// check rejects invalid values and combinations.
func (n *networkFlags) check(edge bool, device string) error {
	if device == endpoint.Macvlan && n.nimitz != nimitzNone {
		return usage(
			"--device %s cannot be combined with --nimitz %s: network nimitz forwards packets at the containers' "+
				"host devices, and macvlan containers have none; use --device %s or %s",
			device,
			n.nimitz,
			endpoint.Veth,
			endpoint.Netkit,
		)
	}
	if edge && n.nimitz == nimitzNone {
		return usage(
			"--edge needs --nimitz %s or %s: only tenants on that network span regions",
			nimitzEBPF,
			nimitzOVS,
		)
	}
	if n.maxMappings < 1 {
		return usage("--max-mappings %d: choose 1 or more", n.maxMappings)
	}
	return nil
}

// ready returns an error if --nimitz is ovs and Open vSwitch does not respond.
func (n *networkFlags) ready(ctx context.Context) error {
	if n.nimitz != nimitzOVS {
		return nil
	}
	if err := ovs.Probe(ctx, n.ovsRunDir); err != nil {
		return fmt.Errorf("%w\n  nothing was changed; start Open vSwitch, or correct --ovs-run-dir", err)
	}
	return nil
}

// openers returns the factories of all networks. path returns the packet path, which must be open before a factory is
// called.
func (n *networkFlags) openers(
	ctx context.Context,
	o *daemon.Options,
	path func() *datapath.Datapath,
) []network.Factory {
	other := network.Factory{Name: nimitz.Name, With: fmt.Sprintf("--nimitz %s or --nimitz %s", nimitzEBPF, nimitzOVS)}
	if n.nimitz != nimitzNone {
		other.Open = func(on network.Node) (network.Network, error) { return n.openNimitz(ctx, o, path(), on) }
	}
	return []network.Factory{
		{Name: netpila.Name, Open: func(on network.Node) (network.Network, error) {
			return netpila.New(on.Plan, on.Prefix, on.Indexes, path().Netpila())
		}},
		other,
	}
}

// openNimitz opens the switch and then the gateway. If the node has no gateway, its containers reach no services, and
// it has no publications.
func (n *networkFlags) openNimitz(
	ctx context.Context,
	o *daemon.Options,
	path *datapath.Datapath,
	on network.Node,
) (network.Network, error) {
	c := nimitz.Config{
		Plan:        on.Plan,
		Node:        on.Prefix,
		Indexes:     on.Indexes,
		Cluster:     on.Cluster,
		Kind:        n.nimitz,
		Edge:        o.Edge,
		MaxMappings: n.maxMappings,
	}
	var err error
	if n.nimitz == nimitzEBPF {
		c.Switch, err = path.Nimitz()
	} else {
		c.Switch, err = openOVS(ctx, path,
			ovs.Config{RunDir: n.ovsRunDir, Uplink: o.Uplink, Node: on.Prefix, Region: on.Plan.Base,
				Others: []netip.Prefix{on.Plan.Base, on.Plan.Private}, LooseDeletes: n.looseDeletes})
	}
	if err != nil {
		return nil, err
	}
	if g, err := openGateway(ctx, path, gatewayNetns(n.gatewayNetns, o.RunDir), on); err != nil {
		c.NoGateway = err
		o.Log.Warn(
			"this node has no gateway: its containers reach no services, and it has no publications",
			"error",
			err,
		)
	} else {
		c.Gateway = g
	}
	return nimitz.New(c), nil
}

// bindOVSRunDir adds the flag for the folder of Open vSwitch.
func bindOVSRunDir(c *cobra.Command, dir *string) {
	c.Flags().StringVar(dir, "ovs-run-dir", "/run/openvswitch", "folder of the sockets of Open vSwitch")
	_ = c.MarkFlagDirname("ovs-run-dir")
}

// openOVS opens the Open vSwitch of this node.
func openOVS(ctx context.Context, path *datapath.Datapath, config ovs.Config) (nimitz.Switch, error) {
	taps, err := path.OVSPorts()
	if err != nil {
		return nil, err
	}
	if config.Netns, err = netns.Current(); err != nil {
		return nil, err
	}
	config.OVSPorts, config.Mark = taps, taps.Mark()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return ovs.Open(ctx, config)
}

// bindGatewayNetns adds the flag for the network namespace of the gateway.
func bindGatewayNetns(c *cobra.Command, path *string) {
	c.Flags().
		StringVar(path, "gateway-netns", "", "file of the namespace of the gateway of network nimitz; created if "+
			"it does not exist (default: \"gateway\" in --run-dir)")
	_ = c.MarkFlagFilename("gateway-netns")
}

func gatewayNetns(path, runDir string) string { return cmp.Or(path, filepath.Join(runDir, "gateway")) }

// openGateway opens the gateway of this node.
func openGateway(ctx context.Context, path *datapath.Datapath, netns string, on network.Node) (nimitz.Gateway, error) {
	block, ok := on.Plan.GatewayBlock(on.Prefix, false)
	if !ok {
		return nil, fmt.Errorf(
			"the cluster's gateway prefix of IPv6, %v, has no block of virtual addresses for node %v; it was fixed "+
				"at the orchestrator's first start: use nodes with lower numbers as gateways",
			on.Plan.Gateway6,
			on.Prefix,
		)
	}
	mtu, err := path.MTU()
	if err != nil {
		return nil, err
	}
	g, err := gateway.Open(ctx, gateway.Config{
		Path: netns, Switch: pipeline.GatewayDevice, Fabric: pipeline.UnderlayDevice, Block: block,
		Virtual: nimitz.GatewayAddress(block), Own: tenant.UnderlayAddress(on.Prefix, 1), MTU: mtu,
	})
	if err != nil {
		return nil, err
	}
	if err := path.PlugUnderlay(pipeline.UnderlayDevice); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}
