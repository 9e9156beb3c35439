package hostnet

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The packet path gets the node's addresses at the start and after each change, also after a failure, and not again
// without a change.
func TestOwnAddresses(t *testing.T) {
	ns := testNetns(t)
	handle, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	add := func(text string) {
		t.Helper()
		a, err := netlink.ParseAddr(text)
		if err == nil {
			err = handle.AddrReplace(lo, a)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	add("fe80::7/64")
	add("2001:db8::7/128")
	changed, got, ended := make(chan struct{}), make(chan []netip.Addr), make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	fails := true
	go func() {
		ended <- ns.Do(func() error {
			FollowOwnAddresses(ctx, changed, func(own []netip.Addr) error {
				got <- own
				if fails {
					fails = false
					return errors.New("no room")
				}
				return nil
			}, slog.New(slog.DiscardHandler))
			return nil
		})
	}()
	wait := func(want ...string) {
		t.Helper()
		select {
		case own := <-got:
			var all []string
			for _, a := range own {
				all = append(all, a.String())
			}
			if !slices.Equal(all, want) {
				t.Errorf("addresses %v, want %v", all, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("nothing was set, want %v", want)
		}
	}
	wait("2001:db8::7")
	changed <- struct{}{} // the same addresses, after a failure
	wait("2001:db8::7")
	changed <- struct{}{}
	changed <- struct{}{} // it has handled the one before
	add("2001:db8::8/128")
	go func() { // the event before may still be handled, with the new address
		select {
		case changed <- struct{}{}:
		case <-ctx.Done():
		}
	}()
	wait("2001:db8::7", "2001:db8::8")
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The source is that of the route, if it has one.
func TestSourceTo(t *testing.T) {
	ns := testNetns(t)
	handle, err := ns.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := handle.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	own, to := netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("2001:db8:2::1")
	for _, text := range []string{own.String() + "/128", "2001:db8:7::7/64"} {
		a, err := netlink.ParseAddr(text)
		if err == nil {
			a.Flags = unix.IFA_F_NODAD // a route cannot have a tentative address as its source
			err = handle.AddrReplace(lo, a)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	source := func() (a netip.Addr, err error) {
		doErr := ns.Do(func() error { a, err = SourceTo(to); return nil })
		return a, errors.Join(doErr, err)
	}
	if a, err := source(); err == nil {
		t.Errorf("without a route: %v", a)
	}
	route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(48, 128)}}
	route.Dst.IP = route.Dst.IP.Mask(route.Dst.Mask)
	for _, want := range []netip.Addr{own, netip.MustParseAddr("2001:db8:7::7")} {
		route.Src = want.AsSlice()
		if err := handle.RouteReplace(route); err != nil {
			t.Fatal(err)
		}
		if a, err := source(); a != want || err != nil {
			t.Errorf("got %v, %v; want %v", a, err, want)
		}
	}
}
