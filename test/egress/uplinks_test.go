package egress_test

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// TestTwoUplinks: packets to other nodes leave by one uplink and those to hosts outside by the other, as the node's
// routes say. All other tests of this package run with two uplinks if PILASTER_TEST_UPLINKS is 2.
func TestTwoUplinks(t *testing.T) {
	s := spec()
	s.Uplinks = 2
	b := newBed(t, s)
	ctx := labtest.Context(t)
	for name := range tenants {
		b.allow(ctx, name, everywhere)
	}
	internet := b.address("internet")
	for _, container := range tenants {
		b.reaches(container, internet)
		b.leavesBy(container, internet, lab.SecondUplink)
	}
	b.leavesBy("b1", b.address("b2"), lab.Uplink)
	b.leavesBy("g1", b.address("g2"), lab.Uplink)
	b.inbound()

	for name := range tenants {
		b.allow(ctx, name, everywhere, "n3")
	}
	for _, container := range tenants {
		labtest.Until(t, patience, "packets leave by the gateway", func() bool {
			seen := b.reaches(container, internet)
			n3, err := b.Prefix("n3")
			return err == nil && n3.Contains(seen)
		})
		b.leavesBy(container, internet, lab.Uplink)
	}

	status, err := b.Output(ctx, "n1", "pilaster", "status")
	if err != nil || !strings.Contains(status, "on eth0, eth1, ") {
		t.Errorf("status: %s, %v", status, err)
	}
}

// leavesBy sends a datagram and checks by which of its uplinks n1 sends it.
func (b bed) leavesBy(container string, to netip.Addr, uplink string) {
	b.Helper()
	router, err := b.Namespace(lab.Router)
	must(b.T, err)
	defer router.Close()
	link := map[string]string{lab.Uplink: "n1", lab.SecondUplink: b.RouterLink("n1")}[uplink]
	capture, err := packet.NewCapture(router, link, packet.IncomingOnly)
	must(b.T, err)
	defer capture.Close()
	sentinel := packet.NewSentinel()
	must(b.T, <-labtest.RunIn(b.T, b.Lab, container, func() error {
		c, err := net.Dial("udp6", netip.AddrPortFrom(to, echoPort).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(sentinel[:])
		return err
	}))
	if _, err := capture.Until(labtest.Context(b.T), sentinel.In); err != nil {
		b.Fatalf("%s to %v: no packet left by %s: %v", container, to, uplink, err)
	}
}
