package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/tenant"
)

// phaseEnded is the phase of an offload that no longer exists.
const phaseEnded = "ended"

func newOffloadCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "offload",
		Short: "Look up a tenant's rules for containers of a busy node on idle nodes",
		Long: `Look up a tenant's rules for containers of a busy node on idle nodes, for tenants of network ` +
			tenant.NetworksWith(tenant.Offloads) + `.

An offload concerns all containers of one tenant on one node, the backend. Other nodes send packets for
them to frontends, which look up the rules and forward the packets to the backend with the result. The
sessions stay at the backend.`,
		Example: "  pilaster offload start green --node n1\n  pilaster offload list",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(
		newOffloadStart(env), newOffloadList(env), newOffloadGet(env), newOffloadStop(env), newOffloadAuto(env))
	return cmd
}

func newOffloadStart(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var node string
	var frontends []string
	var dryRun, force bool
	count, wait := 4, 30*time.Second
	cmd := &cobra.Command{
		Use:   "start TENANT --node NODE",
		Short: "Start an offload, and wait until it is active",
		Long: `Start an offload, and wait until it is active.

The orchestrator chooses connected nodes as frontends: first those of the node's rack, then those with
containers of the tenant, then those with the least load. While the frontends load the rules, packets go
to the node as before; if one does not load them in 8 s, the start is undone. A frontend that fails later
is replaced.

The command is refused if the tenant has no policies, if a node cannot take part, or if a connected node
with containers of the tenant reserves too few bytes of its MTU; the message names these nodes.

It is also refused, except with --force, if the estimated gain is below 1: where lookups are short, the way
by a frontend costs more than they do. The gain is how many times more connections the programs could set
up. Use --force to free room for rules on the node, or to try an offload.`,
		Example: "  pilaster offload start green --node n1 --dry-run\n  pilaster offload start green --node n1 " +
			"--frontends 2\n  pilaster offload start green --node n1 --frontend n2 --frontend n3",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			named := cmd.Flags().Changed("frontend")
			if named && cmd.Flags().Changed("frontends") {
				return usage("use --frontend or --frontends, not both")
			}
			req, err := offloading(args[0], node, count, frontends, named, dryRun)
			if err != nil {
				return err
			}
			req.Force = force
			client := socket.client()
			resp, err := client.StartOffload(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return offloadView{Tenant: args[0], Node: node}.interrupted(cmd.Context(), err)
			}
			if req.Count == 1 {
				fmt.Fprintln(env.Stderr, "warning: a single frontend that fails is not replaced while its agent is "+
					"connected and it is the only frontend of the cluster, which is more than half; use two or more")
			}
			v := viewOffload(resp.Msg.Offload)
			if !dryRun && wait > 0 {
				v, err = awaitOffload(cmd.Context(), client, v, awaiting{
					phase: string(tenant.OffloadActive), wait: wait, progress: env.Stderr,
				})
				if err != nil {
					return err
				}
			}
			v.Prefixes, v.DryRun = resp.Msg.Prefixes, dryRun
			v.Gain, v.Estimate = resp.Msg.Gain, resp.Msg.Estimate
			return out.print(env.Stdout, v, v.printStarted)
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.ValidArgsFunction = names(socket.tenants)
	namedFlag(cmd, &node, "node", "node of the containers", socket.nodes)
	_ = cmd.MarkFlagRequired("node")
	f := cmd.Flags()
	f.IntVar(&count, "frontends", count, "number of frontends: 1, 2, 4 or 8")
	_ = cmd.RegisterFlagCompletionFunc(
		"frontends",
		cobra.FixedCompletions([]string{"1", "2", "4", "8"}, cobra.ShellCompDirectiveNoFileComp),
	)
	f.StringSliceVar(&frontends, "frontend", nil, "use this node as frontend; repeat the flag for 2, 4 or 8")
	_ = cmd.RegisterFlagCompletionFunc(
		"frontend",
		func(c *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			all, directive := names(socket.nodes)(c, nil, typed)
			used := func(n string) bool { return n == node || slices.Contains(frontends, n) }
			return slices.DeleteFunc(all, used), directive
		},
	)
	f.BoolVar(&dryRun, "dry-run", false,
		"only check, and print the frontends, the containers and the estimated gain; change nothing")
	f.BoolVar(&force, "force", false, "start the offload also if the estimate is a loss")
	f.Var((*atMost)(&wait), "wait", "how long to wait until the offload is active; 0: do not wait")
	_ = cmd.RegisterFlagCompletionFunc("wait", cobra.NoFileCompletions)
	return cmd
}

// offloading returns the request of a command line.
func offloading(
	name, node string,
	count int,
	frontends []string,
	named, dryRun bool,
) (*pilasterv1.StartOffloadRequest, error) {
	if named && (len(frontends) == 0 || slices.Contains(frontends, "")) {
		return nil, usage("--frontend is empty; omit it, or name nodes")
	}
	if named {
		count = len(frontends)
	}
	if count < 1 || count > tenant.MaxActive || count&(count-1) != 0 {
		return nil, usage("an offload has 1, 2, 4 or %d frontends, not %d", tenant.MaxActive, count)
	}
	return &pilasterv1.StartOffloadRequest{
		Tenant: name, Node: node, Count: uint32(count), Frontends: frontends, DryRun: dryRun,
	}, nil
}

// awaitOffload waits until an offload has a phase, prints the progress, and returns the offload. After the phase ended
// it returns the last state with that phase.
func awaitOffload(
	ctx context.Context,
	client pilasterv1connect.OperatorServiceClient,
	v offloadView,
	until awaiting,
) (offloadView, error) {
	last := ""
	for end := time.Now().Add(until.wait); ; {
		resp, err := client.ListOffloads(
			ctx, connect.NewRequest(&pilasterv1.ListOffloadsRequest{Tenant: v.Tenant}))
		if err != nil {
			return v, v.interrupted(ctx, fmt.Errorf(
				"%w\n  the step has started and the nodes continue it; %s shows the progress", err, v.command("get")))
		}
		had, reason := v, ""
		v.Phase, v.Awaited, v.Frontends = phaseEnded, nil, slices.Clone(v.Frontends)
		for i := range v.Frontends {
			v.Frontends[i].Active = false
		}
		for _, s := range resp.Msg.Offloads {
			if s.Offload.Id == had.ID {
				v = viewOffload(s)
				reason = v.stopped()
			}
		}
		for _, e := range resp.Msg.Ended {
			if e.Id == had.ID {
				reason = e.Reason
			}
		}
		switch {
		case v.Phase == until.phase:
			return v, nil
		case v.Phase == phaseEnded || until.phase != phaseEnded && v.ends():
			return v, fmt.Errorf("the offload of tenant %s on node %s has been stopped (phase %s): %s", v.Tenant,
				v.Node, v.Phase, cmp.Or(reason, "by another command, or by another orchestrator"))
		}
		if now := v.progress(); now != last {
			fmt.Fprintln(until.progress, now)
			last = now
		}
		if time.Now().After(end) {
			return v, fmt.Errorf("the offload of tenant %s on node %s is in phase %s after %v%s\n  %s", v.Tenant,
				v.Node, v.Phase, until.wait, v.obstacles(), v.advice(until))
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return v, v.interrupted(ctx, ctx.Err())
		}
	}
}

func newOffloadList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var of, node string
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show offloads, and problems of the cluster and of nodes",
		Example: "  pilaster offload list\n  pilaster offload list --tenant green -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().ListOffloads(
				cmd.Context(), connect.NewRequest(&pilasterv1.ListOffloadsRequest{Tenant: of, Node: node}))
			if err != nil {
				return err
			}
			all := offloadsView{
				Automatic: resp.Msg.Automatic, Problems: append([]string{}, resp.Msg.Problems...),
				Offloads: []offloadView{},
			}
			for _, s := range resp.Msg.Offloads {
				all.Offloads = append(all.Offloads, viewOffload(s))
			}
			return out.print(env.Stdout, all, all.text)
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &of, "tenant", "show only this tenant", socket.tenants)
	namedFlag(cmd, &node, "node", "show only containers of this node", socket.nodes)
	return cmd
}

