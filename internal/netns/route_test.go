package netns_test

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// PutRoute writes a route if there is none or a different one, and writes nothing if the same route exists.
func TestPutRoute(t *testing.T) {
	ns := create(t, "ns")
	h, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	changes, done := make(chan netlink.RouteUpdate, 100), make(chan struct{})
	defer close(done)
	if err := ns.Do(func() error { return netlink.RouteSubscribe(changes, done) }); err != nil {
		t.Fatal(err)
	}
	_, guarded, _ := net.ParseCIDR("fc00::/8")
	_, led, _ := net.ParseCIDR("2001:db8::/64")
	guard := netlink.Route{Dst: guarded, Type: unix.RTN_UNREACHABLE, Protocol: unix.RTPROT_STATIC, Priority: 4096}
	plain := netlink.Route{Dst: led, LinkIndex: 1}
	narrow := plain
	narrow.MTU = 1280
	for _, r := range []netlink.Route{guard, guard, plain, plain, narrow, narrow, plain} {
		if err := netns.PutRoute(h, &r); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []netlink.Route{guard, plain, narrow, plain} {
		if got := <-changes; got.Dst.String() != want.Dst.String() || got.MTU != want.MTU {
			t.Errorf("wrote %v, want %v", got.Route, want)
		}
	}
	if len(changes) > 0 {
		t.Errorf("wrote %v too", (<-changes).Route)
	}
}

// DeleteRoute reports a missing route only after the kernel has reported it several times.
func TestDeleteRoute(t *testing.T) {
	for _, c := range []struct {
		answers []error
		want    error
	}{
		{[]error{nil}, nil},
		{[]error{unix.ESRCH, nil}, nil},
		{[]error{unix.ESRCH, unix.EINTR, unix.ESRCH, nil}, nil},
		{[]error{unix.ESRCH, unix.ESRCH, unix.ESRCH}, unix.ESRCH},
		{[]error{unix.EPERM}, unix.EPERM},
	} {
		asked := 0
		err := netns.RetryDelete(func() error { asked++; return c.answers[asked-1] })
		if err != c.want || asked != len(c.answers) {
			t.Errorf("%v: %d attempts, got %v", c.answers, asked, err)
		}
	}
}
