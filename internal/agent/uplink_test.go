package agent

import (
	"errors"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/vishvananda/netlink"
)

// A node that has just booted still probes its addresses, and says them all the same.
func TestUplinkAddresses(t *testing.T) {
	ns := newNetns(t)
	node, err := OpenNode(t.TempDir(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{Options: Options{Uplink: "eth0"}, node: node}
	var got []netip.Addr
	err = ns.Do(func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		for _, text := range []string{"fe80::2/64", "2001:db8::2/64"} {
			a, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(veth, a); err != nil { // tentative while the link is down
				return err
			}
		}
		var err error
		got, err = d.uplinkAddresses()
		return err
	})
	if want := []netip.Addr{netip.MustParseAddr("2001:db8::2"), netip.MustParseAddr("fe80::2")}; err != nil ||
		!slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
}

// Other addresses are registered while the stream goes on; where that is refused the stream is begun anew.
func TestOtherUplinkAddressesAreRegistered(t *testing.T) {
	b := newLinkBed(t)
	var has atomic.Pointer[netip.Addr]
	become := func(text string) { a := netip.MustParseAddr(text); has.Store(&a) }
	changed := make(chan struct{})
	b.link.config.AddressesChanged = changed
	b.link.config.UplinkAddresses = func() ([]netip.Addr, error) { return []netip.Addr{*has.Load()}, nil }
	registered := func(n int) (all []string) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			b.cluster.mu.Lock()
			requests := b.cluster.registered
			b.cluster.mu.Unlock()
			if len(requests) < n && time.Now().Before(end) {
				continue
			}
			for _, r := range requests {
				all = append(all, r.UplinkAddresses...)
			}
			return all
		}
	}
	become("2001:db8::2")
	defer b.run(newBed(t))()
	<-b.cluster.hosted
	changed <- struct{}{} // something else on this node
	changed <- struct{}{} // received when the first was processed
	become("2001:db8::3")
	changed <- struct{}{}
	want := []string{"2001:db8::2", "2001:db8::3"}
	if got := registered(2); !slices.Equal(got, want) {
		t.Fatalf("registered with %v, want %v", got, want)
	}
	if len(b.waits) != 0 {
		t.Error("the stream was begun anew")
	}
	b.cluster.mu.Lock()
	b.cluster.refusals = []error{connect.NewError(connect.CodeUnavailable, errors.New("no leader"))}
	b.cluster.mu.Unlock()
	become("2001:db8::4")
	changed <- struct{}{}
	<-b.waits
	<-b.cluster.hosted
	want = append(want, "2001:db8::4", "2001:db8::4")
	if got := registered(4); !slices.Equal(got, want) {
		t.Errorf("registered with %v, want %v", got, want)
	}
}
