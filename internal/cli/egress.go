package cli

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// egressView is an egress rule as JSON.
type egressView struct {
	Tenant   string              `json:"tenant,omitempty"`
	To       string              `json:"to"`
	Action   string              `json:"action"` // "allow" or "deny"
	Gateways []egressGatewayView `json:"gateways,omitzero"`
}

type egressGatewayView struct {
	Node    string `json:"node"`
	Address string `json:"address"` // at which hosts outside see the tenant
}

const (
	allow = "allow"
	deny  = "deny"
)

func viewEgress(tenant string, rules []*pilasterv1.EgressRule) (all []egressView) {
	for _, r := range rules {
		v := egressView{Tenant: tenant, To: r.To, Action: deny}
		if r.Allow {
			v.Action = allow
		}
		for _, g := range r.Gateways {
			v.Gateways = append(v.Gateways, egressGatewayView{g.Node, g.Address})
		}
		all = append(all, v)
	}
	return all
}

// via names the gateways and their addresses.
func (v egressView) via() string {
	var all []string
	for _, g := range v.Gateways {
		all = append(all, fmt.Sprintf("%s (%s)", g.Node, g.Address))
	}
	return strings.Join(all, ", ")
}

func (v egressView) describe() string {
	if len(v.Gateways) == 0 {
		return v.Action
	}
	return v.Action + " via " + v.via()
}

// gatewayRole is a tenant that a node is an egress gateway of.
type gatewayRole struct {
	Tenant  string `json:"tenant"`
	Address string `json:"address"` // at which hosts outside see the tenant
}

// gatewayRoles returns the tenants that a node is an egress gateway of. A tenant has one address at a node.
func gatewayRoles(node string, all []*pilasterv1.TenantEgress) (roles []gatewayRole) {
	for _, t := range all {
		for _, r := range t.Rules {
			for _, g := range r.Gateways {
				if is := (gatewayRole{t.Tenant, g.Address}); g.Node == node && !slices.Contains(roles, is) {
					roles = append(roles, is)
				}
			}
		}
	}
	return roles
}

// rulesBy returns the egress rules that a node is the only gateway of, and those that have another one too.
func rulesBy(node string, all []*pilasterv1.TenantEgress) (alone, shared []string) {
	for _, t := range all {
		for _, r := range t.Rules {
			is := func(g *pilasterv1.EgressGateway) bool { return g.Node == node }
			switch name := t.Tenant + " to " + r.To; {
			case !slices.ContainsFunc(r.Gateways, is):
			case len(r.Gateways) == 1:
				alone = append(alone, name)
			default:
				shared = append(shared, name)
			}
		}
	}
	return alone, shared
}

