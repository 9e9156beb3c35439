package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// reasonView is the verdict of the policies at one end of a connection, as JSON.
type reasonView struct {
	Direction string `json:"direction"`
	Endpoint  uint32 `json:"endpoint,omitempty"` // 0 if the end is not on this node (networks with the policy at the receiver)
	Pod       string `json:"pod,omitempty"`
	Name      string `json:"name,omitempty"` // pod or container id
	Tenant    string `json:"tenant"`
	App       uint32 `json:"app"`
	Peer      string `json:"peer"`
	PeerApp   uint32 `json:"peerApp"`
	PeerName  string `json:"peerName,omitempty"`  // pod or container id, if the peer is on this node
	Policed   bool   `json:"policed"`             // the tenant has policies
	Strangers bool   `json:"strangers,omitempty"` // the peer belongs to another tenant
	Allowed   bool   `json:"allowed"`
	Policy    string `json:"policy,omitempty"` // the deciding policy
	Rule      string `json:"rule,omitempty"`
	Backend   string `json:"backend,omitempty"` // address and port of the endpoint, if the destination is a service
	Audit     string `json:"audit,omitempty"`   // the rule that would deny if its policy were not in audit mode
}

type whyView struct {
	Source      netip.Addr   `json:"source"`
	Destination netip.Addr   `json:"destination"`
	Protocol    uint8        `json:"protocol"`
	Port        uint16       `json:"port"`
	SourcePort  uint16       `json:"sourcePort,omitempty"` // 0: not known
	Reasons     []reasonView `json:"reasons"`              // for each end on this node
	Frontend    *frontedView `json:"frontend,omitempty"`
}

// frontedView says that the node decides as a frontend.
type frontedView struct {
	Node     string `json:"node"`
	Backend  string `json:"backend"`
	Revision int64  `json:"revision"` // the node has all policies up to this revision of the store
}

// protocolNumbers are the numbers of the protocols that a user can name.
var protocolNumbers = map[string]uint8{"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1, "icmpv6": 58}

func newWhyCommand(env Env) *cobra.Command {
	var out output
	var socket agentSocket
	var orchestrator orchestratorSocket
	atReceiver := tenant.NetworksWith(tenant.PolicyAtReceiver)
	var name string
	var peerApp, sourcePort uint16
	c := &cobra.Command{
		Use:   "why SOURCE DESTINATION PROTOCOL[/PORT]",
		Short: "Show whether policies allow a connection, and which rule decides",
		Long: `Show whether policies allow a connection from one container to another, and which rule decides. This
node's agent looks the connection up in the policy maps in the kernel, for each end on this node: egress
for the source, ingress for the destination. A connection needs both. For an end on another node, run
the command there. The exit status is 1 if an end on this node denies the connection, or if no end is on
this node.

If the other end is a host outside of the cluster or a node, egress rules or the tenant's setting for nodes decide
too, and the command shows their verdict before that of the policies. If it is a service, the command shows the
verdicts for its endpoints, at most 10: policies see the endpoint and its port. The exit status is 1 if one is denied.

If SOURCE is a host outside of the cluster and DESTINATION an external or load-balancer address, or one of this node
for a node port, the command shows which endpoint a connection by this node gets, and the verdicts for the client's
address at the endpoints on this node. Without affinity, the client's port chooses the endpoint: --source-port.

SOURCE and DESTINATION are addresses, or for ends on this node names: a pod, container id or endpoint id as in
pilaster endpoint list. They may be names of nodes; names of other nodes come from an orchestrator on this machine.

Addresses of network ` + atReceiver + ` do not contain an app, and several tenants can use the same address:
--peer-app sets the app of the end that is not on this node, --tenant sets the tenant. Nodes of network
` + atReceiver + ` have the rules of all apps of a tenant, so each answers for both ends.`,
		Example: `  pilaster why shop/front shop/web tcp/80
  pilaster why fc05:3c9f:712b:239e:df1b:6d97:4bae:9aef shop/web tcp/80
  pilaster why $SOURCE $DESTINATION icmpv6 -o json
  pilaster why 2001:db8:f00d::2 2001:db8:7::9 tcp/443 --source-port 51234
  pilaster why 10.0.1.7 10.0.2.9 tcp/80 --tenant green --peer-app 3`,
		Args:              cobra.RangeArgs(2, 3),
		ValidArgsFunction: socket.offerEnds,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 2 {
				return usage("PROTOCOL is missing: add for example tcp/80, udp/53 or icmpv6")
			}
			if err := socket.resolveEnds(c.Context(), args[:2], &orchestrator); err != nil {
				return err
			}
			view, err := askWhy(args)
			if err != nil {
				return err
			}
			if view.SourcePort = sourcePort; sourcePort != 0 && view.Port == 0 {
				return usage("--source-port %d: protocol %d has no ports", sourcePort, view.Protocol)
			}
			if err := socket.why(c.Context(), &view, name, peerApp); err != nil {
				return err
			}
			if err := out.print(env.Stdout, view, view.text); err != nil {
				return err
			}
			if len(view.Reasons) == 0 ||
				slices.ContainsFunc(view.Reasons, func(r reasonView) bool { return !r.Allowed }) {
				return &exitError{code: ExitFailed}
			}
			return nil
		},
	}
	out.bind(c)
	socket.bind(c)
	orchestrator.bind(c)
	bindSourcePort(c, &sourcePort)
	c.Flags().StringVar(&name, "tenant", "", "tenant of the addresses, on network "+atReceiver)
	c.Flags().
		Uint16Var(&peerApp, "peer-app", 0, "app of the end that is not on this node, on network "+atReceiver)
	return c
}

