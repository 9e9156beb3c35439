package cli

import (
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
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// leavingView is the progress of a tenant's migration.
type leavingView struct {
	Network   string           `json:"network"`   // the old network; empty in the second step
	Endpoints uint32           `json:"endpoints"` // with addresses of the old network
	Moved     uint32           `json:"moved"`     // of Endpoints, those that also have addresses of the new network
	Nodes     []movingNodeView `json:"nodes"`

	// With kept addresses, Endpoints are all, and Moved are those that send by the tenant's network and receive by
	// both.
	KeepsAddresses bool `json:"keepsAddresses"`
	Joining        bool `json:"joining"` // Network is the one that the tenant will move to
}

// movingNodeView is the progress of a node.
type movingNodeView struct {
	Name      string `json:"name"`
	Connected bool   `json:"connected"`
	Knows     bool   `json:"knows"` // the node has confirmed the migration
	Endpoints uint32 `json:"endpoints"`
	Moved     uint32 `json:"moved"`
	Problem   string `json:"problem,omitempty"`
}

// viewLeaving returns nil if the tenant is not migrating and all nodes have removed the addresses of the old network.
func viewLeaving(t *pilasterv1.Tenant, hosting []*pilasterv1.Hosting) *leavingView {
	v := &leavingView{
		Network: t.Leaving, Nodes: []movingNodeView{},
		KeepsAddresses: tenant.KeepsAddresses(t.Network, t.Leaving), Joining: t.Joining,
	}
	for _, h := range hosting {
		m := h.Moving
		if t.Leaving != "" && !store.HasReported(t, m) {
			m = nil
		}
		if h.Tenant != t.Name || m == nil && t.Leaving == "" {
			continue
		}
		v.Nodes = append(
			v.Nodes,
			movingNodeView{h.Node, h.Connected, m != nil, m.GetEndpoints(), m.GetMoved(), m.GetProblem()},
		)
		v.Endpoints += m.GetEndpoints()
		v.Moved += m.GetMoved()
	}
	if t.Leaving == "" && len(v.Nodes) == 0 {
		return nil
	}
	return v
}

// late describes the nodes that have not completed the step.
func (v *leavingView) late() (words []string) {
	for _, n := range v.Nodes {
		var why string
		switch {
		case v.Network == "":
			why = humanize.Of(n.Endpoints, "endpoint", "endpoints") + " left"
		case !n.Knows:
			why = "has not confirmed"
		case n.Moved == n.Endpoints && (!v.KeepsAddresses || n.Problem == ""):
			continue
		default:
			why = fmt.Sprintf("%d of %d endpoints", n.Moved, n.Endpoints)
		}
		if !n.Connected {
			why += ", away"
		}
		if n.Problem != "" {
			why += ": " + n.Problem
		}
		words = append(words, fmt.Sprintf("%s (%s)", n.Name, why))
	}
	return words
}

func (v *leavingView) describe(to string) string {
	if v.Network == "" {
		return "nodes remove the old network: " + humanize.Of(v.Endpoints, "endpoint", "endpoints") + " left"
	}
	if v.Joining {
		return fmt.Sprintf("%d of %d endpoints receive by network %s too, and send by network %s%s", v.Moved,
			v.Endpoints, v.Network, to, v.silent())
	}
	if v.KeepsAddresses {
		return fmt.Sprintf("%d of %d endpoints send by network %s, and still receive by network %s too%s", v.Moved,
			v.Endpoints, to, v.Network, v.silent())
	}
	return fmt.Sprintf("%d of %d endpoints have addresses of network %s too%s", v.Moved, v.Endpoints, to, v.silent())
}

// silent says how many nodes have not reported. The endpoints of these nodes are not counted.
func (v *leavingView) silent() string {
	n := 0
	for _, node := range v.Nodes {
		if !node.Knows {
			n++
		}
	}
	switch n {
	case 0:
		return ""
	case 1:
		return ", 1 node has not reported"
	}
	return fmt.Sprintf(", %s have not reported", humanize.Of(n, "node", "nodes"))
}

// network returns the text for the network column of tenant list.
func (v tenantView) network() string {
	switch l := v.Leaving; {
	case l == nil || l.Network == "":
		return v.Network
	case l.Joining:
		return fmt.Sprintf("%s (joins %s, %d/%d%s)", v.Network, l.Network, l.Moved, l.Endpoints, l.silent())
	default:
		return fmt.Sprintf("%s (leaves %s, %d/%d%s)", v.Network, l.Network, l.Moved, l.Endpoints, l.silent())
	}
}

func newTenantMigrate(env Env) *cobra.Command {
	_, targets := tenant.Migrations()
	target := tenant.OneOf(targets)
	var socket orchestratorSocket
	var out output
	var to, addressing string
	wait := 30 * time.Second
	var finish, force bool
	cmd := &cobra.Command{
		Use:   "migrate NAME",
		Short: "Move a tenant to another network, with its running containers",
		Long: `Move a tenant ` + movesText() + `,
with its running containers, in two steps.

To network netpila: with --to, new containers get only addresses of the new network. Running containers
get an address of the new network in addition to those that they have. Both work: existing connections
continue, and new ones can use the new addresses.

With --finish, the addresses of the old network are removed from containers, nodes and cluster, and
connections that use them end. IPv4 addresses go too: netpila has no IPv4, no underlay services and no
publications. The command refuses this until all nodes have completed the first step, and while the
tenant has underlay services or publications. A disconnected node completes the step when it reconnects.

Between nimitz and evpn containers keep their addresses, connections continue, and no packet is lost.
With --to, all containers first receive by both networks, and when all nodes have reported that, they
send by the new one. With --finish the tenant leaves the old network, when all nodes have reported that.
--to with the old network goes back. --to is refused while a node with the tenant's containers does not
have the new network, or while the tenant uses what the new network lacks: underlay services,
publications and other regions on evpn, routes of other EVPN speakers on nimitz; and to evpn if its id is above 65535.

All other moves are refused with the reason.

Both steps can be repeated: the command then continues to wait for the nodes.`,
		Example: "  pilaster tenant migrate green --to netpila\n  pilaster tenant migrate green --to netpila " +
			"--addressing clear --wait 5m\n  pilaster tenant migrate green --finish",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := migration(args[0], to, addressing, finish, force)
			if err != nil {
				return err
			}
			client := socket.client()
			already, err := alreadyMoved(cmd.Context(), client, req)
			if err != nil {
				return err
			}
			v, err := migrate(cmd.Context(), client, req, wait, env.Stderr)
			if err != nil {
				return err
			}
			return out.print(env.Stdout, v, func(w io.Writer) {
				switch {
				case already:
					fmt.Fprintf(w, "tenant %s is on network %s already and is not migrating; nothing was changed\n",
						v.Name, v.Network)
					return
				case v.Leaving == nil:
					fmt.Fprintf(w, "tenant %s is only on network %s\n", v.Name, v.Network)
					return
				case v.Leaving.KeepsAddresses:
					fmt.Fprintf(w, "tenant %s: %s\nto remove it from network %s, run: pilaster tenant migrate %s "+
						"--finish\n", v.Name, v.Leaving.describe(v.Network), v.Leaving.Network, v.Name)
					return
				}
				fmt.Fprintf(
					w,
					"tenant %s: %s\nwhen nothing uses the addresses of network %s any longer, run: pilaster tenant "+
						"migrate %s --finish\nthat removes its IPv4 addresses, and is refused while it has underlay "+
						"services or publications:\nnetwork netpila has none of these\n",
					v.Name,
					v.Leaving.describe(v.Network),
					v.Leaving.Network,
					v.Name,
				)
			})
		},
	}
	socket.bind(cmd)
	cmd.ValidArgsFunction = names(socket.tenants)
	out.bind(cmd)
	f := cmd.Flags()
	fixed := func(flag string, values ...string) {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	f.StringVar(&to, "to", "", "the first step: the network to move to, "+target)
	fixed("to", targets...)
	f.StringVar(
		&addressing,
		"addressing",
		"",
		"with --to netpila: the addresses that containers see, encrypted or clear (default encrypted)",
	)
	fixed("addressing", string(tenant.Encrypted), string(tenant.Clear))
	f.BoolVar(&finish, "finish", false, "the second step: remove the old addresses")
	f.BoolVar(
		&force,
		"force",
		false,
		"with --finish: also if some containers have no other address yet, or send by the old network; they have no "+
			"network until their node reconnects",
	)
	f.Var((*atMost)(&wait), "wait", "how long to wait for the nodes")
	return cmd
}

func migration(name, to, addressing string, finish, force bool) (*pilasterv1.MigrateTenantRequest, error) {
	req := &pilasterv1.MigrateTenantRequest{Name: name, To: to, Finish: finish, Force: force}
	_, targets := tenant.Migrations()
	switch {
	case finish == (to != ""):
		return nil, usage("use --to %s, or --finish after that step is complete", tenant.OneOf(targets))
	case finish && addressing != "", force && !finish:
		return nil, usage("--addressing is for --to %s, and --force for --finish", tenant.OneOf(targets))
	case !finish && !slices.Contains(targets, to):
		return nil, usage("--to %q: tenants can migrate only to %s%s", to, tenant.OneOf(targets), whyNot(to))
	}
	switch tenant.Addressing(addressing) {
	case "":
	case tenant.Encrypted:
		req.Addressing = pilasterv1.Addressing_ADDRESSING_ENCRYPTED
	case tenant.Clear:
		req.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
	default:
		return nil, usage("addressing %q: use encrypted or clear", addressing)
	}
	return req, nil
}

// movesText names the possible moves.
func movesText() string {
	from, _ := tenant.Migrations()
	var moves []string
	for _, n := range from {
		moves = append(moves, "from network "+n+" to "+tenant.OneOf(tenant.MovesFrom(n)))
	}
	return strings.Join(moves, ", or ")
}

// whyNot says why tenants cannot move to a network of this build.
func whyNot(to string) string {
	if _, known := tenant.TraitsOf(to); !known || to == "" {
		return ""
	}
	return "; not to " + to + "\n  " + strings.Join(tenant.WhyNot(to), "\n  ")
}

// alreadyMoved reports whether a second step has nothing to do: the tenant has no address of another network. It may
// have migrated earlier, or been on the network from the beginning.
func alreadyMoved(
	ctx context.Context,
	client pilasterv1connect.OperatorServiceClient,
	req *pilasterv1.MigrateTenantRequest,
) (bool, error) {
	if !req.Finish {
		return false, nil
	}
	got, err := client.GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: req.Name}))
	if err != nil {
		return false, err
	}
	return viewHosted(got.Msg).Leaving == nil, nil
}

