package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/evpn/speaker"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/evpnroutes"
)

// bindEVPN adds the flags of an orchestrator's BGP peers.
func bindEVPN(f *pflag.FlagSet, to *evpnroutes.Flags) {
	f.StringSliceVar(&to.Peers, "evpn-peer", nil,
		"BGP peers for network evpn, ADDRESS[:PORT][=ASN]; without an ASN that of --evpn-asn")
	f.Uint32Var(&to.ASN, "evpn-asn", 0, "number of this cluster's autonomous system")
	f.StringVar(&to.RouterID, "evpn-router-id", "",
		"BGP identifier of this orchestrator, an IPv4 address (default: another one at each start)")
	f.StringVar(&to.Pool, "evpn-vtep-pool", "",
		"IPv4 prefix of the nodes' tunnel addresses; fixed when it is first used, equal on all orchestrators")
	f.StringSliceVar(&to.VTEPs, "evpn-allow-vtep", nil,
		"IPv4 prefixes of other speakers' tunnel addresses; routes to other ones are not imported")
	f.StringSliceVar(&to.Allow, "evpn-allow", nil,
		"prefixes outside of a tenant's CIDRs that are imported for it, TENANT=PREFIX")
	f.DurationVar(&to.Stale, "evpn-stale", speaker.DefaultStale,
		"how long the routes of a lost BGP peer are used")
	f.IntVar(&to.Limits.Routes, "evpn-max-routes", speaker.DefaultRoutes,
		"maximum routes of a BGP peer, refused ones included; a peer with more is shut down")
	f.DurationVar(&to.Limits.Restart, "evpn-restart", speaker.DefaultRestart,
		"how long a BGP peer above --evpn-max-routes is shut down")
}

func newEVPNCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "evpn",
		Short: "Show the exchange of routes with BGP peers",
		Example: `  pilaster evpn status
  pilaster evpn status -o json`,
	}
	cmd.AddCommand(newEVPNStatus(env))
	return cmd
}

func newEVPNStatus(env Env) *cobra.Command {
	return newOrchestratorStatus(env, orchestrator.EVPNStatusPath, printEVPN, cobra.Command{
		Short: "Show BGP peers, their routes by type, and why routes are refused",
		Long: `Show the BGP peers of the orchestrator on this machine, their routes by type, and why routes are refused.
docs/explanation/evpn.md explains the reasons.`,
		Example: "  pilaster evpn status\n  pilaster evpn status -o json",
	})
}

func printEVPN(w io.Writer, s evpnroutes.Status, now time.Time) {
	fmt.Fprintf(w, "AS\t%d\n", s.ASN)
	fmt.Fprintf(w, "router ID\t%v\n", s.RouterID)
	fmt.Fprintf(w, "VTEP pool\t%v\n", s.Pool)
	fmt.Fprintf(w, "announced\t%s\n", counts(s.Announced))
	fmt.Fprintf(w, "imported\t%s\n", counts(s.Records))
	if s.Error != "" {
		fmt.Fprintf(w, "error\t%s\n", s.Error)
	}
	fmt.Fprintln(w, "\nPEER\tAS\tSTATE\tSINCE\tROUTES\tACCEPTED\tREFUSED\tSTALE")
	for _, p := range s.Peers {
		state, refused := "down", 0
		if p.Up {
			state = "up"
		}
		for _, n := range p.Refused {
			refused += n
		}
		fmt.Fprintf(w, "%v\t%d\t%s\t%v\t%d\t%s\t%d\t%d\n", p.Addr, p.ASN, state, now.Sub(p.Since).Round(time.Second),
			p.Routes, counts(p.Accepted), refused, p.Stale)
	}
	for _, p := range s.Peers {
		printPeer(w, p, now)
	}
	for _, what := range slices.Sorted(maps.Keys(s.Skipped)) {
		fmt.Fprintf(w, "\n%s is not announced: %s\n", what, s.Skipped[what])
	}
	for _, k := range s.Contested {
		fmt.Fprintf(w, "\nalso announced by others: %s of VNI %d\n", contested(k), k.VNI)
	}
	if s.Unreplicated > 0 {
		fmt.Fprintf(w, "\n%d VTEPs receive no replicated frames: a segment has at most %d\n",
			s.Unreplicated, evpn.MaxMembers)
	}
}

// printPeer prints what an administrator may have to do something about.
func printPeer(w io.Writer, p speaker.PeerStatus, now time.Time) {
	if !p.Up && p.Reason != "" {
		fmt.Fprintf(w, "\npeer %v is down: %s\n", p.Addr, p.Reason)
	}
	if !p.Restart.IsZero() {
		fmt.Fprintf(w, "peer %v is started again in %v\n", p.Addr, p.Restart.Sub(now).Round(time.Second))
	}
	if len(p.Refused) == 0 {
		return
	}
	fmt.Fprintf(w, "\nrefused routes of peer %v:\n", p.Addr)
	for _, r := range evpn.Reasons() {
		if n := p.Refused[r]; n > 0 {
			fmt.Fprintf(w, "  %d\t%v: %s\n", n, r, r.Text())
		}
	}
}

func contested(k evpn.RecordKey) string {
	if k.Kind == evpn.RecordMAC {
		return k.MAC.String()
	}
	return k.Prefix.Addr().String()
}

// counts returns "2 mac-ip, 1 prefix", in the order of the kinds.
func counts[K interface {
	cmp.Ordered
	fmt.Stringer
}](of map[K]int) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(of)) {
		if of[k] > 0 {
			parts = append(parts, fmt.Sprintf("%d %v", of[k], k))
		}
	}
	return cmp.Or(strings.Join(parts, ", "), "none")
}
