// Package netpila is the module of the default network: it has no flags, and needs nothing but the data path.
package netpila

import (
	"context"

	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/netpila"
)

// Module returns the network's module.
func Module() module.Module {
	return module.Module{
		Name:     netpila.Name,
		NewAgent: func() module.Agent { return agent{} },
		Addresses: func(on network.Node) (network.Addresses, error) {
			return netpila.New(on, nil)
		},
	}
}

type agent struct{ module.NoFlags }

func (agent) Open(_ context.Context, on module.Host, node network.Node) (network.Network, error) {
	return netpila.New(node, on.Path.Netpila())
}
