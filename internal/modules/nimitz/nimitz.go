// Package nimitz is the module of network nimitz: its flags of the agent and of node reset, its switch and its gateway
// on a node, and its keys of a lab.
package nimitz

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/choice"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/gateway"
	"pilaster.io/pilaster/internal/network/nimitz/ovs"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// Name is the network's name.
const Name = nimitz.Name

// Switches.
const (
	none = "none"
	EBPF = "ebpf"
	OVS  = "ovs"
)

var switches = []string{none, EBPF, OVS} // the default first

const oncache = "oncache"

var accelerations = []string{none, oncache} // the default first

// Module returns the network's module.
func Module() module.Module {
	return module.Module{
		Name:     Name,
		NewAgent: func() module.Agent { return new(agent) },
		NewReset: func() module.Reset { return new(reset) },
		Checks: []module.Check{{
			Name:    "gateway",
			Try:     func(dir string) error { return gateway.Try(filepath.Join(dir, "gateway")) },
			Proves:  "NAT rules with connection limits",
			Without: "this node would have no gateway",
			Advice: "use a kernel with nftables, NAT of IPv6 and limits of connections (CONFIG_NF_TABLES_IPV6, " +
				"CONFIG_NFT_NAT, CONFIG_NFT_CONNLIMIT), if tenants of network " + Name + " need underlay services",
		}},
		FabricDevices:    []string{pipeline.Underlay},
		Addresses:        func(on network.Node) (network.Addresses, error) { return nimitz.New(config(on)), nil },
		LabHelp:          labHelp,
		AgentArguments:   agentArguments,
		SimulatedEntries: simulatedEntries,
	}
}

// agent has the network's flags of an agent.
type agent struct {
	kind         string // of the switch
	folders      folders
	looseDeletes bool
	maxMappings  int
	accelerate   string
}

func (a *agent) Bind(c *cobra.Command) {
	choice.Bind(
		c,
		&a.kind,
		Name,
		"switch for tenants of network nimitz: none, the node then hosts no such tenants; ebpf; or ovs, "+
			"an Open vSwitch that already runs",
		switches,
	)
	choice.Bind(
		c,
		&a.accelerate,
		"accelerate",
		"how packets of network nimitz pass the tunnel with --nimitz ebpf: none, through the kernel's VXLAN device; "+
			"or oncache, by our programs alone, with a cache of the peers' next hops",
		accelerations,
	)
	a.folders.bind(c)
	c.Flags().
		BoolVar(&a.looseDeletes, "loose-deletes", false, "delete Open vSwitch flows by a loose match, as the "+
			"NIMITZ paper does: slower with more flows")
	c.Flags().
		IntVar(&a.maxMappings, "max-mappings", nimitz.DefaultMaxMappings, "maximum location mappings (subnets "+
			"and addresses) of tenants on network nimitz, this node's own containers included")
}

func (a *agent) Check(s module.Settings) error {
	if a.accelerate != none && a.kind != EBPF {
		return fmt.Errorf("--accelerate %s needs --nimitz %s, not %s: only its programs can send tunnel packets "+
			"without the kernel's VXLAN device", a.accelerate, EBPF, a.kind)
	}
	if s.Device == endpoint.Macvlan && a.Enabled() {
		return fmt.Errorf(
			"--device %s cannot be combined with --nimitz %s: network nimitz forwards packets at the containers' "+
				"host devices, and macvlan containers have none; use --device %s or %s",
			s.Device,
			a.kind,
			endpoint.Veth,
			endpoint.Netkit,
		)
	}
	if a.maxMappings < 1 {
		return fmt.Errorf("--max-mappings %d: choose 1 or more", a.maxMappings)
	}
	return nil
}

func (a *agent) Enabled() bool { return a.kind != none }

func (a *agent) With() string { return fmt.Sprintf("--nimitz %s or --nimitz %s", EBPF, OVS) }

func (a *agent) Ready(ctx context.Context) error {
	if a.kind != OVS {
		return nil
	}
	if err := ovs.Probe(ctx, a.folders.ovsRunDir); err != nil {
		return fmt.Errorf("%w\n  nothing was changed; start Open vSwitch, or correct --ovs-run-dir", err)
	}
	return nil
}

func (a *agent) Configure(c *datapath.Config) {
	c.MaxMappings, c.DirectTunnel = a.maxMappings, a.accelerate == oncache
}

// Open opens the switch, and then the gateway. Without a gateway the node works, but its containers reach no underlay
// services, and it has no publications.
func (a *agent) Open(ctx context.Context, host module.Host, on network.Node) (network.Network, error) {
	c := config(on)
	c.Kind, c.Edge, c.MaxMappings = a.kind, host.Edge, a.maxMappings
	var err error
	if a.kind == EBPF {
		c.Switch, err = host.Path.Nimitz()
		c.SharesLoad, c.Relays = true, true
	} else {
		c.Switch, err = openOVS(ctx, host.Path, ovs.Config{
			RunDir: a.folders.ovsRunDir, Uplinks: host.Uplinks, Node: on.Prefix, Region: on.Plan.Base,
			Others: []netip.Prefix{on.Plan.Base, on.Plan.Private}, LooseDeletes: a.looseDeletes,
		})
	}
	if err != nil {
		return nil, err
	}
	if g, err := openGateway(ctx, host.Path, a.folders.gateway(host.RunDir), on); err != nil {
		c.NoGateway = err
		host.Log.Warn(
			"this node has no gateway: its containers reach no underlay services, and it has no publications",
			"error",
			err,
		)
	} else {
		c.Gateway = g
	}
	return nimitz.New(c), nil
}

func config(on network.Node) nimitz.Config {
	return nimitz.Config{Plan: on.Plan, Node: on.Prefix, Indexes: on.Indexes, Cluster: on.Cluster}
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

// openGateway opens the gateway of this node, between the switch and the packet path.
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
