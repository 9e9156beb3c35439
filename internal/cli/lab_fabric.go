package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

func newLabPing(env Env, flags *labFlags) *cobra.Command {
	withCIDRs := tenant.NetworksWith(tenant.OwnCIDRs)
	var out output
	var o packet.PingOptions
	c := &cobra.Command{
		Use:               "ping [FROM TO]",
		ValidArgsFunction: flags.offer(2, cobra.ShellCompDirectiveNoFileComp, (*lab.Lab).PingTargets),
		Short:             "Ping from one container or node to another, or between all containers",
		Long: `Ping from one container or node to another. The command fails if no answer arrives.
Without names, ping between all containers. The command then fails if two containers of one tenant do not
reach each other although policies allow it, if they do although policies deny it ("denied" marks pairs that
policies deny), or if two containers of different tenants reach each other. While a tenant migrates to another network,
its containers are pinged at their addresses of both networks. If the address of another tenant's container
is also in a CIDR of FROM's tenant (overlapping CIDRs of network ` + withCIDRs + `), the command sends nothing and
prints "own".`,
		Example: "  pilaster lab ping\n  pilaster lab ping b1 b3\n  pilaster lab ping -o json",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 0 && len(args) != 2 {
				return fmt.Errorf("name both FROM and TO, or neither")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if o.Count < 1 || o.Timeout <= 0 {
				return usage("--count %d and --timeout %v: both must be more than 0", o.Count, o.Timeout)
			}
			l, err := flags.open()
			if err != nil {
				return err
			}
			if len(args) == 2 {
				return pingPair(c.Context(), env, l, args[0], args[1], o, &out)
			}
			return pingAll(c.Context(), env, l, o, &out)
		},
	}
	c.Flags().IntVarP(&o.Count, "count", "c", 3, "echo requests to send")
	c.Flags().DurationVarP(&o.Timeout, "timeout", "W", 500*time.Millisecond, "how long to wait for each answer")
	out.bind(c)
	return c
}

func pingPair(ctx context.Context, env Env, l *lab.Lab, from, to string, o packet.PingOptions, out *output) error {
	echoes, err := l.PingEach(ctx, from, to, o)
	if err != nil {
		return err
	}
	err = out.print(env.Stdout, echoes, func(w io.Writer) {
		for _, e := range echoes {
			if len(echoes) > 1 { // on two networks
				fmt.Fprintf(w, "at %v: ", e.Address)
			}
			fmt.Fprintln(w, describeEcho(l, e))
		}
	})
	if err == nil && slices.ContainsFunc(echoes, func(e lab.Echo) bool { return !e.Reached() }) {
		return &exitError{code: ExitFailed}
	}
	return err
}

func describeEcho(l *lab.Lab, e lab.Echo) string {
	if own, err := l.Container(e.Own); err == nil {
		return fmt.Sprintf(
			"%s → %s: nothing sent, because %v is the address of %s in tenant %s too",
			e.From,
			e.To,
			e.Address,
			own.Name,
			own.Tenant,
		)
	}
	if e.Sent == 0 {
		return fmt.Sprintf("%s → %s: no route, nothing sent", e.From, e.To)
	}
	s := fmt.Sprintf("%s → %s: %d of %d answered", e.From, e.To, e.Received, e.Sent)
	if e.RTTUs != nil {
		s += fmt.Sprintf(", %.0f µs", *e.RTTUs)
	}
	if e.ToNode != "" && !e.Reached() {
		s += fmt.Sprintf("; containers of tenant %s do not reach %s: run `pilaster lab exec --lab %s "+
			"orchestrator -- pilaster tenant set %s --nodes allow` first", e.ToNode, e.To, l.Name(), e.ToNode)
	}
	return s
}

func outcome(e lab.Echo) string {
	switch {
	case e.Reached():
		return "ok"
	case e.Own != "":
		return "own"
	case e.Denied:
		return "denied"
	case e.Sent == 0:
		return "no route"
	}
	return "drop"
}

// complaint describes an unexpected result; it returns "" if the result is as expected. The parameter must is true if
// the two containers reach each other without policies.
func complaint(e lab.Echo, must bool) string {
	switch {
	case must && !e.Denied && !e.Reached():
		return fmt.Sprintf("%s does not reach %s at %v", e.From, e.To, e.Address)
	case must && e.Denied && e.Reached():
		return fmt.Sprintf("%s reaches %s at %v, although policies deny it", e.From, e.To, e.Address)
	case !must && e.Reached():
		return fmt.Sprintf("%s reaches %s, of another tenant or region", e.From, e.To)
	}
	return ""
}

