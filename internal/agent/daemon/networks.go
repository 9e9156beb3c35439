package daemon

import (
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/networks"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/network"
)

// networks opens the networks that this node has, and returns for the others the option that enables them; both by
// name.
func (d *daemon) networks(m state.Membership) (has map[string]agent.Network, absent map[string]string, err error) {
	has, absent = map[string]agent.Network{}, map[string]string{}
	for _, o := range d.Networks {
		if o.Open == nil {
			absent[o.Name] = o.With
			continue
		}
		n, err := o.Open(network.Node{
			Plan: m.Plan, Prefix: m.Prefix, Indexes: d.store, Egress: d.egress, Cluster: d.link,
		})
		if err != nil {
			return nil, nil, err
		}
		has[o.Name], d.opened = n, append(d.opened, n)
		d.gateway = d.gateway || hasGateway(n)
		if has, ok := n.(network.FormProvider); ok {
			d.form = has.Form()
		}
		d.offloads = d.offloads || canOffload(n)
		if networks.PolicyError(n) == nil {
			d.enforces = append(d.enforces, o.Name)
		}
	}
	return has, absent, nil
}

// ebpfSwitch is the switch that can look rules up for other nodes.
const ebpfSwitch = "ebpf"

// canOffload reports whether other nodes can look up the rules of a network's tenants.
func canOffload(n agent.Network) bool {
	by, ok := n.(network.SwitchInfo)
	return ok && by.Switch() == ebpfSwitch && networks.PolicyError(n) == nil
}

// hasGateway reports whether a network has a working gateway to the underlay.
func hasGateway(n agent.Network) bool {
	outward, ok := n.(network.GatewayProvider)
	return ok && outward.Gateway().Missing == ""
}
