package cli

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/announce"
)

// bindBGP adds the flags of BGP peers to which addresses of services are announced.
func bindBGP(f *pflag.FlagSet, to *announce.Flags) {
	f.StringSliceVar(&to.Peers, "bgp-peer", nil,
		"BGP peers to which external and load-balancer addresses of services are announced, ADDRESS[:PORT][=ASN]; "+
			"without an ASN that of --bgp-asn")
	f.Uint32Var(&to.ASN, "bgp-asn", 0, "number of this cluster's autonomous system")
	f.StringVar(&to.RouterID, "bgp-router-id", "",
		"BGP identifier of this orchestrator, an IPv4 address (default: another one at each start)")
	f.IntVar(&to.NextHops, "bgp-next-hops", announce.DefaultNextHops, fmt.Sprintf(
		"maximum nodes by which an address is announced, 1 to %d; peers need ADD-PATH for more than one",
		announce.MaxNextHops))
	f.DurationVar(&to.Restart, "bgp-restart-time", announce.DefaultRestart,
		"how long peers keep the routes while this orchestrator is away (graceful restart, at most 4095s; 0: not)")
	f.StringVar(&to.PasswordFile, "bgp-password-file", "",
		"file with the password of TCP MD5 signatures for all these peers (RFC 2385)")
}

func newBGPCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bgp",
		Short: "Show which addresses of services are announced to BGP peers",
		Example: `  pilaster bgp status
  pilaster bgp status -o json`,
	}
	cmd.AddCommand(newBGPStatus(env))
	return cmd
}

func newBGPStatus(env Env) *cobra.Command {
	return newOrchestratorStatus(env, orchestrator.BGPStatusPath, printBGP, cobra.Command{
		Short: "Show BGP peers, and by which nodes each address is announced",
		Long: `Show the BGP peers of the orchestrator on this machine, the external and load-balancer addresses of
services, and by which nodes each is announced. A node that does not answer the orchestrator's probes is
no next hop.`,
		Example: "  pilaster bgp status\n  pilaster bgp status -o json",
	})
}

func printBGP(w io.Writer, s announce.Status, now time.Time) {
	fmt.Fprintf(w, "AS\t%d\n", s.ASN)
	fmt.Fprintf(w, "router ID\t%v\n", s.RouterID)
	if s.Error != "" {
		fmt.Fprintf(w, "error\t%s\n", s.Error)
	}
	fmt.Fprintln(w, "\nPEER\tAS\tSTATE\tSINCE")
	for _, p := range s.Peers {
		state := "down"
		if p.Up {
			state = "up"
		}
		fmt.Fprintf(w, "%v\t%d\t%s\t%v\n", p.Addr, p.ASN, state, now.Sub(p.Since).Round(time.Second))
	}
	for _, p := range s.Peers {
		if !p.Up && p.Reason != "" {
			fmt.Fprintf(w, "\npeer %v is down: %s\n", p.Addr, p.Reason)
		}
	}
	fmt.Fprintln(w, "\nADDRESS\tTENANT\tNODES\tSILENT")
	for _, a := range s.Addresses {
		fmt.Fprintf(w, "%v\t%s\t%s\t%s\n", a.Address, a.Tenant, nodeNames(a.Nodes), nodeNames(a.Silent))
	}
	for _, a := range s.Addresses {
		if a.Reason != "" {
			fmt.Fprintf(w, "\n%v is not announced: %s\n", a.Address, a.Reason)
		}
	}
}

func nodeNames(nodes []announce.Node) string {
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	return cmp.Or(strings.Join(names, ","), "-")
}
