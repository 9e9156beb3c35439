// Package ila is the module of network ila: its flags of the agent, its tables on a node, and its key of a lab.
package ila

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/choice"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/ila"
	"pilaster.io/pilaster/internal/network/ila/tables"
)

// Name is the network's name.
const Name = ila.Name

// Module returns the network's module.
func Module() module.Module {
	return module.Module{
		Name:     Name,
		NewAgent: func() module.Agent { return new(agent) },
		Addresses: func(on network.Node) (network.Addresses, error) {
			c, err := config(on)
			return ila.New(c), err
		},
		LabHelp:          labHelp,
		AgentArguments:   agentArguments,
		SimulatedEntries: simulatedEntries,
	}
}

// agent has the network's flags of an agent.
type agent struct {
	module.NoFlags
	on        bool
	mappings  int
	source    string
	cbit      string
	learning  string
	endpoints int
}

const (
	mappingsFlag = "ila-max-mappings"
	learningFlag = "ila-mappings"
)

// Values of --ila-source and --ila-cbit, the defaults first.
const (
	sourceLocator, sourceSIR = "locator", "sir"
	cbitOn, cbitOff          = "on", "off"
)

// Values of --ila-mappings, the default first.
const (
	push = "push"
	pull = "pull"
)

func (a *agent) Bind(c *cobra.Command) {
	c.Flags().BoolVar(&a.on, Name, false, "host tenants of network "+Name+"; the fabric must then route this node's "+
		"locator to it, the /64 that `pilaster status` shows")
	c.Flags().IntVar(&a.mappings, mappingsFlag, ila.DefaultMaxMappings,
		"maximum mappings of containers on other nodes, of tenants on network "+Name)
	choice.Bind(c, &a.source, "ila-source", "source of packets on the fabric, network "+Name+": the sender's locator, "+
		"which receivers compare with its mapping; or sir, the address that containers see, which only proves that "+
		"the sender exists. The same on all nodes", []string{sourceLocator, sourceSIR})
	choice.Bind(c, &a.cbit, "ila-cbit", "whether identifiers on the fabric have the C bit, network "+Name+
		"; off for peers with the kernel's neutral-map-auto. The same on all nodes", []string{cbitOn, cbitOff})
	choice.Bind(c, &a.learning, learningFlag, "which mappings of network "+Name+" the node has: push, those of all "+
		"containers of the tenants that it hosts; or pull, those that its containers use: the first packets to or "+
		"from another container are dropped until the orchestrator answers. Nodes may differ", []string{push, pull})
}

func (a *agent) Check(s module.Settings) error {
	if s.Device == endpoint.Macvlan && a.on {
		return fmt.Errorf(
			"--device %s cannot be combined with --%s: network %s forwards packets at the containers' host devices, "+
				"and macvlan containers have none; use --device %s or %s",
			s.Device, Name, Name, endpoint.Veth, endpoint.Netkit,
		)
	}
	if a.mappings < 1 {
		return fmt.Errorf("--%s %d: choose 1 or more", mappingsFlag, a.mappings)
	}
	return nil
}

func (a *agent) Enabled() bool { return a.on }

func (a *agent) With() string { return "--" + Name }

func (a *agent) Configure(c *datapath.Config) {
	a.endpoints = c.MaxEndpoints
	c.Plan.Identifiers = a.on
}

// Open loads the programs and opens the tables.
func (a *agent) Open(_ context.Context, host module.Host, on network.Node) (network.Network, error) {
	c, err := config(on)
	if err != nil {
		return nil, err
	}
	c.MaxMappings, c.SourceStays, c.ILA.NoCBit = a.mappings, a.source == sourceSIR, a.cbit == cbitOff
	c.Pull = a.learning == pull
	c.Tables, err = tables.Open(host.Path, tables.Config{
		ILA: c.ILA, Locator: c.Locator, Endpoints: a.endpoints, Mappings: a.mappings,
		SourceStays: c.SourceStays, Pull: c.Pull,
	})
	if err != nil {
		return nil, err
	}
	return ila.New(c), nil
}

func config(on network.Node) (ila.Config, error) {
	use, err := on.Plan.ILA()
	if err != nil {
		return ila.Config{}, fmt.Errorf("%w\n  nothing was changed; start the agent without --%s", err, Name)
	}
	locator, err := use.Locator(on.Prefix)
	if err != nil {
		return ila.Config{}, fmt.Errorf("network %s: %w", Name, err)
	}
	return ila.Config{ILA: use, Locator: locator, Cluster: on.Cluster}, nil
}
