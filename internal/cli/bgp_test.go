package cli

import (
	"net/netip"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"pilaster.io/pilaster/internal/bgp"
	"pilaster.io/pilaster/internal/orchestrator/announce"
)

func TestPrintBGP(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	node := func(name string) announce.Node { return announce.Node{Name: name} }
	s := announce.Status{
		ASN: 65001, RouterID: netip.MustParseAddr("192.0.2.1"),
		Peers: []announce.PeerStatus{
			{Peer: bgp.Peer{Addr: netip.MustParseAddr("fd00::1"), ASN: 65002}, Up: true, Since: now.Add(-time.Minute)},
			{Peer: bgp.Peer{Addr: netip.MustParseAddr("fd00::2"), ASN: 65002}, Since: now, Reason: "not connected yet"},
		},
		Addresses: []announce.AddressStatus{
			{
				Address: netip.MustParseAddr("2001:db8:7::9"), Tenant: "blue",
				Nodes: []announce.Node{node("n2"), node("n1")}, Silent: []announce.Node{node("n3")},
			},
			{Address: netip.MustParseAddr("2001:db8:7::a"), Tenant: "blue", Reason: "no node hosts the tenant"},
		},
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 3, ' ', 0)
	printBGP(w, s, now)
	w.Flush()
	want := `AS          65001
router ID   192.0.2.1

PEER      AS      STATE   SINCE
fd00::1   65002   up      1m0s
fd00::2   65002   down    0s

peer fd00::2 is down: not connected yet

ADDRESS         TENANT   NODES   SILENT
2001:db8:7::9   blue     n2,n1   n3
2001:db8:7::a   blue     -       -

2001:db8:7::a is not announced: no node hosts the tenant
`
	if b.String() != want {
		t.Errorf("%s\nwant:\n%s", b.String(), want)
	}
}
