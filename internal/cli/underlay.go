package cli

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// underlayServiceView is an underlay service as JSON.
type underlayServiceView struct {
	Tenant  string `json:"tenant,omitempty"`
	Name    string `json:"name"`
	Virtual string `json:"virtual,omitempty"` // address for containers
	Real    string `json:"real,omitempty"`    // address on the underlay
}

func viewUnderlayService(s *pilasterv1.UnderlayService) underlayServiceView {
	return underlayServiceView{s.GetTenant(), s.GetName(), s.GetVirtual(), s.GetReal()}
}

// publicationView is a publication as JSON.
type publicationView struct {
	Tenant    string `json:"tenant,omitempty"`
	Name      string `json:"name"`
	Container string `json:"container,omitempty"`
	Node      string `json:"node,omitempty"`     // node whose gateway has the address
	Underlay  string `json:"underlay,omitempty"` // address for clients
}

func viewPublication(p *pilasterv1.Publication) publicationView {
	return publicationView{p.GetTenant(), p.GetName(), p.GetContainer(), p.GetNode(), p.GetUnderlay()}
}

func newUnderlayCommand(env Env) *cobra.Command {
	networks := tenant.NetworksWith(tenant.NorthSouth)
	cmd := &cobra.Command{
		Use:   "underlay",
		Short: "Connect containers of network " + networks + " with the underlay",
		Long: `Connect containers of network ` + networks + ` with the underlay, through the gateways of nodes.
Containers reach underlay services, and clients on the underlay reach publications. Both are IPv6 only.`,
		Example: "  pilaster underlay service list\n  pilaster underlay publication list",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(newUnderlayServiceCommand(env), newPublicationCommand(env))
	return cmd
}

func newUnderlayServiceCommand(env Env) *cobra.Command {
	networks := tenant.NetworksWith(tenant.NorthSouth)
	cmd := &cobra.Command{
		Use:   "service",
		Short: "Give containers of network " + networks + " access to servers on the underlay",
		Long: `Give containers of network ` + networks +
			` access to underlay services: storage, or any other server outside the
overlay.

Containers of the tenant reach an underlay service at a virtual address that the tenant chooses; other
tenants do not reach it. The gateway of the container's node translates both addresses, so the server
sees the gateway's address. Underlay services are IPv6 only.`,
		Example: "  pilaster underlay service create storage --tenant green --virtual fd09::7 --real 2001:db8::9\n" +
			"  pilaster underlay service list",
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newUnderlayServiceCreate(env), newUnderlayServiceList(env), newUnderlayServiceDelete(env))
	return cmd
}

func newPublicationCommand(env Env) *cobra.Command {
	networks := tenant.NetworksWith(tenant.NorthSouth)
	cmd := &cobra.Command{
		Use:   "publication",
		Short: "Publish containers of network " + networks + " on the underlay",
		Long: `Publish containers of network ` + networks +
			` on the underlay. A publication is an address of a node's gateway,
through which clients outside the overlay reach one container on any node.

The gateway can be on any node. Connections pass through that node and end when it fails. The container
sees the gateway's address, not the client's. Publications are IPv6 only.`,
		Example: "  pilaster underlay publication create web --tenant green --container fd12:3456::5 --node n1\n" +
			"  pilaster underlay publication list",
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newPublicationCreate(env), newPublicationList(env), newPublicationDelete(env))
	return cmd
}

// checkAddress returns an error if text is not an IPv6 address.
func checkAddress(flag, text string) error {
	if a, err := netip.ParseAddr(text); err != nil || !a.Is6() || a.Is4In6() {
		return usage("%s %q is not an IPv6 address; gateways support only IPv6", flag, text)
	}
	return nil
}

func newUnderlayServiceCreate(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant, virtual, real string
	cmd := &cobra.Command{
		Use:     "create NAME",
		Short:   "Give a tenant's containers access to a server on the underlay",
		Example: "  pilaster underlay service create storage --tenant green --virtual fd09::7 --real 2001:db8::9",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for flag, text := range map[string]string{"--virtual": virtual, "--real": real} {
				if err := checkAddress(flag, text); err != nil {
					return err
				}
			}
			resp, err := socket.client().
				CreateUnderlayService(cmd.Context(), connect.NewRequest(&pilasterv1.CreateUnderlayServiceRequest{
					Service: &pilasterv1.UnderlayService{Tenant: tenant, Name: args[0], Virtual: virtual, Real: real},
				}))
			if err != nil {
				return err
			}
			v := viewUnderlayService(resp.Msg.Service)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"underlay service %s of tenant %s created: containers reach %s at %s\n",
					v.Name,
					v.Tenant,
					v.Real,
					v.Virtual,
				)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "tenant whose containers reach the underlay service", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	addressFlag(cmd, &virtual, "virtual", "address for containers, outside the tenant's CIDRs")
	addressFlag(cmd, &real, "real", "address of the server on the underlay")
	return cmd
}

func newPublicationCreate(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant, container, node string
	cmd := &cobra.Command{
		Use:     "create NAME",
		Short:   "Publish a container at an address of a node's gateway",
		Example: "  pilaster underlay publication create web --tenant green --container fd12:3456::5 --node n1",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkAddress("--container", container); err != nil {
				return err
			}
			resp, err := socket.client().
				CreatePublication(cmd.Context(), connect.NewRequest(&pilasterv1.CreatePublicationRequest{
					Publication: &pilasterv1.Publication{
						Tenant:    tenant,
						Name:      args[0],
						Container: container,
						Node:      node,
					},
				}))
			if err != nil {
				return err
			}
			v := viewPublication(resp.Msg.Publication)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"publication %s of tenant %s created: clients reach %s at %s of node %s\n",
					v.Name,
					v.Tenant,
					v.Container,
					v.Underlay,
					v.Node,
				)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "tenant of the container", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	addressFlag(cmd, &container, "container", "address of the container in the tenant's CIDR")
	namedFlag(cmd, &node, "node", "node whose gateway has the address", socket.nodes)
	_ = cmd.MarkFlagRequired("node")
	return cmd
}

func newUnderlayServiceList(env Env) *cobra.Command {
	return newUnderlayList(env, "service", "Show underlay services", []string{"TENANT", "NAME", "VIRTUAL", "REAL"},
		func(ctx context.Context, socket *orchestratorSocket, tenant string) (all []underlayServiceView, err error) {
			resp, err := socket.client().
				ListUnderlayServices(ctx, connect.NewRequest(&pilasterv1.ListUnderlayServicesRequest{Tenant: tenant}))
			if err != nil {
				return nil, err
			}
			for _, s := range resp.Msg.UnderlayServices {
				all = append(all, viewUnderlayService(s))
			}
			return all, nil
		},
		func(v underlayServiceView) []string { return []string{v.Tenant, v.Name, v.Virtual, v.Real} })
}

func newPublicationList(env Env) *cobra.Command {
	return newUnderlayList(env, "publication", "Show publications and their addresses",
		[]string{"TENANT", "NAME", "CONTAINER", "NODE", "UNDERLAY"},
		func(ctx context.Context, socket *orchestratorSocket, tenant string) (all []publicationView, err error) {
			resp, err := socket.client().
				ListPublications(ctx, connect.NewRequest(&pilasterv1.ListPublicationsRequest{Tenant: tenant}))
			if err != nil {
				return nil, err
			}
			for _, p := range resp.Msg.Publications {
				all = append(all, viewPublication(p))
			}
			return all, nil
		},
		func(v publicationView) []string { return []string{v.Tenant, v.Name, v.Container, v.Node, v.Underlay} })
}

// newUnderlayList returns the command `pilaster underlay KIND list`.
func newUnderlayList[V any](
	env Env,
	kind, short string,
	head []string,
	list func(ctx context.Context, socket *orchestratorSocket, tenant string) ([]V, error),
	row func(V) []string,
) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant string
	command := "  pilaster underlay " + kind + " list"
	cmd := &cobra.Command{
		Use:     "list",
		Short:   short,
		Example: command + "\n" + command + " --tenant green -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			found, err := list(cmd.Context(), &socket, tenant)
			if err != nil {
				return err
			}
			views := append([]V{}, found...) // an empty list, not null, as JSON
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, strings.Join(head, "\t"))
				for _, v := range views {
					fmt.Fprintln(w, strings.Join(row(v), "\t"))
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "show only this tenant", socket.tenants)
	return cmd
}

