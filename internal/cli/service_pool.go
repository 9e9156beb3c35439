package cli

import (
	"context"
	"fmt"
	"io"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

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
