package cli

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
)

// nodeView is a node as JSON.
type nodeView struct {
	Name            string     `json:"name"`
	UUID            string     `json:"uuid"`
	Prefix          string     `json:"prefix"`
	State           string     `json:"state"`                 // connected (to any orchestrator) or away
	Route           string     `json:"route"`                 // the route that the fabric must have; empty if the node has reported no next hop
	EgressRoute     string     `json:"egressRoute,omitempty"` // another one, if the cluster has an egress prefix
	UplinkAddresses []string   `json:"uplinkAddresses"`
	Version         string     `json:"version"`
	Registered      time.Time  `json:"registered"`
	Edge            bool       `json:"edge,omitempty"`     // the Edge Switch of its region
	Gateway         bool       `json:"gateway,omitempty"`  // containers can be published on this node
	Egress          bool       `json:"egress,omitempty"`   // containers can reach hosts outside, and it can be a gateway
	Enforces        []string   `json:"enforces"`           // networks on which the node enforces policies
	Tenants         []string   `json:"tenants,omitzero"`   // of node get: tenants that the node hosts
	Offloads        []nodeRole `json:"offloads,omitempty"` // of node get

	GatewayOf []gatewayRole `json:"gatewayOf,omitempty"` // of node get: tenants whose egress rules name the node
}

// nodeRole is a node's part in an offload, as the orchestrator has it.
type nodeRole struct {
	Tenant   string   `json:"tenant"`
	Role     string   `json:"role"` // backend or frontend
	Backend  string   `json:"backend"`
	Lost     []string `json:"lostFrontends,omitempty"` // of a backend: they do not answer
	Draining bool     `json:"draining,omitempty"`
}

// rolesOf returns a node's parts in offloads.
func rolesOf(node string, all []*pilasterv1.OffloadStatus) (roles []nodeRole) {
	for _, s := range all {
		if s.Offload.GetNode() == node {
			roles = append(roles, nodeRole{Tenant: s.Tenant, Role: "backend", Backend: node, Lost: s.LostFrontends})
		}
		for _, f := range s.Offload.GetFrontends() {
			if f.Node == node {
				roles = append(roles, nodeRole{
					Tenant: s.Tenant, Role: "frontend", Backend: s.Offload.GetNode(), Draining: f.Draining,
				})
			}
		}
	}
	return roles
}

func (r nodeRole) text() string {
	if r.Role == "frontend" {
		return fmt.Sprintf("frontend of %s for tenant %s%s", r.Backend, r.Tenant, choose(r.Draining, ", draining", ""))
	}
	lost := ""
	if len(r.Lost) > 0 {
		lost = "; frontends without an answer: " + strings.Join(r.Lost, ", ")
	}
	return "backend of tenant " + r.Tenant + lost
}

func viewNode(n *pilasterv1.Node) nodeView {
	v := nodeView{
		Name: n.Name, UUID: n.Uuid, Prefix: n.Prefix, State: "away",
		UplinkAddresses: append(
			[]string{},
			n.UplinkAddresses...), Version: n.Version, Registered: n.Registered.AsTime(), Edge: n.Edge,
		Gateway:  n.Gateway,
		Egress:   n.Egress,
		Enforces: append([]string{}, n.Enforces...),
	}
	if n.Connected {
		v.State = "connected"
	}
	if len(n.UplinkAddresses) > 0 {
		v.Route = n.Prefix + " via " + n.UplinkAddresses[0]
	}
	return v
}

// routes names the routes that the fabric must have to the node.
func (v nodeView) routes() string {
	if v.EgressRoute == "" {
		return orNone(v.Route)
	}
	return v.Route + ", " + v.EgressRoute
}

// egressRoutes adds the routes to nodes' egress addresses, if the cluster has a prefix for these.
func (s *orchestratorSocket) egressRoutes(ctx context.Context, nodes ...*nodeView) error {
	resp, err := s.client().ClusterStatus(ctx, connect.NewRequest(&pilasterv1.ClusterStatusRequest{}))
	if err != nil || resp.Msg.GetPlan().GetEgressPrefix() == "" {
		return err
	}
	plan := address.Plan{}
	if plan.Egress, err = netip.ParsePrefix(resp.Msg.Plan.EgressPrefix); err != nil {
		return fmt.Errorf("the orchestrator's plan: %w", err)
	}
	if plan.Base, err = netip.ParsePrefix(resp.Msg.Plan.BasePrefix); err != nil {
		return fmt.Errorf("the orchestrator's plan: %w", err)
	}
	for _, v := range nodes {
		prefix, err := netip.ParsePrefix(v.Prefix)
		at, ok := plan.EgressNode(prefix)
		if err == nil && ok && len(v.UplinkAddresses) > 0 {
			v.EgressRoute = at.String() + " via " + strings.Join(v.UplinkAddresses, " or ")
		}
	}
	return nil
}

// enforcedOn describes the networks on which a node enforces policies.
func enforcedOn(networks []string) string {
	if len(networks) == 0 {
		return "not enforced"
	}
	return "enforced on " + strings.Join(networks, ", ")
}

func newNodeCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "node",
		Short:   "Show and delete nodes, and the routes that the fabric must have; remove the agent from this node",
		Example: "  pilaster node list\n  pilaster node delete n3",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(newNodeGet(env), newNodeList(env), newNodeDelete(env), newNodeReset(env))
	return cmd
}

