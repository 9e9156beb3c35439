package evpn_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/vishvananda/netlink"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/evpn"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

const (
	// movedAddress is the next address that the orchestrator allocates, so the next container gets it, and the MAC that
	// follows. There is no way to choose an address.
	movedAddress = "10.0.0.5"
	movedTo      = "10.71.0.2" // VTEP of node n2
)

// moved moves a host with its MAC and address from FRR's segment to a Pilaster node, and back, while c1 sends to it.
// Each speaker then announces it with a higher mobility sequence than the other, which withdraws its own route
// (RFC 7432 §15).
func (b bed) moved(n *frrNode) {
	mac := evpn.ContainerMAC(netip.MustParseAddr(movedAddress))
	away := namespace(b.T, "moving")
	// Without IPv6 the host sends nothing by itself, from which FRR's bridge would learn its MAC.
	must(b.T, away.Do(func() error { return writeSysctl("ipv6/conf/default/disable_ipv6", "1") }))
	n.plug(away, "to-moving", mac.String())
	host, arrivedAway, arrivedHere := handle(b.T, away), make(chan int, 1<<18), make(chan int, 1<<18)
	mappings := b.mappings("n1")
	appear := func() {
		up(b.T, host, "eth0", movedAddress+"/16")
		pings(away, segmentSide) // so that FRR knows the address
	}
	appear()
	b.Cleanup(receive(b.T, away, arrivedAway))
	stop := send(b.T, b.namespace("c1"), movedAddress, flowEvery)
	b.Cleanup(func() { stop() })
	further(b.T, "at FRR's host", arrivedAway)
	n.sees(b.T, mac, place{"", 0})

	// The host disappears. FRR's bridge still has its MAC, which FRR announces.
	eth0 := up(b.T, host, "eth0")
	address, err := netlink.ParseAddr(movedAddress + "/16")
	must(b.T, err)
	must(b.T, host.AddrDel(eth0, address))
	bridge, err := n.kern.LinkByName("br-l2")
	must(b.T, err)
	must(b.T, n.kern.NeighDel(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, IP: net.ParseIP(movedAddress)}))
	until(b.T, "without the host's address", func() bool { return b.mappings("n1") == mappings })
	must(b.T, b.AddContainer(labtest.Context(b.T), lab.Container{Name: "c4", Node: "n2", Tenant: "bronze"}))
	if is := b.address("c4"); is != movedAddress {
		b.Fatalf("c4 has %s, not %s", is, movedAddress)
	}
	c4 := b.namespace("c4")
	b.Cleanup(receive(b.T, c4, arrivedHere))
	n.sees(b.T, mac, place{movedTo, 1})
	further(b.T, "at the container", arrivedHere)
	until(b.T, "the switched host reaches the container", func() bool { return pings(n.switched, movedAddress) })
	b.contested(0)

	// The host appears again. The container keeps its address until it ends.
	appear()
	n.sees(b.T, mac, place{"", 2})
	b.contested(1) // the MAC: FRR's kernel keeps the container's entry for the address until it is withdrawn
	further(b.T, "at the container", arrivedHere)
	drain(arrivedAway)
	must(b.T, b.RemoveContainer(labtest.Context(b.T), "c4"))
	until(b.T, "datagrams at FRR's host again", func() bool {
		pings(away, segmentSide)
		return len(arrivedAway) > 0
	})
	further(b.T, "at FRR's host again", arrivedAway)
	n.sees(b.T, mac, place{"", 2})
	b.contested(0)
	until(b.T, "the switched host reaches FRR's host", func() bool { return pings(n.switched, movedAddress) })
}

func drain(arrived <-chan int) {
	for len(arrived) > 0 {
		<-arrived
	}
}

// further waits until datagrams that were not sent yet arrive.
func further(t *testing.T, where string, arrived <-chan int) {
	t.Helper()
	drain(arrived)
	late := time.After(patience)
	for range time.Second / flowEvery {
		select {
		case <-arrived:
		case <-late:
			t.Fatalf("no datagrams %s after %v", where, patience)
		}
	}
}

// place is where FRR has a MAC, and the mobility sequence there.
type place struct {
	vtep     string // empty at FRR itself
	sequence int
}

// sees waits until FRR has a MAC of the tenant's segment at a place.
func (n *frrNode) sees(t *testing.T, mac evpn.MAC, want place) {
	t.Helper()
	var text string
	defer func() {
		if t.Failed() {
			t.Logf("FRR has %s", text)
		}
	}()
	until(t, fmt.Sprintf("%v in FRR at %+v", mac, want), func() bool {
		text = n.Run(fmt.Sprintf("show evpn mac vni %d mac %v json", n.segment, mac))
		var all map[string]struct {
			VTEP                          string `json:"remoteVtep"`
			LocalSequence, RemoteSequence int
		}
		if json.Unmarshal([]byte(text), &all) != nil {
			return false
		}
		is := all[mac.String()]
		return want == place{is.VTEP, is.LocalSequence} && is.VTEP == "" ||
			want == place{is.VTEP, is.RemoteSequence} && is.VTEP != ""
	})
}

// mappings returns how many mappings of network evpn a node has.
func (b bed) mappings(node string) uint32 {
	b.Helper()
	s, err := b.Agent(node).Status(b.T.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
	must(b.T, err)
	for _, e := range s.Msg.Datapath.Entries {
		if e.Table == "evpn-forwarding" {
			return e.Used
		}
	}
	b.Fatalf("node %s has no table of mappings", node)
	return 0
}

// contested waits until others announce a number of the cluster's MACs and addresses too.
func (b bed) contested(n int) {
	b.Helper()
	until(b.T, fmt.Sprintf("with %d contested", n), func() bool {
		s, ok := evpnStatus(filepath.Join(b.Folder(), "orchestrator", "run"))
		return ok && len(s.Contested) == n
	})
}
