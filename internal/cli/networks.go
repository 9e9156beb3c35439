package cli

import (
	"context"
	"slices"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// networkFlags are the agent's flags for its networks.
type networkFlags []networkFlag

type networkFlag struct {
	name string
	module.Agent
}

func newNetworkFlags() (all networkFlags) {
	for _, m := range modules.All() {
		all = append(all, networkFlag{m.Name, m.NewAgent()})
	}
	return all
}

func (all networkFlags) bind(c *cobra.Command) {
	for _, n := range all {
		n.Bind(c)
	}
}

// check rejects invalid values and combinations.
func (all networkFlags) check(s module.Settings) error {
	for _, n := range all {
		if err := n.Check(s); err != nil {
			return usage("%w", err)
		}
	}
	var with []string
	spans := slices.ContainsFunc(all, func(n networkFlag) bool {
		has := tenant.NetworkHas(n.name, tenant.Regions)
		if has {
			with = append(with, n.With())
		}
		return has && n.Enabled()
	})
	if s.Edge && !spans {
		return usage("--edge needs %s: only tenants on that network span regions", tenant.OneOf(with))
	}
	return nil
}

// ready returns an error if something that a network uses on this machine does not answer.
func (all networkFlags) ready(ctx context.Context) error {
	for _, n := range all {
		if err := n.Ready(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (all networkFlags) configure(c *datapath.Config) {
	for _, n := range all {
		n.Configure(c)
	}
}

// factories are the factories of all networks. The packet path of the host is open before a factory is called.
func (all networkFlags) factories(ctx context.Context, host func() module.Host) []network.Factory {
	var factories []network.Factory
	for _, n := range all {
		f := network.Factory{Name: n.name, With: n.With()}
		if n.Enabled() {
			f.Open = func(on network.Node) (network.Network, error) { return n.Open(ctx, host(), on) }
		}
		factories = append(factories, f)
	}
	return factories
}

// resetFlags are the flags of node reset for its networks.
type resetFlags []module.Reset

func newResetFlags() (all resetFlags) {
	for _, m := range modules.All() {
		if m.NewReset != nil {
			all = append(all, m.NewReset())
		}
	}
	return all
}

func (all resetFlags) bind(c *cobra.Command) {
	for _, r := range all {
		r.Bind(c)
	}
}

// before lists what is removed before the data path.
func (all resetFlags) before() (found []network.StaleState, err error) {
	for _, r := range all {
		some, err := r.Before()
		if err != nil {
			return nil, err
		}
		found = append(found, some...)
	}
	return found, nil
}

// after lists what is removed after the data path.
func (all resetFlags) after(runDir string) (found []network.StaleState) {
	for _, r := range all {
		found = append(found, r.After(runDir)...)
	}
	return found
}
