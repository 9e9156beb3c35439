package routing_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// both starts traffic from n1's container over r1, and traffic to this container over r2.
func both(t *testing.T) (*fabric, []*traffic) {
	t.Helper()
	f, all := start(t, 1)
	f.ip(t, "-6 route add default via R1")
	return f, append(all, startTraffic(t, f.lab, "far", "c0", firstListener, flows))
}

// TestUplinkFlaps: the programs stay attached while the uplink goes down and up, and packets pass as soon as the kernel
// has a route again.
func TestUplinkFlaps(t *testing.T) {
	t.Parallel()
	f, all := both(t)
	for _, c := range []struct {
		event string
		flap  func()
	}{
		{"the switch's port went down and up", func() {
			f.wire.down(t, "n1")
			loseSome(t, all)
			f.wire.up(t, "n1")
			f.wire.ready(t, "n1")
			f.node.ready(t, lab.Uplink)
		}},
		{"the uplink was set down and up, and got its address and route back", func() {
			f.node.down(t, lab.Uplink)
			loseSome(t, all)
			if left := f.addresses(t); len(left) > 0 {
				t.Errorf("the uplink kept %v", left)
			}
			f.node.up(t, lab.Uplink)
			f.node.give(t, lab.Uplink, nodeSide)
			f.ip(t, "-6 route add default via R1")
			f.node.ready(t, lab.Uplink)
		}},
	} {
		settle(t, all)
		since := time.Now()
		c.flap()
		away := time.Since(since)
		if losers := overcome(t, all, c.event, since, away+hopLife+probes*retrans); len(losers) != len(all)*flows {
			t.Errorf("%s: only %d flows lost packets: the uplink was not down", c.event, len(losers))
		}
	}
}

// loseSome waits until every flow has sent some more datagrams.
func loseSome(t *testing.T, all []*traffic) {
	t.Helper()
	const each = 10
	for _, s := range all {
		before := s.count()
		for ctx := labtest.Context(t); s.count() < before+each*flows; time.Sleep(interval) {
			must(t, context.Cause(ctx))
		}
	}
}

// addresses returns n1's addresses on its uplink, except the link-local one.
func (f *fabric) addresses(t *testing.T) (global []netlink.Addr) {
	t.Helper()
	all, err := netns.List(func() ([]netlink.Addr,
		error) {
		return f.node.AddrList(f.node.link(t, lab.Uplink), unix.AF_INET6)
	})
	must(t, err)
	for _, a := range all {
		if a.Scope == int(netlink.SCOPE_UNIVERSE) {
			global = append(global, a)
		}
	}
	return global
}

// TestUplinkShrinks: when the uplink's MTU becomes smaller, small packets still arrive. The sender of a packet that is
// now too long gets an error from its node, and the smaller packets that it sends afterwards arrive.
func TestUplinkShrinks(t *testing.T) {
	t.Parallel()
	const before, after = 1500, 1400
	f, all := both(t)
	settle(t, all)
	since := time.Now()
	for _, end := range []struct {
		place
		device string
	}{{f.node, lab.Uplink}, {f.wire, "n1"}} {
		retry(t, func() error { return end.LinkSetMTU(end.link(t, end.device), after) })
	}
	for _, s := range all {
		if losers := s.overcomes(t, "the uplink's MTU shrank", since, 0); len(losers) > 0 {
			t.Errorf("%v lost small packets", losers)
		}
	}
	f.sendLong(t, before)
	address, err := f.lab.Address("far")
	must(t, err)
	knows := []string{"ip", "-6", "route", "get", address.String()}
	if labtest.Device() == endpoint.Macvlan {
		knows = []string{"ip", "link", "show", lab.Interface} // its MTU decreases with the uplink's
	}
	if says, err := f.lab.Output(t.Context(), "c0", knows...); err != nil ||
		!strings.Contains(says, fmt.Sprint("mtu ", after)) {
		t.Errorf("the container has not learnt MTU %d: %q, %v", after, says, err)
	}
}

// sendLong sends datagrams of a length, including the IPv6 header, until one arrives.
func (f *fabric) sendLong(t *testing.T, length int) {
	t.Helper()
	const headers = 40 + 8
	address, err := f.lab.Address("far")
	must(t, err)
	to := netip.AddrPortFrom(address, firstListener+1)
	listener, sender := f.socket(t, "far", to), f.socket(t, "c0", netip.AddrPortFrom(netip.IPv6Unspecified(), 0))
	limit := time.Now().Add(hopLife + slack)
	for tries := 1; time.Now().Before(limit); tries++ {
		_, err := sender.WriteToUDPAddrPort(make([]byte, length-headers), to)
		must(t, err)
		must(t, listener.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
		n, err := listener.Read(make([]byte, length))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		must(t, err)
		if n != length-headers {
			t.Errorf("of %d bytes, only %d arrived", length-headers, n)
		}
		t.Logf("the first datagram of %d bytes that arrived was number %d", length, tries)
		return
	}
	t.Fatalf("no datagram of %d bytes arrived", length)
}

func (f *fabric) socket(t *testing.T, container string, at netip.AddrPort) (conn *net.UDPConn) {
	t.Helper()
	p := f.open(t, container)
	must(t, p.ns.Do(func() (err error) {
		conn, err = net.ListenUDP("udp6", net.UDPAddrFromAddrPort(at))
		return err
	}))
	t.Cleanup(func() { conn.Close() })
	return conn
}
