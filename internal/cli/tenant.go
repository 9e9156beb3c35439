package cli

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// tenantView is a tenant as JSON.
type tenantView struct {
	Name       string            `json:"name"`
	Addressing tenant.Addressing `json:"addressing"`
	IDs        []tenantIDView    `json:"ids"` // in the order made
	Created    time.Time         `json:"created"`
	Apps       []appView         `json:"apps,omitzero"`  // of tenant get
	Nodes      []hostView        `json:"nodes,omitzero"` // of tenant get: those that host it
}

type appView struct {
	ID     uint32            `json:"id"`
	Labels map[string]string `json:"labels"`
}

func viewTenant(t *pilasterv1.Tenant) tenantView {
	v := tenantView{Name: t.Name, Addressing: tenant.Encrypted, Created: t.Created.AsTime()}
	if t.Addressing == pilasterv1.Addressing_ADDRESSING_CLEAR {
		v.Addressing = tenant.Clear
	}
	v.IDs = viewIDs(t.Ids)
	return v
}

func (v tenantView) ids() string {
	var ids []string
	for _, id := range v.IDs {
		ids = append(ids, fmt.Sprint(id.ID))
	}
	return strings.Join(ids, ",")
}

func newTenantCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "tenant",
		Short:   "Make, show and delete tenants",
		Example: "  pilaster tenant create blue\n  pilaster tenant list -o json",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(newTenantCreate(env), newTenantGet(env), newTenantList(env), newTenantRotateKey(env), newTenantDelete(env))
	return cmd
}

func newTenantCreate(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	addressing := string(tenant.Encrypted)
	cmd := &cobra.Command{
		Use:     "create NAME",
		Short:   "Make a tenant with an id and a random key",
		Example: "  pilaster tenant create blue\n  pilaster tenant create red --addressing clear",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &pilasterv1.CreateTenantRequest{Name: args[0]}
			switch tenant.Addressing(addressing) {
			case tenant.Encrypted:
				req.Addressing = pilasterv1.Addressing_ADDRESSING_ENCRYPTED
			case tenant.Clear:
				req.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
			default:
				return usage("addressing %q: say encrypted or clear", addressing)
			}
			resp, err := socket.client().CreateTenant(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			v := viewTenant(resp.Msg.Tenant)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(w, "tenant %s created: id %s, %s\n", v.Name, v.ids(), v.Addressing)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.Flags().StringVar(&addressing, "addressing", addressing, "what its containers see: encrypted or clear addresses")
	_ = cmd.RegisterFlagCompletionFunc("addressing", cobra.FixedCompletions([]string{string(tenant.Encrypted), string(tenant.Clear)}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
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
			resp, err := socket.client().GetTenant(cmd.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: args[0], ShowKey: showKey}))
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
	cmd.Flags().BoolVar(&showKey, "show-key", false, "show the keys; who has them can tell where the tenant's containers are")
	return cmd
}

func printTenant(w io.Writer, v tenantView) {
	fmt.Fprintf(w, "name\t%s\naddressing\t%s\ncreated\t%s\n", v.Name, v.Addressing, moment(v.Created))
	for _, id := range v.IDs {
		fmt.Fprintf(w, "id\t%d\t%s\n", id.ID, id.describe())
	}
	for _, a := range v.Apps {
		fmt.Fprintf(w, "app\t%d\t%s\n", a.ID, cmp.Or(tenant.Canonical(a.Labels), "without labels"))
	}
	fmt.Fprintf(w, "nodes\t%s\n", orNone(describeNodes(v.Nodes)))
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
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
			resp, err := socket.client().ListTenants(cmd.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
			if err != nil {
				return err
			}
			views := []tenantView{}
			for _, t := range resp.Msg.Tenants {
				views = append(views, viewTenant(t))
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "NAME\tADDRESSING\tIDS\tCREATED")
				for _, v := range views {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", v.Name, v.Addressing, v.ids(), moment(v.Created))
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
		Short:   "Delete a tenant that has no containers; its ids are never used again",
		Example: "  pilaster tenant delete blue",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := socket.client().DeleteTenant(cmd.Context(), connect.NewRequest(&pilasterv1.DeleteTenantRequest{Name: args[0]})); err != nil {
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
