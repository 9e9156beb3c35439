package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

func newServiceCommand(env Env) *cobra.Command {
	networks := tenant.NetworksWith(tenant.Services)
	cmd := &cobra.Command{
		Use:   "service",
		Short: "Give many containers of network " + networks + " one stable address",
		Long: `Give many containers of network ` + networks + ` one stable address.

Containers of a tenant reach its services at addresses that never change, also when keys rotate; other
tenants do not reach them. A connection to a service goes to one of its endpoints: the containers that a
selector selects, or fixed ones. The words are those of Kubernetes, and "apply" reads its documents.`,
		Example: "  pilaster service create web --tenant blue --port 80:8080 --select app=web\n" +
			"  pilaster service describe web --tenant blue",
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newServiceCreate(env), newServiceApply(env), newServiceList(env), newServiceDescribe(env),
		newServiceDelete(env), newServicePool(env))
	return cmd
}

// ofTenant binds the flag --tenant, which must be set.
func ofTenant(cmd *cobra.Command, to *string, socket *orchestratorSocket) {
	namedFlag(cmd, to, "tenant", "tenant of the service", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
}

func newServiceApply(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var files documentFiles
	var of string
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Create or change services: all in the files, or none",
		Long: `Create or change services: all in the files, or none. The documents are those of Kubernetes: Service
of v1, and EndpointSlice of discovery.k8s.io/v1 for fixed endpoints. Fields that have no effect here are
refused. Services that are not in the files stay. An EndpointSlice without endpoints is deleted.

The address of a service and whether it is headless cannot change. What hosts outside reach can; a port
whose nodePort is not in the file keeps the one that it has, and so does a service of type LoadBalancer
without loadBalancerIP. A document without a namespace describes a service of containers that have none.`,
		Example: "  pilaster service apply -f web.yaml --tenant blue\n" +
			"  pilaster service apply -f web.yaml --tenant blue --dry-run",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := readServices(env, files.names)
			if err != nil {
				return err
			}
			req.Tenant, req.DryRun = of, dryRun
			resp, err := socket.client().ApplyServices(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			views := []serviceView{}
			for _, a := range resp.Msg.Services {
				v, err := viewService(a.Service)
				if err != nil {
					return err
				}
				v.Action, v.DryRun = a.Action, dryRun
				views = append(views, v)
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				for _, v := range views {
					fmt.Fprintf(w, "service %s %s%s\n", v.called(), v.Action, choose(dryRun, " (dry run)", ""))
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	files.bind(
		cmd,
		"file with services in YAML or JSON; \"---\" lines separate documents; - is standard input; may be repeated",
	)
	_ = cmd.MarkFlagRequired("filename")
	ofTenant(cmd, &of, &socket)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would change, and change nothing")
	return cmd
}

// readServices reads the documents of files.
func readServices(env Env, files []string) (*pilasterv1.ApplyServicesRequest, error) {
	req := new(pilasterv1.ApplyServicesRequest)
	for _, file := range files {
		text, err := readFile(env, file)
		if err != nil {
			return nil, err
		}
		services, all, err := service.ParseManifests(text)
		if err != nil {
			return nil, usage("%s: %w; nothing was changed", file, err)
		}
		for _, is := range services {
			req.Services = append(req.Services, is.Proto())
		}
		for _, is := range all {
			req.Slices = append(req.Slices, is.Proto())
		}
	}
	return req, nil
}

func newServiceList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var of string
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show services with the number of their endpoints",
		Example: "  pilaster service list\n  pilaster service list --tenant blue -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().ListServices(cmd.Context(),
				connect.NewRequest(&pilasterv1.ListServicesRequest{Tenant: of}))
			if err != nil {
				return err
			}
			views := []serviceView{}
			for _, s := range resp.Msg.Services {
				v, err := viewService(s.Service)
				if err != nil {
					return err
				}
				v.Counts = &serviceCounts{s.Ready, s.Endpoints}
				views = append(views, v)
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "TENANT\tNAME\tADDRESS\tPORTS\tEXPOSED\tREADY")
				for _, v := range views {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d/%d\n", v.Tenant, v.called(), v.at(), v.ports(),
						cmp.Or(v.exposed(), "-"), v.Counts.Ready, v.Counts.All)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &of, "tenant", "only services of this tenant", socket.tenants)
	return cmd
}

func newServiceDescribe(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var of, node string
	cmd := &cobra.Command{
		Use:   "describe NAME",
		Short: "Show a service, and why endpoints get connections or do not",
		Long: `Show a service, and why endpoints get connections or do not. NAME is NAMESPACE/NAME for a service of a
namespace. A ready endpoint gets new connections. A serving one gets them because none is ready. A draining
one gets none, but its TCP connections go on until it is gone. With --node, the states are those for clients
on this node.`,
		Example: "  pilaster service describe web --tenant blue\n" +
			"  pilaster service describe shop/web --tenant blue --node n1",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			v, err := socket.describeService(cmd.Context(), of, args[0], node)
			if err != nil {
				return err
			}
			return out.print(env.Stdout, v, func(w io.Writer) { printService(w, v) })
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	ofTenant(cmd, &of, &socket)
	namedFlag(cmd, &node, "node", "node of the clients", socket.nodes)
	cmd.ValidArgsFunction = names(func(ctx context.Context) ([]string, error) { return socket.services(ctx, of) })
	return cmd
}

func (s *orchestratorSocket) describeService(ctx context.Context, of, name, node string) (v serviceView, err error) {
	resp, err := s.client().GetService(ctx, connect.NewRequest(&pilasterv1.GetServiceRequest{Tenant: of, Name: name}))
	if err != nil {
		return v, err
	}
	if v, err = viewService(resp.Msg.Service); err != nil {
		return v, err
	}
	is, err := service.FromProto(resp.Msg.Service)
	if err != nil {
		return v, err
	}
	var all []service.Slice
	for _, m := range resp.Msg.Slices {
		slice, err := service.SliceFromProto(m)
		if err != nil {
			return v, err
		}
		all = append(all, slice)
	}
	zone := ""
	if node != "" {
		at, err := s.client().GetNode(ctx, connect.NewRequest(&pilasterv1.GetNodeRequest{Name: node}))
		if err != nil {
			return v, err
		}
		zone = zoneOf(node, at.Msg.Node.Rack, all)
	}
	ready, endpoints := service.Ready(is, all)
	v.Counts = &serviceCounts{uint32(ready), uint32(endpoints)}
	v.Endpoints, v.Nodes = states(is, all, node, zone), append([]string{}, resp.Msg.Nodes...)
	return v, nil
}

func (s *orchestratorSocket) services(ctx context.Context, of string) (all []string, err error) {
	resp, err := s.client().ListServices(ctx, connect.NewRequest(&pilasterv1.ListServicesRequest{Tenant: of}))
	if err == nil {
		for _, is := range resp.Msg.Services {
			all = append(all, service.Name{Namespace: is.Service.Namespace, Name: is.Service.Name}.String())
		}
	}
	return all, err
}

func newServiceDelete(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var of string
	cmd := &cobra.Command{
		Use:     "delete NAME",
		Short:   "Delete a service; its address is not used again",
		Example: "  pilaster service delete web --tenant blue\n  pilaster service delete shop/web --tenant blue",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := socket.client().DeleteService(cmd.Context(), connect.NewRequest(
				&pilasterv1.DeleteServiceRequest{Tenant: of, Name: args[0]})); err != nil {
				return err
			}
			deleted := struct {
				Tenant string `json:"tenant"`
				Name   string `json:"name"`
			}{of, args[0]}
			return out.print(env.Stdout, deleted, func(w io.Writer) {
				fmt.Fprintf(w, "service %s of tenant %s deleted\n", args[0], of)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	ofTenant(cmd, &of, &socket)
	cmd.ValidArgsFunction = names(func(ctx context.Context) ([]string, error) { return socket.services(ctx, of) })
	return cmd
}

// servicePoolView is a pool of load-balancer addresses as JSON.
type servicePoolView struct {
	Prefix    string `json:"prefix"`
	Allocated uint64 `json:"allocated"` // addresses that services have
}

func viewServicePools(pools []*pilasterv1.ServicePool) []servicePoolView {
	views := []servicePoolView{}
	for _, p := range pools {
		views = append(views, servicePoolView{p.Prefix, p.Allocated})
	}
	return views
}

func newServicePool(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pool",
		Short: "Set the pools of load-balancer addresses",
		Long: `Set the pools of load-balancer addresses: prefixes of /64 to /128, at most 16 in a cluster. A service
with --load-balancer, or of type LoadBalancer, gets an address of a pool. The fabric must route the pools to nodes that
host the tenants, or learn the addresses by BGP ("pilaster bgp").`,
		Example: "  pilaster service pool add 2001:db8:8::/112\n  pilaster service pool list",
		Args:    cobra.NoArgs,
	}
	change := func(
		ctx context.Context, s *orchestratorSocket, m *pilasterv1.ChangeServicePoolsRequest,
	) (any, error) {
		resp, err := s.client().ChangeServicePools(ctx, connect.NewRequest(m))
		if err != nil {
			return nil, err
		}
		return viewServicePools(resp.Msg.Pools), nil
	}
	add := prefixChange{
		verb: "add", short: "Add pools", done: "added", example: "pilaster service pool add 2001:db8:8::/112",
		change: func(ctx context.Context, s *orchestratorSocket, p []string) (any, error) {
			return change(ctx, s, &pilasterv1.ChangeServicePoolsRequest{Add: p})
		},
	}
	remove := prefixChange{
		verb: "remove", short: "Remove pools of which no service has a load-balancer address", done: "removed",
		example: "pilaster service pool remove 2001:db8:8::/112", known: (*orchestratorSocket).servicePools,
		change: func(ctx context.Context, s *orchestratorSocket, p []string) (any, error) {
			return change(ctx, s, &pilasterv1.ChangeServicePoolsRequest{Remove: p})
		},
	}
	cmd.AddCommand(add.command(env), remove.command(env), newServicePoolList(env))
	return cmd
}

func (s *orchestratorSocket) servicePools(ctx context.Context) (all []string, err error) {
	resp, err := s.client().ListServicePools(ctx, connect.NewRequest(&pilasterv1.ListServicePoolsRequest{}))
	if err != nil {
		return nil, err
	}
	for _, p := range resp.Msg.Pools {
		all = append(all, p.Prefix)
	}
	return all, nil
}

func newServicePoolList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show pools with the number of addresses that services have",
		Example: "  pilaster service pool list",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().ListServicePools(cmd.Context(),
				connect.NewRequest(&pilasterv1.ListServicePoolsRequest{}))
			if err != nil {
				return err
			}
			views := viewServicePools(resp.Msg.Pools)
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "POOL\tALLOCATED")
				for _, v := range views {
					fmt.Fprintf(w, "%s\t%d\n", v.Prefix, v.Allocated)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	return cmd
}
