package nimitz_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/tenant"
)

// TestOpenVSwitchAgain kills ovs-vswitchd, which loses its flows. The running agent must install all flows in the new
// process. The node's programs must not count packets for the switch as drops.
func TestOpenVSwitchAgain(t *testing.T) {
	spec := overlapping(tenant.Nimitz)
	spec.Nimitz, spec.Tenants = lab.OVS, []lab.Tenant{{Name: "green", Network: tenant.Nimitz,
		CIDRs: spec.Tenants[0].CIDRs}}
	spec.Containers = spec.Containers[:3]
	l := labtest.New(t, spec)
	ctx := labtest.Context(t)
	file := filepath.Join(l.OVS("n1"), "ovs-vswitchd.pid")
	before := daemon(t, file)
	reaches := func() bool {
		for _, to := range []string{"green2", "green3"} {
			c, err := l.Container(to)
			must(t, err)
			for _, a := range c.Addresses() {
				if _, answered := echo(ctx, t, l, "green1", a, time.Second); !answered {
					return false
				}
			}
		}
		return true
	}
	if !reaches() {
		t.Fatal("green1 cannot reach the other containers")
	}
	must(t, unix.Kill(before, unix.SIGKILL))
	for daemon(t, file) == before {
		pause(ctx, t)
	}
	for !reaches() {
		pause(ctx, t)
	}
	unrouted(ctx, t, l)
	drops, err := l.Drops(ctx, "n1")
	must(t, err)
	for why, n := range drops {
		// The containers' kernels send neighbour and multicast packets.
		if n > 0 && why != "multicast" && why != "mld-ignored" {
			t.Errorf("the node's programs dropped %d packets of reason %s", n, why)
		}
	}
}

// unrouted restarts an agent, and fails if the agent writes a route: after each change of a route, Open vSwitch reads
// all routes again, and meanwhile has no routes for its tunnels.
func unrouted(ctx context.Context, t *testing.T, l *lab.Lab) {
	t.Helper()
	ns, err := l.Namespace("n1")
	must(t, err)
	defer ns.Close()
	changes, done := make(chan netlink.RouteUpdate, 100), make(chan struct{})
	defer close(done)
	must(t, ns.Do(func() error { return netlink.RouteSubscribe(changes, done) }))
	_, err = l.Kill(ctx, lab.AgentProcess("n1"))
	must(t, err)
	_, mark, err := net.ParseCIDR("2001:db8:ffff::/64")
	must(t, err)
	h, err := ns.Netlink()
	must(t, err)
	defer h.Close()
	must(t, h.RouteAdd(&netlink.Route{LinkIndex: 1, Dst: mark}))
	for {
		select {
		case c := <-changes:
			if c.Dst != nil && c.Dst.String() == mark.String() {
				return
			}
			t.Errorf("the restarted agent wrote route %v", c.Route)
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
		}
	}
}

// daemon reads a pid file, and returns 0 if there is none.
func daemon(t *testing.T, file string) int {
	t.Helper()
	text, err := os.ReadFile(file)
	if os.IsNotExist(err) || strings.TrimSpace(string(text)) == "" {
		return 0
	}
	must(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	must(t, err)
	return pid
}

func pause(ctx context.Context, t *testing.T) {
	t.Helper()
	select {
	case <-ctx.Done():
		t.Fatal(context.Cause(ctx))
	case <-time.After(50 * time.Millisecond):
	}
}
