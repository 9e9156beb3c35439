package cli

import (
	"context"
	"fmt"
	"io"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

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
		Example: "  pilaster publication create web --tenant green --container fd12:3456::5 --node n1\n  pilaster " +
			"publication list",
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newPublicationCreate(env), newPublicationList(env), newPublicationDelete(env))
	return cmd
}

func newPublicationCreate(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant, container, node string
	cmd := &cobra.Command{
		Use:     "create NAME",
		Short:   "Publish a container at an address of a node's gateway",
		Example: "  pilaster publication create web --tenant green --container fd12:3456::5 --node n1",
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

func newPublicationList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant string
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show publications and their addresses",
		Example: "  pilaster publication list\n  pilaster publication list --tenant green -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ListPublications(cmd.Context(), connect.NewRequest(&pilasterv1.ListPublicationsRequest{Tenant: tenant}))
			if err != nil {
				return err
			}
			views := []publicationView{}
			for _, p := range resp.Msg.Publications {
				views = append(views, viewPublication(p))
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "TENANT\tNAME\tCONTAINER\tNODE\tUNDERLAY")
				for _, v := range views {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", v.Tenant, v.Name, v.Container, v.Node, v.Underlay)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "show only this tenant", socket.tenants)
	return cmd
}

func newPublicationDelete(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant string
	cmd := &cobra.Command{
		Use:     "delete NAME",
		Short:   "Delete a publication; its address is never reused",
		Example: "  pilaster publication delete web --tenant green",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := socket.client().DeletePublication(cmd.Context(),
				connect.NewRequest(&pilasterv1.DeletePublicationRequest{Tenant: tenant, Name: args[0]})); err != nil {
				return err
			}
			return out.print(env.Stdout, publicationView{Tenant: tenant, Name: args[0]}, func(w io.Writer) {
				fmt.Fprintf(w, "publication %s of tenant %s deleted\n", args[0], tenant)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "tenant of the publication", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	cmd.ValidArgsFunction = names(
		func(ctx context.Context) ([]string, error) { return socket.publications(ctx, tenant) },
	)
	return cmd
}
