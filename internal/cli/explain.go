package cli

import (
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
	Kind      string           `json:"kind"` // plaintext, ciphertext, overlay, identifier, locator, service, underlay-service, gateway, egress, exposed, pool or foreign
	Plan      explainedPlan    `json:"plan"`
	Plaintext *netip.Addr      `json:"plaintext,omitempty"`
	Node      *explainedNode   `json:"node,omitempty"`
	Tenant    *explainedTenant `json:"tenant,omitempty"`
	App       *explainedApp    `json:"app,omitempty"`
	Index     *address.Index   `json:"index,omitempty"`
	Endpoint  *explainedHere   `json:"endpoint,omitempty"`
	// of an address of a network whose addresses are identifiers, and of what it is on the fabric
	Identifier *explainedIdentifier `json:"identifier,omitempty"`
	Service    *explainedService    `json:"service,omitempty"` // of an address in the prefix of services
	// services and host ports of containers that hosts outside reach at the address
	Exposed []explainedExposed `json:"exposed,omitempty"`
	Pool    string             `json:"pool,omitempty"` // of load-balancer addresses, if an orchestrator knows it
	// tenants on this node that have the address in a CIDR of their own
	Overlays []explainedOverlay `json:"overlays,omitempty"`
	// underlay services with this virtual address, of tenants on this node
	UnderlayServices []explainedUnderlayService `json:"underlayServices,omitempty"`
	Publication      *explainedPublication      `json:"publication,omitempty"`
	Unknown          string                     `json:"unknown,omitempty"` // why names are missing
	asked            bool                       // the orchestrator, for exposed ports and pools
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

type explainedUnderlayService struct {
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
IPv4 or IPv6 address of network ` + withCIDRs + ` it lists the tenants on this node whose CIDRs or underlay services
contain the address. Of an address at which hosts outside of the cluster see containers it names the container, or
the tenant of the egress gateway. Of the address of a service, and of external and load-balancer addresses, it names
tenant, service and ports, by the agent if the node hosts the tenant, else by an orchestrator. An orchestrator also
knows the pools of load-balancer addresses. If an orchestrator on this machine answers, the command adds the names of
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
	if e.Service != nil {
		return s.addService(ctx, e)
	}
	if e.Node == nil && e.Identifier == nil && e.Kind != "foreign" && e.Kind != "exposed" {
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
		if e.Kind == "foreign" || e.Kind == "exposed" {
			return s.addExposed(ctx, e)
		}
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
func explain(plan address.Plan, a netip.Addr, known *pilasterv1.ExplainResponse) (e explanation) {
	e = explanation{Address: a, Kind: "foreign", Plan: explainedPlan{Base: plan.Base, Private: plan.Private}}
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
	for _, s := range known.GetUnderlayServices() {
		e.UnderlayServices = append(e.UnderlayServices, explainedUnderlayService{s.Tenant + "/" + s.Name, s.Real})
	}
	defer func() {
		e.addServices(known.GetServices())
		e.addPublishers(known.GetPublishers())
	}()
	switch {
	case plan.Gateway4.Contains(a), plan.Gateway6.Contains(a):
		e.Kind = "gateway"
		of, bits := plan.Gateway6, address.GatewayBits6
		if a.Is4() {
			of, bits = plan.Gateway4, address.GatewayBits4
		}
		n := address.SubnetNumber(of, netip.PrefixFrom(a, bits).Masked())
		e.Node = &explainedNode{Number: n, Prefix: plan.Node(n)}
	case e.explainService(plan, known.GetTenant()):
		return e
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
		} else if len(e.UnderlayServices) > 0 {
			e.Kind = "underlay-service"
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
