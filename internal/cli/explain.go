package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// explanation is a decoded address. Unknown parts are absent.
type explanation struct {
	Address   netip.Addr       `json:"address"`
	Kind      string           `json:"kind"` // plaintext, ciphertext, overlay, identifier, locator, service, gateway, egress or foreign
	Plan      explainedPlan    `json:"plan"`
	Plaintext *netip.Addr      `json:"plaintext,omitempty"`
	Node      *explainedNode   `json:"node,omitempty"`
	Tenant    *explainedTenant `json:"tenant,omitempty"`
	App       *explainedApp    `json:"app,omitempty"`
	Index     *address.Index   `json:"index,omitempty"`
	Endpoint  *explainedHere   `json:"endpoint,omitempty"`
	// of an address of a network whose addresses are identifiers, and of what it is on the fabric
	Identifier *explainedIdentifier `json:"identifier,omitempty"`
	// tenants on this node that have the address in a CIDR of their own
	Overlays []explainedOverlay `json:"overlays,omitempty"`
	// services with this virtual address, of tenants on this node
	Services    []explainedService    `json:"services,omitempty"`
	Publication *explainedPublication `json:"publication,omitempty"`
	Unknown     string                `json:"unknown,omitempty"` // why names are missing
}

type explainedPlan struct {
	Base     netip.Prefix   `json:"base"`
	Private  netip.Prefix   `json:"private"`
	Gateways []netip.Prefix `json:"gateways,omitempty"`
	Egress   *netip.Prefix  `json:"egress,omitempty"`
}

type explainedNode struct {
	Number uint64       `json:"number"`
	Prefix netip.Prefix `json:"prefix"`
	Name   string       `json:"name,omitempty"` // if the orchestrator or the agent on this machine knows it
}

type explainedTenant struct {
	ID   address.TenantID `json:"id"`
	Name string           `json:"name,omitempty"`
}

type explainedApp struct {
	ID     address.AppID      `json:"id"`
	Labels *map[string]string `json:"labels,omitempty"` // nil if the app is not known
}

type explainedOverlay struct {
	Tenant   string         `json:"tenant"`
	CIDR     string         `json:"cidr"`
	Region   string         `json:"region,omitempty"` // of the CIDR; empty for this node's region
	Endpoint *explainedHere `json:"endpoint,omitempty"`
}

type explainedIdentifier struct {
	Seen  netip.Addr `json:"seen"` // the address as containers see it
	VNID  uint32     `json:"vnid"`
	Index uint32     `json:"index"`
}

type explainedService struct {
	Name string `json:"name"` // TENANT/NAME
	Real string `json:"real"`
}

type explainedPublication struct {
	Name      string `json:"name"` // TENANT/NAME
	Container string `json:"container"`
}

type explainedHere struct {
	ID          uint32 `json:"id"`
	Pod         string `json:"pod,omitempty"`
	ContainerID string `json:"containerId"`
	Interface   string `json:"interface"`
	State       string `json:"state"`
}

func newExplainCommand(env Env) *cobra.Command {
	withCIDRs := tenant.NetworksWith(tenant.OwnCIDRs)
	var out output
	var socket agentSocket
	var orchestrator orchestratorSocket
	plan := address.DefaultPlan()
	plan.Identifiers = true // unless an agent reports another plan
	c := &cobra.Command{
		Use:   "explain ADDRESS",
		Short: "Decode an address",
		Long: `Decode an address into node, tenant id, app and index. This needs only the address and the cluster's two
prefixes. If this node's agent answers, the command uses the agent's prefixes, adds the names of this
node and of tenants, apps and endpoints on it, and decrypts addresses of tenants that this node hosts. For an
IPv4 or IPv6 address of network ` + withCIDRs + ` it lists the tenants on this node whose CIDRs or services contain
the address. Of an address at which hosts outside of the cluster see containers it names the container, or
the tenant of the egress gateway. If an orchestrator on this machine answers, the command adds the names of
nodes, tenants and apps that the agent does not know. On a terminal the fields of the address and their rows have the
same colour, unless NO_COLOR is set.`,
		Example: "  pilaster explain fd70:696c:6100:3:0:100:100:13",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			a, err := address.ParseAny(args[0])
			if err != nil {
				return usage("%w", err)
			}
			known, asked, own, err := socket.explain(c.Context(), a)
			// The command works without an agent, unless the user names one.
			if err != nil && c.Flags().Changed("agent-socket") {
				return err
			}
			given := c.Flags().Changed("base-prefix") || c.Flags().Changed("private-prefix")
			if asked != nil && !given {
				plan = *asked
			}
			if err := plan.Validate(); err != nil {
				return &exitError{ExitUsage, err}
			}
			e := explain(plan, a, known)
			if e.Node != nil && e.Node.Prefix.String() == own.GetPrefix() {
				e.Node.Name = own.GetName()
			}
			if err != nil {
				e.Unknown = "names unknown: no agent answers on " + socket.path
			}
			if err := orchestrator.addNames(c.Context(), &e); err != nil && c.Flags().Changed("orchestrator-socket") {
				return err
			}
			if out.format == "json" || !colours(env.Stdout) {
				return out.print(env.Stdout, e, e.text)
			}
			var plain strings.Builder
			if err := out.print(&plain, e, e.text); err != nil {
				return err
			}
			_, err = io.WriteString(env.Stdout, e.coloured(plain.String()))
			return err
		},
	}
	c.Flags().TextVar(&plan.Base, "base-prefix", plan.Base, "the `prefix` that node /64s are allocated from")
	c.Flags().TextVar(&plan.Private, "private-prefix", plan.Private,
		"the `prefix` of the addresses that containers see")
	socket.bind(c)
	orchestrator.bind(c)
	out.bind(c)
	return c
}

