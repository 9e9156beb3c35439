package cli

import (
	"net/netip"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/evpn/speaker"
	"pilaster.io/pilaster/internal/orchestrator/evpnroutes"
)

func TestPrintEVPN(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	s := evpnroutes.Status{Pool: netip.MustParsePrefix("10.1.0.0/24")}
	s.Skipped = map[string]string{"tenant wide": "its id is too high"}
	s.Status = speaker.Status{
		ASN: 65001, RouterID: netip.MustParseAddr("10.9.0.1"),
		Announced: map[evpn.Kind]int{evpn.KindPrefix: 1, evpn.KindMACIP: 2},
		Contested: []evpn.RecordKey{{Kind: evpn.RecordMAC, VNI: 7, MAC: evpn.MAC{2, 1}}},
		Peers: []speaker.PeerStatus{{
			Peer: bgp.Peer{Addr: netip.MustParseAddr("10.9.0.2"), ASN: 65002},
			PeerCount: evpn.PeerCount{
				Up: true, Routes: 10, Accepted: map[evpn.Kind]int{evpn.KindMACIP: 2},
				Refused: map[evpn.Reason]int{evpn.UnknownTarget: 8},
			},
			Since: now.Add(-time.Minute),
		}, {
			Peer:  bgp.Peer{Addr: netip.MustParseAddr("10.9.0.3"), ASN: 65003},
			Since: now.Add(-time.Second), Reason: "more than 10 routes", Restart: now.Add(time.Minute),
		}},
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 3, ' ', 0)
	printEVPN(w, s, now)
	w.Flush()
	want := `AS          65001
router ID   10.9.0.1
VTEP pool   10.1.0.0/24
announced   2 mac-ip, 1 prefix
imported    none

PEER       AS      STATE   SINCE   ROUTES   ACCEPTED   REFUSED   STALE
10.9.0.2   65002   up      1m0s    10       2 mac-ip   8         0
10.9.0.3   65003   down    1s      0        none       0         0

refused routes of peer 10.9.0.2:
  8   target: no route target is one of a tenant of this cluster

peer 10.9.0.3 is down: more than 10 routes
peer 10.9.0.3 is started again in 1m0s

tenant wide is not announced: its id is too high

also announced by others: 02:01:00:00:00:00 of VNI 7
`
	if b.String() != want {
		t.Errorf("printed\n%s\nwant\n%s", b.String(), want)
	}
}
