package routing_test

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// advertiser is a router that sends advertisements every sixth of a lifetime.
type advertiser struct {
	t        *testing.T
	injector *packet.Injector
	source   netip.Addr
	stop     func()
}

var allNodes = netip.MustParseAddr("ff02::1")

func (r *router) advertise(t *testing.T, lifetime time.Duration) *advertiser {
	t.Helper()
	i, err := packet.NewInjector(r.ns, "lan")
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	a := &advertiser{t, i, r.linkLocal(t), sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})}
	t.Cleanup(func() {
		a.stop()
		i.Close()
	})
	running.Go(func() {
		tick := time.NewTicker(lifetime / 6)
		defer tick.Stop()
		for ctx.Err() == nil {
			a.say(lifetime)
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	return a
}

// say sends one advertisement (RFC 4861 §4.2).
func (a *advertiser) say(lifetime time.Duration) {
	rest := [4]byte{0: 64} // hop limit
	binary.BigEndian.PutUint16(rest[2:], uint16(lifetime.Seconds()))
	payload := append(make([]byte, 8), 1, 1) // no reachable and retrans times; source link-layer address
	p := packet.Packet{
		Source: a.source, Destination: allNodes, HopLimit: 255,
		Body: packet.ICMP{Type: packet.RouterAdvertisement, Rest: rest, Payload: append(payload, a.injector.MAC()...)},
	}
	if err := a.injector.Send(p.Frame(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, a.injector.MAC())); err != nil {
		a.t.Error(err)
	}
}

func (r *router) linkLocal(t *testing.T) netip.Addr {
	t.Helper()
	all, err := netns.List(func() ([]netlink.Addr, error) { return r.AddrList(r.link(t, "lan"), unix.AF_INET6) })
	must(t, err)
	for _, a := range all {
		if a.Scope == int(netlink.SCOPE_LINK) {
			address, _ := netip.AddrFromSlice(a.IP)
			return address
		}
	}
	t.Fatalf("%s has no link-local address", r.name)
	return netip.Addr{}
}

// TestAdvertisedRoute: a node keeps its default route while it receives router advertisements. It switches to another
// router when the first router advertises lifetime 0, and, in the long run, when the first router fails.
func TestAdvertisedRoute(t *testing.T) {
	t.Parallel()
	lifetime := 3 * time.Second
	if long() {
		lifetime = 30 * time.Second
	}
	f, all := start(t, 1)
	r1, r2 := &f.routers[0], &f.routers[1]
	f.node.sysctl(t, "conf/"+lab.Uplink+"/accept_ra", "1")
	first := r1.advertise(t, lifetime)
	settle(t, all)
	route, err := f.lab.Output(t.Context(), "n1", "ip", "-6", "route", "show", "default")
	if err != nil || !strings.Contains(route, "proto ra") || !strings.Contains(route, "expires") {
		t.Fatalf("no default route from advertisements: %q, %v", route, err)
	}
	since := time.Now()
	for time.Since(since) < 2*lifetime {
		all[0].flowsCalmly(t)
	}

	second := r2.advertise(t, lifetime)
	first.stop()
	since = time.Now()
	first.say(0)
	overcome(t, all, "the router advertises lifetime 0", since, hopLife)
	if on := f.paths(t, all); on[flow{all[0].source, 0}] != r2.name {
		t.Errorf("after the router advertised lifetime 0: %v", on)
	}

	if !long() {
		return
	}
	first = r1.advertise(t, lifetime)
	dying, advertiser := r2, second
	if on := f.paths(t, all); on[flow{all[0].source, 0}] == r1.name {
		dying, advertiser = r1, first
	}
	since = time.Now()
	advertiser.stop()
	f.dies(t, dying)
	if losers := overcome(t, all, "the advertised router failed", since, nud+hopLife); len(losers) != flows {
		t.Errorf("the advertised router failed: only %d flows lost packets, so it was not their router", len(losers))
	}
}