// addNames adds names from the orchestrator that the agent did not return: the names of the node and the tenant, and
// the labels of the app.
func (s *orchestratorSocket) addNames(ctx context.Context, e *explanation) error {
	if e.Node == nil && e.Identifier == nil && e.Kind != "foreign" {
		return nil
	}
	client := s.client()
	nodes, err := client.ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
	if err != nil {
		return err
	}
	for _, n := range nodes.Msg.Nodes {
		if e.Node != nil && n.Prefix == e.Node.Prefix.String() {
			e.Node.Name = n.Name
		}
	}
	if e.Tenant != nil && (e.Tenant.ID == 0 && !e.egress() || e.Tenant.Name != "") {
		return nil
	}
	tenants, err := client.ListTenants(ctx, connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	if err != nil {
		return err
	}
	if e.Tenant == nil || e.Tenant.ID == 0 {
		e.setGateway(gatewayOf(tenants.Msg.Tenants, e.Address))
		return nil
	}
	e.Unknown = ""
	for _, t := range tenants.Msg.Tenants {
		for _, id := range t.Ids {
			if address.TenantID(id.Id) == e.Tenant.ID {
				e.Tenant.Name = t.Name
			}
		}
	}
	if e.Tenant.Name == "" {
		e.Unknown = "no tenant of this cluster has this id"
		return nil
	}
	got, err := client.GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: e.Tenant.Name}))
	if err != nil {
		return err
	}
	for _, a := range got.Msg.Apps {
		if e.App != nil && address.AppID(a.Id) == e.App.ID {
			e.App.Labels = &a.Labels
		}
	}
	return nil
}

// explain returns the agent's information about an address, its plan and its node.
func (s *agentSocket) explain(
	ctx context.Context, a netip.Addr,
) (*pilasterv1.ExplainResponse, *address.Plan, *pilasterv1.Node, error) {
	agent := s.client()
	status, err := agent.Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
	if err != nil {
		return nil, nil, nil, err
	}
	base, err := netip.ParsePrefix(status.Msg.GetPlan().GetBasePrefix())
	private, err2 := netip.ParsePrefix(status.Msg.GetPlan().GetPrivatePrefix())
	if err := errors.Join(err, err2); err != nil {
		return nil, nil, nil, fmt.Errorf("the agent's plan: %w", err)
	}
	asked := &address.Plan{Base: base, Private: private, Identifiers: status.Msg.GetPlan().GetIdentifiers()}
	if text := status.Msg.GetPlan().GetEgressPrefix(); text != "" {
		if asked.Egress, err = netip.ParsePrefix(text); err != nil {
			return nil, nil, nil, fmt.Errorf("the agent's plan: %w", err)
		}
	}
	for _, text := range status.Msg.GetPlan().GetGatewayPrefixes() {
		gateway, err := netip.ParsePrefix(text)
		switch {
		case err != nil:
			return nil, nil, nil, fmt.Errorf("the agent's plan: %w", err)
		case gateway.Addr().Is4():
			asked.Gateway4 = gateway
		default:
			asked.Gateway6 = gateway
		}
	}
	known, err := agent.Explain(ctx, connect.NewRequest(&pilasterv1.ExplainRequest{Address: a.String()}))
	if err != nil {
		return nil, nil, nil, err
	}
	return known.Msg, asked, status.Msg.Node, nil
}