func newNodeGet(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "get NAME",
		Short:   "Show a node and the tenants it hosts",
		Example: "  pilaster node get n1",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			resp, err := socket.client().
				GetNode(cmd.Context(), connect.NewRequest(&pilasterv1.GetNodeRequest{Name: args[0]}))
			if err != nil {
				return err
			}
			v := viewNode(resp.Msg.Node)
			v.Tenants = append([]string{}, resp.Msg.Tenants...)
			if err := socket.egressRoutes(cmd.Context(), &v); err != nil {
				return err
			}
			offloads, err := socket.client().
				ListOffloads(cmd.Context(), connect.NewRequest(&pilasterv1.ListOffloadsRequest{}))
			if err != nil && connect.CodeOf(err) != connect.CodeUnimplemented {
				return err
			}
			if err == nil {
				v.Offloads = rolesOf(v.Name, offloads.Msg.Offloads)
			}
			rules, err := socket.egressRules(cmd.Context(), "")
			if err != nil {
				return err
			}
			v.GatewayOf = gatewayRoles(v.Name, rules)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"name\t%s\nuuid\t%s\nprefix\t%s\nstate\t%s\nroute\t%s\nversion\t%s\nregistered\t%s\npolicies\t%s\ntenants\t%s\n",
					v.Name,
					v.UUID,
					v.Prefix,
					v.State,
					v.routes(),
					v.Version,
					moment(v.Registered),
					enforcedOn(v.Enforces),
					orNone(strings.Join(v.Tenants, ", ")),
				)
				if v.Gateway {
					fmt.Fprintln(w, "gateway\topen")
				}
				if v.Egress {
					fmt.Fprintln(w, "egress\tpossible, also as a gateway")
				}
				for i, r := range v.GatewayOf {
					fmt.Fprintf(w, "%s\ttenant %s at %s\n", choose(i == 0, "gateway of", ""), r.Tenant, r.Address)
				}
				if v.Edge {
					fmt.Fprintln(w, "edge\tthe Edge Switch of this region")
				}
				for i, r := range v.Offloads {
					fmt.Fprintf(w, "%s\t%s\n", choose(i == 0, "offloads", ""), r.text())
				}
			})
		},
	}
	socket.bind(cmd)
	cmd.ValidArgsFunction = names(socket.nodes)
	out.bind(cmd)
	return cmd
}

func newNodeList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show all nodes, and the route to each that the fabric must have",
		Example: "  pilaster node list",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().ListNodes(cmd.Context(), connect.NewRequest(&pilasterv1.ListNodesRequest{}))
			if err != nil {
				return err
			}
			views, all := make([]nodeView, len(resp.Msg.Nodes)), make([]*nodeView, len(resp.Msg.Nodes))
			for i, n := range resp.Msg.Nodes {
				views[i] = viewNode(n)
				all[i] = &views[i]
			}
			if err := socket.egressRoutes(cmd.Context(), all...); err != nil {
				return err
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "NAME\tPREFIX\tSTATE\tROUTE THE FABRIC MUST HAVE")
				for _, v := range views {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", v.Name, v.Prefix, v.State, v.routes())
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	return cmd
}

func newNodeDelete(env Env) *cobra.Command {
	var socket orchestratorSocket
	var force bool
	cmd := &cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a node whose agent is stopped; its prefix is never reused",
		Long: `Delete a node whose agent is stopped.

Its name can be used again. Its prefix is never allocated to another node. The orchestrator rejects its
certificate and UUID from then on: the machine can join as a new node with an empty state directory.

--force deletes a node that is connected, and closes its connection. Use it for a machine that was
stolen, or whose key an attacker has copied. Containers on the node keep their network. --force also
deletes the publications of the node's gateway, and removes the node as an egress gateway: rules without
another gateway then deny, and the command shows them. Without it, such a node is not deleted.

An Edge Switch continues to forward packets between regions until it is reset (run "pilaster node reset"
there) or powered off.`,
		Example: "  pilaster node delete n3\n  pilaster node delete n3 --force",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			edge := false
			if is, err := socket.client().GetNode(cmd.Context(),
				connect.NewRequest(&pilasterv1.GetNodeRequest{Name: args[0]})); err == nil {
				edge = is.Msg.Node.Edge
			}
			rules, err := socket.egressRules(cmd.Context(), "")
			if err != nil {
				return err
			}
			if _, err := socket.client().DeleteNode(cmd.Context(),
				connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: args[0], Force: force})); err != nil {
				return err
			}
			fmt.Fprintf(env.Stdout, "node %s deleted\n", args[0])
			denied, others := rulesBy(args[0], rules)
			if len(denied) > 0 {
				fmt.Fprintln(env.Stdout, "These egress rules had no other gateway, and deny now:",
					strings.Join(denied, ", "))
			}
			if len(others) > 0 {
				fmt.Fprintln(env.Stdout, "These egress rules use their other gateway now:", strings.Join(others, ", "))
			}
			if edge {
				fmt.Fprintln(
					env.Stdout,
					"It was this region's Edge Switch and is not notified: it continues to forward until it is reset "+
						"(run `pilaster node reset` there) or powered off.",
				)
			}
			return nil
		},
	}
	socket.bind(cmd)
	cmd.ValidArgsFunction = names(socket.nodes)
	cmd.Flags().
		BoolVar(&force, "force", false, "also delete a connected node, and the publications of its gateway: its "+
			"connection is closed and its certificate revoked")
	return cmd
}