// offerEnds completes the source and the destination of a connection.
func (s *agentSocket) offerEnds(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return names(s.endpoints)(c, nil, typed)
}

// resolveEnds replaces names of endpoints on this node, as `pilaster endpoint get` accepts them, by addresses of these
// endpoints. If an endpoint has several addresses, it chooses one of the family of the other end.
func (s *agentSocket) resolveEnds(ctx context.Context, ends []string, orchestrator *orchestratorSocket) error {
	var choices [2][]string
	for i, end := range ends {
		var err error
		if choices[i], err = s.addressesOf(ctx, end); err != nil {
			at, is := s.nodeAddress(ctx, end, orchestrator)
			if !is {
				return err
			}
			choices[i] = []string{at.String()}
		}
	}
	ends[0], ends[1] = choices[0][0], choices[1][0]
	for _, source := range choices[0] {
		for _, destination := range choices[1] {
			if strings.Contains(source, ":") == strings.Contains(destination, ":") {
				ends[0], ends[1] = source, destination
				return nil
			}
		}
	}
	return nil
}

// nodeAddress returns the address of a node by its name, if this node or an orchestrator on this machine knows it.
func (s *agentSocket) nodeAddress(
	ctx context.Context, name string, orchestrator *orchestratorSocket,
) (at netip.Addr, is bool) {
	var known []*pilasterv1.Node
	if status, err := s.client().Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{})); err == nil {
		known = append(known, status.Msg.Node)
	}
	all, err := orchestrator.client().ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
	if err == nil {
		known = append(known, all.Msg.Nodes...)
	}
	for _, n := range known {
		if prefix, err := netip.ParsePrefix(n.GetPrefix()); err == nil && n.GetName() == name {
			return tenant.NodeAddress(prefix), true
		}
	}
	return at, false
}

// addressesOf returns the addresses of an endpoint on this node by its name, or what can only be an address as it is.
func (s *agentSocket) addressesOf(ctx context.Context, end string) (all []string, err error) {
	if _, err := address.ParseAny(end); err == nil || strings.ContainsAny(end, ":") {
		return []string{end}, nil
	}
	if strings.Trim(end, "0123456789.") == "" && strings.Contains(end, ".") {
		return []string{end}, nil // an IPv4 address with an error
	}
	resp, err := s.client().GetEndpoint(ctx, connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: end}))
	if err != nil {
		return nil, fmt.Errorf("%q is no address, and no endpoint on this node has the name: %w\n  names of other "+
			"nodes need an orchestrator: run the command on its machine, or use the node's address", end, err)
	}
	for _, a := range resp.Msg.GetEndpoint().GetAttachments() {
		all = append(all, a.Address)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("endpoint %q has no address yet", end)
	}
	return all, nil
}

func askWhy(args []string) (v whyView, err error) {
	if v.Source, err = address.ParseAny(args[0]); err != nil {
		return v, usage("%w", err)
	}
	if v.Destination, err = address.ParseAny(args[1]); err != nil {
		return v, usage("%w", err)
	}
	name, port, has := strings.Cut(strings.ToLower(args[2]), "/")
	number, known := protocolNumbers[name]
	if !known {
		n, err := strconv.ParseUint(name, 10, 8)
		if err != nil {
			return v, usage("%q: use tcp/80, udp/53, sctp/9, icmpv6, icmp, or a protocol number", args[2])
		}
		number = uint8(n)
	}
	v.Protocol = number
	withPorts := number == 6 || number == 17 || number == 132
	if has != withPorts {
		return v, usage("%q: TCP, UDP and SCTP have a port, as in tcp/80, and other protocols none", args[2])
	}
	if has {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return v, usage("%q: a port is 1 to 65535", args[2])
		}
		v.Port = uint16(n)
	}
	return v, nil
}