func newUnderlayServiceDelete(env Env) *cobra.Command {
	return newUnderlayDelete(env, "underlay service",
		"Delete an underlay service; packets that containers send to it are dropped",
		"  pilaster underlay service delete storage --tenant green",
		func(ctx context.Context, socket *orchestratorSocket, tenant, name string) error {
			_, err := socket.client().DeleteUnderlayService(ctx,
				connect.NewRequest(&pilasterv1.DeleteUnderlayServiceRequest{Tenant: tenant, Name: name}))
			return err
		}, (*orchestratorSocket).underlayServices)
}

func newPublicationDelete(env Env) *cobra.Command {
	return newUnderlayDelete(env, "publication", "Delete a publication; its address is never reused",
		"  pilaster underlay publication delete web --tenant green",
		func(ctx context.Context, socket *orchestratorSocket, tenant, name string) error {
			_, err := socket.client().DeletePublication(ctx,
				connect.NewRequest(&pilasterv1.DeletePublicationRequest{Tenant: tenant, Name: name}))
			return err
		}, (*orchestratorSocket).publications)
}

// newUnderlayDelete returns the command that deletes an underlay service or a publication; what names the kind.
func newUnderlayDelete(
	env Env,
	what, short, example string,
	remove func(ctx context.Context, socket *orchestratorSocket, tenant, name string) error,
	known func(socket *orchestratorSocket, ctx context.Context, tenant string) ([]string, error),
) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant string
	cmd := &cobra.Command{
		Use:     "delete NAME",
		Short:   short,
		Example: example,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := remove(cmd.Context(), &socket, tenant, args[0]); err != nil {
				return err
			}
			deleted := struct {
				Tenant string `json:"tenant"`
				Name   string `json:"name"`
			}{tenant, args[0]}
			return out.print(env.Stdout, deleted, func(w io.Writer) {
				fmt.Fprintf(w, "%s %s of tenant %s deleted\n", what, args[0], tenant)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "tenant of the "+what, socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	cmd.ValidArgsFunction = names(func(ctx context.Context) ([]string, error) { return known(&socket, ctx, tenant) })
	return cmd
}