func newOffloadGet(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var node string
	cmd := &cobra.Command{
		Use:     "get TENANT --node NODE",
		Short:   "Show an offload, and which nodes its next step waits for",
		Example: "  pilaster offload get green --node n1",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			resp, err := socket.client().ListOffloads(
				cmd.Context(), connect.NewRequest(&pilasterv1.ListOffloadsRequest{Tenant: args[0], Node: node}))
			if err != nil {
				return err
			}
			if len(resp.Msg.Offloads) == 0 {
				return fmt.Errorf(
					"the containers of tenant %s on node %q are not offloaded; `pilaster offload list` lists the "+
						"offloads",
					args[0],
					node,
				)
			}
			v := viewOffload(resp.Msg.Offloads[0])
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"tenant\t%s\nnode\t%s\nid\t%d\nphase\t%s\nsince\t%s\nstarted\t%s\nfrontends\t%s\nwanted\t%s\n"+
						"containers\t%s\n",
					v.Tenant,
					v.Node,
					v.ID,
					v.Phase,
					moment(v.Since),
					v.startedBy(),
					v.frontends(),
					v.wanted(),
					v.containers(),
				)
				for _, c := range v.Changes {
					fmt.Fprintf(w, "change\t%s %s\n", moment(c.At), c.Text)
				}
				for _, p := range v.Problems {
					fmt.Fprintf(w, "problem\t%s\n", p)
				}
				if len(v.Awaited) > 0 {
					fmt.Fprintf(w, "waits for\t%s\n", v.awaited())
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.ValidArgsFunction = names(socket.offloaded)
	bindBackend(cmd, &node, &socket)
	_ = cmd.MarkFlagRequired("node")
	return cmd
}

func newOffloadStop(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var node string
	var now bool
	wait := 30 * time.Second
	cmd := &cobra.Command{
		Use:   "stop TENANT --node NODE",
		Short: "Stop an offload, and wait until it has ended",
		Long: `Stop an offload, and wait until it has ended.

First the node loads its rules again, while the frontends go on; then packets go to it. With --now they
go to it at once: until it has its rules it drops packets that it cannot judge. Use --now if the node
cannot be reached by the orchestrator, or if the frontends fail.`,
		Example: "  pilaster offload stop green --node n1",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			client := socket.client()
			resp, err := client.StopOffload(
				cmd.Context(),
				connect.NewRequest(&pilasterv1.StopOffloadRequest{Tenant: args[0], Node: node, Now: now}),
			)
			if err != nil {
				return offloadView{Tenant: args[0], Node: node}.interrupted(cmd.Context(), err)
			}
			v := viewOffload(resp.Msg.Offload)
			if wait > 0 {
				until := awaiting{phase: phaseEnded, now: now, wait: wait, progress: env.Stderr}
				if v, err = awaitOffload(cmd.Context(), client, v, until); err != nil {
					return err
				}
			}
			return out.print(env.Stdout, v, func(w io.Writer) {
				if v.Phase == phaseEnded {
					fmt.Fprintf(w, "the offload of tenant %s on node %s has ended\n", v.Tenant, v.Node)
					return
				}
				fmt.Fprintf(
					w,
					"the offload of tenant %s on node %s ends; its phase is %s, with %s\n",
					v.Tenant,
					v.Node,
					v.Phase,
					humanize.Of(len(v.Frontends), "frontend", "frontends"),
				)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.ValidArgsFunction = names(socket.offloaded)
	bindBackend(cmd, &node, &socket)
	_ = cmd.MarkFlagRequired("node")
	cmd.Flags().BoolVar(&now, "now", false, "do not wait until the node has its rules")
	cmd.Flags().Var((*atMost)(&wait), "wait", "how long to wait until the offload has ended; 0: do not wait")
	_ = cmd.RegisterFlagCompletionFunc("wait", cobra.NoFileCompletions)
	return cmd
}

func newOffloadAuto(env Env) *cobra.Command {
	var socket orchestratorSocket
	cmd := &cobra.Command{
		Use:   "auto [on|off]",
		Short: "Let offloads start and end by the nodes' loads, or not",
		Long: `Let offloads start and end by the nodes' loads, or not.

While it is on, all nodes measure their packet load. A node at 70 % of its CPUs for packets or of its rule
table for 3 s gets an offload of the tenant that needs most, if the estimate is a gain. If a frontend is at
40 % because of what it does for others, the number of frontends doubles. When the node would be below 50 %
with its rules for a minute, they return. Offloads that an operator started do not end by themselves.

After "off", offloads that have started stay: ` + "`pilaster offload stop`" + ` ends them. In either case a
frontend that fails is replaced. Without an argument, the command shows the state.`,
		Example:   "  pilaster offload auto on\n  pilaster offload list",
		Args:      cobra.MaximumNArgs(1),
		ValidArgs: []string{"on", "off"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				resp, err := socket.client().ListOffloads(
					cmd.Context(), connect.NewRequest(&pilasterv1.ListOffloadsRequest{}))
				if err != nil {
					return err
				}
				state := "off: offloads start and end by command only"
				if resp.Msg.Automatic {
					state = "on: offloads start and end by the nodes' loads"
				}
				fmt.Fprintln(env.Stdout, state)
				return nil
			}
			on := args[0] == "on"
			if !on && args[0] != "off" {
				return usage("offload auto is on or off, not %q", args[0])
			}
			_, err := socket.client().SetOffloadAuto(
				cmd.Context(), connect.NewRequest(&pilasterv1.SetOffloadAutoRequest{On: on}))
			if err != nil {
				return err
			}
			if on {
				fmt.Fprintln(env.Stdout, "offloads start and end by the nodes' loads; nodes report within a minute")
			} else {
				fmt.Fprintln(env.Stdout, "offloads start and end by command only")
			}
			return nil
		},
	}
	socket.bind(cmd)
	return cmd
}

// offloaded returns the tenants with offloads.
func (s *orchestratorSocket) offloaded(ctx context.Context) (all []string, err error) {
	resp, err := s.client().ListOffloads(ctx, connect.NewRequest(&pilasterv1.ListOffloadsRequest{}))
	if err == nil {
		for _, o := range resp.Msg.Offloads {
			all = append(all, o.Tenant)
		}
	}
	return slices.Compact(all), err
}

// bindBackend adds the flag --node of a command about an offload. It completes nodes with offloads of the tenant.
func bindBackend(cmd *cobra.Command, node *string, socket *orchestratorSocket) {
	cmd.Flags().Var((*filled)(node), "node", "node of the containers")
	_ = cmd.RegisterFlagCompletionFunc(
		"node",
		func(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
			return names(func(ctx context.Context) (all []string, err error) {
				req := &pilasterv1.ListOffloadsRequest{Tenant: strings.Join(args, "")}
				resp, err := socket.client().ListOffloads(ctx, connect.NewRequest(req))
				if err != nil {
					return nil, err
				}
				for _, o := range resp.Msg.Offloads {
					all = append(all, o.Offload.GetNode())
				}
				slices.Sort(all)
				return slices.Compact(all), nil
			})(c, nil, typed)
		},
	)
}
