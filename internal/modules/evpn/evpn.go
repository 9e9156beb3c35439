// Package evpn is the module of network evpn: its flags of the agent, its switch on a node, and its key of a lab.
package evpn

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/evpn"
	"pilaster.io/pilaster/internal/network/evpn/tables"
)

// Name is the network's name.
const Name = evpn.Name

// Module returns the network's module.
func Module() module.Module {
	return module.Module{
		Name:     Name,
		NewAgent: func() module.Agent { return new(agent) },
		Addresses: func(on network.Node) (network.Addresses, error) {
			return evpn.New(evpn.Config{Node: on, Pool: simulatedPool}), nil
		},
		LabHelp:          labHelp,
		AgentArguments:   agentArguments,
		SimulatedEntries: simulatedEntries,
	}
}

// agent has the network's flags of an agent.
type agent struct {
	module.NoFlags
	text      string
	pool      netip.Prefix
	mappings  int
	endpoints int
}

const mappingsFlag = "evpn-max-mappings"

func (a *agent) Bind(c *cobra.Command) {
	c.Flags().StringVar(&a.text, Name, "", "host tenants of network "+Name+", with a tunnel address of this IPv4 "+
		"prefix, which is the orchestrators' --evpn-vtep-pool. The fabric must route the address to the node "+
		"(default: the node hosts no such tenants)")
	c.Flags().IntVar(&a.mappings, mappingsFlag, evpn.DefaultMaxMappings,
		"maximum subnets and addresses of tenants on network "+Name+", this node's own and other speakers' included")
}

func (a *agent) Check(s module.Settings) (err error) {
	if a.mappings < 1 {
		return fmt.Errorf("--%s %d: choose 1 or more", mappingsFlag, a.mappings)
	}
	if a.text == "" {
		return nil
	}
	if s.Device == endpoint.Macvlan {
		return fmt.Errorf(
			"--device %s cannot be combined with --%s: network %s forwards packets at the containers' host devices, "+
				"and macvlan containers have none; use --device %s or %s",
			s.Device, Name, Name, endpoint.Veth, endpoint.Netkit,
		)
	}
	a.pool, err = netip.ParsePrefix(a.text)
	if err != nil || !a.pool.Addr().Is4() || a.pool != a.pool.Masked() || a.pool.Bits() > 30 {
		return fmt.Errorf("--%s %q is not an IPv4 prefix with room for nodes, such as 10.1.0.0/16", Name, a.text)
	}
	return nil
}

func (a *agent) Enabled() bool { return a.pool.IsValid() }

func (a *agent) With() string { return "--" + Name + " PREFIX" }

func (a *agent) Configure(c *datapath.Config) { a.endpoints, c.VTEP4 = c.MaxEndpoints, a.pool }

// Open loads the programs and opens the tables.
func (a *agent) Open(_ context.Context, host module.Host, on network.Node) (network.Network, error) {
	s, err := tables.Open(host.Path, tables.Config{Endpoints: a.endpoints, Mappings: a.mappings})
	if err != nil {
		return nil, err
	}
	return evpn.New(evpn.Config{Node: on, Pool: a.pool, Switch: s, MaxMappings: a.mappings}), nil
}
