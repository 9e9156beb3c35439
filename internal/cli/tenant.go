package cli

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

func newTenantCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "tenant",
		Short:   "Create, show, change and delete tenants",
		Example: "  pilaster tenant create blue\n  pilaster tenant list -o json",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(
		newTenantCreate(env),
		newTenantGet(env),
		newTenantList(env),
		newTenantSet(env),
		newTenantRotateKey(env),
		newTenantMigrate(env),
		newTenantDelete(env),
	)
	return cmd
}

func newTenantCreate(env Env) *cobra.Command {
	withCIDRs := tenant.NetworksWith(tenant.OwnCIDRs)
	var socket orchestratorSocket
	var out output
	var chosen tenantChoice
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a tenant with an id and a random key",
		Long: `Create a tenant with an id and a random key.

A tenant is on one network:

` + tenant.About() + `

On network ` + withCIDRs + `, a tenant has one CIDR, or one of each family. Each node that hosts the tenant gets a
subnet of each CIDR. With --no-node-cidrs, each container gets an address instead; address
keys need that, because with a subnet an address stays on its node.`,
		Example: "  pilaster tenant create blue\n  pilaster tenant create red --addressing clear\n" +
			"  pilaster tenant create green --network " + tenant.Networks(tenant.OwnCIDRs)[0] +
			" --cidr 10.0.0.0/16 --cidr fd12:3456::/48",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := chosen.request(args[0])
			if err != nil {
				return err
			}
			resp, err := socket.client().CreateTenant(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			v := viewTenant(resp.Msg.Tenant)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(w, "tenant %s created: id %s, %s\n", v.Name, v.ids(), v.describe())
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	chosen.bind(cmd)
	return cmd
}

// tenantChoice are the flags of tenant create.
type tenantChoice struct {
	network, addressing string
	cidrs               []string
	nodeBits            []int
	noNodeCIDRs         bool
}

func (c *tenantChoice) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	fixed := func(flag string, values ...string) {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	f.StringVar(&c.network, "network", tenant.DefaultNetwork, tenant.OneOf(tenant.Networks()))
	fixed("network", tenant.Networks()...)
	f.StringVar(
		&c.addressing,
		"addressing",
		"",
		"for network "+tenant.NetworksWithout(tenant.OwnCIDRs)+
			": addresses that containers see, encrypted or clear (default the first that the network has)",
	)
	fixed("addressing", string(tenant.Encrypted), string(tenant.Clear))
	f.StringSliceVar(
		&c.cidrs,
		"cidr",
		nil,
		"for network "+tenant.NetworksWith(tenant.OwnCIDRs)+": CIDR of the tenant; one, or one of each family",
	)
	f.IntSliceVar(
		&c.nodeBits,
		"node-bits",
		nil,
		fmt.Sprintf(
			"length of each node's subnet, one for each --cidr in their order (default %d in IPv4, %d in IPv6)",
			tenant.DefaultNodeBits4,
			tenant.DefaultNodeBits6,
		),
	)
	f.BoolVar(
		&c.noNodeCIDRs,
		"no-node-cidrs",
		false,
		"nodes get no subnets; addresses are allocated one by one, and nodes need a mapping for each container",
	)
}

func (c *tenantChoice) request(name string) (*pilasterv1.CreateTenantRequest, error) {
	req := &pilasterv1.CreateTenantRequest{Name: name, Network: c.network}
	with, without := tenant.NetworksWith(tenant.OwnCIDRs), tenant.NetworksWithout(tenant.OwnCIDRs)
	switch {
	case !slices.Contains(tenant.Networks(), c.network):
		return nil, usage("network %q: use %s", c.network, tenant.OneOf(tenant.Networks()))
	case tenant.NetworkHas(c.network, tenant.OwnCIDRs):
		if c.addressing != "" {
			return nil, usage(
				"--addressing is for --network %s; on %s, containers have addresses in the tenant's CIDRs",
				without,
				c.network,
			)
		}
		var err error
		req.Overlays, err = c.overlays()
		return req, err
	case len(c.cidrs) > 0 || len(c.nodeBits) > 0 || c.noNodeCIDRs:
		return nil, usage(
			"--cidr, --node-bits and --no-node-cidrs are for --network %s; %s chooses the addresses itself",
			with,
			c.network,
		)
	}
	on, _ := tenant.TraitsOf(c.network)
	chosen := cmp.Or(tenant.Addressing(c.addressing), on.Addressings[0])
	switch {
	case chosen != tenant.Encrypted && chosen != tenant.Clear:
		return nil, usage("addressing %q: use encrypted or clear", c.addressing)
	case !slices.Contains(on.Addressings, chosen):
		return nil, usage("addressing %q: on --network %s use %s", c.addressing, c.network, on.Addressings[0])
	case chosen == tenant.Encrypted:
		req.Addressing = pilasterv1.Addressing_ADDRESSING_ENCRYPTED
	default:
		req.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
	}
	return req, nil
}

func (c *tenantChoice) overlays() ([]*pilasterv1.Overlay, error) {
	switch {
	case len(c.cidrs) == 0:
		return nil, usage("--network %s needs --cidr, once, or once for each family", c.network)
	case c.noNodeCIDRs && len(c.nodeBits) > 0:
		return nil, usage("use either --node-bits or --no-node-cidrs")
	case len(c.nodeBits) > 0 && len(c.nodeBits) != len(c.cidrs):
		return nil, usage(
			"%d --node-bits for %d --cidr: use one for each, in their order",
			len(c.nodeBits),
			len(c.cidrs),
		)
	}
	var overlays []*pilasterv1.Overlay
	for i, text := range c.cidrs {
		cidr, err := prefixFlag("--cidr", text)
		if err != nil || !cidr.IsValid() {
			return nil, usage("--cidr %q is not a prefix such as 10.0.0.0/16", text)
		}
		bits := tenant.DefaultNodeBits(cidr)
		if c.noNodeCIDRs {
			bits = 0
		} else if len(c.nodeBits) > 0 {
			if bits = c.nodeBits[i]; bits < 1 || bits > cidr.Addr().BitLen() {
				return nil, usage("--node-bits %d is not the length of a subnet of %v", bits, cidr)
			}
		}
		overlays = append(overlays, &pilasterv1.Overlay{Cidr: text, NodeBits: uint32(bits)})
	}
	return overlays, nil
}

func newTenantGet(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var showKey bool
	cmd := &cobra.Command{
		Use:     "get NAME",
		Short:   "Show a tenant, its ids, its apps and the nodes that host it",
		Example: "  pilaster tenant get blue\n  pilaster tenant get blue --show-key",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			resp, err := socket.client().
				GetTenant(cmd.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: args[0],
					ShowKey: showKey}))
			if err != nil {
				return err
			}
			v := viewHosted(resp.Msg)
			return out.print(env.Stdout, v, func(w io.Writer) { printTenant(w, v) })
		},
	}
	socket.bind(cmd)
	cmd.ValidArgsFunction = names(socket.tenants)
	out.bind(cmd)
	cmd.Flags().
		BoolVar(&showKey, "show-key", false, "show the keys; they decrypt the locations of the tenant's containers")
	return cmd
}

