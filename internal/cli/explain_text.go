package cli

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

func (e explanation) text(w io.Writer) {
	fmt.Fprintln(w, e.Address)
	row := func(name string, columns ...any) {
		fmt.Fprintf(w, "  %s", name)
		for _, c := range columns {
			fmt.Fprintf(w, "\t%v", c)
		}
		fmt.Fprintln(w)
	}
	switch {
	case e.Identifier != nil:
		e.identifierText(row)
		return
	case e.Service != nil:
		e.serviceText(row)
		return
	}
	for _, o := range e.Overlays {
		where := "this region"
		if o.Region != "" {
			where = "region " + o.Region
		}
		row("overlay", o.CIDR, "tenant "+o.Tenant, "in "+where+", on network "+tenant.NetworksWith(tenant.OwnCIDRs))
		if here := o.Endpoint; here != nil {
			row("endpoint", here.ID, strings.TrimSpace(here.Pod+" "+here.ContainerID), here.Interface, here.State)
		}
	}
	for _, x := range e.Exposed {
		if x.As == "host-port" {
			row("host port", x.Name, x.Ports, "for hosts outside, at this node, of tenant "+x.Tenant)
			continue
		}
		row("exposed", x.Name, x.Ports+", policy "+x.Policy, "for hosts outside, at "+map[string]string{
			"external": "an external address", "load-balancer": "a load-balancer address", "node": "this node",
		}[x.As]+", of tenant "+x.Tenant)
	}
	if e.Pool != "" {
		row("pool", e.Pool, "of load-balancer addresses"+choose(e.Kind == "pool", "; no service has this one", ""))
	}
	for _, s := range e.UnderlayServices {
		row("underlay service", s.Name, "real address "+s.Real)
	}
	switch e.Kind {
	case "overlay", "underlay-service", "exposed", "pool":
		return
	case "gateway":
		row(
			"gateway",
			e.Node.Prefix,
			"a virtual address of the gateway of node "+fmt.Sprint(e.Node.Number),
			"between containers of network "+tenant.NetworksWith(tenant.NorthSouth)+" and the underlay",
		)
		return
	}
	if e.Kind == "egress" && e.Node == nil {
		row("gateway", "of tenant "+e.Tenant.Name, "hosts outside see containers behind an egress gateway at it")
		return
	}
	if e.Kind == "foreign" {
		row(
			"foreign",
			fmt.Sprintf(
				"in neither %v (nodes) nor %v (containers), %s",
				e.Plan.Base,
				e.Plan.Private,
				e.overlayUnknown(),
			),
		)
		if e.Address.Is6() {
			row("exposed", choose(e.asked, "no service has it for hosts outside, and it is in no pool",
				"unknown: no orchestrator answers on this machine; pilaster service list on one shows exposed ports"))
		}
		return
	}
	if e.Kind == "ciphertext" {
		row("private", e.Plan.Private, "encrypted addresses, for containers of one tenant")
	}
	if e.Plaintext == nil {
		row("encrypted", cmp.Or(e.Unknown, "this node hosts no tenant whose key decrypts it"))
		row("", "run this on a node that hosts the tenant, or: pilaster address decrypt --key HEX "+e.Address.String())
		return
	}
	if e.Kind == "ciphertext" {
		row("plaintext", *e.Plaintext)
	}
	if p := e.Plan.Egress; p != nil && p.Contains(e.Address) {
		row("egress", *p)
	} else {
		row("base", e.Plan.Base)
	}
	routed := "routed by the fabric"
	if e.Node.Name != "" {
		routed = "node " + e.Node.Name + ", " + routed
	}
	row("node", e.Node.Number, e.Node.Prefix, routed)
	row("tenant", e.Tenant.ID, e.tenantName())
	if e.egress() && *e.Index >= tenant.FirstEgressIndex && e.Endpoint == nil {
		row("", "", "pilaster egress who "+e.Address.String()+" on node "+e.nodeName()+" names the container")
	}
	row("app", e.App.ID, e.appName())
	row("index", *e.Index)
	if p := e.Publication; p != nil {
		row("publication", p.Name, "of container "+p.Container)
	}
	if here := e.Endpoint; here != nil {
		row("endpoint", here.ID, strings.TrimSpace(here.Pod+" "+here.ContainerID), here.Interface, here.State)
	}
}

