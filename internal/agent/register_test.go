package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"pilaster.io/pilaster/internal/endpoint"
)

// A stream that begins right after Register needs no registration of its own, unless the node has more or something
// else to say by then.
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