func newTenantList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show all tenants",
		Example: "  pilaster tenant list",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ListTenants(cmd.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
			if err != nil {
				return err
			}
			views := []tenantView{}
			for _, t := range resp.Msg.Tenants {
				v := viewTenant(t)
				v.Leaving = viewLeaving(t, resp.Msg.Hosting)
				views = append(views, v)
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "NAME\tNETWORK\tADDRESSING\tCIDRS\tIDS\tCREATED")
				for _, v := range views {
					fmt.Fprintf(
						w,
						"%s\t%s\t%s\t%s\t%s\t%s\n",
						v.Name,
						v.network(),
						v.Addressing,
						v.cidrs(),
						v.ids(),
						moment(v.Created),
					)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	return cmd
}

func newTenantDelete(env Env) *cobra.Command {
	var socket orchestratorSocket
	cmd := &cobra.Command{
		Use:     "delete NAME",
		Short:   "Delete a tenant that has no containers; its ids are never reused",
		Example: "  pilaster tenant delete blue",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := socket.client().DeleteTenant(cmd.Context(),
				connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: args[0]})); err != nil {
				return err
			}
			fmt.Fprintf(env.Stdout, "tenant %s deleted\n", args[0])
			return nil
		},
	}
	socket.bind(cmd)
	cmd.ValidArgsFunction = names(socket.tenants)
	return cmd
}

func newTenantSet(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var nodes []string
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Change which nodes a tenant's containers reach",
		Long: `Change which nodes a tenant's containers reach, on network ` + tenant.NetworksWith(tenant.Egress) + `.

Processes of these nodes reach the containers at their plaintext addresses, and containers reach the
nodes' addresses and what listens there: all nodes, none, or those in prefixes of the base prefix. The
containers' own node always reaches them, and they reach it only if it is one of these. Policies of the
tenant apply to other nodes, which they select by ipBlock.`,
		Example: "  pilaster tenant set blue --nodes allow\n  pilaster tenant set blue --nodes fd70:696c:6100:1::/64",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &pilasterv1.SetTenantNodesRequest{Tenant: args[0]}
			switch {
			case len(nodes) == 1 && nodes[0] == allow:
				req.All = true
			case len(nodes) == 1 && nodes[0] == deny:
			case slices.Contains(nodes, allow) || slices.Contains(nodes, deny) || len(nodes) == 0:
				return usage("--nodes: use allow, deny, or prefixes of nodes")
			default:
				if err := checkNodePrefixes(nodes); err != nil {
					return err
				}
				req.Prefixes = nodes
			}
			resp, err := socket.client().SetTenantNodes(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			v := struct {
				Name  string   `json:"name"`
				Nodes []string `json:"reachesNodes"`
			}{args[0], append([]string{}, resp.Msg.Prefixes...)}
			return out.print(env.Stdout, v, func(w io.Writer) {
				if len(v.Nodes) == 0 {
					fmt.Fprintf(w, "tenant %s: its containers reach no node\n", v.Name)
					return
				}
				fmt.Fprintf(w, "tenant %s: its containers and nodes in %s reach each other\n", v.Name,
					strings.Join(v.Nodes, ", "))
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.ValidArgsFunction = names(socket.tenants)
	cmd.Flags().StringSliceVar(&nodes, "nodes", nil, "allow (all nodes), deny (none), or prefixes of nodes")
	_ = cmd.MarkFlagRequired("nodes")
	_ = cmd.RegisterFlagCompletionFunc(
		"nodes",
		cobra.FixedCompletions([]string{allow, deny}, cobra.ShellCompDirectiveNoFileComp),
	)
	return cmd
}

// checkNodePrefixes refuses texts that are not prefixes of nodes.
func checkNodePrefixes(texts []string) error {
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil && a.Is6() && !a.Is4In6() && a.Zone() == "" {
			p, _ := a.Prefix(address.NodeBits)
			return usage("--nodes %q is an address and not a prefix; write %v for its node", text, p)
		}
		if p, err := netip.ParsePrefix(text); err != nil || !p.Addr().Is6() || p.Addr().Is4In6() {
			return usage("--nodes %q is neither allow, deny nor a prefix; pilaster node list shows those of nodes",
				text)
		}
	}
	return nil
}
