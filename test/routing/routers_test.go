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

// What the node's kernel takes to give a router up: it believes an answer for reachable, longer by up to a
// half; then the next packet sent through the neighbour table, at most a hop's life later, starts the
// delay, and the probes follow.
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

const flows = 8 // of each container

func long() bool { return os.Getenv("PILASTER_ROUTING_LONG") != "" }

// start makes containers and has each send to the far one.
func start(t *testing.T, containers int) (f *fabric, all []*traffic) {
	t.Helper()
	f = newFabric(t, containers)
	for i := range containers {
		all = append(all, startTraffic(t, f.lab, fmt.Sprint("c", i), "far", firstListener+i, flows))
	}
	return f, all
}

// settle waits until every flow delivers, and whatever was believed of next hops before is believed no longer.
func settle(t *testing.T, all []*traffic) {
	t.Helper()
	now := time.Now()
	for _, s := range all {
		s.delivers(t, now.Add(calm), calm+slack)
	}
}

// overcome is overcomes for all traffic.
func overcome(t *testing.T, all []*traffic, event string, since time.Time, most time.Duration) map[flow]bool {
	t.Helper()
	losers := map[flow]bool{}
	for _, s := range all {
		maps.Copy(losers, s.overcomes(t, event, since, most))
	}
	return losers
}

// death is a router that dies, with the routes of the node before and, where a routing daemon notices it, after.
type death struct {
	name          string
	before, after string
	most          time.Duration
	long          bool // only in the long run
}

// TestDeadEqualRouter: flows spread over equal routers, each on one of them. When a router dies, those on the
// other lose nothing, and its own go on over the other as soon as the kernel has noticed, or was notified.
func TestDeadEqualRouter(t *testing.T) {
	t.Parallel()
	const equal = "-6 route add default nexthop via R1 nexthop via R2"
	const group = "nexthop add id 1 via R1; nexthop add id 2 via R2; nexthop add id 3 group 1/2; -6 route add " +
		"default nhid 3"
	f, all := start(t, 3)
	for _, d := range []death{
		{"one of two equal routers died", equal, "", nud + hopLife, false},
		{"one of a group of routers died", group, "", nud + hopLife, true},
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
			t.Errorf("%s: before that, flows did not spread over both: %v", d.name, on)
		}
	}
}

// TestDeadBetterRouter: all flows are on one router, and go on over another when it dies.
func TestDeadBetterRouter(t *testing.T) {
	t.Parallel()
	const better = "-6 route add default via R1 metric 100; -6 route add default via R2 metric 200"
	f, all := start(t, 1)
	for _, d := range []death{
		{"the better of two routers died", better, "", nud + hopLife, false},
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

// TestMovedRouter: a router gets another MAC. Where it says so, its packets are lost for as long as a next hop is
// believed; where it does not, until the kernel has given the old MAC up and asked anew.
func TestMovedRouter(t *testing.T) {
	t.Parallel()
	f, all := start(t, 1)
	r1 := &f.routers[0]
	f.ip(t, "-6 route add default via R1")
	for i, c := range []struct {
		event, notify string
		most          time.Duration
	}{
		{"the router has another MAC and says so", "1", hopLife},
		{"the router has another MAC and does not say so", "0", nud + hopLife + probes*retrans},
	} {
		f.paths(t, all)
		r1.sysctl(t, "conf/lan/ndisc_notify", c.notify)
		since := time.Now()
		retry(t, func() error {
			return r1.LinkSetHardwareAddr(r1.link(t, "lan"), net.HardwareAddr{2, 0, 0, 0, 0, byte(i + 1)})
		})
		losers := overcome(t, all, c.event, since, c.most)
		if c.notify == "0" && len(losers) != flows {
			t.Errorf("%s: only %d flows lost something: it did not move", c.event, len(losers))
		}
	}
}

// of lets r1 die and come back, and says on which router each flow was before.
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
		// A sender that is notified at once may have lost nothing.
		if router != r1.name && losers[at] || router == r1.name && !losers[at] && d.after == "" {
			t.Errorf("%s: %v was on %s; that it lost something: %v", d.name, at, router, losers[at])
		}
	}
	f.returns(t, r1)
	return on
}

// paths looks on which router each flow is, which must be the same one for a while.
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
				t.Fatalf("%v takes %s and %s", at, other, name)
			}
			on[at] = name
		}
	}
	if want := len(all) * flows; len(on) != want {
		t.Fatalf("routers have seen %d flows, want %d", len(on), want)
	}
	return on
}

// sentinel sends a frame to a router, which shows that all before it have come.
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
