package control

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/endpoint"
)

// A stream that starts right after Register needs no second registration, unless the node has more or different state
// to register by then.
func TestReachRegistersWhatIsNew(t *testing.T) {
	holding := func(n int) func() []endpoint.Record {
		var has []endpoint.Record
		for i := range n {
			a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
			has = append(
				has,
				endpoint.Record{
					ContainerID: fmt.Sprint("c", i),
					Interface:   "eth0",
					Tenant:      "green",
					Attachments: []endpoint.Attachment{{Address: a}},
				},
			)
		}
		return func() []endpoint.Record { return has }
	}
	uplinks := func(a string, err error) func() ([]netip.Addr, error) {
		return func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr(a)}, err }
	}
	for _, c := range []struct {
		name   string
		holds  int                            // at Register
		change func(t *testing.T, b *linkBed) // after it
		more   int                            // registrations for the stream
		fails  bool
	}{
		{"nothing new", 0, func(*testing.T, *linkBed) {}, 0, false},
		{"as many endpoints", 3, func(*testing.T, *linkBed) {}, 0, false},
		{"another endpoint", 3, func(t *testing.T, b *linkBed) { b.link.config.Endpoints = holding(4) }, 1, false},
		{"an endpoint less", 3, func(t *testing.T, b *linkBed) { b.link.config.Endpoints = holding(2) }, 1, false},
		{"more than a page", heldPage + 1, func(*testing.T, *linkBed) {}, 2, false},
		{"another uplink", 0, func(t *testing.T,
			b *linkBed) {
			b.link.config.UplinkAddresses = uplinks("2001:db8::3", nil)
		}, 1, false},
		{"a gateway", 0, func(t *testing.T, b *linkBed) { b.link.config.Gateway = func() bool { return true } }, 1,
			false},
		{"policies enforced", 0, func(t *testing.T, b *linkBed) {
			b.link.config.Enforces = func() []string { return []string{"netpila"} }
		}, 1, false},
		{"offloads possible", 0, func(t *testing.T, b *linkBed) {
			b.link.config.Offloads = func() bool { return true }
		}, 1, false},
		{"no uplink", 0, func(t *testing.T, b *linkBed) {
			b.link.config.UplinkAddresses = uplinks("::", errors.New("there is none"))
		}, 0, true},
		{"the second stream", 0, func(t *testing.T, b *linkBed) {
			if _, err := b.link.registeredClient(t.Context()); err != nil {
				t.Error(err)
			}
		}, 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := newLinkBed(t)
			b.link.config.Endpoints = holding(c.holds)
			if err := b.link.Register(t.Context()); err != nil {
				t.Fatal(err)
			}
			c.change(t, b)
			before := len(b.cluster.registered)
			client, err := b.link.registeredClient(t.Context())
			if n := len(b.cluster.registered) - before; n != c.more || (err != nil) != c.fails ||
				(client == nil) != c.fails {
				t.Errorf("%d registrations and %v; want %d", n, err, c.more)
			}
		})
	}
	b := newLinkBed(t)
	if _, err := b.link.registeredClient(t.Context()); err != nil || len(b.cluster.registered) != 1 {
		t.Errorf("of a node that has not registered: %d registrations, %v", len(b.cluster.registered), err)
	}
}

// New uplink addresses are registered while the stream continues. If the registration is refused, the stream restarts.
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
	defer b.run(agenttest.New(t))()
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

// TestRegistersForOffloads: the orchestrator chooses backends and frontends by what nodes register.
func TestRegistersForOffloads(t *testing.T) {
	b := newLinkBed(t)
	b.link.config.Offloads = func() bool { return true }
	b.link.config.MTUReserve, b.link.config.Rack = 104, "r1"
	if err := b.link.Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := b.cluster.registered[0]; !r.Offloads || r.MtuReserve != 104 || r.Rack != "r1" {
		t.Errorf("registered %v", r)
	}
}