func (s *agentSocket) why(ctx context.Context, v *whyView, tenant string, peerApp uint16) error {
	resp, err := s.client().
		Why(ctx, connect.NewRequest(&pilasterv1.WhyRequest{Source: v.Source.String(),
			Destination: v.Destination.String(), Protocol: uint32(v.Protocol), Port: uint32(v.Port), Tenant: tenant,
			PeerApp: uint32(peerApp), SourcePort: uint32(v.SourcePort)}))
	if err != nil {
		return err
	}
	if pre := resp.Msg.Pre; pre != nil {
		v.Frontend = &frontedView{Node: pre.Frontend, Backend: pre.Backend, Revision: pre.Revision}
	}
	v.Reasons = []reasonView{}
	for _, r := range resp.Msg.Reasons {
		v.Reasons = append(
			v.Reasons,
			reasonView{
				Direction: r.Direction,
				Endpoint:  r.Endpoint.GetId(),
				Pod:       r.Endpoint.GetPod(),
				Name:      cmp.Or(r.Endpoint.GetPod(), r.Endpoint.GetContainerId()),
				Tenant:    r.Tenant,
				App:       r.App,
				Peer:      r.Peer,
				PeerApp:   r.PeerApp,
				Policed:   r.Policed,
				Strangers: r.Strangers,
				Allowed:   r.Allowed,
				Policy:    r.Rule.GetPolicy(),
				Rule:      r.Rule.GetRule(),
				Backend:   r.Backend,
				Audit:     r.Audit.GetRule(),
			},
		)
	}
	// Each end is the other's peer. Two reasons of one direction are an egress rule and a policy of one end.
	if both := v.Reasons; len(both) == 2 && both[0].Direction != both[1].Direction {
		both[0].PeerName, both[1].PeerName = both[1].Name, both[0].Name
	}
	return nil
}

// peer returns the peer of an end, with its name and the address that the user typed.
func (v whyView) peer(r reasonView) string {
	addr := cmp.Or(r.Backend, v.Destination.String())
	if r.Direction == policy.Ingress.String() {
		addr = v.Source.String()
	}
	return strings.TrimSpace(r.PeerName + " " + addr)
}

func (v whyView) text(w io.Writer) {
	if len(v.Reasons) == 0 {
		fmt.Fprintln(
			w,
			"neither end is a container on this node; run this on the node of the source, and on the destination's, "+
				"or for exposed ports on a node that hosts their tenant",
		)
	}
	for _, r := range v.Reasons {
		verdict, because := "allowed", r.Rule
		if !r.Allowed {
			verdict = "denied"
		}
		switch {
		case because != "":
		case r.Strangers:
			because = "the other end belongs to another tenant, and tenants are always isolated from each other"
		case !r.Policed:
			because = "tenant " + r.Tenant + " has no policies"
		case r.Allowed:
			because = "no policy restricts it"
		default:
			because = "the packet path has no rules for it; see pilaster status"
		}
		who := fmt.Sprintf("endpoint %d %s", r.Endpoint, r.Name)
		if r.Endpoint == 0 && r.Rule != "" && r.Policy == "" {
			who = fmt.Sprintf("exposed port %v", netip.AddrPortFrom(v.Destination, v.Port))
		} else if r.Endpoint == 0 {
			who = "not on this node"
		}
		as := ""
		if r.Backend != "" && r.Direction == policy.Ingress.String() {
			as = ", as " + r.Backend
		}
		fmt.Fprintf(w, "%-8s %-8s %s (tenant %s, app %d), peer %s (app %d)%s: %s\n", r.Direction, verdict, who,
			r.Tenant, r.App, v.peer(r), r.PeerApp, as, because)
		if r.Audit != "" {
			fmt.Fprintf(w, "%-8s %-8s without audit mode it would be denied: %s\n", r.Direction, "audit", r.Audit)
		}
	}
	if f := v.Frontend; f != nil {
		fmt.Fprintf(w, "decided at frontend %s for backend %s, policies of revision %d\n",
			f.Node, f.Backend, f.Revision)
	}
}
