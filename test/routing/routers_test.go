package routing_test

import (
	"fmt"
	"maps"
	"net"
	"os"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// nud is the time in which the node's kernel detects a failed router. A neighbour entry is reachable for up to 1.5
// times its base time. Then the next packet that uses the neighbour table starts the delay; this is at most the
// lifetime of a cached next hop later. After the delay, the kernel sends the probes.
const (
	hopLife   = time.Second // bpf/net/netpila/flow.h
	reachable = 500 * time.Millisecond
	delay     = time.Second
	probes    = 3
	retrans   = 200 * time.Millisecond

	nud = reachable*3/2 + hopLife + delay + probes*retrans
)

var nudSettings = map[string]string{
	"base_reachable_time_ms": fmt.Sprint(reachable.Milliseconds()),
	"delay_first_probe_time": fmt.Sprint(delay.Seconds()),
	"ucast_solicit":          fmt.Sprint(probes), "retrans_time_ms": fmt.Sprint(retrans.Milliseconds()),
}

const flows = 8 // per container

func long() bool { return os.Getenv("PILASTER_ROUTING_LONG") != "" }

// start creates containers and makes each send to the far one.
func start(t *testing.T, containers int) (f *fabric, all []*traffic) {
	t.Helper()
	f = newFabric(t, containers)
	for i := range containers {
		all = append(all, startTraffic(t, f.lab, fmt.Sprint("c", i), "far", firstListener+i, flows))
	}
	return f, all
}

// settle waits until datagrams of every flow arrive, and until earlier neighbour and next-hop state has expired.
func settle(t *testing.T, all []*traffic) {
	t.Helper()
	now := time.Now()
	for _, s := range all {
		s.delivers(t, now.Add(calm), calm+slack)
	}
}

// overcome calls overcomes for all traffic.
func overcome(t *testing.T, all []*traffic, event string, since time.Time, most time.Duration) map[flow]bool {
	t.Helper()
	losers := map[flow]bool{}
	for _, s := range all {
		maps.Copy(losers, s.overcomes(t, event, since, most))
	}
	return losers
}

// death is a router failure to test. before has the ip commands that create the node's routes. after has the commands
// of a routing daemon that detects the failure; it is empty if there is no such daemon. most is the longest permitted
// outage.
type death struct {
	name          string
	before, after string
	most          time.Duration
	long          bool // only in the long run
}

// TestDeadEqualRouter: with two equal routers, each flow uses one of them. When a router fails, flows of the other
// router lose no datagrams. Flows of the failed router continue over the other router as soon as the kernel has
// detected the failure or a routing daemon has changed the route.
func TestDeadEqualRouter(t *testing.T) {
	t.Parallel()
	const equal = "-6 route add default nexthop via R1 nexthop via R2"
	const group = "nexthop add id 1 via R1; nexthop add id 2 via R2; nexthop add id 3 group 1/2; -6 route add " +
		"default nhid 3"
	f, all := start(t, 3)
	for _, d := range []death{
		{"one of two equal routers failed", equal, "", nud + hopLife, false},
		{"one of a group of routers failed", group, "", nud + hopLife, true},
		{"one of two equal routers was withdrawn", equal, "-6 route replace default via R2", hopLife, true},
	} {
		if d.long && !long() {
			continue
		}
		on := d.of(t, f, all)
		routers, split := map[string]bool{}, false
		for _, s := range all {
			own := map[string]bool{}
			for i := range flows {
				router := on[flow{s.source, i}]
				routers[router], own[router] = true, true
			}
			split = split || len(own) > 1
		}
		if len(routers) != 2 || !split {
			t.Errorf("%s: before that, flows were not distributed over both routers: %v", d.name, on)
		}
	}
}

// TestDeadBetterRouter: all flows use the router with the better metric. When it fails, they continue over the other
// router.
func TestDeadBetterRouter(t *testing.T) {
	t.Parallel()
	const better = "-6 route add default via R1 metric 100; -6 route add default via R2 metric 200"
	f, all := start(t, 1)
	for _, d := range []death{
		{"the better of two routers failed", better, "", nud + hopLife, false},
		{"the better of two routers was withdrawn", better, "-6 route del default via R1", hopLife, false},
	} {
		on := d.of(t, f, all)
		for at, router := range on {
			if router != "r1" {
				t.Errorf("%s: before that, %v was on %s", d.name, at, router)
			}
		}
	}
}

// TestMovedRouter: a router gets another MAC. If the router announces the new MAC, packets are lost for at most the
// lifetime of a cached next hop. Otherwise they are lost until the kernel has detected that the old MAC does not
// respond, and has resolved the new MAC.
func TestMovedRouter(t *testing.T) {
	t.Parallel()
	f, all := start(t, 1)
	r1 := &f.routers[0]
	f.ip(t, "-6 route add default via R1")
	for i, c := range []struct {
		event, notify string
		most          time.Duration
	}{
		{"the router has another MAC and announces it", "1", hopLife},
		{"the router has another MAC and does not announce it", "0", nud + hopLife + probes*retrans},
	} {
		f.paths(t, all)
		r1.sysctl(t, "conf/lan/ndisc_notify", c.notify)
		since := time.Now()
		retry(t, func() error {
			return r1.LinkSetHardwareAddr(r1.link(t, "lan"), net.HardwareAddr{2, 0, 0, 0, 0, byte(i + 1)})
		})
		losers := overcome(t, all, c.event, since, c.most)
		if c.notify == "0" && len(losers) != flows {
			t.Errorf("%s: only %d flows lost packets: the router did not move", c.event, len(losers))
		}
	}
}

// of makes r1 fail and return. It returns the router that each flow used before the failure.
func (d death) of(t *testing.T, f *fabric, all []*traffic) (on map[flow]string) {
	t.Helper()
	r1 := &f.routers[0]
	f.ip(t, flush+"; "+d.before)
	on = f.paths(t, all)
	since := time.Now()
	f.dies(t, r1)
	if d.after != "" {
		f.ip(t, d.after)
	}
	losers := overcome(t, all, d.name, since, d.most)
	for at, router := range on {
		// A sender whose route changes at once may lose nothing.
		if router != r1.name && losers[at] || router == r1.name && !losers[at] && d.after == "" {
			t.Errorf("%s: %v was on %s; lost packets: %v", d.name, at, router, losers[at])
		}
	}
	f.returns(t, r1)
	return on
}

// paths returns the router of each flow, which must not change for a while.
func (f *fabric) paths(t *testing.T, all []*traffic) map[flow]string {
	t.Helper()
	settle(t, all)
	captures := map[string]*packet.Capture{}
	for _, r := range f.routers {
		c, err := packet.NewCapture(r.ns, "lan", packet.IncomingOnly)
		must(t, err)
		defer c.Close()
		captures[r.name] = c
	}
	for _, s := range all {
		s.flowsCalmly(t)
	}
	on := map[flow]string{}
	for name, c := range captures {
		frames, err := c.Until(labtest.Context(t), f.sentinel(t, name))
		must(t, err)
		for _, frame := range frames {
			p, err := frame.Packet()
			u, is := p.Body.(packet.UDP)
			if err != nil || !is {
				continue
			}
			at := flow{p.Source, int(u.SourcePort) - firstPort}
			if other, seen := on[at]; seen && other != name {
				t.Fatalf("%v uses both %s and %s", at, other, name)
			}
			on[at] = name
		}
	}
	if want := len(all) * flows; len(on) != want {
		t.Fatalf("routers have seen %d flows, want %d", len(on), want)
	}
	return on
}

// sentinel sends a frame to a router. When the frame has arrived, all earlier frames have arrived.
func (f *fabric) sentinel(t *testing.T, router string) func(packet.Captured) bool {
	t.Helper()
	i, err := packet.NewInjector(f.wire.ns, router)
	must(t, err)
	defer i.Close()
	s := packet.NewSentinel()
	const experimental = 0x88b5 // IEEE 802
	must(t, i.Send(packet.Frame(net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, i.MAC(), experimental, s[:])))
	return s.In
}
