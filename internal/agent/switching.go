package agent

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"pilaster.io/pilaster/internal/agent/networks"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// A tenant that moves between networks with the same addresses (tenant.KeepsAddresses) is on both until the
// orchestrator says that it has left one: Tenant.Network is the network by which its containers send, Tenant.Leaving
// the other one. Both receive. The orchestrator exchanges the two when all nodes have reported that they receive by
// both, and removes Leaving when all have reported that they send by Network. So at each moment all nodes receive what
// any node sends.

// keepsAddresses reports whether an endpoint keeps its addresses on the way to its tenant's network.
func keepsAddresses(t tenant.Tenant, r endpoint.Record) bool {
	return t.KeepsAddresses() || len(r.Networks()) > len(r.SendsBy()) ||
		slices.ContainsFunc(r.SendsBy(), func(on string) bool { return tenant.KeepsAddresses(networks.Of(t), on) })
}

// hasSwitched reports whether an endpoint sends by its tenant's network, and receives by the other one too.
func hasSwitched(t tenant.Tenant, r endpoint.Record) bool {
	return !slices.ContainsFunc(r.Attachments, func(a endpoint.Attachment) bool {
		return a.Network != networks.Of(t) || a.Also != t.Leaving
	})
}

// onBoth returns the record of a new endpoint on both networks of a tenant that moves between them, if this node has
// both. A report about the tenant's present state counts the endpoint: its record is held before, so either the report
// has it as one that has not switched, or the tenant is in that state here.
func (c *Core) onBoth(r endpoint.Record) endpoint.Record {
	known, _, ok := c.tenants.Get(r.Tenant)
	t := known.Tenant
	if !ok || !t.KeepsAddresses() || c.networks.Get(networks.Of(t)) == nil || c.networks.Get(t.Leaving) == nil {
		return r
	}
	return r.Over(networks.Of(t), t.Leaving)
}

// switchNetworks makes an endpoint send by its tenant's network and receive by the networks of the tenant. It may stop
// after any step: the record is on disk before the kernel changes, and the next call repeats all steps.
func (c *Core) switchNetworks(ctx context.Context, t tenant.Tenant, r *endpoint.Record) error {
	to, also := networks.Of(t), ""
	if t.KeepsAddresses() {
		also = t.Leaving
	}
	from := r.SendsBy()[0]
	if from != to && !tenant.KeepsAddresses(to, from) {
		to = from // it joins the tenant's network with other addresses
	}
	if err := c.maySwitch(t, *r, to, also); err != nil {
		return err
	}
	c.setMigrated(r.ID, false)
	both := r.Over(to, also)
	if rest := r.Without(to).Networks(); also == "" && len(rest) > 0 {
		both = r.Over(to, rest[0]) // until the next steps have removed it
	}
	if err := c.putChanged(r, both); err != nil {
		return err
	}
	err := c.networks.EachOf(both, func(n Network, r endpoint.Record) error { return n.Activate(ctx, r) })
	if err != nil {
		return err
	}
	if err := c.driver.Readdress(ctx, both, both); err != nil { // only its program may change
		return err
	}
	if stays := both.Over(to, also); len(stays.Networks()) < len(both.Networks()) {
		gone := both.Without(to).Networks()[0]
		if err := c.networks.Get(gone).Deactivate(ctx, both.On(gone)); err != nil {
			return err
		}
		if err := c.putChanged(r, stays); err != nil {
			return err
		}
	}
	c.setMigrated(r.ID, t.KeepsAddresses()) // else it has finished, and the next migration begins anew
	c.log.Info("endpoint switched networks", "endpoint", r.ID, "container", r.ContainerID, "pod", r.Pod,
		"sends_by", to, "receives_by", r.Networks())
	return nil
}

// maySwitch refuses a network that this node lacks, and a container whose MAC other speakers would not reach.
func (c *Core) maySwitch(t tenant.Tenant, r endpoint.Record, on ...string) error {
	for _, name := range on {
		if name != "" && c.networks.Get(name) == nil {
			return c.networks.Missing(t.Name, name)
		}
		if mac := r.SegmentMAC(); name != "" && tenant.NetworkHas(name, tenant.Announced) &&
			!slices.Contains(r.Networks(), name) && !bytes.Equal(r.Device.ContainerMAC, mac) {
			return fmt.Errorf("the container has the MAC %v of an older build, and network %s needs %v; it stays on "+
				"its network: recreate the container", r.Device.ContainerMAC, name, mac)
		}
	}
	return nil
}

// putChanged writes a record whose networks changed.
func (c *Core) putChanged(r *endpoint.Record, is endpoint.Record) error {
	if slices.EqualFunc(r.Attachments, is.Attachments, func(a, b endpoint.Attachment) bool {
		return a.Network == b.Network && a.Also == b.Also
	}) {
		return nil
	}
	if err := c.store.Put(is); err != nil {
		return err
	}
	*r = is
	c.services.EndpointsChanged(r.Tenant)
	return nil
}

// lacksMappings returns an error if a network of a tenant that moves between two has not received its mappings yet: it
// then drops packets to other nodes, and from them.
func (c *Core) lacksMappings(t tenant.Tenant) error {
	if !t.KeepsAddresses() {
		return nil
	}
	for _, name := range []string{networks.Of(t), t.Leaving} {
		if c.networks.Get(name) != nil && !c.networks.HasMappings(t.Name, name) {
			return fmt.Errorf("the mappings of network %s have not arrived yet", name)
		}
	}
	return nil
}

// Network allocates addresses for containers and forwards their packets.
type Network = network.Network

// Networks returns the networks of this node.
func (c *Core) Networks() *networks.Set { return c.networks }

// networksOf returns the networks that must know a tenant: its own, the one it leaves, and those that endpoints here
// have addresses of.
func (c *Core) networksOf(t tenant.Tenant) []string {
	names := []string{networks.Of(t)}
	if c.networks.Get(t.Leaving) != nil {
		names = append(names, t.Leaving)
	}
	for _, r := range c.store.List() {
		if r.Tenant == t.Name {
			names = append(names, r.Networks()...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
