package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// serviceView is a service as JSON.
type serviceView struct {
	Tenant  string `json:"tenant,omitempty"`
	Name    string `json:"name"`
	Virtual string `json:"virtual,omitempty"` // address for containers
	Real    string `json:"real,omitempty"`    // address on the underlay
}

func viewService(s *pilasterv1.UnderlayService) serviceView {
	return serviceView{s.GetTenant(), s.GetName(), s.GetVirtual(), s.GetReal()}
}

func newServiceCommand(env Env) *cobra.Command {
	networks := tenant.NetworksWith(tenant.NorthSouth)
	cmd := &cobra.Command{
		Use:   "service",
		Short: "Give containers of network " + networks + " access to underlay services",
		Long: `Give containers of network ` + networks +
			` access to underlay services: storage, or any other server outside the
overlay.

Containers of the tenant reach a service at a virtual address that the tenant chooses; other tenants do
not reach it. The gateway of the container's node translates both addresses, so the service sees the
gateway's address. UnderlayServices are IPv6 only.`,
		Example: "  pilaster service create storage --tenant green --virtual fd09::7 --real 2001:db8::9\n  pilaster " +
			"service list",
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newServiceCreate(env), newServiceList(env), newServiceDelete(env))
	return cmd
}

// namedFlag adds a flag for the name of a tenant or of a node, with completion.
func namedFlag(cmd *cobra.Command, to *string, flag, usage string, ask func(context.Context) ([]string, error)) {
	cmd.Flags().Var((*filled)(to), flag, usage)
	offered := names(ask)
	_ = cmd.RegisterFlagCompletionFunc(
		flag,
		func(c *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return offered(c, nil, typed)
		},
	)
}

// filled is a flag that rejects an empty value, because an unset variable of a script must not select all tenants.
type filled string

func (f *filled) String() string { return string(*f) }
func (f *filled) Type() string   { return "string" }
func (f *filled) Set(text string) error {
	if text == "" {
		return errors.New("it is empty; omit it, or set a value")
	}
	*f = filled(text)
	return nil
}

// addressFlag adds a required flag for an address.
func addressFlag(cmd *cobra.Command, to *string, flag, usage string) {
	cmd.Flags().StringVar(to, flag, "", usage)
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.NoFileCompletions)
	_ = cmd.MarkFlagRequired(flag)
}

// checkAddress returns an error if text is not an IPv6 address.
func checkAddress(flag, text string) error {
	if a, err := netip.ParseAddr(text); err != nil || !a.Is6() || a.Is4In6() {
		return usage("%s %q is not an IPv6 address; gateways support only IPv6", flag, text)
	}
	return nil
}

func newServiceCreate(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant, virtual, real string
	cmd := &cobra.Command{
		Use:     "create NAME",
		Short:   "Give a tenant's containers access to an underlay service",
		Example: "  pilaster service create storage --tenant green --virtual fd09::7 --real 2001:db8::9",
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
			v := viewService(resp.Msg.Service)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"service %s of tenant %s created: containers reach %s at %s\n",
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
	namedFlag(cmd, &tenant, "tenant", "tenant whose containers reach the service", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	addressFlag(cmd, &virtual, "virtual", "address at which containers reach the service, outside the tenant's CIDRs")
	addressFlag(cmd, &real, "real", "address of the service on the underlay")
	return cmd
}

func newServiceList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant string
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show services",
		Example: "  pilaster service list\n  pilaster service list --tenant green -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ListUnderlayServices(cmd.Context(), connect.NewRequest(&pilasterv1.ListUnderlayServicesRequest{Tenant: tenant}))
			if err != nil {
				return err
			}
			views := []serviceView{}
			for _, s := range resp.Msg.UnderlayServices {
				views = append(views, viewService(s))
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "TENANT\tNAME\tVIRTUAL\tREAL")
				for _, v := range views {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", v.Tenant, v.Name, v.Virtual, v.Real)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "show only this tenant", socket.tenants)
	return cmd
}

func newServiceDelete(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant string
	cmd := &cobra.Command{
		Use:     "delete NAME",
		Short:   "Delete a service; packets that containers send to it are dropped",
		Example: "  pilaster service delete storage --tenant green",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := socket.client().DeleteUnderlayService(cmd.Context(),
				connect.NewRequest(&pilasterv1.DeleteUnderlayServiceRequest{Tenant: tenant, Name: args[0]})); err != nil {
				return err
			}
			return out.print(env.Stdout, serviceView{Tenant: tenant, Name: args[0]}, func(w io.Writer) {
				fmt.Fprintf(w, "service %s of tenant %s deleted\n", args[0], tenant)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "tenant of the service", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	cmd.ValidArgsFunction = names(func(ctx context.Context) ([]string, error) { return socket.services(ctx, tenant) })
	return cmd
}