// egressRules returns the egress rules of a tenant, or of all without a name; none from an orchestrator without egress.
func (s *orchestratorSocket) egressRules(ctx context.Context, tenant string) ([]*pilasterv1.TenantEgress, error) {
	resp, err := s.client().
		ListEgressRules(ctx, connect.NewRequest(&pilasterv1.ListEgressRulesRequest{Tenant: tenant}))
	if connect.CodeOf(err) == connect.CodeUnimplemented {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return resp.Msg.Tenants, nil
}

func newEgressCommand(env Env) *cobra.Command {
	networks := tenant.NetworksWith(tenant.Egress)
	cmd := &cobra.Command{
		Use:   "egress",
		Short: "Decide what containers of network " + networks + " reach outside of the cluster",
		Long: `Decide what containers of network ` + networks + ` reach outside of the cluster.

A rule of a tenant allows or denies a prefix. Of the rules that contain a destination, the one with the
longest prefix decides; without a rule it is denied. Hosts outside see a container at an egress address of
its own, or, by a gateway, at the gateway's address for the tenant. They cannot open connections to either.

Some prefixes are protected: those of the cluster, of machines and of links always, and those of
"pilaster egress protect" unless a rule allows this prefix or a part of it. Policies of the tenant apply
too. Egress bypasses the netfilter rules of the node.`,
		Example: "  pilaster egress set blue --to 2001:db8:9::/48 --action allow\n  pilaster egress list",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(newEgressSet(env), newEgressDelete(env), newEgressList(env), newEgressProtect(env),
		newEgressWho(env))
	return cmd
}

func newEgressSet(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var to, via, addresses []string
	var action string
	cmd := &cobra.Command{
		Use:   "set TENANT",
		Short: "Allow or deny prefixes outside, or change how packets reach them",
		Long: `Allow or deny prefixes outside, or change how packets reach them. An existing rule for the same prefix is
replaced. Connections that a rule no longer allows, or that would now leave by another address, end.

With --via, packets leave at one or two nodes as gateways, which translate source addresses and ports to one
address for each tenant and gateway. It stays the same until the tenant has no rule with that gateway, so
firewalls outside can admit it. With two gateways, new connections use those that work, and each connection
stays at its gateway. An --address must be routed to the gateway's node.`,
		Example: `  pilaster egress set blue --to 2001:db8:9::/48 --action allow
  pilaster egress set blue --to ::/0 --action allow --via n1,n2
  pilaster egress set blue --to ::/0 --action allow --via n1 --address 2001:db8:7::9
  pilaster egress set blue --to 2001:db8:9:1::/64,2001:db8:9:2::/64 --action deny`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for flag, names := range map[string][]string{"via": via, "address": addresses} {
				if cmd.Flags().Changed(flag) && len(names) == 0 {
					return usage("--%s is empty: leave it out, or set a value", flag)
				}
			}
			req, err := egressRequest(args[0], to, action, via, addresses)
			if err != nil {
				return err
			}
			resp, err := socket.client().SetEgressRule(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			views := viewEgress(args[0], resp.Msg.Rules)
			return out.print(env.Stdout, views, func(w io.Writer) {
				for _, v := range views {
					fmt.Fprintf(w, "egress of tenant %s to %s: %s\n", v.Tenant, v.To, v.describe())
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.ValidArgsFunction = names(socket.tenants)
	f := cmd.Flags()
	bindTo(cmd, &to, cobra.NoFileCompletions)
	f.StringVar(&action, "action", "", "allow or deny")
	_ = cmd.MarkFlagRequired("action")
	_ = cmd.RegisterFlagCompletionFunc(
		"action",
		cobra.FixedCompletions([]string{allow, deny}, cobra.ShellCompDirectiveNoFileComp),
	)
	f.StringSliceVar(&via, "via", nil, fmt.Sprintf("nodes as gateways, at most %d", tenant.MaxEgressGateways))
	_ = cmd.RegisterFlagCompletionFunc(
		"via",
		func(c *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			all, directive := names(socket.nodes)(c, nil, typed)
			return slices.DeleteFunc(all, func(n string) bool { return slices.Contains(via, n) }), directive
		},
	)
	f.StringSliceVar(&addresses, "address", nil, "addresses of the gateways, one for each --via in their order "+
		"(default those that the tenant has there, or new ones)")
	_ = cmd.RegisterFlagCompletionFunc("address", cobra.NoFileCompletions)
	return cmd
}

// bindTo binds the flag for the prefixes of rules.
func bindTo(cmd *cobra.Command, to *[]string, complete cobra.CompletionFunc) {
	cmd.Flags().StringSliceVar(to, "to", nil, "prefixes outside, a rule for each")
	_ = cmd.MarkFlagRequired("to")
	_ = cmd.RegisterFlagCompletionFunc("to", complete)
}

func egressRequest(tenant string, to []string, action string, via, addresses []string) (
	*pilasterv1.SetEgressRuleRequest, error) {
	if err := checkPrefixes("--to", to); err != nil {
		return nil, err
	}
	req := &pilasterv1.SetEgressRuleRequest{Tenant: tenant, To: to, Allow: action == allow}
	switch {
	case action != allow && action != deny:
		return nil, usage("--action %q: use allow or deny", action)
	case action == deny && len(via) > 0:
		return nil, usage("--via is for --action allow: packets that are denied have no gateway")
	case len(addresses) > 0 && len(addresses) != len(via):
		return nil, usage("%d --address for %d --via: use one for each, in their order", len(addresses), len(via))
	}
	for i, node := range via {
		if node == "" {
			return nil, usage("--via has an empty name: name nodes, or leave it out")
		}
		g := &pilasterv1.EgressGateway{Node: node}
		if len(addresses) > 0 {
			a, err := netip.ParseAddr(addresses[i])
			if err != nil || !a.Is6() || a.Is4In6() {
				return nil, usage("--address %q is not an IPv6 address", addresses[i])
			}
			g.Address = a.String()
		}
		req.Gateways = append(req.Gateways, g)
	}
	return req, nil
}

// checkPrefixes refuses texts that are not IPv6 prefixes.
func checkPrefixes(flag string, texts []string) error {
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil && a.Is6() && !a.Is4In6() && a.Zone() == "" {
			return usage("%s %q is an address and not a prefix; write %v/128", flag, text, a)
		}
		if p, err := netip.ParsePrefix(text); err != nil || !p.Addr().Is6() || p.Addr().Is4In6() {
			return usage("%s %q is not an IPv6 prefix such as 2001:db8:9::/48", flag, text)
		}
	}
	return nil
}

func newEgressDelete(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var to []string
	cmd := &cobra.Command{
		Use:     "delete TENANT",
		Short:   "Delete rules; a wider rule then decides, or the prefix is denied",
		Example: "  pilaster egress delete blue --to 2001:db8:9::/48",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkPrefixes("--to", to); err != nil {
				return err
			}
			if _, err := socket.client().DeleteEgressRule(cmd.Context(),
				connect.NewRequest(&pilasterv1.DeleteEgressRuleRequest{Tenant: args[0], To: to})); err != nil {
				return err
			}
			deleted := struct {
				Tenant string   `json:"tenant"`
				To     []string `json:"to"`
			}{args[0], to}
			return out.print(env.Stdout, deleted, func(w io.Writer) {
				fmt.Fprintf(w, "egress of tenant %s to %s: %s deleted\n", args[0], strings.Join(to, ", "),
					choose(len(to) == 1, "rule", "rules"))
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	bindTo(cmd, &to, func(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return names(func(ctx context.Context) (prefixes []string, err error) {
			rules, err := socket.egressRules(ctx, args[0])
			for _, t := range rules {
				for _, r := range t.Rules {
					if !slices.Contains(to, r.To) {
						prefixes = append(prefixes, r.To)
					}
				}
			}
			return prefixes, err
		})(c, nil, typed)
	})
	cmd.ValidArgsFunction = names(socket.tenants)
	return cmd
}

func newEgressList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "list [TENANT]",
		Short:   "Show the rules of a tenant, or of all tenants",
		Example: "  pilaster egress list\n  pilaster egress list blue -o json",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := new(pilasterv1.ListEgressRulesRequest)
			if len(args) > 0 {
				if req.Tenant = args[0]; req.Tenant == "" {
					return usage("TENANT is empty; omit it, or name a tenant")
				}
			}
			resp, err := socket.client().ListEgressRules(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			views := []egressView{}
			for _, t := range resp.Msg.Tenants {
				views = append(views, viewEgress(t.Tenant, t.Rules)...)
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "TENANT\tTO\tACTION\tGATEWAYS")
				for _, v := range views {
					via := v.via()
					if via == "" {
						via = "-"
					}
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", v.Tenant, v.To, v.Action, via)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.ValidArgsFunction = names(socket.tenants)
	return cmd
}

// protectedView is the protected prefixes as JSON.
type protectedView struct {
	Prefixes []string `json:"prefixes"`
	Always   []string `json:"always,omitzero"` // of list: those that no rule allows
}

func newEgressProtect(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "protect",
		Short: "Protect prefixes from wide rules of tenants",
		Long: `Protect prefixes from wide rules of tenants, for example those of an administration network. Only
rules for a protected prefix or for a part of it allow it.`,
		Example: "  pilaster egress protect add 2001:db8:5::/48\n  pilaster egress protect list",
		Args:    cobra.NoArgs,
	}
	change := func(
		ctx context.Context, s *orchestratorSocket, m *pilasterv1.ChangeProtectedRequest,
	) (any, error) {
		resp, err := s.client().ChangeProtected(ctx, connect.NewRequest(m))
		if err != nil {
			return nil, err
		}
		return protectedView{Prefixes: append([]string{}, resp.Msg.Prefixes...)}, nil
	}
	add := prefixChange{
		verb: "add", short: "Protect prefixes", done: "protected",
		example: "pilaster egress protect add 2001:db8:5::/48",
		change: func(ctx context.Context, s *orchestratorSocket, p []string) (any, error) {
			return change(ctx, s, &pilasterv1.ChangeProtectedRequest{Add: p})
		},
	}
	remove := prefixChange{
		verb: "remove", short: "Stop protecting prefixes", done: "no longer protected",
		example: "pilaster egress protect remove 2001:db8:5::/48", known: (*orchestratorSocket).protected,
		change: func(ctx context.Context, s *orchestratorSocket, p []string) (any, error) {
			return change(ctx, s, &pilasterv1.ChangeProtectedRequest{Remove: p})
		},
	}
	cmd.AddCommand(add.command(env), remove.command(env), newProtectList(env))
	return cmd
}

// prefixChange is a command that adds or removes prefixes of the cluster.
type prefixChange struct {
	verb, short, done, example string
	change                     func(context.Context, *orchestratorSocket, []string) (view any, err error)
	known                      func(*orchestratorSocket, context.Context) ([]string, error) // for completion; or nil
}

func (p prefixChange) command(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     p.verb + " PREFIX...",
		Short:   p.short,
		Example: "  " + p.example,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkPrefixes("PREFIX", args); err != nil {
				return err
			}
			view, err := p.change(cmd.Context(), &socket, args)
			if err != nil {
				return err
			}
			return out.print(env.Stdout, view, func(w io.Writer) {
				fmt.Fprintf(w, "%s: %s\n", strings.Join(args, ", "), p.done)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	if p.known != nil {
		cmd.ValidArgsFunction = names(func(ctx context.Context) ([]string, error) { return p.known(&socket, ctx) })
	}
	return cmd
}

func (s *orchestratorSocket) protected(ctx context.Context) ([]string, error) {
	resp, err := s.client().ListProtected(ctx, connect.NewRequest(&pilasterv1.ListProtectedRequest{}))
	if err != nil {
		return nil, err
	}
	return resp.Msg.Prefixes, nil
}

func newProtectList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show protected prefixes",
		Example: "  pilaster egress protect list",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ListProtected(cmd.Context(), connect.NewRequest(&pilasterv1.ListProtectedRequest{}))
			if err != nil {
				return err
			}
			v := protectedView{append([]string{}, resp.Msg.Prefixes...), append([]string{}, resp.Msg.Always...)}
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintln(w, "PREFIX\tPROTECTED")
				for _, p := range v.Prefixes {
					fmt.Fprintf(w, "%s\tby an operator\n", p)
				}
				for _, p := range v.Always {
					fmt.Fprintf(w, "%s\talways\n", p)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	return cmd
}