func pingAll(ctx context.Context, env Env, l *lab.Lab, o packet.PingOptions, out *output) error {
	echoes, err := l.PingAll(ctx, o)
	if err != nil {
		return err
	}
	unknown := l.MarkDenied(ctx, echoes)
	var wrong []string
	cell, own := map[[2]string]string{}, 0
	for _, e := range echoes {
		if e.Own != "" {
			own++
		}
		must, err := l.MustReach(e.From, e.To)
		if err != nil {
			return err
		}
		// During a migration, a pair of containers has one echo per network: show both outcomes.
		if at := [2]string{e.From, e.To}; cell[at] != outcome(e) {
			cell[at] = strings.TrimPrefix(cell[at]+", "+outcome(e), ", ")
		}
		if what := complaint(e, must); what != "" {
			wrong = append(wrong, what)
		}
	}
	err = out.print(env.Stdout, echoes, func(w io.Writer) {
		containers := l.Containers()
		fmt.Fprint(w, "FROM")
		for _, to := range containers {
			fmt.Fprintf(w, "\t%s", to.Name)
		}
		for _, from := range containers {
			fmt.Fprintf(w, "\n%s (%s, %s)", from.Name, from.Tenant, from.Node)
			for _, to := range containers {
				fmt.Fprintf(w, "\t%s", cmp.Or(cell[[2]string{from.Name, to.Name}], "–"))
			}
		}
		fmt.Fprintf(w, "\n%d of %d as expected\n", len(echoes)-own-len(wrong), len(echoes)-own)
		if own > 0 {
			fmt.Fprintln(w, "own: the container's address is also in a CIDR of FROM's tenant, so nothing was sent")
		}
		if slices.ContainsFunc(echoes, func(e lab.Echo) bool { return e.Denied }) {
			fmt.Fprintln(w, "denied: policies deny the echo; pilaster why on a node of the pair shows the rule")
		}
		if unknown != nil {
			fmt.Fprintf(w, "policies of some pairs are unknown, so these pairs count as allowed: %v\n",
				strings.ReplaceAll(unknown.Error(), "\n", "; "))
		}
	})
	if err == nil && len(wrong) > 0 {
		return fmt.Errorf("%s", strings.Join(wrong, "\n  "))
	}
	return err
}

func newLabRoute(env Env, flags *labFlags) *cobra.Command {
	return &cobra.Command{
		Use:               "route ADDRESS NODE",
		Short:             "Have the fabric route an address to a node, such as an external address of a service",
		Example:           "  pilaster lab route 2001:db8:7::9 n1",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: flags.offer(2, cobra.ShellCompDirectiveNoFileComp, (*lab.Lab).NodeNames),
		RunE: func(c *cobra.Command, args []string) error {
			to, err := netip.ParseAddr(args[0])
			if err != nil || !to.Is6() || to.Is4In6() {
				return usage("%q is not an IPv6 address", args[0])
			}
			l, err := flags.open()
			if err != nil {
				return err
			}
			if err := l.Route(to, args[1]); err != nil {
				return err
			}
			fmt.Fprintf(env.Stdout, "%v is routed to %s\n", to, args[1])
			return nil
		},
	}
}

func newLabAllowSource(env Env, flags *labFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "allow-source PREFIX",
		Short: "Have the fabric accept packets with a source prefix from all nodes",
		Long: `Have the fabric accept packets with a source prefix from all nodes. Nodes answer from external addresses
of services, and the fabric's source check drops such packets. "pilaster lab route" does this for one
address and node.`,
		Example: "  pilaster lab allow-source 2001:db8:7::/64",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			prefix, err := netip.ParsePrefix(args[0])
			if err != nil || !prefix.Addr().Is6() || prefix != prefix.Masked() {
				return usage("%q is not an IPv6 prefix, such as 2001:db8:7::/64", args[0])
			}
			l, err := flags.open()
			if err != nil {
				return err
			}
			if err := l.AllowSource(prefix); err != nil {
				return err
			}
			fmt.Fprintf(env.Stdout, "nodes may send from %v\n", prefix)
			return nil
		},
	}
}
