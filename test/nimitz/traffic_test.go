// Package nimitz_test tests tenants of network nimitz in labs, with the real daemons: the reachability of containers,
// and the packets on the wire (NIMITZ §3.1).
package nimitz_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	own4 = netip.MustParsePrefix("10.1.0.0/16")
	own6 = netip.MustParsePrefix("fd12:1::/48")
)

// overlapping returns a lab with three tenants of a network that have the same addresses, one of them without node
// CIDRs, and a tenant of netpila.
func overlapping(network string) lab.Spec {
	spec := lab.Spec{
		Nodes: []string{"n1", "n2"},
		Tenants: []lab.Tenant{
			{Name: "green", Network: network, CIDRs: []netip.Prefix{own4, own6}},
			{Name: "gold", Network: network, CIDRs: []netip.Prefix{own4, own6}},
			{Name: "grey", Network: network, CIDRs: []netip.Prefix{own4, own6}, NoNodeCIDRs: true},
			{Name: "blue"},
		},
	}
	for _, t := range spec.Tenants {
		for _, at := range []struct{ name, node string }{{"1", "n1"}, {"2", "n1"}, {"3", "n2"}} {
			spec.Containers = append(spec.Containers,
				lab.Container{Name: t.Name + at.name, Node: at.node, Tenant: t.Name})
		}
	}
	return spec
}

// pairs are the switches of two nodes: the same switch on both nodes, or different switches.
var pairs = [][2]string{{lab.EBPF, lab.EBPF}, {lab.OVS, lab.OVS}, {lab.EBPF, lab.OVS}, {lab.OVS, lab.EBPF}}

// onEach runs a test with each of pairs.
func onEach(t *testing.T, test func(*testing.T, *lab.Lab)) {
	for _, on := range pairs {
		t.Run(on[0]+"-"+on[1], func(t *testing.T) {
			t.Parallel() // most of the time it waits
			spec := overlapping(tenant.Nimitz)
			spec.Name = fmt.Sprintf("t%s-%s-%d", on[0], on[1], os.Getpid())
			spec.Switches = lab.Switches{"n1": on[0], "n2": on[1]}
			l := labtest.New(t, spec)
			switches(t, l, spec.Switches)
			test(t, l)
		})
	}
}

// switches checks that the nodes run the expected switches.
func switches(t *testing.T, l *lab.Lab, on lab.Switches) {
	t.Helper()
	all, err := l.Processes(labtest.Context(t))
	must(t, err)
	for node, is := range on {
		runs := slices.ContainsFunc(all, func(p lab.ProcessState) bool { return p.Name == lab.OVSProcess(node) })
		if runs != (is == lab.OVS) {
			t.Errorf("%s should have %s; Open vSwitch runs there: %v", node, is, runs)
		}
	}
}

// sent is one echo request with a unique payload.
type sent struct {
	from, to lab.ContainerStatus
	address  netip.Addr
	answered bool
}

// TestSwitches has one lab for each pair of switches, shared by tests that do not modify it.
func TestSwitches(t *testing.T) {
	onEach(t, func(t *testing.T, l *lab.Lab) {
		t.Run("wire", func(t *testing.T) { onTheWire(t, l) })
		t.Run("east-west", func(t *testing.T) { eastWest(t, l) })
		t.Run("transfers", func(t *testing.T) { transfers(t, l, streams) })
	})
}

// streams are pairs of containers on one node, and on two nodes.
var streams = [][2]string{{"green1", "green2"}, {"green1", "green3"}, {"grey3", "grey1"}}

// TestEVPN: network evpn, which has the programs of network nimitz and tunnels over IPv4, delivers the same packets.
func TestEVPN(t *testing.T) {
	t.Parallel()
	spec := overlapping(tenant.EVPN)
	spec.Name = fmt.Sprintf("tevpn-%d", os.Getpid())
	l := labtest.New(t, spec)
	t.Run("east-west", func(t *testing.T) { eastWest(t, l) })
	t.Run("transfers", func(t *testing.T) { transfers(t, l, streams) })
}

// eastWest sends echo requests from every container to each address of every other container. Containers of the same
// tenant, on the same node (a) and on another node (b), receive them and reply. No container of another tenant receives
// a request, even if it has the same address (NM1).
func eastWest(t *testing.T, l *lab.Lab) {
	ctx := labtest.Context(t)
	captures := map[string]*packet.Capture{}
	for _, c := range l.Containers() {
		ns, err := l.Namespace(c.Name)
		must(t, err)
		defer ns.Close()
		capture, err := packet.NewCapture(ns, lab.Interface, packet.IncomingOnly)
		must(t, err)
		defer capture.Close()
		captures[c.Name] = capture
	}

	echoes := map[packet.Sentinel]*sent{}
	for _, from := range l.Containers() {
		for _, to := range l.Containers() {
			if from.Name == to.Name {
				continue
			}
			for _, a := range to.Addresses() {
				timeout := 50 * time.Millisecond
				if slices.ContainsFunc(l.Containers(), func(c lab.ContainerStatus) bool {
					return c.Tenant == from.Tenant && slices.Contains(c.Addresses(), a)
				}) {
					timeout = 5 * time.Second
				}
				s, answered := echo(ctx, t, l, from.Name, a, timeout)
				echoes[s] = &sent{from, to, a, answered}
			}
		}
	}
	for _, to := range l.Containers() {
		// When this packet has arrived, all earlier packets to the container have arrived or are lost.
		last, _ := echo(ctx, t, l, mate(l, to), to.Address, 5*time.Second)
		seen := until(ctx, t, captures[to.Name], last)
		for s, e := range echoes {
			if e.from.Name == to.Name {
				continue // ignore echo replies
			}
			got := false
			for _, frame := range seen {
				got = got || s.In(frame)
			}
			// The address may also belong to a container of the sender's tenant.
			must := e.from.Tenant == to.Tenant && slices.Contains(to.Addresses(), e.address)
			if got != must || must && !e.answered {
				t.Errorf("%s to %v, as %s has it: %s received it: %v, got a reply: %v", e.from.Name, e.address,
					e.to.Name, to.Name, got, e.answered)
			}
		}
	}
}

// mate returns another container of the same tenant.
func mate(l *lab.Lab, c lab.ContainerStatus) string {
	for _, other := range l.Containers() {
		if other.Tenant == c.Tenant && other.Name != c.Name {
			return other.Name
		}
	}
	panic("a tenant with one container")
}

func echo(ctx context.Context, t *testing.T, l *lab.Lab, from string, to netip.Addr,
	timeout time.Duration) (packet.Sentinel, bool) {
	t.Helper()
	ns, err := l.Namespace(from)
	must(t, err)
	defer ns.Close()
	s := packet.NewSentinel()
	r, err := packet.Ping(ctx, ns, to, packet.PingOptions{Timeout: timeout, Payload: s[:]})
	if err != nil && !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH) {
		t.Fatal(err)
	}
	return s, r.Received > 0
}

// until returns the captured packets up to a frame.
func until(ctx context.Context, t *testing.T, c *packet.Capture, last packet.Sentinel) (seen []packet.Captured) {
	t.Helper()
	for {
		frame, err := c.Next(ctx)
		must(t, err)
		if last.In(frame) {
			return seen
		}
		seen = append(seen, frame)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