// serviceText describes an address in the prefix of services.
func (e explanation) serviceText(row func(string, ...any)) {
	s := e.Service
	row("services", s.Prefix, "addresses that stand for many containers each")
	name := cmp.Or(e.Unknown, "not hosted on this node")
	if e.Tenant != nil {
		name = e.Tenant.Name
	} else if s.asked {
		name = "no tenant of this cluster has this number"
	}
	row("tenant", s.Number, name)
	switch {
	case s.Alias:
		row("service", "none", "the alias at which a container sees itself if it is its own endpoint")
	case s.Name != "":
		row("service", s.Name, s.Ports)
		if s.Outside != "" {
			row("exposed", "for hosts outside", s.Outside)
		}
	case s.asked:
		row("service", "none", "no service has this address")
	default:
		row("service", "unknown", "no orchestrator answers on this machine; pilaster service list on one names it")
	}
}

// identifierText describes an address of a network with identifiers.
func (e explanation) identifierText(row func(string, ...any)) {
	if e.Kind == "locator" {
		row("seen as", e.Identifier.Seen, "by containers")
		row("locator", netip.PrefixFrom(e.Address, address.NodeBits).Masked(),
			"of node "+e.nodeName())
	} else {
		row("SIR", netip.PrefixFrom(e.Address, address.NodeBits).Masked(),
			"addresses on network "+tenant.NetworksWith(tenant.Identifiers)+", the same on every node")
	}
	row("VNID", e.Identifier.VNID, cmp.Or(e.Tenant.Name, e.Unknown, "not hosted on this node"))
	row("index", e.Identifier.Index)
	if here := e.Endpoint; here != nil {
		row("endpoint", here.ID, strings.TrimSpace(here.Pod+" "+here.ContainerID), here.Interface, here.State)
	}
}

// overlayUnknown is why explain names no tenant with the address in a CIDR of its own.
func (e explanation) overlayUnknown() string {
	with := tenant.NetworksWith(tenant.OwnCIDRs)
	if e.Unknown != "" {
		return "tenants of network " + with + " unknown: " + strings.TrimPrefix(e.Unknown, "names unknown: ")
	}
	return "and no tenant of network " + with + " on this node has it in its CIDRs"
}

// gateway reports whether the address is an underlay address of a node's gateway.
func (e explanation) gateway() bool { return e.Tenant.ID == 0 && e.App.ID == address.GatewayApp }

// egress reports whether hosts outside see a container or a gateway of a node at the address.
func (e explanation) egress() bool { return e.Kind == "egress" && e.Node != nil }

func (e explanation) nodeName() string { return cmp.Or(e.Node.Name, e.Node.Prefix.String()) }

// egressName says who has the address.
func (e explanation) egressName() string {
	of := "; its tenant is unknown on this node"
	if e.Tenant.Name != "" {
		of = " of tenant " + e.Tenant.Name
	}
	switch {
	case e.Address == tenant.EgressTunnel(e.Node.Prefix):
		return "the node's end of tunnels from and to egress gateways"
	case e.Address == tenant.ExposedTunnel(e.Node.Prefix):
		return "the node's end of tunnels for exposed ports of services"
	case *e.Index < tenant.FirstEgressIndex:
		return "address of an egress gateway" + of
	case e.Endpoint != nil:
		return "egress address of a container" + of
	}
	return "egress address of a container, for hosts outside of the cluster"
}

func (e explanation) tenantName() string {
	if e.egress() {
		return e.egressName()
	}
	if e.gateway() {
		return "the node's gateway for tenants of network " + tenant.NetworksWith(tenant.NorthSouth)
	}
	if *e.Plaintext == tenant.TunnelAddress(e.Node.Prefix) {
		return "the node's tunnel endpoint for tenants of network " + tenant.NetworksWith(tenant.Tunnels)
	}
	if *e.Plaintext == tenant.NodeAddress(e.Node.Prefix) {
		return "the node itself: its address for containers and their nodes"
	}
	if e.Tenant.ID == 0 {
		return "the node itself and services on it"
	}
	return cmp.Or(e.Tenant.Name, e.Unknown, "not hosted on this node")
}

func (e explanation) appName() string {
	switch {
	case e.App.ID == 0:
		return "none"
	case e.egress():
		return "reserved: egress"
	case e.gateway() && *e.Index < tenant.FirstPublished:
		return "reserved: the gateway's own address"
	case e.gateway() && e.Publication == nil:
		return "reserved for publications; " + cmp.Or(e.Unknown, "no publication on this node has it")
	case e.gateway():
		return "reserved for publications"
	case e.App.ID == address.GatewayApp:
		return "reserved: the alias of node " + e.nodeName() + ", for containers of the tenant"
	case e.App.ID >= address.FirstReservedApp:
		return "reserved; no container has it"
	case e.App.Labels == nil:
		return cmp.Or(e.Unknown, "unknown on this node")
	}
	return cmp.Or(tenant.Canonical(*e.App.Labels), "no identity labels")
}
