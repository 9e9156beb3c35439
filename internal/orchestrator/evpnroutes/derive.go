package evpnroutes

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/tenant"
)

// derivation is what follows from the store.
type derivation struct {
	own     []evpn.Own
	skipped map[string]string // reasons by "tenant NAME" or "node NAME"
	moved   []placed          // containers, to compare with routes of others
}

// placed is a container with the mapping that has its mobility sequence.
type placed struct {
	mapping *pilasterv1.Mapping
	vni     uint32
	mac     evpn.MAC
}

// without removes containers, by name.
func (d *derivation) without(names map[string]bool) {
	if len(names) == 0 {
		return
	}
	macs := map[uint32]map[evpn.MAC]bool{}
	d.moved = slices.DeleteFunc(d.moved, func(p placed) bool {
		if names[p.name()] {
			if macs[p.vni] == nil {
				macs[p.vni] = map[evpn.MAC]bool{}
			}
			macs[p.vni][p.mac] = true
		}
		return names[p.name()]
	})
	for i := range d.own {
		o := &d.own[i]
		o.Containers = slices.DeleteFunc(o.Containers, func(c evpn.Container) bool { return macs[o.Tenant.VNI][c.MAC] })
	}
}

func (p placed) name() string { return p.mapping.Tenant + " " + p.mapping.To }

// names returns the names of all containers.
func (d derivation) names() map[string]bool {
	names := make(map[string]bool, len(d.moved))
	for _, p := range d.moved {
		names[p.name()] = true
	}
	return names
}

// derive returns what the cluster announces. It is in order and depends on nothing else.
func derive(plan address.Plan, c Config, tenants []cache.Placement) derivation {
	d := derivation{skipped: map[string]string{}}
	for _, p := range tenants {
		own, err := c.tenant(p.Tenant)
		if err != nil {
			d.skipped["tenant "+p.Tenant.Name] = err.Error()
			continue
		}
		nodes := map[string]evpn.Node{}
		for _, n := range p.Nodes {
			node, err := c.node(plan, n)
			if err != nil {
				d.skipped["node "+n.Name] = err.Error()
				continue
			}
			nodes[n.Name] = node
		}
		for _, name := range slices.Sorted(maps.Keys(nodes)) {
			own.Nodes = append(own.Nodes, nodes[name])
		}
		d.addMappings(&own, p, nodes)
		d.own = append(d.own, own)
	}
	return d
}

// tenant returns a tenant without its nodes and containers.
func (c Config) tenant(t *pilasterv1.Tenant) (own evpn.Own, err error) {
	overlays, err := tenant.ParseOverlays(t.Overlays)
	if err != nil {
		return own, err
	}
	if len(t.Ids) == 0 || t.Ids[0].Id > tenant.MaxAnnouncedID {
		return own, fmt.Errorf("its id is above %d, and does not fit into a route distinguisher", tenant.MaxAnnouncedID)
	}
	id := t.Ids[0].Id
	own.Tenant = evpn.Tenant{
		Name: t.Name, Number: uint16(id), VNI: evpn.SegmentVNI(id), L3VNI: id, Allow: c.Allow[t.Name],
	}
	for _, o := range overlays {
		own.Tenant.CIDRs = append(own.Tenant.CIDRs, o.CIDR)
	}
	return own, nil
}

func (c Config) node(plan address.Plan, n *pilasterv1.Node) (evpn.Node, error) {
	prefix, err := netip.ParsePrefix(n.Prefix)
	if err != nil {
		return evpn.Node{}, err
	}
	number := plan.NodeNumber(prefix)
	vtep, ok := evpn.VTEP(c.Pool, number)
	if !ok {
		return evpn.Node{}, fmt.Errorf("its number %d is above what --evpn-vtep-pool %v has room for", number, c.Pool)
	}
	return evpn.Node{VTEP: vtep, RouterMAC: evpn.RouterMAC(vtep)}, nil
}

// addMappings adds a tenant's subnets, or its containers, which have a mapping of each address.
func (d *derivation) addMappings(own *evpn.Own, p cache.Placement, nodes map[string]evpn.Node) {
	overlays, _ := tenant.ParseOverlays(p.Tenant.Overlays)
	mappings := slices.SortedFunc(slices.Values(p.Mappings), func(a, b *pilasterv1.Mapping) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Key, b.Key), cmp.Compare(a.To, b.To))
	})
	for len(mappings) > 0 {
		first := mappings[0]
		n := 1
		for n < len(mappings) && first.Key != "" && mappings[n].Name == first.Name && mappings[n].Key == first.Key {
			n++
		}
		of := mappings[:n]
		mappings = mappings[n:]
		node, ok := nodes[first.Name]
		if !ok || first.Origin != "" {
			continue
		}
		if first.Key == "" {
			if to, err := netip.ParsePrefix(first.To); err == nil {
				own.Subnets = append(own.Subnets, evpn.Subnet{Node: node, Prefix: to})
			}
			continue
		}
		if c, ok := container(overlays, of); ok {
			c.Node = node
			own.Containers = append(own.Containers, c)
			d.moved = append(d.moved, placed{first, own.Tenant.VNI, c.MAC})
		}
	}
}

// container returns the container that has all of these mappings, without its node.
func container(overlays []tenant.Overlay, of []*pilasterv1.Mapping) (c evpn.Container, ok bool) {
	for _, m := range of {
		to, err := netip.ParsePrefix(m.To)
		if err != nil {
			continue
		}
		if !slices.ContainsFunc(overlays, func(o tenant.Overlay) bool { return o.CIDR.Contains(to.Addr()) }) {
			continue
		}
		c.Addrs = append(c.Addrs, to.Addr())
		c.Sequence = max(c.Sequence, uint32(min(m.Sequence, math.MaxUint32)))
		if mac, err := evpn.ParseMAC(m.Mac); err == nil {
			c.MAC = mac
		}
		// A container's IPv4 address decides before its IPv6 address does.
		if c.MAC == (evpn.MAC{}) || m.Mac == "" && to.Addr().Is4() {
			c.MAC = evpn.ContainerMAC(to.Addr())
		}
	}
	return c, len(c.Addrs) > 0
}