// migrate starts a step, prints the progress, and returns the tenant when all nodes have completed the step.
func migrate(
	ctx context.Context,
	client pilasterv1connect.OperatorServiceClient,
	req *pilasterv1.MigrateTenantRequest,
	wait time.Duration,
	progress io.Writer,
) (tenantView, error) {
	if _, err := client.MigrateTenant(ctx, connect.NewRequest(req)); err != nil {
		return tenantView{}, err
	}
	last := ""
	for end := time.Now().Add(wait); ; {
		got, err := client.GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: req.Name}))
		if err != nil {
			return tenantView{}, fmt.Errorf(
				"%w\n  the step has started and the nodes continue it; `pilaster tenant get %s` shows the progress",
				err,
				req.Name,
			)
		}
		v := viewHosted(got.Msg)
		if v.Leaving == nil {
			return v, nil
		}
		late := v.Leaving.late()
		if len(late) == 0 && !req.Finish && !v.Leaving.Joining {
			return v, nil
		}
		if len(late) == 0 && v.Leaving.Joining && v.Leaving.Network == req.To {
			if _, err := client.MigrateTenant(ctx, connect.NewRequest(req)); err != nil { // the second part of the step
				return v, err
			}
		}
		if now := v.Leaving.describe(v.Network); now != last {
			fmt.Fprintln(progress, now)
			last = now
		}
		if time.Now().After(end) {
			return v, fmt.Errorf(
				"tenant %s: not all nodes have completed the step: %s\n  nothing is lost: reconnect the nodes that "+
					"are disconnected, delete those that no longer exist, and repeat the command to continue to wait",
				v.Name,
				strings.Join(late, "; "),
			)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return v, ctx.Err()
		}
	}
}