// explain combines the fields of the address with an agent's information; known may be nil.
func explain(plan address.Plan, a netip.Addr, known *pilasterv1.ExplainResponse) explanation {
	e := explanation{Address: a, Kind: "foreign", Plan: explainedPlan{Base: plan.Base, Private: plan.Private}}
	for _, gateway := range []netip.Prefix{plan.Gateway4, plan.Gateway6} {
		if gateway.IsValid() {
			e.Plan.Gateways = append(e.Plan.Gateways, gateway)
		}
	}
	if plan.Egress.IsValid() {
		e.Plan.Egress = &plan.Egress
	}
	for _, o := range known.GetOverlaid() {
		e.Overlays = append(e.Overlays, explainedOverlay{o.Tenant, o.Cidr, o.Region, explainHere(o.Endpoint)})
	}
	for _, s := range known.GetServices() {
		e.Services = append(e.Services, explainedService{s.Tenant + "/" + s.Name, s.Real})
	}
	switch {
	case plan.Gateway4.Contains(a), plan.Gateway6.Contains(a):
		e.Kind = "gateway"
		of, bits := plan.Gateway6, address.GatewayBits6
		if a.Is4() {
			of, bits = plan.Gateway4, address.GatewayBits4
		}
		n := address.SubnetNumber(of, netip.PrefixFrom(a, bits).Masked())
		e.Node = &explainedNode{Number: n, Prefix: plan.Node(n)}
	case e.explainIdentifier(plan):
		return e
	case e.explainEgress(plan, known):
		return e
	case plan.Base.Contains(a):
		e.Kind, e.Plaintext = "plaintext", &a
	case plan.Private.Contains(a):
		e.Kind = "ciphertext"
		if p, err := address.Parse(known.GetPlaintext()); err == nil && plan.Base.Contains(p) {
			e.Plaintext = &p
		}
	}
	if e.Plaintext == nil {
		if len(e.Overlays) > 0 {
			e.Kind = "overlay"
		} else if len(e.Services) > 0 {
			e.Kind = "service"
		} else if e.Kind == "foreign" {
			e.setGateway(known.GetTenant())
		}
		return e
	}
	if known.GetPublication() != "" {
		e.Publication = &explainedPublication{known.Publication, known.Published}
	}
	p := address.Split(*e.Plaintext)
	e.Node = &explainedNode{Number: plan.NodeNumber(p.Node), Prefix: p.Node}
	e.Tenant = &explainedTenant{p.Tenant, known.GetTenant()}
	e.App = &explainedApp{ID: p.App}
	if app := known.GetApp(); app != nil {
		e.App.Labels = &app.Labels
	}
	e.Index = &p.Index
	e.Endpoint = explainHere(known.GetEndpoint())
	return e
}

// explainEgress sets the fields of an address at which hosts outside see containers; false if it is none.
func (e *explanation) explainEgress(plan address.Plan, known *pilasterv1.ExplainResponse) bool {
	node, ok := tenant.NodeOfEgress(plan, e.Address)
	if !ok {
		return false
	}
	p := address.Split(e.Address)
	e.Kind, e.Plaintext = "egress", &e.Address
	e.Node = &explainedNode{Number: plan.NodeNumber(node), Prefix: node}
	e.Tenant, e.App, e.Index = &explainedTenant{Name: known.GetTenant()}, &explainedApp{ID: p.App}, &p.Index
	e.Endpoint = explainHere(known.GetEndpoint())
	return true
}

// setGateway says that the address is one of an egress gateway of a tenant; an empty name is ignored.
func (e *explanation) setGateway(of string) {
	if of != "" {
		e.Kind, e.Tenant = "egress", &explainedTenant{Name: of}
	}
}

// gatewayOf returns the tenant that an egress gateway translates to an address.
func gatewayOf(tenants []*pilasterv1.Tenant, a netip.Addr) string {
	for _, t := range tenants {
		for _, r := range t.Egress {
			for _, g := range r.Gateways {
				if g.Address == a.String() {
					return t.Name
				}
			}
		}
	}
	return ""
}

// explainIdentifier sets the fields of an address with an identifier; false if it has none.
func (e *explanation) explainIdentifier(plan address.Plan) bool {
	use, reserved := plan.ReservedILA()
	if !reserved {
		return false
	}
	id, ok := use.Split(e.Address)
	if !ok {
		return false
	}
	e.Kind, e.Identifier = "identifier", &explainedIdentifier{e.Address, uint32(id.VNID), id.Index}
	e.Tenant = &explainedTenant{ID: id.VNID}
	if len(e.Overlays) > 0 {
		e.Tenant.Name, e.Endpoint = e.Overlays[0].Tenant, e.Overlays[0].Endpoint
		e.Overlays = nil
	}
	if node, is := use.Node(id.Locator); is {
		e.Kind = "locator"
		e.Identifier.Seen, _ = use.ToSIR(e.Address)
		e.Node = &explainedNode{Number: plan.NodeNumber(node), Prefix: node}
	}
	return true
}

func explainHere(here *pilasterv1.Endpoint) *explainedHere {
	if here == nil {
		return nil
	}
	return &explainedHere{here.Id, here.Pod, here.ContainerId, here.Interface, here.State}
}

func (e explanation) text(w io.Writer) {
	fmt.Fprintln(w, e.Address)
	row := func(name string, columns ...any) {
		fmt.Fprintf(w, "  %s", name)
		for _, c := range columns {
			fmt.Fprintf(w, "\t%v", c)
		}
		fmt.Fprintln(w)
	}
	if e.Identifier != nil {
		e.identifierText(row)
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
	for _, s := range e.Services {
		row("service", s.Name, "real address "+s.Real)
	}
	switch e.Kind {
	case "overlay", "service":
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
