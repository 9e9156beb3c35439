package datapath

import (
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/network/nimitz/gateway"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// TestGatewayLimit: a container can have MostConnections connections to services, also after rules were replaced, by
// this or another process. At the limit, its connections and those of other containers continue; when some end, it can
// open new ones. A flow without answers counts once, however many datagrams it has.
func TestGatewayLimit(t *testing.T) {
	w := newUnderlayWire(t)
	greedy, modest := w.add(t, 1, 7, 2), w.add(t, 1, 8, 2)
	name := netip.MustParseAddr("fd10:9::9")
	w.toService(t, 1, 7, greedy, name, w.hostAddr)
	w.toService(t, 1, 8, modest, name, w.hostAddr)
	to := netip.AddrPortFrom(name, echoServer(t, w.host, netip.AddrPortFrom(w.hostAddr, 0)).Port())
	var sink net.PacketConn
	must(t, w.host.Do(func() (err error) {
		sink, err = net.ListenPacket("udp", netip.AddrPortFrom(w.hostAddr, to.Port()).String())
		return err
	}))
	arrived := make(chan bool, 1) // one of the flow
	var reading sync.WaitGroup
	t.Cleanup(func() { sink.Close(); reading.Wait() })
	reading.Go(func() {
		for b := make([]byte, 64); ; {
			n, _, err := sink.ReadFrom(b)
			if err != nil {
				return
			}
			if n > 0 {
				select {
				case arrived <- true:
				default:
				}
			}
		}
	})
	block, _ := address.DefaultPlan().GatewayBlock(w.nodes[0].prefix, false)
	virtual := nimitz.ContainerAddress(block, greedy.record.ID)

	inside, err := netns.Open(w.paths[0])
	must(t, err)
	defer inside.Close()
	var tracked *netlink.Handle
	must(t, inside.Do(func() (err error) {
		tracked, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	}))
	defer tracked.Close()
	connections := func() (n int) {
		all, err := tracked.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET6)
		must(t, err)
		for _, flow := range all {
			if from, _ := netip.AddrFromSlice(flow.Forward.SrcIP); from == virtual {
				n++
			}
		}
		return n
	}
	refused := func() uint64 {
		drops, err := w.gateways[0].Drops(t.Context())
		must(t, err)
		return drops[dropreason.ConnectionLimit]
	}
	inject, err := packet.NewInjector(greedy.ns, "eth0")
	must(t, err)
	defer inject.Close()
	send := func(n int, datagram func() packet.UDP) {
		must(t, inject.Burst(n, func(int) []byte {
			return packet.Packet{
				Source:      greedy.record.Attachments[1].Address,
				Destination: name,
				Body:        datagram(),
			}.Frame(
				pipeline.OutsideMAC,
				pipeline.InsideMAC,
			)
		}))
	}
	port := uint16(1024)
	begin := func(n int) {
		send(n, func() packet.UDP { port++; return packet.UDP{SourcePort: port, DestinationPort: to.Port()} })
	}
	flow := func(n int) {
		send(n, func() packet.UDP {
			return packet.UDP{SourcePort: 1000, DestinationPort: to.Port(), Payload: []byte("flow")}
		})
	}
	// goesOn checks that new datagrams of the flow arrive and that none is refused.
	goesOn := func(when string) {
		t.Helper()
		before := refused()
		for range 10 {
			flow(100)
			select {
			case <-arrived:
			case <-time.After(patience):
				t.Fatalf("%s the flow that was there does not go on", when)
			}
		}
		if n := refused() - before; n != 0 {
			t.Errorf("%s %d datagrams of the flow that was there are refused", when, n)
		}
	}
	// beginUntilRefused opens connections until the gateway refuses one.
	beginUntilRefused := func(when string) {
		t.Helper()
		before := refused()
		for end := time.Now().Add(patience); refused() == before; begin(512) {
			if time.Now().After(end) || port > 3*gateway.MostConnections {
				t.Fatalf("%s: %d connections, and none is refused", when, connections())
			}
		}
		if n := connections(); n > gateway.MostConnections || n < gateway.MostConnections*9/10 {
			t.Errorf("%s: %d connections, want %d", when, n, gateway.MostConnections)
		}
		goesOn(when)
	}
	for range 100 {
		begin(1)
		flow(100)
	}
	if connections() != 101 || refused() != 0 {
		t.Fatalf(
			"a flow of 10,000 datagrams and 100 of one are %d connections, and %d datagrams are refused",
			connections(),
			refused(),
		)
	}
	beginUntilRefused("at first")
	must(t, w.gateways[0].Publish(t.Context(), map[netip.Addr]netip.Addr{}))
	beginUntilRefused("after the rules were replaced")
	must(t, w.gateways[0].Close())
	another, err := nftables.New(nftables.WithNetNSFd(inside.FD()))
	must(t, err)
	nothing := nftables.ChainPolicyDrop
	another.AddChain(&nftables.Chain{
		Table: another.AddTable(
			&nftables.Table{Family: nftables.TableFamilyIPv6, Name: "pilaster-limits"},
		), Name: "through",
		Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
		Policy: &nothing,
	})
	must(t, another.Flush())
	must(t, w.nodes[0].ns.Do(func() error { return w.openGateway(t, 0) }))
	beginUntilRefused("by another process, after a build with other limits")
	if _, err := converse(t.Context(), modest.ns, to, 1000); err != nil {
		t.Errorf("another container: %v", err)
	}

	must(t, w.gateways[0].Keep(t.Context(), nil, map[netip.Addr]bool{}))
	before := refused()
	if _, err := converse(t.Context(), greedy.ns, to, 1000); err != nil || refused() != before {
		t.Errorf("when they have ended: %v", err)
	}
}
